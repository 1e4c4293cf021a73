"""What a sweep varies: config fields and their values, and the run that each combination of values is."""

import dataclasses
import itertools
import pathlib
import runpy

from ml_collections import ConfigDict

from prope.config import flat
from prope.errors import UsageError, nearest
from prope.runtime.validate import validate

P = "model.rope_percentage"
CONFIG = "config"  # an axis whose values are config files


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run that the sweep is to make."""

    name: str
    values: dict
    config: ConfigDict
    arguments: list[str]  # of prope.train, without --workdir


def read_grid(texts: list[str], percentages: str | None, file: str, base: ConfigDict, overrides: dict) -> dict:
    """The values of every field that is swept, {"model.rope_percentage": (0.0, 0.25)}: from flags, or the config file.

    Raises:
      UsageError: there is nothing to sweep, no such field, a value of another type, or one twice.
    """
    given = [("--grid", text) for text in texts]
    if percentages is not None:
        given.insert(0, ("--rope_percentage", f"{P}={percentages}"))
    grid: dict[str, list] = {}
    known = flat(base)
    for flag, text in given:
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"{flag} {text}: must be a field and its values, such as seed=0,1,2")
        if name in grid:
            raise UsageError(f"{flag} {text}: {name} is given twice; give all its values at once")
        grid[name] = [value.strip() for value in values.split(",") if value.strip()]
    where = "--grid"
    if not given:
        path, _, argument = file.partition(":")
        get_sweep = runpy.run_path(path).get("get_sweep")
        if get_sweep is None:
            raise UsageError(
                f"--config={file}: has no get_sweep(), so say what to sweep: --rope_percentage=0,0.25,0.5,0.75,1 or "
                "--grid=FIELD=VALUE,VALUE"
            )
        where = f"get_sweep() of {path}:"
        grid = {name: list(values) for name, values in get_sweep(*([argument] if argument else [])).items()}
    for name, values in grid.items():
        if name != CONFIG and name not in known:
            raise UsageError(f"{where} {name}: there is no such config field{nearest(name, known)}")
        if name in overrides:
            raise UsageError(f"--config.{name}={overrides[name]}: {name} is swept; give it here or in the grid")
        if not values:
            raise UsageError(f"{where} {name}=: names no values; write {name}=VALUE,VALUE")
        grid[name] = [value if name == CONFIG else convert(name, value, base) for value in values]
        for value in grid[name]:
            if grid[name].count(value) > 1:
                raise UsageError(f"{where} {name}: the value {text_of(value)} is given twice; remove one")
    return grid


def convert(name: str, value, base: ConfigDict):
    """A value of a field, from a text or a number, in the field's own type."""
    *outer, last = name.split(".")
    kind = (base[outer[0]] if outer else base).get_type(last)
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind in (int, float, str):
            return kind(str(value))
    except (KeyError, ValueError):
        pass
    allowed = "only numbers, texts and booleans can be swept" if kind not in (bool, int, float, str) else "not a value"
    raise UsageError(f"--grid {name}: {value}: {allowed} (its type is {kind.__name__})")


def text_of(value) -> str:
    """A value as it stands in a name and on a command line: 0.25, and 1 for 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value + 0.0).removesuffix(".0") if isinstance(value, float) else str(value)


def plan(grid: dict, file: str, base: ConfigDict, overrides: dict) -> list[Planned]:
    """The runs, the first field of the grid changing slowest; every config is checked.

    A run's name is made of its values alone, sorted by field: rope_percentage=0.25,seed=0.

    Raises:
      UsageError: a value that the config refuses, or two runs of one name.
    """
    last = [name.rpartition(".")[2] for name in grid]
    labels = {name: short if last.count(short) == 1 else name for name, short in zip(grid, last, strict=True)}
    runs = []
    for combination in itertools.product(*grid.values()):
        fields = dict(zip(grid, combination, strict=True))
        run_file = fields.pop(CONFIG, file)
        config = base.copy_and_resolve_references() if run_file == file else load(run_file, overrides)
        config.update_from_flattened_dict(fields)
        validate(config)
        values = {labels[name]: value for name, value in fields.items()}
        if CONFIG in grid:
            path, _, argument = run_file.partition(":")
            values = {CONFIG: pathlib.Path(path).stem + (f"_{argument}" if argument else ""), **values}
        name = ",".join(f"{label}={text_of(value)}" for label, value in sorted(values.items())).replace("/", "_")
        given = [f"--config.{name}={text_of(value)}" for name, value in (overrides | fields).items()]
        runs.append(Planned(name, values, config, [f"--config={run_file}", *given]))
    names = [run.name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two runs would be called {twice[0]}; give one of them another value")
    return runs


def load(file: str, overrides: dict) -> ConfigDict:
    """The config of a file, with overrides of its fields."""
    path, _, argument = file.partition(":")
    if not pathlib.Path(path).is_file():
        raise UsageError(f"--grid {CONFIG}={file}: there is no such file; the project's own are in configs/")
    config = runpy.run_path(path)["get_config"](*([argument] if argument else []))
    config.update_from_flattened_dict(overrides)
    return config

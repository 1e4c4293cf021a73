"""The grid of a sweep: config fields, their values, and the run of each combination of values."""

import collections
import itertools
import pathlib
import runpy
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from prope.config import as_given, describe_unknown, python_file, resolve
from prope.errors import UsageError, usage_error
from prope.spec.run import FIELDS, Spec

P = "model.rope_percentage"
CONFIG = "config"  # swept like a field; its values are config files


class Planned(NamedTuple):
    """A run of the grid; `arguments` are those of prope.train without --workdir."""

    name: str
    values: dict
    spec: Spec
    arguments: list[str]


def read_grids(
    texts: list[str], percentages: str | None, file: str, base: ConfigDict, overrides: dict
) -> list[dict]:
    """Reads the swept values, {"model.rope_percentage": [0.0, 0.25]}, of flags or else of the file.

    The file's get_sweep() may return several grids: the sweep has the runs of all of them.
    """
    where = "--grid"
    grids = [_read_flags(texts, percentages)]
    if grids == [{}]:
        where = f"get_sweep() of {as_given(file).partition(':')[0]}:"
        swept = _call(file, "get_sweep")
        if swept is None:
            remedy = "say what to sweep: --rope_percentage=0,0.25,0.5,0.75,1 or --grid=seed=0,1,2"
            raise usage_error("--config", as_given(file), "has no get_sweep()", remedy)
        grids = [swept] if isinstance(swept, dict) else swept
    for grid in grids:
        for name in grid:
            if name != CONFIG and name not in FIELDS:
                raise UsageError(f"{where} {name}: {describe_unknown(name)}")
            if name in overrides:
                remedy = "give it here or in the grid"
                raise usage_error(f"--config.{name}", overrides[name], "is swept", remedy)
    return [
        {name: _convert_all(f"{where} {name}", name, grid[name], base) for name in grid}
        for grid in grids
    ]


def _read_flags(texts: list[str], percentages: str | None) -> dict[str, list[str]]:
    """Reads the fields and values of --rope_percentage and --grid."""
    if percentages is not None:
        texts = [f"{P}={percentages}", *texts]
    grid = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            remedy = "write a field and its values, such as seed=0,1,2"
            raise usage_error("--grid", text, "has no values", remedy)
        if name in grid:
            raise usage_error(
                "--grid", text, f"{name} is given twice", "give all its values at once"
            )
        grid[name] = [value.strip() for value in values.split(",") if value.strip()]
    return grid


def _convert_all(field: str, name: str, values, base: ConfigDict) -> list:
    """Converts the values of a swept field, which must be different, to its type."""
    if not values:
        raise usage_error(field, "", "names no values", "write FIELD=VALUE,VALUE")
    converted = []
    for value in values:
        value = value if name == CONFIG else _convert(field, name, value, base)
        if value in converted:
            raise usage_error(field, text_of(value), "is given twice", "remove one")
        converted.append(value)
    return converted


PARSERS = {bool: flags.BooleanParser().parse, int: int, float: float, str: str}


def _convert(field: str, name: str, value, base: ConfigDict):
    """Converts a text or a number to the type of a field."""
    group, _, last = name.rpartition(".")
    kind = (base[group] if group else base).get_type(last)
    try:
        return PARSERS[kind](str(value))
    except KeyError:
        problem = f"its type is {kind.__name__}: only numbers, texts and booleans can be swept"
    except ValueError:
        problem = f"not a value (its type is {kind.__name__})"
    raise usage_error(field, value, problem)


def text_of(value) -> str:
    """Formats a value for run names and command lines: 0.25, and 1 for 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value + 0.0).removesuffix(".0")  # + 0.0: no -0
    return str(value)


def plan(
    grids: list[dict], file: str, base: ConfigDict, overrides: dict, init_from: str | None = None
) -> list[Planned]:
    """Lists the runs, the first field of a grid changing slowest, and validates their configs.

    A run's name depends on its values alone, sorted by field: rope_percentage=0.25,seed=0. All
    begin from the parameters of the run `init_from`, if there is one, in which {seed} becomes the
    run's own seed.
    """
    short_names = _short_names(grids)
    runs = []
    for grid in grids:
        for values in itertools.product(*grid.values()):
            fields = dict(zip(grid, values, strict=True))
            run = _plan_run(fields, short_names, file, base, overrides)
            if init_from is not None:
                source = init_from.replace("{seed}", str(run.spec.seed))
                run.arguments.append(f"--init_from={source}")
            if run.name in [other.name for other in runs]:
                text = f"two runs would be called {run.name}; give one of them another value"
                raise UsageError(text)
            runs.append(run)
    return runs


def _short_names(grids: list[dict]) -> dict[str, str]:
    """Shortens the swept fields to their last part, where that names one field alone."""
    names = {name for grid in grids for name in grid}
    last_parts = {name: name.rpartition(".")[2] for name in names}
    counts = collections.Counter(last_parts.values())
    return {name: last if counts[last] == 1 else name for name, last in last_parts.items()}


def _plan_run(
    fields: dict, short_names: dict[str, str], file: str, base: ConfigDict, overrides: dict
) -> Planned:
    """Names a run and makes its config and its arguments."""
    run_file = fields.pop(CONFIG, file)
    config = base.copy_and_resolve_references() if run_file == file else _load(run_file, overrides)
    config.update_from_flattened_dict(fields)
    values = {short_names[name]: value for name, value in fields.items()}
    if CONFIG in short_names:
        values = {CONFIG: _config_name(run_file), **values}
    texts = [f"{name}={text_of(value)}" for name, value in sorted(values.items())]
    arguments = [f"--config={as_given(run_file)}"]
    for name, value in (overrides | fields).items():
        arguments.append(f"--config.{name}={text_of(value)}")
    return Planned(",".join(texts).replace("/", "_"), values, resolve(config), arguments)


def _config_name(file: str) -> str:
    """Names a config file by its argument, such as a method; by its stem without one, or a size.

    A config.json has the name of its run.
    """
    path, _, argument = file.partition(":")
    stem = pathlib.Path(path).stem
    if path.endswith(".json"):
        return pathlib.Path(path).absolute().parent.name
    if argument in ("full", "tiny"):
        return f"{stem}_{argument}"
    return argument or stem


def _load(file: str, overrides: dict) -> ConfigDict:
    """Loads the config of a file and overrides fields."""
    if not pathlib.Path(file.partition(":")[0]).is_file():
        remedy = "the project's own are in configs/"
        raise usage_error(f"--grid {CONFIG}", file, "there is no such file", remedy)
    config = _call(python_file(file), "get_config")
    config.update_from_flattened_dict(overrides)
    return config


def _call(file: str, name: str):
    """Calls a function of a Python file, "PATH" or "PATH:ARGUMENT"; None if it has none."""
    path, _, argument = file.partition(":")
    function = runpy.run_path(path).get(name)
    arguments = [argument] if argument else []
    return function and function(*arguments)

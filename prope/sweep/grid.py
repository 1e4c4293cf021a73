"""The grid of a sweep: config fields, their values, and the run of each combination of values."""

import pathlib
import runpy
from itertools import product
from typing import NamedTuple

from ml_collections import ConfigDict

from prope.config import flat
from prope.errors import UsageError, nearest
from prope.runtime.validate import validate

P = "model.rope_percentage"
CONFIG = "config"  # swept like a field; its values are config files


class Planned(NamedTuple):
    """A run of the grid; `arguments` are those of prope.train without --workdir."""

    name: str
    values: dict
    config: ConfigDict
    arguments: list[str]


def read_grids(
    texts: list[str], percentages: str | None, file: str, base: ConfigDict, overrides: dict
) -> list[dict]:
    """Reads the values of every swept field, {"model.rope_percentage": [0.0, 0.25]}, from flags or the config file.

    The file's get_sweep() may return several grids: the sweep has the runs of all of them.
    """
    where, grid, known = "--grid", {}, flat(base)
    flags = [("--rope_percentage", f"{P}={percentages}")] if percentages is not None else []
    for flag, text in [*flags, *(("--grid", text) for text in texts)]:
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"{flag} {text}: must be a field and its values, such as seed=0,1,2")
        if name in grid:
            raise UsageError(f"{flag} {text}: {name} is given twice; give all its values at once")
        grid[name] = [value.strip() for value in values.split(",") if value.strip()]
    grids = [grid]
    if not grid:
        where = f"get_sweep() of {file.partition(':')[0]}:"
        if (swept := _call(file, "get_sweep")) is None:
            examples = "--rope_percentage=0,0.25,0.5,0.75,1 or --grid=FIELD=VALUE,VALUE"
            raise UsageError(
                f"--config={file}: has no get_sweep(), so say what to sweep: {examples}"
            )
        grids = [dict(grid) for grid in ([swept] if isinstance(swept, dict) else swept)]
    for fields, name, values in [(grid, *field) for grid in grids for field in grid.items()]:
        if name != CONFIG and name not in known:
            raise UsageError(f"{where} {name}: there is no such config field{nearest(name, known)}")
        if name in overrides:
            raise UsageError(
                f"--config.{name}={overrides[name]}: {name} is swept; give it here or in the grid"
            )
        if not values:
            raise UsageError(f"{where} {name}=: names no values; write {name}=VALUE,VALUE")
        fields[name] = [value if name == CONFIG else convert(name, value, base) for value in values]
        for value in fields[name]:
            if fields[name].count(value) > 1:
                raise UsageError(
                    f"{where} {name}: the value {text_of(value)} is given twice; remove one"
                )
    return grids


def convert(name: str, value, base: ConfigDict):
    """Converts a text or a number to the type of a field."""
    *outer, last = name.split(".")
    kind = (base[outer[0]] if outer else base).get_type(last)
    parse = {
        bool: lambda text: {"true": True, "false": False}[text.lower()],
        int: int,
        float: float,
        str: str,
    }
    allowed = "not a value" if kind in parse else "only numbers, texts and booleans can be swept"
    try:
        return parse[kind](str(value))
    except (KeyError, ValueError):
        raise UsageError(
            f"--grid {name}: {value}: {allowed} (its type is {kind.__name__})"
        ) from None


def text_of(value) -> str:
    """Formats a value for run names and command lines: 0.25, and 1 for 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value + 0.0).removesuffix(".0") if isinstance(value, float) else str(value)


def plan(grids: list[dict], file: str, base: ConfigDict, overrides: dict) -> list[Planned]:
    """Lists the runs, the first field of a grid changing slowest, and validates their configs.

    A run's name depends on its values alone, sorted by field: rope_percentage=0.25,seed=0.
    """
    names, runs = list(dict.fromkeys(name for grid in grids for name in grid)), []
    last = [name.rpartition(".")[2] for name in names]
    short = {
        name: part if last.count(part) == 1 else name
        for name, part in zip(names, last, strict=True)
    }
    combinations = [
        dict(zip(grid, values, strict=True)) for grid in grids for values in product(*grid.values())
    ]
    for fields in combinations:
        run_file = fields.pop(CONFIG, file)
        config = (
            base.copy_and_resolve_references() if run_file == file else load(run_file, overrides)
        )
        config.update_from_flattened_dict(fields)
        validate(config)
        values = {short[name]: value for name, value in fields.items()}
        if CONFIG in names:
            values = {CONFIG: _name_of(run_file), **values}
        name = ",".join(
            f"{field}={text_of(value)}" for field, value in sorted(values.items())
        ).replace("/", "_")
        if name in (run.name for run in runs):
            raise UsageError(f"two runs would be called {name}; give one of them another value")
        flags = [
            f"--config.{field}={text_of(value)}" for field, value in (overrides | fields).items()
        ]
        runs.append(Planned(name, values, config, [f"--config={run_file}", *flags]))
    return runs


def _name_of(file: str) -> str:
    """Names a config file by its argument, such as a method; by its stem where it has none, or a size as argument."""
    path, _, argument = file.partition(":")
    stem = pathlib.Path(path).stem
    return f"{stem}_{argument}" if argument in ("full", "tiny") else argument or stem


def load(file: str, overrides: dict) -> ConfigDict:
    """Loads the config of a file and overrides fields."""
    if not pathlib.Path(file.partition(":")[0]).is_file():
        raise UsageError(
            f"--grid {CONFIG}={file}: there is no such file; the project's own are in configs/"
        )
    config = _call(file, "get_config")
    config.update_from_flattened_dict(overrides)
    return config


def _call(file: str, name: str):
    """Calls the function `name` of a Python file, "PATH" or "PATH:ARGUMENT"; None if there is no such function."""
    path, _, argument = file.partition(":")
    function = runpy.run_path(path).get(name)
    return function and function(*([argument] if argument else []))

"""Flags that prope.evaluate and prope.ask share: which models, and at which lengths."""

import dataclasses

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import log, usage_error

# Those of prope.encodings.SCALINGS; --help does not import it, because it imports JAX.
ENCODINGS = ["linear", "ntk", "dynamic", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Which models to evaluate; the fields are flags, which `define_flags` explains."""

    workdir: str
    step: str | None = None
    batch_size: int | None = None
    seq_len: str | None = None
    encoding: str | None = None
    intervene: str | None = None
    pairs: str | None = None
    factor: float | None = None
    dtype: str | None = None
    again: bool = False
    output: str | None = None

    def __post_init__(self):
        if self.step not in (None, "all") and not self.step.isdecimal():
            raise usage_error("--step", self.step, "must be the number of a checkpoint, or all")
        if self.encoding and self.intervene:
            problem = f"conflicts with --intervene={self.intervene}; give one"
            raise usage_error("--encoding", self.encoding, problem)
        scaled = self.encoding or "interpolate" in (self.intervene or "")
        if self.factor is not None and not scaled:
            problem = "has no effect without --encoding or --intervene=interpolate"
            raise usage_error("--factor", self.factor, problem)


def define_flags(file: str) -> None:
    """Defines the flags of `Options`; records are kept in W/`file`."""
    command.define_place("workdir", "directory of a run, or one with runs below it: of all")
    flags.DEFINE_string("step", None, "number of a checkpoint, or 'all'; the newest by default")
    flags.DEFINE_integer(
        "batch_size", None, "sequences at a time: changes the speed, not the result", lower_bound=1
    )
    lengths = "tokens: numbers, or multiples of the training length, as in 512,2x,8x; 1x by default"
    flags.DEFINE_string("seq_len", None, lengths)
    flags.DEFINE_enum(
        "encoding",
        None,
        ENCODINGS,
        "rescale the encoding without training, for longer text; yarn scales the logits too. "
        "A run that has the same scaling keeps its factor, times --factor",
    )
    flags.DEFINE_string(
        "intervene",
        None,
        "stop, remove or interpolate bands of pairs, as in stop:16-19,remove:0-3+9; without a "
        "band, every eighth of the pairs in turn. @full, @sliding, @3 or @0-5 names layers, as "
        "in stop:64-127@full",
    )
    flags.DEFINE_string("pairs", None, "pairs that rotate: of a file of prope.choose, or 0-15,20")
    factor = (
        "of --encoding or --intervene=interpolate: how many times longer the text is than in "
        "training; by default --seq_len over its length, of dynamic 1"
    )
    flags.DEFINE_float("factor", None, factor, lower_bound=1.0)
    define_dtype()
    flags.DEFINE_boolean("again", False, f"recompute what {file} has")
    command.define_place("output", "folder for the results instead of --workdir")
    flags.mark_flags_as_required(["workdir"])


def define_dtype() -> None:
    """Defines --dtype."""
    flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16"],
        "in which the model is computed; by default what the run's or the checkpoint's "
        "config.json has",
    )


def from_flags(kind: type[Options]) -> Options:
    """Reads the flags that are the fields of a kind of options."""
    return kind(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(kind)})


def last_line(records: list[dict], fields: tuple[str, ...]) -> dict:
    """Returns the last record; logs all as a table, and adds these fields of several."""
    if any("encoding" in record for record in records):
        fields += ("encoding",)
    short = [{name: record.get(name) for name in fields} for record in records]
    rows = [[_cell(value) for value in record.values()] for record in short]
    log.info("%s", text_table([list(fields), *rows]))
    return records[0] if len(records) == 1 else records[-1] | {"evaluations": short}


def text_table(lines: list[list[str]]) -> str:
    """Aligns the columns of lines of cells for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _cell(value) -> str:
    """Formats an entry of the table."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "per layer"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if isinstance(value, float) else value

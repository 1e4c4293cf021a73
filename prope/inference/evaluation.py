"""Evaluates checkpoints on documents, or on long-context tasks; the room behind python -m prope.evaluate.

Evaluations that a run's eval.jsonl or longcontext.jsonl already has are not computed again.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from prope import sharding
from prope.config import override_dataset
from prope.data.mixture import open_text
from prope.data.tasks.tasks import parse_tasks
from prope.data.windows import Windows
from prope.encodings import (
    INTERVENTIONS,
    SCALINGS,
    can_rescale,
    describe,
    layer_frequencies,
    rotated_pairs,
)
from prope.errors import UsageError, log
from prope.inference.longcontext import RECORDS, Prompts
from prope.inference.losses import Selection, make_evaluation, select
from prope.inference.paired import sums_folder
from prope.runtime import processes
from prope.runtime.files import append_jsonl
from prope.runtime.validate import validate
from prope.workdir.checkpoints import list_steps
from prope.workdir.records import find_evaluation, read_jsonl
from prope.workdir.run import Run, find_runs, open_run

_OF_TASKS = ("form", "depths", "trials", "seed", "control")
_OF_WINDOWS = ("max_windows", "max_tokens", "dataset", "split")
# Fields that a cached record needs to be reused; of a mixture also "sources", for older ones weigh by size.
_FIELDS = {
    "loss",
    "loss_stderr",
    "by_position",
    "tokens",
    "perplexity",
    "bits_per_byte",
    "unigram_bits_per_byte",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Which evaluations to make; the fields are the flags of prope.evaluate, which explains them."""

    workdir: str
    step: str | None = None
    batch_size: int | None = None
    max_windows: int | None = None
    max_tokens: int | None = None
    seq_len: str | None = None
    dataset: str | None = None
    data_dir: str | None = None
    encoding: str | None = None
    intervene: str | None = None
    factor: float | None = None
    split: str | None = None
    again: bool = False
    tasks: str | None = None
    form: str | None = None
    depths: str | None = None
    trials: int = 32
    seed: int = 0
    control: str | None = None

    def __post_init__(self):
        if self.step not in (None, "all") and not self.step.isdecimal():
            raise UsageError(f"--step={self.step}: must be the number of a checkpoint, or all")
        if self.max_windows and self.max_tokens:
            raise UsageError(
                f"--max_windows={self.max_windows} and --max_tokens={self.max_tokens}: give one of them"
            )
        if self.encoding and self.intervene:
            raise UsageError(
                f"--encoding={self.encoding} and --intervene={self.intervene}: give one of them"
            )
        if (
            self.factor is not None
            and self.encoding is None
            and "interpolate" not in (self.intervene or "")
        ):
            raise UsageError(
                f"--factor={self.factor}: goes with --encoding, such as yarn, or --intervene=interpolate"
            )
        if self.control == "near" and self.depths is not None:
            raise UsageError(
                f"--depths={self.depths}: has no effect with --control=near; remove it"
            )
        for name in _OF_TASKS if self.tasks is None else _OF_WINDOWS:
            if (value := getattr(self, name)) != getattr(Options, name):
                combined = "without --tasks" if self.tasks is None else "with --tasks"
                raise UsageError(f"--{name}={value}: has no effect {combined}; remove it")


def _parse_lengths(options: Options, trained: int) -> list[int]:
    """Parses --seq_len: "512,0.5x,8x" are 512 tokens, and half and eight times the length of training."""
    lengths = []
    for entry in ("1x" if options.seq_len is None else options.seq_len).split(","):
        match = re.fullmatch(r"\s*([0-9]+|[0-9]*\.[0-9]+(?=x))(x?)\s*", entry)
        if match is None or (length := int(float(match[1]) * (trained if match[2] else 1))) == 0:
            neither = "is neither a number of tokens nor a multiple of the training's length"
            raise UsageError(
                f"--seq_len={options.seq_len}: {entry!r} {neither}; give a list such as 512 or 1x,2x,8x"
            )
        lengths.append(length)
    longest = max(lengths)
    if options.max_tokens is not None and options.max_tokens < longest:
        raise UsageError(
            f"--max_tokens={options.max_tokens}: must be at least a window, here of {longest} tokens"
        )
    if options.max_tokens is not None and (others := [T for T in lengths if longest % T]):
        divide = f"with --max_tokens every length must divide the longest, {longest}, so that all read the same tokens"
        raise UsageError(f"--seq_len={options.seq_len}: {divide}; {others[0]} does not")
    return list(dict.fromkeys(lengths))


def parse_interventions(text: str | None, model: ConfigDict) -> list[str]:
    """Parses --intervene, such as stop:16-19,remove, as ["stop:16-19", "remove:0-3", ..]: every eighth of the pairs."""
    P, found = model.head_dim // 2, []
    for entry in text.split(",") if text is not None else []:
        match, step = (
            re.fullmatch(rf"({'|'.join(INTERVENTIONS)})(?::(\d+)(?:-(\d+))?)?", entry.strip()),
            -(-P // 8),
        )
        bands = [(start, min(start + step, P) - 1) for start in range(0, P, step)]
        if match and match[2]:
            bands = [(int(match[2]), int(match[3] or match[2]))]
        if match is None or not bands[0][0] <= bands[0][1] < P:
            allowed = f"is not {', '.join(INTERVENTIONS)}, alone or with a band of pairs 0 to {P - 1}, as in stop:0-1"
            raise UsageError(f"--intervene={text}: {entry!r} {allowed}")
        found += [f"{match[1]}:{first}-{last}" for first, last in bands]
    return list(dict.fromkeys(found))


def changes_rotation(config: ConfigDict, encoding: str) -> bool:
    """Tells whether an intervention does anything: to stop or interpolate pairs that a run does not rotate does not."""
    changed = config.copy_and_resolve_references()
    rescale(changed, encoding)
    changed.model.rope_scaling_factor = 2.0
    same = np.array_equal(layer_frequencies(changed.model), layer_frequencies(config.model))
    return not same or encoding.startswith("remove")


def rescale(config: ConfigDict, encoding: str | None) -> None:
    """Sets the scaling of a run's config that --encoding or --intervene names, for the length of its training."""
    if encoding is None:
        return
    encoding, _, band = encoding.partition(":")
    taken, model = SCALINGS[encoding], config.model
    if band:
        if model.rope_scaling_type != "none":
            scaled = f"the run has rope_scaling_type={model.rope_scaling_type}; only runs without one can be tested"
            raise UsageError(f"--intervene={encoding}:{band}: {scaled}")
        model.scaled_pairs = tuple(map(int, band.split("-")))
    model.rope_scaling_type, model.logit_scale = (
        encoding,
        "yarn" if encoding == "yarn" else model.logit_scale,
    )
    if "original_seq_len" in taken and model.original_seq_len is None:
        model.original_seq_len = config.data.position_range or config.data.seq_len


def _open_lengths(
    run: Run, options: Options, encoding: str | None, opened: dict
) -> list[tuple[str | None, ConfigDict, Windows, Selection]]:
    """Opens the windows of each length, once for all runs that differ only in their seed."""
    state = run.checkpoint.data
    if "imported_from" in state and options.dataset is None and options.tasks is None:
        remedy = "give one, such as --dataset=python_docs, or --dataset=files --data_dir=DIR"
        raise UsageError(
            f"--workdir={run.workdir}: was imported, so it has no dataset of its own; {remedy}"
        )
    config = run.config.copy_and_resolve_references()
    config.model.attention = "auto"  # of this machine, which need not be the one that trained
    config.eval.max_windows = options.max_windows
    override_dataset(config.data, options.dataset, options.data_dir)
    rescale(config, encoding)
    validate(config)
    keys, trained = [], config.data.seq_len
    lengths = _parse_lengths(options, trained)
    for task, T in itertools.product(
        [None] if options.tasks is None else parse_tasks(options.tasks), lengths
    ):
        own = config.copy_and_resolve_references()
        if "rope_scaling_factor" in SCALINGS[(encoding or "none").partition(":")[0]]:
            growth = max(T / (config.model.original_seq_len or trained), 1.0)
            # dynamic has the length in its formula
            own.model.rope_scaling_factor = options.factor or (
                1.0 if encoding == "dynamic" else growth
            )
        # Longer windows, fewer at a time: as many tokens as at the training's length, so that memory suffices.
        own.eval.batch_size = options.batch_size or max(
            config.eval.batch_size * trained // max(T, trained), 1
        )
        data = own.data.copy_and_resolve_references()
        data.seq_len = T
        parts = (own.model, own.data, own.eval, run.config.data)
        key = json.dumps([*(part.to_dict() for part in parts), T, task, state.get("fingerprint")])
        if key not in opened and task is not None:
            own.data.dataset = f"longcontext/{task}"
            prompts = Prompts(task, T, own, options)
            opened[key] = encoding, own, prompts, prompts.selection
        elif key not in opened:
            windows = open_text(data, own.model.vocab_size, options.split, run.config.data, state)
            size = max(source.length for source in windows.sources)
            if max(trained, size) < T:
                split = f"split {windows.split} of {config.data.dataset}, {size:,} tokens"
                raise UsageError(
                    f"--seq_len={T}: longer than {split}; give a shorter window, or more text"
                )
            opened[key] = (
                encoding,
                own,
                windows,
                select(windows, options.max_windows, options.max_tokens, max(lengths)),
            )
        keys.append(key)
    return [opened[key] for key in keys]


def evaluations(options: Options) -> Iterator[dict]:
    """Yields the record of every evaluation: run by run, checkpoint by checkpoint, length by length.

    Raises UsageError, before the first evaluation, where a run, a checkpoint or data is missing, or does not fit.
    """
    plan, opened, functions = [], {}, {}
    runs = processes.call_on_first(lambda: list(map(str, find_runs(options.workdir))))
    for workdir in runs:
        if len(runs) > 1 and not list_steps(workdir):
            log.info("%s: left out, for it has no finished checkpoint yet", workdir)
            continue
        for step in list_steps(workdir) if options.step == "all" else [options.step]:
            run = open_run(workdir, None if step is None else int(step))
            if len(runs) > 1 and not can_rescale(run.config.model.rope_type, options.encoding):
                rope_type = run.config.model.rope_type
                log.info(
                    "%s: left out, for rope_type %s has no wavelength to scale", workdir, rope_type
                )
                continue
            with processes.raise_on_all():
                asked, lengths = parse_interventions(options.intervene, run.config.model), []
                for encoding in asked or [options.encoding]:
                    if not asked or changes_rotation(run.config, encoding):
                        lengths += _open_lengths(run, options, encoding, opened)
                    else:
                        log.info(
                            "%s: %s is left out, for the run rotates none of these pairs",
                            workdir,
                            encoding,
                        )
                plan.append((run, lengths))
    if not plan:
        which = f" that --encoding={options.encoding} can rescale" if options.encoding else ""
        raise UsageError(
            f"--workdir={options.workdir}: no run there has a finished checkpoint{which}; train one first"
        )
    if options.intervene and not any(lengths for _, lengths in plan):
        remedy = "give faster ones, or remove"
        raise UsageError(
            f"--intervene={options.intervene}: no run there rotates these pairs; {remedy}"
        )
    if options.max_windows and any(
        len({windows.seq_len for *_, windows, _ in lengths}) > 1 for _, lengths in plan
    ):
        log.warning(
            "--max_windows: longer windows hold more text; --max_tokens reads the same text at every length"
        )
    for run, lengths in plan:
        workdir, step, params = run.workdir, run.step, None
        for encoding, config, windows, selection in lengths:
            count, pairs = len(selection.indices), rotated_pairs(config.model)
            dataset, T = config.data.dataset, windows.seq_len
            record = {"step": step, "dataset": dataset, "seq_len": T}
            rescaled = {
                "encoding": encoding,
                "factor": encoding and config.model.rope_scaling_factor,
            }
            same = record | {"fingerprint": selection.fingerprint, "windows": count} | rescaled
            record |= {
                "split": windows.split,
                "rope_percentage": config.model.rope_percentage,
                "rotated_pairs": pairs,
            }
            record |= rescaled if encoding else {}
            identity = {"init_hash": run.init_hash, "workdir": str(workdir)}
            if options.tasks is None:
                file, needed = (
                    "eval.jsonl",
                    _FIELDS | ({"sources"} if len(windows.sources) > 1 else set()),
                )
                asked = f"{count} of {windows.count} windows of {T} tokens of {dataset}, split {windows.split}"
            else:
                file, needed, functions[windows] = RECORDS, {"cells"}, windows.evaluate
                asked = f"{count} prompts of {T} tokens of {dataset}"
            reusable = [
                r for r in read_jsonl(workdir / file) if r.keys() >= needed and not options.again
            ]
            if cached := processes.broadcast_from_first(find_evaluation(reusable, **same)):
                log.info("step %d of %s on %s: is in %s", step, workdir, asked, file)
                yield record | cached | identity
                continue
            log.info(
                "evaluating step %d of %s on %s; %s", step, workdir, asked, describe(config.model)
            )
            if params is None:  # without --step, of the newest undamaged checkpoint
                run, params = run.first_undamaged(Run.params)
                record["step"] = step = run.step
            if windows not in functions:
                functions[windows] = make_evaluation(
                    config, windows, sharding.make_mesh(), selection
                )
            result = functions[windows](params, sums_folder(workdir, record))
            record |= {
                "max_windows": options.max_windows,
                "max_tokens": options.max_tokens,
                **result,
                **identity,
            }
            if processes.is_first():
                append_jsonl(workdir / file, record)
            yield record


def table(records: list[dict]) -> str:
    """Formats records for a terminal, a line each."""
    parent = os.path.commonpath([os.path.dirname(record["workdir"]) for record in records])
    lines = [
        ["run", "step", "p", "seq_len", "tokens", "loss", "stderr", "perplexity", "bits_per_byte"]
    ]
    for record in records:
        p, stderr = record["rope_percentage"], record["loss_stderr"]
        lines.append(
            [
                os.path.relpath(record["workdir"], parent),
                str(record["step"]),
                "per layer" if isinstance(p, list | tuple) else f"{p:g}",
                str(record["seq_len"]),
                f"{record['tokens']:,}",
                f"{record['loss']:.4f}",
                "-" if stderr is None else f"{stderr:.4f}",
                f"{record['perplexity']:.4g}",
                f"{record['bits_per_byte']:.4f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

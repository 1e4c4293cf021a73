"""Computes the losses of saved checkpoints on text, for python -m prope.evaluate.

Evaluations that a run's eval.jsonl already has are not computed again.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from prope.config import is_generated, override_dataset
from prope.data.mixture import open_text
from prope.data.sources.find import weighted_sources
from prope.errors import log, usage_error
from prope.inference.losses import LossEvaluation, select
from prope.inference.opening import configs_by_length, records
from prope.inference.options import Options
from prope.stack.layers import FULL, layer_kinds
from prope.workdir.run import Run

RECORDS = "eval.jsonl"


@dataclasses.dataclass(frozen=True)
class LossOptions(Options):
    """Which losses to compute; the fields are the flags of prope.evaluate, which explains them."""

    max_windows: int | None = None
    max_tokens: int | None = None
    dataset: str | None = None
    data_dir: str | None = None
    split: str | None = None
    window: list[str] | None = None
    sinks: list[str] | None = None
    bos_every_window: bool | None = None

    def cuts(self, model: ConfigDict, T: int) -> list[tuple[int | None, int]]:
        """Returns windows of the layers that have none, each with sinks; first (None, 0), uncut."""
        windows = _parse_counts("--window", self.window or [], least=1)
        sinks = _parse_counts("--sinks", self.sinks or ["0"], least=0)
        # Where they hold T keys, the last query, too, sees all.
        cuts = [(w, s) for w in windows for s in sinks if w + s < T and FULL in layer_kinds(model)]
        return [(None, 0), *cuts]

    def __post_init__(self):
        super().__post_init__()
        if self.sinks and not self.window:
            problem = "has no effect without --window, outside of which they stay visible"
            raise usage_error("--sinks", ",".join(self.sinks), problem)
        if self.max_windows and self.max_tokens:
            problem = f"conflicts with --max_tokens={self.max_tokens}; give one"
            raise usage_error("--max_windows", self.max_windows, problem)


def _parse_counts(flag: str, entries: list[str], least: int) -> list[int]:
    for entry in entries:
        if not entry.strip().isdecimal() or int(entry) < least:
            problem = f"{entry!r} is not a number of tokens from {least} on"
            raise usage_error(flag, ",".join(entries), problem)
    return list(dict.fromkeys(map(int, entries)))


def evaluations(options: LossOptions) -> Iterator[dict]:
    """Yields the record of every evaluation, in the order of runs, checkpoints and lengths.

    Raises UsageError, before anything is computed, where a run, a checkpoint or data is missing or
    does not fit the flags.
    """
    opened = {}  # evaluations that several runs share
    open_all = functools.partial(_open_lengths, options, opened)
    if options.max_windows and "," in (options.seq_len or ""):
        remedy = "--max_tokens reads the same text at every length"
        log.warning("--max_windows: longer windows hold more text; %s", remedy)
    limits = {"max_windows": options.max_windows, "max_tokens": options.max_tokens}
    return records(options, open_all, RECORDS, **limits)


def _open_lengths(
    options: LossOptions, opened: dict[tuple, LossEvaluation], run: Run, encoding: str | None
) -> list[LossEvaluation]:
    """Opens the evaluation of each length; runs that differ by seed share one, in `opened`."""
    state = run.checkpoint.data
    if "imported_from" in state and options.dataset is None:
        problem = "was imported, without a dataset; give --dataset=files --data_dir=DIR or another"
        raise usage_error("--workdir", run.workdir, problem)
    config = run.config.copy_and_resolve_references()
    config.eval.max_windows = options.max_windows
    override_dataset(config.data, options.dataset, options.data_dir)
    if options.bos_every_window is not None:
        config.data.bos_every_window = options.bos_every_window
    configs = configs_by_length(config, options, encoding)
    longest = max(configs)
    if options.max_tokens:
        _check_max_tokens(options, configs, config.data)
    if options.window and FULL not in layer_kinds(config.model):
        log.info("%s: as it is, for no layer is without a window", run.workdir)
    evaluations = []
    for T, config_T in configs.items():
        for window, sinks in options.cuts(config_T.model, T):
            cut = config_T.copy_and_resolve_references()
            cut.model.update(test_window=window, test_sinks=sinks)
            # All that the program and its windows depend on; `open_text` reads the run's data, too.
            fields = [cut.model, cut.data, cut.eval, run.config.data]
            key = (T, state.get("fingerprint"), *map(str, fields))
            if key not in opened:
                windows = _open_windows(run, options, cut, T)
                selection = select(windows, options.max_windows, options.max_tokens, longest)
                opened[key] = LossEvaluation(cut, windows, selection)
            evaluations.append(opened[key])
    return evaluations


def _check_max_tokens(options: LossOptions, lengths: Iterable[int], data: ConfigDict) -> None:
    """Raises UsageError where the same tokens cannot be read at every length."""
    if any(is_generated(source.dataset) for _, source in weighted_sources(data)):
        problem = f"{data.dataset} has other windows at every length; give --max_windows"
        raise usage_error("--max_tokens", options.max_tokens, problem)
    longest = max(lengths)
    if options.max_tokens < longest:
        allowed = f"must be at least a window, here of {longest} tokens"
        raise usage_error("--max_tokens", options.max_tokens, allowed)
    for T in lengths:
        if longest % T:
            problem = f"{T} does not divide the longest, {longest}, as it must with --max_tokens"
            raise usage_error("--seq_len", options.seq_len, problem)


def _open_windows(run: Run, options: LossOptions, config: ConfigDict, T: int):
    data = config.data.copy_and_resolve_references()
    data.seq_len = T
    vocab_size = config.model.vocab_size
    windows = open_text(data, vocab_size, options.split, run.config.data, run.checkpoint.data)
    text_length = max(source.length for source in windows.sources)
    # At the training's length a short text is padded, as in training.
    if text_length < T and config.data.seq_len < T:
        problem = f"longer than split {windows.split} of {data.dataset}, {text_length:,} tokens"
        raise usage_error("--seq_len", T, problem, "give a shorter window, or more text")
    return windows

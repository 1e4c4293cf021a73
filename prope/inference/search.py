"""Searches for the fewest pairs that must rotate, for python -m prope.evaluate --search_rotation.

Greedy means: bands of pairs are stopped one after the other, and none is started again. Bands are
eighths of the pairs of each kind of layer, or of the layers that are named; then the halves of
those that still rotate, and their halves. On each of these levels, every band that rotates is
stopped alone, beside those that stay stopped. Then, by how much that added to the loss, the least
first and of equals the slowest, a band is stopped for good where the loss of all that are stopped
is at most the tolerance above that of the unchanged model on the same tokens.

It does not guarantee that no smaller set of rotating pairs would do: other orders are not tried,
pairs within the smallest bands are not told apart, and bands that cost much alone but little
together stay. The loss of the result is that of the tokens that chose it, and so a little too low:
evaluate its `encoding` on others by --intervene.

Every evaluation is a record of its own, such as that of stop:48-63@full+24-31@sliding, and is not
computed again when the command is rerun.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from prope.encodings import layer_frequencies
from prope.errors import UsageError, log, usage_error
from prope.inference.evaluation import RECORDS, LossOptions, open_lengths
from prope.inference.opening import Recorder, cannot_change, eighths, open_runs, parse_lengths
from prope.inference.options import text_table
from prope.inference.paired import paired_difference
from prope.stack.layers import layer_kinds, select_layers
from prope.workdir.records import SAME_WINDOWS
from prope.workdir.run import Run

_LEVELS = 3  # of bands: an eighth of the pairs, a sixteenth, a 32nd
_TOLERANCE = 0.01  # nats per token

Pairs = frozenset[tuple[str, int]]  # each a place, "" for all layers, and the number of a pair


def search_rotation(options: LossOptions) -> dict:
    """Searches, logs two tables, and returns the record of the result with what still rotates.

    `p_rope` is the loss with as many pairs of the same layers, the fastest. Raises UsageError where
    the flags name several models or lengths, or layers that there are not.
    """
    run = _open_one(options)
    rotating = rotating_pairs(options, run.config.model)
    recorder = Recorder(run, options, RECORDS, **options.limits)

    @functools.cache
    def evaluate(stopped: Pairs) -> dict:
        encoding = encoding_of(stopped)
        (evaluation,) = open_lengths(options, {}, run, encoding)
        return recorder.record(encoding, evaluation)

    unchanged = evaluate(frozenset())
    if unchanged["loss"] is None:
        raise _refuse(options, "no token of these windows is predicted", "give other text")
    tolerance = _TOLERANCE if options.tolerance is None else options.tolerance

    def added(stopped: Pairs) -> float:
        growth = evaluate(stopped)["loss"] - unchanged["loss"]
        log.info("%s adds %.5f nats per token", encoding_of(stopped), growth)
        return growth

    bands = []
    for place, of_place in rotating.items():
        for band in eighths(run.config.model, place or None):
            pairs = range(band.first, band.last + 1)
            bands.append(frozenset((place, pair) for pair in pairs if pair in of_place))
    stopped = stop_greedily(list(filter(None, bands)), added, tolerance)
    found = evaluate(stopped)
    p_rope = evaluate(slowest(rotating, stopped))
    minus = functools.partial(_minus, recorder.folder)
    result = {
        "tolerance": tolerance,
        "unchanged_loss": unchanged["loss"],
        "minus_unchanged": minus(found, unchanged),
        "rotating": _describe(run.config.model, rotating, stopped),
        "p_rope": {
            "encoding": p_rope.get("encoding"),
            "loss": p_rope["loss"],
            "minus_found": minus(p_rope, found),
        },
        "evaluations": evaluate.cache_info().currsize,
    }
    _log_tables(found["loss"], result)
    return found | result


def stop_greedily(bands: list[Pairs], added: Callable[[Pairs], float], tolerance: float) -> Pairs:
    """Returns the pairs of the bands, or of their halves, that can be stopped.

    `added` returns by how much the loss grows where pairs are stopped.
    """
    stopped: Pairs = frozenset()
    for _ in range(_LEVELS):
        cost = {band: added(stopped | band) for band in bands}
        slowest_first = sorted(bands, key=lambda band: -max(pair for _, pair in band))
        for band in sorted(slowest_first, key=cost.__getitem__):
            if cost[band] <= tolerance and added(stopped | band) <= tolerance:
                stopped |= band
        bands = [half for band in bands if not band <= stopped for half in _halves(band)]
    return stopped


def _halves(band: Pairs) -> list[Pairs]:
    """Returns the faster and the slower half of a band; of a single pair, none."""
    if len(band) == 1:
        return []
    pairs = sorted(band)
    middle = len(pairs) // 2
    return [frozenset(pairs[:middle]), frozenset(pairs[middle:])]


def slowest(rotating: dict[str, list[int]], stopped: Pairs) -> Pairs:
    """Returns as many pairs of each place as are stopped there, the slowest that rotate."""
    pairs = []
    for place, of_place in rotating.items():
        number = sum(other == place for other, _ in stopped)
        pairs += [(place, pair) for pair in of_place[len(of_place) - number :]]
    return frozenset(pairs)


def rotating_pairs(options: LossOptions, model: ConfigDict) -> dict[str, list[int]]:
    """Returns which pairs rotate in the layers of each place that is searched, fastest first."""
    places = options.search_rotation
    if places == ["all"]:
        places = [kind.removesuffix("_attention") for kind in dict.fromkeys(layer_kinds(model))]
    freqs = layer_frequencies(model)
    rotating = {}
    searched: set[int] = set()
    for name in places:
        try:
            band, *_ = eighths(model, name.strip())
        except ValueError as error:
            raise _refuse(options, str(error), "give a list such as full,sliding, or all") from None
        if searched.intersection(band.layers):
            raise _refuse(options, f"layers of {name} are named twice", "give each of them once")
        searched.update(band.layers)
        of_layers = [np.flatnonzero(freqs[number]).tolist() for number in band.layers]
        rotating[band.place or ""] = sorted(set().union(*of_layers))
    if not any(rotating.values()):
        raise _refuse(options, "no pair of these layers rotates", "name others")
    return rotating


def encoding_of(stopped: Pairs) -> str | None:
    """Writes stopped pairs as --intervene takes them; None: none are."""
    bands = []
    for place, group in itertools.groupby(sorted(stopped), key=lambda pair: pair[0]):
        at = f"@{place}" if place else ""
        bands += [f"{interval}{at}" for interval in _intervals([pair for _, pair in group])]
    return f"stop:{'+'.join(bands)}" if bands else None


def _intervals(numbers: list[int]) -> list[str]:
    """Writes increasing numbers as intervals: 0, 1, 2 and 7 are 0-2 and 7-7."""
    intervals = []
    by_distance = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    for _, group in by_distance:
        consecutive = [number for _, number in group]
        intervals.append(f"{consecutive[0]}-{consecutive[-1]}")
    return intervals


def _open_one(options: LossOptions) -> Run:
    """Opens the checkpoint to search; raises UsageError where the flags name several."""
    opened = open_runs(options)
    if len(opened) > 1:
        problem = f"is of one checkpoint, and the flags name {len(opened)}"
        raise _refuse(options, problem, "give --workdir of one run, and one --step")
    ((run, _),) = opened
    lengths = parse_lengths(options.seq_len, run.config.data.seq_len)
    if len(lengths) > 1:
        problem = f"is at one length, and --seq_len names {len(lengths)}"
        raise _refuse(options, problem, "rerun the command for each")
    problem = cannot_change(run.config.model, "stop")
    if problem:
        raise _refuse(options, problem, "search in a run without one")
    return run


def _refuse(options: LossOptions, problem: str, remedy: str) -> UsageError:
    return usage_error("--search_rotation", ",".join(options.search_rotation), problem, remedy)


def _describe(model: ConfigDict, rotating: dict[str, list[int]], stopped: Pairs) -> list[dict]:
    """Returns what still rotates, of the pairs that rotated before, in the layers of each place."""
    described = []
    for place, of_place in rotating.items():
        kept = [pair for pair in of_place if (place, pair) not in stopped]
        row = {
            "layers": place or "all",
            "num_layers": len(select_layers(model, place or None)),
            "rotating": len(kept),
            "of": len(of_place),
            "pairs": ",".join(_intervals(kept)),
        }
        described.append(row)
    return described


def _minus(folder: epath.Path, record: dict, other: dict) -> dict:
    """Returns the difference of two losses, with its interval if `folder` has their sums."""
    difference = {"difference": record["loss"] - other["loss"], "interval": None}
    changed = ("encoding", "factor")
    names = (*changed, "step", "dataset", "split", *SAME_WINDOWS)
    fields = {name: record.get(name) for name in names}
    other_fields = {name: other.get(name) for name in changed}
    with contextlib.suppress(UsageError):
        paired = paired_difference(folder, folder, fields, second_fields=other_fields)
        difference["interval"] = paired.interval()
    return difference


def _log_tables(loss: float, result: dict) -> None:
    """Logs which pairs still rotate, and the losses."""
    rows = [[str(value) for value in row.values()] for row in result["rotating"]]
    log.info("%s", text_table([list(result["rotating"][0]), *rows]))
    unchanged = result["unchanged_loss"]
    losses = {
        "unchanged": unchanged,
        "these pairs": loss,
        "p-RoPE, as many": result["p_rope"]["loss"],
    }
    lines = [["rotating", "loss", "added"]]
    for name, value in losses.items():
        lines.append([name, f"{value:.5f}", f"{value - unchanged:+.5f}"])
    log.info("%s", text_table(lines))

"""Chooses which pairs of every key head rotate; `prope.choose` is its command.

A rule scores a pair by the mean norms of its queries and keys, by its frequency, and by the
distances at which keys are seen; the pairs of the highest scores rotate on, the others stand.

Axes: L layers, N query heads, K key heads, P pairs, S distances.
"""

import itertools
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from prope.analysis.sequences import read_sequences
from prope.analysis.walk import Walk, mean_over_sequences
from prope.errors import log, usage_error
from prope.inference.losses import LossOptions, evaluations
from prope.inference.opening import check_folder, results_folder
from prope.inference.paired import paired_difference, sums_file
from prope.model import Captured
from prope.pages.analysis import stack_rows
from prope.pages.drawing import Picture, height, label_ticks, panels, show_image
from prope.runtime import processes
from prope.runtime.files import write_atomic
from prope.sharding import constrain
from prope.spec.layers import format_pairs
from prope.spec.model import ModelSpec
from prope.workdir.records import SAME_WINDOWS
from prope.workdir.run import Run, open_run

# --- Rules: functions of the norms of queries and keys, the frequencies, [K, P], and distances [S]


def change(query, key, freqs, distances) -> np.ndarray:
    """How much the scores of attention change where a pair stands instead of rotating.

    A query and a key that are turned against one another by any angle, each as likely, have their
    score changed by |q| |k| sqrt(1 - cos(f d)), as a root of the mean square. The mean of its
    square over distances d, with weights 1 / d, is taken, and the root of that.
    """
    turned = 1 - np.cos(freqs[..., None] * distances)
    return query * key * np.sqrt(np.average(turned, axis=-1, weights=1 / distances))


def norm(query, key, freqs, distances) -> np.ndarray:
    """What a pair can add to a score, |q| |k| (MHA2MLA, 2502.14837)."""
    return query * key


def fast(query, key, freqs, distances) -> np.ndarray:
    """The frequency: p-RoPE."""
    return freqs


def slow(query, key, freqs, distances) -> np.ndarray:
    """The period: the fastest pairs stand first."""
    return -freqs


def uniform(query, key, freqs, distances) -> np.ndarray:
    """Evenly spread pairs, for any number of them: by the index with its bits reversed."""
    P = freqs.shape[-1]
    bits = (P - 1).bit_length()
    reversed_index = [int(f"{pair:0{bits}b}"[::-1], 2) for pair in range(P)]
    return np.broadcast_to(-np.array(reversed_index, float), freqs.shape)


RULES: dict[str, Callable] = {rule.__name__: rule for rule in (change, norm, fast, uniform, slow)}
OWNERS = ("head", "layer", "model")


class Choice(NamedTuple):
    """What chooses pairs: a rule, the share that it keeps, and of which owner's pairs."""

    rule: str
    keep: float
    per: str


def score_pairs(model: ModelSpec, norms: list[dict], rule: str, T: int) -> list[np.ndarray]:
    """Scores every pair of every key head, [L][K, P].

    Layers that take the keys of another have the scores of its keys, by all their queries.
    `norms` has for each layer `query_norms` [N, P] and `key_norms` [K, P], as analysis.json; T is
    the length in which they were measured.
    """
    layers = model.layers_at(T)
    queries = [np.zeros(layer.frequencies.shape) for layer in layers]
    for layer, measured in zip(layers, norms, strict=True):
        K, P = layer.frequencies.shape
        scale = (model.attention_scale or layer.head_dim**-0.5) * layer.logit_scale
        query = np.array(measured["query_norms"]).reshape(K, -1, P).mean(axis=1)
        queries[layer.kv_source] += scale * query
    scores = []
    for layer in layers:
        source = layer.kv_source
        key = np.array(norms[source]["key_norms"])
        distances = np.arange(1, max(min(layer.window or T, T), 2))
        scores.append(RULES[rule](queries[source], key, layer.frequencies, distances))
    return scores


def keep_highest(
    model: ModelSpec, scores: list[np.ndarray], share: float, per: str
) -> list[np.ndarray]:
    """Chooses the pairs that rotate, bool [L][K, P]: this share of those of every head.

    Per layer its heads keep the same pairs; per model a head keeps as many as its scores deserve.
    """
    if per == "layer":
        scores = [np.broadcast_to(score.mean(axis=0), score.shape) for score in scores]
    if per != "model":
        return [_rank(score) < round(share * score.shape[1]) for score in scores]
    own = [layer.number for layer in model.layers if not layer.shares_kv]
    flat = np.concatenate([scores[number].ravel() for number in own])
    ends = np.cumsum([scores[number].size for number in own])
    parts = np.split(_rank(flat) < round(share * len(flat)), ends[:-1])
    kept = {n: part.reshape(scores[n].shape) for n, part in zip(own, parts, strict=True)}
    return [kept[layer.kv_source] for layer in model.layers]


def _rank(scores: np.ndarray) -> np.ndarray:
    """Ranks scores along the last axis, from 0, the highest."""
    return (-scores).argsort(axis=-1, kind="stable").argsort(axis=-1)


# --- Norms ----------------------------------------------------------------------------------------


@jax.jit
def _mean_norms(captured: Captured) -> dict[str, jax.Array]:
    """Averages the 2-norm of every pair over tokens: of queries [B, N, P], of keys [B, K, P]."""
    norms = {}
    for name, heads in (("query_norms", captured.query), ("key_norms", captured.key)):
        lanes = heads.reshape(*heads.shape[:-1], 2, heads.shape[-1] // 2)
        norms[name] = constrain(jnp.linalg.norm(lanes, axis=-2).mean(axis=1), "TTT")
    return norms


def measure_norms(run: Run, sequences: np.ndarray) -> list[dict]:
    """Runs the model over sequences [B, T]; returns mean norms of every layer, as analysis.json."""
    walk = Walk(run, sequences)
    x = walk.enter()
    norms = []

    def on_layer(_, captured):
        return jax.device_get(walk.run(_mean_norms, captured))

    for layer in walk.layers:
        x, batches = walk.layer(layer.number, x, on_layer=on_layer)
        norms.append(mean_over_sequences(batches, len(sequences)))
    return norms


# --- The command ----------------------------------------------------------------------------------


def choose_pairs(options) -> dict:
    """Chooses pairs, writes them and evaluates; returns what the command prints.

    `options` are the flags of `prope.choose`.
    """
    run = open_run(options.workdir, options.step)
    model = run.spec.model
    choices = _read_choices(options, model)
    folder = results_folder(run.workdir, options.workdir, options.output)
    check_folder(folder, options.output)
    ids, _, text = processes.call_on_first(lambda: read_sequences(run, options, "train"))
    sequences = np.array(ids, np.int32)
    about = text | dict(zip(("sequences", "seq_len"), sequences.shape, strict=True))
    run, norms = run.restore_newest_valid(lambda run: measure_norms(run, sequences))
    about = {"workdir": str(run.workdir), "step": run.step, "text": about}
    results = []
    for choice in choices:
        name = "pairs" if len(choices) == 1 else f"pairs_{choice.rule}_{choice.per}_{choice.keep:g}"
        scores = score_pairs(model, norms, choice.rule, about["text"]["seq_len"])
        kept = keep_highest(model, scores, choice.keep, choice.per)
        counts = {"kept_pairs": int(sum(map(np.sum, kept))), "pairs": int(sum(map(np.size, kept)))}
        chosen = choice._asdict() | about | counts | {"rope_pairs": format_pairs(kept)}
        chosen["scores"] = [[[float(f"{x:.5g}") for x in row] for row in one] for one in scores]
        path = folder / f"{name}.json"
        if processes.is_first():
            write_atomic(path, json.dumps(chosen))
            write_atomic(folder / f"{name}.png", draw_pairs(kept, choice.rule).render())
        by_index = [np.broadcast_to(-np.arange(P) / P, (K, P)) for K, P in map(np.shape, kept)]
        fastest = format_pairs(keep_highest(model, by_index, choice.keep, choice.per))
        losses = _compare(options, run, folder, choice, [None, chosen["rope_pairs"], fastest])
        names = ("loss_as_it_is", "loss", "loss_p_rope")
        results.append(dict(zip(names, losses, strict=True)) | counts | {"output": str(path)})
    if len(results) == 1:
        return results[0]
    rows = [choice._asdict() | result for choice, result in zip(choices, results, strict=True)]
    return {"choices": rows, "output": str(folder)}


def _read_choices(options, model: ModelSpec) -> list[Choice]:
    """Reads every choice that the flags name; raises UsageError for one that cannot be made."""
    if any((layer.frequencies == 0).any() or layer.removed.any() for layer in model.layers):
        problem = f"{model.describe_rotation()}: a choice is made where all pairs rotate"
        raise usage_error(
            "--workdir", options.workdir, problem, "name the run before its conversion"
        )
    for flag, names in (("rule", tuple(RULES)), ("per", OWNERS)):
        for name in getattr(options, flag):
            if name not in names:
                raise usage_error(f"--{flag}", name, f"must be of {', '.join(names)}")
    sizes = [layer.frequencies.size for layer in model.layers if not layer.shares_kv]
    of_head = min(layer.head_dim // 2 for layer in model.layers)
    choices = []
    for rule, per, share in itertools.product(options.rule, options.per, options.keep):
        count, owner = (sum(sizes), "the model") if per == "model" else (of_head, "a head")
        try:
            keep = float(share)
        except ValueError:
            keep = math.nan
        if not 0 <= keep <= 1:
            raise usage_error("--keep", share, "must be a share of the pairs, from 0 to 1")
        if round(keep * count) < 1:
            problem = f"keeps none of the {count} pairs of {owner}"
            remedy = f"keep {1 / count:g} or more; p = 0 needs no choice"
            raise usage_error("--keep", share, problem, remedy)
        choices.append(Choice(rule, keep, per))
    return list(dict.fromkeys(choices))


def _compare(
    options, run: Run, folder: epath.Path, choice: Choice, pairs: list[str | None]
) -> list[float]:
    """Evaluates the run with three sets of pairs, None first; returns losses in nats per token."""
    flags = ("workdir", "dataset", "data_dir", "max_windows", "dtype", "output")
    fields = {name: getattr(options, name) for name in flags}
    fields |= {"step": str(run.step), "split": "validation"}
    fields["seq_len"] = options.seq_len and str(options.seq_len)
    records = [next(evaluations(LossOptions(**fields, pairs=each))) for each in pairs]
    places = (folder, run.workdir)  # a record that the run had is not made again elsewhere
    processes.call_on_first(lambda: _log_differences(places, choice, *records))
    return [record["loss"] for record in records]


def _log_differences(
    places: tuple, choice: Choice, as_it_is: dict, chosen: dict, fastest: dict
) -> None:
    """Logs by how much the losses of three records differ, paired by document."""
    about = {name: chosen.get(name) for name in ("step", "dataset", *SAME_WINDOWS, "changed")}
    for name, other in (("as it is", as_it_is), ("with p-RoPE of as many pairs", fastest)):
        second = {"changed": other.get("changed")}
        found = [
            next((place for place in places if sums_file(place, record).exists()), places[0])
            for record in (chosen, other)
        ]
        difference = paired_difference(*found, about=about, second_fields=second)
        interval = difference.interval()
        reach = "" if interval is None else " ({:+.4f} to {:+.4f})".format(*interval)
        rule = f"{choice.rule} per {choice.per}, {choice.keep:g}"
        log.info("%s, minus %s: %+.4f nats per token%s", rule, name, difference.difference, reach)


def draw_pairs(kept: list[np.ndarray], rule: str) -> Picture:
    """Draws which pairs of every key head rotate."""
    rows = stack_rows([row.astype(float) for one in kept for row in one])
    labels = [f"{layer}.{head}" for layer, one in enumerate(kept) for head in range(len(one))]

    def draw(figure):
        axes = panels(figure, 1)[0, 0]
        show_image(axes, rows, aspect="auto", vmax=1)
        axes.set(xlabel="pair, fastest first", ylabel="layer.key head", title=f"by {rule}")
        axes.locator_params(axis="x", integer=True)
        label_ticks(axes.yaxis, labels)

    count = int(sum(map(np.sum, kept)))
    alt = f"{count} pairs of {len(rows)} key heads rotate."
    caption = "Bright pairs rotate, dark ones stand."
    return Picture("pairs", "Chosen pairs", alt, caption, draw, (6, height(len(rows))))

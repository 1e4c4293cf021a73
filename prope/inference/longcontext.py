"""Evaluates checkpoints on the tasks of prope/data/tasks; the room behind python -m prope.evaluate --tasks.

A forward pass reads a prompt once; up to eight candidates go on from its KV cache: the right answer, and foils of as
many tokens. W/longcontext.jsonl has a record per step, task and length, W/eval/STEP/ its trials for `paired_answers`.

rank_accuracy  share of prompts whose right answer is likelier than all foils (rank 1); guessing gives `chance`
exact          the same for: all tokens of the answer, and of what ends it, have the highest logit, as greedy decoding
wrong          how often which kind of foil was likeliest
distance       mean number of tokens from the answer back to the evidence; row: its depth, or the task's own parameter

Axes: B prompts, T length, C candidates, A tokens of an answer, R trials.
"""

import functools
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict, FrozenConfigDict

from prope import model, sharding
from prope.data.store.arrays import fingerprint_of
from prope.data.tasks.draws import Prompt
from prope.data.tasks.tasks import DEPTHS, FORMAT, TASKS, make_prompt
from prope.data.tokenizer import BOS, PAD, load_tokenizer
from prope.errors import UsageError, log
from prope.inference import paired
from prope.inference.generation import check_vocabulary, fill_cache, split_layers
from prope.inference.losses import Selection
from prope.kernels.choice import matmul_precision
from prope.runtime import processes

RECORDS = "longcontext.jsonl"
_FOILS = 7
_NEAR = 32  # tokens from the evidence to the question, as a control


class Trial(NamedTuple):
    """A prompt as tokens."""

    tokens: np.ndarray  # int32, <bos> first
    candidates: np.ndarray  # int32 [C, A], the right answer first
    kinds: list[str]  # of the foils, [C - 1]
    distance: int  # tokens from the answer back to the evidence


def encode(tokenizer, task: str, prompt: Prompt) -> Trial:
    """Encodes a prompt, its answer and the first foils of as many tokens; raises UsageError where that cannot be."""
    tokens, kinds = tokenizer.encode(prompt.text.encode()), {}
    for kind, texts in prompt.foils.items():
        kinds |= {text: kind for text in texts if text not in kinds}
    texts = [text for text in kinds if text != prompt.answer]
    wanted, candidates, remedy = (
        min(len(texts), _FOILS) + 1,
        {},
        "take another --form, or other tasks",
    )
    for text in (prompt.answer, *texts):
        whole = tokenizer.encode((prompt.text + text).encode())
        if len(whole) == len(tokens) or (whole[: len(tokens)] != tokens).any():
            joined = f"joins the end of a prompt, {prompt.text[-20:]!r}, and its answer, {text!r}"
            raise UsageError(f"--tasks={task}: the tokenizer {joined}; {remedy}")
        if len(whole) - len(tokens) == len(
            candidates.setdefault(prompt.answer, whole[len(tokens) :])
        ):
            candidates[text] = whole[len(tokens) :]
        if len(candidates) == wanted:
            break
    else:
        few = f"has {len(candidates)} answers of as many tokens as {prompt.answer!r}, of {wanted}"
        raise UsageError(f"--tasks={task}: the tokenizer {few}; {remedy}")
    distance = len(tokens) - len(tokenizer.encode(prompt.text[: prompt.source].encode()))
    of_foils = [kinds[text] for text in candidates if text != prompt.answer]
    return Trial(
        np.append(np.int32(BOS), tokens), np.stack([*candidates.values()]), of_foils, distance
    )


@functools.cache
def _make_score(config: FrozenConfigDict, mesh: Mesh):
    """Makes the function that scores a batch: (log-probabilities [B, C], whether the first candidate is exact [B])."""

    def score(params, tokens, lengths, candidates):
        layers = split_layers(config, params)
        last, cache = fill_cache(config, layers, tokens, lengths)  # last predicts all first tokens

        def score_candidate(answer):  # [B, A]
            rest = answer[:, :-1]
            after = [model.decode(config, layers, rest, cache, lengths)[0]] if rest.shape[1] else []
            logits, padding = (
                model.logits(params, jnp.concatenate([last, *after], axis=1)),
                answer == PAD,
            )
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), answer[..., None], axis=-1)[
                ..., 0
            ]
            return (logprobs * ~padding).sum(axis=-1), (
                (logits.argmax(axis=-1) == answer) | padding
            ).all(axis=-1)

        logprobs, exact = jax.lax.map(score_candidate, candidates.swapaxes(0, 1))
        return logprobs.T, exact[0]

    return jax.jit(score, out_shardings=NamedSharding(mesh, PartitionSpec()))


def score_trials(config: ConfigDict, params: model.Params, T: int, trials: list[Trial], mesh: Mesh):
    """Scores trials, padded to T tokens, in batches: (log-probabilities [R, C], exact [R])."""
    R, A = len(trials), max(trial.candidates.shape[1] for trial in trials)
    batch_size = -(-min(config.eval.batch_size, R) // mesh.devices.size) * mesh.devices.size
    score, scores = _make_score(FrozenConfigDict(config.model), mesh), []
    for start in range(0, R, batch_size):
        rows = [
            trials[min(start + i, R - 1)] for i in sharding.rows_of_this_process(mesh, batch_size)
        ]
        batch = {
            "tokens": np.stack(
                [np.pad(trial.tokens, (0, T - len(trial.tokens))) for trial in rows]
            ),
            "lengths": np.array([len(trial.tokens) for trial in rows], np.int32),
            "candidates": np.stack(
                [np.pad(t.candidates, ((0, 0), (0, A - t.candidates.shape[1]))) for t in rows]
            ),
        }
        with sharding.use(mesh), matmul_precision(config.model.dtype):
            scored = score(params, *sharding.global_batch(mesh, batch, batch_size).values())
            scores.append([np.asarray(values)[: R - start] for values in scored])
    return tuple(map(np.concatenate, zip(*scores, strict=True)))


def _summarize(
    trials: list[Trial], logprobs: np.ndarray, exact: np.ndarray, rank: np.ndarray
) -> dict:
    """Computes shares with their 95 % intervals (Wilson, 1927), means, and what was likeliest instead."""
    from scipy import stats

    said = [trials[i].kinds[int(logprobs[i, 1:].argmax())] for i in np.flatnonzero(rank != 1)]
    summary = {"wrong": {kind: said.count(kind) for kind in dict.fromkeys(said)}}
    for name, hits in (("rank_accuracy", rank == 1), ("exact", exact)):
        interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
        summary |= {name: float(hits.mean()), f"{name}_interval": tuple(map(float, interval))}
    tokens, answers = (
        [len(trial.tokens) for trial in trials],
        [trial.candidates.shape[1] for trial in trials],
    )
    means = {
        "tokens": tokens,
        "answer_tokens": answers,
        "distance": [trial.distance for trial in trials],
    }
    means |= {"rank": rank, "logprob": logprobs[:, 0]}
    return summary | {name: float(np.mean(values)) for name, values in means.items()}


class Prompts:
    """The prompts of a task that `options`, flags of prope.evaluate, ask for; UsageError if a run cannot be asked."""

    split = "prompts"

    def __init__(self, task: str, T: int, config: ConfigDict, options):
        if config.model.rope_scaling_type == "dynamic":
            raise UsageError(
                f"--workdir={options.workdir}: --tasks keeps keys, which dynamic would rotate anew"
            )
        self._config, self._tokenizer = config, load_tokenizer(config.data.tokenizer)
        check_vocabulary(self._tokenizer, config, options.workdir)
        rows, depths = TASKS[task.partition("-")[0]].rows, options.depths
        if options.control == "near" and rows is DEPTHS:
            rows = (max(1 - _NEAR / T, 0.0),)
        elif depths is not None and rows is DEPTHS:
            if not all(
                re.fullmatch(r"0|1([.]0*)?|0?[.][0-9]+", depth) for depth in depths.split(",")
            ):
                raise UsageError(
                    f"--depths={depths}: must be fractions of the prompt in [0, 1], such as 0,0.5,1"
                )
            rows = tuple(
                dict.fromkeys(map(float, depths.split(",")))
            )  # the same prompts count once
        form = options.form or ("compact" if config.data.tokenizer == "byte" else "prose")
        self.about = {name: getattr(options, name) for name in ("control", "trials", "seed")}
        self.about |= {"task": task, "form": form, "rows": list(rows), "format": FORMAT}
        self.about["tokenizer"] = self._tokenizer.fingerprint
        self.seq_len, count = T, len(rows) * options.trials
        self.selection = Selection([*range(count)], fingerprint_of({"seq_len": T} | self.about))
        self.trial(rows[0], 0)  # raises where it cannot be asked

    def trial(self, row: float, number: int) -> Trial:
        """Makes a prompt of a row."""
        a = self.about
        asked = (
            a["task"],
            a["form"] == "prose",
            self.seq_len,
            row,
            number,
            a["seed"],
            a["control"] == "removed",
        )
        prompt = make_prompt(*asked, lambda text: 1 + len(self._tokenizer.encode(text.encode())))
        return encode(self._tokenizer, a["task"], prompt)

    def evaluate(self, params: model.Params, folder: epath.Path) -> dict:
        """Asks all prompts; writes their trials into `folder`, W/eval/STEP, and returns the record."""
        rows, number = self.about["rows"], self.about["trials"]
        trials = [self.trial(row, trial) for row in rows for trial in range(number)]
        logprobs, exact = score_trials(
            self._config, params, self.seq_len, trials, sharding.make_mesh()
        )
        foils, right = logprobs[:, 1:], logprobs[:, :1]
        rank = (
            1 + (~(foils <= right)).sum(axis=1) + (foils == right).sum(axis=1) / 2
        )  # nan is the worst
        scored, cells = (trials, logprobs, exact, rank), []
        for i, row in enumerate(rows):
            cells.append(
                {"row": row}
                | _summarize(*(values[i * number : (i + 1) * number] for values in scored))
            )
        record = self.about | {
            "cells": cells,
            "chance": 1 / logprobs.shape[1],
            **_summarize(*scored),
        }
        record |= {
            "fingerprint": self.selection.fingerprint,
            "seq_len": self.seq_len,
            "windows": len(trials),
        }
        log.info(
            "rank 1: %.3f, exact: %.3f, chance: %.3f",
            *(record[k] for k in ("rank_accuracy", "exact", "chance")),
        )
        if processes.is_first():
            failed = 1.0 - np.stack([rank == 1, exact], axis=1)
            kept = {
                "source": np.zeros(len(trials), int),
                "shares": [1.0],
                "rank": rank,
                "logprobs": logprobs,
            }
            paired.write_sums(
                folder, record, failed, np.ones_like(failed), edges=np.arange(3), **kept
            )
        return record


def paired_answers(
    workdir_a: str | os.PathLike, workdir_b: str | os.PathLike, exact: bool = False, **about
) -> paired.Difference:
    """Computes the difference of the shares of the same prompts that two runs answer, first minus second.

    Its standard error is that of McNemar's comparison, from the prompts that only one of them answers: at rank 1, or
    exactly. `about` are values that both records must have, such as task="niah".
    """
    columns, fields = (1, 2) if exact else (0, 1), {"split": Prompts.split} | about
    failed = paired.paired_difference(workdir_a, workdir_b, fields, columns, RECORDS)
    return failed._replace(difference=-failed.difference)

"""Evaluates checkpoints on the long-context tasks of prope/data/tasks, for python -m prope.ask.

A forward pass reads a prompt once; its answer and foils of as many tokens go on from the KV cache.
W/longcontext.jsonl has a record per step, task and length, W/eval/STEP/ its trials, which
`paired_answers` compares. A record, and each of its `cells`, one for a row of prompts, has:

accuracy       share of prompts whose right answer is likelier than all foils (rank 1)
guess          the no-retrieval baseline: what the best guess that matches no question with a fact
               would have; `guess_rule` names it (see `chances_without_retrieval`). Only an accuracy
               above it is retrieval. Older records have `chance` alone, of guessing without the
               prompt
exact          the same for: all tokens of the answer, and of what ends it, have the highest logit,
               as in greedy decoding
..._interval   their 95 % intervals (Wilson, 1927)
wrong          how often which kind of foil was likeliest
distance       mean number of tokens from the answer back to the evidence
row            depth of the evidence, or the task's own parameter

Axes: B prompts, T length, C candidates, A tokens of an answer, R trials.
"""

import collections
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prope import model
from prope.data.store.arrays import fingerprint_of
from prope.data.tasks.draws import Prompt
from prope.data.tasks.retrieval import DEPTHS
from prope.data.tasks.tasks import FORMAT, TASKS, make_prompt, parse_tasks, split_name
from prope.data.tokenizer import Tokenizer
from prope.errors import usage_error
from prope.inference import paired
from prope.inference.generation import fill_cache, load_vocabulary, split_layers
from prope.inference.losses import Selection, run_batches
from prope.inference.opening import records, specs_by_length
from prope.inference.options import Options
from prope.runtime import processes
from prope.spec.model import ModelSpec
from prope.spec.run import Spec

RECORDS = "longcontext.jsonl"
_NEAR = 32  # tokens from the evidence to the question, as a control
_FOILS = 7
_REMEDY = "take another --form, or other tasks"


class Trial(NamedTuple):
    """A prompt as tokens."""

    tokens: np.ndarray  # int32, as documents begin
    candidates: np.ndarray  # int32 [C, A], the right answer first
    kinds: list[str]  # kind of each foil, [C - 1]
    distance: int  # tokens from the answer back to the evidence
    guesses: dict[str, float]  # by rule, the chance that it is right: `chances_without_retrieval`


def chances_without_retrieval(text: str, candidates: list[str]) -> dict[str, float]:
    """Computes the chances that guesses are right which do not match the question with a fact.

    chance   any candidate
    uniform  any of those that stand in the text
    first    the one that stands there first
    last     the one that stands there last

    Where none stands there, all are `chance`. The first candidate is the right one.
    """
    # In prose a candidate has a space before it, and a space or the end of a line after it.
    text, *candidates = (part.replace("\n", " ") for part in (text, *candidates))
    right = candidates[0]
    chance = 1 / len(candidates)
    present = [candidate for candidate in candidates if candidate in text]
    if not present:
        return dict.fromkeys(("chance", "uniform", "first", "last"), chance)
    return {
        "chance": chance,
        "uniform": (right in present) / len(present),
        "first": float(min(present, key=text.find) == right),
        "last": float(max(present, key=text.rfind) == right),
    }


def no_retrieval_baseline(trials: list[Trial]) -> dict:
    """Finds the rule that is right most often; returns `guess`, its share, and `guess_rule`."""
    rules = trials[0].guesses
    shares = {rule: float(np.mean([trial.guesses[rule] for trial in trials])) for rule in rules}
    rule = max(shares, key=shares.get)
    return {"guess": shares[rule], "guess_rule": rule}


def encode(tokenizer: Tokenizer, task: str, prompt: Prompt) -> Trial:
    """Encodes a prompt, its answer and the first foils of as many tokens.

    Raises UsageError where the tokenizer has too few of them, or joins a prompt and its answer.
    """
    tokens = tokenizer.encode(prompt.text.encode())

    def encode_answer(text):
        whole = tokenizer.encode((prompt.text + text).encode())
        answer = whole[len(tokens) :]
        if not len(answer) or not np.array_equal(whole[: len(tokens)], tokens):
            problem = f"the tokenizer joins the prompt's end, {prompt.text[-20:]!r}, and {text!r}"
            raise usage_error("--tasks", task, problem, _REMEDY)
        return answer

    kind_of = {}
    for kind, texts in prompt.foils.items():
        for text in texts:
            kind_of.setdefault(text, kind)
    kind_of.pop(prompt.answer, None)
    wanted = min(len(kind_of), _FOILS)
    right = encode_answer(prompt.answer)
    encoded = ((text, encode_answer(text)) for text in kind_of)
    fitting = ((text, foil) for text, foil in encoded if len(foil) == len(right))
    foils = dict(itertools.islice(fitting, wanted))
    if len(foils) < wanted:
        raise usage_error(
            "--tasks",
            task,
            f"{len(foils)} of {wanted} wrong answers have as many tokens as {prompt.answer!r}",
            _REMEDY,
        )
    distance = len(tokens) - len(tokenizer.encode(prompt.text[: prompt.source].encode()))
    tokens = np.append(np.int32(tokenizer.special.start), tokens)
    candidates = np.stack([right, *foils.values()])
    kinds = [kind_of[text] for text in foils]
    guesses = chances_without_retrieval(prompt.text, [prompt.answer, *foils])
    return Trial(tokens, candidates, kinds, distance, guesses)


@functools.cache
def _make_score(spec: ModelSpec, num_ids: int, mesh: Mesh):
    """Makes the function that scores a batch: arrays [B, C] and [B], as `score_trials`."""

    def score(params, tokens, lengths, candidates, answer_lengths):
        layers = split_layers(spec, params)
        # The hidden state of a prompt's last token predicts the first of every answer.
        more = candidates.shape[2] - 1  # all tokens of an answer but its last
        last, cache = fill_cache(spec, layers, tokens, lengths, more, at_once=more)

        def score_candidate(answer):  # [B, A]
            hidden = last
            if answer.shape[1] > 1:
                rest, _ = model.decode(spec, layers, answer[:, :-1], cache, lengths)
                hidden = jnp.concatenate([last, rest], axis=1)
            logits = model.logits(spec, params, hidden)
            is_padding = jnp.arange(answer.shape[1])[None] >= answer_lengths[:, None]
            logprobs = jax.nn.log_softmax(logits)
            logprobs = jnp.take_along_axis(logprobs, answer[..., None], axis=-1)
            logprobs = logprobs[..., 0] * ~is_padding
            is_likeliest = logits[..., :num_ids].argmax(axis=-1) == answer
            exact = is_likeliest | is_padding
            return logprobs.sum(axis=-1), exact.all(axis=-1)

        candidates = candidates.swapaxes(0, 1)
        logprobs, exact = jax.lax.map(score_candidate, candidates)
        return {"logprobs": logprobs.T, "exact": exact[0]}

    return jax.jit(score, out_shardings=NamedSharding(mesh, PartitionSpec()))


def score_trials(
    spec: Spec, params: model.Params, T: int, trials: list[Trial], mesh: Mesh, num_ids: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores trials, padded to T tokens: log-probabilities [R, C], and which are exact, [R].

    Ids from `num_ids` on, which the tokenizer lacks, are never the likeliest.
    """
    R = len(trials)
    C = len(trials[0].candidates)
    A = max(trial.candidates.shape[1] for trial in trials)
    score = _make_score(spec.model, num_ids, mesh)

    def read(rows):
        batch = {
            "tokens": np.zeros((len(rows), T), np.int32),
            "lengths": np.zeros(len(rows), np.int32),
            "candidates": np.zeros((len(rows), C, A), np.int32),
            "answer_lengths": np.zeros(len(rows), np.int32),
        }
        for i, row in enumerate(rows):
            tokens, candidates, *_ = trials[min(row, R - 1)]
            batch["lengths"][i] = len(tokens)
            batch["tokens"][i, : len(tokens)] = tokens
            size = candidates.shape[1]
            batch["candidates"][i, :, :size] = candidates
            batch["answer_lengths"][i] = size
        return batch

    batches = list(run_batches(lambda batch: score(params, **batch), spec, mesh, R, read))
    logprobs = [scores["logprobs"] for scores in batches]
    exact = [scores["exact"] for scores in batches]
    return np.concatenate(logprobs), np.concatenate(exact)


# --- Checkpoints ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AskOptions(Options):
    """What to ask; the fields are the flags of prope.ask, which explains them."""

    tasks: str = "all"
    form: str | None = None
    depths: str | None = None
    trials: int = 32
    seed: int = 0
    control: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.depths is None:
            return
        if self.control == "near":
            raise usage_error("--depths", self.depths, "has no effect with --control=near")
        for depth in self.depths.split(","):
            if not re.fullmatch(r"0|1([.]0*)?|0?[.][0-9]+", depth):
                allowed = "must be fractions of the prompt in [0, 1], such as 0,0.5,1"
                raise usage_error("--depths", self.depths, allowed)

    def rows(self, task: str, T: int) -> list[float]:
        """Returns the depths of the evidence, or of another kind of task its own rows."""
        rows = TASKS[split_name(task)[0]].rows
        if rows is DEPTHS and self.control == "near":
            rows = [max(1 - _NEAR / T, 0.0)]
        elif rows is DEPTHS and self.depths is not None:
            # Equal depths count once, for they have the same prompts.
            rows = dict.fromkeys(map(float, self.depths.split(",")))
        return list(rows)


def answers(options: AskOptions) -> Iterator[dict]:
    """Yields the record of every task: by run, by checkpoint, by task, by length.

    Raises UsageError, before the first, where a run or a checkpoint is missing or cannot be asked.
    """
    tasks = parse_tasks(options.tasks)

    def open_prompts(run, encoding):
        specs = specs_by_length(run.spec, options, encoding)
        return [Prompts(task, T, spec, options) for task in tasks for T, spec in specs.items()]

    return records(options, open_prompts, RECORDS)


class Prompts:
    """The prompts of a task at a length; raises UsageError where a run cannot be asked."""

    split = "prompts"

    def __init__(self, task: str, T: int, spec: Spec, options: AskOptions):
        self.spec = spec
        self._tokenizer = load_vocabulary(spec, options.workdir)
        form = "compact" if spec.data.tokenizer == "byte" else "prose"
        self.about = {
            "control": options.control,
            "trials": options.trials,
            "seed": options.seed,
            "task": task,
            "form": options.form or form,
            "rows": options.rows(task, T),
            "format": FORMAT,
            "tokenizer": self._tokenizer.fingerprint,
        }
        count = len(self.about["rows"]) * options.trials
        self.selection = Selection(list(range(count)), fingerprint_of({"seq_len": T} | self.about))
        self.dataset = f"longcontext/{task}"
        self.seq_len = T
        self.trial(self.about["rows"][0], 0)  # raises where it cannot be asked

    def trial(self, row: float, number: int) -> Trial:
        """Makes a prompt of a row."""
        task = self.about["task"]
        prompt = make_prompt(
            task,
            prose=self.about["form"] == "prose",
            length=self.seq_len,
            row=row,
            trial=number,
            seed=self.about["seed"],
            removed=self.about["control"] == "removed",
            size=lambda text: 1 + len(self._tokenizer.encode(text.encode())),
        )
        return encode(self._tokenizer, task, prompt)

    def trials(self) -> list[Trial]:
        """Makes all prompts, by row."""
        numbers = range(self.about["trials"])
        return [self.trial(row, i) for row in self.about["rows"] for i in numbers]

    def evaluate(self, params: model.Params, mesh: Mesh, folder: epath.Path) -> dict:
        """Asks all prompts; writes their trials into `folder`, and returns the record."""
        number = self.about["trials"]
        rows = self.about["rows"]
        trials = self.trials()
        num_ids = self._tokenizer.vocab_size
        logprobs, exact = score_trials(self.spec, params, self.seq_len, trials, mesh, num_ids)
        rank = rank_first(logprobs)
        cells = []
        for i, row in enumerate(rows):
            cell = slice(i * number, (i + 1) * number)
            summary = summarize(trials[cell], logprobs[cell], exact[cell], rank[cell])
            cells.append({"row": row} | summary)
        record = {
            **self.about,
            "cells": cells,
            "chance": 1 / logprobs.shape[1],
            **summarize(trials, logprobs, exact, rank),
            "fingerprint": self.selection.fingerprint,
            "seq_len": self.seq_len,
            "windows": len(trials),
        }
        if processes.is_first():
            failed = 1.0 - np.stack([rank == 1, exact], axis=1)
            source = np.zeros(len(trials), int)
            sums = paired.Sums(failed, np.ones_like(failed), np.arange(3), source, [1.0])
            paired.write_sums(folder, record, sums, rank=rank, logprobs=logprobs)
        return record


def rank_first(logprobs: np.ndarray) -> np.ndarray:
    """Ranks the first candidate, [R]; nan has the worst rank, and equal ones share theirs."""
    first = logprobs[:, :1]
    others = logprobs[:, 1:]
    better = (~(others <= first)).sum(axis=1)
    return 1 + better + (others == first).sum(axis=1) / 2


def summarize(
    trials: list[Trial], logprobs: np.ndarray, exact: np.ndarray, rank: np.ndarray
) -> dict:
    """Computes shares with their intervals, means, and what was likeliest instead."""
    from scipy import stats

    likeliest = logprobs[:, 1:].argmax(axis=1)
    wrong = [trials[i].kinds[likeliest[i]] for i in np.flatnonzero(rank != 1)]
    summary = {"wrong": dict(collections.Counter(wrong))}
    for name, hits in (("accuracy", rank == 1), ("exact", exact)):
        interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
        summary[name] = float(hits.mean())
        summary[f"{name}_interval"] = tuple(map(float, interval))
    means = {
        "tokens": [len(trial.tokens) for trial in trials],
        "answer_tokens": [trial.candidates.shape[1] for trial in trials],
        "distance": [trial.distance for trial in trials],
        "rank": rank,
        "logprob": logprobs[:, 0],
    }
    summary |= {name: float(np.mean(values)) for name, values in means.items()}
    return summary | no_retrieval_baseline(trials)


def paired_answers(
    workdir_a: str | os.PathLike, workdir_b: str | os.PathLike, exact: bool = False, **about
) -> paired.Difference:
    """Computes the difference of the shares of prompts that two runs answer, first minus second.

    Its standard error is that of McNemar's comparison, from the prompts that only one of them
    answers: at rank 1, or exactly. `about` are values that both records must have, such as
    task="niah".
    """
    columns = (1, 2) if exact else (0, 1)
    fields = {"split": Prompts.split} | about
    failed = paired.paired_difference(workdir_a, workdir_b, fields, columns, RECORDS)
    return failed._replace(difference=-failed.difference)

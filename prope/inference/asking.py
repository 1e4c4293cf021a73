"""Evaluates checkpoints on the long-context tasks of prope/data/tasks, for python -m prope.ask.

W/longcontext.jsonl has a record per step, task and length, W/eval/STEP/ its trials, which
`paired_answers` compares. A record, and each of its `cells`, one for a row of prompts, has:

accuracy       share of prompts whose right answer is likelier than all foils (rank 1)
guess          the no-retrieval baseline: what the best guess that matches no question with a fact
               would have; `guess_rule` names it (see `trials.chances_without_retrieval`). Only an
               accuracy above it is retrieval. Older records have `chance` alone, of guessing
               without the prompt
exact          the same for: all tokens of the answer, and of what ends it, have the highest logit,
               as in greedy decoding
..._interval   their 95 % intervals (Wilson, 1927)
wrong          how often which kind of foil was likeliest
distance       mean number of tokens from the answer back to the evidence
row            depth of the evidence, or the task's own parameter

Axes: C candidates, R trials.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Iterator

import numpy as np
from etils import epath
from jax.sharding import Mesh

from prope import model
from prope.data.store.arrays import fingerprint_of
from prope.data.tasks.retrieval import DEPTHS
from prope.data.tasks.tasks import FORMAT, TASKS, make_prompt, parse_tasks, split_name
from prope.errors import usage_error
from prope.inference import paired
from prope.inference.generation import load_vocabulary
from prope.inference.losses import Selection
from prope.inference.opening import records, specs_by_length
from prope.inference.options import Options
from prope.inference.trials import Trial, encode, no_retrieval_baseline, score_trials
from prope.runtime import processes
from prope.spec.run import Spec
from prope.workdir.run import Run

RECORDS = "longcontext.jsonl"
_NEAR = 32  # tokens from the evidence to the question, as a control


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

    def open_prompts(run: Run, encoding: str | None) -> list[Prompts]:
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
        fingerprint = fingerprint_of({"seq_len": T} | self.about)
        self.selection = Selection(list(range(count)), fingerprint)
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
    equal = (others == first).sum(axis=1)
    return 1 + better + equal / 2


def summarize(
    trials: list[Trial], logprobs: np.ndarray, exact: np.ndarray, rank: np.ndarray
) -> dict:
    """Computes shares with their intervals, means, and what was likeliest instead."""
    from scipy import stats

    likeliest = logprobs[:, 1:].argmax(axis=1)
    wrong = [trials[i].kinds[likeliest[i]] for i in np.flatnonzero(rank != 1)]
    summary = {"wrong": dict(collections.Counter(wrong))}
    for name, hits in (("accuracy", rank == 1), ("exact", exact)):
        test = stats.binomtest(int(hits.sum()), len(hits))
        interval = test.proportion_ci(method="wilson")
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

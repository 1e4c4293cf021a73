"""Scores the answers of a model: the right one of a prompt, beside foils of as many tokens.

A forward pass reads a prompt once; all candidates go on from its KV cache.

Axes: B prompts, T length, C candidates, A tokens of an answer, R trials.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prope import model
from prope.data.tasks.draws import Prompt
from prope.data.tokenizer import Tokenizer
from prope.errors import usage_error
from prope.inference.generation import fill_cache, split_layers
from prope.inference.losses import run_batches
from prope.spec.model import ModelSpec
from prope.spec.run import Spec

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
    shares = {
        rule: float(np.mean([trial.guesses[rule] for trial in trials]))
        for rule in trials[0].guesses
    }
    rule = max(shares, key=shares.get)
    return {"guess": shares[rule], "guess_rule": rule}


def encode(tokenizer: Tokenizer, task: str, prompt: Prompt) -> Trial:
    """Encodes a prompt, its answer and the first foils of as many tokens.

    Raises UsageError where the tokenizer has too few of them, or joins a prompt and its answer.
    """
    tokens = tokenizer.encode(prompt.text.encode())

    def encode_answer(text: str) -> np.ndarray:
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

    def step(batch):
        return score(params, **batch)

    batches = list(run_batches(step, spec, mesh, R, read))
    logprobs = [scores["logprobs"] for scores in batches]
    exact = [scores["exact"] for scores in batches]
    return np.concatenate(logprobs), np.concatenate(exact)

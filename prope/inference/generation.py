"""Continues prompts with a saved checkpoint: python -m prope.sample --workdir=W --prompt=TEXT.

The prompts are read in one pass, which fills the KV cache; then one compiled loop makes a token of every row at a time.
Prompts of different lengths are padded on the right. A row's positions are those of its prompt alone, it sees no
padding, and its random numbers are its own: but for rounding, it becomes what it would alone.
"""

import dataclasses
import functools
import logging
import math
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import FrozenConfigDict

from prope import model, sharding
from prope.data.tokenizer import EOS, PAD, load_tokenizer
from prope.errors import UsageError
from prope.workdir import checkpoints as checkpoint

log = logging.getLogger("prope")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How prompts are continued.

    A token is drawn from softmax(scores / temperature), of which first the `top_k` likeliest tokens are kept, then of
    these the fewest likeliest ones whose share of them is at least `top_p` (the nucleus of Holtzman et al., 2020).

    Attributes:
      length: tokens to make.
      temperature: 0 takes the likeliest token, whatever top_k and top_p are.
      top_k: None keeps all.
      top_p: 1 keeps all.
      eos: the token that ends a row; the row's places after it hold <pad>.

    Raises:
      UsageError: a value out of its range.
    """

    length: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    eos: int = EOS

    def __post_init__(self):
        for name, holds, allowed in (
            ("length", self.length >= 1, "must be at least 1 token"),
            (
                "temperature",
                0 <= self.temperature < math.inf,
                "must be 0, for the likeliest token, or a finite number above",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "must be at least 1; leave it out to keep all tokens"),
            ("top_p", 0 < self.top_p <= 1, "must be a fraction in (0, 1], where 1 keeps all tokens"),
        ):
            if not holds:
                raise UsageError(f"{name}={getattr(self, name)}: {allowed}")


def generate(
    config: FrozenConfigDict,
    sampling: Sampling,
    params: model.Params,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: jax.Array,
) -> Int[Array, "B length"]:
    """The tokens after each prompt: `sampling.length` of them, <pad> where the row has ended before.

    Args:
      config: a run's `config.model`, frozen.
      sampling: how a token is chosen, and how many.
      params: the model's.
      prompts: tokens from <bos> on, padded on the right with anything; as `padded` makes them.
      lengths: tokens of each prompt, at least 1.
      keys: a random key [B] per row. The token at position m of a row is drawn with fold_in(its key, m).
    """
    first, cache = prefill(config, sampling, params, prompts, lengths, keys)
    return decode(config, sampling, params, first, cache, lengths, keys)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(
    config: FrozenConfigDict,
    sampling: Sampling,
    params: model.Params,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: jax.Array,
) -> tuple[Int[Array, " B"], model.Cache]:
    """The first token after each prompt, and the cache that `decode` goes on with; arguments as for `generate`."""
    B, T = prompts.shape
    cache = model.empty_cache(config, B, T + sampling.length - 1)  # the last token that is made is never read
    hidden, cache = model.prefill(config, params, prompts, cache)
    return choose(sampling, model.logits(params, hidden[jnp.arange(B), lengths - 1]), keys, lengths), cache


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="cache")
def decode(
    config: FrozenConfigDict,
    sampling: Sampling,
    params: model.Params,
    first: Int[Array, " B"],
    cache: model.Cache,
    lengths: Int[Array, " B"],
    keys: jax.Array,
) -> tuple[Int[Array, "B length"], model.Cache]:
    """All tokens after each prompt, `first` included, until all rows have ended; takes over the memory of the cache."""
    tokens = jnp.full((len(first), sampling.length), PAD, jnp.int32).at[:, 0].set(first)

    def unfinished(state):
        i, _, ended, _, _ = state
        return (i < sampling.length) & ~ended.all()

    def one_more(state):
        i, token, ended, tokens, cache = state
        hidden, cache = model.decode(config, params, token[:, None], cache, lengths + i - 1)
        token = choose(sampling, model.logits(params, hidden[:, 0]), keys, lengths + i)
        token = jnp.where(ended, PAD, token)
        return i + 1, token, ended | (token == sampling.eos), tokens.at[:, i].set(token), cache

    start = (jnp.int32(1), first, first == sampling.eos, tokens, cache)
    _, _, _, tokens, cache = jax.lax.while_loop(unfinished, one_more, start)
    return tokens, cache


def choose(
    sampling: Sampling, scores: Float[Array, "B V"], keys: jax.Array, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """A token per row by its scores, for these positions."""
    if sampling.temperature == 0:
        return jnp.argmax(scores, -1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, kept(sampling, scores)).astype(jnp.int32)


def kept(sampling: Sampling, scores: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Scores divided by the temperature, which must not be 0; -inf for the tokens that top_k and top_p leave out."""
    scores = scores - scores.max(axis=-1, keepdims=True)  # so that no quotient overflows to infinity
    scores = scores / max(sampling.temperature, 1e-6)
    if sampling.top_k is None and sampling.top_p == 1:
        return scores
    V = scores.shape[-1]
    best, ids = jax.lax.top_k(scores, min(sampling.top_k or V, V))
    if sampling.top_p < 1:
        shares = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        best = jnp.where(before < sampling.top_p, best, -jnp.inf)
    return jnp.put_along_axis(jnp.full_like(scores, -jnp.inf), ids, best, axis=-1, inplace=False)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """(prompts [B, T], lengths [B]) of the tokens of each prompt."""
    lengths = np.array([len(row) for row in rows], np.int32)
    prompts = np.full((len(rows), lengths.max()), PAD, np.int32)
    for row, tokens in zip(prompts, rows, strict=True):
        row[: len(tokens)] = tokens
    return jnp.asarray(prompts), jnp.asarray(lengths)


def row_keys(seed: int, count: int) -> jax.Array:
    """A random key for each of `count` rows: row i's is fold_in(key(seed), i)."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(count))


def read_prompts(prompts: Sequence[str], path: str | None) -> list[str]:
    """Those given one by one, then the lines of a file, without its empty ones.

    Raises:
      UsageError: there are none, or the text cannot be read as UTF-8.
    """
    texts = list(prompts)
    if path is not None:
        try:
            texts += [line for line in pathlib.Path(path).read_text(encoding="utf-8").split("\n") if line]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError(
                f"--prompts={path}: cannot be read: {reason}; give a text file with one prompt per line"
            ) from None
    for text in prompts:
        if any("\ud800" <= character <= "\udfff" for character in text):  # what Python makes of other bytes
            raise UsageError(f"--prompt={text!r}: is not UTF-8; give it in UTF-8")
    if not texts:
        empty = "" if path is None else f"--prompts={path}: has no line with text; "
        raise UsageError(f"{empty}no prompt: give --prompt=TEXT, or --prompts=FILE with one prompt per line")
    return texts


def continue_prompts(workdir: str, step: int | None, texts: list[str], sampling: Sampling, seed: int) -> dict:
    """Continues each of `texts` with a checkpoint of the run in `workdir`; returns what the command prints.

    Raises:
      UsageError: there is no such checkpoint, or its tokenizer does not fit the model.
    """
    config, step, _ = checkpoint.find_run(workdir, step)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"config.data.tokenizer={config.data.tokenizer}: has {tokenizer.vocab_size} ids, and the model of "
            f"{workdir} {config.model.vocab_size}; put back the tokenizer that the run was trained with"
        )
    prompts, lengths = padded([[tokenizer.bos, *tokenizer.encode(text.encode())] for text in texts])
    longest, seen = int(lengths.max()) + sampling.length, config.data.seq_len
    if longest > seen:
        log.info("%d tokens is longer than the %d that the run was trained on", longest, seen)
    params = checkpoint.load_run(workdir, step).params
    config.model.attention = "auto"  # of this machine, which need not be the one that trained
    keys = row_keys(seed, len(texts))
    static = FrozenConfigDict(config.model), sampling
    with sharding.use(sharding.make_mesh()):
        inputs = params, prompts, lengths, keys
        read, compiling = _compiled(prefill, static, inputs)
        jax.block_until_ready(read(*inputs))  # what a first call does once is not in the rates
        (first, cache), reading = _timed(read, inputs)
        write, more_compiling = _compiled(decode, static, (params, first, cache, lengths, keys))
        _, cache = write(params, jnp.full_like(lengths, EOS), cache, lengths, keys)  # here neither: all rows have ended
        (tokens, _), writing = _timed(write, (params, first, cache, lengths, keys))
    log.info("compiled in %.1f s", compiling + more_compiling)
    rows = [row[: row.index(EOS) + 1] if EOS in row else row for row in np.asarray(tokens).tolist()]
    made = sum(map(len, rows))
    continued = [tokenizer.decode(row[:-1] if row[-1] == EOS else row) for row in rows]
    for text, more in zip(texts, continued, strict=True):
        log.info("%s", text + more)
    return {
        "text": continued[0],
        "texts": continued,
        "prompt": texts[0],
        "prompts": texts,
        "tokens": made,
        "tokens_per_second": made / (reading + writing),
        "prefill_tokens_per_second": int(lengths.sum()) / reading,
        "decode_tokens_per_second": (made - len(rows)) / writing,
        "compile_seconds": compiling + more_compiling,
        "step": step,
        "rope_percentage": config.model.rope_percentage,
        "workdir": workdir,
    }


def _compiled(function, static: tuple, arguments: tuple) -> tuple:
    """(a jitted function, compiled for these arguments, the seconds that took)."""
    start = time.perf_counter()
    return function.lower(*static, *arguments).compile(), time.perf_counter() - start


def _timed(function, arguments: tuple) -> tuple:
    """(what the function returns, its seconds)."""
    start = time.perf_counter()
    return jax.block_until_ready(function(*arguments)), time.perf_counter() - start

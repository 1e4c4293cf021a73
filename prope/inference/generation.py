"""Continues prompts with a checkpoint; the room behind python -m prope.sample.

The prompts are read in chunks, which fill the KV cache; then one compiled loop generates a token for every row at a
time. Prompts of different lengths are padded on the right. Positions, attention and random numbers of a row do not
depend on the other rows: but for rounding, it becomes what it would be alone.

Axes: B rows, T prompt length, V vocab.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from prope import model, sharding
from prope.data.tokenizer import BOS, EOS, PAD, load_tokenizer
from prope.errors import UsageError, log
from prope.kernels.choice import matmul_precision
from prope.runtime import processes
from prope.runtime.files import read_text
from prope.workdir.run import Run, open_run

_CHUNK = 256  # most tokens of a prompt that are read at a time


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    A token is drawn from softmax(logits / temperature), restricted to the `top_k` likeliest tokens and then to the
    smallest set of likeliest tokens whose probability is at least `top_p` (nucleus sampling, Holtzman et al., 2020).

    Raises UsageError where a value is out of its range.
    """

    length: int  # tokens to generate
    temperature: float = 1.0  # 0 takes the likeliest token, whatever top_k and top_p are
    top_k: int | None = None  # None keeps all
    top_p: float = 1.0  # 1 keeps all
    eos: int = EOS  # ends a row; <pad> follows it

    def __post_init__(self):
        finite = 0 <= self.temperature < math.inf
        for name, valid, allowed in (
            ("length", self.length >= 1, "must be at least 1 token"),
            ("temperature", finite, "must be 0, for the likeliest token, or a finite number above"),
            (
                "top_k",
                self.top_k is None or self.top_k >= 1,
                "must be at least 1; leave it out to keep all tokens",
            ),
            (
                "top_p",
                0 < self.top_p <= 1,
                "must be a fraction in (0, 1], where 1 keeps all tokens",
            ),
        ):
            if not valid:
                raise UsageError(f"{name}={getattr(self, name)}: {allowed}")


@jax.jit(static_argnums=(0, 1))
def prefill(
    config: FrozenConfigDict,
    sampling: Sampling,
    params: model.Params,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: jax.Array,
) -> tuple[Int[Array, " B"], model.Cache]:
    """Returns the first token after each prompt, and the cache for `decode`.

    Args:
      config: a run's `config.model`, frozen.
      prompts: tokens from <bos> on, with any padding on the right; see `pad_prompts`.
      lengths: tokens of each prompt, at least 1.
      keys: a random key per row [B]. The token at position m of a row is drawn with fold_in(its key, m).
    """
    last, cache = fill_cache(config, params, prompts, lengths)
    more = [(0, 0)] * 3 + [
        (0, sampling.length - 1),
        (0, 0),
    ]  # slots; the last generated token is never read
    cache = {name: jnp.pad(x, more) for name, x in cache.items()}
    return sample_tokens(sampling, model.logits(params, last[:, 0]), keys, lengths), cache


def fill_cache(
    config: ConfigDict, params: model.Params, prompts: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B 1 D"], model.Cache]:
    """Returns `hidden_states` of each prompt's last token, and a cache of T slots with the prompts' keys and values.

    Equal chunks of the prompts are read one after the other: but for the cache, memory grows with T by a row of scores
    for each query of a chunk.
    """
    B, T = prompts.shape
    chunk = -(-T // -(-T // _CHUNK))
    prompts = jnp.pad(
        prompts, ((0, 0), (0, -T % chunk))
    )  # of this padding, nothing is written: it has no slots

    def read(carry, first):
        last, cache = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompts, first, chunk, axis=1)
        hidden, cache = model.decode(config, params, tokens, cache, jnp.full(B, first))
        place = (lengths - 1 - first)[:, None, None]
        found = jnp.take_along_axis(hidden, jnp.clip(place, 0, chunk - 1), axis=1)
        return (jnp.where((place >= 0) & (place < chunk), found, last), cache), None

    start = jnp.zeros((B, 1, config.embed_dim), config.dtype), empty_cache(config, B, T)
    return jax.lax.scan(read, start, jnp.arange(0, T, chunk, dtype=jnp.int32))[0]


@jax.jit(static_argnums=(0, 1), donate_argnames="cache")
def decode(
    config: FrozenConfigDict,
    sampling: Sampling,
    params: model.Params,
    first: Int[Array, " B"],
    cache: model.Cache,
    lengths: Int[Array, " B"],
    keys: jax.Array,
) -> tuple[Int[Array, "B length"], model.Cache]:
    """Returns the tokens from `first` on, with <pad> after a row's end, and the cache, which is donated."""
    params = split_layers(config, params)  # once, not for each token
    tokens = jnp.full((len(first), sampling.length), PAD, jnp.int32).at[:, 0].set(first)

    def unfinished(state):
        i, _, ended, _, _ = state
        return (i < sampling.length) & ~ended.all()

    def append_token(state):
        i, token, ended, tokens, cache = state
        hidden, cache = model.decode(config, params, token[:, None], cache, lengths + i - 1)
        token = sample_tokens(sampling, model.logits(params, hidden[:, 0]), keys, lengths + i)
        token = jnp.where(ended, PAD, token)
        return i + 1, token, ended | (token == sampling.eos), tokens.at[:, i].set(token), cache

    start = (jnp.int32(1), first, first == sampling.eos, tokens, cache)
    _, _, _, tokens, cache = jax.lax.while_loop(unfinished, append_token, start)
    return tokens, cache


def empty_cache(config: ConfigDict, batch: int, length: int) -> model.Cache:
    """Allocates a cache for the keys and values of `length` tokens of `batch` sequences."""
    shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
    return {name: jnp.zeros(shape, config.dtype) for name in ("key", "value")}


def split_layers(config: ConfigDict, params: model.Params) -> model.Params:
    """Makes "layers" a tuple of the parameters of each layer, with matrices in `config.dtype`, for `model.decode`."""
    layers = jax.tree.map(
        lambda x: jnp.unstack(x.astype(config.dtype) if x.ndim > 2 else x), params["layers"]
    )
    return params | {
        "layers": jax.tree.transpose(jax.tree.structure(params["layers"]), None, layers)
    }


def sample_tokens(
    sampling: Sampling, logits: Float[Array, "B V"], keys: jax.Array, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Samples the token of each row at these positions from its logits."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(keys, filter_logits(sampling, logits)).astype(jnp.int32)


def filter_logits(sampling: Sampling, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Divides logits by a temperature above 0; sets those that top_k and top_p exclude to -inf."""
    logits = logits - logits.max(
        axis=-1, keepdims=True
    )  # so that no quotient overflows to infinity
    logits = logits / max(sampling.temperature, 1e-6)
    if sampling.top_k is None and sampling.top_p == 1:
        return logits
    V = logits.shape[-1]
    best, ids = jax.lax.top_k(logits, min(sampling.top_k or V, V))
    if sampling.top_p < 1:
        probs = jax.nn.softmax(best, axis=-1)
        best = jnp.where(jnp.cumsum(probs, axis=-1) - probs < sampling.top_p, best, -jnp.inf)
    return jnp.put_along_axis(jnp.full_like(logits, -jnp.inf), ids, best, axis=-1, inplace=False)


def pad_prompts(rows: Sequence[Sequence[int]]) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Pads the tokens of prompts to (prompts [B, T], lengths [B])."""
    lengths = np.array([len(row) for row in rows], np.int32)
    prompts = np.array([*itertools.zip_longest(*rows, fillvalue=PAD)], np.int32).T
    return jnp.asarray(prompts), jnp.asarray(lengths)


def row_keys(seed: int, count: int) -> jax.Array:
    """Makes a random key per row: fold_in(key(seed), i) for row i."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(count))


def read_prompts(prompts: Sequence[str], path: str | None) -> list[str]:
    """Returns the prompts, followed by the non-empty lines of a file; raises UsageError if there are none."""
    texts = list(prompts)
    if path is not None:
        text = read_text("prompts", path, "give a text file with one prompt per line")
        texts += [line for line in text.split("\n") if line]
    for text in prompts:
        if any(
            "\ud800" <= character <= "\udfff" for character in text
        ):  # Python's stand-ins for other bytes
            raise UsageError(f"--prompt={text!r}: is not UTF-8; give it in UTF-8")
    if not texts:
        empty = "" if path is None else f"--prompts={path}: has no line with text; "
        raise UsageError(
            f"{empty}no prompt: give --prompt=TEXT, or --prompts=FILE with one prompt per line"
        )
    return texts


def check_vocabulary(tokenizer, config: ConfigDict, workdir: str) -> None:
    """Raises UsageError where a run's model cannot say all that its tokenizer encodes."""
    if tokenizer.vocab_size > config.model.vocab_size:
        sizes = (
            f"has {tokenizer.vocab_size} ids, and the model of {workdir} {config.model.vocab_size}"
        )
        remedy = "put back the tokenizer that the run was trained with"
        raise UsageError(f"config.data.tokenizer={config.data.tokenizer}: {sizes}; {remedy}")


def continue_prompts(
    workdir: str, step: int | None, texts: list[str], sampling: Sampling, seed: int
) -> dict:
    """Continues `texts` with a checkpoint of the run in `workdir`; returns the command's JSON object."""
    run = open_run(workdir, step)
    config = run.config
    with processes.raise_on_all():
        tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config, workdir)
    prompts, lengths = pad_prompts(
        [[BOS, *map(int, tokenizer.encode(text.encode()))] for text in texts]
    )
    if config.model.rope_scaling_type == "dynamic":
        cached = "config.model.rope_scaling_type=dynamic: keys in a cache would need another rotation as the text grows"
        raise UsageError(
            f"--workdir={workdir}: {cached}; python -m prope.evaluate takes such a run"
        )
    longest, trained = int(lengths.max()) + sampling.length, config.data.seq_len
    if longest > trained:
        log.info("%d tokens is longer than the %d that the run was trained on", longest, trained)
    run, params = run.first_undamaged(Run.params)
    config.model.attention = "auto"  # of this machine, which need not be the one that trained
    static = FrozenConfigDict(config.model), sampling
    mesh = sharding.make_mesh()
    replicated = NamedSharding(mesh, PartitionSpec())
    prompts, lengths = jax.device_put((prompts, lengths), replicated)
    keys = jax.jit(row_keys, static_argnums=(0, 1), out_shardings=replicated)(seed, len(texts))
    with sharding.use(mesh), matmul_precision(config.model.dtype):
        inputs = params, prompts, lengths, keys
        compiled_prefill, seconds = _timed(lambda: prefill.lower(*static, *inputs).compile())
        jax.block_until_ready(
            compiled_prefill(*inputs)
        )  # the first call's one-time work is not in the rates
        (first, cache), prefill_seconds = _timed(lambda: compiled_prefill(*inputs))
        compiled_decode, more = _timed(
            lambda: decode.lower(*static, params, first, cache, lengths, keys).compile()
        )
        ended = jax.device_put(np.full(len(texts), EOS, np.int32), first.sharding)
        _, cache = compiled_decode(params, ended, cache, lengths, keys)  # warm-up: no row goes on
        (tokens, _), decode_seconds = _timed(
            lambda: compiled_decode(params, first, cache, lengths, keys)
        )
    compile_seconds = seconds + more
    log.info("compiled in %.1f s", compile_seconds)
    tokens = np.asarray(jax.device_put(tokens, replicated))  # each process had a part
    rows = [row[: row.index(EOS) + 1] if EOS in row else row for row in tokens.tolist()]
    count = sum(map(len, rows))
    continuations = [tokenizer.decode(row[:-1] if row[-1] == EOS else row) for row in rows]
    for text, continuation in zip(texts, continuations, strict=True):
        log.info("%s", text + continuation)
    return {
        "text": continuations[0],
        "texts": continuations,
        "prompt": texts[0],
        "prompts": texts,
        "tokens": count,
        "tokens_per_second": count / (prefill_seconds + decode_seconds),
        "prefill_tokens_per_second": int(lengths.sum()) / prefill_seconds,
        "decode_tokens_per_second": (count - len(rows)) / decode_seconds,
        "compile_seconds": compile_seconds,
        "step": run.step,
        "rope_percentage": config.model.rope_percentage,
        "workdir": workdir,
    }


def _timed(function: Callable) -> tuple:
    """Calls a function; returns its result and the seconds that took."""
    start = time.perf_counter()
    return jax.block_until_ready(function()), time.perf_counter() - start

"""Continues prompts with a checkpoint; the room behind python -m prope.sample.

The prompts are read in chunks, which fill the KV cache; then one compiled loop generates a token
for every row at a time. Prompts of different lengths are padded on the right. Positions, attention
and random numbers of a row do not depend on the other rows: but for rounding, it becomes what it
would be alone.

Axes: B rows, T prompt length, V vocab.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from prope import model, sharding
from prope.data.chat import encode_chat
from prope.data.tokenizer import GEMMA_IDS, Tokenizer, load_tokenizer, token_name
from prope.errors import log, usage_error
from prope.inference.opening import for_this_machine
from prope.kernels.choice import matmul_precision
from prope.parameters import by_stack
from prope.runtime import processes
from prope.runtime.environment import advise_dtype
from prope.runtime.files import read_text
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.workdir.run import Run, open_run

_CHUNK = 512  # most tokens of a prompt that are read at a time, after the first ones
# By platform: tokens of all rows that are read first, at once, for the cache is empty.
_FIRST_CHUNK = {"gpu": 2**14}

Prompts = Int[Array, "B T"]
Rows = Int[Array, " B"]
Logits = Float[Array, "B V"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    A token is drawn from softmax(logits / temperature), restricted to the `top_k` likeliest tokens
    and then to the smallest set of likeliest tokens whose probability is at least `top_p` (nucleus
    sampling, Holtzman et al., 2020). The flags of prope.sample have the ranges of the values.
    """

    length: int  # tokens to generate
    temperature: float = 1.0  # 0 takes the likeliest token, whatever top_k and top_p are
    top_k: int | None = None  # None keeps all
    top_p: float = 1.0  # 1 keeps all
    eos: int = GEMMA_IDS.eos  # ends a row; `pad` follows it
    stop_ids: tuple[int, ...] = ()  # more ids that do
    pad: int = GEMMA_IDS.pad
    vocab_size: int | None = None  # ids from here on, which the tokenizer lacks, are not sampled


@jax.jit(static_argnums=(0, 1))
def prefill(
    spec: ModelSpec,
    sampling: Sampling,
    params: model.Params,
    prompts: Prompts,
    lengths: Rows,
    keys: jax.Array,
) -> tuple[Rows, model.Cache]:
    """Returns the first token after each prompt, and the cache for `decode`.

    Args:
      spec: the model.
      prompts: tokens from <bos> on, with any padding on the right; see `pad_prompts`.
      lengths: tokens of each prompt, at least 1.
      keys: a random key per row [B]. The token at position m of a row is drawn with
        fold_in(its key, m).
    """
    # Slots for all generated tokens but the last, which is never read.
    last, cache = fill_cache(spec, params, prompts, lengths, sampling.length - 1)
    logits = model.logits(spec, params, last[:, 0])
    return sample_tokens(sampling, logits, keys, lengths), cache


def fill_cache(
    spec: ModelSpec,
    params: model.Params,
    prompts: Prompts,
    lengths: Rows,
    more: int = 0,
    at_once: int = 1,
) -> tuple[Float[Array, "B 1 D"], model.Cache]:
    """Returns `hidden_states` of each prompt's last token, and a cache of the prompts.

    The cache has room for `more` tokens, of which `model.decode` gets `at_once` at most. Equal
    chunks of the prompts, after a first one on GPUs, are read one after the other: memory grows
    with the cache alone.
    """
    B, T = prompts.shape
    most = _FIRST_CHUNK.get(jax.devices()[0].platform)
    first = min(T, max(_CHUNK, most // B)) if most else 0
    rest = T - first
    chunks = -(-rest // _CHUNK)
    size = -(-rest // max(chunks, 1))
    at_once = max(at_once, size)
    # Nothing is written for this padding: it has no slots.
    prompts = jnp.pad(prompts, ((0, 0), (0, chunks * size - rest)))

    def read(carry, tokens, first_query=None):
        last, cache = carry
        hidden, cache = model.decode(spec, params, tokens, cache, first_query, lengths)
        start = 0 if first_query is None else first_query
        place = (lengths - 1 - start)[:, None, None]
        is_here = (place >= 0) & (place < tokens.shape[1])
        last_here = jnp.take_along_axis(hidden, place, axis=1, mode="clip")
        return jnp.where(is_here, last_here, last), cache

    def read_chunk(carry, start):
        tokens = jax.lax.dynamic_slice_in_dim(prompts, start, size, axis=1)
        return read(carry, tokens, jnp.full(B, start)), None

    carry = (jnp.zeros((B, 1, spec.embed_dim), spec.dtype), empty_cache(spec, B, T, at_once))
    if first:
        carry = read(carry, prompts[:, :first])
    if chunks:
        starts = jnp.arange(first, T, size, dtype=jnp.int32)
        carry, _ = jax.lax.scan(read_chunk, carry, starts)
    last, cache = carry

    def copy(old, new):
        return new.at[:, :, :, : old.shape[3]].set(old)

    return last, jax.tree.map(copy, cache, empty_cache(spec, B, T + more, at_once))


@jax.jit(static_argnums=(0, 1), donate_argnames="cache")
def decode(
    spec: ModelSpec,
    sampling: Sampling,
    params: model.Params,
    first: Rows,
    cache: model.Cache,
    lengths: Rows,
    keys: jax.Array,
) -> tuple[Int[Array, "B length"], model.Cache]:
    """Returns the tokens from `first` on, `pad` after a row's end, and the cache; it is donated."""
    params = split_layers(spec, params)  # once, not for each token
    tokens = jnp.full((len(first), sampling.length), sampling.pad, jnp.int32)
    tokens = tokens.at[:, 0].set(first)
    stops = jnp.array([sampling.eos, *sampling.stop_ids])

    def unfinished(state):
        i, _, ended, *_ = state
        return (i < sampling.length) & ~ended.all()

    def append_token(state):
        i, token, ended, tokens, cache = state
        position = lengths + i
        hidden, cache = model.decode(spec, params, token[:, None], cache, position - 1)
        logits = model.logits(spec, params, hidden[:, 0])
        token = sample_tokens(sampling, logits, keys, position)
        token = jnp.where(ended, sampling.pad, token)
        ended |= jnp.isin(token, stops)
        tokens = tokens.at[:, i].set(token)
        return i + 1, token, ended, tokens, cache

    ended = jnp.isin(first, stops)
    state = (jnp.int32(1), first, ended, tokens, cache)
    *_, tokens, cache = jax.lax.while_loop(unfinished, append_token, state)
    return tokens, cache


def empty_cache(spec: ModelSpec, batch: int, length: int, at_once: int = _CHUNK) -> model.Cache:
    """Allocates a cache for the keys and values of `length` tokens of `batch` sequences.

    A layer with a window keeps what `at_once` tokens can see.
    """
    cache = {}
    own = [layer for layer in spec.layers if not layer.shares_kv]
    for kind in dict.fromkeys(layer.kind for layer in own):
        of_kind = [layer for layer in own if layer.kind == kind]
        layer = of_kind[0]
        slots = length
        if layer.window is not None and not layer.sinks:
            slots = min(length, layer.window + at_once - 1)
        shape = (len(of_kind), batch, layer.num_kv_heads, slots, layer.head_dim)
        cache[kind] = {name: jnp.zeros(shape, spec.dtype) for name in ("key", "value")}
    return cache


def split_layers(spec: ModelSpec, params: model.Params) -> model.Params:
    """Makes "layers" a tuple of each layer's parameters, its matrices in `spec.dtype`."""

    def unstack(leaf):
        if leaf.ndim > 2:
            leaf = leaf.astype(spec.dtype)
        return jnp.unstack(leaf)

    def split(stacked):
        by_layer = jax.tree.map(unstack, stacked)
        return jax.tree.transpose(jax.tree.structure(stacked), None, by_layer)

    stacked_layers = by_stack(spec, params["layers"])
    rows = {stack: split(stacked) for stack, stacked in stacked_layers.items()}
    return params | {"layers": tuple(rows[layer.stack][layer.row] for layer in spec.layers)}


def sample_tokens(sampling: Sampling, logits: Logits, keys: jax.Array, positions: Rows) -> Rows:
    """Samples the token of each row at these positions from its logits."""
    V = logits.shape[-1]
    if sampling.vocab_size is not None and sampling.vocab_size < V:
        is_known = jnp.arange(V)[None] < sampling.vocab_size
        logits = jnp.where(is_known, logits, -jnp.inf)
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    logits = filter_logits(sampling, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def filter_logits(sampling: Sampling, logits: Logits) -> Logits:
    """Divides logits by a temperature above 0; sets those that top_k and top_p exclude to -inf."""
    # Differences, so that no quotient overflows to infinity.
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = logits / max(sampling.temperature, 1e-6)
    if sampling.top_k is None and sampling.top_p == 1:
        return logits
    V = logits.shape[-1]
    best, ids = jax.lax.top_k(logits, min(sampling.top_k or V, V))
    if sampling.top_p < 1:
        probs = jax.nn.softmax(best, axis=-1)
        likelier = jnp.cumsum(probs, axis=-1) - probs  # probability of all likelier tokens
        best = jnp.where(likelier < sampling.top_p, best, -jnp.inf)
    excluded = jnp.full_like(logits, -jnp.inf)
    return jnp.put_along_axis(excluded, ids, best, axis=-1, inplace=False)


def pad_prompts(rows: Sequence, T: int = 0) -> tuple[Prompts, Rows]:
    """Pads the tokens of prompts to (prompts [B, T], lengths [B]), by default to the longest."""
    lengths = np.array(list(map(len, rows)), np.int32)
    prompts = np.zeros((len(rows), T or lengths.max()), np.int32)
    for prompt, row in zip(prompts, rows, strict=True):
        prompt[: len(row)] = row
    return jnp.asarray(prompts), jnp.asarray(lengths)


def row_keys(seed: int, count: int) -> jax.Array:
    """Makes a random key per row: fold_in(key(seed), i) for row i."""
    key = jax.random.key(seed, impl=model.PRNG)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def read_prompts(prompts: Sequence[str], path: str | None) -> list[str]:
    """Returns the prompts, and the lines of a file with text; UsageError if there are none."""
    for text in prompts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise usage_error("--prompt", repr(text), "is not UTF-8", "give it in UTF-8") from None
    texts = list(prompts)
    if path is not None:
        text = read_text("prompts", path, "give a text file with one prompt per line")
        texts += [line for line in text.split("\n") if line]
    if not texts:
        problem = "there is no prompt; give --prompt=TEXT, or a file with one prompt per line"
        raise usage_error("--prompts", path, problem)
    return texts


def read_message() -> str:
    """Reads a message of a chat, a line of stdin; an empty one ends the chat."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def load_vocabulary(spec: Spec, workdir: str) -> Tokenizer:
    """Loads a run's tokenizer.

    Raises UsageError where the model cannot say all that it encodes, or cannot have a cache.
    """
    if spec.model.rope_scaling_type == "dynamic":
        problem = "keys in a cache would rotate anew as the text grows: rope_scaling_type=dynamic"
        raise usage_error("--workdir", workdir, problem, "python -m prope.evaluate takes it")
    tokenizer = load_tokenizer(spec.data.tokenizer)
    ids = spec.model.vocab_size
    if tokenizer.text_size > ids:
        problem = f"has {tokenizer.text_size} ids, and the model of {workdir} {ids}"
        remedy = "put back the tokenizer that the run was trained with"
        raise usage_error("config.data.tokenizer", spec.data.tokenizer, problem, remedy)
    return tokenizer


def continue_prompts(
    workdir: str,
    step: int | None,
    texts: list[str],
    sampling: Sampling,
    seed: int,
    start: str = "document",
    dtype: str | None = None,
    ask: Callable[[], str] = str,
) -> dict:
    """Continues `texts` with a checkpoint of a run; returns the command's JSON object.

    Before a text stands what documents begin with, unless `start` is "none". If it is "chat", each
    text is a message, of which the tokenizer's chat template makes a prompt. A chat goes on with
    the messages that `ask` returns, up to an empty one; the result is then that of the last. The
    model is computed in `dtype`, by default the run's.
    """
    run = open_run(workdir, step)
    spec = for_this_machine(run.spec.model, dtype)
    with processes.raise_on_all():
        tokenizer = load_vocabulary(run.spec, workdir)
        special = tokenizer.special
        stops = [*special.ends, *run.spec.data.stop_ids]
        start_ids = [special.start] if start == "document" else []
        between = ""
        encode = functools.partial(encode_chat, run.spec.data.tokenizer, tokenizer)
        turns = [[text] for text in texts]
        if start == "chat":
            between = "\n"
            prompts = list(map(encode, turns))
            # Those that the template writes: the end of a turn, and the beginning of the next.
            stops += tokenizer.special_ids.intersection(*prompts)
        else:
            prompts = [start_ids + tokenizer.encode(text.encode()).tolist() for text in texts]
    if not all(prompts):
        problem = "an empty prompt then has no token to continue"
        raise usage_error("--start", start, problem, "give text, or --start=document")
    names = {"document": token_name(tokenizer, special.start), "chat": "the chat template"}
    first = names.get(start)
    log.info("before a prompt: %s; computed in %s", first or "nothing", spec.dtype)
    unknown = sum(np.count_nonzero(special.is_unknown(np.array(ids))) for ids in prompts)
    if unknown:
        log.warning("%d tokens of the prompts are <unk>: the tokenizer does not know them", unknown)
    longest = max(map(len, prompts)) + sampling.length
    trained = run.spec.data.seq_len
    if longest > trained:
        log.info("%d tokens is longer than the %d that the run was trained on", longest, trained)
    run, params = run.restore_newest_valid(Run.params)
    advise_dtype(spec.dtype)
    sampling = dataclasses.replace(
        sampling,
        eos=special.eos,
        stop_ids=tuple(stops),
        pad=special.pad,
        vocab_size=tokenizer.vocab_size,
    )
    while True:
        tokens, seconds = generate(spec, sampling, params, prompts, seed)
        continuations = []
        count = 0
        for text, prompt, row in zip(texts, prompts, tokens.tolist(), strict=True):
            ends = (i for i, token in enumerate(row) if token in stops)
            stop = next(ends, len(row))
            count += min(stop + 1, len(row))
            # Decoded alone, some tokenizers leave out the space before it.
            before = len(tokenizer.decode(prompt))
            continuation = tokenizer.decode([*prompt, *row[:stop]])[before:]
            continuations.append(continuation)
            log.info("%s%s%s", text, between, continuation)
        message = ask()
        if not message:
            break
        turns[0] += [continuation, message]
        prompts = [encode(turns[0])]
        texts = [message]
    return {
        "text": continuations[0],
        "texts": continuations,
        "prompt": texts[0],
        "prompts": texts,
        "tokens": count,
        "tokens_per_second": count / (seconds["prefill"] + seconds["decode"]),
        "prefill_tokens_per_second": sum(map(len, prompts)) / seconds["prefill"],
        "decode_tokens_per_second": (count - len(texts)) / seconds["decode"],
        "compile_seconds": seconds["compile"],
        "step": run.step,
        "rope_percentage": spec.rope_percentage,
        "dtype": spec.dtype,
        "start": first,
        "workdir": workdir,
    }


def generate(
    spec: ModelSpec, sampling: Sampling, params: model.Params, rows: Sequence, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Continues rows of tokens on all devices: tokens [B, length], and how long what took."""
    mesh = sharding.make_mesh()
    replicated = NamedSharding(mesh, PartitionSpec())
    longest = max(map(len, rows))
    # To a power of two, or whole chunks: few lengths, so that few programs are compiled.
    T = min(1 << (longest - 1).bit_length(), -(-longest // _CHUNK) * _CHUNK)
    prompts, lengths = jax.device_put(pad_prompts(rows, T), replicated)
    make_keys = jax.jit(row_keys, static_argnums=(0, 1), out_shardings=replicated)
    keys = make_keys(seed, len(rows))
    ended = jax.device_put(np.full(len(rows), sampling.eos, np.int32), replicated)

    def read():
        return prefill(spec, sampling, params, prompts, lengths, keys)

    def write(first, cache):
        return decode(spec, sampling, params, first, cache, lengths, keys)

    with sharding.use(mesh), matmul_precision(spec.dtype):
        # The first calls compile; that, and other one-time work, is not in the rates.
        (_, cache), prefill_seconds = _timed(read)
        _, decode_seconds = _timed(write, ended, cache)
        seconds = {"compile": prefill_seconds + decode_seconds}
        log.info("compiled in %.1f s", seconds["compile"])
        (first, cache), seconds["prefill"] = _timed(read)
        (tokens, _), seconds["decode"] = _timed(write, first, cache)
    # Each process has some of the tokens.
    tokens = jax.device_put(tokens, replicated)
    return np.asarray(tokens), seconds


def _timed(function: Callable, *arguments) -> tuple:
    """Calls a function; returns its result and the seconds that took."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - start

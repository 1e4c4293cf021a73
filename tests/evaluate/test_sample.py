"""Sampling with the KV cache, against the full forward without one and distributions in NumPy."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import SingleDeviceSharding
from oracles import decoder
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.commands import needs_cuda
from support.compiled import array_shapes
from support.models import (
    ALL_SWITCHES,
    DENSE4,
    E4,
    KINDS_OF_LAYERS,
    SWITCHES,
    draw_model,
    forward,
    same,
    small,
)
from support.runs import make_run

from prope import model
from prope.cost.topology import as_if_attached, find_devices
from prope.data.tokenizer import GEMMA_IDS
from prope.errors import UsageError
from prope.inference import generation
from prope.inference.generation import Sampling, empty_cache

LENGTHS = (4, 9, 1, 6)
NEVER = -1  # an eos that no token is


def draw_prompts(params, lengths=LENGTHS, seed=3):
    """Ragged prompts [B, T] with random tokens for padding: whoever sees them is told apart."""
    rng = np.random.default_rng(seed)
    vocab = len(model.embedding(params))
    tokens = rng.integers(4, vocab, (len(lengths), max(lengths)))
    return jnp.asarray(tokens, jnp.int32), jnp.array(lengths, jnp.int32)


def lively(spec):
    """Parameters whose attention outweighs the token: it is seldom the likeliest to come again."""
    params, *_ = draw_model(spec)

    def scale(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf * 5 if path.endswith(("attn_vec_einsum/w", "mlp/linear")) else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def full_forward(spec, params, rows):
    """The logits [B, T, V] of sequences without a cache; a row sees nothing after it."""
    tokens, _ = generation.pad_prompts([*rows, [0] * 24])  # all of one shape, so compiled once
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    return np.asarray(forward(spec, params, tokens, positions))[:-1]


def join(prompts, more, lengths=LENGTHS):
    """The tokens of each prompt without padding, and those that follow."""
    return [[*prompts[b, :n].tolist(), *more[b].tolist()] for b, n in enumerate(lengths)]


def without_cache(spec, sampling, params, prompts, lengths, keys):
    """The continuations, every token by the full forward of all before it."""
    rows = [row[:n].tolist() for row, n in zip(prompts, lengths, strict=True)]
    for _ in range(sampling.length):
        logits = full_forward(spec, params, rows)
        for row, scores, key in zip(rows, logits, keys, strict=True):
            last = jnp.asarray(scores[len(row) - 1])
            if sampling.temperature:
                noise = jax.random.fold_in(key, len(row))
                token = jax.random.categorical(noise, last / sampling.temperature)
            else:
                token = last.argmax()
            row.append(int(token))
    return [row[n:] for row, n in zip(rows, lengths, strict=True)]


def generate(spec, sampling, params, prompts, lengths, keys):
    first, cache = generation.prefill(spec, sampling, params, prompts, lengths, keys)
    tokens, _ = generation.decode(spec, sampling, params, first, cache, lengths, keys)
    return np.asarray(tokens)


OF_LAYERS = {"rope_percentage": (1.0, 1.0, 0.5, 1.0, 1.0), "attention_scale": 0.1}
VARIANTS = [
    {"rope_percentage": (1.0, 0.25, 0.0), "num_kv_heads": 2},
    {"rope_percentage": 0.5, **ALL_SWITCHES, "attention_scale": 0.1},
]
for fields in (
    KINDS_OF_LAYERS | SWITCHES | OF_LAYERS,
    DENSE4,
    E4,
    {"num_kv_heads": 1, "scan_layers": False, "remat": "full"},
):
    VARIANTS.append(pytest.param(fields, marks=pytest.mark.slow))

# --- With the cache as without ----------------------------------------------------------------


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_logits_equal_those_of_the_full_forward(fields):
    """Prompts of different lengths and what follows them, token by token and several at once."""
    spec = small(**fields)
    params = lively(spec)
    prompts, lengths = draw_prompts(params)
    rng = np.random.default_rng(4)
    more = rng.integers(0, spec.vocab_size, (4, 7))
    more = jnp.asarray(more, jnp.int32)
    rows = join(prompts, more)

    def without_cache(params):
        logits = full_forward(spec, params, rows)
        return [logits[b, : n + 7] for b, n in enumerate(LENGTHS)]

    expected, movement = measure_rounding(without_cache, params)
    assert expected[0].std() > 1
    decode = jax.jit(functools.partial(model.decode, spec))
    start = jnp.zeros(4, jnp.int32)
    hidden, cache = decode(params, prompts, empty_cache(spec, 4, 16), start)
    read = np.asarray(model.logits(spec, params, hidden))
    layers = generation.split_layers(spec, params)
    written = []
    place = 0
    for size in (1, 1, 3, 1, 1):
        tokens = more[:, place : place + size]
        hidden, cache = decode(layers, tokens, cache, lengths + place)
        written.append(model.logits(spec, params, hidden))
        place += size
    written = np.concatenate(written, axis=1)
    for b, n in enumerate(LENGTHS):
        (exact,) = decoder(spec, params, [rows[b][: n + 7]], np.arange(n + 7)[None])
        logits = np.concatenate([read[b, :n], written[b]])
        assert_equal_but_rounding(logits, exact, movement[b])
        assert_equal_but_rounding(logits, expected[b], movement[b])


@pytest.mark.parametrize(
    ("first", "most", "fields"), [(0, 1, VARIANTS[0]), (0, 4, VARIANTS[1]), (7 * 5, 2, VARIANTS[1])]
)
def test_prompts_read_in_chunks_give_what_one_pass_gives(monkeypatch, first, most, fields):
    """Chunks of 1 and 4 tokens, or one of 7 and two of 2; rows that end within one, with one, and
    in the first.

    A prompt of 10 tokens is longer than the window of the layers that have one, 6. What follows is
    given at once, more than a chunk, and finds in the cache what it sees.
    """
    spec = small(**fields)
    params = lively(spec)
    prompts, lengths = draw_prompts(params, (4, 10, 1, 8, 5))
    more = prompts[::-1, :7]
    rows = join(prompts, more, lengths.tolist())
    places = np.asarray(lengths)[:, None] + np.arange(-1, 7)

    def in_one_pass(params):
        return full_forward(spec, params, rows)[np.arange(5)[:, None], places]

    monkeypatch.setattr(generation, "_CHUNK", most)
    monkeypatch.setattr(generation, "_FIRST_CHUNK", {"cpu": first})
    fill = functools.partial(generation.fill_cache, spec, more=7, at_once=7)
    last, cache = jax.jit(fill)(params, prompts, lengths)
    hidden, _ = jax.jit(functools.partial(model.decode, spec))(params, more, cache, lengths)
    logits = model.logits(spec, params, jnp.concatenate([last, hidden], axis=1))
    assert_equal_but_rounding(logits, *measure_rounding(in_one_pass, params))


def test_a_cache_keeps_of_a_window_what_a_chunk_sees_and_nothing_of_layers_that_share():
    spec = small(**E4, dtype="bfloat16")
    cache = jax.eval_shape(lambda: empty_cache(spec, 2, 2048))
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.bfloat16.dtype}
    assert {kind: arrays["key"].shape for kind, arrays in cache.items()} == {
        "sliding_attention": (2, 2, 1, 5 + 512 - 1, 16),
        "full_attention": (1, 2, 1, 2048, 32),
    }


@pytest.mark.parametrize(("temperature", "first"), [(0.0, 0), (1.5, 99)])
@pytest.mark.parametrize("fields", VARIANTS[:2], ids=str)
def test_tokens_equal_those_of_the_full_forward(fields, temperature, first, monkeypatch):
    """Prompts are read three tokens at a time, or at once; some are longer than the window."""
    monkeypatch.setattr(generation, "_CHUNK", 4)
    monkeypatch.setattr(generation, "_FIRST_CHUNK", {"cpu": first})
    spec = small(**fields)
    params = lively(spec)
    sampling = Sampling(12, temperature, eos=NEVER)
    inputs = (params, *draw_prompts(params), generation.row_keys(7, 4))
    tokens = generate(spec, sampling, *inputs)
    assert tokens.shape == (4, 12)
    assert len(np.unique(tokens)) > 6
    assert tokens.tolist() == without_cache(spec, sampling, *inputs)


@pytest.mark.slow
def test_bfloat16_stays_near_its_full_forward():
    spec = small(dtype="bfloat16")
    params = lively(spec)
    prompts, lengths = draw_prompts(params)
    sampling = Sampling(12, 0.0, eos=NEVER)
    tokens = generate(spec, sampling, params, prompts, lengths, generation.row_keys(0, 4))
    logits = full_forward(spec, params, join(prompts, tokens))
    for b, n in enumerate(LENGTHS):
        scores = logits[b, n - 1 : n + 11]
        behind = scores.max(axis=-1) - scores[np.arange(12), tokens[b]]
        assert behind.max() < 0.1 * scores.std(), "the likeliest, or level with it"


@pytest.mark.slow
def test_a_row_that_has_ended_stays_as_it_is():
    spec = small()
    params = lively(spec)
    prompts, lengths = draw_prompts(params)
    keys = generation.row_keys(7, 4)
    whole = generate(spec, Sampling(12, 1.5, eos=NEVER), params, prompts, lengths, keys)
    eos = whole[0, 4].item()
    expected = whole.copy()
    for row in expected:
        ended = np.flatnonzero(row == eos)
        if len(ended):
            row[ended[0] + 1 :] = 0
    assert (expected[:, -1] != 0).any(), "one row goes on"
    for sampling in (Sampling(12, 1.5, eos=eos), Sampling(12, 1.5, eos=NEVER, stop_ids=(299, eos))):
        cut = generate(spec, sampling, params, prompts, lengths, keys)
        np.testing.assert_array_equal(cut, expected)
    # Where all rows have ended the loop makes no step.
    sampling = Sampling(12, 1.5, eos=9)
    _, cache = generation.prefill(spec, sampling, params, prompts, lengths, keys)
    before = jax.tree.map(np.array, cache)
    ended = jnp.full(4, 9, jnp.int32)
    tokens, cache = generation.decode(spec, sampling, params, ended, cache, lengths, keys)
    assert tokens.tolist() == [[9] + [0] * 11] * 4
    assert same(cache, before)


def test_memory_of_a_prompt_grows_with_the_cache_alone_and_no_token_copies_it_or_weights():
    """No square of scores, no MLP's activations of a whole prompt; lowered by shapes alone."""
    spec = small(hidden_dim=2048, head_dim=64, num_heads=2, num_kv_heads=1)
    sampling = Sampling(100, 0.0)
    params = jax.eval_shape(functools.partial(model.init, spec), jax.random.key(0))
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    keys = jax.eval_shape(lambda: generation.row_keys(0, 2))

    def read(T):
        prompts = jax.ShapeDtypeStruct((2, T), jnp.int32)
        lowered = generation.prefill.lower(spec, sampling, params, prompts, rows, keys)
        memory = lowered.compile().memory_analysis()
        # The cache is put out.
        return lowered, np.array([memory.temp_size_in_bytes, memory.output_size_in_bytes])

    prefill, sizes = read(8192)
    temporary, grown_cache = sizes - read(1024)[1]
    mlp = 4 * 2 * (8192 - 1024) * spec.hidden_dim
    assert 0 < temporary < 2 * grown_cache < mlp
    _, cache = prefill.out_info
    lowered = generation.decode.lower(spec, sampling, params, rows, cache, rows, keys)
    compiled = lowered.compile()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2
    # What fusions in the loop write, as compiled for a CPU, is smaller than D x F.
    fusions = re.findall("^.* fusion\\(.*/while/body/.*$", compiled.as_text(), re.MULTILINE)
    assert len(fusions) > 20
    shapes = [dims for _, dims in array_shapes("\n".join(fusions)) if max(dims, default=0) < 8192]
    assert 0 < max(map(math.prod, shapes)) < spec.embed_dim * spec.hidden_dim


@pytest.mark.slow
@needs_cuda
def test_a_gpu_reads_prompts_by_cudnn_and_in_loops_of_known_length(monkeypatch):
    """A first chunk and three more, compiled for a GPU that is not here."""
    devices = find_devices("h100:1", 1)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(generation, "_FIRST_CHUNK", {"gpu": 512})
    spec = small(head_dim=64, dtype="bfloat16", attention="auto")
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(devices[0]))
    params, keys = jax.tree.map(
        lambda x: shape(x.shape, x.dtype),
        jax.eval_shape(lambda: (model.init(spec, jax.random.key(0)), generation.row_keys(0, 1))),
    )
    prompts = shape((1, 2048), jnp.int32)
    lengths = shape((1,), jnp.int32)
    with as_if_attached(devices):
        traced = generation.prefill.trace(spec, Sampling(9), params, prompts, lengths, keys)
        text = traced.lower().compile().as_text()
    loops = re.findall("^.* while\\(.*$", text, re.MULTILINE)
    assert len(loops) >= 3, "layers, chunks and the keys of a chunk"
    assert all("known_trip_count" in loop for loop in loops)
    assert text.count('"__cudnn$fmhaSoftmax"') == 1


# --- How a token is drawn ---------------------------------------------------------------------

# No two alike.
SHARES = [0.02, 0.3, 0.11, 0.05, 0.19, 0.01, 0.25, 0.07]
SCORES = np.log(SHARES) + 3.0
CASES = [(1.0, 50, 1.0), (1.0, None, 0.54), (1.0, None, 0.56), (1.0, 3, 0.7), (0.3, 5, 0.9)]


def probabilities(temperature, top_k, top_p):
    """By the definitions, for every token: temperature, then top_k, then top_p, renormalised."""
    weights = np.exp(SCORES / temperature)
    order = np.argsort(-weights)[:top_k]
    total = weights[order].sum()
    nucleus = []
    reached = 0.0
    for i in order:
        nucleus.append(i)
        reached += weights[i] / total
        if reached >= top_p:
            break
    result = np.zeros(len(weights))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_tokens_are_drawn_from_the_distribution(temperature, top_k, top_p):
    expected = probabilities(temperature, top_k, top_p)
    count = 20_000
    scores = jnp.tile(jnp.asarray(SCORES, jnp.float32), (count, 1))
    sampling = Sampling(1, temperature, top_k, top_p)
    draw = jax.jit(functools.partial(generation.sample_tokens, sampling))
    tokens = draw(scores, generation.row_keys(3, count), jnp.zeros(count, jnp.int32))
    counts = np.bincount(tokens, minlength=len(SCORES))
    support = expected > 0
    assert ((counts > 0) == support).all()
    filtered = generation.filter_logits(sampling, scores[:1])
    np.testing.assert_allclose(jax.nn.softmax(filtered)[0], expected, rtol=0, atol=1e-6)
    if support.sum() > 1:
        test = scipy.stats.chisquare(counts[support], count * expected[support])
        assert test.pvalue > 1e-4


def test_ties_do_not_widen_top_k_and_no_score_is_too_large():
    two = Sampling(1, 1.0, top_k=2)
    kept = generation.filter_logits(two, jnp.zeros((1, 5)))
    assert (kept > -jnp.inf).sum() == 2
    far = jnp.array([[-1e30, 1e30, 0.0]])
    for top_p in (1.0, 0.5):
        kept = generation.filter_logits(Sampling(1, 1e-30, None, top_p), far)
        assert jax.nn.softmax(kept).tolist() == [[0, 1, 0]]


# --- The command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sample") / "run"
    make_run(workdir)
    return workdir


@pytest.mark.slow
def test_prompts_are_continued_as_each_would_be_alone(run, run_command, tmp_path):
    """The likeliest tokens, on any number of devices; drawn ones, which the seed repeats."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("The rôle of\r\n\nx\n".encode())
    flags = (f"--workdir={run}", "--length=20", "--temperature=0")
    both = (*flags, "--prompt=Return the", f"--prompts={file}")
    result = run_command("prope.sample", *both, "--seed=1").result
    assert result["prompts"] == ["Return the", "The rôle of", "x"]
    assert (result["prompt"], result["text"]) == ("Return the", result["texts"][0])
    assert len(set(result["texts"])) == 3
    for name in ("tokens", "prefill_tokens", "decode_tokens"):
        assert 0 < result[f"{name}_per_second"] < math.inf
    assert result["compile_seconds"] > 0
    one = run_command("prope.sample", *flags, "--prompt=x", "--seed=2").result
    assert one["texts"] == [one["text"]] == result["texts"][2:]
    spread = run_command("prope.sample", *both, devices=4).result
    assert spread["texts"] == result["texts"], "on four devices"
    drawn = (f"--workdir={run}", *2 * ["--prompt=Return the"], "--length=60", "--top_p=0.95")
    outcomes = [run_command("prope.sample", *drawn, f"--seed={seed}") for seed in (1, 1, 2)]
    first, again, other = (outcome.result["texts"] for outcome in outcomes)
    assert first == again != other
    assert first[0] != first[1]


def test_a_text_ends_before_its_eos(run, monkeypatch):
    """Position 1 + len(prompt) is the first that is sampled; longer prompts have ended by then."""
    letters = np.frombuffer(b"__klm", np.uint8).astype(np.int32) + 4
    drawn = jnp.asarray([*letters, GEMMA_IDS.eos, *letters])

    def draw(sampling, logits, keys, positions):
        return drawn[positions]

    monkeypatch.setattr(generation, "sample_tokens", draw)
    jax.clear_caches()  # compiled with the real function
    prompts = ["a", "abc", "abcd"]
    result = generation.continue_prompts(str(run), None, prompts, Sampling(4), 0)
    jax.clear_caches()
    assert result["texts"] == ["klm", "m", ""]
    assert result["tokens"] == 4 + 2 + 1
    opened = generation.open_run(str(run), None)
    opened.spec = opened.spec.replace({"data.stop_ids": (4 + ord("l"),)})
    monkeypatch.setattr(generation, "open_run", lambda *_: opened)
    result = generation.continue_prompts(str(run), None, ["a", "abcd"], Sampling(4), 0)
    jax.clear_caches()
    assert result["texts"] == ["k", ""]


def test_a_prompt_begins_as_a_document_does_or_with_its_own_first_token(run, caplog):
    """And the command says so; without a token there is nothing to continue."""
    caplog.set_level("INFO", logger="prope")
    greedy = Sampling(8, temperature=0.0)
    document = generation.continue_prompts(str(run), None, ["ab"], greedy, 0)
    assert "before a prompt: <bos>; computed in float32" in caplog.text
    assert (document["start"], document["dtype"]) == ("<bos>", "float32")
    alone = generation.continue_prompts(str(run), None, ["ab"], greedy, 0, start="none")
    assert alone["start"] is None
    opened = generation.open_run(str(run), None)
    params = opened.params()
    for result, ids in ((document, [GEMMA_IDS.bos]), (alone, [])):
        row = [*ids, *(4 + np.frombuffer(b"ab", np.uint8)).tolist()]
        for _ in range(8):
            positions = jnp.arange(len(row))[None]
            logits = forward(opened.spec.model, params, jnp.array([row]), positions)
            row.append(int(logits[0, -1].argmax()))
        continued = bytes(token - 4 for token in row[len(ids) + 2 :] if token >= 4)
        assert result["text"] == continued.decode(errors="replace")
    assert document["text"] != alone["text"]
    with pytest.raises(UsageError, match="--start=none"):
        generation.continue_prompts(str(run), None, ["ab", ""], greedy, 0, start="none")

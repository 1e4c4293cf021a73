"""Sampling with the KV cache against the full forward, which has none, and against distributions written in NumPy."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compiled import array_shapes
from makers import draw_model as draw
from makers import forward, make_run, small
from ml_collections import FrozenConfigDict
from oracles import decoder as reference

from prope import model
from prope.data.tokenizer import EOS
from prope.errors import UsageError
from prope.inference import generation as sample
from prope.inference.generation import Sampling, empty_cache

LENGTHS = (4, 9, 1, 6)
NEVER = -1  # an eos that no token is


def prompts_of(params, lengths=LENGTHS, seed=3):
    """Ragged prompts [B, T] with random tokens for padding: whoever sees them is told apart."""
    vocab = len(model.embedding(params))
    tokens = (
        np.random.default_rng(seed)
        .integers(4, vocab, (len(lengths), max(lengths)))
        .astype(np.int32)
    )
    return jnp.asarray(tokens), jnp.array(lengths, jnp.int32)


def lively(config):
    """Parameters whose attention outweighs the token itself: the likeliest token is seldom the last one again."""
    params, *_ = draw(config)
    params["layers"]["attn"]["attn_vec_einsum"]["w"] *= 5
    params["layers"]["mlp"]["linear"] *= 5
    return params


def full_forward(config, params, rows):
    """The logits [B, T, V] of sequences by the full forward, without a cache; a row sees nothing after it."""
    tokens = np.zeros((len(rows), 24), np.int32)  # of one shape, so compiled once
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    return np.asarray(
        forward(
            config, params, tokens, np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
        )
    )


def without_cache(config, sampling, params, prompts, lengths, keys):
    """The continuations, every token by the full forward of all before it."""
    rows = [row[:n].tolist() for row, n in zip(prompts, lengths, strict=True)]
    for _ in range(sampling.length):
        for row, scores, key in zip(rows, full_forward(config, params, rows), keys, strict=True):
            last = scores[len(row) - 1]
            if sampling.temperature == 0:
                row.append(int(last.argmax()))
            else:
                noise = jax.random.fold_in(key, len(row))
                row.append(
                    int(jax.random.categorical(noise, jnp.asarray(last) / sampling.temperature))
                )
    return [row[n:] for row, n in zip(rows, lengths, strict=True)]


def generate(config, sampling, params, prompts, lengths, keys):
    static = FrozenConfigDict(config), sampling
    first, cache = sample.prefill(*static, params, prompts, lengths, keys)
    return np.asarray(sample.decode(*static, params, first, cache, lengths, keys)[0])


def some_config(p=0.75, **fields):
    config = small(**fields)
    with config.ignore_type():
        config.rope_percentage = p
    return config


VARIANTS = [
    pytest.param({"p": 0.0, "num_kv_heads": 1}, marks=pytest.mark.slow),
    pytest.param(
        {"p": 0.75, "num_kv_heads": 1, "scan_layers": False, "remat": "full"},
        marks=pytest.mark.slow,
    ),
    pytest.param({"p": 0.75, "num_kv_heads": 2}, marks=pytest.mark.slow),
    pytest.param({"p": 1.0, "num_kv_heads": 4}, marks=pytest.mark.slow),
    pytest.param({"p": 0.0, "num_kv_heads": 4, "scan_layers": False}, marks=pytest.mark.slow),
    {"p": (1.0, 0.25, 0.0), "num_kv_heads": 2},
]


# --- With the cache as without ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_logits_equal_those_of_the_full_forward(fields):
    """Of prompts of different lengths and of what follows, token by token and several at once."""
    config = some_config(**fields)
    params = lively(config)
    prompts, lengths = prompts_of(params)
    more = jnp.asarray(
        np.random.default_rng(4).integers(0, config.vocab_size, (len(lengths), 7)), jnp.int32
    )
    rows = [np.concatenate([prompts[b, :n], more[b]]) for b, n in enumerate(lengths)]
    expected = full_forward(config, params, rows)
    layers, decode = (
        sample.split_layers(config, params),
        jax.jit(functools.partial(model.decode, config)),
    )
    hidden, cache = decode(
        params, prompts, empty_cache(config, len(lengths), 16), jnp.zeros(len(lengths), jnp.int32)
    )
    read = np.asarray(model.logits(params, hidden))
    parts, at = [], 0
    for size in (1, 1, 3, 1, 1):
        hidden, cache = decode(layers, more[:, at : at + size], cache, lengths + at)
        parts.append(model.logits(params, hidden))
        at += size
    written = np.concatenate(parts, axis=1)
    assert expected.std() > 1
    for b, n in enumerate(lengths):
        found = np.concatenate([read[b, :n], written[b]])
        np.testing.assert_allclose(found, expected[b, : n + 7], rtol=0, atol=1e-5 * expected.std())
    exact = reference(config, params, rows[1][None], np.arange(16)[None])[0]
    np.testing.assert_allclose(
        np.concatenate([read[1], written[1]]), exact, rtol=0, atol=2e-5 * exact.std()
    )


@pytest.mark.parametrize("most", [1, 4, 6])
def test_prompts_read_in_chunks_give_what_one_pass_gives(monkeypatch, most):
    """Chunks of 1, 4 and 5 tokens; rows that end within one, with one, and in the first."""
    config = some_config((1.0, 0.25, 0.0), num_kv_heads=2)
    params = lively(config)
    prompts, lengths = prompts_of(params, (4, 10, 1, 8, 5))
    expected = full_forward(config, params, np.asarray(prompts))
    whole = jnp.zeros(5, jnp.int32)
    _, cache = model.decode(config, params, prompts, empty_cache(config, 5, 10), whole)
    monkeypatch.setattr(sample, "_CHUNK", most)
    last, found = jax.jit(functools.partial(sample.fill_cache, config))(params, prompts, lengths)
    rows = np.arange(5), np.asarray(lengths) - 1
    np.testing.assert_allclose(
        model.logits(params, last[:, 0]), expected[rows], rtol=0, atol=1e-5 * expected.std()
    )
    for name in cache:
        np.testing.assert_allclose(
            found[name], cache[name], rtol=0, atol=1e-5 * float(cache[name].std())
        )


def test_memory_of_a_prompt_grows_with_the_cache_and_a_row_of_scores_alone():
    config, sampling = (
        FrozenConfigDict(small(hidden_dim=2048, num_heads=2, num_kv_heads=1)),
        Sampling(100),
    )
    params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))

    def sizes(T):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, T), (2,))]
        arguments = (
            config,
            sampling,
            params,
            *shapes,
            jax.eval_shape(lambda: sample.row_keys(0, 2)),
        )
        memory = sample.prefill.lower(*arguments).compile().memory_analysis()
        return np.array(
            [memory.temp_size_in_bytes, memory.output_size_in_bytes]
        )  # the cache is put out

    temporary, cache = sizes(8192) - sizes(1024)
    scores = 4 * 2 * config.num_heads * 256 * (8192 - 1024)  # of 256 tokens, float32
    assert 0 < temporary < 2 * cache + 2 * scores < 4 * 2 * (8192 - 1024) * config.hidden_dim


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_tokens_equal_those_of_the_full_forward(fields, temperature):
    config = some_config(**fields)
    params = lively(config)
    prompts, lengths = prompts_of(params)
    sampling = Sampling(12, temperature, eos=NEVER)
    keys = sample.row_keys(7, len(lengths))
    found = generate(config, sampling, params, prompts, lengths, keys)
    assert found.shape == (len(lengths), 12) and len({*found.ravel().tolist()}) > 6
    assert found.tolist() == without_cache(config, sampling, params, prompts, lengths, keys)


@pytest.mark.slow
def test_a_row_depends_on_no_other_row():
    config = small()
    params = lively(config)
    prompts, lengths = prompts_of(params)
    sampling = Sampling(15, 1.0, top_k=20, top_p=0.9, eos=NEVER)
    keys = sample.row_keys(0, 4)
    together = generate(config, sampling, params, prompts, lengths, keys)
    for b in (0, 2):
        one, n = slice(b, b + 1), LENGTHS[b]
        assert (
            generate(config, sampling, params, prompts[one, :n], lengths[one], keys[one])
            == together[one]
        ).all()
    others, longer = prompts_of(params, (4, 30, 22, 2), seed=5)
    others = others.at[0, :4].set(prompts[0, :4])
    assert (generate(config, sampling, params, others, longer, keys)[0] == together[0]).all()


@pytest.mark.slow
def test_equal_prompts_draw_numbers_of_their_own_and_a_seed_repeats_them():
    config = small()
    params = lively(config)
    prompts, lengths = (jnp.repeat(part[1:2], 3, axis=0) for part in prompts_of(params))
    sampling = Sampling(15, 1.5, eos=NEVER)
    runs = [
        generate(config, sampling, params, prompts, lengths, sample.row_keys(seed, 3))
        for seed in (1, 1, 2)
    ]
    assert (runs[0] == runs[1]).all() and (runs[0] != runs[2]).any(axis=1).all()
    assert len({tuple(row) for row in runs[0].tolist()}) == 3
    for row in range(3):
        assert sample.row_keys(1, 3)[row] == jax.random.fold_in(jax.random.key(1), row)


@pytest.mark.slow
def test_a_row_that_has_ended_stays_as_it_is():
    config = small()
    params = lively(config)
    prompts, lengths = prompts_of(params)
    keys = sample.row_keys(7, 4)
    whole = generate(config, Sampling(12, 1.5, eos=NEVER), params, prompts, lengths, keys).tolist()
    eos = whole[0][4]
    assert any(eos not in row for row in whole), "one row goes on"
    cut = [row[: row.index(eos) + 1] if eos in row else row for row in whole]
    expected = [row + [0] * (12 - len(row)) for row in cut]
    assert (
        generate(config, Sampling(12, 1.5, eos=eos), params, prompts, lengths, keys).tolist()
        == expected
    )
    at_once = whole[1][0]
    one = slice(1, 2)
    found = generate(
        config, Sampling(12, 1.5, eos=at_once), params, prompts[one], lengths[one], keys[one]
    )
    assert found.tolist() == [[at_once] + [0] * 11]


def test_the_loop_stops_when_all_rows_have_ended():
    config = FrozenConfigDict(small())
    params = lively(config)
    prompts, lengths = prompts_of(params)
    keys = sample.row_keys(0, 4)
    sampling = Sampling(12, 0.0, eos=9)
    _, cache = sample.prefill(config, sampling, params, prompts, lengths, keys)
    before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, cache))
    tokens, cache = sample.decode(
        config, sampling, params, jnp.full(4, 9, jnp.int32), cache, lengths, keys
    )
    assert tokens.tolist() == [[9] + [0] * 11] * 4
    assert all((before[name] == cache[name]).all() for name in cache), "no step was made"


@pytest.mark.slow
def test_bfloat16_stays_near_its_full_forward():
    config = small(dtype="bfloat16")
    params = lively(config)
    prompts, lengths = prompts_of(params)
    sampling = Sampling(12, 0.0, eos=NEVER)
    first, cache = sample.prefill(
        FrozenConfigDict(config), sampling, params, prompts, lengths, sample.row_keys(0, 4)
    )
    assert {leaf.dtype for leaf in cache.values()} == {jnp.dtype("bfloat16")}
    layers = sample.split_layers(config, params)
    hidden, _ = jax.jit(functools.partial(model.decode, config))(
        layers, first[:, None], cache, lengths
    )
    rows = [np.append(prompts[b, :n], first[b]) for b, n in enumerate(lengths)]
    for b, scores in enumerate(full_forward(config, params, rows)):
        expected = scores[lengths[b]]
        assert np.abs(model.logits(params, hidden)[b, 0] - expected).mean() < 0.03 * expected.std()
    found = generate(config, sampling, params, prompts, lengths, sample.row_keys(0, 4))
    rows = [np.append(prompts[b, :n], found[b]) for b, n in enumerate(lengths)]
    for b, scores in enumerate(full_forward(config, params, rows)):
        scores = scores[lengths[b] - 1 :][:12]
        behind = scores.max(axis=-1) - scores[np.arange(12), found[b]]
        assert behind.max() < 0.1 * scores.std(), "every token is the likeliest, or level with it"


@pytest.mark.slow
def test_a_step_copies_no_cache_and_holds_no_square_of_scores():
    config = FrozenConfigDict(small(num_kv_heads=2, head_dim=64))
    params = lively(config)
    prompts, lengths = prompts_of(params, (700, 650))
    sampling = Sampling(301, 0.0)
    arguments = (params, prompts, lengths, sample.row_keys(0, 2))
    read = sample.prefill.lower(config, sampling, *arguments).compile()
    first, cache = jax.eval_shape(functools.partial(sample.prefill, config, sampling), *arguments)
    size = math.prod(cache["key"].shape)
    assert cache["key"].shape == (3, 2, 2, 1000, 64)
    shapes = [dims for _, dims in array_shapes(read.as_text())]
    assert len(shapes) > 10 and max(map(math.prod, shapes)) <= max(size, 2 * 4 * 700 * 700 // 4)
    assert not any(dims.count(700) > 1 or (700 in dims and 1000 in dims) for dims in shapes)
    write = sample.decode.lower(
        config, sampling, params, first, cache, lengths, arguments[-1]
    ).compile()
    shapes = [dims for _, dims in array_shapes(write.as_text())]
    assert max(map(math.prod, shapes)) == size
    memory, whole = write.memory_analysis(), 2 * size * 4
    assert memory.alias_size_in_bytes >= whole and memory.temp_size_in_bytes < whole / 2


def test_no_token_copies_the_weights_of_an_mlp():
    """The loop of `decode` for one row, as compiled for a CPU: what fusions in it write is smaller than D x F."""
    config = FrozenConfigDict(small(embed_dim=64, hidden_dim=256, num_layers=2))
    key, sampling = jax.random.key(0), Sampling(9, 0.0)
    params = jax.eval_shape(functools.partial(model.init, config), key)
    arguments = params, jnp.ones((1, 4), jnp.int32), jnp.array([4]), key[None]
    first, cache = jax.eval_shape(functools.partial(sample.prefill, config, sampling), *arguments)
    decode = sample.decode.lower(config, sampling, params, first, cache, *arguments[2:]).compile()
    fusions = [
        line
        for line in decode.as_text().splitlines()
        if "/while/body/" in line and " fusion(" in line
    ]
    sizes = [
        math.prod(map(int, dims.split(",")))
        for x in fusions
        for dims in re.findall(r"f32\[([\d,]+)\]", x)
    ]
    assert len(sizes) > 20 and max(sizes) < 64 * 256


# --- How a token is drawn ---------------------------------------------------------------------------------------

SCORES = np.log([0.02, 0.3, 0.11, 0.05, 0.19, 0.01, 0.25, 0.07]) + 3.0  # no two alike


def shares(temperature, top_k, top_p):
    """The probability of every token, from the definitions: temperature, then top_k, then top_p, renormalised."""
    weights = np.exp(SCORES / temperature)
    weights /= weights.sum()
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or len(weights)]
    total, nucleus, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        nucleus.append(i)
        reached += weights[i] / total
        if reached >= top_p:
            break
    result = np.zeros(len(weights))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, 1.0),
        (0.5, None, 1.0),
        (2.0, None, 1.0),
        (1.0, 1, 1.0),
        (1.0, 3, 1.0),
        (1.0, 50, 1.0),
        (1.0, None, 0.9),
        (1.0, None, 0.54),
        (1.0, None, 0.56),
        (1.0, None, 1e-6),
        (0.3, None, 0.9),
        (3.0, None, 0.9),
        (1.0, 3, 0.7),
        (2.0, 5, 0.8),
        (0.7, 4, 0.95),
    ],
)
def test_tokens_are_drawn_from_the_distribution(temperature, top_k, top_p):
    expected = shares(temperature, top_k, top_p)
    count = 20_000
    keys = sample.row_keys(3, count)
    scores = jnp.broadcast_to(jnp.asarray(SCORES, jnp.float32), (count, len(SCORES)))
    sampling = Sampling(1, temperature, top_k, top_p)
    tokens = jax.jit(functools.partial(sample.sample_tokens, sampling))(
        scores, keys, jnp.zeros(count, jnp.int32)
    )
    found = np.bincount(tokens, minlength=len(SCORES))
    support = expected > 0
    assert (found[support] > 0).all() and found[~support].sum() == 0
    kept = np.asarray(sample.filter_logits(sampling, scores[:1]))[0]
    np.testing.assert_allclose(np.asarray(jax.nn.softmax(kept)), expected, rtol=0, atol=1e-6)
    if support.sum() > 1:
        chi2 = ((found - count * expected)[support] ** 2 / (count * expected[support])).sum()
        assert chi2 < scipy.stats.chi2.isf(1e-4, support.sum() - 1)


def test_draws_of_positions_are_independent():
    count = 20_000
    scores = jnp.broadcast_to(jnp.asarray(SCORES, jnp.float32), (count, len(SCORES)))
    keys = jnp.broadcast_to(jax.random.key(5), (count,))
    tokens = sample.sample_tokens(Sampling(1), scores, keys, jnp.arange(count, dtype=jnp.int32))
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (np.asarray(tokens[:-1]), np.asarray(tokens[1:])), 1)
    assert scipy.stats.chi2_contingency(pairs).pvalue > 1e-4


def test_ties_do_not_widen_top_k_and_no_score_is_too_large():
    kept = sample.filter_logits(Sampling(1, 1.0, top_k=2), jnp.zeros((1, 5)))
    assert (kept > -jnp.inf).sum() == 2
    far = jnp.array([[-1e30, 1e30, 0.0]])
    for top_p in (1.0, 0.5):
        assert jax.nn.softmax(
            sample.filter_logits(Sampling(1, 1e-30, None, top_p), far)
        ).tolist() == [[0, 1, 0]]


# --- The command ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sample") / "run"
    make_run(workdir)
    return workdir


@pytest.mark.slow
def test_prompts_are_continued_as_each_would_be_alone(run, run_command, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("The rôle of\r\n\nx\n".encode())
    arguments = (f"--workdir={run}", "--length=20", "--temperature=0")
    outcome = run_command(
        "prope.sample", *arguments, "--prompt=Return the", f"--prompts={file}", "--seed=1"
    )
    result = outcome.result
    prompts = ["Return the", "The rôle of", "x"]
    assert (result["prompts"], result["prompt"], result["text"]) == (
        prompts,
        prompts[0],
        result["texts"][0],
    )
    assert len(set(result["texts"])) == 3
    for name in (
        "tokens_per_second",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "compile_seconds",
    ):
        assert 0 < result[name] < math.inf
    assert re.search(r"^compiled in [\d.]+ s$", outcome.stderr, re.MULTILINE)
    assert "longer" not in outcome.stderr
    one = run_command("prope.sample", *arguments, f"--prompt={prompts[2]}", "--seed=2").result
    assert one["texts"] == [one["text"]] == result["texts"][2:]
    spread = run_command(
        "prope.sample", *arguments, "--prompt=Return the", f"--prompts={file}", devices=4
    )
    assert spread.result["texts"] == result["texts"], "on four devices"


def test_a_text_ends_before_its_eos(run, monkeypatch):
    """Position 1 + len(prompt) is the first that is sampled; the row of the longer prompt has ended by then."""
    letters = np.frombuffer(b"__klm", np.uint8).astype(np.int32) + 4
    drawn = jnp.asarray([*letters, EOS, *letters])
    monkeypatch.setattr(
        sample, "sample_tokens", lambda sampling, logits, keys, positions: drawn[positions]
    )
    jax.clear_caches()  # of the functions with the real one
    result = sample.continue_prompts(str(run), None, ["a", "abc", "abcd"], Sampling(4), 0)
    jax.clear_caches()
    assert result["texts"] == ["klm", "m", ""] and result["tokens"] == 4 + 2 + 1


@pytest.mark.slow
def test_a_prompt_is_continued_by_chance_and_the_seed_repeats_it(run, run_command):
    arguments = (
        f"--workdir={run}",
        "--prompt=Return the",
        "--prompt=Return the",
        "--length=120",
        "--top_p=0.95",
    )
    warm = [run_command("prope.sample", *arguments, f"--seed={seed}") for seed in (1, 1, 2)]
    texts = [outcome.result["texts"] for outcome in warm]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]
    assert warm[0].result["tokens"] <= 240
    assert "131 tokens is longer than the 128 that the run was trained on" in warm[0].stderr


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"top_p": 0.0}, r"top_p=0.0: must be a fraction in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p=1.1: must be a fraction in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p=nan: must be a fraction in \(0, 1\]"),
        ({"top_k": 0}, "top_k=0: must be at least 1; leave it out"),
        ({"temperature": -1.0}, "temperature=-1.0: must be 0, .* or a finite number above"),
        ({"temperature": math.nan}, "temperature=nan: must be 0"),
        ({"temperature": math.inf}, "temperature=inf: must be 0"),
        ({"length": 0}, "length=0: must be at least 1 token"),
    ],
)
def test_values_out_of_range_are_refused(values, says):
    with pytest.raises(UsageError, match=says):
        Sampling(**{"length": 1} | values)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt=x", "--top_p=0"), r"top_p=0.0: must be a fraction in \(0, 1\]"),
        (("--prompt=x", "--seed=-1"), "seed=-1: -1 is not an integer in the range"),
        ((), "no prompt: give --prompt=TEXT, or --prompts=FILE"),
        (
            ("--prompts=nowhere.txt",),
            "--prompts=nowhere.txt: cannot be read: No such file.*one prompt per line",
        ),
        (
            ("--prompts=/dev/null",),
            "--prompts=/dev/null: has no line with text; .* give --prompt=TEXT",
        ),
    ],
)
def test_bad_input_gets_one_line_before_a_device_is_touched(run, run_command, arguments, says):
    outcome = run_command("prope.sample", f"--workdir={run}", *arguments, JAX_PLATFORMS="none")
    assert outcome.code == 2
    assert re.search(says, outcome.error), outcome.error


def test_prompts_that_are_not_utf_8_are_refused(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(
        UsageError, match="bad.txt: cannot be read: it is not UTF-8; give a text file"
    ):
        sample.read_prompts([], str(tmp_path / "bad.txt"))
    with pytest.raises(UsageError, match=r"--prompt='a\\udcff': is not UTF-8"):
        sample.read_prompts(["a\udcff"], None)
    assert sample.read_prompts([""], None) == [""], "<bos> alone is continued"


def test_what_the_run_does_not_have_is_refused(run_command, tmp_path):
    make_run(tmp_path / "run", vocab_size=200)
    outcome = run_command("prope.sample", f"--workdir={tmp_path / 'run'}", "--prompt=x")
    assert outcome.code == 2
    assert re.search(
        "tokenizer=byte: has 260 ids, and the model of .* 200; put back the tokenizer",
        outcome.error,
    )
    outcome = run_command(
        "prope.sample",
        f"--workdir={tmp_path / 'run'}",
        "--prompt=x",
        "--step=3",
        JAX_PLATFORMS="none",
    )
    assert outcome.code == 2
    assert f"--step=3: {tmp_path / 'run'} has no such checkpoint; it has 7" in outcome.error

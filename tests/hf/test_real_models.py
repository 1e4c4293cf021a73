"""Gemma 3 270M and SmolLM2 135M beside transformers: losses, words, caches, tensors."""

import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import real_models
from support.runs import evaluate_run, save_run

from prope import model
from prope.analysis.pairs import choose_pairs
from prope.data.tokenizer import load_tokenizer
from prope.hf import exporter, importer
from prope.inference import generation
from prope.loss import token_losses
from prope.spec.layers import format_pairs
from prope.workdir.run import open_run

pytestmark = [pytest.mark.slow, pytest.mark.optimized]
WINDOWS = 2
LENGTH = 768  # Gemma 3's window is 512
PROMPT = 2000
NEW_TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "In Python, a list comprehension",
    "Water boils at a temperature of",
    "Once upon a time, there was a",
    "The three laws of motion are",
)


@pytest.fixture(scope="module", params=sorted(real_models.PACKAGES))
def real(request, once):
    """A model's checkpoint, its run, and transformers' model and tokenizer."""
    name = request.param
    if reason := real_models.missing(name):
        pytest.skip(reason)
    import torch
    import transformers

    def make(directory):
        folder = real_models.cache() / name
        real_models.make(name, folder)
        importer.import_run(folder, directory / "run")
        return str(folder)

    directory, folder = once(f"real_{name}", make)
    return SimpleNamespace(
        folder=pathlib.Path(folder),
        workdir=directory / "run",
        run=open_run(directory / "run"),
        params=open_run(directory / "run").params(),
        theirs=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )


@pytest.fixture(scope="module")
def ids(real):
    """The text's first tokens, without special ones."""
    text = real_models.text()[: 8 * WINDOWS * LENGTH]
    return real.tokenizer(text, add_special_tokens=False).input_ids


def our_loss(real, tokens, dtype="float32"):
    spec = dataclasses.replace(real.run.spec.model, dtype=dtype)

    @jax.jit
    def losses(params, window):
        positions = jnp.arange(LENGTH)[None]
        hidden = model.hidden_states(spec, params, window[None, :-1], positions)
        cap = spec.final_softcap
        return token_losses(hidden, model.head(params), window[None, 1:], cap).mean()

    return np.mean([float(losses(real.params, window)) for window in tokens])


def their_loss(theirs, tokens):
    import torch

    total = 0.0
    with torch.no_grad():
        for window in torch.tensor(tokens).long():
            logits = theirs(window[None, :-1], use_cache=False).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, window[1:]).item()
    return total / len(tokens)


@pytest.fixture(scope="module")
def english(real, ids):
    """Windows [WINDOWS, LENGTH + 1], which begin as the family's texts do; their loss of these."""
    start = real.tokenizer("").input_ids
    size = LENGTH + 1 - len(start)
    tokens = np.array([start + ids[i * size : (i + 1) * size] for i in range(WINDOWS)], np.int32)
    return tokens, their_loss(real.theirs, tokens)


def test_the_tokenizer_gives_the_same_ids(real, ids):
    text = real_models.text()[: 8 * WINDOWS * LENGTH]
    ours = load_tokenizer(real.run.spec.data.tokenizer)
    assert ours.encode(text.encode()).tolist() == ids
    start = real.tokenizer("").input_ids
    assert start == [ours.special.bos] * len(start)


def test_the_loss_of_english_is_theirs(real, english):
    tokens, expected = english
    assert 1 < expected < 4, "a model that knows English"
    assert our_loss(real, tokens) == pytest.approx(expected, abs=1e-4)


def test_windows_amid_a_document_are_evaluated_as_the_family_begins_texts(real, tmp_path):
    """The record of evaluate beside transformers, to which <bos> is given in front."""
    text = real_models.text()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/text.txt").write_text(text)
    data_dir = str(tmp_path / "text")
    flags = {"dataset": "files", "data_dir": data_dir, "split": "all", "dtype": "float32"}
    flags |= {"output": str(tmp_path / "out"), "max_windows": WINDOWS, "seq_len": str(LENGTH)}
    (record,) = evaluate_run(real.workdir, **flags)
    special = load_tokenizer(real.run.spec.data.tokenizer).special
    ids = real.tokenizer(text, add_special_tokens=False).input_ids
    stream = np.array([special.start, *ids, special.eos][: None if special.bos else -1])
    count = -(-(len(stream) - 1) // LENGTH)
    starts = [i * count // WINDOWS * LENGTH for i in range(WINDOWS)]
    tokens = np.stack([stream[start : start + LENGTH + 1] for start in starts])
    start = real.tokenizer("").input_ids
    tokens[:, : len(start)] = start
    expected = their_loss(real.theirs, tokens)
    assert record["tokens"] == WINDOWS * LENGTH
    assert record["loss"] == pytest.approx(expected, abs=1e-4)
    if start:
        (without,) = evaluate_run(real.workdir, **flags, bos_every_window=False)
        assert without["loss"] > expected + 0.1, "what a Gemma loses without it"


def test_the_loss_with_pairs_by_key_head_is_that_of_custom_code(
    real, english, tmp_path, remote_code
):
    """A half of the pairs, drawn for every key head; far above the loss as it is."""
    import torch
    import transformers

    rng = np.random.default_rng(0)
    shapes = [layer.frequencies.shape for layer in real.run.spec.model.layers]
    kept = [rng.permuted(np.tile(np.arange(P) % 2 == 0, (K, 1)), axis=1) for K, P in shapes]
    fields = {"model.rope_pairs": format_pairs(kept), "model.dtype": "float32"}
    spec = real.run.spec.replace(fields)
    save_run(tmp_path / "run", spec, real.params)
    exporter.export(tmp_path / "run", tmp_path / "hf", custom_code=True)
    options = {"dtype": torch.float32, "trust_remote_code": True}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **options)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", **options)("a b").input_ids
    tokens, plain = english
    chosen = SimpleNamespace(run=SimpleNamespace(spec=spec), params=real.params)
    expected = their_loss(theirs, tokens)
    assert expected > plain + 0.1
    assert our_loss(chosen, tokens) == pytest.approx(expected, abs=1e-4)


def test_the_loss_in_bfloat16_is_theirs(real, english):
    import torch
    import transformers

    tokens, _ = english
    # Not real.theirs cast, whose frequencies would be rounded, too.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.bfloat16)
    expected = their_loss(theirs, tokens)
    assert our_loss(real, tokens, "bfloat16") == pytest.approx(expected, abs=2e-2)


def test_the_likeliest_words_are_theirs(real):
    import torch

    spec = real.run.spec.replace({"model.dtype": "float32"})
    rows = [real.tokenizer(prompt).input_ids for prompt in PROMPTS]
    ours = load_tokenizer(spec.data.tokenizer).special
    sampling = generation.Sampling(
        NEW_TOKENS, temperature=0.0, eos=ours.eos, stop_ids=spec.data.stop_ids
    )
    tokens, _ = generation.generate(spec.model, sampling, real.params, rows, seed=0)
    for row, continuation in zip(rows, tokens.tolist(), strict=True):
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        inputs = torch.tensor([row])
        output = real.theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        expected = output[0, len(row) :].tolist()
        assert continuation[: len(expected)] == expected, real.tokenizer.decode(row)


def test_a_prompt_in_chunks_is_the_whole_pass_beyond_the_window(real, ids):
    import torch

    spec = dataclasses.replace(real.run.spec.model, dtype="float32")
    start = real.tokenizer("").input_ids
    tokens = np.array([(start + ids)[:PROMPT]], np.int32)
    lengths = jnp.array([PROMPT], jnp.int32)
    fill = jax.jit(generation.fill_cache, static_argnums=0)
    whole = jax.jit(model.hidden_states, static_argnums=0)
    last, _ = fill(spec, real.params, jnp.asarray(tokens), lengths)
    hidden = whole(spec, real.params, jnp.asarray(tokens), jnp.arange(PROMPT)[None])
    chunked = np.asarray(model.logits(spec, real.params, last[:, 0]))
    expected = np.asarray(model.logits(spec, real.params, hidden[:, -1]))
    np.testing.assert_allclose(chunked, expected, rtol=0, atol=1e-3)
    with torch.no_grad():
        theirs = real.theirs(torch.tensor(tokens).long(), logits_to_keep=1).logits[:, -1]
    np.testing.assert_allclose(expected, theirs.numpy(), rtol=0, atol=1e-3)


def test_an_export_has_the_tensors_that_were_imported(real, tmp_path):
    """Bit for bit; but norms near 0 lose bits, where 1 is taken off them: w - 1 is float32."""
    from safetensors.numpy import load_file

    exporter.export(real.workdir, tmp_path / "hf", dtype="bfloat16")
    expected = load_file(real.folder / "model.safetensors")
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype
        differs = tensor.view(np.uint16) != found[name].view(np.uint16)
        if "norm" not in name:
            assert not differs.any(), name
        values = tensor[differs].astype(np.float64)
        assert (np.abs(values) < 2**-16).all(), name  # below it, bfloat16 is finer than w - 1
        np.testing.assert_allclose(found[name][differs].astype(np.float64), values, atol=2**-23)


def test_half_of_the_pairs_may_stand_where_they_change_little(real, tmp_path):
    """The headline of configs/results/which_pairs.md, on less text of another kind."""
    text = {"dataset": "python_docs", "data_dir": None, "text": None, "analysis": None}
    size = {"seq_len": 1024, "sequences": 2, "max_windows": WINDOWS, "dtype": "float32"}
    choice = {"rule": ["change"], "keep": ["0.5"], "per": ["head"], "step": None}
    options = SimpleNamespace(
        workdir=str(real.workdir), output=str(tmp_path), **text, **size, **choice
    )
    losses = choose_pairs(options)
    cost = losses["loss"] - losses["loss_as_it_is"]
    assert 0 < 4 * cost < losses["loss_p_rope"] - losses["loss_as_it_is"]

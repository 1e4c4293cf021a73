"""What prope/README.md has for PyTorch: a config, a function, and the way there and back."""

import json
import os
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import ROOT
from support.runs import make_run
from support.text import articles, write_lines

from prope import apply_p_rope
from prope.hf import exporter
from prope.rope import frequencies

SECTION = (ROOT / "prope/README.md").read_text().partition("## p-RoPE in PyTorch\n")[2]
SECTION = SECTION.partition("\n## ")[0]
WHOLE_HEADS = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2"]
WHOLE_HEADS += ["olmo2", "granite", "gpt_neox"]
HEADS = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
SIZES = HEADS | {"intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}


def block(language: str, words: str) -> str:
    """The section's block that has these words."""
    found = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    (code,) = (code for code in found if words in code)
    return code


@pytest.fixture(scope="module")
def three_lines(libraries):
    """The names that the block for transformers makes."""
    names = {}
    exec(block("python", "proportional"), names)
    return names


def make_model(transformers, model_type, rope):
    config = transformers.CONFIG_MAPPING[model_type](
        **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2, rope_parameters=dict(rope)
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def test_the_config_has_the_angles_of_p_rope(three_lines):
    embedding = three_lines["model"].model.rotary_emb
    expected = frequencies(32, 10_000.0, 0.75)
    assert expected.dtype == np.float64 and np.count_nonzero(expected) == 12
    theirs = embedding.inv_freq.numpy()
    np.testing.assert_allclose(theirs, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("model_type", WHOLE_HEADS)
def test_classes_that_rotate_whole_heads_take_it(libraries, three_lines, model_type):
    transformers, torch = libraries
    model = make_model(transformers, model_type, three_lines["p_rope"])
    positions = torch.arange(9)[None]
    assert model(positions).logits.isfinite().all()
    base = getattr(model, model.base_model_prefix)
    x = torch.randn(1, 2, 9, 16, generator=torch.manual_seed(0))
    module = sys.modules[type(model).__module__]
    rotated, _ = module.apply_rotary_pos_emb(x, x, *base.rotary_emb(x, positions))
    ours = apply_p_rope(jnp.asarray(x).swapaxes(1, 2), jnp.arange(9)[None], 16, 10_000, 0.75)
    np.testing.assert_allclose(rotated.swapaxes(1, 2), ours, rtol=0, atol=3e-6)


@pytest.mark.parametrize("model_type", ["phi", "phi3", "stablelm", "deepseek_v3"])
def test_other_classes_stop_with_an_error(libraries, three_lines, model_type):
    transformers, torch = libraries
    with pytest.raises(Exception, match=r"must match the size|must be one of"):
        make_model(transformers, model_type, three_lines["p_rope"])(torch.arange(9)[None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_the_function_is_apply_p_rope(libraries, p, dtype):
    """At positions where angles in float32 are off by a tenth."""
    _, torch = libraries
    code = block("python", "def apply_p_rope")
    body = code.partition('"""\n')[2].partition("\n\n")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
    names = {}
    exec(code, names)
    d, theta = 256, 1e6
    x = np.random.default_rng(0).standard_normal((2, 3, 64, d)).astype(np.float32)
    positions = np.linspace(0, 2**20 - 1, 64).astype(np.int32)
    theirs = names["apply_p_rope"](
        torch.tensor(x).to(getattr(torch, dtype)), torch.tensor(positions), theta, p
    )
    assert theirs.dtype == getattr(torch, dtype)
    rows = np.stack([positions, positions[::-1]])
    both = names["apply_p_rope"](torch.tensor(x), torch.tensor(rows), theta, p)
    for row in (0, 1):
        of_row = (torch.tensor(x[row : row + 1]), torch.tensor(rows[row]))
        assert torch.equal(both[row], names["apply_p_rope"](*of_row, theta, p)[0])
    heads = jnp.asarray(x, dtype).swapaxes(1, 2)
    ours = apply_p_rope(heads, jnp.asarray(positions)[None].repeat(2, axis=0), d, theta, p)
    ours = np.asarray(ours.swapaxes(1, 2), np.float32)
    bound = {"float32": 6e-7, "bfloat16": 2**-8}[dtype] * np.abs(x).max()
    np.testing.assert_allclose(theirs.float().numpy(), ours, rtol=0, atol=bound)
    assert (p == 0) == np.array_equal(ours, np.asarray(jnp.asarray(x, dtype), np.float32))


@pytest.mark.slow
def test_a_model_is_converted_here_and_trained_there(libraries, cache_dir, tmp_path):
    """The recipe as it is written, with a tiny model of transformers and fewer steps."""
    transformers, torch = libraries
    make_run(tmp_path / "start", 1.0)
    exporter.export(tmp_path / "start", tmp_path / "MODEL")
    (tmp_path / "DATA").mkdir()
    write_lines(tmp_path / "DATA/a.jsonl", [{"text": text} for text in articles()])
    small = ["--config.num_steps=4", "--config.data.seq_len=64", "--config.eval.max_windows=2"]
    env = os.environ | {"PROPE_CACHE": str(cache_dir), "PYTHONPATH": str(ROOT)}
    setup, *lines = map(shlex.split, block("text", "import_hf").splitlines())
    assert setup == ["source", "launch/setup.sh", "hf"] and len(lines) == 4
    for _, *words in lines:
        more = small if "prope.train" in words else []
        done = subprocess.run(
            [sys.executable, *words, *more], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    records = map(json.loads, (tmp_path / "P/eval.jsonl").read_text().splitlines())
    assert next(records)["encoding"] == "init_from"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "HF")
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.75
    assert model.model.rotary_emb.inv_freq.count_nonzero() == 24
    tokens = torch.arange(4, 36)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]

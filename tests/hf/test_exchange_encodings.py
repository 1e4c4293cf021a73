"""Encodings, windows and QK-norm in transformers' format: equal logits, the way back, refusals."""

import json
import re
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import ROOT
from support.exchange import edit
from support.models import assert_trees_close, forward, same
from support.runs import SIZES, make_run

from prope.config import default_config
from prope.errors import UsageError
from prope.hf import config_json
from prope.hf import exporter as export_hf
from prope.hf import importer as import_hf
from prope.hf.families import FAMILIES
from prope.hf.layout import list_tensors
from prope.stack.layers import layer_windows
from prope.workdir.run import open_run

LENGTH = 128  # length in training; logits are compared up to four times it


def scaled(kind, factor=4.0, length=LENGTH, **fields):
    if kind not in ("linear", "ntk"):
        fields["original_seq_len"] = length
    return {"rope_scaling_type": kind, "rope_scaling_factor": factor} | fields


DROPE = {"rope_scaling_factor": 4.0, "logit_scale": "drope", "logit_scale_coefficient": 0.4}
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 17}
LOCAL = WINDOWS | {"local_max_wavelength": 500.0, "local_rope_percentage": 1.0}
YARN_LOGITS = scaled("yarn", logit_scale="yarn")
QK_NORM = {"use_qk_norm": True}
# By class, and by name: (p, fields of config.model, rope_type).
GEMMA = {
    "hard_clip": (1, {"rope_type": "hard_clip", "clip_low_n": 7, "head_dim": 44}, "proportional"),
    "cutoff": (
        1,
        {"rope_type": "cutoff", "rope_cutoff": 1.0, "original_seq_len": LENGTH},
        "proportional",
    ),
    "cope": (1, {"rope_type": "cope", "clip_low_n": 9}, "longrope"),
    "rope_id": (1, {"rope_type": "rope_id", "original_seq_len": LENGTH}, "longrope"),
    "partial": (0.25, {"rope_type": "partial"}, "longrope"),
    "reversed": (0.75, {"rope_type": "reversed"}, "longrope"),
    "linear": (1, scaled("linear"), "linear"),
    "linear of p-RoPE": (0.5, scaled("linear"), "longrope"),
    "ntk": (0.75, scaled("ntk"), "proportional"),
    "ntk of partial": (0.5, scaled("ntk", rope_type="partial"), "longrope"),
    "dynamic": (1, scaled("dynamic", 2.0, LENGTH // 2), "dynamic"),
    "yarn": (1, scaled("yarn", beta_fast=16.0, beta_slow=2.0), "yarn"),
    "yarn, its logits": (1, YARN_LOGITS, "yarn"),
    "yarn, logits of another factor": (1, YARN_LOGITS | {"logit_scale_factor": 2.0}, "yarn"),
    "yarn, drope's logits": (1, scaled("yarn") | DROPE, "yarn"),
    "yarn of p-RoPE": (0.5, YARN_LOGITS, "longrope"),
    "llama3": (1, scaled("llama3", low_freq_factor=2.0, high_freq_factor=16.0), "llama3"),
    "llama3 of p-RoPE": (0.5, scaled("llama3"), "longrope"),
    "llama3, yarn's logits": (1, scaled("llama3", logit_scale="yarn"), "longrope"),
    "drope": (0, DROPE, "longrope"),
}
SMOLLM3 = {
    "windows": (0.75, WINDOWS, "proportional"),
    "windows, rotated alone": (0, WINDOWS | {"local_rope_percentage": 1.0}, "proportional"),
    "layers without rotation": ((1, 0), scaled("yarn"), "yarn"),
}
# One rope_type for each kind of layer.
MELLUM = {
    "QK-norm": (0.75, QK_NORM, ["proportional"]),
    "QK-norm, windows": (0.25, LOCAL | QK_NORM, ["proportional", "proportional"]),
    "QK-norm, windows, yarn": (1, LOCAL | YARN_LOGITS | QK_NORM, ["proportional", "yarn"]),
    "QK-norm, windows, drope": (0.5, WINDOWS | DROPE | QK_NORM, ["proportional", "longrope"]),
}
LLAMA = {"scale_embedding": False, "activation": "silu", "tied": False, "norm_epsilon": 1e-3}
ALL_SLIDING = {"layer_types": ("sliding_attention",), "sliding_window": 17}
SCORES = {"attention_scale": 12**-0.5, "final_softcap": 3.0, "post_norms": True}
# What every class computes beside its encoding.
OWN = {
    "Gemma": (0.75, {"activation": "silu", "tied": False, "norm_epsilon": 1e-3}, "proportional"),
    "Gemma2": (0.25, SCORES | WINDOWS | {"attention_softcap": 2.0}, "proportional"),
    "Gemma3": (0.25, SCORES | LOCAL | QK_NORM, ["proportional", "proportional"]),
    "Llama": (0.75, LLAMA, "proportional"),
    "Qwen2": (0.5, WINDOWS | LLAMA | {"qkv_bias": True}, "proportional"),
    "Qwen3": (0.5, WINDOWS | LLAMA | QK_NORM, "proportional"),
    "Mistral": (0.25, ALL_SLIDING | LLAMA, "proportional"),
    "SmolLM3": ((0.5, 0), LLAMA, "proportional"),
    "Mellum": (0.5, LOCAL | LLAMA | QK_NORM, ["proportional", "proportional"]),
}
# What SmolLM3 and Qwen 2 compute only of another embedding and another final norm.
SMOLLM3 |= {"untied": ((0.5, 0), {"tied": False}, "proportional")}
QWEN2 = {"biases of a Gemma": (0.5, {"qkv_bias": True}, "proportional")}
CLASSES = {"Gemma": GEMMA, "SmolLM3": SMOLLM3, "Mellum": MELLUM, "Qwen2": QWEN2}
CASES = [(name, *case) for name, cases in CLASSES.items() for case in cases.items()]
CASES += [(name, "own", case) for name, case in OWN.items()]


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 25.25), ("float32", 640**0.5)])
def test_the_factor_of_the_embedding_is_rounded_as_the_decoder_does(dtype, factor):
    config = default_config().model
    config.embed_dim = 640
    config.dtype = dtype
    scales = {tensor.name: tensor.scale for tensor in list_tensors(config, FAMILIES["smollm3"])}
    assert scales["model.embed_tokens.weight"] == np.float32(factor)
    np.testing.assert_allclose(scales["model.norm.weight"], 1 / factor, rtol=1e-7)


def export_run(tmp_path, p, fields):
    """Exports a run to hf/: (config.model, params, result)."""
    config, params = make_run(tmp_path / "run", p, **fields)
    return config.model, params, export_hf.export(tmp_path / "run", tmp_path / "hf")


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{label}") for name, label, case in CASES],
)
def test_transformers_computes_the_same_logits(tmp_path, name, case):
    """Also beyond the training length, where scalings count most."""
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    p, fields, rope_type = case
    config, params, out = export_run(tmp_path, p, fields)
    assert out["class"] == f"{name}ForCausalLM"
    rope = json.loads((tmp_path / "hf" / "config.json").read_text())["rope_parameters"]
    by_kind = isinstance(rope_type, list)
    written = [kind["rope_type"] for kind in rope.values()] if by_kind else rope["rope_type"]
    assert written == rope_type
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert type(theirs).__name__ == out["class"]
    assert not any(report.values()), report
    attentions = [layer.self_attn for layer in theirs.model.layers]
    source = theirs.config if name == "Mistral" else None  # which flash attention goes by
    windows = [getattr(source or layer, "sliding_window", None) for layer in attentions]
    assert windows == layer_windows(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, 4 * LENGTH))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    positions = jnp.arange(4 * LENGTH)[None]
    ours = np.asarray(forward(config, params, jnp.asarray(tokens), positions))
    assert ours.dtype == expected.dtype == np.float32
    assert expected.std() > 1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(OWN.keys() - {"Mellum"}))
def test_a_decoder_comes_back_from_the_class_of_its_family(tmp_path, name):
    """But for a last bit of norms: 1 + scale is rounded in the file where it is below 1/2."""
    p, fields, _ = OWN[name]
    config, params, _ = export_run(tmp_path, p, fields)
    import_hf.import_run(tmp_path / "hf", tmp_path / "back")
    run = open_run(tmp_path / "back")
    assert run.config.model.to_dict() == config.to_dict()
    assert_trees_close(run.params(), params, 2e-7)
    export_hf.export(tmp_path / "back", tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


@pytest.mark.parametrize("case", ["linear", "dynamic", "yarn", "yarn, its logits", "llama3"])
def test_scalings_of_every_pair_come_back(tmp_path, case):
    p, fields, _ = GEMMA[case]
    config, params, _ = export_run(tmp_path, p, fields)
    import_hf.import_run(tmp_path / "hf", tmp_path / "back")
    run = open_run(tmp_path / "back")
    assert run.config.model.to_dict() == config.to_dict()
    assert same(run.params(), params)
    export_hf.export(tmp_path / "back", tmp_path / "again")
    files = [tmp_path / name / "config.json" for name in ("hf", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def encoding(p=1.0, **fields):
    """rope_parameters of such a config."""
    config = default_config()
    config.model.update(SIZES | {"rope_percentage": float(p)} | fields)
    return config_json.to_hf(config, "float32")["rope_parameters"]


OTHER_CLASSES = {
    "rnope_swa": "SmolLM3",
    "gemma4_like": "Gemma4",
    "gemma4_e2b": "Gemma4",
    "gemma4_12b": "Gemma4",
    "longcontext": "Mellum",
    "gemma2_like": "Gemma2",
    "gemma3_like": "Gemma3",
    "gemma3_270m": "Gemma3",
    "gemma3_1b": "Gemma3",
    "llama32_1b": "Llama",
    "qwen3_0_6b": "Qwen3",
    "smollm2_135m": "Llama",
    "smollm3_like": "SmolLM3",
    "conversion": "Gemma3",
    "conversion_smollm2": "Llama",
}
PAGES = {file.stem for file in (ROOT / "configs").glob("*.py")} - {"families"}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_page_of_configs_has_a_class(page):
    get_config = runpy.run_path(str(ROOT / "configs" / f"{page}.py"))["get_config"]
    values = config_json.to_hf(get_config(), "float32")
    name = OTHER_CLASSES.get(page, "Gemma")
    assert values["architectures"] == [f"{name}ForCausalLM"]


@pytest.mark.parametrize("d", [2, 44, 64, 88, 104, 128, 224, 256])
def test_a_hard_clip_keeps_its_pairs(d):
    """p = C / P alone would lose one, as at d = 44 and C = 15."""
    for n in range(d // 2 + 1):
        rope = encoding(rope_type="hard_clip", clip_low_n=n, head_dim=d)
        assert rope["rope_type"] == "proportional"
        assert int(rope["partial_rotary_factor"] * d // 2) == d // 2 - n


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"rope_type": "cope", "clip_low_n": 4},
            [1, 10**-0.5, 0.1, 10**-1.5, 0.01, 0.002371708245, 0.00025, 0],
        ),
        (
            {"rope_type": "reversed", "p": 0.75},
            [0, 0, 0.1, 10**-1.5, 0.01, 10**-2.5, 0.001, 10**-3.5],
        ),
        ({"rope_type": "partial", "p": 0.5}, [1, 0.1, 0.01, 0.001, 0, 0, 0, 0]),
        (
            {"rope_type": "rope_id", "original_seq_len": 512},
            [0.1963495408, 0.09817477042, 0.04908738521, 0.02454369261, 0, 0, 0, 0],
        ),
    ],
)
def test_the_divisors_of_longrope(fields, expected):
    rope = encoding(head_dim=16, **fields)
    freqs = 1e4 ** (-np.arange(8) / 8) / np.array(rope["short_factor"])
    np.testing.assert_allclose(freqs, expected, rtol=1e-9, atol=1e-29)
    assert rope["long_factor"] == rope["short_factor"] and rope["attention_factor"] == 1
    json.dumps(rope, allow_nan=False)


# --- Refusals -----------------------------------------------------------------------------------

DYNAMIC = "rope_scaling_type=dynamic: .* needs .*; got "
NO_CLASS = "no class of transformers computes this with the other fields; the nearest, "
NO_NORM = f"use_qk_norm=False: {NO_CLASS}Mellum"


@pytest.mark.parametrize(
    ("p", "fields", "expected"),
    [
        ((1, 0.25), {}, rf"rope_percentage=\(1.0, 0.25\): {NO_CLASS}Gemma"),
        ((1, 0), DROPE, rf"rope_percentage=\(1.0, 0.0\): {NO_CLASS}Gemma"),
        ((1, 0.25), QK_NORM, rf"rope_percentage=\(1.0, 0.25\): {NO_CLASS}Mellum"),
        (1, WINDOWS | {"local_max_wavelength": 500.0}, NO_NORM),
        (0.5, WINDOWS | {"local_rope_percentage": 1.0}, NO_NORM),
        (1, WINDOWS | scaled("yarn"), NO_NORM),
        (1, WINDOWS | DROPE, NO_NORM),
        (
            1,
            WINDOWS | {"local_max_wavelength": 500.0, "qkv_bias": True},
            f"local_max_wavelength=500.0: {NO_CLASS}Qwen2",
        ),
        (0.5, scaled("dynamic"), f"{DYNAMIC}proportional, 0.5 and none"),
        (1, scaled("dynamic", logit_scale="yarn"), f"{DYNAMIC}proportional, 1.0 and yarn"),
        (0.5, scaled("dynamic", rope_type="partial"), f"{DYNAMIC}partial, 0.5 and none"),
    ],
)
def test_what_no_class_computes_is_not_exported(tmp_path, p, fields, expected):
    with pytest.raises(UsageError, match=f"config.model.{expected}") as error:
        export_run(tmp_path, p, fields)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "hf").exists()


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(("factor", "logit_scale"), [(None, "yarn"), (1.0, "none")])
def test_yarn_scales_logits_unless_the_file_says_1(exported, factor, logit_scale):
    rope = {"rope_theta": 1e4, "attention_factor": factor} | YARN
    edit(exported, rope_parameters=rope, rope_scaling=None)
    config, _ = config_json.from_hf(exported / "config.json")
    assert config.model.rope_scaling_type == "yarn"
    assert config.model.logit_scale == logit_scale


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (
            encoding(rope_type="cope", clip_low_n=4),
            '"rope_type": "longrope".*: only rope_type default, proportional',
        ),
        (YARN | {"attention_factor": 1.25}, "attention_factor must be absent or 1 with yarn"),
        (YARN | {"truncate": False}, "unknown with yarn: truncate"),
        (YARN | {"factor": "4"}, '"factor": "4".*: yarn needs the numbers factor'),
        (YARN | {"factor": 0.5}, "config.model.rope_scaling_factor=0.5: must be at least 1"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: .* and 1 with yarn"),
        (YARN | {"original_max_position_embeddings": 64.5}, "original_seq_len"),
        (
            {"rope_type": "linear", "factor": None},
            '"factor": null.*: linear needs the numbers factor',
        ),
    ],
)
def test_rotations_that_are_not_imported(exported, rope, expected):
    edit(exported, rope_parameters={"rope_theta": 1e4} | rope, rope_scaling=None)
    file = re.escape(f"{exported}/config.json")
    with pytest.raises(UsageError, match=f"{file}: .*{expected}") as error:
        config_json.from_hf(exported / "config.json")
    assert "\n" not in str(error.value)

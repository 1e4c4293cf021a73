"""Encodings, windows and QK-norm in transformers' form: the same logits, the same fields on the way back, refusals."""

import json
import re
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from makers import SIZES, edit, make_run, same

from prope import model
from prope.config import default_config
from prope.encodings import layer_windows
from prope.errors import UsageError
from prope.hf import exporter as export_hf
from prope.hf import gemma as gemma_hf
from prope.hf import importer as import_hf
from prope.workdir.run import open_run

LENGTH = 128  # of training; logits are compared up to four times it


def scaled(kind, factor=4.0, length=LENGTH, **fields):
    length = {} if kind in ("linear", "ntk", "none") else {"original_seq_len": length}
    return {"rope_scaling_type": kind, "rope_scaling_factor": factor} | length | fields


def drope(**fields):
    return fields | {
        "rope_scaling_factor": 4.0,
        "logit_scale": "drope",
        "logit_scale_coefficient": 0.4,
    }


WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 17}
LOCAL = WINDOWS | {"local_max_wavelength": 500.0, "local_rope_percentage": 1.0}
# name: (p, fields of config.model, class, rope_type, of Mellum one for each kind of layer)
CASES = {
    "hard_clip": (
        1,
        {"rope_type": "hard_clip", "clip_low_n": 7, "head_dim": 44},
        "Gemma",
        "proportional",
    ),
    "cutoff": (
        1,
        {"rope_type": "cutoff", "rope_cutoff": 1.0, "original_seq_len": LENGTH},
        "Gemma",
        "proportional",
    ),
    "cope": (1, {"rope_type": "cope", "clip_low_n": 9}, "Gemma", "longrope"),
    "rope_id": (1, {"rope_type": "rope_id", "original_seq_len": LENGTH}, "Gemma", "longrope"),
    "partial": (0.25, {"rope_type": "partial"}, "Gemma", "longrope"),
    "reversed": (0.75, {"rope_type": "reversed"}, "Gemma", "longrope"),
    "linear": (1, scaled("linear"), "Gemma", "linear"),
    "linear of p-RoPE": (0.5, scaled("linear"), "Gemma", "longrope"),
    "ntk": (0.75, scaled("ntk"), "Gemma", "proportional"),
    "ntk of partial": (0.5, scaled("ntk", rope_type="partial"), "Gemma", "longrope"),
    "dynamic": (1, scaled("dynamic", 2.0, LENGTH // 2), "Gemma", "dynamic"),
    "yarn": (1, scaled("yarn", beta_fast=16.0, beta_slow=2.0), "Gemma", "yarn"),
    "yarn, its logits": (1, scaled("yarn", logit_scale="yarn"), "Gemma", "yarn"),
    "yarn, drope's logits": (1, drope(**scaled("yarn")), "Gemma", "yarn"),
    "yarn of p-RoPE": (0.5, scaled("yarn", logit_scale="yarn"), "Gemma", "longrope"),
    "llama3": (1, scaled("llama3", low_freq_factor=2.0, high_freq_factor=16.0), "Gemma", "llama3"),
    "llama3 of p-RoPE": (0.5, scaled("llama3"), "Gemma", "longrope"),
    "llama3, yarn's logits": (1, scaled("llama3", logit_scale="yarn"), "Gemma", "longrope"),
    "drope": (0, drope(), "Gemma", "longrope"),
    "windows": (0.75, WINDOWS, "SmolLM3", "proportional"),
    "windows, rotated alone": (
        0,
        WINDOWS | {"local_rope_percentage": 1.0},
        "SmolLM3",
        "proportional",
    ),
    "layers without rotation": ((1, 0), scaled("yarn"), "SmolLM3", "yarn"),
    "QK-norm": (0.75, {"use_qk_norm": True}, "Mellum", ["proportional"]),
    "QK-norm, windows": (
        0.25,
        LOCAL | {"use_qk_norm": True},
        "Mellum",
        ["proportional", "proportional"],
    ),
    "QK-norm, windows, yarn": (
        1,
        LOCAL | scaled("yarn", logit_scale="yarn", use_qk_norm=True),
        "Mellum",
        ["proportional", "yarn"],
    ),
    "QK-norm, windows, drope": (
        0.5,
        drope(**WINDOWS, use_qk_norm=True),
        "Mellum",
        ["proportional", "longrope"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_logits(tmp_path, case):
    """Also beyond the training length, where scalings count most."""
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    p, fields, name, rope_type = CASES[case]
    config, params = make_run(tmp_path / "run", p, **fields)
    out = export_hf.export(tmp_path / "run", tmp_path / "hf")
    assert out["class"] == f"{name}ForCausalLM"
    rope = json.loads((tmp_path / "hf" / "config.json").read_text())["rope_parameters"]
    assert (rope.get("rope_type") or [own["rope_type"] for own in rope.values()]) == rope_type
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert (type(theirs).__name__, any(report.values())) == (out["class"], False), report
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in theirs.model.layers]
    assert windows == layer_windows(config.model)  # which flash attention goes by
    tokens = np.random.default_rng(1).integers(0, config.model.vocab_size, (1, 4 * LENGTH))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    hidden = model.hidden_states(
        config.model, params, jnp.asarray(tokens), jnp.arange(4 * LENGTH)[None]
    )
    ours = np.asarray(model.logits(params, hidden))
    assert ours.dtype == expected.dtype == np.float32 and expected.std() > 1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["linear", "dynamic", "yarn", "yarn, its logits", "llama3"])
def test_scalings_of_every_pair_come_back(tmp_path, case):
    p, fields, _, _ = CASES[case]
    config, params = make_run(tmp_path / "run", p, **fields)
    export_hf.export(tmp_path / "run", tmp_path / "hf")
    import_hf.import_run(tmp_path / "hf", tmp_path / "back")
    run = open_run(tmp_path / "back")
    assert run.config.model.to_dict() == config.model.to_dict() and same(run.params(), params)
    export_hf.export(tmp_path / "back", tmp_path / "again")
    assert len({(tmp_path / name / "config.json").read_bytes() for name in ("hf", "again")}) == 1


def encoding(p=1.0, **fields):
    """rope_parameters of such a config."""
    config = default_config()
    config.model.update(SIZES | {"rope_percentage": float(p)} | fields)
    return gemma_hf.to_hf(config, "float32")["rope_parameters"]


OTHER_CLASSES = {
    "gemma2_like": "SmolLM3",
    "rnope_swa": "SmolLM3",
    "smollm3_like": "SmolLM3",
    "gemma3_like": "Mellum",
    "gemma4_like": "Mellum",
    "longcontext": "Mellum",
}


@pytest.mark.parametrize("page", sorted(file.stem for file in (ROOT / "configs").glob("*.py")))
def test_every_page_of_configs_has_a_class(page):
    values = gemma_hf.to_hf(
        runpy.run_path(str(ROOT / "configs" / f"{page}.py"))["get_config"](), "float32"
    )
    name = OTHER_CLASSES.get(page, "Gemma")
    assert (values["architectures"], values["model_type"]) == ([f"{name}ForCausalLM"], name.lower())


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


# --- Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "fields", "says"),
    [
        (
            (1, 0.25),
            {},
            r"rope_percentage=\(1.0, 0.25\): .* layers without QK-norm that rotate .* must have one",
        ),
        (
            (1, 0),
            drope(),
            r"rope_percentage=\(1.0, 0.0\): .* layers without QK-norm that .* have logit_scale must",
        ),
        (
            (1, 0.25),
            {"use_qk_norm": True},
            r"rope_percentage=\(1.0, 0.25\): .* layers of the same layer_types must",
        ),
        (
            1,
            WINDOWS | {"local_max_wavelength": 500.0},
            "local_max_wavelength=500.0: in transformers, layers without",
        ),
        (
            0.5,
            WINDOWS | {"local_rope_percentage": 1.0},
            "local_rope_percentage=1.0: in transformers, layers without",
        ),
        (
            1,
            WINDOWS | scaled("yarn"),
            "rope_scaling_type=yarn: in transformers, layers without QK-norm",
        ),
        (1, WINDOWS | drope(), "logit_scale=drope: in transformers, layers without QK-norm"),
        (
            0.5,
            scaled("dynamic"),
            "rope_scaling_type=dynamic: .* needs .*; got proportional, 0.5 and none",
        ),
        (
            1,
            scaled("dynamic", logit_scale="yarn"),
            "rope_scaling_type=dynamic: .* got proportional, 1.0 and yarn",
        ),
        (
            0.5,
            scaled("dynamic", rope_type="partial"),
            "rope_scaling_type=dynamic: .* got partial, 0.5 and none",
        ),
    ],
)
def test_what_no_class_computes_is_not_exported(tmp_path, p, fields, says):
    make_run(tmp_path / "run", p, **fields)
    with pytest.raises(UsageError, match="config.model." + says) as error:
        export_hf.export(tmp_path / "run", tmp_path / "hf")
    assert "\n" not in str(error.value) and not (tmp_path / "hf").exists()


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        (
            encoding(rope_type="cope", clip_low_n=4),
            '"rope_type": "longrope".*: only rope_type default, proportional',
        ),
        (YARN | {"attention_factor": 1.25}, '"attention_factor": 1.25.*: only'),
        (YARN | {"truncate": False}, '"truncate": false.*: only'),
        (YARN | {"factor": "4"}, '"factor": "4".*: only'),
        (YARN | {"factor": 0.5}, "config.model.rope_scaling_factor=0.5: must be at least 1"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: .* and 1 with yarn"),
        (YARN | {"original_max_position_embeddings": 64.5}, "original_seq_len"),
        (
            {name: value for name, value in YARN.items() if name != "beta_fast"},
            '"rope_type": "yarn".*: only',
        ),
        ({"rope_type": "linear", "factor": None}, '"factor": null.*: only'),
    ],
)
def test_rotations_that_are_not_imported(exported, rope, says):
    edit(exported, rope_parameters={"rope_theta": 1e4} | rope, rope_scaling=None)
    with pytest.raises(
        UsageError, match=f"{re.escape(str(exported))}/config.json: .*{says}"
    ) as error:
        gemma_hf.from_hf(exported / "config.json")
    assert "\n" not in str(error.value)

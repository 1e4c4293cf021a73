"""Every class of transformers beside prope: logits, gradients, training, there and back."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import decoder
from support.commands import refusal
from support.exchange import save, stored
from support.models import assert_trees_close, forward, frequencies_of, leaves_by_path, same
from support.runs import SIZES as RUN_SIZES
from support.runs import make_run, save_run
from support.text import articles

from prope import model
from prope.data.tokenizer import load_tokenizer
from prope.hf import config_json, exporter, importer
from prope.hf.families import FAMILIES, SIZES, fill, read_kinds, rotated_layers
from prope.hf.layout import list_tensors
from prope.inference.generation import empty_cache
from prope.optimizer import make_optimizer
from prope.rope import frequencies
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.step import make_train_step
from prope.workdir.run import open_run, read_config

slow = pytest.mark.slow
BOUND = 1e-4  # of logits in float32


def load(libraries, directory, **options):
    """transformers' model of a directory, in float32; fails where it lacks or adds a tensor."""
    transformers, torch = libraries
    options |= {"dtype": torch.float32, "output_loading_info": True}
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    assert not any(report.values()), report
    return theirs


def compute(torch, theirs, tokens):
    """The logits of a model of transformers."""
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


def compute_ours(spec, params, tokens):
    """prope's logits."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(forward(spec, params, jnp.asarray(tokens), positions))


# --- Gemma with p-RoPE --------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 512])
def test_frequencies_are_transformers_proportional_ones_to_one_ulp(libraries, d):
    """And 0 for the same pairs, for every p of two decimals."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    transformers, _ = libraries
    for p in np.arange(101) / 100:
        theta = 1e6 if p < 0.5 else 1e4
        encoding = {"head_dim": d, "max_wavelength": theta, "rope_percentage": float(p)}
        spec = Spec(model=ModelSpec(**RUN_SIZES | encoding))
        theirs = transformers.GemmaConfig(**config_json.to_hf(spec, "float32"))
        expected, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, device=None)
        # Theirs are computed in float32.
        ours = frequencies(d, theta, p).astype(np.float32)
        np.testing.assert_array_max_ulp(ours, expected.numpy(), maxulp=1)
        assert np.count_nonzero(ours) == spec.model.rotated_pairs


def exact_angles(p):
    """A forward pass of their rotation in float64: most of the difference is in their angles."""
    import torch

    pair = torch.arange(32, dtype=torch.float64)
    freqs = 10_000 ** (-2 * pair / 64)
    freqs = freqs * (pair < int(p * 32))

    def forward(x, position_ids):
        angles = position_ids[..., None] * freqs
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().float(), angles.sin().float()

    return forward


@pytest.mark.parametrize(("p", "kv_heads"), [(0, 1), (0.25, 4), (0.75, 1), (1, 4)])
def test_logits_over_2048_tokens_are_those_of_transformers(libraries, tmp_path, p, kv_heads):
    _, torch = libraries
    spec, params = make_run(tmp_path / "run", p, num_kv_heads=kv_heads)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    theirs = load(libraries, tmp_path / "hf")
    tokens = np.random.default_rng(1).integers(0, spec.model.vocab_size, (1, 2048))
    ours = compute_ours(spec.model, params, tokens)
    rounded = compute(torch, theirs, tokens)
    theirs.model.rotary_emb.forward = exact_angles(p)
    expected = compute(torch, theirs, tokens)
    assert ours.dtype == expected.dtype == np.float32
    assert expected.std() > 1
    np.testing.assert_allclose(ours, rounded, rtol=0, atol=BOUND)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert theirs.generation_config.eos_token_id == 1
    # And back: what transformers saves is what was exported, byte for byte.
    theirs.save_pretrained(tmp_path / "saved")
    files = [tmp_path / name / "model.safetensors" for name in ("hf", "saved")]
    assert files[0].read_bytes() == files[1].read_bytes()
    importer.import_run(tmp_path / "saved", tmp_path / "back")
    run = open_run(tmp_path / "back")
    assert run.spec.model == spec.model
    assert same(run.params(), params)


def test_shards_are_loaded_by_transformers(libraries, tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "whole")
    monkeypatch.setattr("prope.hf.tensors._MAX_SHARD", 100_000)
    exporter.export(tmp_path / "run", tmp_path / "shards")
    theirs = load(libraries, tmp_path / "shards").state_dict()
    for name, value in stored(tmp_path / "whole").items():
        np.testing.assert_array_equal(theirs[name], value)


@pytest.mark.parametrize("fields", [{}, {"scale_embedding": False}])
def test_transformers_reads_the_tokenizer_with_its_bos(
    libraries, tmp_path, sentencepiece_model, fields
):
    """Gemma's, beside another class, too."""
    transformers, _ = libraries
    make_run(tmp_path / "run", tokenizer=sentencepiece_model, **fields)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(sentencepiece_model)
    for text in articles(20):
        ids = ours.encode(text.encode())
        assert theirs(text)["input_ids"] == [2, *ids]
        assert theirs.decode(ids) == text
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id) == (0, 1, 2)


# --- Every encoding and class, exported ---------------------------------------------------------

LENGTH = 128  # length in training; logits are compared up to four times it


def scaled(kind, factor=4.0, length=LENGTH, **fields):
    if kind not in ("linear", "ntk"):
        fields["original_seq_len"] = length
    return {"rope_scaling_type": kind, "rope_scaling_factor": factor} | fields


DROPE = {"rope_scaling_factor": 4.0, "logit_scale": "drope", "logit_scale_coefficient": 0.4}
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 17}
LOCAL = WINDOWS | {"local_max_wavelength": 500.0, "local_rope_percentage": 1.0}
YARN_LOGITS = scaled("yarn", logit_scale="yarn")
CUTOFF = {"rope_type": "cutoff", "rope_cutoff": 1.0, "original_seq_len": LENGTH}
LLAMA = {"scale_embedding": False, "activation": "silu", "tied": False, "norm_epsilon": 1e-3}
QK_NORM = {"use_qk_norm": True}
ALL_SLIDING = {"layer_types": ("sliding_attention",), "sliding_window": 17}
NORMS = {"post_norms": True, "use_qk_norm": True}
GEMMA_3 = NORMS | {"attention_scale": 12**-0.5, "final_softcap": 3.0}
GEMMA_2 = GEMMA_3 | {"use_qk_norm": False, "attention_softcap": 2.0}
# By name: (class, p, fields of the model, rope_type, or one for each kind of layer).
ENCODINGS = {
    "cutoff": ("Gemma", 1, CUTOFF, "proportional"),
    "partial": ("Gemma", 0.25, {"rope_type": "partial"}, "longrope"),
    "reversed": ("Gemma", 0.75, {"rope_type": "reversed"}, "longrope"),
    "chosen pairs": ("Llama", 1, LLAMA | {"rope_pairs": "0-2,5,9"}, "longrope"),
    "linear": ("Gemma", 1, scaled("linear"), "linear"),
    "ntk": ("Gemma", 0.75, scaled("ntk"), "proportional"),
    "dynamic": ("Gemma", 1, scaled("dynamic", 2.0, LENGTH // 2), "dynamic"),
    "yarn": ("Gemma", 1, scaled("yarn", beta_fast=16.0, beta_slow=2.0), "yarn"),
    "yarn, its logits": ("Gemma", 1, YARN_LOGITS, "yarn"),
    "yarn, logits of another factor": (
        *("Gemma", 1, YARN_LOGITS | {"logit_scale_factor": 2.0}),
        "yarn",
    ),
    "yarn, drope's logits": ("Gemma", 1, scaled("yarn") | DROPE, "yarn"),
    "yarn of p-RoPE": ("Gemma", 0.5, YARN_LOGITS, "longrope"),
    "llama3": (
        *("Gemma", 1, scaled("llama3", low_freq_factor=2.0, high_freq_factor=16.0)),
        "llama3",
    ),
    "llama3, yarn's logits": ("Gemma", 1, scaled("llama3", logit_scale="yarn"), "longrope"),
    "drope": ("Gemma", 0, DROPE, "longrope"),
    "windows, rotated alone": (
        *("SmolLM3", 0, LLAMA | WINDOWS | {"local_rope_percentage": 1.0}),
        "proportional",
    ),
    "layers without rotation": ("SmolLM3", (1, 0), LLAMA | scaled("yarn"), "yarn"),
    # Their scores are not sharper: that would show float32 angles, of transformers.
    "windows, yarn": ("Gemma3", 1, NORMS | LOCAL | YARN_LOGITS, ["proportional", "yarn"]),
    "windows, drope": ("Gemma3", 0.5, NORMS | WINDOWS | DROPE, ["proportional", "longrope"]),
}
# What every class computes beside its encoding.
OWN = {
    "Gemma": (0.75, {"activation": "silu", "tied": False, "norm_epsilon": 1e-3}, "proportional"),
    "Gemma2": (0.25, GEMMA_2 | WINDOWS, "proportional"),
    "Gemma3": (0.25, GEMMA_3 | LOCAL, ["proportional", "proportional"]),
    "Llama": (0.75, LLAMA, "proportional"),
    "Qwen2": (0.5, WINDOWS | LLAMA | {"qkv_bias": True}, "proportional"),
    "Qwen3": (0.5, WINDOWS | LLAMA | QK_NORM, "proportional"),
    "Mistral": (0.25, ALL_SLIDING | LLAMA, "proportional"),
    "SmolLM3": ((0.5, 0), LLAMA, "proportional"),
}
CASES = ENCODINGS | {name: (name, *case) for name, case in OWN.items()}
# One of each rope_type that is written.
QUICK = ("partial", "linear", "dynamic", "yarn, its logits", "llama3", "Gemma3", "Llama")


def by_name(names, quick):
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


def export_case(tmp_path, name):
    """Exports a case to hf/: (model, params, result)."""
    _, p, fields, _ = CASES[name]
    spec, params = make_run(tmp_path / "run", p, **fields)
    return spec.model, params, exporter.export(tmp_path / "run", tmp_path / "hf")


@pytest.mark.parametrize("name", by_name(CASES, QUICK))
def test_transformers_computes_the_same_logits(libraries, tmp_path, name):
    """Also beyond the training length, where scalings count most."""
    hf_class, _, _, rope_type = CASES[name]
    spec, params, out = export_case(tmp_path, name)
    rope = json.loads((tmp_path / "hf" / "config.json").read_text())["rope_parameters"]
    by_kind = isinstance(rope_type, list)
    written = [kind["rope_type"] for kind in rope.values()] if by_kind else rope["rope_type"]
    assert written == rope_type
    theirs = load(libraries, tmp_path / "hf")
    assert type(theirs).__name__ == out["class"] == f"{hf_class}ForCausalLM"
    attentions = [layer.self_attn for layer in theirs.model.layers]
    source = theirs.config if hf_class == "Mistral" else None  # which flash attention goes by
    windows = [getattr(source or layer, "sliding_window", None) for layer in attentions]
    assert windows == [layer.window for layer in spec.layers]
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (1, 4 * LENGTH))
    expected = compute(libraries[1], theirs, tokens)
    ours = compute_ours(spec, params, tokens)
    assert expected.std() > 1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", [*OWN, "linear", "dynamic", "yarn", "yarn, its logits", "llama3"])
def test_a_decoder_comes_back_from_its_export(tmp_path, name):
    """But for a last bit of norms: 1 + scale is rounded in the file where it is below 1/2."""
    spec, params, _ = export_case(tmp_path, name)
    importer.import_run(tmp_path / "hf", tmp_path / "back")
    run = open_run(tmp_path / "back")
    assert run.spec.model == spec
    assert_trees_close(run.params(), params, 2e-7)
    exporter.export(tmp_path / "back", tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


# --- Pairs by key head and layer, exported with code ----------------------------------------------

PAIRS = "0-2,6 1-5; 3,5 -"  # of heads of 16 lanes, in two layers
GEMMA_4 = NORMS | WINDOWS | {"use_value_norm": True, "use_skip_scale": True, "attention_scale": 1.0}
SHARED = {"num_layers": 4, "num_kv_shared_layers": 2, "per_layer_input_dim": 8}
FREQUENCIES = tuple(tuple(np.geomspace(1, low, 8).tolist()) for low in (1e-3, 0.1, 1e-2, 0.3))
BY_HEAD = {"rope_type": "custom", "rope_frequencies": (FREQUENCIES[:2], FREQUENCIES[2:])}
# By name: (class, fields of the model).
OWN_PAIRS = {name: (name, fields) for name, (_, fields, _) in OWN.items()} | {
    "SmolLM3": ("SmolLM3", LLAMA | WINDOWS),
    "Gemma4": ("Gemma4", GEMMA_4 | SHARED | {"rope_pairs": f"{PAIRS}; {PAIRS}"}),
    "yarn, its logits": ("Llama", LLAMA | YARN_LOGITS),
    "frequencies": ("Qwen3", LLAMA | QK_NORM | BY_HEAD | {"rope_pairs": ""}),
    "layers": ("Mistral", LLAMA | ALL_SLIDING | {"rope_pairs": "0-2; 5"}),
    "wavelengths": ("Gemma2", GEMMA_2 | LOCAL | {"rope_pairs": ""}),
}


@pytest.mark.parametrize("name", by_name(OWN_PAIRS, ("Llama", "Gemma3")))
def test_custom_code_computes_the_same_logits(libraries, tmp_path, remote_code, name):
    """In one pass, from a cache behind padding, and saved again; no class loads it without."""
    transformers, torch = libraries
    hf_class, fields = OWN_PAIRS[name]
    sizes = {"head_dim": 16, "num_kv_heads": 2, "rope_pairs": PAIRS}
    spec, params = make_run(tmp_path / "run", 1, **sizes | fields)
    refused = refusal(lambda: exporter.export(tmp_path / "run", tmp_path / "hf"))
    assert refused.endswith("; or export it with --custom_code")
    out = exporter.export(tmp_path / "run", tmp_path / "hf", custom_code=True)
    theirs = load(libraries, tmp_path / "hf", trust_remote_code=True)
    names = [base.__name__ for base in type(theirs).__mro__[:2]]
    assert names == [out["class"], f"{hf_class}ForCausalLM"] and out["class"][:5] == "Prope"

    tokens = np.random.default_rng(1).integers(3, spec.model.vocab_size, (2, LENGTH))
    expected = compute(torch, theirs, tokens)
    assert expected.std() > 1
    ours = compute_ours(spec.model, params, tokens)
    bound = 5e-4 if name == "Gemma4" else 3e-5  # whose scores no class divides by the root of H
    np.testing.assert_allclose(ours, expected, rtol=0, atol=bound)

    padded = torch.tensor(np.pad(tokens[:, :40], ((0, 0), (5, 0))))
    options = {"attention_mask": (padded > 0).int(), "do_sample": False, "max_new_tokens": 8}
    options |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    generated = theirs.generate(padded, pad_token_id=0, **options)
    ours = compute_ours(spec.model, params, generated.sequences[:, 5:].numpy())
    decoded = torch.stack(generated.logits, dim=1).numpy()
    np.testing.assert_allclose(ours[:, 39:-1], decoded, rtol=0, atol=bound)

    theirs.save_pretrained(tmp_path / "saved")
    for folder in ("hf", "saved"):
        again = load(libraries, tmp_path / folder, trust_remote_code=True)
        np.testing.assert_array_equal(compute(torch, again, tokens), expected)
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load(libraries, tmp_path / folder, trust_remote_code=False)
        with pytest.raises(KeyError, match="prope"):
            getattr(transformers, f"{hf_class}ForCausalLM").from_pretrained(tmp_path / folder)


def test_custom_code_in_bfloat16_trained_and_compiled(libraries, tmp_path, remote_code):
    """Angles are not rounded, gradients are the loss's, and nothing in it breaks the graph."""
    _, torch = libraries
    make_run(tmp_path / "run", 1, num_kv_heads=2, rope_pairs="0-20 4-31; 9,11 -", **LLAMA)
    exporter.export(tmp_path / "run", tmp_path / "hf", custom_code=True)
    theirs = load(libraries, tmp_path / "hf", trust_remote_code=True)
    tokens = torch.tensor(np.random.default_rng(1).integers(3, 300, (1, 64)))
    far = {"position_ids": torch.arange(64)[None] + 100_000}
    exact = theirs(tokens).logits
    assert (theirs(tokens, **far).logits - exact).abs().max() < 1e-4
    theirs(tokens, labels=tokens).loss.backward()
    weight = theirs.model.layers[0].self_attn.k_proj.weight
    gradient = weight.grad[3, 7].item()
    losses = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            weight[3, 7] += step
            losses.append(theirs(tokens, labels=tokens).loss.item())
            weight[3, 7] -= step
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(gradient, rel=0.02)
    compiled = torch.compile(theirs, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens).logits, exact, rtol=0, atol=1e-5)
    rounded = theirs.to(torch.bfloat16)
    difference = (rounded(tokens, **far).logits - exact).abs().mean()
    assert rounded(tokens).logits.dtype == torch.bfloat16 and difference < 0.03


# --- Every class, imported ----------------------------------------------------------------------

IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
COMMON = IDS | {
    "vocab_size": 263,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}


def sizes(layers, kv_heads, head_dim=None, **fields):
    fields |= {"num_hidden_layers": layers, "num_key_value_heads": kv_heads}
    return fields | ({} if head_dim is None else {"head_dim": head_dim})


def rope(theta, **fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | fields}


GEMMA_3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_4_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def gemma4(kv_heads, **fields):
    return sizes(
        *(6, kv_heads, 32),
        global_head_dim=64,
        sliding_window=5,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters=GEMMA_4_ROPES,
        **fields,
    )


KEYS_ARE_VALUES = gemma4(2, num_global_key_value_heads=1, attention_k_eq_v=True)
# Values that change logits at random weights, where published ones would not: (class, fields).
ORACLES = {
    "gemma": ("Gemma", sizes(3, 1, 32)),
    "gemma2": (
        "Gemma2",
        sizes(
            *(4, 2, 32),
            query_pre_attn_scalar=12,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": (
        "Gemma3",
        sizes(
            *(8, 2, 32),
            query_pre_attn_scalar=12,
            sliding_window=5,
            sliding_window_pattern=3,
            rope_parameters=GEMMA_3_ROPES,
        ),
    ),
    "dense4": ("Gemma4", KEYS_ARE_VALUES | {"hidden_size_per_layer_input": 0}),
    "e4": (
        "Gemma4",
        gemma4(
            1,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=263,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        ),
    ),
    "unified4": ("Gemma4Unified", KEYS_ARE_VALUES),
    "llama3": ("Llama", sizes(3, 2, 32) | rope(1e4, **LLAMA_3_ROPE)),
    "smollm2": ("Llama", sizes(3, 1, num_attention_heads=3, tie_word_embeddings=True) | rope(1e5)),
    "smollm3": ("SmolLM3", sizes(4, 2, no_rope_layer_interval=4) | rope(5e6)),
    "qwen2": (
        "Qwen2",
        sizes(
            *(4, 2),
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=2,
        )
        | rope(1e6),
    ),
    "qwen3": ("Qwen3", sizes(3, 2, 32) | rope(1e6)),
    "mistral": ("Mistral", sizes(3, 2, 32, sliding_window=5) | rope(1e6)),
}
SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS = np.random.default_rng(1).integers(3, 199, (2, 24))


def draw(torch, theirs):
    """Draws weights in which every number matters, for a model of transformers in float32."""
    rng = np.random.default_rng(0)
    leaves = dict(theirs.named_parameters())
    is_unscaled = any(path.endswith("layer_scalar") for path, _ in theirs.named_buffers())
    with torch.no_grad():
        for path, leaf in leaves.items():
            mean = leaf.flatten()[0].item() if "norm" in path else 0.0
            scale = leaf.shape[-1] ** -0.5
            for part, value in {"bias": 0.5, "norm": 0.3, "embed": 0.3}.items():
                scale = value if part in path else scale
            if is_unscaled and path.endswith(("q_norm.weight", "k_norm.weight")):
                mean, scale = 0.25, 0.05  # scores are not divided by sqrt(head_dim)
            drawn = torch.tensor(rng.normal(mean, scale, leaf.shape))
            # So that 1 can be taken off in float32, and added again.
            leaf.copy_(drawn.bfloat16())
        for path, leaf in theirs.named_buffers():
            if path.endswith("layer_scalar"):
                drawn = torch.tensor(rng.uniform(0.3, 0.9, leaf.shape))
                leaf.copy_(drawn.bfloat16())
    return theirs


@pytest.fixture(scope="module")
def imported(libraries, tmp_path_factory):
    """What a family's tiny model is there and here, by name; each is made once."""
    transformers, torch = libraries

    @functools.cache
    def make(name, dtype="float32"):
        family, fields = ORACLES[name]
        text = "Text" if family in ("Gemma3", "Gemma4", "Gemma4Unified") else ""
        config = getattr(transformers, f"{family}{text}Config")(**COMMON | fields)
        theirs = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        draw(torch, theirs)
        folder = tmp_path_factory.mktemp(name)
        logits = compute(torch, theirs, TOKENS)
        theirs.to(getattr(torch, dtype)).save_pretrained(folder / "hf")
        result = importer.import_run(folder / "hf", folder / "run")
        run = open_run(folder / "run")
        return types.SimpleNamespace(
            folder=folder,
            logits=logits,
            parameters=result["parameters"],
            spec=run.spec.model,
            params=run.params(),
        )

    return make


def yarn(**fields):
    return rope(5e3, rope_type="yarn", factor=8.0, original_max_position_embeddings=16, **fields)


# By name: fields of SmolLM3, of which some layers rotate.
YARNS = {
    "every fourth": sizes(4, 2, no_rope_layer_interval=4) | yarn(),
    "the first": sizes(3, 2, no_rope_layers=[0, 1, 1]) | yarn(),
    "none": sizes(2, 2, no_rope_layers=[0, 0]) | yarn(),
    "without a factor": sizes(4, 2, no_rope_layer_interval=2) | yarn(attention_factor=1.0),
    "with windows": sizes(4, 2, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5)
    | yarn(),
}


@pytest.mark.parametrize("name", by_name(YARNS, ["every fourth"]))
def test_yarn_where_some_layers_do_not_rotate(libraries, tmp_path, name):
    """Whole, and one token after the other with a cache; and there again."""
    transformers, torch = libraries
    config = transformers.SmolLM3Config(**COMMON | YARNS[name])
    theirs = draw(torch, transformers.SmolLM3ForCausalLM(config).float().eval())
    expected = compute(torch, theirs, TOKENS)
    theirs.save_pretrained(tmp_path / "hf")
    importer.import_run(tmp_path / "hf", tmp_path / "run")
    run = open_run(tmp_path / "run")
    ours = run.spec.model
    params = run.params()
    assert distance(ours, params, expected) < BOUND
    plain = dataclasses.replace(ours, logit_scale="none", logit_scale_factor=None)
    is_scaled = name not in ("none", "without a factor")
    assert (distance(plain, params, expected) > 50 * BOUND) == is_scaled
    decode = jax.jit(functools.partial(model.decode, ours))
    cache = empty_cache(ours, 2, 24)
    for start in range(24):
        tokens = jnp.asarray(TOKENS[:, start : start + 1], jnp.int32)
        hidden, cache = decode(params, tokens, cache, jnp.full(2, start, jnp.int32))
        logits = model.logits(ours, params, hidden)
        assert np.abs(logits - expected[:, start : start + 1]).max() < BOUND
    exporter.export(tmp_path / "run", tmp_path / "again")
    again = compute(torch, load(libraries, tmp_path / "again"), TOKENS)
    assert np.abs(again - expected).max() < BOUND


def distance(spec, params, expected):
    """The largest difference of a logit."""
    return np.abs(compute_ours(spec, params, TOKENS) - expected).max()


def reference_distance(spec, params, expected, freqs=None, **replaced):
    """The largest difference of a logit of the reference in NumPy, which compiles nothing."""
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    freqs = frequencies_of(spec) if freqs is None else freqs
    ours = decoder(spec, params, TOKENS, positions, freqs=freqs, **replaced)
    return np.abs(ours - expected).max()


@slow
@pytest.mark.parametrize("name", ORACLES)
def test_logits_are_those_of_transformers(imported, name):
    """Whole, and in pieces with a cache."""
    oracle = imported(name)
    spec = oracle.spec
    assert oracle.parameters == sum(leaf.size for leaf in jax.tree.leaves(oracle.params))
    assert np.abs(oracle.logits).max() > 1
    assert reference_distance(spec, oracle.params, oracle.logits) < BOUND
    assert distance(spec, oracle.params, oracle.logits) < BOUND
    decode = jax.jit(functools.partial(model.decode, spec))
    cache = empty_cache(spec, 2, 24)
    for start in range(0, 24, 3):  # windows have 5 keys
        tokens = jnp.asarray(TOKENS[:, start : start + 3], jnp.int32)
        hidden, cache = decode(oracle.params, tokens, cache, jnp.full(2, start, jnp.int32))
        logits = model.logits(spec, oracle.params, hidden)
        assert np.abs(logits - oracle.logits[:, start : start + 3]).max() < BOUND


@slow
@pytest.mark.parametrize("name", ["dense4", "e4"])
def test_gradients_are_those_of_transformers(libraries, imported, name):
    """For every tensor: keys and values that layers share have the sum of all layers."""
    _, torch = libraries
    oracle = imported(name)
    theirs = load(libraries, oracle.folder / "hf", attn_implementation="eager")
    leaves = dict(theirs.named_parameters())
    for path, leaf in theirs.named_buffers():
        if path.endswith("layer_scalar"):
            leaves[path] = leaf.requires_grad_()
    tokens = torch.tensor(TOKENS)
    theirs(tokens, labels=tokens).loss.backward()

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        logits = forward(oracle.spec, params, jnp.asarray(TOKENS), positions)
        log_likelihoods = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_likelihoods, TOKENS[:, 1:, None], axis=-1).mean()

    gradients = leaves_by_path(jax.grad(loss)(oracle.params))
    ours = {}
    for tensor in list_tensors(oracle.spec, FAMILIES["gemma4_text"]):
        gradient = np.asarray(gradients["/".join(tensor.path)])
        if tensor.layer is not None:
            gradient = gradient[tensor.layer]
        ours[tensor.name] = dataclasses.replace(tensor, offset=0.0).read(gradient, np.float32)
    assert all(np.isfinite(gradient).all() for gradient in ours.values())
    expected = {path: leaf.grad.numpy() for path, leaf in leaves.items() if leaf.grad is not None}
    scalars = [path for path in expected if path.endswith("layer_scalar")]
    for gradients in (ours, expected):
        # Together, for the final norm all but undoes that of the last layer.
        gradients["layer_scalar"] = np.stack([gradients.pop(path) for path in scalars])
    assert_trees_close(ours, expected, rtol=1e-4)


def exported_as(name):
    """The name of the class; the text part of Gemma4Unified computes what Gemma4's does."""
    return ORACLES[name][0].removesuffix("Unified")


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ORACLES)
def test_import_then_export_is_the_same_file(libraries, imported, name, dtype):
    """Tensors bit for bit, and the class; so the logits are the same there, too."""
    oracle = imported(name, dtype)
    again = oracle.folder / "again"
    result = exporter.export(oracle.folder / "run", again, dtype=dtype)
    assert result["class"] == f"{exported_as(name)}ForCausalLM"
    ours, theirs = (stored(oracle.folder / place) for place in ("again", "hf"))
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        assert ours[tensor].dtype == theirs[tensor].dtype
        assert ours[tensor].tobytes() == theirs[tensor].tobytes(), tensor
    loaded = load(libraries, again, attn_implementation="eager")
    np.testing.assert_array_equal(compute(libraries[1], loaded, TOKENS), oracle.logits)


# A class with a rotation by kind of layer loads a run that has one kind alone, too.
WINDOWS_ALONE = {"layer_types": (SLIDING,), "rope_scaling_type": "none", "rope_scaling_factor": 1.0}


@slow
@pytest.mark.parametrize(("name", "changed"), [("dense4", {}), ("gemma3", WINDOWS_ALONE)])
def test_another_p_is_exported_to_the_same_class(libraries, imported, name, changed, tmp_path):
    oracle = imported(name)
    model = dataclasses.replace(oracle.spec, **changed | {"rope_percentage": 0.5})
    spec = dataclasses.replace(read_config(oracle.folder / "run"), model=model)
    save_run(tmp_path / "run", spec, oracle.params)
    result = exporter.export(tmp_path / "run", tmp_path / "hf")
    assert result["class"] == f"{exported_as(name)}ForCausalLM"
    theirs = load(libraries, tmp_path / "hf", attn_implementation="eager")
    logits = compute(libraries[1], theirs, TOKENS)
    assert distance(model, oracle.params, logits) < BOUND
    assert np.abs(logits - oracle.logits).max() > 50 * BOUND


TINY_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
TOKENS_OF_4 = ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id")
# By oracle of the text: (class, fields of the vision part, others).
IMAGES = {
    "gemma3": (
        "Gemma3",
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4, "image_token_index": 262},
    ),
    "e4": (
        "Gemma4",
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
        dict.fromkeys(TOKENS_OF_4, 262),
    ),
}


@slow
@pytest.mark.parametrize("name", IMAGES)
def test_the_text_part_of_models_of_images(libraries, tmp_path, name):
    """As it is saved; under another prefix; with what published files hold besides."""
    transformers, torch = libraries
    hf_class, vision, others = IMAGES[name]
    config = getattr(transformers, f"{hf_class}Config")(
        text_config=COMMON | ORACLES[name][1] | {"model_type": f"{hf_class.lower()}_text"},
        vision_config=TINY_IMAGES | vision,
        **others,
    )
    theirs = getattr(transformers, f"{hf_class}ForConditionalGeneration")(config)
    theirs = draw(torch, theirs.float().eval())
    theirs.save_pretrained(tmp_path / "hf")
    expected = compute(torch, theirs, TOKENS)
    tensors = stored(tmp_path / "hf")
    assert any("vision_tower" in name for name in tensors)
    prefixes = ["model.language_model.", "language_model.model."]
    if any(name.startswith("language_model.model.") for name in tensors):
        prefixes.reverse()
    renamed = {name.replace(*prefixes): values for name, values in tensors.items()}
    assert renamed.keys() != tensors.keys()
    forms = [tensors, renamed]
    if name == "e4":
        unused = {  # of layers that share keys and values
            f"model.language_model.layers.{layer}.self_attn.{name}.weight": np.ones(8, np.float32)
            for layer in (3, 4, 5)
            for name in ("k_proj", "v_proj", "k_norm")
        }
        assert not unused.keys() & tensors.keys()
        forms.append(tensors | unused)
    for number, form in enumerate(forms):
        save(tmp_path / "hf", form)
        importer.import_run(tmp_path / "hf", tmp_path / f"run{number}")
        run = open_run(tmp_path / f"run{number}")
        assert distance(run.spec.model, run.params(), expected) < BOUND


@slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_fields_are_those_of_the_class(libraries, model_type):
    transformers, _ = libraries
    theirs = transformers.AutoConfig.for_model(model_type)
    family = FAMILIES[model_type]
    ours, _ = fill(family, {})
    fields = vars(theirs)
    by_layer = theirs.per_layer_config[-1] if model_type.startswith("gemma4") else theirs
    (activation,) = family.defaults.keys() & {"hidden_act", "hidden_activation"}
    expected = {*SIZES, "rms_norm_eps", "tie_word_embeddings", activation} - {"head_dim"}
    assert fields.keys() >= expected
    by_rule = {"layer_types", "no_rope_layers"}  # compared below
    if fields.get("use_sliding_window") is False:
        by_rule.add("sliding_window")  # their class makes it null
    for name in (family.defaults.keys() & fields) - by_rule:
        assert ours[name] == fields[name], name
    heads = theirs.hidden_size // theirs.num_attention_heads
    assert ours.get("global_head_dim", ours["head_dim"]) == getattr(by_layer, "head_dim", heads)
    layers = ours["num_hidden_layers"]
    full = ["full_attention"] * layers
    if model_type == "mistral":
        full = ["sliding_attention"] * layers
    assert read_kinds(family, ours) == (getattr(theirs, "layer_types", None) or full)
    if model_type == "smollm3":
        assert rotated_layers(ours) == list(map(bool, theirs.no_rope_layers))
    ropes = theirs.rope_parameters
    if "rope_theta" in ours:
        assert ours["rope_theta"] == ropes.get("full_attention", ropes)["rope_theta"]
    if "rope_local_base_freq" in ours:
        assert ours["rope_local_base_freq"] == ropes["sliding_attention"]["rope_theta"]


# --- Single changes, each of which a port has made ----------------------------------------------


def change_fields(**values):
    """Changes fields of the model."""
    return lambda spec, params: (dataclasses.replace(spec, **values), params)


def change_arrays(ending, function):
    """Changes the parameters whose path has an ending."""

    def change(spec, params):
        def change_leaf(path, leaf):
            name = "/".join(key.key for key in path)
            return function(leaf) if name.endswith(ending) else leaf

        return spec, jax.tree_util.tree_map_with_path(change_leaf, params)

    return change


def round_factor(spec, params):
    """sqrt(D) of the embedding in bfloat16, but not of the output matrix."""
    table = model.embedding(params)
    factor = np.sqrt(spec.embed_dim)
    rounded = float(jnp.asarray(factor, jnp.bfloat16))
    embedder = {"input_embedding": table * (rounded / factor)}
    untied = dataclasses.replace(spec, tied=False)
    return untied, params | {"embedder": embedder, "head": {"w": table}}


def tie(spec, params):
    tied = dataclasses.replace(spec, tied=True)
    return tied, {name: leaves for name, leaves in params.items() if name != "head"}


def exchange_norms(spec, params):
    layers = params["layers"]
    first = layers["pre_attention_norm"]
    second = layers["pre_ffw_norm"]
    exchanged = layers | {"pre_attention_norm": second, "pre_ffw_norm": first}
    return spec, params | {"layers": exchanged}


def keep_sum_of_layer_inputs(spec, params):
    """Layer inputs are the sum of both parts, not divided by sqrt(2)."""
    embedder = params["embedder"]
    norm = embedder["per_layer_projection_norm"]
    scaled = {
        "per_layer_embeddings": 2**0.5 * embedder["per_layer_embeddings"],
        "per_layer_projection_norm": {"scale": 2**0.5 * (1 + norm["scale"]) - 1},
    }
    return spec, params | {"embedder": embedder | scaled}


def zero(leaf):
    return 0 * leaf


def bias(number):
    """Changes the bias of keys, 0, or of values, 1."""
    return change_arrays("kv_einsum/b", lambda leaf: leaf.at[:, number].set(0))


NO_WINDOW = {"layer_types": (), "sliding_window": None}
NO_SCALING = {"rope_scaling_type": "none", "rope_scaling_factor": 1.0}


def take_normed_keys(query, key, value, positions, freqs):
    is_full = len(freqs) == 32
    return oracles.rotate_qkv(query, key, key if is_full else value, positions, freqs)


def take_rotated_keys(query, key, value, positions, freqs):
    is_full = len(freqs) == 32
    query, key, value = oracles.rotate_qkv(query, key, value, positions, freqs)
    return query, key, key if is_full else value


def rotate_prefix(query, key, value, positions, freqs):
    """Pairs lanes within those that rotate, as partial rotary does."""
    rotated = np.count_nonzero(freqs)

    def rotate_first(x):
        first, others = np.split(x, [2 * rotated], axis=-1)
        return np.concatenate([oracles.rotate(first, positions, freqs[:rotated]), others], axis=-1)

    return rotate_first(query), rotate_first(key), value


# By oracle: name -> change.
MUTANTS = {
    "gemma": {
        "eps": change_fields(norm_epsilon=1e-2),
        "w for 1 + w": change_arrays("scale", lambda leaf: leaf - 1),
        "no s_e": change_fields(scale_embedding=False),
        "s_e in bfloat16": round_factor,
        "silu for gelu": change_fields(activation="silu"),
    },
    "gemma2": {
        "H^-1/2": change_fields(attention_scale=None),
        "no cap of scores": change_fields(attention_softcap=None),
        "no final cap": change_fields(final_softcap=None),
        "no post-norms": change_fields(post_norms=False),
        "post_attention_norm without scale": change_arrays("post_attention_norm/scale", zero),
        "window + 1": change_fields(sliding_window=6),
        "no window": change_fields(**NO_WINDOW),
        "pattern shifted": change_fields(layer_types=(FULL, SLIDING)),
    },
    "gemma3": {
        "H^-1/2": change_fields(attention_scale=None),
        "post_ffw_norm without scale": change_arrays("post_ffw_norm/scale", zero),
        "no QK-norm": change_fields(use_qk_norm=False),
        "no scale of query_norm": change_arrays("query_norm/scale", zero),
        "pattern of 3 shifted": change_fields(layer_types=(SLIDING, FULL, SLIDING)),
        "theta 1e4 everywhere": change_fields(max_wavelength=1e4),
        "theta 1e6 everywhere": change_fields(local_max_wavelength=1e6),
        "no linear scaling": change_fields(**NO_SCALING),
    },
    "dense4": {
        "no layer_scalar": change_arrays("skip_scale", jnp.ones_like),
        "1 + w for w": change_arrays("norm/scale", lambda leaf: leaf + 1),
        "H^-1/2": change_fields(attention_scale=None),
        "no QK-norm's scale in full layers": change_arrays(
            "full_attention/attn/key_norm/scale", zero
        ),
        "RoPE in full layers": change_fields(rope_percentage=1.0),
        "denominator p H": change_fields(rope_type="partial"),
        "theta 1e4 in full layers": change_fields(max_wavelength=1e4),
    },
    "e4": {
        "no final cap": change_fields(final_softcap=None),
        "no norm of values": change_fields(use_value_norm=False),
        "p-RoPE in sliding layers": change_fields(local_rope_percentage=None),
        "theta 1e6 in sliding layers": change_fields(local_max_wavelength=None),
        "window + 1": change_fields(sliding_window=6),
        "no sqrt(D)": change_fields(scale_embedding=False),
        "no sqrt(Q)": change_arrays("per_layer_embeddings", lambda leaf: leaf * 8**-0.5),
        "no token part of layer inputs": change_arrays("per_layer_embeddings", zero),
        "no context part of layer inputs": change_arrays(
            "per_layer_projection_norm/scale", lambda leaf: 0 * leaf - 1
        ),
        "no norm's scale of layer inputs": change_arrays("post_per_layer_input_norm/scale", zero),
        "no 1 / sqrt(2) of layer inputs": keep_sum_of_layer_inputs,
    },
    "unified4": {"no norm of values that are keys": change_fields(use_value_norm=False)},
    "llama3": {
        "eps": change_fields(norm_epsilon=1e-2),
        "1 + w for w": change_arrays("scale", lambda leaf: leaf + 1),
        "no llama3 scaling": change_fields(**NO_SCALING, original_seq_len=None),
        "linear for llama3": change_fields(rope_scaling_type="linear", original_seq_len=None),
        "tied for untied": tie,
        "norms of attention and MLP exchanged": exchange_norms,
    },
    "smollm2": {
        "s_e": change_fields(scale_embedding=True),
        "theta": change_fields(max_wavelength=1e4),
    },
    "smollm3": {
        "unrotated layer rotated": change_fields(rope_percentage=1.0),
        "other layers unrotated": change_fields(rope_percentage=(0.0, 1.0, 1.0, 1.0)),
    },
    "qwen2": {
        "window - 1": change_fields(sliding_window=4),
        "first layers slide": change_fields(layer_types=(SLIDING, SLIDING, FULL, FULL)),
        "no bias of queries": change_arrays("q_einsum/b", zero),
        "no bias of keys": bias(0),
        "no bias of values": bias(1),
    },
    "qwen3": {
        "1 + w for w of QK-norm": change_arrays("_norm/scale", lambda leaf: leaf + 1),
        "no QK-norm": change_fields(use_qk_norm=False),
        "no scale of key_norm": change_arrays("key_norm/scale", zero),
    },
    "mistral": {
        "gelu for silu": change_fields(activation="gelu"),
        "window + 1": change_fields(sliding_window=6),
        "no window": change_fields(**NO_WINDOW),
    },
}


def scale_sliding_layers(spec):
    """Other ports scaled Gemma 3's sliding layers too."""
    factors = [spec.rope_scaling_factor if layer.is_local else 1 for layer in spec.layers]
    return [freqs / s for freqs, s in zip(frequencies_of(spec), factors, strict=True)]


def share_first_keys():
    """Layers share the first keys and values of their kind, not the last, as a port did."""
    seen = []

    def rotate_fn(query, key, value, positions, freqs):
        seen.append((key, value))
        if len(seen) in (4, 5):  # sliding, as the first
            key, value = seen[0]
        return oracles.rotate_qkv(query, key, value, positions, freqs)

    return rotate_fn


@slow
@pytest.mark.parametrize("name", ORACLES)
def test_each_single_change_is_seen(imported, name):
    """Changes the reference in NumPy, which without them computes what transformers does."""
    oracle = imported(name)
    far = functools.partial(reference_distance, expected=oracle.logits)
    distances = {}
    for what, change in MUTANTS[name].items():
        distances[what] = far(*change(oracle.spec, oracle.params))
    spec, params = oracle.spec, oracle.params
    rotations = {}
    if name == "gemma3":
        distances["scaled"] = far(spec, params, freqs=scale_sliding_layers(spec))
    elif name == "dense4":
        rotations = dict(enumerate((take_normed_keys, take_rotated_keys, rotate_prefix)))
    elif name == "e4":
        rotations["first keys"] = share_first_keys()
    for what, rotate_fn in rotations.items():
        distances[what] = far(spec, params, rotate_fn=rotate_fn)
    assert all(distance > 50 * BOUND for distance in distances.values()), distances


# --- Training -----------------------------------------------------------------------------------

OPTIMIZER = {
    "learning_rate": 1e-3,
    "final_learning_rate": 1e-4,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "clip_norm": 0.5,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
}
NUM_STEPS = 8


def torch_step(theirs, adamw, inputs, targets, weights):
    """Updates a model of transformers by two microbatches: (the loss, the gradient's norm)."""
    import torch

    adamw.zero_grad()
    total = 0.0
    for rows in np.split(np.arange(len(inputs)), 2):
        logits = theirs(torch.tensor(inputs[rows])).logits.transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(targets[rows]), reduction="none"
        )
        loss = (losses * torch.tensor(weights[rows])).sum() / float(weights.sum())
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), OPTIMIZER["clip_norm"])
    adamw.step()
    return total, norm.item()


def test_eight_training_steps_equal_torch_s(libraries, tmp_path):
    """AdamW, its decay mask, clipping, the schedule and two microbatches, from equal weights."""
    _, torch = libraries
    B = 4
    T = 32
    spec, params = make_run(tmp_path / "run", 0.75)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    theirs = load(libraries, tmp_path / "hf")
    # The names of norms end so; they do not decay. The head is the embedding.
    norms = []
    matrices = []
    for name, weight in theirs.named_parameters():
        (norms if name.endswith("norm.weight") else matrices).append(weight)
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
        {"params": norms, "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER["b1"], OPTIMIZER["b2"])
    adamw = torch.optim.AdamW(groups, betas=betas, eps=OPTIMIZER["eps"])
    fields = {"batch_size": B, "accumulation": 2, "num_steps": NUM_STEPS, "data.seq_len": T}
    spec = spec.replace(fields | {f"optimizer.{name}": OPTIMIZER[name] for name in OPTIMIZER})
    optimizer = make_optimizer(spec)
    step = jax.jit(make_train_step(spec, optimizer))
    state = optimizer.init(params)

    rng = np.random.default_rng(2)
    rates = ("warmup_steps", "learning_rate", "final_learning_rate")
    for number in range(NUM_STEPS):
        # Without id 0: torch leaves the padding's embedding out of the gradient.
        tokens = rng.integers(1, spec.model.vocab_size, (B, T + 1))
        weights = (rng.random((B, T)) < 0.8).astype(np.float32)
        batch = {
            "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
            "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
            "positions": jnp.tile(jnp.arange(T), (B, 1)),
            "segment_ids": jnp.ones((B, T), jnp.int32),
            "weights": jnp.asarray(weights),
        }
        params, state, metrics = step(params, state, batch)
        rate = oracles.learning_rate(number + 1, NUM_STEPS, *(OPTIMIZER[name] for name in rates))
        for group in adamw.param_groups:
            group["lr"] = rate
        loss, norm = torch_step(theirs, adamw, tokens[:, :-1], tokens[:, 1:], weights)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        assert norm > OPTIMIZER["clip_norm"]

    theirs.save_pretrained(tmp_path / "saved")
    importer.import_run(tmp_path / "saved", tmp_path / "back")
    expected = open_run(tmp_path / "back").params()
    compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(compare, params, expected)

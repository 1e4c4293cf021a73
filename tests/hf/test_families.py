"""Every family beside transformers: tiny models with its switches, imported, cached, exported."""

import copy
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import decoder, rotate, rotate_qkv
from support.exchange import save, stored
from support.models import assert_trees_close, forward, leaves_by_path
from support.runs import save_run

from prope import model
from prope.config import set_layer_percentages
from prope.encodings import layer_frequencies
from prope.hf import exporter, importer
from prope.hf.families import (
    ACTIVATIONS,
    FAMILIES,
    IMPORTED,
    SIZES,
    fill,
    read_kinds,
    read_switches,
    rotated_layers,
)
from prope.hf.layout import list_tensors
from prope.inference.generation import empty_cache
from prope.stack.layers import layer_windows
from prope.workdir.run import open_run, read_config

pytestmark = pytest.mark.slow  # torch and transformers take seconds to import
BOUND = 1e-4  # of logits in float32

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
TOKENS = np.random.default_rng(1).integers(3, 199, (2, 24))
POSITIONS = jnp.broadcast_to(jnp.arange(24), TOKENS.shape)


@pytest.fixture(scope="module")
def libraries():
    """(transformers, torch)."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    return transformers, torch


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
        logits = compute(torch, theirs)
        theirs.to(getattr(torch, dtype)).save_pretrained(folder / "hf")
        result = importer.import_run(folder / "hf", folder / "run")
        run = open_run(folder / "run")
        return types.SimpleNamespace(
            folder=folder,
            logits=logits,
            parameters=result["parameters"],
            config=run.config.model,
            params=run.params(),
        )

    return make


def compute(torch, theirs):
    """The logits of a model of transformers."""
    with torch.no_grad():
        return theirs(torch.tensor(TOKENS)).logits.numpy()


def distance(config, params, expected):
    """The largest difference of a logit."""
    return np.abs(forward(config, params, jnp.asarray(TOKENS), POSITIONS) - expected).max()


def reference_distance(config, params, expected, freqs=None, **replaced):
    """The largest difference of a logit of the reference in NumPy, which compiles nothing."""
    freqs = layer_frequencies(config) if freqs is None else freqs
    return np.abs(
        decoder(config, params, TOKENS, POSITIONS, freqs=freqs, **replaced) - expected
    ).max()


@pytest.mark.parametrize("name", ORACLES)
def test_logits_are_those_of_transformers(imported, name):
    """Whole, and in pieces with a cache."""
    oracle = imported(name)
    config = oracle.config
    assert oracle.parameters == sum(leaf.size for leaf in jax.tree.leaves(oracle.params))
    assert np.abs(oracle.logits).max() > 1
    assert reference_distance(config, oracle.params, oracle.logits) < BOUND
    assert distance(config, oracle.params, oracle.logits) < BOUND
    decode = jax.jit(functools.partial(model.decode, config))
    cache = empty_cache(config, 2, 24)
    for start in range(0, 24, 3):  # windows have 5 keys
        tokens = jnp.asarray(TOKENS[:, start : start + 3], jnp.int32)
        hidden, cache = decode(oracle.params, tokens, cache, jnp.full(2, start, jnp.int32))
        logits = model.logits(config, oracle.params, hidden)
        assert np.abs(logits - oracle.logits[:, start : start + 3]).max() < BOUND


@pytest.mark.parametrize("name", ["dense4", "e4", "unified4"])
def test_gradients_are_those_of_transformers(libraries, imported, name):
    """Of a loss, for every tensor: keys and values that layers share have the sum of all."""
    transformers, torch = libraries
    oracle = imported(name)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(oracle.folder / "hf", attn_implementation="eager", dtype=torch.float32)
    leaves = dict(theirs.named_parameters())
    for path, leaf in theirs.named_buffers():
        if path.endswith("layer_scalar"):
            leaves[path] = leaf.requires_grad_()
    tokens = torch.tensor(TOKENS)
    theirs(tokens, labels=tokens).loss.backward()

    def loss(params):
        logits = forward(oracle.config, params, jnp.asarray(TOKENS), POSITIONS)
        log_likelihoods = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_likelihoods, TOKENS[:, 1:, None], axis=-1).mean()

    gradients = leaves_by_path(jax.grad(loss)(oracle.params))
    ours = {}
    for tensor in list_tensors(oracle.config, FAMILIES["gemma4_text"]):
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ORACLES)
def test_import_then_export_is_the_same_file(libraries, imported, name, dtype):
    """Tensors bit for bit, and the class; so the logits are the same there, too."""
    transformers, torch = libraries
    oracle = imported(name, dtype)
    again = oracle.folder / "again"
    result = exporter.export(oracle.folder / "run", again, dtype=dtype)
    assert result["class"] == f"{exported_as(name)}ForCausalLM"
    ours, theirs = (stored(oracle.folder / place) for place in ("again", "hf"))
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        assert ours[tensor].dtype == theirs[tensor].dtype
        assert ours[tensor].tobytes() == theirs[tensor].tobytes(), tensor
    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    loaded, report = load(again, output_loading_info=True, **options)
    assert not any(report.values()), report
    np.testing.assert_array_equal(compute(torch, loaded), oracle.logits)


# A class with a rotation by kind of layer loads a run that has one kind alone, too.
WINDOWS_ALONE = {"layer_types": ("sliding_attention",), "rope_scaling_type": "none"}


@pytest.mark.parametrize(
    ("name", "changed"), [*((name, {}) for name in ORACLES), ("gemma3", WINDOWS_ALONE)]
)
def test_another_p_is_exported_to_the_same_class(libraries, imported, name, changed, tmp_path):
    transformers, torch = libraries
    oracle = imported(name)
    config = read_config(oracle.folder / "run")
    config.model.update(changed)
    p = config.model.rope_percentage
    if isinstance(p, tuple):
        set_layer_percentages(config, [share / 2 for share in p])
    else:
        config.model.rope_percentage = 0.5
    save_run(tmp_path / "run", config, oracle.params)
    result = exporter.export(tmp_path / "run", tmp_path / "hf")
    assert result["class"] == f"{exported_as(name)}ForCausalLM"
    load = transformers.AutoModelForCausalLM.from_pretrained
    logits = compute(torch, load(tmp_path / "hf", attn_implementation="eager"))
    assert distance(config.model, oracle.params, logits) < BOUND
    assert np.abs(logits - oracle.logits).max() > 50 * BOUND


TINY_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


def test_the_text_part_of_gemma_3s_models_of_images(libraries, tmp_path):
    """Under the two prefixes that its files have."""
    transformers, torch = libraries
    config = transformers.Gemma3Config(
        text_config=COMMON | ORACLES["gemma3"][1] | {"model_type": "gemma3_text"},
        vision_config=TINY_IMAGES
        | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=262,
    )
    theirs = draw(torch, transformers.Gemma3ForConditionalGeneration(config).float().eval())
    theirs.save_pretrained(tmp_path / "hf")
    tensors = stored(tmp_path / "hf")
    renamed = {
        name.replace("language_model.model.", "model.language_model."): values
        for name, values in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    check_text_part(torch, theirs, tmp_path, (tensors, renamed))


def test_the_text_part_of_gemma_4s_models_of_images(libraries, tmp_path):
    """With tensors of layers that share keys and values, which published files have."""
    transformers, torch = libraries
    tokens = ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id")
    config = transformers.Gemma4Config(
        text_config=COMMON | ORACLES["e4"][1] | {"model_type": "gemma4_text"},
        vision_config=TINY_IMAGES
        | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
        **dict.fromkeys(tokens, 262),
    )
    theirs = draw(torch, transformers.Gemma4ForConditionalGeneration(config).float().eval())
    theirs.save_pretrained(tmp_path / "hf")
    tensors = stored(tmp_path / "hf")
    unused = {
        f"model.language_model.layers.{layer}.self_attn.{name}.weight": np.ones(8, np.float32)
        for layer in (3, 4, 5)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    assert not unused.keys() & tensors.keys()
    check_text_part(torch, theirs, tmp_path, (tensors, tensors | unused))


def check_text_part(torch, theirs, folder, forms):
    """The model of text computes what the whole does, for each form of its tensors."""
    logits = compute(torch, theirs)
    for number, tensors in enumerate(forms):
        assert any("vision_tower" in name for name in tensors)
        save(folder / "hf", tensors)
        importer.import_run(folder / "hf", folder / f"run{number}")
        run = open_run(folder / f"run{number}")
        assert distance(run.config.model, run.params(), logits) < BOUND


@pytest.mark.parametrize("model_type", IMPORTED)
def test_absent_fields_are_those_of_the_class(libraries, model_type):
    transformers, _ = libraries
    theirs = transformers.AutoConfig.for_model(model_type)
    family = FAMILIES[model_type]
    ours, _ = fill(family, {})
    fields = vars(theirs)
    by_layer = theirs.per_layer_config[-1] if model_type.startswith("gemma4") else theirs
    assert fields.keys() >= {*SIZES, "rms_norm_eps", "tie_word_embeddings"} - {"head_dim"}
    by_rule = {"layer_types", "no_rope_layers"}  # compared below
    if fields.get("use_sliding_window") is False:
        by_rule.add("sliding_window")  # their class makes it null
    for name in (family.defaults.keys() & fields) - by_rule:
        assert ours[name] == fields[name], name
    heads = theirs.hidden_size // theirs.num_attention_heads
    assert ours.get("global_head_dim", ours["head_dim"]) == getattr(by_layer, "head_dim", heads)
    activation = getattr(theirs, family.activation_field)
    assert ACTIVATIONS[read_switches(family, ours)["activation"]] == activation
    layers = ours["num_hidden_layers"]
    full = ["full_attention"] * layers
    if model_type == "mistral":
        full = ["sliding_attention"] * layers
    assert read_kinds(family, ours) == (getattr(theirs, "layer_types", None) or full)
    rotated = getattr(theirs, "no_rope_layers", [1] * layers)
    assert rotated_layers(family, ours) == list(map(bool, rotated))
    ropes = theirs.rope_parameters
    if family.reads("rope_theta"):
        assert ours["rope_theta"] == ropes.get("full_attention", ropes)["rope_theta"]
    if family.reads("rope_local_base_freq"):
        assert ours["rope_local_base_freq"] == ropes["sliding_attention"]["rope_theta"]


# --- Single changes, each of which a port has made ----------------------------------------------


def fields(**values):
    """Changes fields of config.model."""

    def change(config, params):
        others = dict(values)
        with config.ignore_type():
            config.rope_percentage = others.pop("rope_percentage", config.rope_percentage)
        config.update(others)
        return params

    return change


def arrays(ending, function):
    """Changes the parameters whose path has an ending."""

    def change(config, params):
        def change_leaf(path, leaf):
            name = "/".join(key.key for key in path)
            return function(leaf) if name.endswith(ending) else leaf

        return jax.tree_util.tree_map_with_path(change_leaf, params)

    return change


def round_factor(config, params):
    """sqrt(D) of the embedding in bfloat16, but not of the output matrix."""
    config.tied = False
    table = model.embedding(params)
    factor = np.sqrt(config.embed_dim)
    rounded = float(jnp.asarray(factor, jnp.bfloat16))
    embedder = {"input_embedding": table * (rounded / factor)}
    return params | {"embedder": embedder, "head": {"w": table}}


def tie(config, params):
    config.tied = True
    return {name: leaves for name, leaves in params.items() if name != "head"}


def exchange_norms(config, params):
    layers = params["layers"]
    first = layers["pre_attention_norm"]
    second = layers["pre_ffw_norm"]
    return params | {"layers": layers | {"pre_attention_norm": second, "pre_ffw_norm": first}}


def keep_sum_of_layer_inputs(config, params):
    """Layer inputs are the sum of both parts, not divided by sqrt(2)."""
    embedder = params["embedder"]
    norm = embedder["per_layer_projection_norm"]
    scaled = {
        "per_layer_embeddings": 2**0.5 * embedder["per_layer_embeddings"],
        "per_layer_projection_norm": {"scale": 2**0.5 * (1 + norm["scale"]) - 1},
    }
    return params | {"embedder": embedder | scaled}


def zero(leaf):
    return 0 * leaf


def bias(number):
    """Changes the bias of keys, 0, or of values, 1."""
    return arrays("kv_einsum/b", lambda leaf: leaf.at[:, number].set(0))


SLIDING, FULL = "sliding_attention", "full_attention"
NO_WINDOW = {"layer_types": (), "sliding_window": None}
MUTANTS = {
    "eps": ("gemma", fields(norm_epsilon=1e-2)),
    "eps of a Llama": ("llama3", fields(norm_epsilon=1e-2)),
    "w for 1 + w": ("gemma", arrays("scale", lambda leaf: leaf - 1)),
    "1 + w for w": ("llama3", arrays("scale", lambda leaf: leaf + 1)),
    "1 + w for w of QK-norm": ("qwen3", arrays("_norm/scale", lambda leaf: leaf + 1)),
    "no s_e": ("gemma", fields(scale_embedding=False)),
    "s_e in a Llama": ("smollm2", fields(scale_embedding=True)),
    "s_e in bfloat16": ("gemma", round_factor),
    "silu for gelu": ("gemma", fields(activation="silu")),
    "gelu for silu": ("mistral", fields(activation="gelu")),
    "H^-1/2": ("gemma2", fields(attention_scale=None)),
    "H^-1/2 in Gemma 3": ("gemma3", fields(attention_scale=None)),
    "no cap of scores": ("gemma2", fields(attention_softcap=None)),
    "no final cap": ("gemma2", fields(final_softcap=None)),
    "no post-norms": ("gemma2", fields(post_norms=False)),
    "post_attention_norm without scale": ("gemma2", arrays("post_attention_norm/scale", zero)),
    "post_ffw_norm without scale": ("gemma3", arrays("post_ffw_norm/scale", zero)),
    "no QK-norm": ("gemma3", fields(use_qk_norm=False)),
    "no QK-norm in Qwen 3": ("qwen3", fields(use_qk_norm=False)),
    "no scale of query_norm": ("gemma3", arrays("query_norm/scale", zero)),
    "no scale of key_norm": ("qwen3", arrays("key_norm/scale", zero)),
    "window + 1": ("gemma2", fields(sliding_window=6)),
    "window + 1 in Mistral": ("mistral", fields(sliding_window=6)),
    "window - 1": ("qwen2", fields(sliding_window=4)),
    "no window": ("gemma2", fields(**NO_WINDOW)),
    "no window in Mistral": ("mistral", fields(**NO_WINDOW)),
    "pattern shifted": ("gemma2", fields(layer_types=(FULL, SLIDING))),
    "pattern of 3 shifted": ("gemma3", fields(layer_types=(SLIDING, FULL, SLIDING))),
    "first layers slide": ("qwen2", fields(layer_types=(SLIDING, SLIDING, FULL, FULL))),
    "theta 1e4 everywhere": ("gemma3", fields(max_wavelength=1e4)),
    "theta 1e6 everywhere": ("gemma3", fields(local_max_wavelength=1e6)),
    "theta of a Llama": ("smollm2", fields(max_wavelength=1e4)),
    "no linear scaling": ("gemma3", fields(rope_scaling_type="none")),
    "no llama3 scaling": ("llama3", fields(rope_scaling_type="none")),
    "linear for llama3": ("llama3", fields(rope_scaling_type="linear")),
    "unrotated layer rotated": ("smollm3", fields(rope_percentage=1.0)),
    "other layers unrotated": ("smollm3", fields(rope_percentage=(0.0, 1.0, 1.0, 1.0))),
    "no bias of queries": ("qwen2", arrays("q_einsum/b", zero)),
    "no bias of keys": ("qwen2", bias(0)),
    "no bias of values": ("qwen2", bias(1)),
    "tied for untied": ("llama3", tie),
    "no layer_scalar": ("dense4", arrays("skip_scale", jnp.ones_like)),
    "1 + w for w in Gemma 4": ("dense4", arrays("norm/scale", lambda leaf: leaf + 1)),
    "H^-1/2 in Gemma 4": ("dense4", fields(attention_scale=None)),
    "no final cap in Gemma 4": ("e4", fields(final_softcap=None)),
    "no norm of values": ("e4", fields(use_value_norm=False)),
    "no norm of values that are keys": ("unified4", fields(use_value_norm=False)),
    "no QK-norm's scale in full layers": (
        "dense4",
        arrays("full_attention/attn/key_norm/scale", zero),
    ),
    "RoPE in full layers": ("dense4", fields(rope_percentage=1.0)),
    "denominator p H": ("dense4", fields(rope_type="partial")),
    "p-RoPE in sliding layers": ("e4", fields(local_rope_percentage=None)),
    "theta 1e4 in full layers": ("dense4", fields(max_wavelength=1e4)),
    "theta 1e6 in sliding layers": ("e4", fields(local_max_wavelength=None)),
    "window + 1 in Gemma 4": ("e4", fields(sliding_window=6)),
    "no sqrt(D) in Gemma 4": ("e4", fields(scale_embedding=False)),
    "no sqrt(Q)": ("e4", arrays("per_layer_embeddings", lambda leaf: leaf * 8**-0.5)),
    "no token part of layer inputs": ("e4", arrays("per_layer_embeddings", zero)),
    "no context part of layer inputs": (
        "e4",
        arrays("per_layer_projection_norm/scale", lambda leaf: 0 * leaf - 1),
    ),
    "no norm's scale of layer inputs": ("e4", arrays("post_per_layer_input_norm/scale", zero)),
    "no 1 / sqrt(2) of layer inputs": ("e4", keep_sum_of_layer_inputs),
    "norms of attention and MLP exchanged": ("llama3", exchange_norms),
}


@pytest.mark.parametrize(("name", "change"), MUTANTS.values(), ids=MUTANTS)
def test_each_single_change_is_seen(imported, name, change):
    oracle = imported(name)
    config = copy.deepcopy(oracle.config)
    params = change(config, oracle.params)
    assert reference_distance(config, params, oracle.logits) > 50 * BOUND


def test_a_scaling_is_of_full_layers_alone(imported):
    """Other ports scaled Gemma 3's sliding layers too."""
    oracle = imported("gemma3")
    config = oracle.config
    freqs = np.stack(layer_frequencies(config))
    windows = np.array([window is not None for window in layer_windows(config)])
    scaled = np.where(windows[:, None], freqs / config.rope_scaling_factor, freqs)
    assert reference_distance(config, oracle.params, oracle.logits, scaled) > 50 * BOUND


# --- Changes of keys and values in Gemma 4 --------------------------------------------------------


def take_normed_keys(query, key, value, positions, freqs):
    is_full = len(freqs) == 32
    return rotate_qkv(query, key, key if is_full else value, positions, freqs)


def take_rotated_keys(query, key, value, positions, freqs):
    is_full = len(freqs) == 32
    query, key, value = rotate_qkv(query, key, value, positions, freqs)
    return query, key, key if is_full else value


def rotate_prefix(query, key, value, positions, freqs):
    """Pairs lanes within those that rotate, as partial rotary does."""
    rotated = np.count_nonzero(freqs)

    def rotate_first(x):
        first, others = np.split(x, [2 * rotated], axis=-1)
        return np.concatenate([rotate(first, positions, freqs[:rotated]), others], axis=-1)

    return rotate_first(query), rotate_first(key), value


@pytest.mark.parametrize("change", [take_normed_keys, take_rotated_keys, rotate_prefix])
def test_each_change_of_a_full_layer_is_seen(imported, change):
    oracle = imported("dense4")
    distance = reference_distance(oracle.config, oracle.params, oracle.logits, rotate_fn=change)
    assert distance > 50 * BOUND


def test_layers_share_the_last_keys_and_values_of_their_kind(imported):
    """Not the first, as a port did."""
    oracle = imported("e4")
    seen = []

    def rotate_fn(query, key, value, positions, freqs):
        seen.append((key, value))
        if len(seen) in (4, 5):  # sliding, as the first
            key, value = seen[0]
        return rotate_qkv(query, key, value, positions, freqs)

    distance = reference_distance(oracle.config, oracle.params, oracle.logits, rotate_fn=rotate_fn)
    assert distance > 50 * BOUND

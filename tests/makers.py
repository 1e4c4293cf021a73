"""Things that tests of several files work with: models, runs, text, sweeps, decoders, commands."""

import functools
import hashlib
import html.parser
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import CONFIG, ROOT, devices_flags
from ml_collections import FrozenConfigDict

from prope import attention, model
from prope.config import default_config, set_layer_percentages
from prope.encodings import layer_frequencies
from prope.errors import UsageError
from prope.rope import frequencies, rotation_table
from prope.runtime.validate import validate
from prope.stack import parameters
from prope.stack.layers import layers
from prope.step import prepare
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run, read_config, write_config

# --- Arrays and models ------------------------------------------------------------------------


def draw_inputs(d, positions, seed=0, heads=2, dtype=np.float32):
    """What a rotation takes: [B, T, `heads`, d] for positions [B, T]."""
    rng = np.random.default_rng(seed)
    # Uniform, so that both lanes of a pair are often near the maximum: errors are largest there.
    inputs = rng.uniform(-1, 1, (*np.shape(positions), heads, d))
    return inputs.astype(dtype)


def draw_attention(T, S, N, K, H=16, B=2, dtype=np.float32):
    """Queries [B, T, N, H], keys and values [B, S, K, H]."""
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H)]
    return [jnp.asarray(2 * rng.standard_normal(shape), dtype) for shape in shapes]


def draw_segments(B, T, seed=2):
    """Segments as of a packed window: some of one token, one row of one, zeros at an early end."""
    rng = np.random.default_rng(seed)
    segments = 1 + np.sort(rng.integers(0, 5, (B, T)), axis=1)
    segments[0, -T // 5 :] = 0
    segments[0, 0] = 9
    if B > 1:
        segments[-1] = 1
    return jnp.asarray(segments, jnp.int32)


def scaled_attention(query, key, value, **options):
    """Attention of queries that are not scaled yet, as the formula has them."""
    scaled = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    return attention.attention(scaled.astype(query.dtype), key, value, **options)


def attention_with_gradients(query, key, value, cotangent, segments=None, **options):
    """Attention's output and the cotangents of query, key and value, compiled anew."""

    def run(query, key, value, cotangent, segments):
        attend = functools.partial(
            scaled_attention,
            segment_ids=segments,
            **options,
        )
        output, vjp = jax.vjp(attend, query, key, value)
        return output, *vjp(cotangent)

    return jax.jit(run)(query, key, value, cotangent, segments)


def check_attention(
    query, key, value, segments=None, rtol=5e-6, window=None, cap=None, sinks=0, **options
):
    """Compares attention and its gradients with the formula, relative to each largest value."""
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.standard_normal(query.shape), query.dtype)
    seen = oracles.causal_mask(query.shape[1], segments, window, sinks)
    expected = oracles.attention(query, key, value, seen, cotangent, cap)
    options |= {"window": window, "cap": cap, "sinks": sinks}
    actual = attention_with_gradients(query, key, value, cotangent, segments, **options)
    names = ("output", "query", "key", "value")
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        assert ours.dtype == query.dtype, name
        np.testing.assert_allclose(
            oracles.float64(ours),
            theirs,
            rtol=0,
            atol=rtol * np.abs(theirs).max(),
            err_msg=name,
        )


# The switches of config.model that any layers may have, at values that are not the defaults.
SWITCHES = {
    "activation": "silu",
    "norm_epsilon": 0.1,
    "scale_embedding": False,
    "tied": False,
    "post_norms": True,
    "attention_scale": 0.7,
    "attention_softcap": 0.5,
    "final_softcap": 4.0,
    "qkv_bias": True,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
    "per_layer_input_dim": 6,
}
# Those by which layers differ in shape.
SWITCHES_OF_KINDS = {
    "global_head_dim": 24,
    "num_global_kv_heads": 1,
    "global_key_is_value": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}


# Layers of one shape that differ in all else, in a pattern that ends in part.
KINDS_OF_LAYERS = {
    "num_layers": 5,
    "num_kv_heads": 2,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 6,
    "local_max_wavelength": 100.0,
    "local_rope_percentage": 0.75,
}
ALL_SWITCHES = KINDS_OF_LAYERS | SWITCHES | SWITCHES_OF_KINDS | {"num_layers": 6}


# Gemma 4 at a small size: layers of two shapes, of which full ones have no values of their own; and
# with inputs of their own, and the last ones with the keys and values of others.
_GEMMA4 = {
    "num_layers": 6,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 5,
    "global_head_dim": 32,
    "rope_percentage": 0.25,
    "max_wavelength": 1000.0,
    "local_rope_percentage": 1.0,
    "local_max_wavelength": 100.0,
    "post_norms": True,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
    "attention_scale": 0.1,
    "final_softcap": 3.0,
    "norm_epsilon": 0.1,  # so that the last norm does not undo the last skip scale
}
DENSE4 = _GEMMA4 | {"num_kv_heads": 2, "num_global_kv_heads": 1, "global_key_is_value": True}
E4 = _GEMMA4 | {
    "num_kv_heads": 1,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "per_layer_input_dim": 8,
}


def small(**fields):
    """config.model of a model that compiles in a moment."""
    config = default_config().model
    sizes = {
        "num_layers": 3,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_dim": 48,
        "vocab_size": 50,
        "rope_percentage": 0.75,
    }
    config.update(sizes | fields)
    return config


def initial_params(config, seed=0):
    """The initial parameters of a config.model."""
    init = functools.partial(model.init, config)
    return jax.jit(init)(jax.random.key(seed))


def draw_model(config, B=2, T=12, seed=0):
    """Parameters with no zeros in them, so that every one matters; tokens; positions."""
    rng = np.random.default_rng(seed)
    leaves = {}
    for path, row in parameters.parameters(config).items():
        sizes = parameters.axis_sizes(config, path)
        fan_in = math.prod(sizes[axis] for axis in row.fan_in)
        scale = 0.1 + row.is_matrix / math.sqrt(fan_in)
        shape = [sizes[axis] for axis in parameters.stacked_axes(path)]
        leaf = scale * rng.standard_normal(shape)
        if path.endswith("skip_scale"):
            leaf = rng.uniform(0.3, 0.9, shape)
        leaves[path] = jnp.asarray(leaf, jnp.float32)
    params = parameters.nest(leaves)
    tokens = rng.integers(0, config.vocab_size, (B, T))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return params, jnp.asarray(tokens, jnp.int32), positions


def forward(config, params, tokens, positions, segments=None):
    """The logits [B, T, V] of prope's decoder."""
    return _forward(FrozenConfigDict(config), params, tokens, positions, segments)


@functools.partial(jax.jit, static_argnums=0)
def _forward(config, params, tokens, positions, segments):
    hidden = model.hidden_states(config, params, tokens, positions, segments)
    return model.logits(config, params, hidden)


def assert_trees_close(actual, expected, rtol, where=""):
    """Compares the arrays of two trees, relative to the largest of each array."""

    def compare(path, theirs, ours):
        bound = rtol * np.abs(theirs).max()
        name = f"{where} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, expected, actual)


def leaves_by_path(tree) -> dict:
    """The leaves of nested dictionaries by their paths, as in the table of parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def same(ours, theirs) -> bool:
    """Whether two trees of arrays are equal, bit for bit."""

    def equal(a, b):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()

    return jax.tree.all(jax.tree.map(equal, ours, theirs))


# --- Runs -------------------------------------------------------------------------------------

SIZES = {
    "num_layers": 2,
    "embed_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "hidden_dim": 96,
    "vocab_size": 300,
}


def make_run(workdir, p=0.75, tokenizer="byte", **sizes):
    """Saves a run with random weights, in which every number matters: (config, params)."""
    config = default_config()
    config.model.update(SIZES | sizes)
    if isinstance(p, tuple):
        set_layer_percentages(config, p)
    else:
        config.model.rope_percentage = float(p)
    config.data.update({"seq_len": 128, "tokenizer": str(tokenizer)})
    validate(config)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        # As large as initial weights: float32 angles blur sharper scores.
        scale = 1 / np.sqrt(config.model.embed_dim)
        if path[-1].key == "scale":
            scale = 0.3
        if path[-1].key == "input_embedding" or path[0].key == "head":
            scale = 1.5 / np.sqrt(leaf.shape[-1])
        if path[-1].key == "skip_scale":
            return jnp.asarray(rng.uniform(0.3, 0.9, leaf.shape), jnp.float32)
        return jnp.asarray(scale * rng.standard_normal(leaf.shape), jnp.float32)

    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    save_run(workdir, config, params, step=7)
    return config, params


def save_run(workdir, config, params, step=1):
    """Saves parameters as training saves them."""
    workdir.mkdir(parents=True)
    write_config(workdir, config)
    save_checkpoints(workdir, config, {step: params})


def save_checkpoints(workdir, config, params_by_step):
    """Adds checkpoints to a run, without an optimizer's state."""
    opt_state = {"count": np.zeros(())}
    with Checkpoints(workdir) as checkpoints:
        for step, params in params_by_step.items():
            params = jax.tree.map(jnp.asarray, params)
            identity = {"config": config.to_dict(), "init_hash": hash_arrays(params)}
            checkpoints.save(step, params, opt_state, identity, {"examples": 0})


# The data of a run for `restore_training`, which reads none.
NO_WINDOWS = types.SimpleNamespace(store=types.SimpleNamespace(fingerprint="0" * 16))


def restore_training(config, folder, init_from=None):
    """Restores what training starts from: step, hashes of parameters and optimizer state."""
    from prope.train import start_or_resume
    from prope.workdir.source import open_source

    prepared = prepare(config, jax.devices())
    with Checkpoints(folder) as checkpoints:
        source = open_source(config, folder, init_from)
        state = start_or_resume(config, checkpoints, source, prepared, NO_WINDOWS)
    return state.step, hash_arrays(state.params), hash_arrays(state.opt_state)


# --- Checkpoints in the format of Hugging Face ----------------------------------------------

# What google/gemma-2b and google/gemma-7b say, in the form in which they were released.
RELEASED = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2B = RELEASED | {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}
GEMMA_7B = RELEASED | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}
# google/gemma-2-2b, google/gemma-3-1b-pt and google/gemma-3-12b-it, a model of text and images.
GEMMA_2_2B = {name: value for name, value in RELEASED.items() if name != "rope_scaling"} | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
}
GEMMA_3_1B = {name: value for name, value in RELEASED.items() if name != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "transformers_version": "4.50.0.dev0",
    "vocab_size": 262144,
}
# The text part of gemma-4-E2B, and of gemma-4-31B.
GEMMA_4_E2B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
GEMMA_4_31B = GEMMA_4_E2B | {
    "attention_k_eq_v": True,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def stored(directory) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in Hugging Face's format."""
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def save(directory, tensors) -> None:
    """Writes the tensors of a checkpoint in Hugging Face's format."""
    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def edit(directory, **fields) -> None:
    """Changes fields of config.json; None removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


# --- Text and stores --------------------------------------------------------------------------

WIKIPEDIA = "wikipedia/20230601.en"


def articles(number=200):
    """Texts of very different lengths, some with more bytes than characters."""
    rng = np.random.default_rng(0)
    words = ["rope", "turn", "Zürich", "数学", "pair", "\n", "frequency", "é"]
    return [" ".join(rng.choice(words, rng.integers(1, 200))) + f" {i}" for i in range(number)]


def write_tfds(root, file_format, texts, name=WIKIPEDIA):
    """A dataset in TFDS's layout, two shards, written without TensorFlow."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    from prope.workdir.metrics import _tensorboard

    _tensorboard()  # without torch, which tensorboardX would import
    from tensorboardX.record_writer import RecordWriter

    folder = root / name / "1.0.0"
    folder.mkdir(parents=True)
    names = ("title", "text")
    features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})
    features.save_config(str(folder))
    cut = len(texts) // 3
    shards = [texts[:cut], texts[cut:]]
    size = 0
    for number, shard in enumerate(shards):
        path = str(folder / f"wikipedia-train.{file_format}-{number:05d}-of-00002")
        if file_format == "array_record":
            writer = ArrayRecordWriter(path, "group_size:1")
        else:
            writer = RecordWriter(path)
        for text in shard:
            example = features.encode_example({"title": "t", "text": text})
            record = features.serialize_example(example)
            writer.write(record)
            size += len(record)
        writer.close()
    split = {
        "name": "train",
        "numBytes": str(size),
        "shardLengths": [str(len(shard)) for shard in shards],
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    info = {
        "name": "wikipedia",
        "configName": "20230601.en",
        "version": "1.0.0",
        "fileFormat": file_format,
        "moduleName": "tensorflow_datasets.text.wikipedia",
        "splits": [split],
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def write_text(root, texts):
    """Three files whose order by path is that of the texts, written in another order."""
    (root / "deeper").mkdir(parents=True)
    (root / "deeper" / "c.txt").write_text(texts[-1])
    lines = [json.dumps({"text": text, "id": 1}) + "\n\n" for text in texts[1:-1]]
    (root / "b.jsonl").write_text("".join(lines))
    (root / "a.txt").write_text(texts[0])
    return root


def data_config(tmp_path, dataset="python_docs", data_dir="", **fields):
    """config.data of a dataset, with a cache below tmp_path."""
    config = default_config().data
    places = {"data_dir": str(data_dir), "cache_dir": str(tmp_path / "cache")}
    config.update({"dataset": dataset} | places | fields)
    return config


def read_tokens(store, split):
    """All tokens of a split of a store."""
    return np.asarray(store.tokens(split).read().result())


def documents_of(store, split):
    """The documents of a split, from its tokens alone."""
    from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer

    tokens = read_tokens(store, split)
    assert tokens[0] == GEMMA_IDS.bos and tokens[-1] == GEMMA_IDS.eos
    documents = np.split(tokens, np.flatnonzero(tokens == GEMMA_IDS.bos))[1:]
    assert all(document[-1] == GEMMA_IDS.eos for document in documents)
    return [ByteTokenizer().decode(document) for document in documents]


def data_refused(config, says, vocab_size=260):
    """Asserts that a store of a config.data is refused in one line, which a pattern finds."""
    from prope.data.store.build import open_store

    with pytest.raises(UsageError, match=says) as caught:
        open_store(config, vocab_size)
    assert "\n" not in str(caught.value)


def hash_files(folder):
    """A hash of the names and the bytes of all files below a folder."""
    folder = pathlib.Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) >= 5  # two arrays, each with a shard, and the index
    listing = [(str(path.relative_to(folder)), path.read_bytes()) for path in files]
    return hashlib.sha256(repr(listing).encode()).hexdigest()


# --- Evaluation -------------------------------------------------------------------------------


def letter_documents() -> list[str]:
    """Documents from one letter to ten windows of 64 tokens long, each with letters of its own."""
    rng = np.random.default_rng(1)
    documents = []
    for size in rng.geometric(1 / 150, 120).tolist():
        letters = rng.choice(rng.integers(97, 123, 5), size)
        documents.append("".join(map(chr, letters)))
    return documents


def edit_run(workdir, base, **fields) -> None:
    """Gives a run the text of `base`, other values of its config, and two checkpoints."""
    config = read_config(workdir)
    data = {
        "dataset": "files",
        "data_dir": str(base / "text"),
        "cache_dir": str(base / "cache"),
        "seq_len": 64,
        "validation_fraction": 0.3,
    }
    config.data.update(data)
    config.update_from_flattened_dict(fields)
    params = open_run(workdir).params()
    shutil.rmtree(workdir / "checkpoints")
    write_config(workdir, config)
    others = jax.tree.map(lambda leaf: leaf * 0.9, params)
    save_checkpoints(workdir, config, {7: params, 9: others})


def evaluate_run(workdir, **flags) -> list[dict]:
    """The records of prope.evaluate with these flags; with intervene, those of changed models."""
    from prope.inference.evaluation import LossOptions, evaluations

    records = list(evaluations(LossOptions(**{"workdir": str(workdir)} | flags)))
    if flags.get("intervene"):
        return [record for record in records if record.get("encoding")]
    return records


# --- Analysis ---------------------------------------------------------------------------------


def analysis_options(**flags) -> types.SimpleNamespace:
    """The flags of prope.analyze."""
    from prope.analysis.analysis import _OPTIONS

    options = dict.fromkeys(("step", "output", *_OPTIONS))
    options |= {"sequences": 3, "channels": 2, "paper": False}
    return types.SimpleNamespace(**options | flags)


def layer_params(params, number):
    """The parameters of one layer."""
    return jax.tree.map(lambda leaf: leaf[number], params["layers"])


def run_layers(config, params, tokens, positions):
    """Yields (residual stream after, captured) of every layer."""
    x = model.embed(config, model.embedding(params), tokens)
    all_layers = layers(config)
    run_layer = jax.jit(functools.partial(model.run_layer, config), static_argnames="layer")
    for number, freqs in enumerate(layer_frequencies(config)):
        table = rotation_table(positions, freqs)
        x, captured = run_layer(layer_params(params, number), x, table, layer=all_layers[number])
        yield x, captured


def make_walk(workdir, B=3, T=24):
    """A walk through the layers of a run of `make_run`, on random tokens [B, T]."""
    from prope.analysis.walk import Walk

    config = read_config(workdir)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (B, T))
    return Walk(config.model, open_run(workdir, 7), tokens.astype(np.int32))


def group_values(tree, place=(), groups=None) -> dict[str, list]:
    """The values of a JSON object, those of a list together, by their names."""
    groups = {} if groups is None else groups
    if isinstance(tree, list):
        for value in tree:
            group_values(value, place, groups)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            group_values(value, (*place, name), groups)
    elif place[-1] not in ("seconds", "device", "workdir", "output"):
        groups.setdefault(".".join(place), []).append(tree)
    return groups


def compare_analyses(one, two) -> float:
    """The largest difference of two analyses, at most 1e-5, relative to the largest of its array.

    Differences of losses and their standard errors are relative to the loss.
    """
    ones = group_values(one)
    twos = group_values(two)
    assert ones.keys() == twos.keys()
    largest = 0.0
    for name, values in ones.items():
        others = twos[name]
        if not any(isinstance(value, float) for value in values):
            assert values == others, name
            continue
        assert [value is None for value in values] == [value is None for value in others], name
        ours = np.array([value for value in values if value is not None])
        theirs = np.array([value for value in others if value is not None])
        scale = np.abs(ours).max()
        if name.endswith(("difference", "stderr")):
            scale = one["loss"]["loss"]
        apart = np.abs(ours - theirs).max() / max(scale, 1e-30)
        assert np.isfinite(ours).all() and apart <= 1e-5, f"{name}: {apart}"
        largest = max(largest, apart)
    return largest


def assert_channel(record, expected, **bounds):
    """Compares a channel of an analysis with `oracles.channel`."""
    for name in ("to_first", "to_others"):
        np.testing.assert_allclose(record[name], expected[name], **bounds)
    for name in ("first_alignment", "others_alignment", "breaking_rotation"):
        assert record[name] == pytest.approx(expected[name], abs=1e-4), name
    if record["breaking_rotation"] is None or record["frequency"] == 0:
        assert record["breaking_distance"] is None
    else:
        distance = record["breaking_rotation"] / record["frequency"]
        assert record["breaking_distance"] == pytest.approx(distance, rel=1e-4)


# Decoders whose heads are known.
KNOWN_HEAD_DIM = 32
Q = 4 + ord("q")  # the token that the semantic head looks for


def text_with_q() -> str:
    """256 letters; every twentieth is a q."""
    letters = np.random.default_rng(0).choice(list("abcdefgh "), 256)
    letters[5::20] = "q"
    return "".join(letters)


def head_weights(distance, epsilon, length, freqs, embed_dim):
    """Weights (W_q, W_k) [D, H] of a head with weight over 1 - epsilon at a distance: Theorem 5.3.

    Both read lane 0 of the residual stream, which is 1. The key is 1 in every rotated pair, and the
    query turns back by `distance`. A token m off the target is behind by the sum of 1 - cos(g_k m).
    With the least of these as `gap`, all others weigh at most epsilon times as much as the target.
    """
    rotated = freqs != 0
    key = np.concatenate([rotated, np.zeros_like(rotated)]).astype(float)
    off = np.arange(1, max(distance, length - 1 - distance) + 1)
    gap = (1 - np.cos(np.outer(off, freqs))).sum(-1).min()
    temperature = math.sqrt(key.size) * math.log((length - 1) / epsilon) / gap
    turned_back = oracles.rotate(key[None, None, None], [[-distance]], freqs)
    weights = np.zeros((2, embed_dim, key.size))
    weights[0, 0] = temperature * turned_back.ravel()
    weights[1, 0] = key
    return weights


def make_known_heads(workdir, p):
    """A layer with a diagonal, a previous-token, a semantic and an even head.

    Weights are for p = 0.75. The residual stream has a constant in lane 0, and in lane 1 whether
    the token is a q.
    """
    config = default_config()
    D = 64
    H = KNOWN_HEAD_DIM
    sizes = {
        "num_layers": 1,
        "embed_dim": D,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": H,
        "hidden_dim": 8,
        "vocab_size": 260,
        "rope_percentage": float(p),
    }
    config.model.update(sizes)
    config.data.seq_len = 256
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((260, D))
    rows[:, :2] = 0
    rows *= (np.sqrt(D - 2) / np.linalg.norm(rows, axis=1))[:, None]
    rows[:, :2] = 1, -1
    rows[Q, 1] = 1
    # So that the norm before attention leaves them as they are.
    np.testing.assert_allclose((rows**2).mean(axis=1), 1)
    freqs = frequencies(H, rope_percentage=0.75)
    query = np.zeros((4, D, H))
    key = np.zeros((4, D, H))
    query[0], key[0] = head_weights(0, 0.1, 257, freqs, D)
    query[1], key[1] = head_weights(1, 0.1, 257, freqs, D)
    still = np.flatnonzero(freqs == 0)[:2]
    query[2, 0, still] = 10.0  # 2 * 100 / sqrt(32) for a q, as much less for another
    key[2, 1, still] = 10.0
    value = rng.standard_normal((4, D, H)) / 8
    out = rng.standard_normal((4, H, D)) / 8
    write_decoder(workdir, config, rows, query[None], key[None], value[None], out[None])


def write_decoder(workdir, config, rows, query, key, value, out=0):
    """Saves a run with embedding `rows` [V, D] and attention's weights [L, ..]; MLPs are 0."""
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    params["embedder"]["input_embedding"][:] = rows / np.sqrt(rows.shape[1])
    weights = params["layers"]["attn"]
    weights["q_einsum"]["w"][:] = query
    weights["kv_einsum"]["w"][:, 0] = key
    weights["kv_einsum"]["w"][:, 1] = value
    weights["attn_vec_einsum"]["w"][:] = out
    save_run(workdir, config, params)


def head_kinds(analysis) -> list[str]:
    """What an analysis calls each head."""
    return [head["kind"] for head in analysis["heads"]]


# --- Pictures, pages and sweeps ---------------------------------------------------------------


def draw_picture(picture):
    """The Matplotlib figure of a picture."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=picture.size, layout="constrained")
    picture.draw(figure)
    return figure


def map_values(picture) -> dict[str, np.ndarray]:
    """Values of a picture's maps, by title."""
    maps = [axes for axes in draw_picture(picture).axes if axes.images]
    return {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in maps}


class Page(html.parser.HTMLParser):
    """What a browser would see: tables as rows of texts, tags with attributes, all text."""

    def __init__(self, path):
        super().__init__()
        self.tables = []
        self.tags = []
        self.text = ""
        self.open = []
        self.feed(path.read_text())
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if any(tag in self.open for tag in ("th", "td")):
            self.tables[-1][-1][-1] += data


def write_lines(path, records):
    """Writes a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path):
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


SWEEP_PERCENTAGES = (0.0, 0.25, 1.0)
SWEEP_SEEDS = (0, 1)
SWEEP_STEPS = (1, 5, 10)  # that are logged


def write_sweep(directory):
    """A sweep of random numbers: three values of p and two seeds, everything evaluated."""
    rng = np.random.default_rng(0)
    entries = []
    for p in SWEEP_PERCENTAGES:
        for seed in SWEEP_SEEDS:
            workdir = directory / f"rope_percentage={p:g},seed={seed}"
            _write_sweep_run(workdir, p, seed, rng)
            values = {"rope_percentage": p, "seed": seed}
            entries.append({"name": workdir.name, "values": values})
    started = {
        "devices": 8,
        "device_kind": "TPU v5p",
        "commit": "0123456789abcdef+changes",
        "jax": "0.10.2",
    }
    first = directory / entries[0]["name"]
    write_lines(first / "starts.jsonl", [{"step": 0}, started])
    entries.append({"name": "to come", "values": {}})
    (directory / "sweep.json").write_text(json.dumps({"runs": entries}))


def _write_sweep_run(workdir, p, seed, rng):
    workdir.mkdir()
    config = default_config()
    fields = {"model.rope_percentage": p, "seed": seed, "num_steps": 10}
    config.update_from_flattened_dict(fields)
    config.model.update({"num_layers": 1, "embed_dim": 8, "num_heads": 1, "hidden_dim": 8})
    config.data.tokenizer = "<b>.model"
    write_config(workdir, config)
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    with Checkpoints(workdir) as checkpoints:
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        identity = {"config": config.to_dict(), "init_hash": f"{seed:016x}"}
        checkpoints.save(10, state, state, identity, {"examples": 0})
    metrics = []
    for step in SWEEP_STEPS:
        record = {"step": step, "loss": rng.uniform(2, 3), "batch_hash": f"{seed}{step}"}
        # A step of 16 x 256 tokens a second.
        metrics.append(record | {"tokens_per_second": 4096.0})
    write_lines(workdir / "metrics.jsonl", metrics)
    evaluation = {"step": 10, "dataset": "python_docs"}
    shorter = evaluation | {"seq_len": 1024, "max_windows": 3, "loss": 9.0}
    records = [evaluation | _draw_evaluation(seq_len, rng) for seq_len in (256, 512)]
    earlier = records[-1] | {"step": 5}
    rescaled = {"seq_len": 2048, "encoding": "yarn", "factor": 8.0, "loss": 8.0}
    records = [earlier, shorter, *records, records[-1] | rescaled]
    write_lines(workdir / "eval.jsonl", records)


def _draw_evaluation(seq_len, rng):
    loss = rng.uniform(1, 2)
    by_position = []
    for start in (0, 64):
        record = {"from": start, "to": start + 64, "loss": rng.uniform(1, 2), "tokens": 9}
        by_position.append(record)
    by_distance = []
    for task in ("copy", "recall"):
        for start in (8, 16):
            record = {"task": task, "from": start, "to": 2 * start}
            by_distance.append(record | {"accuracy": rng.uniform(), "answers": 5})
    return {
        "split": "validation",
        "seq_len": seq_len,
        "max_windows": None,
        "loss": loss,
        "loss_stderr": 0.01,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2),
        "unigram_bits_per_byte": 2 * loss / math.log(2),
        "by_position": by_position,
        "accuracy_by_distance": by_distance,
    }


# --- Planted errors ---------------------------------------------------------------------------

# (the text in prope/rope.py, what stands there instead).
ROPE_MUTANTS = {
    "wrong denominator": (
        "max_wavelength ** (-2.0 * pairs / head_dim)",
        "max_wavelength ** "
        "(-2.0 * pairs / max(2 * num_rotated_pairs(head_dim, rope_percentage), 1))",
    ),
    "prefix pairing": (
        "    table = rotation_table(positions, freqs)\n    return rotate(inputs, table)\n",
        "    n = num_rotated_pairs(head_dim, rope_percentage)\n"
        "    table = rotation_table(positions, freqs[:n])\n"
        "    rotated = rotate(inputs[..., : 2 * n], table)\n"
        "    return jnp.concatenate([rotated, inputs[..., 2 * n :]], axis=-1)\n",
    ),
    "interleaved pairing": (
        ".reshape(*inputs.shape[:-1], 2, pairs)\n",
        ".reshape(*inputs.shape[:-1], pairs, 2).swapaxes(-1, -2)\n",
    ),
    "slow end kept": (
        "rotated = pairs < num_rotated_pairs(head_dim, rope_percentage)",
        "rotated = pairs >= head_dim // 2 - num_rotated_pairs(head_dim, rope_percentage)",
    ),
    "bfloat16 positions": (
        "narrow = positions.astype(",
        "narrow = positions.astype(jnp.bfloat16).astype(",
    ),
    "bfloat16 frequencies": (
        "return np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)",
        "exact = np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)\n"
        "    return exact.astype(jnp.bfloat16).astype(np.float64)",
    ),
    "p applied twice": (
        "return int(rope_percentage * head_dim // 2)",
        "return int(rope_percentage * rope_percentage * head_dim // 2)",
    ),
    "p = 0 read as unset": (
        "return int(rope_percentage * head_dim // 2)",
        "return int((rope_percentage or 1.0) * head_dim // 2)",
    ),
    "a sign of the rotation": ("second * cos + first * sin", "second * cos - first * sin"),
    "float32 angles": (
        "    phase = _phase(positions, high, low)\n",
        "    radians = (high + low / 2.0**32) / 2.0**32 * 2 * math.pi\n"
        "    angle = positions.astype(jnp.float32) * radians.astype(np.float32)\n"
        "    return jnp.cos(angle), jnp.sin(angle)\n",
    ),
    "low word of the fraction dropped": ("upper * low_upper + ", ""),
    "quarter turns rounded down": ("(phase + np.uint32(1 << 29)) >> 30", "phase >> 30"),
    "sine of negative positions": ("!= (positions < 0)", "!= (positions > positions)"),
}


def load_source(name: str, file: pathlib.Path, source: str) -> types.ModuleType:
    """A module from its text."""
    module = types.ModuleType(name)
    module.__file__ = str(file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


# --- Several devices, several processes -------------------------------------------------------

# data, fsdp, tensor
MESHES = [
    (1, 8, 1),
    (2, 4, 1),
    (4, 2, 1),
    (8, 1, 1),
    (2, 2, 2),
    (1, 4, 2),
    (1, 1, 8),
]


def on_eight_devices(module: str, function: str) -> None:
    """Runs a function of these tests in a process with eight devices."""
    quick = str(jax.config.read("jax_disable_most_optimizations")).lower()  # as here
    env = os.environ | {"XLA_FLAGS": devices_flags(8), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = quick
    command = [sys.executable, "-c", f"import {module}; {module}.{function}()"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


# Windows that no number of devices divides.
LOGGED = ("--config.log_every=1", "--config.eval.max_windows=7")
# A patch with which a lost process is noticed soon.
QUICK = "from prope.runtime import processes; processes.HEARTBEAT_SECONDS = 10"
# Wide enough that parameters are split over devices.
WIDE = (*LOGGED, "--config.model.embed_dim=256")


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def pod_environments(count: int = 2) -> list[dict[str, str]]:
    """The variables that join processes on this machine, for each process."""
    port = free_port()
    return [{"PROPE_PROCESSES": f"{i}/{count}@127.0.0.1:{port}"} for i in range(count)]


def start_patched(patch: str, workdir, *arguments, **environment) -> subprocess.Popen:
    """Starts prope.train on the tiny config, with lines of Python before."""
    script = f"""
import os, sys
from prope import train, command
from prope.errors import UsageError
{patch}
command.run(train.main, train.define_flags, train.leave)
"""
    command = [sys.executable, "-c", script, CONFIG, f"--workdir={workdir}", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def start_two_patched(patch: str, tmp_path, cache_dir) -> list:
    """Starts two processes of a run, each with the patch, which reads `process`: "0" or "1"."""
    patch = f"{QUICK}\nprocess = os.environ['PROPE_PROCESSES'][0]\n{patch}"
    cache = {"PROPE_CACHE": str(cache_dir)}
    return [start_patched(patch, tmp_path, *LOGGED, **cache, **pod) for pod in pod_environments()]


def line_of(outcome) -> str:
    """The one line of ours that a process ends with, among what JAX's runtime may say."""
    lines = outcome.stderr.splitlines()
    (line,) = [line for line in lines if line.startswith(("error:", "stopped:"))]
    assert "Traceback" not in outcome.stderr, outcome.stderr
    return line

"""DeepMind's gemma beside prope: the rotation of 4.0.1, and checkpoints of Gemma 1 to 4.

That of 3.3.0 is in rope/test_check_port.py.
"""

import dataclasses
import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support import write_gemma4
from support.commands import ROOT, refusal
from support.models import DENSE4, E4, draw_model, forward, leaves_by_path, same, small

from prope import parameters
from prope.golden.check import FLOAT32, check, load_cases
from prope.hf.importer import import_run
from prope.spec.run import Spec
from prope.workdir.run import open_run

VERSION = "4.0.1"


@pytest.fixture(scope="module", params=["stored", "installed"])
def gemma4_values(request, tmp_path_factory):
    """What gemma's `apply_rope` gives for queries of golden cases, by case."""
    file = ROOT / "tests/support/gemma4.json"
    if request.param == "installed":
        python = os.environ.get("PROPE_GEMMA4_PYTHON")
        if python is None:
            pytest.skip(f"PROPE_GEMMA4_PYTHON names no Python >= 3.12 with gemma {VERSION}")
        file = tmp_path_factory.mktemp("gemma") / "gemma4.json"
        command = [python, ROOT / "tests/support/write_gemma4.py", file]
        # Without the tests' XLA_FLAGS, which another jaxlib may not know.
        environment = {"JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, timeout=600)
    values = json.loads(file.read_text())
    assert values.pop("version") == VERSION
    return {name: np.array(rows) for name, rows in values.items()}


def test_gemma_4_s_rotation_is_golden_up_to_float32_angles(gemma4_values):
    cases = load_cases().keys() & gemma4_values.keys()
    values = {name: {"rotated_queries": gemma4_values[name]} for name in cases}
    verdict, result = check(values, float32_angles=True)
    assert result["equal"] and verdict.startswith("equal to p-RoPE in 4 of 19 cases")
    assert check(values)[1]["mistake"] == FLOAT32


# --- Checkpoints of Orbax -----------------------------------------------------------------------

_LAYERS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
GEMMA2 = _LAYERS | {"num_layers": 4, "post_norms": True, "final_softcap": 3.0}
# The model; what its files have: an axis order of gating_einsum, one array for q, k and v, more
# rows of the embedding, a name of QK-norms, scales of norms without 1 +; and layouts.
RELEASES = {
    "gemma 1 2B": ({}, {"added_rows": 128}),
    "gemma 1 7B": ({"num_kv_heads": 4}, {"added_rows": 128, "joins_qkv": True}),
    "gemma 2": (GEMMA2, {"added_rows": 128, "swaps_gating": True}),
    "gemma 3": (GEMMA2 | {"use_qk_norm": True}, {"swaps_gating": True, "norm_prefix": "_"}),
    "gemma 4": (DENSE4, {"swaps_gating": True, "adds_one": True}),
    "gemma 4 E": (E4, {"swaps_gating": True, "adds_one": True}),
}


def deepmind_arrays(
    model, params, added_rows=0, joins_qkv=False, swaps_gating=False, norm_prefix=""
):
    """Parameters by the names and in the layouts of DeepMind's files, nested."""
    ours = leaves_by_path(params)
    arrays = {}
    for path, leaf in ours.items():
        stack = parameters.stack_of(path)
        if stack is None:
            arrays[path] = leaf
            continue
        for layer in model.layers:
            if layer.stack == stack:
                name = parameters.row_path(path).removeprefix("layers/")
                arrays[f"layer_{layer.number}/{name}"] = leaf[layer.row]
    rows = ((0, added_rows), (0, 0))
    arrays["embedder/input_embedding"] = np.pad(arrays["embedder/input_embedding"], rows)
    for layer in model.layers:
        prefix = f"layer_{layer.number}"
        if swaps_gating:
            name = f"{prefix}/mlp/gating_einsum"
            arrays[name] = np.swapaxes(arrays[name], 1, 2)
        if joins_qkv:
            query = arrays.pop(f"{prefix}/attn/q_einsum/w")[None]
            key_value = arrays.pop(f"{prefix}/attn/kv_einsum/w")
            arrays[f"{prefix}/attn/qkv_einsum/w"] = np.concatenate([query, key_value])
        if layer.shares_kv:  # files hold them, and nothing reads them
            shape = (2, layer.num_kv_heads, model.embed_dim, layer.head_dim)
            arrays[f"{prefix}/attn/kv_einsum/w"] = np.ones(shape, np.float32)
            arrays[f"{prefix}/attn/key_norm/scale"] = np.ones(layer.head_dim, np.float32)
    return {
        name.replace("query_norm", f"{norm_prefix}query_norm").replace(
            "key_norm", f"{norm_prefix}key_norm"
        ): array
        for name, array in arrays.items()
    }


def flat(arrays, prefix="transformer/"):
    tree = {}
    for name, array in arrays.items():
        name = f"{name}/w" if "/mlp/" in name else name
        module, leaf = name.rsplit("/", 1)
        tree.setdefault(f"{prefix}{module}", {})[leaf] = array
    return tree


def policy(arrays):
    return flat(arrays, "rlx_networks/policy_network/transformer/")


def stacked(arrays, period):
    """Layers j, j + period, .. in one array."""
    groups = {}
    for name, array in arrays.items():
        module, _, rest = name.partition("/")
        if module.startswith("layer_"):
            number = int(module.removeprefix("layer_"))
            name = f"stacked_layers/attention_type_{number % period}/{rest}"
        groups.setdefault(name, []).append(array)
    return flat(
        {
            name: np.stack(group) if name.startswith("stacked") else group[0]
            for name, group in groups.items()
        }
    )


CHECKPOINTS = [
    ("gemma 1 2B", flat, np.float32),
    ("gemma 1 7B", policy, np.float32),
    ("gemma 2", parameters.nest, np.float32),
    ("gemma 3", lambda arrays: stacked(arrays, 2), np.float32),
    ("gemma 3", flat, jnp.bfloat16),
    ("gemma 4", lambda arrays: stacked(arrays, 3), np.float32),
    ("gemma 4", parameters.nest, np.float32),
    ("gemma 4 E", flat, np.float32),
]


def write_checkpoint(folder, release, layout=flat, dtype=np.float32, **changes):
    """Writes a checkpoint as Orbax does: (spec, parameters that prope should read)."""
    fields, form = RELEASES[release]
    spec = Spec(model=small(vocab_size=300, **fields)).replace({"data.seq_len": 128})
    params, *_ = draw_model(spec.model)
    form = dict(form)
    if form.pop("adds_one", False):
        written = plus_one(params, 1)
        params = plus_one(written, -1)
    else:
        written = params
    written, params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), (written, params))
    arrays = deepmind_arrays(spec.model, written, **form) | changes
    arrays = {name: array for name, array in arrays.items() if array is not None}
    save_tree(folder, layout(arrays))
    return spec, params


def save_tree(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, jax.tree.map(jnp.asarray, tree))


def plus_one(params, one):
    def shift(path, leaf):
        return leaf + np.float32(one) if path[-1].key == "scale" else leaf

    return jax.tree_util.tree_map_with_path(shift, params)


@pytest.mark.parametrize(("release", "layout", "dtype"), CHECKPOINTS)
def test_a_checkpoint_of_each_release_and_layout_is_read_exactly(release, layout, dtype, tmp_path):
    spec, params = write_checkpoint(tmp_path / "orbax", release, layout, dtype)
    result = import_run(tmp_path / "orbax", tmp_path / "run", spec=spec)
    assert same(jax.tree.map(np.float32, params), open_run(tmp_path / "run").params())
    assert result["parameters"] == parameters.count(spec.model)


def test_parts_for_images_and_a_trainer_s_folder_are_passed_over(tmp_path):
    more = {
        "vision_encoder/w": np.ones(3, np.float32),
        "embedder/mm_input_projection/w": np.ones(3, np.float32),
    }

    def of_trainer(arrays):
        return {
            "params": parameters.nest(arrays),
            "step": np.ones((), np.int32),
            "opt_state": [{"m": 1.0}],
        }

    folder = tmp_path / "orbax" / "default"
    spec, params = write_checkpoint(folder, "gemma 3", of_trainer, **more)
    import_run(tmp_path / "orbax", tmp_path / "run", spec=spec)
    assert same(params, open_run(tmp_path / "run").params())


Q_EINSUM = "layer_1/attn/q_einsum/w"


def refused(tmp_path, spec, *names):
    """The import ends in one line with these names, and leaves nothing."""
    line = refusal(lambda: import_run(tmp_path / "orbax", tmp_path / "run", spec=spec))
    assert all(name in line for name in names), line
    assert not (tmp_path / "run").exists()


# (Arrays that are changed in the checkpoint, fields in the model, what the line names).
@pytest.mark.parametrize(
    ("changes", "fields", "names"),
    [
        ({Q_EINSUM: None}, {}, ("missing", Q_EINSUM, "--config")),
        ({"layer_1/attn/new": np.ones(3)}, {}, ("unknown", "layer_1/attn/new")),
        ({}, {"vocab_size": 299}, ("input_embedding", "(428, 32)", "(299, 32)")),
        ({}, {"tied": False}, ("missing", "head/w")),
        ({Q_EINSUM: np.ones((4, 32, 16), np.int32)}, {}, (Q_EINSUM, "int32")),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(changes, fields, names, tmp_path):
    spec, _ = write_checkpoint(tmp_path / "orbax", "gemma 1 2B", **changes)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, **fields))
    refused(tmp_path, spec, *names)


def test_the_config_is_asked_for_where_it_is_needed(tmp_path):
    spec, _ = write_checkpoint(tmp_path / "orbax", "gemma 1 2B")
    refused(tmp_path, None, "--config=FILE")
    (tmp_path / "orbax/config.json").write_text("{}")
    refused(tmp_path, spec, "--config", "config.json")


@pytest.mark.parametrize("file", ["_METADATA", "manifest.ocdbt"])
def test_a_damaged_checkpoint_is_refused_in_one_line(file, tmp_path):
    spec, _ = write_checkpoint(tmp_path / "orbax", "gemma 1 2B")
    (tmp_path / "orbax" / file).write_bytes(b"damaged")
    refused(tmp_path, spec, str(tmp_path / "orbax"))


# What the small models of write_gemma4.py are in prope.
GEMMA4 = {"attention_scale": 1.0, "norm_epsilon": 1e-6, "vocab_size": write_gemma4.VOCAB_SIZE}
SMALL_GEMMA4 = {"dense": DENSE4 | GEMMA4, "shared": E4 | GEMMA4}


@pytest.mark.parametrize("kind", SMALL_GEMMA4)
def test_logits_of_gemma_4_are_gemma_s(kind, tmp_path):
    """Its parameters, drawn by their names there, are imported: what it computes is kept."""
    spec = Spec(model=small(**SMALL_GEMMA4[kind]))
    params, *_ = draw_model(spec.model)
    arrays = deepmind_arrays(spec.model, params, swaps_gating=True)
    drawn = {name: write_gemma4.draw(name, array.shape) for name, array in arrays.items()}
    tree = parameters.nest(drawn)
    save_tree(tmp_path / "orbax", tree)
    import_run(tmp_path / "orbax", tmp_path / "run", spec=spec)
    tokens = jnp.asarray(write_gemma4.TOKENS, jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    logits = forward(spec.model, open_run(tmp_path / "run").params(), tokens, positions)
    expected = np.array(json.loads((ROOT / "tests/support/gemma4.json").read_text())[kind])
    np.testing.assert_allclose(write_gemma4.pick(logits), expected, rtol=0, atol=3e-5)
    assert expected.std() > 1

"""Computes by DeepMind's gemma what prope is compared with; needs Python >= 3.12, gemma and jax.

    python tests/support/write_gemma4.py tests/support/gemma4.json

The rotation of inputs in prope/golden/proportional.json, and, if gemma's dependencies are
installed, some logits of Gemma 4 at a small size: "dense" as 12B and 31B, "shared" as E2B.
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import zlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[2] / "prope/golden/proportional.json"
FILE = "gemma/gm/math/_positional_embeddings.py"  # without the package's large dependencies
CASES = (
    "proportional_d512_theta1000000_p0.25",
    "proportional_d64_p0.3",
    "proportional_d16_p0",
    "proportional_d16_p1",
)
MODELS = ("dense", "shared")
VOCAB_SIZE = 300
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, (1, 12))


def draw(name, shape):
    """Draws a parameter by its name in gemma, "layer_0/attn/q_einsum/w"."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if name.endswith("skip_scale"):
        values = 0.6 + 0.1 * values
    elif name.endswith(("query_norm/scale", "key_norm/scale")):
        values = 0.5 + 0.1 * values  # scores are not divided by sqrt(H)
    elif name.endswith("scale"):
        values = 1 + 0.3 * values
    else:
        values = 0.3 * values
    return values.astype(np.float32)


def pick(logits):
    """Chooses which logits [1, T, V] are kept."""
    return np.asarray(logits, np.float64)[0, 3::4, ::10]


def rotate():
    """Returns gemma's rotation of the golden queries, by case."""
    import jax.numpy as jnp

    (file,) = (file for file in importlib.metadata.files("gemma") if str(file) == FILE)
    spec = importlib.util.spec_from_file_location("positional_embeddings", file.locate())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    golden = json.loads(GOLDEN.read_text())
    rotated = {}
    for name in CASES:
        case = golden[name]
        rows = module.apply_rope(
            jnp.array(case["queries"], jnp.float32)[None, :, None],
            jnp.array(case["positions"], jnp.int32)[None],
            base_frequency=case["max_wavelength"],
            rope_proportion=case["rope_percentage"],
        )
        rotated[name] = rows[0, :, 0]
    return rotated


def compute_logits(kind):
    """Returns some logits of a model of MODELS, by gemma."""
    import jax
    import jax.numpy as jnp
    from gemma.gm.nn.gemma4 import _config, _modules, _transformer

    types = _modules.AttentionType
    fields = {
        "dense": {"num_kv_heads": 2, "num_global_kv_heads": 1, "k_eq_v_global": True},
        "shared": {
            "num_kv_heads": 1,
            "per_layer_input_dim": 8,
            "override_kv_shared_ffw_hidden": 96,
            "kv_cache_sharing_config": _config.KVCacheSharingConfig(0.5, True, True),
        },
    }
    config = _config.TransformerConfig(
        num_embed=VOCAB_SIZE,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        global_key_size=32,
        attention_types=(types.LOCAL_SLIDING, types.LOCAL_SLIDING, types.GLOBAL) * 2,
        sliding_window_size=5,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        final_logit_softcap=3.0,
        local_rope_proportion=1.0,
        global_rope_proportion=0.25,
        local_base_frequency=100,
        global_base_frequency=1000,
        **fields[kind],
    )
    model = _transformer.Transformer(config=config, dtype=jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def value(path, leaf):
        return draw("/".join(key.key for key in path), leaf.shape)

    params = jax.tree_util.tree_map_with_path(value, shapes)
    return pick(model.apply({"params": params}, TOKENS).logits)


def main(output):
    values = rotate()
    if importlib.util.find_spec("kauldron"):
        values |= {kind: compute_logits(kind) for kind in MODELS}
    lines = [f'"version": "{importlib.metadata.version("gemma")}"']
    for name, array in values.items():
        rows = [[float(f"{x:.9g}") for x in row] for row in array.tolist()]
        lines.append(f'"{name}": {json.dumps(rows, separators=(",", ":"))}')
    body = ",\n".join(lines)
    pathlib.Path(output).write_text(f"{{\n{body}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Runs with random weights, and their evaluation."""

import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np

from prope import parameters
from prope.config import default_config, resolve, set_layer_percentages
from prope.spec.run import Spec
from prope.step import prepare
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run, read_config, write_config

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
    """Saves a run with random weights, in which every number matters: (spec, params)."""
    config = default_config()
    config.model.update(SIZES | sizes)
    if isinstance(p, tuple):
        set_layer_percentages(config, p)
    else:
        config.model.rope_percentage = float(p)
    config.data.update({"seq_len": 128, "tokenizer": str(tokenizer)})
    spec = resolve(config)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        # As large as initial weights: float32 angles blur sharper scores.
        scale = 1 / np.sqrt(spec.model.embed_dim)
        if path[-1].key == "scale":
            scale = 0.3
        if path[-1].key == "input_embedding" or path[0].key == "head":
            scale = 1.5 / np.sqrt(leaf.shape[-1])
        if path[-1].key == "skip_scale":
            return jnp.asarray(rng.uniform(0.3, 0.9, leaf.shape), jnp.float32)
        return jnp.asarray(scale * rng.standard_normal(leaf.shape), jnp.float32)

    shapes = parameters.shapes(spec.model)
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    save_run(workdir, spec, params, step=7)
    return spec, params


def as_spec(config):
    """The spec of a config; a spec is its own."""
    return config if isinstance(config, Spec) else resolve(config)


def save_run(workdir, config, params, step=1):
    """Saves parameters as training saves them."""
    workdir.mkdir(parents=True)
    write_config(workdir, as_spec(config))
    save_checkpoints(workdir, config, {step: params})


def save_checkpoints(workdir, config, params_by_step):
    """Adds checkpoints to a run, without an optimizer's state."""
    opt_state = {"count": np.zeros(())}
    with Checkpoints(workdir) as checkpoints:
        for step, params in params_by_step.items():
            params = jax.tree.map(jnp.asarray, params)
            identity = {"config": as_spec(config).to_dict(), "init_hash": hash_arrays(params)}
            checkpoints.save(step, params, opt_state, identity, {"examples": 0})


# The data of a run for `restore_training`, which reads none.
NO_WINDOWS = types.SimpleNamespace(store=types.SimpleNamespace(fingerprint="0" * 16))


def restore_training(config, folder, init_from=None):
    """Restores what training starts from: step, hashes of parameters and optimizer state."""
    from prope.train import start_or_resume
    from prope.workdir.source import open_source

    spec = as_spec(config)
    prepared = prepare(spec, jax.devices())
    with Checkpoints(folder) as checkpoints:
        source = open_source(spec, folder, init_from)
        state = start_or_resume(spec, checkpoints, source, prepared, NO_WINDOWS)
    return state.step, hash_arrays(state.params), hash_arrays(state.opt_state)


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
    data = {
        "data.dataset": "files",
        "data.data_dir": str(base / "text"),
        "data.cache_dir": str(base / "cache"),
        "data.seq_len": 64,
        "data.validation_fraction": 0.3,
    }
    spec = read_config(workdir).replace(data | fields)
    params = open_run(workdir).params()
    shutil.rmtree(workdir / "checkpoints")
    write_config(workdir, spec)
    others = jax.tree.map(lambda leaf: leaf * 0.9, params)
    save_checkpoints(workdir, spec, {7: params, 9: others})


def evaluate_run(workdir, **flags) -> list[dict]:
    """The records of prope.evaluate with these flags; with intervene, those of changed models."""
    from prope.inference.losses import LossOptions, evaluations

    records = list(evaluations(LossOptions(**{"workdir": str(workdir)} | flags)))
    if flags.get("intervene"):
        return [record for record in records if record.get("encoding")]
    return records

"""What a config may say; and every config of the project, at full size as shapes and at a small one as a step."""

import importlib.util
import json
import math

import jax
import numpy as np
import pytest
from conftest import ROOT

from prope import model, sharding
from prope.config import (
    default_config,
    differences,
    flat,
    from_dict,
    set_layer_percentages,
    sized,
    validate,
    validate_devices,
)
from prope.errors import UsageError
from prope.optimizer import make_optimizer
from prope.step import batch_shapes, init_state, make_train_step

FILES = sorted((ROOT / "configs").glob("*.py"))


def load(path, *arguments):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*arguments)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_is_whole_and_builds_at_full_size(path):
    config = load(path)
    assert flat(config).keys() == flat(default_config()).keys()
    validate(config)
    params = jax.eval_shape(lambda: init_state(config, make_optimizer(config))[0])
    if path.stem.startswith("gemma"):
        size = {"gemma_2b_wiki": 2_506_434_560, "gemma_300m_wiki": 298_175_232}[path.stem]
        assert model.num_parameters(params) == size
    page = importlib.util.spec_from_file_location(path.stem, path).loader.get_source(path.stem)
    for heading in ("What ", "Command ", "Hardware ", "Hours ", "Expected "):
        assert f"\n{heading}" in page, f"the page of {path.name} lacks {heading}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_makes_a_step_at_a_small_size(path):
    config = load(path, "tiny")
    validate(config)
    config.model.vocab_size = 300
    mesh = sharding.make_mesh()
    optimizer = make_optimizer(config)
    params, opt_state = init_state(config, optimizer)
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(1, 2, like.shape).astype(like.dtype) for name, like in batch_shapes(config, mesh).items()
    }
    batch["tokens"], batch["targets"] = rng.integers(0, 300, (2, *batch["tokens"].shape)).astype(np.int32)
    _, _, values = jax.jit(make_train_step(config, optimizer))(params, opt_state, batch)
    assert abs(float(values["loss"]) - math.log(300)) < 1.5, "about a uniform guess"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model.rope_percentage", 1.5, r"model.rope_percentage=1.5: must be a fraction in \[0, 1\]"),
        ("model.rope_percentage", -0.1, r"model.rope_percentage=-0.1: must be a fraction in \[0, 1\]"),
        ("model.rope_percentage", math.nan, r"model.rope_percentage=nan: must be a fraction in \[0, 1\]"),
        ("model.head_dim", 63, "model.head_dim=63: must be even"),
        ("model.num_kv_heads", 3, "model.num_heads=4: must be a multiple of model.num_kv_heads=3"),
        ("model.max_wavelength", 1.0, "model.max_wavelength=1.0: must be greater than 1"),
        ("model.dtype", "float8", "model.dtype=float8: must be one of float32, bfloat16"),
        ("model.attention", "splash", "model.attention=splash: must be one of auto, xla"),
        ("accumulation", 3, "batch_size=16: must be a multiple of accumulation=3"),
        ("num_steps", 0, "num_steps=0: must be at least 1"),
        ("optimizer.warmup_steps", 1000, "optimizer.warmup_steps=1000: must be less than num_steps=1000"),
        ("optimizer.final_learning_rate", 1.0, r"must be in \[0, optimizer.learning_rate=0.001\]"),
        ("optimizer.learning_rate", math.inf, "optimizer.learning_rate=inf: must be a finite number"),
        ("data.validation_fraction", 0.0, "data.validation_fraction=0.0: must be between 0 and 1"),
        ("data.data_dir", "/data", "data.data_dir=/data: has no effect with data.dataset=python_docs"),
        ("data.dataset", "wikipedia/20230601.en", "data.dataset=wikipedia/20230601.en needs the folder"),
        ("eval.max_windows", 0, "eval.max_windows=0: must be at least 1, or None for all"),
    ],
)
def test_a_value_out_of_range_is_named(field, value, says):
    config = default_config()
    validate(config)
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UsageError, match=says):
        validate(config)


@pytest.mark.parametrize("p", [0, 0.0, 1, 1.0])
def test_both_ends_of_p_are_values(p):
    config = default_config()
    config.model.rope_percentage = p
    validate(config)
    assert from_dict(config.to_dict()).model.rope_percentage == p


def test_p_may_be_a_number_per_layer():
    config = default_config()
    set_layer_percentages(config, (1.0, 1.0, 1.0, 0.25))
    validate(config)
    again = from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.model.rope_percentage == (1.0, 1.0, 1.0, 0.25) and differences(config, again) == []
    assert differences(config, default_config()) == ["model.rope_percentage: 1.0, not (1.0, 1.0, 1.0, 0.25)"]
    validate(sized(again, "tiny"))
    for wrong, says in (
        ((1.0, 0.5), r"rope_percentage=\(1.0, 0.5\): must be one number, or one for each of model.num_layers=4"),
        ((1.0, 0.5, math.nan, 0), r"rope_percentage=\(1.0, 0.5, nan, 0.0\): must be a fraction in \[0, 1\]"),
    ):
        set_layer_percentages(config, wrong)
        with pytest.raises(UsageError, match=says):
            validate(config)


def test_devices_must_divide_the_batch():
    config = default_config()
    validate_devices(config, 8)
    with pytest.raises(UsageError, match="batch_size=16: must be a multiple of 32 .*32 devices"):
        validate_devices(config, 32)
    config.mesh.data = 3
    with pytest.raises(UsageError, match="mesh.data=3: must divide the number of devices, 8"):
        validate_devices(config, 8)


def test_a_saved_config_comes_back_and_a_field_from_elsewhere_is_refused():
    config = default_config()
    config.model.rope_percentage = 0.25
    assert from_dict(config.to_dict()) == config
    values = config.to_dict()
    values["model"]["rope_percentag"] = 1.0
    with pytest.raises(UsageError, match=r"model.rope_percentag \(did you mean model.rope_percentage\?\)"):
        from_dict(values)


def test_what_makes_another_run():
    config, other = default_config(), default_config()
    other.log_every, other.data.data_dir, other.model.remat, other.mesh.data = 7, "elsewhere", "full", 2
    assert differences(config, other) == []
    other.model.rope_percentage, other.seed = 0.5, 3
    assert sorted(differences(config, other)) == ["model.rope_percentage: 0.5, not 1.0", "seed: 3, not 0"]

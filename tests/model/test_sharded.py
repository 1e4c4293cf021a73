"""The training step on meshes of eight devices, in a process that pretends to have them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import AbstractMesh
from support.commands import refusal
from support.compiled import array_shapes
from support.models import DENSE4, E4, SWITCHES, assert_trees_close, documents_by_xla, same
from support.processes import on_eight_devices

from prope import attention, loss, model, parameters, sharding
from prope import step as step_module
from prope.kernels import documents
from prope.optimizer import make_optimizer
from prope.sharding import check_devices
from prope.spec.run import MeshSpec, Spec
from prope.step import compile_step, init_state, make_train_step
from prope.workdir.hashes import hash_arrays


def small(**fields):
    """A spec that compiles in a moment; fields are named as model__num_layers."""
    sizes = {
        "batch_size": 16,
        "data.seq_len": 12,
        "model.num_layers": 2,
        "model.embed_dim": 16,
        "model.num_heads": 4,
        "model.head_dim": 8,
        "model.hidden_dim": 24,
        "model.vocab_size": 48,
        "model.rope_percentage": 0.75,
        "model.attention": "xla",
    }
    return Spec().replace(sizes | {name.replace("__", "."): x for name, x in fields.items()})


def keep_gradient():
    """An optimizer that changes nothing and whose state is the gradient."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)

    def update(gradient, state, params):
        return zeros(gradient), gradient

    return optax.GradientTransformation(zeros, update)


def draw(spec):
    """A batch of packed windows in NumPy, of which a part has weight zero, not equal in rows."""
    rng = np.random.default_rng(0)
    B = spec.batch_size
    T = spec.data.seq_len
    segments = 1 + np.sort(rng.integers(0, 3, (B, T)), axis=1)
    positions = np.tile(np.arange(T), (B, 1))
    if spec.data.mask_documents:
        is_first = np.diff(segments, axis=1, prepend=0) != 0
        positions = positions - np.maximum.accumulate(positions * is_first, axis=1)
    tokens, targets = rng.integers(0, spec.model.vocab_size, (2, B, T))
    counted = rng.integers(T // 3, T, (B, 1))
    return {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "positions": positions.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "weights": (np.arange(T) < counted).astype(np.float32),
    }


def draw_params(spec):
    """Parameters in NumPy without zeros, so that every one matters."""
    rng = np.random.default_rng(0)

    def draw_leaf(path, leaf):
        if path[-1].key == "skip_scale":
            return rng.uniform(0.3, 0.9, leaf.shape).astype(np.float32)
        scale = max(leaf.shape[-2:]) ** -0.5
        return scale * rng.standard_normal(leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw_leaf, parameters.shapes(spec.model))


def run(spec, shape):
    """The loss and the gradient of one training step on a mesh (data, fsdp, tensor)."""
    C = spec.mesh.context
    replicas, fsdp, tensor = shape
    devices = jax.devices()[: C * math.prod(shape)]
    mesh = sharding.make_mesh(replicas, tensor, devices, C)
    assert mesh.devices.shape == (replicas, fsdp, C, tensor)
    shapes = jax.eval_shape(functools.partial(init_state, spec, keep_gradient()))
    state = sharding.with_shardings(shapes, mesh)
    params = draw_params(spec)
    zeros = jax.tree.map(np.zeros_like, params)
    placed = jax.device_put((params, zeros), sharding.state_shardings(shapes, mesh))
    batch = sharding.global_batch(mesh, draw(spec), spec.batch_size)
    step = compile_step(spec, keep_gradient(), mesh, state)
    _, gradient, metrics = step(*placed, batch)
    batch_hash = sharding.hash_batch(draw(spec))  # which no mesh shards
    assert metrics["batch_hash"] == batch_hash
    gradient = jax.tree.map(np.asarray, gradient)
    squares = [np.sum(leaf.astype(np.float64) ** 2) for leaf in jax.tree.leaves(gradient)]
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(squares)), rtol=1e-5)
    return float(metrics["loss"]), gradient


def test_a_step_takes_the_mean_over_the_tokens_that_count():
    """With masked documents and capped logits, meshes are compared with the same step alone."""
    fields = {"model__num_kv_heads": 2, "model__tied": False, "model__final_softcap": 1.0}
    spec = small(**fields, accumulation=4, data__mask_documents=True)
    params = draw_params(spec)
    batch = jax.tree.map(jnp.asarray, draw(spec))
    targets = batch["targets"][..., None]

    def mean_loss(params):
        arrays = [batch[name] for name in ("tokens", "positions", "segment_ids")]
        hidden = model.hidden_states(spec.model, params, *arrays)
        log_probabilities = jax.nn.log_softmax(model.logits(spec.model, params, hidden))
        losses = -jnp.take_along_axis(log_probabilities, targets, axis=-1)[..., 0]
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    expected_loss, expected = jax.jit(jax.value_and_grad(mean_loss))(params)
    step = jax.jit(make_train_step(spec, keep_gradient()))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updated, gradient, metrics = step(params, zeros, batch)
    np.testing.assert_allclose(metrics["loss"], expected_loss, rtol=1e-6)
    assert_trees_close(gradient, expected, 1e-5)
    assert same(updated, params)

    batch["weights"] = jnp.zeros_like(batch["weights"])
    _, gradient, metrics = step(params, gradient, batch)
    assert metrics["loss"] == metrics["grad_norm"] == 0  # and not nan
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_a_gpu_s_step_computes_the_same(monkeypatch):
    """There layers are cast once for all microbatches, and logits are read once."""
    fields = {"accumulation": 4, "model__dtype": "bfloat16", "model__qkv_bias": True}
    spec = small(**fields)
    params = draw_params(spec)
    batch = jax.tree.map(jnp.asarray, draw(spec))

    def run_step():
        step = jax.jit(make_train_step(spec, keep_gradient()))
        _, gradient, metrics = step(params, jax.tree.map(jnp.zeros_like, params), batch)
        return float(metrics["loss"]), gradient

    expected_loss, expected = run_step()
    for module in (loss, step_module):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    found_loss, gradient = run_step()
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert_trees_close(gradient, expected, 1e-3)


def test_the_hash_of_a_batch_is_of_every_number_in_its_place():
    batch = draw(small())
    hashes = {int(sharding.hash_batch(batch))}
    for name, values in batch.items():
        for row in (0, -1):
            changed = values.copy()
            changed[row, row] += 1
            hashes.add(int(sharding.hash_batch(batch | {name: changed})))
    assert len(hashes) == 1 + 2 * len(batch)


MQA = {"model__num_kv_heads": 1}
GQA = {"model__num_kv_heads": 2}
MHA = {"model__num_kv_heads": 4}
MASKED = {"data__mask_documents": True}
TWICE = {"accumulation": 2}
BY_HEAD = {"model__rope_percentage": 1.0, "model__rope_pairs": "0-1 1,3; 3 -"}
ODD = {"model__embed_dim": 12}
NARROW = {"model__dtype": "bfloat16"}
SPLASH = {"model__attention": "splash"}
CUDNN = {"model__attention": "cudnn"}
# As the kernel of TPUs wants it.
LONG = {"model__head_dim": 128, "data__seq_len": 128, "batch_size": 8}
LONGER = {"data__seq_len": 1024, "batch_size": 4}
WINDOWS = {
    "model__layer_types": ("sliding_attention", "full_attention"),
    "model__sliding_window": 100,
}
# More than a part of CONTEXT_4, 256, and less than a document, 341.
WIDE_WINDOWS = WINDOWS | {"model__sliding_window": 300}
SWITCHED = {f"model__{field}": value for field, value in SWITCHES.items()}
# The pattern ends in part.
SWITCHED |= {"model__num_layers": 3, "model__local_max_wavelength": 100.0}
CONTEXT_2 = {"mesh__context": 2}
CONTEXT_4 = {"mesh__context": 4}
# Gemma 4: layers of two shapes, values that are keys; inputs of layers, shared keys and values.
GEMMA_4 = {f"model__{field}": value for field, value in DENSE4.items()}
GEMMA_4_SMALL = {f"model__{field}": value for field, value in E4.items()}
# The model and its data, the mesh, remat, whether layers are scanned, and what changes nothing.
CASES = [
    (GQA | MASKED, (1, 8, 1), "full", False, TWICE),
    (MQA, (2, 4, 1), "minimal", True, TWICE),
    (MHA, (1, 4, 2), "save_qkv", True, {}),
    (MHA | MASKED, (1, 2, 4), "minimal", True, TWICE | CUDNN),
    (GQA | MASKED | ODD, (1, 8, 1), "none", True, {}),
    (GQA | MASKED | NARROW, (2, 2, 2), "none", True, {}),
    (MQA | LONG, (2, 2, 2), "save_qkv", True, SPLASH),
    (MHA | LONGER, (2, 1, 1), "save_qkv", False, CONTEXT_4),
    (MHA | LONGER | MASKED, (1, 2, 2), "minimal", True, CONTEXT_2),
    (GQA | LONGER | WINDOWS, (1, 2, 1), "minimal", True, CONTEXT_4),
    (MQA | LONG | LONGER | WIDE_WINDOWS | MASKED, (1, 2, 1), "full", True, CONTEXT_4 | SPLASH),
    (MHA | LONGER | WIDE_WINDOWS, (1, 2, 1), "none", True, CONTEXT_4 | CUDNN),
    (MQA | LONG | LONGER | WINDOWS, (1, 2, 1), "full", True, CONTEXT_2 | SPLASH),
    (MQA | LONGER | WINDOWS, (1, 2, 2), "minimal", True, TWICE | CONTEXT_2 | CUDNN),
    (GQA | LONGER | WINDOWS | SWITCHED, (1, 2, 2), "minimal", True, CONTEXT_2),
    (GQA | LONG | WINDOWS | SWITCHED, (2, 4, 1), "full", True, SPLASH),
]
CASES.sort(key=lambda case: str(case[0]))  # those of a model are beside one another: it runs once
# In the default tier: all axes but context, and parts of sequences with windows and documents.
FEW_CASES = [
    (GQA | MASKED | BY_HEAD, (2, 2, 2), "minimal", True, TWICE),
    (GQA | LONGER | WIDE_WINDOWS | MASKED | BY_HEAD, (2, 1, 1), "minimal", True, CONTEXT_4),
]


GEMMA_4_CASES = [
    (GEMMA_4 | MASKED, (1, 8, 1), "full", True, TWICE),
    (GEMMA_4_SMALL | MASKED, (2, 2, 2), "minimal", True, TWICE),
    (GEMMA_4_SMALL | LONGER, (1, 2, 2), "full", True, CONTEXT_2),
]


def run_kernels_on_cpu():
    """Has splash attention interpreted, and what cuDNN is called for computed by XLA."""
    make_splash_mqa = splash_attention_kernel.make_splash_mqa
    splash_attention_kernel.make_splash_mqa = functools.partial(make_splash_mqa, interpret=True)
    attend = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        return attend(*arrays, **options)

    jax.nn.dot_product_attention = by_xla
    attention.cudnn.dot_product_attention = documents_by_xla
    documents._FEWEST_TOKENS = 1


def check_few_steps():
    check_steps(FEW_CASES)


def check_gemma_4_steps():
    check_steps(GEMMA_4_CASES)


def check_first_steps():
    check_steps(CASES[:8])


def check_second_steps():
    check_steps(CASES[8:])


def check_steps(cases):
    """Compares the loss and gradient of every case with those of one device."""
    sharding._MIN_SHARD_SIZE = 0  # or nothing of a model this small would be sharded
    loss._MAX_LOGITS_WHOLE = 1  # several chunks of tokens
    loss._ROWS_PER_CHUNK = {"": 8}
    run_kernels_on_cpu()

    @functools.cache
    def run_alone(fields):
        return run(small(**dict(fields), model__scan_layers=False), (1, 1, 1))

    for case in cases:
        fields, shape, remat, scan, others = case
        expected_loss, expected = run_alone(tuple(fields.items()))
        spec = small(**fields, **others, model__remat=remat, model__scan_layers=scan)
        actual_loss, actual = run(spec, shape)
        rtol = 0.03 if "model__dtype" in fields else 1e-5
        np.testing.assert_allclose(actual_loss, expected_loss, rtol=rtol, err_msg=str(case))
        assert_trees_close(actual, expected, rtol, str(case))


def check_layer_embeddings():
    """Compiles a step: no device ever holds the table of the layers' inputs, or its gradient."""
    sharding._MIN_SHARD_SIZE = 0
    spec = small(model__per_layer_input_dim=16, model__vocab_size=1000)
    size = 1000 * spec.model.num_layers * 16
    optimizer = make_optimizer(spec)
    shapes = jax.eval_shape(functools.partial(init_state, spec, optimizer))
    for replicas, tensor in ((1, 1), (2, 2)):
        mesh = sharding.make_mesh(replicas, tensor)
        state = sharding.with_shardings(shapes, mesh)
        text = compile_step(spec, optimizer, mesh, state).as_text()
        sizes = {math.prod(dims) for _, dims in array_shapes(text)}
        assert size // (8 // replicas) in sizes and size not in sizes, (replicas, tensor)


def test_a_step_is_the_same_with_replicas_and_split_sequences():
    on_eight_devices(__file__, "check_few_steps")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    ["check_first_steps", "check_second_steps", "check_gemma_4_steps", "check_layer_embeddings"],
)
def test_a_step_is_the_same_on_every_mesh(function):
    on_eight_devices(__file__, function)


# --- Where parameters and the optimizer's moments live ----------------------------------------


def check_initial_state():
    """Initialises on several meshes: the same values, of which nothing is made whole first."""
    spec = small(
        model__embed_dim=256,
        model__num_kv_heads=1,
        model__head_dim=64,
        model__hidden_dim=512,
        model__vocab_size=512,
    )
    init = functools.partial(init_state, spec, make_optimizer(spec))
    expected, _ = jax.jit(init)()
    for shape in ((1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2)):
        replicas, _, tensor = shape
        mesh = sharding.make_mesh(replicas, tensor)
        shardings = sharding.state_shardings(jax.eval_shape(init), mesh)
        sharded_init = jax.jit(init, out_shardings=shardings)
        params, _ = sharded_init()
        assert hash_arrays(params) == hash_arrays(expected), shape
        text = sharded_init.lower().compile().as_text()
        largest = max(math.prod(dims) for _, dims in array_shapes(text))
        shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(params)]
        largest_shard = max(shard.size for shard in shards)
        assert largest_shard < max(leaf.size for leaf in jax.tree.leaves(params))
        assert largest == largest_shard, "something is made whole first"


@pytest.mark.slow
def test_parameters_are_born_split_and_the_same_on_every_mesh():
    on_eight_devices(__file__, "check_initial_state")


def check_gradient_sharding():
    """Compiles the gradient of a parameter that is all-gathered."""
    mesh = sharding.make_mesh(1, 2)
    stored = {"linear": jax.ShapeDtypeStruct((1024, 128), np.float32)}
    place = sharding.state_shardings(stored, mesh)["linear"]
    weights = jax.ShapeDtypeStruct((64, 128), np.float32)
    x = jax.ShapeDtypeStruct((8, 64), np.float32)

    def square(weights, x):
        return jnp.sum((x @ sharding.all_gather_param(weights, "FD")) ** 2)

    with sharding.use(mesh):
        places = (place, sharding.batch_sharding(mesh))
        gradient = jax.jit(jax.grad(square), in_shardings=places)
        compiled = gradient.lower(weights, x).compile()
    assert compiled.output_shardings.spec == place.spec, place.spec


def test_the_gradient_of_a_gathered_parameter_is_sharded_as_it_is():
    on_eight_devices(__file__, "check_gradient_sharding")


EMBEDDING = "embedder/input_embedding"
QUERY = "layers/attn/q_einsum/w"
KEY_VALUE = "layers/attn/kv_einsum/w"
LINEAR = "layers/mlp/linear"


@pytest.mark.parametrize(
    ("mesh_shape", "path", "shape", "expected"),
    [
        # Gemma 2B. 256 does not divide its vocabulary, which stays whole.
        ((1, 256, 1), EMBEDDING, (256_128, 2048), (256_128, 8)),
        ((4, 32, 2), EMBEDDING, (256_128, 2048), (128_064, 64)),
        ((4, 32, 2), LINEAR, (18, 16_384, 2048), (18, 8192, 64)),
        # D does not divide: the longest that does.
        ((1, 8, 1), EMBEDDING, (50_000, 10), (6250, 10)),
        ((1, 8, 1), QUERY, (2, 8, 10, 1024), (2, 8, 10, 128)),
        # Never over layers.
        ((1, 8, 1), KEY_VALUE, (8, 2, 3, 10, 1023), (8, 2, 3, 10, 1023)),
        ((1, 8, 1), EMBEDDING, (65_537, 7), (65_537, 7)),
        # Small, and just large enough.
        ((1, 8, 1), EMBEDDING, (128, 511), (128, 511)),
        ((1, 8, 1), EMBEDDING, (128, 512), (128, 64)),
        ((1, 8, 1), LINEAR, (2, 64, 512), (2, 64, 64)),
        ((1, 4, 2), LINEAR, (2, 512, 510), (2, 256, 510)),
        ((1, 4, 2), KEY_VALUE, (4, 2, 1, 511, 128), (4, 2, 1, 511, 32)),
        ((1, 8, 1), "something_else", (512, 512), (512, 512)),
    ],
)
def test_a_parameter_is_split_by_its_axes_and_shape(mesh_shape, path, shape, expected):
    """What a device holds; no device is needed."""
    replicas, fsdp, tensor = mesh_shape
    mesh = AbstractMesh((replicas, fsdp, 1, tensor), sharding.make_mesh().axis_names)
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    shardings = sharding.state_shardings(parameters.nest({path: leaf}), mesh)
    (place,) = jax.tree.leaves(shardings)
    assert place.shard_shape(shape) == expected


# --- The mesh ---------------------------------------------------------------------------------


class Device:
    """A stand-in for a TPU of several slices, or a GPU of several nodes."""

    device_kind = "stand-in"
    process_index = 0

    def __init__(self, number, slices, platform="cpu"):
        self.id = number
        self.slice_index = number % slices  # the first devices are on different slices
        self.platform = platform


def make_devices(count, slices, platform="cpu") -> list[Device]:
    """Devices that take turns in their slices or nodes."""
    return [Device(number, slices, platform) for number in range(count)]


def slices_of(devices) -> set[int]:
    """The slices of an array of devices."""
    return {device.slice_index for device in devices.ravel()}


@pytest.mark.parametrize(
    ("slices", "options", "shape"),
    [
        (1, {}, (1, 8, 1)),
        (1, {"tensor": 2}, (1, 4, 2)),
        (2, {}, (2, 4, 1)),
        (2, {"tensor": 2}, (2, 2, 2)),
        (2, {"replicas": 4}, (4, 2, 1)),
        (4, {}, (4, 2, 1)),
    ],
)
def test_only_replicas_are_on_different_slices(slices, options, shape):
    devices = make_devices(8, slices)
    assert sharding.num_slices(devices) == slices
    mesh = sharding.make_mesh(devices=devices, **options)
    assert mesh.axis_names == ("data", "fsdp", "context", "tensor")
    assert mesh.devices[:, :, 0].shape == shape
    assert {device.id for device in mesh.devices.ravel()} == set(range(8))
    by_replica = [slices_of(replica) for replica in mesh.devices]
    assert all(len(found) == 1 for found in by_replica)
    assert len(set.union(*by_replica)) == slices


@pytest.mark.parametrize(
    ("options", "shape", "nodes_of_replica"),
    [
        ({}, (4, 4, 1), 1),
        ({"data": 1}, (1, 16, 1), 4),
        ({"data": 2}, (2, 8, 1), 2),
        ({"data": 1, "tensor": 4}, (1, 4, 4), 4),
    ],
)
def test_fsdp_may_cross_nodes_of_gpus(options, shape, nodes_of_replica):
    devices = make_devices(16, 4, "gpu")
    spec = Spec(batch_size=16, mesh=MeshSpec(**options))
    check_devices(spec, devices)
    mesh = sharding.make_mesh(spec.mesh.data, spec.mesh.tensor, devices)
    assert mesh.devices[:, :, 0].shape == shape
    assert {device.id for device in mesh.devices.ravel()} == set(range(16))
    for replica in mesh.devices:
        assert len(slices_of(replica)) == nodes_of_replica
    tensor_groups = mesh.devices.reshape(-1, shape[2])
    for group in tensor_groups:
        assert len(slices_of(group)) == 1


def test_only_tpu_slices_are_a_border():
    spec = Spec(batch_size=16, mesh=MeshSpec(data=1))
    check_devices(spec, make_devices(16, 2, "gpu"))
    assert "mesh.data=1: " in refusal(check_devices, spec, make_devices(16, 2, "tpu"))

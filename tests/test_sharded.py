"""The training step on meshes of eight devices, which a process of its own pretends to have, and where arrays live."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import array_shapes
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import AbstractMesh
from makers import on_eight_devices

from prope import loss, model, sharding
from prope.config import default_config
from prope.errors import UsageError
from prope.optimizer import make_optimizer
from prope.runtime.validate import validate, validate_devices
from prope.step import compile_step, init_state, make_train_step
from prope.workdir.hashes import hash_arrays


def small(**fields):
    config = default_config()
    config.update_from_flattened_dict(
        {
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
        | {name.replace("__", "."): value for name, value in fields.items()}
    )
    validate(config)
    return config


def keep_gradient():
    """An optimizer that changes nothing and whose state is the gradient."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(
        zeros, lambda gradient, state, params: (zeros(gradient), gradient)
    )


def draw(config):
    """A batch of packed windows, as numpy arrays, of which a part has weight zero; rows do not weigh the same."""
    rng = np.random.default_rng(0)
    B, T = shape = config.batch_size, config.data.seq_len
    segments = 1 + np.sort(rng.integers(0, 3, shape), axis=1)
    starts = np.array([[np.argmax(row == segment) for segment in row] for row in segments])
    positions = np.arange(T) - (starts if config.data.mask_documents else 0)
    tokens, targets = rng.integers(0, config.model.vocab_size, (2, *shape))
    weights = np.arange(T) < rng.integers(T // 3, T, (B, 1))
    batch = {
        "tokens": tokens,
        "targets": targets,
        "positions": positions + np.zeros(shape),
        "segment_ids": segments,
    }
    return {name: array.astype(np.int32) for name, array in batch.items()} | {
        "weights": weights.astype(np.float32)
    }


@functools.cache
def weights(shapes):
    """Parameters without zeros, so that every one matters, from the tree of their shapes."""
    rng, (names, shapes) = np.random.default_rng(0), shapes
    leaves = [
        rng.standard_normal(shape).astype(np.float32) / max(shape[-2:]) ** 0.5 for shape in shapes
    ]
    return jax.tree.unflatten(names, leaves)


def params_of(config):
    """Parameters for `config`, as numpy arrays."""
    shapes = jax.eval_shape(functools.partial(init_state, config, keep_gradient()))[0]
    leaves, names = jax.tree.flatten(shapes)
    return weights((names, tuple(leaf.shape for leaf in leaves)))


def run(config, shape):
    """(loss, gradient) of one training step on a mesh."""
    C = config.mesh.context
    mesh = sharding.make_mesh(shape[0], shape[2], jax.devices()[: C * np.prod(shape)], C)
    assert mesh.devices.shape == (*shape[:2], C, shape[2])
    shapes = jax.eval_shape(functools.partial(init_state, config, keep_gradient()))
    state = sharding.with_shardings(shapes, mesh)
    params = params_of(config)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    placed = jax.device_put((params, jax.tree.map(np.zeros_like, params)), places)
    batch = sharding.global_batch(mesh, draw(config), config.batch_size)
    _, gradient, values = compile_step(config, keep_gradient(), mesh, state)(*placed, batch)
    assert values["batch_hash"] == sharding.hash_batch(draw(config)), "of another mesh"
    gradient = jax.tree.map(np.asarray, gradient)
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(values["grad_norm"], norm, rtol=1e-5)
    return float(values["loss"]), gradient


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_step_takes_the_mean_over_the_tokens_that_count(parts):
    config = small(model__num_kv_heads=2, accumulation=parts)
    params, batch = params_of(config), jax.tree.map(jnp.asarray, draw(config))

    def mean(params):
        hidden = model.hidden_states(config.model, params, batch["tokens"], batch["positions"])
        chances = jax.nn.log_softmax(model.logits(params, hidden))
        right = jnp.take_along_axis(chances, batch["targets"][..., None], axis=-1)[..., 0]
        return -(right * batch["weights"]).sum() / batch["weights"].sum()

    expected, pull = jax.jit(jax.value_and_grad(mean))(params)
    step = jax.jit(make_train_step(config, keep_gradient()))
    same, gradient, values = step(params, jax.tree.map(jnp.zeros_like, params), batch)
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(pull), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    for ours, theirs in zip(jax.tree.leaves(same), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    _, gradient, values = step(params, gradient, batch | {"weights": 0 * batch["weights"]})
    nothing = jax.tree.leaves((gradient, values["loss"], values["grad_norm"]))
    assert all(np.all(np.asarray(leaf) == 0) for leaf in nothing), "and not nan"


MQA, GQA, MHA = ({"model__num_kv_heads": heads} for heads in (1, 2, 4))
MASKED, TWICE, ODD = {"data__mask_documents": True}, {"accumulation": 2}, {"model__embed_dim": 12}
LONG = {
    "model__head_dim": 128,
    "data__seq_len": 128,
    "batch_size": 8,
}  # as the TPU's kernel wants it
NARROW = {"model__dtype": "bfloat16"}
SPLIT = {"data__seq_len": 1024, "batch_size": 4}
WINDOWS = {
    "model__layer_types": ("sliding_attention", "full_attention"),
    "model__sliding_window": 100,
}
# The model and its data, the mesh, remat, whether layers are scanned, and what else changes nothing.
CASES = [
    (MQA, (1, 8, 1), "none", True, {}),
    (GQA | MASKED, (1, 8, 1), "minimal", False, {}),
    (GQA | MASKED, (1, 8, 1), "full", False, TWICE),
    (MHA, (2, 4, 1), "none", False, {}),
    (MQA, (2, 4, 1), "minimal", True, TWICE),
    (GQA | MASKED, (4, 2, 1), "none", True, TWICE),
    (MHA, (4, 2, 1), "save_qkv", False, {}),
    (GQA | MASKED, (8, 1, 1), "minimal", True, {}),
    (GQA | MASKED, (2, 2, 2), "minimal", True, TWICE),
    (MHA, (1, 4, 2), "save_qkv", True, {}),
    (MHA, (1, 2, 4), "none", True, {}),
    (GQA | MASKED | ODD, (1, 8, 1), "none", True, {}),
    (GQA | MASKED | NARROW, (2, 2, 2), "none", True, {}),
    (MQA | LONG, (1, 8, 1), "minimal", True, {"model__attention": "splash"}),
    (GQA | LONG | MASKED, (2, 4, 1), "full", True, {"model__attention": "splash"}),
    (MQA | LONG, (2, 2, 2), "save_qkv", True, {"model__attention": "splash"}),
    (MQA | SPLIT, (1, 1, 1), "none", True, {"mesh__context": 2}),
    (MHA | SPLIT, (2, 1, 1), "save_qkv", False, {"mesh__context": 4}),
    (MHA | SPLIT | MASKED, (1, 2, 2), "minimal", True, {"mesh__context": 2}),
    (MQA | SPLIT | MASKED, (1, 2, 1), "full", True, TWICE | {"mesh__context": 2}),
    (GQA | SPLIT | WINDOWS, (1, 2, 1), "minimal", True, {"mesh__context": 4}),
    (
        MQA | LONG | SPLIT,
        (1, 2, 1),
        "minimal",
        True,
        {"mesh__context": 4, "model__attention": "splash"},
    ),
    (
        GQA | LONG | SPLIT | MASKED,
        (1, 2, 2),
        "full",
        True,
        {"mesh__context": 2, "model__attention": "splash"},
    ),
    (
        MQA | LONG | SPLIT | WINDOWS,
        (1, 2, 1),
        "full",
        True,
        {"mesh__context": 2, "model__attention": "splash"},
    ),
    (MHA | SPLIT, (1, 2, 1), "none", True, {"mesh__context": 4, "model__attention": "cudnn"}),
    (
        MQA | SPLIT | WINDOWS,
        (1, 2, 2),
        "minimal",
        True,
        TWICE | {"mesh__context": 2, "model__attention": "cudnn"},
    ),
]


def steps():
    """What `test_a_step_is_the_same_on_every_mesh` has eight devices do."""
    sharding._MIN_SHARD_SIZE = 0  # or nothing of a model this small would be split
    loss._MAX_LOGITS_WHOLE = 1  # several chunks of the vocabulary
    make = functools.partial(splash_attention_kernel.make_splash_mqa, interpret=True)
    splash_attention_kernel.make_splash_mqa = make
    plain = jax.nn.dot_product_attention  # without a GPU, what cuDNN is asked for
    jax.nn.dot_product_attention = lambda *arrays, implementation, **options: plain(
        *arrays, **options
    )
    alone = functools.cache(
        lambda fields: run(small(**dict(fields), model__scan_layers=False), (1, 1, 1))
    )
    for number, case in enumerate(CASES):
        fields, shape, remat, scan, others = case
        expected = alone(tuple(fields.items()))
        loss._MAX_TABLE_BYTES = 2**30 * (
            number % 2
        )  # every other time, the embedding is too large to be gathered
        actual = run(small(**fields, model__remat=remat, model__scan_layers=scan, **others), shape)
        tolerance = 0.03 if "model__dtype" in fields else 1e-5
        np.testing.assert_allclose(actual[0], expected[0], rtol=tolerance, err_msg=str(case))

        def compare(path, theirs, ours, case=case, tolerance=tolerance):
            where = f"{case} {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(
                ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max(), err_msg=where
            )

        jax.tree_util.tree_map_with_path(compare, expected[1], actual[1])


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh():
    on_eight_devices("test_sharded", "steps")


# --- Where parameters and the optimizer's moments live ----------------------------------------------------------


def starts():
    """What `test_parameters_are_born_split_and_the_same_on_every_mesh` has eight devices do."""
    config = small(
        model__embed_dim=256,
        model__num_kv_heads=1,
        model__head_dim=64,
        model__hidden_dim=512,
        model__vocab_size=512,
        optimizer__mu_dtype="bfloat16",
    )
    start = functools.partial(init_state, config, make_optimizer(config))
    expected = hash_arrays(jax.jit(start)()[0])
    for shape in ((1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2)):
        mesh = sharding.make_mesh(shape[0], shape[2])
        state = sharding.with_shardings(jax.eval_shape(start), mesh)
        make = jax.jit(start, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))
        params, opt_state = make()
        assert hash_arrays(params) == expected, shape
        arrays = jax.tree_util.tree_leaves_with_path(params)
        parameters = {jax.tree_util.keystr(path): leaf for path, leaf in arrays}
        arrays = jax.tree_util.tree_leaves_with_path(opt_state)
        of_optimizer = {jax.tree_util.keystr(path): leaf for path, leaf in arrays}
        for name, leaf in (parameters | of_optimizer).items():
            split = 1
            if leaf.size >= sharding._MIN_SHARD_SIZE:
                split = shape[1] * (
                    1 if "kv_einsum" in name else shape[2]
                )  # there is one key/value head
            each = {shard.data.size for shard in leaf.addressable_shards}
            assert each == {leaf.size // split}, f"{shape} {name}"
        large = [name for name, leaf in parameters.items() if leaf.size >= sharding._MIN_SHARD_SIZE]
        assert len(large) == 6, "all but the scales of the norms"
        for name, leaf in parameters.items():
            mu, nu = (
                next(v for k, v in of_optimizer.items() if k.endswith(m + name))
                for m in (".mu", ".nu")
            )
            assert (mu.dtype, nu.dtype) == ("bfloat16", "float32"), name
            assert mu.sharding == nu.sharding == leaf.sharding, f"{shape} {name}"
        shards = [
            shard.data.size for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
        ]
        text = make.lower().compile().as_text()
        assert max(math.prod(dims) for _, dims in array_shapes(text)) == max(shards), (
            "something is made whole first"
        )


@pytest.mark.slow
def test_parameters_are_born_split_and_the_same_on_every_mesh():
    on_eight_devices("test_sharded", "starts")


def gradients():
    """What `test_the_gradient_of_a_gathered_parameter_is_sharded_as_it_is` has eight devices do."""
    mesh = sharding.make_mesh(1, 2)
    weights, x = (
        jax.ShapeDtypeStruct((64, 128), np.float32),
        jax.ShapeDtypeStruct((8, 64), np.float32),
    )
    places = sharding.state_shardings(
        {"linear": jax.ShapeDtypeStruct((1024, 128), np.float32)}, mesh
    )["linear"]

    def loss(weights, x):
        return jnp.sum((x @ sharding.all_gather_param(weights, "FD")) ** 2)

    with sharding.use(mesh):
        gradient = jax.jit(jax.grad(loss), in_shardings=(places, sharding.batch_sharding(mesh)))
        assert gradient.lower(weights, x).compile().output_shardings.spec == places.spec, (
            places.spec
        )


def test_the_gradient_of_a_gathered_parameter_is_sharded_as_it_is():
    on_eight_devices("test_sharded", "gradients")


def on_each(mesh_shape, **leaves):
    """The shape that a device holds of each leaf, given as path__with__parts=shape; no device is needed."""
    tree = {}
    for name, shape in leaves.items():
        *folders, last = name.split("__")
        functools.reduce(lambda at, part: at.setdefault(part, {}), folders, tree)[last] = (
            jax.ShapeDtypeStruct(shape, np.float32)
        )
    places = sharding.state_shardings(
        tree, AbstractMesh((*mesh_shape[:2], 1, mesh_shape[2]), sharding._AXES)
    )
    return jax.tree.map(lambda leaf, place: place.shard_shape(leaf.shape), tree, places)


@pytest.mark.parametrize(
    ("mesh_shape", "embedding", "query", "key_value", "out", "gates", "linear"),
    [
        # 256 does not divide 256128: the vocabulary stays whole and D is split.
        (
            (1, 256, 1),
            (256_128, 8),
            (18, 8, 8, 256),
            (18, 2, 1, 8, 256),
            (18, 8, 256, 8),
            (18, 2, 8, 16_384),
            (18, 16_384, 8),
        ),
        (
            (4, 32, 2),
            (128_064, 64),
            (18, 4, 64, 256),
            (18, 2, 1, 64, 256),
            (18, 4, 256, 64),
            (18, 2, 64, 8192),
            (18, 8192, 64),
        ),
        (
            (256, 1, 1),
            (256_128, 2048),
            (18, 8, 2048, 256),
            (18, 2, 1, 2048, 256),
            (18, 8, 256, 2048),
            (18, 2, 2048, 16_384),
            (18, 16_384, 2048),
        ),
    ],
)
def test_gemma_2b_is_split_by_shape(mesh_shape, embedding, query, key_value, out, gates, linear):
    found = on_each(
        mesh_shape,
        embedder__input_embedding=(256_128, 2048),
        layers__attn__q_einsum__w=(18, 8, 2048, 256),
        layers__attn__kv_einsum__w=(18, 2, 1, 2048, 256),
        layers__attn__attn_vec_einsum__w=(18, 8, 256, 2048),
        layers__mlp__gating_einsum=(18, 2, 2048, 16_384),
        layers__mlp__linear=(18, 16_384, 2048),
        layers__pre_ffw_norm__scale=(18, 2048),
        final_norm__scale=(2048,),
    )
    attention = {
        "q_einsum": {"w": query},
        "kv_einsum": {"w": key_value},
        "attn_vec_einsum": {"w": out},
    }
    layers = {
        "attn": attention,
        "mlp": {"gating_einsum": gates, "linear": linear},
        "pre_ffw_norm": {"scale": (18, 2048)},
    }
    assert found == {
        "embedder": {"input_embedding": embedding},
        "layers": layers,
        "final_norm": {"scale": (2048,)},
    }


@pytest.mark.parametrize(
    ("mesh_shape", "path", "shape", "expected"),
    [
        (
            (1, 8, 1),
            "embedder__input_embedding",
            (50_000, 10),
            (6250, 10),
        ),  # D does not divide: the longest that does
        ((1, 8, 1), "layers__attn__q_einsum__w", (2, 8, 10, 1024), (2, 8, 10, 128)),
        (
            (1, 8, 1),
            "layers__attn__kv_einsum__w",
            (8, 2, 3, 10, 1023),
            (8, 2, 3, 10, 1023),
        ),  # never over layers
        ((1, 8, 1), "embedder__input_embedding", (65_537, 7), (65_537, 7)),
        ((1, 8, 1), "embedder__input_embedding", (128, 511), (128, 511)),  # small
        ((1, 8, 1), "embedder__input_embedding", (128, 512), (128, 64)),
        ((1, 8, 1), "layers__mlp__linear", (2, 64, 512), (2, 64, 64)),
        ((1, 4, 2), "layers__mlp__linear", (2, 512, 510), (2, 256, 510)),
        ((1, 4, 2), "layers__attn__kv_einsum__w", (4, 2, 1, 511, 128), (4, 2, 1, 511, 32)),
        ((1, 8, 1), "something_else", (512, 512), (512, 512)),
    ],
)
def test_what_does_not_divide_and_what_is_small(mesh_shape, path, shape, expected):
    assert jax.tree.leaves(
        on_each(mesh_shape, **{path: shape}), is_leaf=lambda x: isinstance(x, tuple)
    ) == [expected]


# --- The mesh ---------------------------------------------------------------------------------------------------


class Device:
    """As a TPU's of several slices, or a GPU's of several nodes: `id` and `slice_index`."""

    device_kind = "stand-in"
    process_index = 0

    def __init__(self, number, slices, platform="cpu"):
        self.id, self.slice_index = (
            number,
            number % slices,
        )  # the first devices are not of one slice
        self.platform = platform


@pytest.mark.parametrize(
    ("slices", "options", "shape"),
    [
        (1, {}, (1, 8, 1)),
        (1, {"replicas": 2}, (2, 4, 1)),
        (1, {"tensor": 2}, (1, 4, 2)),
        (2, {}, (2, 4, 1)),
        (2, {"tensor": 2}, (2, 2, 2)),
        (2, {"replicas": 4}, (4, 2, 1)),
        (4, {}, (4, 2, 1)),
    ],
)
def test_only_replicas_are_on_different_slices(slices, options, shape):
    devices = [Device(number, slices) for number in range(8)]
    assert sharding.num_slices(devices) == slices
    mesh = sharding.make_mesh(devices=devices, **options)
    assert mesh.axis_names == sharding._AXES and mesh.devices[:, :, 0].shape == shape
    assert {device.id for device in mesh.devices.ravel()} == set(range(8))
    of_replicas = [{device.slice_index for device in replica.ravel()} for replica in mesh.devices]
    assert all(len(found) == 1 for found in of_replicas)
    assert len(set.union(*of_replicas)) == slices


@pytest.mark.parametrize(
    ("options", "shape", "nodes"),  # nodes: of each replica, at the most
    [
        ({}, (4, 4, 1), 1),
        ({"replicas": 1}, (1, 16, 1), 4),
        ({"replicas": 2}, (2, 8, 1), 2),
        ({"replicas": 8}, (8, 2, 1), 1),
        ({"replicas": 1, "tensor": 4}, (1, 4, 4), 4),
    ],
)
def test_fsdp_may_cross_nodes_of_gpus(options, shape, nodes):
    devices = [Device(number, 4, "gpu") for number in range(16)]
    config = default_config()
    config.batch_size, config.mesh.data, config.mesh.tensor = (
        16,
        options.get("replicas"),
        options.get("tensor", 1),
    )
    validate_devices(config, devices)
    mesh = sharding.make_mesh(devices=devices, **options)
    assert mesh.devices[:, :, 0].shape == shape
    assert {device.id for device in mesh.devices.ravel()} == set(range(16))
    assert {
        len({device.slice_index for device in replica.ravel()}) for replica in mesh.devices
    } == {nodes}
    for group in mesh.devices.reshape(
        -1, shape[2]
    ):  # heads and hidden units are split within a node
        assert len({device.slice_index for device in group}) == 1


def test_only_tpu_slices_are_a_border():
    config = default_config()
    config.batch_size, config.mesh.data = 16, 1
    validate_devices(config, [Device(number, 2, "gpu") for number in range(16)])
    with pytest.raises(
        UsageError, match="mesh.data=1: must be a multiple of the number of slices, 2"
    ):
        validate_devices(config, [Device(number, 2, "tpu") for number in range(16)])


def test_devices_that_are_not_of_a_slice_are_of_one():
    assert sharding.num_slices(jax.devices()) == 1
    assert dict(sharding.make_mesh().shape) == {
        "data": 1,
        "fsdp": len(jax.devices()),
        "context": 1,
        "tensor": 1,
    }

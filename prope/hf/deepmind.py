"""Reads checkpoints of DeepMind's gemma: trees of Orbax, in each of their layouts.

The names in `prope.parameters` are DeepMind's, so an array's name, without prefixes and with
layer_N for layers, is its parameter's path. Layouts are flat keys with dicts of arrays, nested
dicts, and layers of one kind stacked, with a period P: slice s of kind j is layer s P + j.

Axes: those of `prope.parameters`.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from prope import parameters
from prope.errors import UsageError, first_line, usage_error
from prope.hf.layout import Tensor, drop_unused, layers_by_row
from prope.hf.tensors import Stored, check_found
from prope.spec.model import ModelSpec

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MARK = "_METADATA"  # of Orbax, in the folder of a tree
_PREFIXES = re.compile(r"^(rlx_networks/policy_network/|params/|transformer/)+")
_NOT_TEXT = re.compile("SigLiP|vision_encoder|audio_encoder|embedder/(mm|audio)_|opt_state|step$")
_STACKED = re.compile(r"stacked_layers/attention_type_(\d+)/(.+)")
_ADDED_ROWS = 128  # of the embedding in files of Gemma 1 and 2, below what their tokenizer has
_EMBEDDING = "embedder/input_embedding"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a checkpoint, or a view of one, which is read where it is indexed."""

    folder: epath.Path
    keys: tuple[str, ...]
    stored_shape: tuple[int, ...]
    dtype: np.dtype
    view: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view."""
        zeros = np.broadcast_to(np.float32(0), self.stored_shape)  # which takes no memory
        return self.view(zeros).shape

    def __getitem__(self, index) -> np.ndarray:
        """Reads the array, as float32."""
        return self.view(_read(self.folder, self.keys))[index]

    def then(self, view: Callable[[np.ndarray], np.ndarray]) -> "Leaf":
        """Returns a view of this view."""
        return dataclasses.replace(self, view=lambda array: view(self.view(array)))


@functools.lru_cache(maxsize=1)  # the layers of a stacked array are read one after another
def _read(folder: epath.Path, keys: tuple[str, ...]) -> np.ndarray:
    def nested(value):
        return functools.reduce(lambda inner, key: {key: inner}, reversed(keys), value)

    options = ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float32)
    args = ocp.args.PyTreeRestore(
        item=nested(0), restore_args=nested(options), partial_restore=True
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(folder, args=args)
    except (ValueError, OSError) as error:
        problem = f"{'/'.join(keys)} cannot be read: {first_line(error)}"
        raise UsageError(f"{folder}: {problem}; copy the checkpoint again") from error
    return functools.reduce(dict.get, keys, tree)


def _tree_folder(source: epath.Path) -> epath.Path:
    """Returns the folder of the tree: a trainer's checkpoint has its items in folders."""
    items = (source, source / "default", source / "params")
    return next((item for item in items if (item / _MARK).is_file()), source)


def is_orbax(source: epath.Path) -> bool:
    """Returns whether a folder is a checkpoint of Orbax, and none of transformers."""
    return not (source / "config.json").is_file() and (_tree_folder(source) / _MARK).is_file()


def open_arrays(source: epath.Path, model: ModelSpec) -> tuple[dict[str, Stored], list[Tensor]]:
    """Opens the arrays of a checkpoint, and lists those that `config.model` leads to.

    Returns:
      (stored, expected): arrays by name, in prope's layout, and where each one goes.

    Raises:
      UsageError: the arrays are not those of the model, or cannot be read.
    """
    folder = _tree_folder(source)
    leaves = _name_leaves(folder)
    # Gemma 4 multiplies by a norm's scale, not by 1 + scale.
    offset = float(any(name.endswith("/skip_scale") for name in leaves))
    expected = []
    for path in parameters.parameters(model):
        stacked_shape = parameters.stacked_shape(model, path)
        for row, layer in layers_by_row(model, path).items():
            shape = stacked_shape if row is None else stacked_shape[1:]
            tensor = Tensor(
                name=parameters.row_path(path).replace("layers/", f"layer_{layer}/"),
                shape=shape,
                path=tuple(path.split("/")),
                layer=row,
                order=tuple(range(len(shape))),
                offset=offset if path.endswith("/scale") else 0.0,
            )
            expected.append(tensor)
    drop_unused(leaves, model, "layer_{}/attn/{}", "kv_einsum/w k_einsum/w key_norm/scale")
    leaves = _arrange(leaves, expected)
    remedy = "give --config the model that was saved, in float32, bfloat16 or float16"
    found = {name: (leaf.shape, leaf.dtype.name) for name, leaf in leaves.items()}
    check_found(source, found, {tensor.name: tensor.shape for tensor in expected}, _DTYPES, remedy)
    expected.sort(key=lambda tensor: leaves[tensor.name].keys)  # an array's layers together
    return {name: Stored(folder, name, leaf) for name, leaf in leaves.items()}, expected


def _name_leaves(folder: epath.Path) -> dict[str, Leaf]:
    """Returns the arrays of the text's decoder by name, stacked layers apart."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata
    if metadata is None:
        problem = f"its {_MARK} cannot be read by Orbax"
        raise usage_error("--input", folder, problem, "copy the checkpoint again")
    named = {}
    for path, array in jax.tree_util.tree_leaves_with_path(metadata.tree):
        name = _PREFIXES.sub("", jax.tree_util.keystr(path, simple=True, separator="/"))
        # "_query_norm" in Gemma 3; "mlp/linear/w" where keys are flat.
        name = re.sub(r"(mlp/\w+)/w$", r"\1", name.replace("/_", "/"))
        if not _NOT_TEXT.match(name):
            keys = tuple(key.key for key in path)
            named[name] = Leaf(folder, keys, tuple(array.shape), np.dtype(array.dtype))
    return _split_keys_and_values(_unstack(named))


def _unstack(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Gives each layer of a stacked array a name of its own."""
    matches = list(filter(None, map(_STACKED.fullmatch, leaves)))
    period = 1 + max((int(match[1]) for match in matches), default=0)
    result = dict(leaves)
    for match in matches:
        leaf = result.pop(match[0])
        for row in range(leaf.stored_shape[0]):
            layer = row * period + int(match[1])
            result[f"layer_{layer}/{match[2]}"] = leaf.then(operator.itemgetter(row))
    return result


def _split_keys_and_values(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Splits [3, N, D, H], of Gemma 1 7B, into queries and [2, N, D, H]."""
    result = dict(leaves)
    for name in leaves:
        if name.endswith("/qkv_einsum/w"):
            leaf = result.pop(name)
            result[name.replace("qkv_", "q_")] = leaf.then(operator.itemgetter(0))
            result[name.replace("qkv_", "kv_")] = leaf.then(operator.itemgetter(slice(1, None)))
    return result


def _arrange(leaves: dict[str, Leaf], expected: list[Tensor]) -> dict[str, Leaf]:
    """Returns the arrays in prope's layout: without rows of no token, [C, F, D] transposed."""
    arranged = dict(leaves)
    for tensor in expected:
        leaf = leaves.get(tensor.name)
        if leaf is None:
            continue
        if tensor.name == _EMBEDDING and leaf.shape[0] == tensor.shape[0] + _ADDED_ROWS:
            arranged[tensor.name] = leaf.then(operator.itemgetter(slice(tensor.shape[0])))
        transposed = (tensor.shape[0], *tensor.shape[:0:-1])
        if not tensor.name.endswith("/gating_einsum") or leaf.shape != transposed:
            continue
        if transposed == tensor.shape:
            problem = f"{tensor.name} has shape {transposed}, so its axes D and F look alike"
            raise UsageError(f"{leaf.folder}: {problem}; save it with hidden_dim != embed_dim")
        arranged[tensor.name] = leaf.then(lambda array: array.swapaxes(1, 2))
    return arranged

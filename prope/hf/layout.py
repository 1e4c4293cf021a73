"""The tensors in a checkpoint of transformers: their names and layouts, read from the table.

Axes: those of `prope.parameters`.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from prope import parameters
from prope.hf.families import Family
from prope.spec.model import ModelSpec

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# The tensors that the classes of transformers read, of a layer or of the model.
_READ = {
    *("embed_tokens", "norm", "lm_head", "input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
    *("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "layer_scalar"),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file, and the parameter, or matrix of one, that it holds."""

    name: str  # in the file
    shape: tuple[int, ...]  # in the file
    path: tuple[str, ...]  # the parameter in the nested dictionary
    layer: int | None  # the layer, if the parameter is stacked
    order: tuple[int, ...]  # permutation of the matrix's axes; the file joins some of them
    index: tuple[int, ...] = ()  # which matrix, if the parameter holds two
    offset: float = 0.0  # the file holds parameter + offset

    def read(self, parameter: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns the tensor in the file's layout from the parameter, or its layer."""
        matrix = parameter[self.index].transpose(self.order)
        if self.offset:
            matrix = matrix + self.offset
        return np.ascontiguousarray(matrix, dtype).reshape(self.shape)

    def write(self, parameter: np.ndarray, values: np.ndarray) -> None:
        """Copies the tensor's values into the parameter."""
        if self.layer is not None:
            parameter = parameter[self.layer]
        matrix = parameter[self.index].transpose(self.order)
        matrix[...] = values.reshape(matrix.shape)
        if self.offset:
            matrix -= self.offset


def list_tensors(model: ModelSpec, family: Family) -> list[Tensor]:
    """Lists the tensors of a run's `config.model` for a family's class, sorted by name."""
    tensors = []
    for path, parameter in parameters.parameters(model).items():
        sizes = parameters.axis_sizes(model, path)
        shape = tuple(math.prod(sizes[axis] for axis in axes) for axes in parameter.hf_axes.split())
        matrix_axes = parameter.axes.removeprefix("C")
        letters = parameter.hf_axes.replace(" ", "")
        names = family.names.get(parameters.row_path(path), parameter.hf_names).split()
        for row, layer in layers_by_row(model, path).items():
            prefix = "" if layer is None else f"layers.{layer}."
            for number, name in enumerate(names):
                tensor = Tensor(
                    name=_full_name(f"{prefix}{name}", path),
                    shape=shape,
                    path=tuple(path.split("/")),
                    layer=row,
                    index=(number,) if parameter.axes.startswith("C") else (),
                    order=tuple(matrix_axes.index(axis) for axis in letters),
                    offset=float(path.endswith("/scale") and not family.adds_one),
                )
                tensors.append(tensor)
    return sorted(tensors, key=lambda tensor: tensor.name)


def layers_by_row(model: ModelSpec, path: str) -> dict[int | None, int | None]:
    """Returns the layer of every row of a stacked parameter; {None: None} for another."""
    stack = parameters.stack_of(path)
    return {None: None} if stack is None else dict(enumerate(model.stacks[stack]))


def _full_name(name: str, path: str) -> str:
    suffix = ".bias" if path.endswith("/b") else ".weight"
    if name.endswith("layer_scalar"):
        suffix = ""
    prefix = "" if f"{name}{suffix}" == HEAD else "model."
    return f"{prefix}{name}{suffix}"


def drop_unused(tensors: dict[str, Any], model: ModelSpec, pattern: str, names: str) -> None:
    """Drops what files hold and nothing reads: keys and values of layers that share others'.

    `pattern` is that of their names, for the number of a layer and one of `names`.
    """
    for number in range(model.first_sharing_layer, model.num_layers):
        for name in names.split():
            tensors.pop(pattern.format(number, name), None)


def unread_parameters(model: ModelSpec, family: Family) -> list[str]:
    """Lists the parameters that no tensor of a family's class can hold, or only another's."""
    taken = set()
    unread = []
    for path, row in parameters.parameters(model).items():
        names = set(family.names.get(parameters.row_path(path), row.hf_names).split())
        tensors = {(parameters.stack_of(path), name, path.endswith("/b")) for name in names}
        if not tensors or tensors & taken or not names <= _READ:
            unread.append(path)
        taken |= tensors
    return unread

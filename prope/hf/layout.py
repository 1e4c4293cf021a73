"""The tensors in a checkpoint of transformers: their names and layouts, read from the table.

Axes: those of `prope.parameters`.
"""

import dataclasses
import math

import numpy as np
from ml_collections import ConfigDict

from prope import parameters
from prope.parameters import Parameter

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"  # if present, a copy of the embedding


# The tensors that the classes of transformers read, of a layer or of the model.
_READ = {
    *("embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file, and the parameter, or matrix of one, that it holds."""

    name: str  # in the file
    shape: tuple[int, ...]  # in the file
    path: tuple[str, ...]  # the parameter in the nested dictionary
    layer: int | None  # the layer, if the parameter is stacked
    index: tuple[int, ...]  # which matrix, if the parameter holds two
    order: tuple[int, ...]  # permutation of the matrix's axes; the file joins some of them
    scale: float = 1.0  # the file holds scale * (parameter + offset)
    offset: float = 0.0

    def read(
        self,
        parameter: np.ndarray,
        dtype: np.dtype,
    ) -> np.ndarray:
        """Returns the tensor in the file's layout from the parameter, or its layer."""
        matrix = parameter[self.index].transpose(self.order)
        if (self.scale, self.offset) != (1, 0):
            matrix = self.scale * (matrix + self.offset)
        return np.ascontiguousarray(matrix, dtype).reshape(self.shape)

    def write(
        self,
        parameter: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Copies the tensor's values into the parameter."""
        if self.layer is not None:
            parameter = parameter[self.layer]
        matrix = parameter[self.index].transpose(self.order)
        matrix[...] = values.reshape(matrix.shape)


def list_tensors(
    model: ConfigDict,
    one_plus_scale: bool = True,
) -> list[Tensor]:
    """Lists the tensors of a run's `config.model`, sorted by name.

    Args:
      model: the config.
      one_plus_scale: whether the class adds 1 to the scale of a norm and multiplies the embedding
        by sqrt(D), as Gemma does. Otherwise the tensors hold what it does not compute.
    """
    tensors = []
    for path, row in parameters.parameters(model).items():
        layers = range(model.num_layers) if path.startswith("layers/") else [None]
        for layer in layers:
            prefix = "" if layer is None else f"layers.{layer}."
            for number, name in enumerate(row.hf_names):
                tensor = _tensor(model, path, row, layer, number, f"{prefix}{name}")
                tensors.append(tensor if one_plus_scale else _without_convention(tensor, model))
    return sorted(tensors, key=lambda tensor: tensor.name)


def unread_parameters(model: ConfigDict) -> list[str]:
    """Lists the parameters that no tensor of transformers can hold, or only another's."""
    taken: set[str] = set()
    unread = []
    for path, row in parameters.parameters(model).items():
        names = set(row.hf_names)
        if not names or names & taken or not names <= _READ:
            unread.append(path)
        taken |= names
    return unread


def _tensor(
    model: ConfigDict, path: str, row: Parameter, layer: int | None, number: int, name: str
) -> Tensor:
    """Makes the tensor that holds matrix `number` of a parameter."""
    sizes = parameters.axis_sizes(model)
    matrix_axes = row.axes.removeprefix("C")
    return Tensor(
        name=f"model.{name}.weight",
        shape=tuple(math.prod(sizes[axis] for axis in axes) for axes in row.hf_axes.split()),
        path=tuple(path.split("/")),
        layer=layer,
        index=(number,) if row.axes.startswith("C") else (),
        order=tuple(matrix_axes.index(axis) for axis in row.hf_axes.replace(" ", "")),
    )


def _without_convention(tensor: Tensor, model: ConfigDict) -> Tensor:
    """Moves 1 + scale and sqrt(D) into the tensors.

    The embedding is also the output matrix, for which the final norm takes the factor back.
    """
    scales = {
        "embedder": model.embed_dim**0.5,
        "final_norm": model.embed_dim**-0.5,
    }
    module, *_, name = tensor.path
    scale = scales.get(module, 1.0)
    return dataclasses.replace(
        tensor,
        scale=scale,
        offset=float(name == "scale"),
    )

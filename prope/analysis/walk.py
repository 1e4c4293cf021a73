"""Runs a model layer by layer over sequences, on all devices of all processes.

On the devices are one layer's parameters at a time, or the embedding, sharded as in training, and the arrays of a batch
of sequences, split over them. Between layers the residual stream is on the host: of every batch, the rows [b, T, D] of
this process's devices.

Axes: B sequences, T length, D embed_dim, L layers, P pairs.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.tree_util import Partial
from ml_collections import ConfigDict

from prope import model, sharding
from prope.encodings import layer_frequencies
from prope.kernels.choice import matmul_precision
from prope.loss import token_losses
from prope.rope import rotation_table
from prope.runtime import processes
from prope.workdir.reader import Damaged
from prope.workdir.run import Run

_TOKENS = 8192  # per device and batch
_KEPT = 2**30  # bytes of parameters that all stay on the devices

Stream = list[np.ndarray]  # a residual stream


class Walk:
    """A checkpoint's model, and the sequences that it reads: ids [B, T]. All processes call the same methods."""

    def __init__(self, config: ConfigDict, run: Run, tokens: np.ndarray):
        processes.check_count()
        # In float32 whatever it was trained in, so that the weights are measured.
        self.config = ConfigDict(
            config.to_dict() | {"dtype": "float32", "attention": "auto", "remat": "none"}
        )
        self.tokens = tokens
        self.frequencies = layer_frequencies(config, tokens.shape[1])  # [L, P]
        self._mesh, (B, T) = sharding.make_mesh(), tokens.shape
        shards = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        count = -(-B // (shards * max(_TOKENS // T, 1)))
        self._batch_size = -(-B // (shards * count)) * shards
        self._embed = jax.jit(functools.partial(model.embed, self.config))
        self._layer = jax.jit(self._run_layer)
        self._losses = jax.jit(
            lambda norm, table, x, ids: sharding.constrain(
                token_losses(model.final_norm(norm, x), table, ids), "TT"
            )
        )
        self._checkpoint, self._params = run.checkpoint, functools.cache(self._read_params)
        self._keeps = sum(leaf.size * 4 for leaf in jax.tree.leaves(run.checkpoint.shapes)) < _KEPT

    def run(self, function: Callable, *arguments):
        """Calls a jitted function so that it shards over all devices, and multiplies in float32 on each."""
        with sharding.use(self._mesh), matmul_precision("float32"):
            return function(*arguments)

    def batches(self, values: np.ndarray) -> list[np.ndarray]:
        """Cuts an array [B, ...] into equal batches; the last sequence fills the last one, and is cut off later."""
        rows = np.arange(0, len(values), self._batch_size)[:, None] + np.arange(self._batch_size)
        return list(values[np.minimum(rows, len(values) - 1)])

    def enter(self) -> Stream:
        """Embeds the tokens: the residual stream before the first layer."""
        (table,) = self._params("embedder").values()
        return [
            _own_rows(self.run(self._embed, table, batch)) for batch in self.batches(self.tokens)
        ]

    def layer(
        self, number: int, x: Stream, rotate_fn: Partial | None = None, look: Callable | None = None
    ) -> Stream:
        """Runs a layer on a residual stream; returns that after it.

        `rotate_fn` is that of `model.layer`. `look` is called with the numbers of the layer and of a batch, and the
        arrays of its attention.
        """
        positions, outputs = np.arange(self.tokens.shape[1], dtype=np.int32)[None], []
        params, table = (
            self._params("layers", number),
            np.asarray(rotation_table(positions, self.frequencies[number])),
        )
        for batch, rows in enumerate(x):
            output, captured = self.run(self._layer, params, self._global(rows), table, rotate_fn)
            outputs.append(_own_rows(output))
            if look:
                look(number, batch, captured)
            del output, captured  # before the next ones
        return outputs

    def losses(self, x: Stream, first: int) -> np.ndarray:
        """Runs the layers from `first` on, and computes the mean loss of every sequence, nats per token: [B]."""
        for number in range(first, self.config.num_layers):
            x = self.layer(number, x)
        params = self._params("final_norm"), *self._params("embedder").values()
        batches = zip(x, self.batches(np.roll(self.tokens, -1, axis=1)), strict=True)
        losses = [
            self.run(self._losses, *params, self._global(rows), targets)
            for rows, targets in batches
        ]
        means = [
            np.asarray(batch, np.float64)[:, :-1].mean(axis=1) for batch in losses
        ]  # the last predicts nothing
        return np.concatenate(means)[: len(self.tokens)]

    def _run_layer(self, params, x, table, rotate_fn):
        x, captured = model.layer(self.config, params, x, table, rotate_fn)
        return sharding.constrain(x, "BTD"), captured

    def _read_params(self, name: str, layer: int | None = None) -> model.Params:
        """Reads parameters, each device its part; those of a large model that were read before leave the devices."""
        if not self._keeps:
            self._params.cache_clear()
        with processes.raise_on_all(Damaged):
            params = self._checkpoint.read((name,), layer)
        shardings, make = sharding.state_shardings(params, self._mesh), jax.make_array_from_callback
        return jax.tree.map(lambda x, s: make(x.shape, s, x.__getitem__), params, shardings)

    def _global(self, rows: np.ndarray) -> jax.Array:
        return sharding.global_batch(self._mesh, {"x": rows}, self._batch_size)["x"]


def _own_rows(x: jax.Array) -> np.ndarray:
    """Copies the rows that the devices of this process have to the host."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([shards[start] for start in sorted(shards)])

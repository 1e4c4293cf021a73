"""Runs a model layer by layer over sequences, on all devices of all processes.

On the devices are one layer's parameters at a time, or the embedding, sharded as in training, and
the arrays of a batch of sequences, split over them. Between layers the residual stream is on the
host: of every batch, the rows [b, T, D] of this process's devices.

Axes: B sequences, T length, D embed_dim, L layers, P pairs.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.tree_util import Partial
from ml_collections import ConfigDict

from prope import model, sharding
from prope.analysis.measures import Scoring
from prope.encodings import layer_frequencies, layer_windows
from prope.kernels.choice import matmul_precision
from prope.loss import token_losses
from prope.rope import rotation_table
from prope.runtime import processes, watchdog
from prope.workdir.reader import Damaged
from prope.workdir.run import Run

_TOKENS = 8192  # per device and batch
_KEPT = 2**30  # bytes of parameters that all stay on the devices

Stream = list[np.ndarray]  # a residual stream, by batch


class Walk:
    """A checkpoint's model and the sequences [B, T] that it reads.

    All processes call the same methods.
    """

    def __init__(
        self,
        config: ConfigDict,
        run: Run,
        tokens: np.ndarray,
    ):
        processes.check_count()
        # In float32 whatever it was trained in, so that the weights are measured.
        changes = {"dtype": "float32", "attention": "auto", "remat": "none"}
        self.config = ConfigDict(config.to_dict() | changes)
        self.tokens = tokens
        B, T = tokens.shape
        self.frequencies = layer_frequencies(config, T)  # [L, P]
        scale = config.attention_scale or config.head_dim**-0.5
        cap = config.attention_softcap
        self.scoring = [Scoring(scale, cap, window) for window in layer_windows(config)]  # [L]
        self._mesh = sharding.make_mesh()
        shards = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        most_rows = shards * max(_TOKENS // T, 1)
        num_batches = -(-B // most_rows)
        self._batch_size = -(-B // (shards * num_batches)) * shards
        self._embed = jax.jit(
            functools.partial(
                model.embed,
                self.config,
            )
        )
        self._layer = jax.jit(self._run_layer, static_argnums=4)
        self._losses = jax.jit(functools.partial(_losses, self.config))
        self._checkpoint = run.checkpoint
        self._params = functools.cache(self._read_params)
        leaves = jax.tree.leaves(run.checkpoint.shapes)
        num_params = sum(leaf.size for leaf in leaves)
        self._keeps = 4 * num_params < _KEPT

    def run(self, function: Callable, *arguments):
        """Calls a jitted function sharded over all devices, with matmuls in float32."""
        watchdog.alive("a part of the analysis")
        with sharding.use(self._mesh), matmul_precision("float32"):
            return function(*arguments)

    def batches(self, values: np.ndarray) -> list[np.ndarray]:
        """Cuts an array [B, ...] into equal batches; the last sequence fills the last one."""
        starts = np.arange(0, len(values), self._batch_size)
        rows = starts[:, None] + np.arange(self._batch_size)
        return list(values[np.minimum(rows, len(values) - 1)])

    def enter(self) -> Stream:
        """Embeds the tokens: the residual stream before the first layer."""
        (table,) = self._params("embedder").values()
        embedded = []
        for batch in self.batches(self.tokens):
            x = self.run(self._embed, table, batch)
            embedded.append(_local_rows(x))
        return embedded

    def layer(
        self,
        number: int,
        x: Stream,
        rotate_fn: Partial | None = None,
        on_layer: Callable | None = None,
    ) -> tuple[Stream, list]:
        """Runs a layer on a residual stream; returns that after it and the results of `on_layer`.

        `rotate_fn` is that of `model.layer`. `on_layer` is called with the number of every batch
        and the arrays of its attention.
        """
        params = self._params("layers", number)
        T = self.tokens.shape[1]
        positions = np.arange(T, dtype=np.int32)[None]
        table = np.asarray(rotation_table(positions, self.frequencies[number]))
        window = self.scoring[number].sliding_window
        outputs = []
        results = []
        for batch, rows in enumerate(x):
            batch_x = self._global(rows)
            output, captured = self.run(self._layer, params, batch_x, table, rotate_fn, window)
            outputs.append(_local_rows(output))
            if on_layer:
                results.append(on_layer(batch, captured))
            del batch_x, output, captured  # before the next ones
        return outputs, results

    def losses(
        self,
        x: Stream,
        first: int,
    ) -> np.ndarray:
        """Runs the layers from `first` on; returns the mean loss of every sequence: [B]."""
        for number in range(first, self.config.num_layers):
            x, _ = self.layer(number, x)
        norm = self._params("final_norm")
        (table,) = self._params("embedder" if self.config.tied else "head").values()
        next_tokens = np.roll(self.tokens, -1, axis=1)
        targets = self.batches(next_tokens)
        means = []
        for rows, ids in zip(x, targets, strict=True):
            batch_x = self._global(rows)
            losses = self.run(self._losses, norm, table, batch_x, ids)
            losses = np.asarray(losses, np.float64)
            means.append(losses[:, :-1].mean(axis=1))  # the last token has no target
        return np.concatenate(means)[: len(self.tokens)]

    def _run_layer(self, params, x, table, rotate_fn, window):
        x, captured = model.layer(self.config, params, x, table, rotate_fn, window)
        return sharding.constrain(x, "BTD"), captured

    def _read_params(
        self,
        name: str,
        layer: int | None = None,
    ) -> model.Params:
        """Reads parameters onto the devices; of a large model they replace those before."""
        if not self._keeps:
            self._params.cache_clear()
        with processes.raise_on_all(Damaged):
            params = self._checkpoint.read((name,), layer)
        shardings = sharding.state_shardings(params, self._mesh)
        return jax.tree.map(_shard, params, shardings)

    def _global(self, rows: np.ndarray) -> jax.Array:
        return sharding.global_batch(
            self._mesh,
            {"x": rows},
            self._batch_size,
        )["x"]


def _losses(config, norm, table, x, targets):
    """Computes the loss of every token, whole in all processes: [B, T]."""
    hidden = model.final_norm(config, norm, x)
    losses = token_losses(hidden, table, targets, config.final_softcap)
    return sharding.constrain(losses, "TT")


def _shard(x: np.ndarray, named_sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, named_sharding, x.__getitem__)


def _local_rows(x: jax.Array) -> np.ndarray:
    """Copies the rows that the devices of this process have to the host."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([shards[start] for start in sorted(shards)])

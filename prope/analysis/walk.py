"""Runs a model layer by layer over sequences, on all devices of all processes.

On the devices are one layer's parameters at a time, or the embedding, sharded as in training, and
the arrays of a batch of sequences, split over them. Between layers the residual stream is on the
host: of every batch, the rows [b, T, D] of this process's devices.

Axes: B sequences, T length, D embed_dim, L layers, P pairs.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from prope import model, parameters, sharding
from prope.analysis.measures import Scoring
from prope.encodings import rotation_tables
from prope.kernels.choice import matmul_precision
from prope.loss import token_losses
from prope.runtime import processes, watchdog
from prope.workdir.reader import Damaged
from prope.workdir.run import Run

_TOKENS = 8192  # per device and batch
_KEPT = 2**30  # bytes of parameters that all stay on the devices


# What goes from layer to layer: the rows of every batch, on the host. They are "x", the residual
# stream; "layer_inputs" [b, L, T, Q], where layers have some; and by kind of layer the "key" and
# "value" that others share.
Stream = list[dict[str, Any]]


class Walk:
    """A checkpoint's model and the sequences [B, T] that it reads.

    All processes call the same methods.
    """

    def __init__(self, run: Run, tokens: np.ndarray):
        processes.check_count()
        # In float32 whatever it was trained in, so that the weights are measured.
        self.spec = spec = dataclasses.replace(
            run.spec.model, dtype="float32", attention="auto", global_attention=None, remat="none"
        )
        self.tokens = tokens
        B, T = tokens.shape
        self.layers = spec.layers_at(T)
        cap = spec.attention_softcap
        self.scoring = [
            Scoring(spec.attention_scale or layer.head_dim**-0.5, cap, layer.window)
            for layer in self.layers
        ]
        self._tables = rotation_tables(self.layers, np.arange(T, dtype=np.int32)[None])
        self._shared = {layer.kv_source for layer in self.layers if layer.shares_kv}
        self._mesh = sharding.make_mesh()
        shards = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        most_rows = shards * max(_TOKENS // T, 1)
        num_batches = -(-B // most_rows)
        self._batch_size = -(-B // (shards * num_batches)) * shards
        self._embed = jax.jit(functools.partial(model.embed, spec))
        self._layer_inputs = jax.jit(self._compute_layer_inputs)
        self._layer = jax.jit(self._run_layer, static_argnums=4)
        self._losses = jax.jit(functools.partial(_losses, spec))
        self._checkpoint = run.checkpoint
        self._params = functools.cache(self._read_params)
        self._keeps = 4 * parameters.count(spec) < _KEPT

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
        embedder = self._params(("embedder",))
        stream = []
        for tokens in self.batches(self.tokens):
            x = self.run(self._embed, embedder["input_embedding"], tokens)
            stream.append({"x": _local_rows(x)})
            if self.spec.per_layer_input_dim:
                inputs = self.run(self._layer_inputs, embedder, tokens, x)
                stream[-1]["layer_inputs"] = _local_rows(inputs)
        return stream

    def layer(
        self,
        number: int,
        stream: Stream,
        rotate_fn: Partial | None = None,
        on_layer: Callable | None = None,
    ) -> tuple[Stream, list]:
        """Runs a layer on a residual stream; returns that after it and the results of `on_layer`.

        `rotate_fn` is that of `model.run_layer`. `on_layer` is called with the number of every
        batch and the arrays of its attention.
        """
        layer = self.layers[number]
        path = ("layers", layer.stack) if layer.stack else ("layers",)
        params = self._params(path, layer.row)
        arrays = {name: rows[number] for name, rows in self._tables.per_layer.items()}
        table = np.asarray(self._tables.choose(layer, arrays))
        after = []
        results = []
        for batch, rows in enumerate(stream):
            inputs = {"x": rows["x"]}
            if layer.shares_kv:
                inputs |= rows[layer.kind]
            if "layer_inputs" in rows:
                inputs["layer_input"] = rows["layer_inputs"][:, number]
            arrays = self._global(inputs)
            output, captured = self.run(self._layer, params, arrays, table, rotate_fn, layer)
            after.append(rows | {"x": _local_rows(output)})
            if number in self._shared:
                kv = {"key": captured.key, "value": captured.value}
                after[-1][layer.kind] = jax.tree.map(_local_rows, kv)
            if on_layer:
                results.append(on_layer(batch, captured))
            del arrays, output, captured  # before the next ones
        return after, results

    def losses(self, stream: Stream, first: int) -> np.ndarray:
        """Runs the layers from `first` on; returns the mean loss of every sequence: [B]."""
        for number in range(first, self.spec.num_layers):
            stream, _ = self.layer(number, stream)
        norm = self._params(("final_norm",))
        table = self._params(("embedder", "input_embedding") if self.spec.tied else ("head", "w"))
        targets = self.batches(np.roll(self.tokens, -1, axis=1))
        means = []
        for rows, ids in zip(stream, targets, strict=True):
            x = self._global({"x": rows["x"]})["x"]
            losses = self.run(self._losses, norm, table, x, ids)
            losses = np.asarray(losses, np.float64)
            means.append(losses[:, :-1].mean(axis=1))  # the last token has no target
        return np.concatenate(means)[: len(self.tokens)]

    def _compute_layer_inputs(self, embedder, tokens, x):
        inputs = model.layer_inputs(self.spec, {"embedder": embedder}, tokens, x)
        return sharding.constrain(inputs.swapaxes(0, 1), "BLTQ")

    def _run_layer(self, params, arrays, table, rotate_fn, layer):
        memory = {layer.kind: arrays} if layer.shares_kv else None
        layer_input = arrays.get("layer_input")
        x, captured = model.run_layer(
            self.spec, params, arrays["x"], table, layer, rotate_fn, memory, layer_input
        )
        # Heads whole: the host has the rows of devices, not parts of rows.
        key = sharding.constrain(captured.key, "BTSH")
        value = sharding.constrain(captured.value, "BTSH")
        return sharding.constrain(x, "BTD"), captured._replace(key=key, value=value)

    def _read_params(self, path: tuple[str, ...], layer: int | None = None) -> model.Params:
        """Reads parameters onto the devices; of a large model they replace those before."""
        if not self._keeps:
            self._params.cache_clear()
        with processes.raise_on_all(Damaged):
            params = self._checkpoint.read(path, layer)
        # A leaf's path tells its axes: those of a single layer are below no "layers".
        is_layer = layer is not None
        tree = params if is_layer else parameters.nest({"/".join(path): params})
        shardings = sharding.state_shardings(tree, self._mesh)

        def shard(x, sharding):
            return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

        placed = jax.tree.map(shard, tree, shardings)
        return placed if is_layer else functools.reduce(operator.getitem, path, placed)

    def _global(self, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return sharding.global_batch(self._mesh, rows, self._batch_size)


def mean_over_sequences(batches: Sequence, B: int):
    """Averages trees of arrays [b, ...] of batches, of which the last is filled up, over B."""
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:B].mean(axis=0), *batches)


def _losses(spec, norm, table, x, targets):
    """Computes the loss of every token, whole in all processes: [B, T]."""
    losses = token_losses(model.final_norm(spec, norm, x), table, targets, spec.final_softcap)
    return sharding.constrain(losses, "TT")


def _local_rows(x: jax.Array) -> np.ndarray:
    """Copies the rows that the devices of this process have to the host."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([shards[start] for start in sorted(shards)])

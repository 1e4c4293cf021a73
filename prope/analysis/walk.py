"""Runs a model layer by layer over sequences, with one layer's parameters and arrays in memory at a time.

Axes: B sequences, T length, D embed_dim, L layers.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from prope import model
from prope.encodings import layer_frequencies, rotated_pairs_by_layer
from prope.loss import token_losses
from prope.rope import rotation_table
from prope.workdir.run import Run

_TOKENS = 8192  # per batch
_EMBEDDING = ("embedder", "input_embedding")


class Walk:
    """A checkpoint's model, and the sequences that it reads: ids [B, T]."""

    def __init__(self, config: ConfigDict, run: Run, tokens: np.ndarray):
        # In float32 whatever it was trained in, so that the weights are measured.
        self.config = ConfigDict(config.to_dict() | {"dtype": "float32", "attention": "auto", "remat": "none"})
        self.tokens = tokens
        self.frequencies = layer_frequencies(config)  # [L, P]
        self.pairs = rotated_pairs_by_layer(config)  # how many every layer rotates, [L]
        self._read = run.checkpoint.read
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        self._table = functools.cache(lambda freqs: rotation_table(positions, freqs))
        self._batch_size = max(_TOKENS // tokens.shape[1], 1)
        self._jitted = jax.jit(self._layer, static_argnames="kind")
        self._losses = jax.jit(lambda norm, embedding, x, ids: token_losses(model.final_norm(norm, x), embedding, ids))
        size = sum(leaf.size * 4 for leaf in jax.tree.leaves(run.checkpoint.shapes["layers"]))
        cached = config.num_layers if size < 2**30 else 1
        self._params = functools.lru_cache(cached)(lambda number: jax.device_put(self._read(("layers",), number)))

    def enter(self) -> np.ndarray:
        """Embeds the tokens: the residual stream [B, T, D] before the first layer."""
        rows, indices = np.unique(self.tokens, return_inverse=True)
        embedding = jnp.asarray(self._read(_EMBEDDING)[rows])
        return np.asarray(model.embed(self.config, embedding, jnp.asarray(indices.reshape(self.tokens.shape))))

    def layer(
        self, number: int, x: np.ndarray, kind: Callable | None = None, head: int = 0, pair: int = 0
    ) -> Iterator[tuple[np.ndarray, model.Captured]]:
        """Runs a layer on the residual stream x [B, T, D]; yields (x after it, arrays of its attention) by batches.

        `kind`, `channels.stopped` or `channels.removed`, is applied to a `head` and a `pair`; None changes nothing.
        """
        params, table = self._params(number), self._table(tuple(self.frequencies[number].tolist()))
        for batch in self.batches(x):
            output, captured = self._jitted(params, batch, table, kind=kind, head=head, pair=pair)
            yield np.asarray(output), captured

    def through(self, first: int, x: np.ndarray) -> np.ndarray:
        """Runs the layers from `first` to the last on a residual stream: [B, T, D]."""
        for number in range(first, self.config.num_layers):
            x = np.concatenate([output for output, _ in self.layer(number, x)])
        return x

    def losses(self, x: np.ndarray) -> np.ndarray:
        """Computes the mean loss of every sequence, nats per token, from the last layer's output: [B]."""
        embedding, norm = jax.device_put((self._read(_EMBEDDING), self._read(("final_norm",))))
        targets = np.roll(self.tokens, -1, axis=1)  # the last token predicts nothing
        batches = zip(self.batches(x), self.batches(targets), strict=True)
        losses = [self._losses(norm, embedding, batch, jnp.asarray(target)) for batch, target in batches]
        return np.concatenate([np.asarray(batch, np.float64)[:, :-1].mean(axis=1) for batch in losses])

    def _layer(self, params, x, table, kind, head, pair):
        return model.layer(self.config, params, x, table, kind and functools.partial(kind, head, pair))

    def batches(self, x: np.ndarray) -> list[np.ndarray]:
        """Splits an array [B, ...] into what the model reads at a time."""
        return [x[start : start + self._batch_size] for start in range(0, len(x), self._batch_size)]

"""A model run layer by layer over sequences, with one layer's parameters and arrays at a time.

Axes: B sequences, T length, D embed_dim, L layers.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from prope import model
from prope.config import layer_percentages
from prope.loss import token_losses
from prope.rope import num_rotated_pairs
from prope.workdir.run import Run

_TOKENS = 8192  # that are run at once


class Walk:
    """A checkpoint's model and the sequences that it reads, [B, T] ids.

    Attributes:
      config: of the model; computes in float32 whatever it was trained in, so that what is measured is the weights.
      tokens: the sequences.
      pairs: how many pairs every layer turns, [L].
    """

    def __init__(self, config: ConfigDict, run: Run, tokens: np.ndarray):
        changes = {"dtype": "float32", "attention": "auto", "remat": "none"}
        self.config = ConfigDict(config.to_dict() | changes)
        self.tokens = tokens
        self.pairs = [num_rotated_pairs(config.head_dim, p) for p in layer_percentages(config)]
        self._parameters = run
        self._positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        self._at_once = max(_TOKENS // tokens.shape[1], 1)
        self._run = jax.jit(self._layer, static_argnames="kind")
        self._layers = functools.lru_cache(self._held())(lambda number: jax.device_put(run.layer(number)))

    def enter(self) -> np.ndarray:
        """What enters the first layer: [B, T, D]."""
        rows, places = np.unique(self.tokens, return_inverse=True)
        table = jnp.asarray(self._parameters.embedding(rows))
        return np.asarray(model.embed(self.config, table, jnp.asarray(places.reshape(self.tokens.shape))))

    def layer(
        self, number: int, x: np.ndarray, kind: Callable | None = None, head: int = 0, pair: int = 0
    ) -> Iterator[tuple[np.ndarray, model.Captured]]:
        """(the residual stream after a layer, what its attention was made of) for a few sequences at a time.

        Args:
          number: of the layer.
          x: [B, T, D], what enters it.
          kind: changes what attention sees: `channels.stopped` or `channels.removed`, of a `head` and a `pair`.
        """
        params = self._layers(number)
        for part in self._parts(x):
            out, captured = self._run(params, part, self.pairs[number], kind=kind, head=head, pair=pair)
            yield np.asarray(out), captured

    def through(self, first: int, x: np.ndarray) -> np.ndarray:
        """The residual stream [B, T, D] after the last layer, of one that enters layer `first`."""
        for number in range(first, self.config.num_layers):
            x = np.concatenate([out for out, _ in self.layer(number, x)])
        return x

    def losses(self, x: np.ndarray) -> np.ndarray:
        """Mean loss of every sequence, nats per token: [B], of the residual stream after the last layer."""
        embedding, norm = jax.device_put((self._parameters.embedding(), self._parameters.final_norm()))
        targets = np.roll(self.tokens, -1, axis=1)  # the last token predicts nothing
        found = [
            _losses(norm, embedding, part, jnp.asarray(target))
            for part, target in zip(self._parts(x), self._parts(targets), strict=True)
        ]
        return np.concatenate([np.asarray(part, np.float64)[:, :-1].mean(axis=1) for part in found])

    def _layer(self, params, x, pairs, kind, head, pair):
        turn = None if kind is None else kind(head, pair)
        positions = jnp.broadcast_to(self._positions, x.shape[:2])
        return model.layer(self.config, params, x, positions, pairs, turn)

    def _parts(self, x: np.ndarray) -> list[np.ndarray]:
        return [x[start : start + self._at_once] for start in range(0, len(x), self._at_once)]

    def _held(self) -> int:
        """How many layers are kept once read: all, where they are small; otherwise one."""
        size = sum(leaf.size * 4 for leaf in jax.tree.leaves(self._parameters.shapes["layers"]))
        return self.config.num_layers if size < 2**30 else 1


@jax.jit
def _losses(norm, embedding, x, targets):
    return token_losses(model.final_norm(norm, x), embedding, targets)

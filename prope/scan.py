"""Runs the layers of a decoder: one compiled step for those that are alike, and what it saves."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from prope.attention import save_policy
from prope.layers import places

# What a layer saves for its backward pass besides its input, by config.model.remat; the rest is
# recomputed. "attention_out" is attention's output with its logsumexp, so that attention is not
# run again.
_SAVED_RESIDUALS = {
    "minimal": ("query", "key", "value", "attention_out", "gate", "up"),
    "save_qkv": ("query", "key", "value", "attention_out"),
    "full": (),
}


def scan_layers(
    config: ConfigDict,
    run_layer: Callable,
    carry: tuple,
    params: dict[str, Any],
    of_layer: dict[str, Any],
) -> tuple:
    """Runs all layers one after the other, as a loop that is compiled once for alike layers.

    Args:
      config: a run's `config.model`.
      run_layer: maps (carry, parameters of a layer, its part of `of_layer`, its number) to the next
        carry. The number is known when it is compiled.
      carry: what goes through the layers: the residual stream, and the memory, which layers that
        share keys and values do not change.
      params: of all layers, stacked: `params["layers"]` of the model.
      of_layer: arrays that have an element for every layer, [L, ..].
    """
    if config.remat != "none":
        run_layer = jax.checkpoint(
            run_layer,
            policy=save_policy(_SAVED_RESIDUALS[config.remat]),
            prevent_cse=not config.scan_layers,
            static_argnums=3,  # number
        )
    first_sharing = config.num_layers - config.num_kv_shared_layers
    carry = _scan(config, run_layer, carry, range(first_sharing), params, of_layer)
    if not config.num_kv_shared_layers:
        return carry
    x, memory = carry

    def run_sharing_layer(x, *layer):
        x, _ = run_layer((x, memory), *layer)  # which only reads the memory
        return x

    sharing = range(first_sharing, config.num_layers)
    return _scan(config, run_sharing_layer, x, sharing, params, of_layer), memory


def _scan(config, run_layer, carry, numbers, params, of_layer):
    """Scans over the layers `numbers`; where kinds repeat every n layers, a scan step runs n.

    So what a layer is built by is known when a step is compiled. Layers after the last whole
    repetition are run one by one.
    """
    period = len(config.layer_types) or 1
    repetitions = len(numbers) // period
    place = dict(zip(numbers, places(config)[numbers.start :], strict=False))
    by_stack = params if place[numbers[0]].stack else {"": params}
    in_period = collections.Counter(place[number].stack for number in numbers[:period])

    def fold(x, count, start=0):
        """Reshapes [n, ...] to [repetitions, count, ...], or leaves it [repetitions, ...]."""
        num_scanned = repetitions * count
        if len(x) != num_scanned:
            x = x[start : start + num_scanned]
        return x if count == 1 else x.reshape(repetitions, count, *x.shape[1:])

    def run_period(carry, scanned):
        folded_params, folded = scanned
        for j, number in enumerate(numbers[:period]):
            stack, row = place[number]
            layer_params = folded_params[stack]
            if in_period[stack] > 1:
                layer_params = jax.tree.map(lambda x: x[row], layer_params)  # noqa: B023
            of_this = jax.tree.map(lambda x: x[j], folded) if period > 1 else folded  # noqa: B023
            carry = run_layer(carry, layer_params, of_this, number)
        return carry, None

    if repetitions:
        folded_params = {
            stack: jax.tree.map(functools.partial(fold, count=count), by_stack[stack])
            for stack, count in in_period.items()
        }
        fold_each = functools.partial(fold, count=period, start=numbers.start)
        scanned = (folded_params, jax.tree.map(fold_each, of_layer))
        unroll = 1 if config.scan_layers else repetitions
        carry, _ = jax.lax.scan(run_period, carry, scanned, unroll=unroll)
    for number in numbers[repetitions * period :]:
        stack, row = place[number]
        layer_params = jax.tree.map(lambda x: x[row], by_stack[stack])  # noqa: B023
        of_this = jax.tree.map(lambda x: x[number], of_layer)  # noqa: B023
        carry = run_layer(carry, layer_params, of_this, number)
    return carry

"""Runs the layers of a decoder: one compiled step for those that are alike, and what it saves."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from prope.stack.layers import by_stack, first_sharing_layer, places

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
    per_layer: dict[str, Any],
) -> tuple:
    """Runs all layers one after the other, as a loop that is compiled once for alike layers.

    Args:
      config: a run's `config.model`.
      run_layer: maps (carry, parameters of a layer, its part of `per_layer`, its number) to the
        next carry. The number is known when it is compiled.
      carry: what goes through the layers: the residual stream, and the memory, which layers that
        share keys and values do not change.
      params: of all layers, stacked: `params["layers"]` of the model.
      per_layer: arrays that have an element for every layer, [L, ..].
    """
    if config.remat != "none":
        run_layer = jax.checkpoint(
            run_layer,
            policy=_save_policy(_SAVED_RESIDUALS[config.remat]),
            prevent_cse=not config.scan_layers,
            static_argnums=3,  # number
        )
    first_sharing = first_sharing_layer(config)
    carry = _scan(config, run_layer, carry, range(first_sharing), params, per_layer)
    if not config.num_kv_shared_layers:
        return carry
    x, memory = carry

    def run_sharing_layer(x, *layer):
        x, _ = run_layer((x, memory), *layer)  # which only reads the memory
        return x

    sharing = range(first_sharing, config.num_layers)
    return _scan(config, run_sharing_layer, x, sharing, params, per_layer), memory


def _scan(config, run_layer, carry, numbers, params, per_layer):
    """Scans over the layers `numbers`; where kinds repeat every n layers, a scan step runs n.

    So what a layer is built by is known when a step is compiled. Layers after the last whole
    repetition are run one by one.
    """
    period = len(config.layer_types) or 1
    num_scanned = len(numbers) // period * period
    place = places(config)
    stacked = by_stack(config, params)
    if num_scanned:
        scanned = numbers[:num_scanned]
        carry = _scan_periods(config, run_layer, carry, scanned, period, stacked, per_layer)
    for number in numbers[num_scanned:]:
        stack, row = place[number]
        carry = run_layer(carry, _row(stacked[stack], row), _row(per_layer, number), number)
    return carry


def _scan_periods(config, run_layer, carry, numbers, period, stacked, per_layer):
    """Scans over the layers `numbers`, whole periods, of which the first tells what a step runs."""
    repetitions = len(numbers) // period
    first_period = numbers[:period]
    place = places(config)
    in_period = collections.Counter(place[number].stack for number in first_period)

    def run_period(carry, scanned):
        period_params, period_arrays = scanned
        for j, number in enumerate(first_period):
            stack, row = place[number]
            layer_params = period_params[stack]
            if in_period[stack] > 1:
                layer_params = _row(layer_params, row)
            layer_arrays = _row(period_arrays, j) if period > 1 else period_arrays
            carry = run_layer(carry, layer_params, layer_arrays, number)
        return carry, None

    def fold(tree, first, count):
        return jax.tree.map(lambda x: _fold(x, first, repetitions, count), tree)

    # Layers that share keys and values are the first ones of stacks of their own.
    period_params = {stack: fold(stacked[stack], 0, count) for stack, count in in_period.items()}
    scanned = (period_params, fold(per_layer, numbers.start, period))
    unroll = 1 if config.scan_layers else repetitions
    carry, _ = jax.lax.scan(run_period, carry, scanned, unroll=unroll)
    return carry


def _fold(x: jax.Array, first: int, repetitions: int, count: int) -> jax.Array:
    """Reshapes elements of [n, ..] from `first` on to [repetitions, count, ..], without a 1."""
    size = repetitions * count
    if len(x) != size:
        x = x[first : first + size]
    return x if count == 1 else x.reshape(repetitions, count, *x.shape[1:])


def _row(tree, index: int):
    return jax.tree.map(lambda x: x[index], tree)


def _save_policy(names: Sequence[str]) -> Callable[..., bool]:
    """Makes a checkpoint policy that saves the arrays of these names.

    "attention_out" includes cuDNN's output and softmax statistics: JAX names neither, so all that
    its primitive returns is saved.
    """
    is_named = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive, *arguments, **parameters):
        if primitive.name == "dot_product_attention_fwd_wrapper":
            return "attention_out" in names
        return is_named(primitive, *arguments, **parameters)

    return policy

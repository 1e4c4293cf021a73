"""Runs the layers of a decoder: one compiled step for those that are alike, and what it saves."""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from prope.stack.layers import by_stack, first_sharing_layer, layers, stack_rows

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
      run_layer: maps (carry, parameters of a layer, its part of `per_layer`, the number of a layer
        that is built alike) to the next carry. The number is known when it is compiled.
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
    """Runs the layers `numbers`; where kinds repeat every n layers, a scan step runs n.

    So what a layer is built by is known when a step is compiled. Layers after the last whole
    repetition come after that scan.
    """
    period = len(config.layer_types) or 1
    repetitions = len(numbers) // period
    num_scanned = 0
    stacked = by_stack(config, params)
    if period > 1 and repetitions > 1:
        num_scanned = repetitions * period
        scanned = numbers[:num_scanned]
        carry = _scan_periods(config, run_layer, carry, scanned, period, stacked, per_layer)
    rest = numbers[num_scanned:]
    if rest:
        rest_arrays = _slice_layers(per_layer, rest.start, len(rest))
        carry = _run_unrolled(config, run_layer, carry, rest, stacked, rest_arrays)
    return carry


def _scan_periods(config, run_layer, carry, numbers, period, stacked, per_layer):
    """Scans over the layers `numbers`, whole periods, of which the first tells what a step runs."""
    repetitions = len(numbers) // period
    first_period = numbers[:period]
    rows = stack_rows(config)
    in_period = collections.Counter(rows[number].stack for number in first_period)

    def run_period(carry, scanned):
        return _run_unrolled(config, run_layer, carry, first_period, *scanned), None

    def fold(tree, first, count):
        tree = _slice_layers(tree, first, repetitions * count)
        return jax.tree.map(lambda x: x.reshape(repetitions, count, *x.shape[1:]), tree)

    # The first of these layers are the first ones of their stacks.
    period_params = {stack: fold(stacked[stack], 0, count) for stack, count in in_period.items()}
    scanned = (period_params, fold(per_layer, numbers.start, period))
    unroll = 1 if config.scan_layers else repetitions
    carry, _ = jax.lax.scan(run_period, carry, scanned, unroll=unroll)
    return carry


def _run_unrolled(config, run_layer, carry, numbers, stacked, per_layer):
    """Runs consecutive layers one after the other, neighbours that are built alike as a loop.

    `stacked` has the parameters by stack, `per_layer` an element for each of these layers.
    """
    all_layers = layers(config)
    rows = stack_rows(config)
    for _, group in itertools.groupby(numbers, key=all_layers.__getitem__):
        identical = list(group)
        stack, row = rows[identical[0]]
        count = len(identical)
        index = identical[0] - numbers[0]
        layer_params = _slice_layers(stacked[stack], row, count)
        layer_arrays = _slice_layers(per_layer, index, count)
        carry = _scan_identical(config, run_layer, carry, identical, layer_params, layer_arrays)
    return carry


def _scan_identical(config, run_layer, carry, numbers, params, per_layer):
    """Runs layers that are built alike: `params` and `per_layer` have an element for each."""

    def run(carry, scanned):
        return run_layer(carry, *scanned, numbers[0]), None

    unroll = 1 if config.scan_layers else len(numbers)
    carry, _ = jax.lax.scan(run, carry, (params, per_layer), unroll=unroll)
    return carry


def _slice_layers(tree, first: int, count: int):
    """Takes `count` elements from `first` on, of every array."""
    end = first + count

    def take(x):
        return x if len(x) == count else x[first:end]

    return jax.tree.map(take, tree)


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

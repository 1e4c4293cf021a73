"""Runs the layers of a decoder: one compiled step for those that are alike, and what it saves."""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from prope.parameters import by_stack
from prope.spec.model import ModelSpec

# What a layer saves for its backward pass besides its input, by `remat`; the rest is
# recomputed. "attention_out" is attention's output with its logsumexp, so that attention is not
# run again.
_SAVED_RESIDUALS = {
    "minimal": ("query", "key", "value", "attention_out", "gate", "up"),
    "save_qkv": ("query", "key", "value", "attention_out"),
    "full": (),
}


def scan_layers(
    spec: ModelSpec,
    run_layer: Callable,
    carry: tuple,
    params: dict[str, Any],
    per_layer: dict[str, Any],
) -> tuple:
    """Runs all layers one after the other, as a loop that is compiled once for alike layers.

    Args:
      spec: the model.
      run_layer: maps (carry, parameters of a layer, its part of `per_layer`, a number) to the next
        carry. The number, known when it is compiled, is that of the first of the layers that are
        equal to it.
      carry: what goes through the layers: the residual stream, and the memory, which layers that
        share keys and values do not change.
      params: of all layers, stacked: `params["layers"]` of the model.
      per_layer: arrays that have an element for every layer, [L, ..].
    """
    if spec.remat != "none":
        run_layer = jax.checkpoint(
            run_layer,
            policy=_save_policy(_SAVED_RESIDUALS[spec.remat]),
            prevent_cse=spec.scan_layers is False,
            static_argnums=3,  # number
        )
    stacked = by_stack(spec, params)
    numbers = range(spec.num_layers)
    first_sharing = spec.first_sharing_layer
    carry = _scan(spec, run_layer, carry, numbers[:first_sharing], stacked, per_layer)
    if not spec.num_kv_shared_layers:
        return carry
    x, memory = carry

    def run_sharing_layer(x, *layer):
        x, _ = run_layer((x, memory), *layer)  # which only reads the memory
        return x

    sharing = numbers[first_sharing:]
    return _scan(spec, run_sharing_layer, x, sharing, stacked, per_layer), memory


def _scan(spec, run_layer, carry, numbers, stacked, per_layer):
    """Runs the layers `numbers`: whole repetitions of the pattern, then those that are left."""
    period = len(spec.layer_types) or 1
    count = len(numbers) // period
    for pattern, repetitions in ((numbers[:period], count), (numbers[count * period :], 1)):
        if pattern and repetitions:
            arguments = (pattern, repetitions, stacked, per_layer)
            carry = _scan_pattern(spec, run_layer, carry, *arguments)
    return carry


def _scan_pattern(spec, run_layer, carry, pattern, repetitions, stacked, per_layer):
    """Scans over repetitions of the layers `pattern`, the first of which have these numbers.

    So what a layer is built by is known when a step is compiled. Within a step, neighbours that are
    equal are a loop.
    """
    layers = [spec.layers[number] for number in pattern]
    # Of every stack, the row of its first layer here.
    first_row = {layer.stack: layer.row for layer in reversed(layers)}
    if len(layers) == 1:
        (layer,) = layers
        params = _take(stacked[layer.stack], layer.row, repetitions)
        arrays = _take(per_layer, layer.number, repetitions)
        return _scan_equal(spec, run_layer, carry, layer, params, arrays, repetitions)

    def fold(tree, first, count):
        """Takes `count` elements for each repetition, from `first` on: [repetitions, count, ..]."""
        tree = _take(tree, first, repetitions * count)
        return jax.tree.map(lambda x: x.reshape(repetitions, count, *x.shape[1:]), tree)

    def run_pattern(carry, scanned):
        params, arrays = scanned
        for layer, equal in itertools.groupby(layers):
            count = len(list(equal))
            layer_params = _take(params[layer.stack], layer.row - first_row[layer.stack], count)
            layer_arrays = _take(arrays, layer.number - pattern[0], count)
            inputs = (layer, layer_params, layer_arrays, count)
            carry = _scan_equal(spec, run_layer, carry, *inputs)
        return carry, None

    rows = collections.Counter(layer.stack for layer in layers)
    params = {stack: fold(stacked[stack], first_row[stack], rows[stack]) for stack in rows}
    scanned = (params, fold(per_layer, pattern[0], len(pattern)))
    unroll = repetitions if spec.scan_layers is False else 1
    carry, _ = jax.lax.scan(run_pattern, carry, scanned, unroll=unroll)
    return carry


def _scan_equal(spec, run_layer, carry, layer, params, arrays, count):
    """Scans over `count` layers that are built as `layer`, with an element of arrays for each."""

    def run(carry, inputs):
        return run_layer(carry, *inputs, layer.number), None

    unroll = count if spec.scan_layers is False else 1
    carry, _ = jax.lax.scan(run, carry, (params, arrays), unroll=unroll)
    return carry


def _take(tree, first: int, count: int):
    """Takes `count` elements from `first` on, of every array; all of them need no slice."""
    return jax.tree.map(lambda x: x if len(x) == count else x[first : first + count], tree)


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

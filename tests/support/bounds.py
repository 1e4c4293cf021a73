"""Bounds on float32 results that hold on any processor: no number here was seen on one.

Two float32 programs that compute one thing order their sums differently, and so do the programs
that XLA compiles for AVX2, AVX-512 or another number of threads. How much that matters is measured
where the test runs: `measure_rounding` is how far a result moves if every input moves by one unit
in the last place, and `assert_equal_but_rounding` allows a multiple of it.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Each input is rounded once; what is between it and the result is rounded a few times more.
MULTIPLE = 8
# No bound is more of the largest number of a result, by the result's dtype.
LARGEST = {"float32": 1e-3, "bfloat16": 2e-2}


def move_by_one_ulp(tree, seed=0):
    """Moves every number of the floating arrays of a tree up or down by one unit in the last place.

    bfloat16 and other arrays move by a unit of their own dtype; integers stay.
    """
    rng = np.random.default_rng(seed)

    def move(leaf):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            return leaf
        leaf = np.asarray(leaf)
        direction = rng.choice([-np.inf, np.inf], leaf.shape).astype(leaf.dtype)
        return jnp.asarray(np.nextafter(leaf, direction))

    return jax.tree.map(move, tree)


def measure_rounding(function, *inputs, seeds=2):
    """How far each array that `function(*inputs)` returns moves with inputs that move by one ulp.

    Returns (result, tree of the largest movement of each array of the result).
    """
    result = jax.tree.map(np.asarray, function(*inputs))
    movement = jax.tree.map(lambda _: 0.0, result)
    for seed in range(seeds):
        moved = function(*move_by_one_ulp(inputs, seed))
        movement = jax.tree.map(
            lambda most, a, b: max(most, float(np.abs(a - b).max(initial=0))),
            movement,
            jax.tree.map(np.float64, moved),
            jax.tree.map(np.float64, result),
        )
    return result, movement


def assert_equal_but_rounding(
    actual, expected, movement, multiple=MULTIPLE, where="", largest=None
):
    """Compares the arrays of two trees: each may differ by `multiple` times its movement.

    A bound may not be more than `largest`, by default that of `LARGEST`, times the largest number
    that is expected: a fault that has a result depend on last bits must not widen its own bound.
    """

    def compare(path, ours, theirs, one_ulp):
        assert np.shape(ours) == np.shape(theirs), (where, path)
        is_narrow = jnp.asarray(ours).dtype == jnp.bfloat16
        share = largest or LARGEST["bfloat16" if is_narrow else "float32"]
        ours, theirs = np.float64(ours), np.float64(theirs)
        error = np.abs(ours - theirs).max(initial=0)
        bound = multiple * one_ulp
        name = f"{where} {jax.tree_util.keystr(path)}"
        assert bound <= share * np.abs(theirs).max(initial=0), f"{name}: a bound of {bound:.2g}"
        assert error <= bound, f"{name}: {error:.2g}, one ulp moves it {one_ulp:.2g}"

    jax.tree_util.tree_map_with_path(compare, actual, expected, movement)


def sum_bound(terms: int, magnitude: float, dtype=np.float32) -> float:
    """The largest error of a sum of `terms` products, in any order: terms * eps * sum |a b|.

    `magnitude` is the sum of the products' absolute values (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1).
    """
    return float(terms * jnp.finfo(dtype).eps * magnitude)

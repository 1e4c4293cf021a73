"""Tries the paper's statements with the constructions of `theory.py`, for heads as Gemma's: d = 256, wavelength 1e4."""

import numpy as np

from prope.analysis import theory
from prope.rope import frequencies, num_rotated_pairs

HEAD_DIM = 256
LENGTH = 1024
EPSILON = 0.01
PERCENTAGES = (1.0, 0.75, 0.25)
BOUNDS = (256, 1024, 4096, 16384)  # of the positions of 256 tokens
SIGMAS = 4.5  # a standard normal is further out once in 150 000 times; the curves have about a thousand points each


def statements() -> list[dict]:
    """Tries all statements, in a few seconds.

    Returns dictionaries of `statement` (its number), `says` (one sentence), `numbers` (computed results by name) and
    `holds` (whether these numbers confirm it).
    """
    names = ("statement", "says", "numbers", "holds")
    tests = (maximal, gaussian, repeated, positional, semantic, randomised)
    return [dict(zip(names, test(), strict=True)) for test in tests]


def maximal() -> tuple[str, str, dict, bool]:
    """Tries Proposition 3.1, for a Gaussian query at the end of the sequence."""
    query = np.random.default_rng(0).standard_normal(HEAD_DIM)
    distances = (0, 1, 17, 300, LENGTH - 1)
    margins, argmax = {}, []
    for p in PERCENTAGES:
        freqs = frequencies(HEAD_DIM, rope_percentage=p)
        keys = {r: theory.key_for_distance(query, r, freqs) for r in distances}
        weights = [
            theory.attention(query[None], np.tile(keys[r], (LENGTH, 1)), freqs)[0]
            for r in distances
        ]
        argmax += [LENGTH - 1 - int(w.argmax()) for w in weights]
        least = min(theory.margin(query, keys[r], r, LENGTH, freqs) for r in distances)
        margins[f"least margin of the logit, p = {p:g}"] = least
    numbers = {
        "distances asked for": list(distances),
        "distances found": argmax[: len(distances)],
        **margins,
    }
    says = "Given any query and any distance, there is a key whose softmax weight is largest at that distance."
    return (
        "Proposition 3.1",
        says,
        numbers,
        argmax == list(distances) * len(PERCENTAGES) and min(margins.values()) > 0,
    )


def gaussian() -> tuple[str, str, dict, bool]:
    """Tries Proposition 3.2, beside the curve of ones, which does fall."""
    freqs, distances, draws = frequencies(HEAD_DIM), np.arange(LENGTH), 4000
    mean, error = theory.gaussian_curve(distances, freqs, draws)
    spread = error * np.sqrt(draws)
    ones = theory.all_ones_curve(distances, freqs)
    numbers = {
        "draws": draws,
        "largest |mean| of the logit": float(np.abs(mean).max()),
        "in standard errors": float(np.abs(mean / error).max()),
        "standard deviation, least and largest": [float(spread.min()), float(spread.max())],
        "ones, at distance 1, 10, 100, 1000": [float(ones[m]) for m in (1, 10, 100, 1000)],
    }
    says = "Gaussian queries and keys have expected logit 0 at every distance: nothing decays, as vectors of ones do."
    holds = (
        numbers["in standard errors"] < SIGMAS
        and np.allclose(spread, 1, atol=0.1)
        and ones[1000] < ones[1] / 2
    )
    return "Proposition 3.2", says, numbers, bool(holds)


def repeated() -> tuple[str, str, dict, bool]:
    """Tries Proposition 5.2, for random weights, some of them so large that the softmax is sharp."""
    rng, embed_dim, pairs = np.random.default_rng(0), 64, []
    for scale in np.logspace(-2, 0, 50):
        weights = scale * rng.standard_normal((2, embed_dim, HEAD_DIM))
        pairs.append(theory.repeated_token(*weights, rng.standard_normal((8, embed_dim))))
    weights = np.array(pairs)
    freqs, tokens = frequencies(HEAD_DIM), rng.standard_normal((8, embed_dim))
    tokens[:, 0] = 1
    head = theory.head_weights(1, EPSILON, 9, freqs, embed_dim)
    numbers = {
        "heads tried": len(weights),
        "largest difference of the two weights": float(np.abs(weights[:, 0] - weights[:, 1]).max()),
        "largest of the weights": float(weights.max()),
        "a previous-token head of Theorem 5.3, with RoPE": theory.repeated_token(
            *head, tokens, freqs
        )[1],
        "the same head, without": theory.repeated_token(*head, tokens)[1],
    }
    says = "Without rotation no head is diagonal or previous-token: a token and its repetition get equal weights."
    holds = (
        numbers["largest difference of the two weights"] < 1e-12 and weights.max() <= 0.5 + 1e-12
    )
    return (
        "Proposition 5.2",
        says,
        numbers,
        bool(holds and numbers["the same head, without"] <= 0.5),
    )


def positional() -> tuple[str, str, dict, bool]:
    """Tries Theorem 5.3, through weights that read a constant feature of a random residual stream."""
    rng, embed_dim, least, temperatures = np.random.default_rng(0), 32, [], {}
    residual = rng.standard_normal((LENGTH, embed_dim))
    residual[:, 0] = 1
    for p in PERCENTAGES:
        freqs = frequencies(HEAD_DIM, rope_percentage=p)
        for distance in (0, 1):
            query_weights, key_weights = theory.head_weights(
                distance, EPSILON, LENGTH, freqs, embed_dim
            )
            weights = theory.attention(residual @ query_weights, residual @ key_weights, freqs)
            least.append(float(np.diagonal(weights, -distance).min()))
        temperature = theory.positional_head(1, EPSILON, LENGTH, freqs).temperature
        temperatures[f"temperature, p = {p:g} ({num_rotated_pairs(HEAD_DIM, p)} pairs)"] = (
            temperature
        )
    try:
        theory.positional_head(1, EPSILON, LENGTH, frequencies(HEAD_DIM, rope_percentage=0))
        refused = False
    except ValueError:
        refused = True
    numbers = {
        "tokens": LENGTH,
        "epsilon": EPSILON,
        "least weight wanted, diagonal": min(least[0::2]),
        "least weight wanted, previous token": min(least[1::2]),
        **temperatures,
        "p = 0 refused": refused,
    }
    says = (
        "With rotation a head can be diagonal or previous-token to any precision, for any length."
    )
    return "Theorem 5.3", says, numbers, min(least) > 1 - EPSILON and refused


def semantic() -> tuple[str, str, dict, bool]:
    """Tries Theorem 6.1, for the slowest pair of RoPE, and beside it a pair that p-RoPE does not rotate."""
    slow, length = float(frequencies(HEAD_DIM)[-1]), 8192
    head = theory.semantic_head(EPSILON, length, slow)
    within = min(
        weight_of(head.query, keys_with_target(head, length, at), slow, at)
        for at in range(0, length, 512)
    )

    # The keys of all other tokens are 0: one swap is enough.
    long = 4 * head.longest
    one = before_and_after(head.query, keys_with_target(head, long, long - 2), slow, long - 2)
    # All others stay opposed to the query wherever the target comes from: this takes two swaps.
    target = long - head.longest + 1000
    opposed = -100 * theory.rotate(head.target, np.arange(long)[::-1] - head.longest / 2, [slow])
    opposed[target] = head.target
    two = before_and_after(head.query, opposed, slow, target)

    still = theory.semantic_head(EPSILON, long, 0)
    kept = [
        weight_of(still.query, keys_with_target(still, long, at), 0, at) for at in (long - 2, 0)
    ]
    numbers = {
        "frequency": slow,
        "a quarter turn, in tokens": head.longest,
        f"least weight in {length} tokens": within,
        f"weight in {long} tokens, before and after": one[:2],
        "swapped": one[2],
        "with the others opposed, before and after": two[:2],
        "swapped then": two[2],
        "unturned, the target moved from near to far": kept,
    }
    says = "In a long sequence one or two swaps cost a head of one turning pair its target; an unturned pair keeps it."
    holds = (
        min(within, one[0], two[0], *kept) > 1 - EPSILON
        and max(one[1], two[1]) < 0.5
        and len(two[2]) == 2
    )
    return "Theorem 6.1", says, numbers, holds and abs(kept[0] - kept[1]) < 1e-12


def randomised() -> tuple[str, str, dict, bool]:
    """Tries Appendix B.2, for 256 tokens."""
    freqs, length, half, sigmas = frequencies(HEAD_DIM), BOUNDS[0], [], []
    for bound in BOUNDS:
        curves = theory.randomised_curves(length, bound, freqs)
        half.append(int(np.argmax(curves["ones"][0] < 0.5)))
        mean, error = curves["gaussian"]
        sigmas.append(float(np.abs(mean / error).max()))
    numbers = {"upper bounds": list(BOUNDS), "tokens after which ones fall below 1/2": half}
    numbers |= {"largest |mean| of Gaussian logits, in standard errors": sigmas}
    says = "Random positions with a higher upper bound make vectors of ones decay sooner, and Gaussian ones still not."
    return (
        "Appendix B.2",
        says,
        numbers,
        half == sorted(set(half), reverse=True) and max(sigmas) < SIGMAS,
    )


def keys_with_target(head: theory.SemanticHead, length: int, target: int) -> np.ndarray:
    """Builds keys [length, 2] of a sequence with the target at one position."""
    keys = np.tile(head.other, (length, 1))
    keys[target] = head.target
    return keys


def weight_of(query: np.ndarray, keys: np.ndarray, frequency: float, position: int) -> float:
    """Computes the weight of the last token, whose query this is, on a position."""
    return float(theory.attention(query[None], keys, [frequency])[0, position])


def before_and_after(query: np.ndarray, keys: np.ndarray, frequency: float, target: int) -> tuple:
    """Computes the target's weight before and after the swaps that defeat the head, and these swaps."""
    swaps = theory.defeating_swaps(query, keys, frequency, target, EPSILON)
    order = theory.swapped(len(keys), swaps)
    after = weight_of(query, keys[order], frequency, int(np.flatnonzero(order == target)[0]))
    return weight_of(query, keys, frequency, target), after, swaps

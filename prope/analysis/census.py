"""Scores and names every head, and computes the paper's tables of chosen heads.

Axes: N query heads, K key/value heads, P pairs.
"""

import numpy as np

from prope.analysis.channels import strengths
from prope.analysis.measures import Measures, View

MOSTLY = 0.5  # of the weight, for a head to be named by where it attends
SHARP = 0.5  # of the largest entropy: less, for a head to be named semantic
SCORES = ("diagonal", "previous_token", "first_token", "entropy", "distance", "unturned_overlap")


def score_heads(
    layer: int, frequencies: np.ndarray, measures: Measures, share: float = 0
) -> list[dict]:
    """Computes a record for every head of a layer with these frequencies [P]: its scores (`Measures`), and

    head_of                 the smaller of its weights on the token before, at queries after the token of --head_of,
                            which are a `share` of all, and on the first token elsewhere (Figure 7); None without it

    high_frequency_share    share of the fastest quarter of the pairs in what all can add to logits (`strengths`), as
                            far as they are rotated: at wavelength 10,000 those of 0.1 radians a token and more
    positional              the larger of diagonal and previous_token
    kind                    "diagonal", "previous_token" or "first_token", where more than half of the weight goes
                            there; "semantic": none of these, but sharp, and more than half of the attention is the same
                            without any rotation, so that it depends on what tokens are; otherwise ""
    """
    strength, quarter = strengths(measures), len(frequencies) // 4
    fast = (
        strength[:, :quarter]
        @ (frequencies[:quarter] > 0)
        / np.maximum(strength.sum(axis=1), 1e-30)
    )
    records = []
    for head in range(len(strength)):
        scores = {name: float(getattr(measures, name)[head]) for name in SCORES}
        record = {"layer": layer, "head": head, **scores, "high_frequency_share": float(fast[head])}
        parts = share and (
            measures.after_token[head] / share,
            measures.elsewhere[head] / (1 - share),
        )
        record["head_of"] = float(min(parts)) if share else None
        record["positional"] = max(scores["diagonal"], scores["previous_token"])
        target = max(SCORES[:3], key=scores.get)  # diagonal, previous_token or first_token
        semantic = scores["entropy"] < SHARP and scores["unturned_overlap"] > MOSTLY
        records.append(
            record | {"kind": target if scores[target] > MOSTLY else "semantic" if semantic else ""}
        )
    return records


def rank_correlation(runs: list[dict], draws: int = 9999) -> dict | None:
    """Computes Spearman's correlation of high_frequency_share and positional; None where it is undefined.

    The paper says that positional heads are those that use the highest frequencies: then it is near 1. The heads of a
    run, and heads that share keys, are not independent, so the p-value is that of a permutation test that moves the
    heads of a key together and within their run only; with its `draws` it is at least 1 / (draws + 1).

    `runs` are analyses, of which the heads, in the order of their layers, and the layers' norms are read.
    """
    from scipy import stats

    heads = [head for run in runs for head in run["heads"]]
    names = ("high_frequency_share", "positional")
    ranks = np.array([stats.rankdata([head[name] for head in heads]) for name in names])
    if len(heads) < 3 or (ranks.std(axis=1) == 0).any():
        return None
    shares, scores = stats.zscore(ranks, axis=1)
    rng, moved, ends = np.random.default_rng(0), [], np.cumsum([len(run["heads"]) for run in runs])
    for run, own in zip(runs, np.split(shares, ends[:-1]), strict=True):
        layer = run["layers"][0]
        blocks = own.reshape(
            -1, len(layer["query_norms"]) // len(layer["key_norms"])
        )  # the heads of a key
        moved.append(blocks[rng.random((draws, len(blocks))).argsort(axis=1)].reshape(draws, -1))
    rho, by_chance = (
        float(shares @ scores / len(heads)),
        np.concatenate(moved, axis=1) @ scores / len(heads),
    )
    extreme = (np.abs(by_chance) >= abs(rho) - 1e-9).sum()
    return {"rho": rho, "p_value": float((1 + extreme) / (1 + draws)), "heads": len(heads)}


def strongest(heads: list[dict], paper: bool = False) -> list[tuple[int, int, str]]:
    """Chooses three by head_of, or five by position, or for the paper one and these: (layer, head, score)."""
    usual = [("diagonal", 2), ("previous_token", 2), ("first_token", 1)]
    of_token = [("head_of", 1 if paper else 3)] * (heads[0]["head_of"] is not None)
    chosen: dict[tuple[int, int], str] = {}
    for score, count in of_token + usual if paper else of_token or usual:
        others = [head for head in heads if (head["layer"], head["head"]) not in chosen]
        for head in sorted(others, key=lambda head: -head[score])[:count]:
            chosen[head["layer"], head["head"]] = score
    return [(*head, score) for head, score in chosen.items()]


def show_head(view: View, head: int, window: list[int], table: list[int], names: list[str]) -> dict:
    """Collects what the page shows of a head, among the positions `window` and `table`, which the view has.

    map         weights [t, t] of the window's queries on its keys (Figures 5, 12, 13)
    logits      the same before the softmax (Figure 9)
    query_norms, key_norms      of every pair, by token [t, P] (Figures 6, 7)
    table       `bounds_table`
    """
    at = np.searchsorted(view.positions, window)
    maps = {"map": view.weights, "logits": view.logits}
    shown = {name: values[head][np.ix_(at, at)].tolist() for name, values in maps.items()}
    shown |= {name: getattr(view, name)[head][at].tolist() for name in ("query_norms", "key_norms")}
    return shown | {"table": bounds_table(view, head, table, names)}


def bounds_table(view: View, head: int, table: list[int], names: list[str]) -> dict:
    """Compares logits of tokens with their bounds |q_i| |k_j| / sqrt(H) (Tables 3 to 5, for one head).

    Returns for every token i of the positions `table`: `upper_bound` of the logit to itself, that logit (`diagonal`),
    and the same of the token before, `previous_upper_bound` and `previous_token`, which the first token does not have.
    `names` are those of all tokens of the sequence.
    """
    logits = np.asarray(view.logits[head], np.float64)
    query, key = (
        np.linalg.norm(x[head].astype(np.float64), axis=-1)
        for x in (view.query_norms, view.key_norms)
    )
    bounds = np.outer(query, key) / (2 * view.query_norms.shape[-1]) ** 0.5

    def column(values: np.ndarray, back: int) -> list[float | None]:
        at = np.searchsorted(
            view.positions, table
        )  # the token before, which the view has too, is at one less
        return [
            None if i < back else float(value)
            for i, value in zip(table, values[at, at - back], strict=True)
        ]

    return {
        "positions": list(table),
        "tokens": [names[i] for i in table],
        "upper_bound": column(bounds, 0),
        "diagonal": column(logits, 0),
        "previous_upper_bound": column(bounds, 1),
        "previous_token": column(logits, 1),
    }

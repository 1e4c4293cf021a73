"""Scores and names every head, and computes the paper's tables of chosen heads.

Axes: N query heads, K key/value heads, P pairs.
"""

from operator import itemgetter

import numpy as np

from prope.analysis.channels import by_query_head, strengths
from prope.analysis.measures import FROM, Measures, Scoring, View
from prope.spec.layers import Layer

MOSTLY = 0.5  # share of the weight at which a head is named by where it attends
SHARP = 0.5  # share of the largest entropy below which a head is named semantic
TARGETS = ("diagonal", "previous_token", "first_token")
SCORES = (*TARGETS, "entropy", "distance", "overlap_without_rotation")


def score_heads(
    layer: Layer, measures: Measures, scoring: Scoring, after: np.ndarray
) -> list[dict]:
    """Computes a record for every head of a layer.

    It has its scores (`Measures`), and

    head_of                 the smaller of its weights on the token before, at queries after the
                            token of --head_of, and on the first token elsewhere (Figure 7); None
                            without it. `after` [B, T] is that of `choices.find_after`
    high_frequency_share    share of the fastest quarter of the pairs in what all can add to logits
                            (`strengths`), as far as they are rotated: at wavelength 10,000 those of
                            0.1 radians a token and more, at 1,000,000 those of 0.03
    positional              the larger of diagonal and previous_token
    kind                    "diagonal", "previous_token" or "first_token", where more than half of
                            the weight goes there; "semantic": none of these, but sharp, and more
                            than half of the attention is the same without any rotation, so that it
                            depends on what tokens are; otherwise ""
    """
    strength = strengths(measures, scoring)
    quarter = strength.shape[1] // 4
    rotates = by_query_head(layer.frequencies > 0, strength)
    fast = (strength * rotates)[:, :quarter].sum(axis=1)
    total = strength.sum(axis=1)
    fast_share = fast / np.maximum(total, 1e-30)
    head_of = [None] * len(strength)
    counted = after[:, FROM:]
    if counted.any():
        num_queries = max(scoring.reach(after.shape[1]) - FROM, 1)
        see_first = counted[:, :num_queries]
        after_token = measures.after_token / counted.mean()
        elsewhere = measures.elsewhere / max(1 - see_first.mean(), 1e-30)
        head_of = np.minimum(after_token, elsewhere).tolist()
    records = []
    for head in range(len(strength)):
        record = {"layer": layer.number, "head": head}
        for name in SCORES:
            record[name] = float(getattr(measures, name)[head])
        record["high_frequency_share"] = float(fast_share[head])
        record["head_of"] = head_of[head]
        record["positional"] = max(record["diagonal"], record["previous_token"])
        record["kind"] = _name_kind(record)
        records.append(record)
    return records


def _name_kind(scores: dict) -> str:
    target = max(TARGETS, key=scores.get)
    if scores[target] > MOSTLY:
        return target
    is_semantic = scores["entropy"] < SHARP and scores["overlap_without_rotation"] > MOSTLY
    return "semantic" if is_semantic else ""


def rank_correlation(run: dict, draws: int = 9999) -> dict | None:
    """Computes Spearman's correlation of high_frequency_share and positional.

    It is None where it is undefined. The paper says that positional heads are those that use the
    highest frequencies: then it is near 1. Heads that share keys are not independent, so the
    p-value is that of a permutation test that moves the heads of a key together; with its `draws`
    it is at least 1 / (draws + 1).

    `run` is an analysis, of which the heads, in the order of their layers, and the layers' norms
    are read.
    """
    from scipy import stats

    names = ("high_frequency_share", "positional")
    ranks = stats.rankdata([[head[name] for head in run["heads"]] for name in names], axis=1)
    count = len(run["heads"])
    is_constant = ranks.std(axis=1) == 0
    if count < 3 or is_constant.any():
        return None
    shares, scores = stats.zscore(ranks, axis=1)
    rho = float(shares @ scores / count)
    by_chance = permute_by_key(run["layers"], shares, draws) @ scores / count
    extreme = (np.abs(by_chance) >= abs(rho) - 1e-9).sum()
    return {"rho": rho, "p_value": float((1 + extreme) / (1 + draws)), "heads": count}


def permute_by_key(layers: list[dict], values: np.ndarray, draws: int) -> np.ndarray:
    """Permutes values of a run's heads, those of one key together: [draws, heads].

    The heads of a key are a block, exchanged with blocks of its size, also of other layers.
    """
    rng = np.random.default_rng(0)
    heads_per_key = []
    for layer in layers:
        N = len(layer["query_norms"])
        heads_per_key += [N // len(layer["key_norms"])] * N
    permuted = np.empty((draws, len(values)))
    for size in dict.fromkeys(heads_per_key):
        has_size = np.array(heads_per_key) == size
        blocks = values[has_size].reshape(-1, size)
        orders = rng.random((draws, len(blocks))).argsort(axis=1)
        permuted[:, has_size] = blocks[orders].reshape(draws, -1)
    return permuted


def strongest(
    heads: list[dict], paper: bool = False, any_kind: bool = False
) -> dict[tuple[int, int], str]:
    """Chooses three heads by head_of, or five by position, or for the paper one and these five.

    Heads by position are of that kind, unless for the paper or of `any_kind`. Returns
    {(layer, head): score}.
    """
    any_kind = any_kind or paper
    counts = {"diagonal": 2, "previous_token": 2, "first_token": 1}
    if heads[0]["head_of"] is not None:
        counts = {"head_of": 1} | counts if paper else {"head_of": 3}
    chosen = {}
    for score, count in counts.items():
        every = any_kind or score == "head_of"
        fitting = [head for head in heads if every or head["kind"] == score]
        fitting.sort(key=itemgetter(score), reverse=True)
        places = [(head["layer"], head["head"]) for head in fitting]
        new = [place for place in places if place not in chosen]
        chosen |= dict.fromkeys(new[:count], score)
    return chosen


def show_head(
    view: View, scoring: Scoring, head: int, window: list[int], table: list[int], names: list[str]
) -> dict:
    """Collects what the page shows of a head, at positions that the view has.

    map         weights [t, t] of the window's queries on its keys (Figures 5, 12, 13)
    logits      the same before the softmax (Figure 9)
    query_norms, key_norms      of every pair, by token [t, P] (Figures 6, 7)
    table       `bounds_table`
    """
    rows = np.searchsorted(view.positions, window)
    square = np.ix_(rows, rows)
    return {
        "map": view.weights[head][square].tolist(),
        "logits": view.logits[head][square].tolist(),
        "query_norms": view.query_norms[head][rows].tolist(),
        "key_norms": view.key_norms[head][rows].tolist(),
        "table": bounds_table(view, scoring, head, table, names),
    }


def bounds_table(
    view: View, scoring: Scoring, head: int, table: list[int], names: list[str]
) -> dict:
    """Compares logits of tokens with their bounds |q_i| |k_j| / sqrt(H) (Tables 3 to 5).

    Bounds have the layer's own scale in place of 1 / sqrt(H), and its cap.

    Returns for every token i of the positions `table`: `upper_bound` of the logit to itself, that
    logit (`diagonal`), and the same of the token before, `previous_upper_bound` and
    `previous_token`, which the first token does not have. `names` are those of all tokens of the
    sequence.
    """
    query_norms = view.query_norms[head].astype(np.float64)
    key_norms = view.key_norms[head].astype(np.float64)
    query_norm = np.linalg.norm(query_norms, axis=-1)
    key_norm = np.linalg.norm(key_norms, axis=-1)
    bounds = scoring.scale * np.outer(query_norm, key_norm)
    if scoring.cap is not None:
        bounds = scoring.cap * np.tanh(bounds / scoring.cap)
    logits = view.logits[head].astype(np.float64)
    rows = np.searchsorted(view.positions, table)

    def previous(values):
        # The view has the token before, so it is in the column before.
        column = values[rows, rows - 1].tolist()
        if table[0] == 0:
            column[0] = None
        return column

    return {
        "positions": list(table),
        "tokens": [names[position] for position in table],
        "upper_bound": bounds[rows, rows].tolist(),
        "diagonal": logits[rows, rows].tolist(),
        "previous_upper_bound": previous(bounds),
        "previous_token": previous(logits),
    }

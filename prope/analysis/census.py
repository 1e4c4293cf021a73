"""Every head with its scores and what it is, and the tables of the paper that take chosen heads.

Axes: N query heads, K key/value heads, P pairs.
"""

import numpy as np
from scipy import stats

from prope.analysis.channels import strengths
from prope.analysis.measures import Measures, Opening

MOSTLY = 0.5  # of the weight, for a head to be called by where it looks
SHARP = 0.5  # of the greatest entropy: less, for a head to be called semantic
TABLE = 8  # tokens in a table: the first one and seven more, as in the paper's

SCORES = ("diagonal", "previous_token", "first_token", "entropy", "distance", "unturned_overlap")


def heads_of(layer: int, turned: int, measures: Measures, head_dim: int) -> list[dict]:
    """A record for every head of a layer: its scores (`Measures`), and

    high_frequency_share    how much of what its pairs can add to logits (`strengths`) the fastest quarter of the pairs
                            has, as far as they are turned: at wavelength 10,000 those of 0.1 radians a token and more
    positional              the larger of diagonal and previous_token
    kind                    "diagonal", "previous_token" or "first_token", where more than half of the weight goes
                            there; "semantic": none of these, but sharp, and more than half of the attention is the same
                            without any rotation, so that it goes by what tokens are; otherwise ""
    """
    strength = strengths(measures, head_dim)
    fast = strength[:, : min(strength.shape[1] // 4, turned)].sum(axis=1) / np.maximum(strength.sum(axis=1), 1e-30)
    records = []
    for head in range(len(strength)):
        scores = {name: float(getattr(measures, name)[head]) for name in SCORES}
        record = {"layer": layer, "head": head, **scores, "high_frequency_share": float(fast[head])}
        record["positional"] = max(scores["diagonal"], scores["previous_token"])
        records.append(record | {"kind": kind_of(scores)})
    return records


def kind_of(scores: dict) -> str:
    """What a head with these scores is called; see `heads_of`."""
    place = max(("diagonal", "previous_token", "first_token"), key=scores.get)
    if scores[place] > MOSTLY:
        return place
    return "semantic" if scores["entropy"] < SHARP and scores["unturned_overlap"] > MOSTLY else ""


def rank_correlation(heads: list[dict]) -> dict | None:
    """Spearman's of high_frequency_share and positional over all heads, with its p-value; None where it is undefined.

    The paper says that positional heads are those that use the highest frequencies: then it is near 1.
    """
    shares, scores = ([head[name] for head in heads] for name in ("high_frequency_share", "positional"))
    if len(heads) < 3 or len(set(shares)) == 1 or len(set(scores)) == 1:
        return None
    found = stats.spearmanr(shares, scores)
    return {"rho": float(found.statistic), "p_value": float(found.pvalue), "heads": len(heads)}


def strongest(heads: list[dict]) -> list[tuple[int, int, str]]:
    """(layer, head, score that it leads in): two diagonal, two previous-token and a first-token one; no head twice."""
    chosen: dict[tuple[int, int], str] = {}
    for score, count in (("diagonal", 2), ("previous_token", 2), ("first_token", 1)):
        free = [head for head in heads if (head["layer"], head["head"]) not in chosen]
        for head in sorted(free, key=lambda head: -head[score])[:count]:
            chosen[head["layer"], head["head"]] = score
    return [(*place, score) for place, score in chosen.items()]


def table(opening: Opening, head: int, head_dim: int, tokens: list[str]) -> dict:
    """The paper's Tables 3 to 5 for one head: how near its logits come to |q_i| |k_j| / sqrt(H), for the first tokens.

    Returns:
      For every token i: `upper_bound` of the logit to itself, that logit (`diagonal`), and the same of the token
      before, `previous_upper_bound` and `previous_token`, which the first token does not have.
    """
    logits = np.asarray(opening.logits[head], np.float64)
    query, key = (np.asarray(norms[head], np.float64) for norms in (opening.query_norms, opening.key_norms))
    scale = head_dim**-0.5
    places = range(min(TABLE, len(logits)))
    return {
        "tokens": tokens[: len(places)],
        "upper_bound": [float(scale * query[i] * key[i]) for i in places],
        "diagonal": [float(logits[i, i]) for i in places],
        "previous_upper_bound": [None, *(float(scale * query[i] * key[i - 1]) for i in places[1:])],
        "previous_token": [None, *(float(logits[i, i - 1]) for i in places[1:])],
    }

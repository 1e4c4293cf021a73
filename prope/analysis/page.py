"""Writes the page of one analysis: W/analysis/index.html."""

import collections
import pathlib

from prope.analysis.pictures import KINDS, pictures
from prope.html import page


def write(folder: pathlib.Path, analysis: dict) -> pathlib.Path:
    """Writes index.html and the pictures into a folder; returns the page's path."""
    run = analysis["workdir"].rstrip("/").split("/")[-1]
    drawn = pictures(analysis)
    return page.write(folder, "analysis", drawn, run=run, lead=lead(analysis), a=analysis, kinds=KINDS)


def lead(analysis: dict) -> str:
    """The census in two sentences."""
    counts = collections.Counter(head["kind"] for head in analysis["heads"])
    named = [f"{counts[kind]} {words}" for kind, words in KINDS.items() if kind and counts[kind]]
    text = f"Of {len(analysis['heads'])} heads: {', '.join(named) or 'none of a kind that the census names'}."
    correlation = analysis["rank_correlation"]
    if correlation is None:
        return text
    chance = "" if correlation["p_value"] < 0.05 else ", which may be chance"
    return (
        f"{text} The more positional a head is, the {'more' if correlation['rho'] > 0 else 'less'} it uses the fastest "
        f"quarter of the frequencies: rank correlation {correlation['rho']:.2f} (p-value "
        f"{correlation['p_value']:.2g}){chance}."
    )

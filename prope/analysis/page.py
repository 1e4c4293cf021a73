"""Writes the page of one analysis: W/analysis/index.html."""

import collections
import pathlib

from prope.analysis.pictures import KINDS, name_of, pictures
from prope.html import page
from prope.html.page import Table, plus_minus, tag

FOOT = (
    "A pair is two lanes of a head that rotate together; pair 0 rotates by one radian a token, the last one hardly at "
    "all. All weights are means over queries from the third token on. Figures and tables are those of Barbero et al. "
    "(ICLR 2025). Every number is in analysis.json."
)


def write(folder: pathlib.Path, analysis: dict) -> pathlib.Path:
    """Writes index.html and the pictures into a folder; returns the page's path."""
    tables = {
        "heads": [bounds_table(head) for head in analysis["shown"]],
        "census": [census_table(analysis)],
        "channels": [channel_table(analysis)],
    }
    sections = {picture.title: [picture, *tables.get(picture.name, [])] for picture in pictures(analysis)}
    title = f"What the heads do: {analysis['workdir'].rstrip('/').split('/')[-1]}"
    return page.write(folder, title, lead(analysis), about(analysis), sections, FOOT, "python -m prope.analyze")


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


def about(analysis: dict) -> str:
    """The checkpoint and the text that were analysed."""
    loss = f"loss {analysis['loss']['loss']:.4f} nats per token. " if analysis["loss"] else ""
    return (
        f"p = {analysis['rope_percentage']}: {analysis['rotated_pairs']} of {analysis['head_dim'] // 2} pairs rotate; "
        f"wavelength {analysis['max_wavelength']:,.0f}; step {analysis['step']:,}. Text: {analysis['sequences']} × "
        f"{analysis['seq_len']} tokens of {analysis['source']}; {loss}Took {analysis['seconds']:.0f} s on "
        f"{analysis['device']}."
    )


def census_table(analysis: dict) -> Table:
    """Scores of every head, folded away where there are many."""
    names = ["diagonal", "previous_token", "first_token", "entropy", "unturned_overlap", "high_frequency_share"]
    heads = sorted(analysis["heads"], key=lambda head: -head["positional"])
    rows = [
        [name_of(head), KINDS[head["kind"]], *(f"{head[name]:.3f}" for name in names), f"{head['distance']:.1f}"]
        for head in heads
    ]
    return Table(
        "Every head, the most positional first; entropy 1 is equal weights, distance is in tokens.",
        ["head", "kind", "diagonal", "previous token", "first token", "entropy", "overlap without rotation",
         "high-frequency share", "distance"],
        rows,
        text=[1],
        best=[i for i, head in enumerate(heads) if head["kind"]],
        folded=f"All {len(rows)} heads" if len(rows) > 16 else "",
    )  # fmt: skip


def bounds_table(head: dict) -> Table:
    """The paper's Tables 3 to 5, for one head."""
    labels = {
        "upper_bound": "upper bound", "diagonal": "diagonal", "previous_upper_bound": "upper bound, previous token",
        "previous_token": "previous token",
    }  # fmt: skip
    table = head["table"]
    caption = f"Head {name_of(head)}: logits and their Cauchy–Schwarz bounds |q| |k| / √H, for the first tokens."
    rows = [[label, *(plus_minus(value, form=".2f") for value in table[name])] for name, label in labels.items()]
    return Table(caption, ["token", *(tag("code", token) for token in table["tokens"])], rows)


def channel_table(analysis: dict) -> Table:
    """Norms and effects of every semantic channel."""

    def change(ablation: dict | None) -> str:
        return plus_minus(ablation and ablation["difference"], ablation and ablation["stderr"], "+.4f")

    rows = [
        [f"{name_of(c)}, {c['pair']}", f"{c['frequency']:.2g}" if c["frequency"] else "not rotated",
         f"{c['largest_rotation']:.2f}", f"{100 * c['share']:.1f} %", f"{c['query_norm']:.2f}", f"{c['key_norm']:.2f}",
         f"{c['to_first']:+.2f}", f"{c['to_others']:+.2f}", change(c["stopped"]), change(c["removed"])]
        for c in analysis["channels"]
    ]  # fmt: skip
    head = ["head, pair", "radians a token", "largest rotation", "share of the head’s strength", "|q|", "|k|"]
    head += ["to first", "to others", "loss, stopped", "loss, removed"]
    length = analysis["seq_len"]
    caption = f"The strongest channels; the largest rotation is that between the ends of {length} tokens, in radians."
    return Table(caption, head, rows)

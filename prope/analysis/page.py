"""The page of one analysis: W/analysis/index.html."""

import collections
import pathlib

from prope.analysis.pictures import KINDS, name_of, pictures
from prope.html.page import document, e, figures, html_table, section

FOOT = """<p>A pair is two lanes of a head that rotate together; pair 0 turns by one radian a token, the last one hardly
at all. All weights are means over queries from the third token on. Figures and tables are those of Barbero et al. (ICLR
2025). Made by <code>python -m prope.analyze</code>, which wrote every number to analysis.json.</p>
"""


def write(folder: pathlib.Path, analysis: dict) -> pathlib.Path:
    """Writes index.html and the pictures into an existing folder; returns the page's path."""
    drawn = pictures(analysis)
    shown = figures(folder, drawn)
    tables = "".join(table(head) for head in analysis["shown"])
    extra = {"heads": tables, "census": census_table(analysis), "channels": channel_table(analysis)}
    parts = [section(picture.title, shown[picture.name], extra.get(picture.name, "")) for picture in drawn]
    title = f"What the heads do: {analysis['workdir'].rstrip('/').split('/')[-1]}"
    head = f'<h1>{e(title)}</h1>\n<p class="lead">{e(lead(analysis))}</p>\n<p class="soft">{e(about(analysis))}</p>\n'
    output = folder / "index.html"
    output.write_text(document(title, head, parts, FOOT))
    return output


def lead(analysis: dict) -> str:
    """What was found, in two sentences."""
    counts = collections.Counter(head["kind"] for head in analysis["heads"])
    named = [f"{counts[kind]} {words}" for kind, words in KINDS.items() if kind and counts[kind]]
    said = f"Of {len(analysis['heads'])} heads: " + (", ".join(named) or "none of a kind that the census names") + "."
    found = analysis["rank_correlation"]
    if found is None:
        return said
    sure = "" if found["p_value"] < 0.05 else ", which may be chance"
    less = "more" if found["rho"] > 0 else "less"
    return (
        f"{said} The more positional a head is, the {less} it uses the fastest quarter of the frequencies: rank "
        f"correlation {found['rho']:.2f} (p-value {found['p_value']:.2g}){sure}."
    )


def about(analysis: dict) -> str:
    """What was analysed, on what."""
    loss = analysis["loss"]
    said = f"loss {loss['loss']:.4f} nats per token. " if loss else ""
    return (
        f"p = {analysis['rope_percentage']}, turning {analysis['rotated_pairs']} of {analysis['head_dim'] // 2} pairs; "
        f"wavelength {analysis['max_wavelength']:,.0f}; step {analysis['step']:,}. Read: {analysis['sequences']} × "
        f"{analysis['seq_len']} tokens of {analysis['source']}; {said}Took {analysis['seconds']:.0f} s on "
        f"{analysis['device']}."
    )


def census_table(analysis: dict) -> str:
    """Every head, folded away where there are many."""
    names = ["diagonal", "previous_token", "first_token", "entropy", "unturned_overlap", "high_frequency_share"]
    rows = []
    for head in sorted(analysis["heads"], key=lambda head: -head["positional"]):
        scores = [f"{head[name]:.3f}" for name in names]
        rows.append(
            (
                "best" if head["kind"] else "",
                [name_of(head), e(KINDS[head["kind"]]), *scores, f"{head['distance']:.1f}"],
            )
        )
    head = ["head", "kind", "diagonal", "previous token", "first token", "entropy", "overlap without rotation"]
    head += ["high-frequency share", "distance"]
    made = html_table(
        "Every head, the most positional first; entropy 1 is equal weights, distance is in tokens.", head, rows, [1]
    )
    if len(rows) <= 16:
        return made
    return f"<details><summary>All {len(rows)} heads</summary>\n{made}</details>\n"


def table(head: dict) -> str:
    """The paper's Tables 3 to 5, for one head."""
    found = head["table"]
    words = {
        "upper_bound": "upper bound", "diagonal": "diagonal", "previous_upper_bound": "upper bound, previous token",
        "previous_token": "previous token",
    }  # fmt: skip
    rows = [
        ("", [label, *("–" if value is None else f"{value:.2f}" for value in found[name])])
        for name, label in words.items()
    ]
    caption = f"Head {name_of(head)}: logits and their Cauchy–Schwarz bounds |q| |k| / √H, for the first tokens."
    return html_table(caption, ["token", *(f"<code>{e(token)}</code>" for token in found["tokens"])], rows)


def channel_table(analysis: dict) -> str:
    """Every channel in numbers."""

    def change(found: dict | None) -> str:
        if found is None:
            return "–"
        error = "" if found["stderr"] is None else f" <small>± {found['stderr']:.4f}</small>"
        return f"{found['difference']:+.4f}{error}"

    rows = [
        ("", [f"{name_of(c)}, {c['pair']}", f"{c['frequency']:.2g}" if c["frequency"] else "not turned",
              f"{c['largest_rotation']:.2f}", f"{100 * c['share']:.1f} %", f"{c['query_norm']:.2f}",
              f"{c['key_norm']:.2f}",
              f"{c['to_first']:+.2f}", f"{c['to_others']:+.2f}", change(c["stopped"]), change(c["removed"])])
        for c in analysis["channels"]
    ]  # fmt: skip
    head = ["head, pair", "radians a token", "largest rotation", "share of the head’s strength", "|q|", "|k|"]
    head += ["to first", "to others", "loss, stopped", "loss, removed"]
    length = analysis["seq_len"]
    caption = f"The strongest channels; the largest rotation is that between the ends of {length} tokens, in radians."
    return html_table(caption, head, rows) if rows else ""

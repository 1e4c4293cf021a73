"""A page of HTML that holds all it shows, asks for nothing, and can be read on any ground, in print or aloud."""

import base64
import html
import pathlib
from collections.abc import Iterable

from prope.html.drawing import THEMES, Picture

STYLE = """
:root { color-scheme: light dark; --ground: #f6f8fa; --card: #ffffff; --text: #24292f; --soft: #57606a;
  --line: #d8dee4; --mark: #0b6e5f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --card: #161b22; --text: #d4dae1; --soft: #9aa4b0;
  --line: #30363d; --mark: #4fd1b5; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 1rem/1.55 system-ui, sans-serif; }
main, header, footer { max-width: 70rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 0 0 .75rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1.25rem;
  margin: 1.25rem 0; }
p { margin: .5rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.soft, small { color: var(--soft); }
.good { color: var(--mark); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
caption { text-align: left; color: var(--soft); padding-bottom: .5rem; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom-width: 2px; vertical-align: bottom; white-space: normal; }
th:first-child, td.text, th.text { text-align: left; }
.prose { display: inline-block; white-space: normal; min-width: 16rem; margin: 0; padding: 0; vertical-align: top; }
ul.prose { list-style: none; min-width: 24rem; }
tr:has(.prose) > * { vertical-align: top; }
tr.best { background: color-mix(in srgb, var(--mark) 12%, transparent); }
figure { margin: 0; }
img { display: block; width: 100%; min-width: 34rem; height: auto; }
figcaption { color: var(--soft); padding-top: .5rem; max-width: 46rem; }
code { font-family: ui-monospace, monospace; font-size: .92em; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
footer { color: var(--soft); padding-bottom: 2.5rem; font-size: .9rem; }
@media print { section { break-inside: avoid; } }
"""


def document(title: str, head: str, sections: Iterable[str], foot: str) -> str:
    """The whole page; its content security policy forbids it every request."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{e(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header>
{head}</header>
<main>
{"".join(sections)}</main>
<footer>{foot}</footer>
</body>
</html>
"""


def e(text) -> str:
    """Text as it stands in HTML."""
    return html.escape(str(text))


def section(title: str, *parts: str) -> str:
    """A part of the page; nothing where it would be empty."""
    if not any(parts):
        return ""
    name = "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{e(title)}</h2>\n{"".join(parts)}</section>\n'


def figure(title: str, alt: str, caption: str, light: bytes, dark: bytes) -> str:
    """A picture in PNG, in the colours of the reader's screen; `alt` says what it shows."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (light, dark))
    return (
        f'<figure><div class="scroll" tabindex="0" role="group" aria-label="{e(title)}"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}"><img src="{light}" alt="{e(alt)}">'
        f"</picture></div><figcaption>{e(caption)}</figcaption></figure>\n"
    )


def figures(folder: pathlib.Path, drawn: Iterable[Picture]) -> dict[str, str]:
    """Pictures by name, as they stand in the page; each is also written to `folder` as PNG, for papers and slides."""
    made = {}
    for picture in drawn:
        images = {theme: picture.png(theme) for theme in THEMES}
        (folder / f"{picture.name}.png").write_bytes(images["light"])
        made[picture.name] = figure(picture.title, picture.alt, picture.caption, **images)
    return made


def html_table(caption: str, head: list[str], rows: Iterable[tuple[str, list[str]]], text: Iterable[int] = ()) -> str:
    """A table of ready cells; the first of a row is its heading. Columns in `text` stand to the left.

    Args:
      rows: (class of the row, or "", and its cells).
    """

    def cell(i: int, content: str, scope: str) -> str:
        kind = ' class="text"' if i in text else ""
        if scope == "row" and i:
            return f"<td{kind}>{content}</td>"
        return f'<th scope="{scope}"{kind}>{content}</th>'

    def line(cells: list[str], scope: str, kind: str = "") -> str:
        made = "".join(cell(i, content, scope) for i, content in enumerate(cells))
        return f'<tr class="{kind}">{made}</tr>\n' if kind else f"<tr>{made}</tr>\n"

    body = "".join(line(cells, "row", kind) for kind, cells in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{e(caption)}"><table>'
        f"<caption>{e(caption)}</caption>\n<thead>{line(head, 'col')}</thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )

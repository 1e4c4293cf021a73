"""Writes HTML pages that hold all they show: readable without a network, in light and dark, in print and aloud."""

import dataclasses
import pathlib
from collections.abc import Sequence

from markupsafe import Markup

from prope.html.drawing import Picture, palette


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page; cells are text, or `Markup` as `tag` makes it."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence]  # the first cell of a row is its heading
    text: Sequence[int] = ()  # columns that are aligned to the left
    best: Sequence[int] = ()  # rows that are marked
    folded: str = ""  # the line under which the table is folded away
    notes: Sequence[str] = ()  # paragraphs below it


def tag(name: str, content, kind: str = "") -> Markup:
    """An HTML element around escaped content, with a class of the style sheet."""
    return Markup('<{0} class="{1}">{2}</{0}>' if kind else "<{0}>{2}</{0}>").format(name, kind, content)


def plus_minus(value: float | None, error: float | None = None, form: str = ".4f") -> str | Markup:
    """A number and, small beside it, its error; a dash for None."""
    if value is None:
        return "–"
    number = f"{value:{form}}".replace("-", "−")  # a sign at which no line breaks
    return number if error is None else f"{number} " + tag("small", f"± {error:.4f}")


def write(
    folder: pathlib.Path, title: str, lead: str, about: str, sections: dict[str, list], foot: str, command: str
) -> pathlib.Path:
    """Writes index.html and its pictures as PNG files into a folder; returns the page's path.

    Args:
      folder: made where it is missing.
      title: heading of the page.
      lead: the result, in a sentence.
      about: what the result is of.
      sections: by heading, `Picture`, `Table` or text for a paragraph; empty sections are left out.
      foot: sentences for the footer.
      command: what wrote the page.
    """
    import jinja2

    folder.mkdir(parents=True, exist_ok=True)

    def drawn(block):
        if not isinstance(block, Picture):
            return block
        png, svg = block.render()
        (folder / f"{block.name}.png").write_bytes(png)
        return {"title": block.title, "alt": block.alt, "caption": block.caption, "svg": Markup(svg)}

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("page.html.j2").render(
        title=title, lead=lead, about=about, foot=foot, command=command, palette=palette(),
        sections=[(name, list(map(drawn, blocks))) for name, blocks in sections.items() if blocks],
    )  # fmt: skip
    output = folder / "index.html"
    output.write_text(page)
    return output

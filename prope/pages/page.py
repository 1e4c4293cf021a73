"""Writes HTML pages that hold all they show: readable without a network, in print and aloud."""

import base64
import itertools
import math
import os
import pathlib
import re

import jinja2
from etils import epath
from markupsafe import Markup

from prope.pages.drawing import PHONE, Picture, escape_invisible
from prope.runtime.files import absolute, is_url

_FOLDER = pathlib.Path(__file__).parent


def write(folder: epath.Path, template: str, pictures: list[Picture], **data) -> epath.Path:
    """Writes index.html and its pictures as PNG files into a folder; returns the page's path.

    The template of this name in `prope/pages/` gets `pictures`, by name, and `data`, both escaped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for picture in pictures:
        png = picture.render()
        (folder / picture.file_name).write_bytes(png)
        drawn[picture.name] = vars(picture) | {"png": Markup(base64.b64encode(png).decode())}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    environment.filters["number"] = number
    environment.globals["phone"] = PHONE
    html = environment.get_template(f"{template}.html.j2").render(pictures=drawn, **data)
    output = folder / "index.html"
    output.write_text(_with_columns(_with_contents(html)), encoding="utf-8")
    return output


def _with_contents(html: str) -> str:
    """Puts links to the sections before the first of more than three.

    Sections of single heads, which have numbers in their addresses, are left out.
    """
    section = r'<section(?: id="[^"0-9]*")? aria-labelledby="([^"]*)">'
    heads = re.findall(rf"{section}\s*<h2[^>]*>(.*?)</h2>", html)
    if len(heads) <= 3:
        return html
    links = [f'<a href="#{target}">{title}</a>' for target, title in heads]
    contents = f'<nav aria-label="Contents">{" · ".join(links)}</nav>\n<section'
    return html.replace("<section", contents, 1)


def _with_columns(html: str) -> str:
    """Gives every cell the name of its column, which a phone shows beside it."""

    def name_cells(table):
        heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table[0])
        columns = itertools.cycle(re.sub("<.*?>", "", head) for head in heads)
        cell = '<td|<th scope="row"'
        return re.sub(cell, lambda start: f'{start[0]} data-column="{next(columns)}"', table[0])

    return re.sub("<table.*?</table>", name_cells, html, flags=re.DOTALL)


def _finalize(value):
    """Makes text visible that is not from a template; it is escaped for HTML after that."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escape_invisible(value)
    return value


def link_to(path: epath.Path, folder: epath.Path) -> str | None:
    """Returns the address of a page in one in `folder`; None if it is not there."""
    if is_url(path) != is_url(folder) or not path.exists():
        return None
    return os.path.relpath(absolute(path), absolute(folder))


def number(value: float | None, form: str = ".4f", error: float | None = None) -> str | Markup:
    """Formats a number and, small beside it, two digits of its error; a dash for None."""
    if value is None:
        return "–"
    if error is None:
        return _with_minus(f"{value:{form}}")
    digits = 4
    if error:
        digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    text = _with_minus(f"{value:{form.replace('.4f', f'.{digits}f')}}")
    return Markup("{} <small>± {:.{}f}</small>").format(text, error, digits)


def _with_minus(text: str) -> str:
    """Replaces hyphens by minus signs, at which no line breaks."""
    return text.replace("-", "−")

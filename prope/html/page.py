"""Writes HTML pages that hold all they show: readable without a network, in light and dark, in print and aloud."""

import base64
import hashlib
import math
import pathlib

from etils import epath
from markupsafe import Markup

from prope.html.drawing import Picture, palette


def write(folder: epath.Path, template: str, pictures: list[Picture], **data) -> epath.Path:
    """Writes index.html and its pictures as PNG files into a folder, made if missing; returns the page's path.

    The template of this name in `prope/html/` gets `pictures`, by name, and `data`, whose text is escaped.
    """
    import jinja2

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for picture in pictures:
        png, svg, maps = picture.render()
        (folder / f"{picture.name}.png").write_bytes(png)
        drawn[picture.name] = vars(picture) | {"svg": Markup(svg), "maps": maps}
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = number
    script = pathlib.Path(__file__).with_name("cells.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    script = Markup(script) if any(picture["maps"] for picture in drawn.values()) else ""
    environment.globals |= {"palette": palette(), "script": script, "digest": Markup(digest)}
    output = folder / "index.html"
    output.write_text(
        environment.get_template(f"{template}.html.j2").render(pictures=drawn, **data)
    )
    return output


def number(value: float | None, form: str = ".4f", error: float | None = None) -> str | Markup:
    """Formats a number and, small beside it, its error, of which two digits are shown; a dash for None."""
    if value is None:
        return "–"
    digits = min(4, max(0, 1 - math.floor(math.log10(error)))) if error else 4
    text = f"{value:{form if error is None else form.replace('.4f', f'.{digits}f')}}".replace(
        "-", "−"
    )  # unbreakable
    return (
        text if error is None else Markup("{} <small>± {:.{}f}</small>").format(text, error, digits)
    )

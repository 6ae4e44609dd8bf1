"""Pages of `packer`: Jinja templates inside the common HTML document."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from isobatch.common.html_page import page
from isobatch.common.visible_text import visible
from isobatch.packer.format_text import capitalised, counted, share_text, size_text

FOLDER = Path(__file__).parent


def render(
    name: str, title: str, *, sheets: Sequence[str] = (), style: str = "", **values: object
) -> str:
    """A page from NAME.html.j2 of this package, with these style sheets, or NAME.css.

    `style` is CSS in front of them.
    """
    body = _templates().get_template(f"{name}.html.j2").render(values)
    named = ("page", *(sheets or (name,)))
    rules = [(FOLDER / f"{sheet}.css").read_text("utf-8") for sheet in named]
    return page(title, body, style="".join([style, *rules]))


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "thousands": "{:,}".format,
        "percent": "{:.1%}".format,
        "share": share_text,
        "size": size_text,
        "visible": visible,
        "capitalised": capitalised,
        "counted": counted,
        "zip": zip,
    }
    return environment

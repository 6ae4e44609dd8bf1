"""Pages of `packer`: Jinja templates inside the common HTML document."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from isobatch.common.html_page import page
from isobatch.common.visible_text import visible
from isobatch.packer.format_text import capitalised, share_text, size_text

FOLDER = Path(__file__).parent


def render(name: str, title: str, *, style: str = "", **values: object) -> str:
    """A page from NAME.html.j2 and NAME.css of this package, with more CSS in `style`."""
    body = _templates().get_template(f"{name}.html.j2").render(values)
    sheets = [(FOLDER / f"{sheet}.css").read_text("utf-8") for sheet in ("page", name)]
    return page(title, body, style="".join([style, *sheets]))


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
    }
    return environment

"""Pages of `packer`: a Jinja template inside the common HTML document, printed in light colours."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from balance.html_page import page
from packer.format_text import capitalised, share_text, size_text, visible

STYLE = """
:root { --plain: #8a94a0; --random: #c8692c; --ours: #14776a; }
@media (prefers-color-scheme: dark) { :root { --plain: #89929c; --random: #e08a4f;
  --ours: #3db6a4; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #ccc;
  --card: #fff; --plain: #777; --random: #c8692c; --ours: #14776a; }
  section { break-inside: avoid; } }
body { max-width: 1120px; }
.note { border-left: 3px solid var(--random); padding-left: 10px; color: var(--ink); }
"""


def render(template: str, title: str, *, style: str = "", **values: object) -> str:
    """A page of `packer`: `template` is the path of its body's template under this package."""
    body = _templates().get_template(template).render(values)
    return page(title, body, style=STYLE + style)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
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

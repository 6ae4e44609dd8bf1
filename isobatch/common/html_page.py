"""The HTML document around reports; it needs no other file.

No scripts, no fonts, no links to elsewhere; colours follow the reader's light or dark mode.
"""

from html import escape
from pathlib import Path

from isobatch.common.visible_text import visible, visible_line

STYLE = (Path(__file__).parent / "page.css").read_text("utf-8")
"""Rules that every page shares; a page adds its own after them."""


def page(title: str, body: str, *, style: str = "") -> str:
    """A whole HTML document with this body; `style` holds rules of its own.

    Control characters of the title and the body are escapes: a browser would obey some of them.
    """
    title, body = visible_line(title), visible(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )

"""A group as a page: loads against the caps, text and thumbnails.

`group.html.j2` holds the text, `group.css` the looks; pictures are `data:` URIs inside the page.
"""

from pathlib import Path

from isobatch.packer.html_page import render
from isobatch.packer.inspect import terminal
from isobatch.packer.inspect.view import MOST_PIXELS, GroupView

NUMBERED_SHARE = 0.025
"""Least share of a load bar for a sample's part to show its number."""


def write_group_html(view: GroupView, path: Path) -> None:
    """Write the page of a group to `path`."""
    path.write_text(render_group(view), "utf-8")


def render_group(view: GroupView) -> str:
    """The page of a group: HTML that a browser shows without network and without scripts."""
    parts = [(sample.counts["seq_len"], sample.vision_load) for sample in view.samples]
    rows = zip(terminal.load_rows(view), zip(*parts, strict=True), strict=True)
    return render(
        "inspect/group",
        f"Isobatch group {view.group}",
        style=f":root {{ --thumbnail: {MOST_PIXELS}px; }}\n",
        view=view,
        loads=[(*row, loads) for row, loads in rows],
        numbered_share=NUMBERED_SHARE,
        texts=terminal,
    )

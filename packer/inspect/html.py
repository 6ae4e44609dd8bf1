"""A group as a page: its loads against the caps, and every sample with text and thumbnails.

Pure but for `write_group_html`; `group.html.j2` holds the text. Pictures are `data:` URIs, so the
page can be sent to someone as it is.
"""

from __future__ import annotations

from pathlib import Path

from packer.html_page import render
from packer.inspect import terminal
from packer.inspect._thumbnails import MOST_PIXELS
from packer.inspect.view import GroupView

NUMBERED_SHARE = 0.025
"""Least share of a load bar for a sample's part to show its number."""

STYLE = f"""
.load {{ display: grid; grid-template-columns: 130px 1fr 190px; gap: 12px; align-items: center;
  margin: 6px 0; }}
@media (max-width: 700px) {{ .load {{ grid-template-columns: 1fr auto; }}
  .load .bar {{ grid-column: 1 / 3; order: 3; }} }}
.load .bar {{ display: flex; height: 26px; border: 1px solid var(--line); border-radius: 4px;
  overflow: hidden; background: var(--card); }}
.load .bar span {{ background: var(--ours); color: var(--page); font-size: 11px; line-height: 26px;
  text-align: center; overflow: hidden; white-space: nowrap; border-right: 1px solid var(--page); }}
.load .figure {{ font-variant-numeric: tabular-nums; white-space: nowrap; text-align: right; }}
.sample {{ border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px 16px;
  margin-top: 16px; }}
.sample h2 {{ margin: 0; font-size: 16px; overflow-wrap: anywhere; }}
.sample h2 small {{ font-weight: 400; color: var(--soft); margin-left: 8px; }}
.images {{ display: flex; flex-wrap: wrap; gap: 14px; margin: 8px 0 12px; }}
figure {{ margin: 0; width: {MOST_PIXELS}px; font-size: 12px; line-height: 1.35;
  color: var(--soft); }}
figure .frame {{ height: {MOST_PIXELS}px; display: flex; align-items: center;
  justify-content: center; background: var(--card); border: 1px solid var(--line);
  border-radius: 4px; overflow: hidden; }}
figure .frame.broken {{ border: 1px dashed var(--random); color: var(--random); font-size: 13px; }}
figcaption {{ margin-top: 4px; overflow-wrap: anywhere; }}
figcaption b {{ color: var(--ink); }}
.problem {{ color: var(--random); }}
.content {{ background: var(--card); border-radius: 6px; padding: 10px 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, "DejaVu Sans Mono", monospace;
  color: var(--soft); max-height: 40em; overflow-y: auto; }}
@media print {{ .content {{ max-height: none; }} }}
.content .label, .legend {{ color: var(--ink);
  background: color-mix(in srgb, var(--ours) 24%, transparent); }}
.content .file {{ border: 1px solid var(--line); border-radius: 4px; padding: 0 5px;
  color: var(--random); background: var(--page); }}
.legend {{ padding: 0 4px; }}
"""


def write_group_html(view: GroupView, path: Path) -> None:
    """Write the page of a group to `path`."""
    path.write_text(render_group(view), "utf-8")


def render_group(view: GroupView) -> str:
    """The page of a group: HTML that a browser shows without network and without scripts."""
    parts = (
        [sample.counts["seq_len"] for sample in view.samples],
        [sample.vision_load for sample in view.samples],
    )
    rows = zip(terminal.load_rows(view), parts, strict=True)
    return render(
        "inspect/group.html.j2",
        f"Isobatch group {view.group}",
        style=STYLE,
        view=view,
        loads=[(*row, loads) for row, loads in rows],
        numbered_share=NUMBERED_SHARE,
        no_tokenizer=terminal.NO_TOKENIZER,
        group_title=terminal.group_title,
        group_text=terminal.group_text,
        sample_text=terminal.sample_text,
        image_text=terminal.image_text,
        file_text=terminal.file_text,
        ids_text=terminal.ids_text,
    )

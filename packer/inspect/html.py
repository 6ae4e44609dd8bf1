"""A group as one page that needs nothing else: loads against the caps, and every sample with its
text and thumbnails.

Pure but for `write_group_html`. Pictures are `data:` URIs, so the page can be sent to someone as it
is.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from packer.html_page import page
from packer.inspect._thumbnails import MOST_PIXELS
from packer.inspect.terminal import (
    NO_TOKENIZER,
    capitalised,
    file_text,
    group_text,
    group_title,
    ids_text,
    image_text,
    load_rows,
    sample_text,
    size_text,
    visible,
)
from packer.inspect.token_text import Kind, Piece
from packer.inspect.view import GroupView, ImageView, SampleView

NUMBERED_SHARE = 0.025
"""A sample's part of a load bar carries its number from this width on."""

STYLE = f"""
.load {{ display: grid; grid-template-columns: 130px 1fr 190px; gap: 12px; align-items: center; margin: 6px 0; }}
@media (max-width: 700px) {{ .load {{ grid-template-columns: 1fr auto; }}
  .load .room {{ grid-column: 1 / 3; order: 3; }} }}
.load .room {{ display: flex; height: 26px; border: 1px solid var(--line); border-radius: 4px; overflow: hidden;
  background: var(--card); }}
.load .room span {{ background: var(--ours); color: var(--page); font-size: 11px; line-height: 26px; text-align: center;
  overflow: hidden; white-space: nowrap; border-right: 1px solid var(--page); }}
.load .figure {{ font-variant-numeric: tabular-nums; white-space: nowrap; text-align: right; }}
.sample {{ border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px 16px; margin-top: 16px; }}
.sample h2 {{ margin: 0; font-size: 16px; overflow-wrap: anywhere; }}
.sample h2 small {{ font-weight: 400; color: var(--soft); margin-left: 8px; }}
.images {{ display: flex; flex-wrap: wrap; gap: 14px; margin: 8px 0 12px; }}
figure {{ margin: 0; width: {MOST_PIXELS}px; font-size: 12px; line-height: 1.35; color: var(--soft); }}
figure .frame {{ height: {MOST_PIXELS}px; display: flex; align-items: center; justify-content: center;
  background: var(--card); border: 1px solid var(--line); border-radius: 4px; overflow: hidden; }}
figure .frame.broken {{ border: 1px dashed var(--random); color: var(--random); font-size: 13px; }}
figcaption {{ margin-top: 4px; overflow-wrap: anywhere; }} figcaption b {{ color: var(--ink); }}
.problem {{ color: var(--random); }}
.content {{ background: var(--card); border-radius: 6px; padding: 10px 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; color: var(--soft);
  max-height: 40em; overflow-y: auto; }}
@media print {{ .content {{ max-height: none; }} }}
.content .label {{ color: var(--ink); background: color-mix(in srgb, var(--ours) 24%, transparent); }}
.content .file {{ border: 1px solid var(--line); border-radius: 4px; padding: 0 5px; color: var(--random);
  background: var(--page); }}
.legend {{ background: color-mix(in srgb, var(--ours) 24%, transparent); color: var(--ink); padding: 0 4px; }}
"""


def write_group_html(view: GroupView, path: Path) -> None:
    """Write the page of a group to `path`."""
    path.write_text(render_group(view), "utf-8")


def render_group(view: GroupView) -> str:
    """The page of a group: HTML that a browser shows without network and without scripts."""
    samples = [_sample(number, sample, view) for number, sample in enumerate(view.samples, start=1)]
    return page(f"Isobatch group {view.group}", [_head(view), *samples], style=STYLE)


def _head(view: GroupView) -> str:
    loads = [
        [sample.counts["seq_len"] for sample in view.samples],
        [sample.vision_load for sample in view.samples],
    ]
    bars = "".join(
        _load(name, used, cap, parts)
        for (name, used, cap), parts in zip(load_rows(view), loads, strict=True)
    )
    why = f"{escape(capitalised(view.why))}. " if view.why else ""
    note = "" if view.tokenizer else f'<p class="note">{escape(NO_TOKENIZER.strip())}</p>'
    return (
        f"<h1>{capitalised(group_title(view))}</h1>"
        f"<p>{why}{escape(view.shard)}, {size_text(view.num_bytes)}.</p>"
        f"{bars}<p>{escape(group_text(view))}. Each part of a bar is a sample.</p>"
        f'<p><span class="legend">Marked text</span> has a label, and so is learned.</p>{note}'
    )


def _load(name: str, used: int, cap: int, parts: list[int]) -> str:
    """A bar as wide as the cap, with a part for each sample."""
    spans = "".join(
        f'<span style="width:{part / cap:.4%}" title="sample {number}: {part:,}">'
        f"{number if part / cap >= NUMBERED_SHARE else ''}</span>"
        for number, part in enumerate(parts, start=1)
        if part
    )
    share = used / cap if cap else 0.0
    return (
        f'<div class="load"><b>{escape(name)}</b><div class="room">{spans}</div>'
        f'<div class="figure">{used:,} of {cap:,}, {share:.1%}</div></div>'
    )


def _sample(number: int, sample: SampleView, view: GroupView) -> str:
    images = "".join(_image(place, image) for place, image in enumerate(sample.images, start=1))
    clips = "".join(
        f"<p>Clip {place}: {seconds:.1f} s</p>"
        for place, seconds in enumerate(sample.audio_seconds, start=1)
    )
    text = "".join(map(_piece, sample.pieces))
    return (
        f'<section class="sample"><h2>{number}. {escape(visible(sample.sample_id))}'
        f"<small>{escape(visible(sample.source))}</small></h2>"
        f"<p>{escape(sample_text(sample, view.limits.unit))}</p>"
        f'{f"<div class=images>{images}</div>" if images else ""}{clips}<div class="content">{text}</div></section>'
    )


def _image(place: int, image: ImageView) -> str:
    if image.thumbnail is None:
        frame = '<div class="frame broken">no picture</div>'
    else:
        small = image.thumbnail
        size = f'width="{small.width}" height="{small.height}"'
        frame = f'<div class="frame"><img src="{small.uri}" {size} alt="image {place}"></div>'
    name = f"<br>{escape(visible(image.name))}" if image.name else ""
    problem = (
        f'<br><span class="problem">{escape(visible(image.problem))}</span>'
        if image.problem
        else ""
    )
    return f"<figure>{frame}<figcaption><b>{place}</b> {escape(image_text(image))}{name}{problem}</figcaption></figure>"


def _piece(piece: Piece) -> str:
    if piece.file is not None:
        return f'<span class="file">{escape(file_text(piece))}</span>'
    text = escape(ids_text(piece) if piece.text is None else visible(piece.text))
    return (
        f'<span class="label">{text}</span>' if piece.kind is Kind.label else f"<span>{text}</span>"
    )

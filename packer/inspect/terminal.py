"""A group as text for a terminal: its loads against the caps, then every sample.

Fits 100 columns. Text with a label is in brackets, which survive a pipe, and green where there are
colours. Long texts are cut in the middle, with a note; the page shows all.
"""

import json

from rich.console import Console
from rich.text import Text

from isobatch.common.consoles import foreign
from isobatch.common.visible_text import visible, visible_line
from isobatch.packer.format_text import capitalised, counted, size_text
from isobatch.packer.inspect.token_text import Piece, PieceKind
from isobatch.packer.inspect.view import GroupView, ImageView, SampleView

SHOWN_CHARACTERS, SHOWN_IDS = 400, 12
"""Most characters or ids of a piece."""
NEWLINE = "\u21b5"
BAR_WIDTH, INDENT = 40, 4
LEGEND = "\u27e6 \u27e7: text that has a label, and so is learned."
NO_TOKENIZER = "Token ids, because a build holds no tokenizer: give --tokenizer to see text."


def print_group(view: GroupView, console: Console) -> None:
    """Print a group; control characters of the data are printed as escapes."""
    why = f" ({foreign(view.why)})" if view.why else ""
    console.print(f"[bold]{group_title(view)}[/]{why}", highlight=False)
    console.print(f"{foreign(view.shard)}, {size_text(view.num_bytes)}", highlight=False)
    for label, used, cap in load_rows(view):
        console.print(f"{label:<15}{used:>9,} of {cap:>9,}  {_bar(used, cap)}", highlight=False)
    console.print(group_text(view), highlight=False)
    hint = "" if view.tokenizer else f" {NO_TOKENIZER}"
    console.print(f"[dim]{LEGEND}{hint}[/]", highlight=False)
    for number, sample in view.shown_samples:
        _print_sample(number, sample, view.limits.unit, console)


def group_title(view: GroupView) -> str:
    """Number of the group, and how many there are."""
    return f"group {view.group:,} of {view.num_groups:,}, counted from 0"


def load_rows(view: GroupView) -> list[tuple[str, int, int]]:
    """Loads that a cap counts: (name, used, cap)."""
    return [
        ("LLM tokens", view.counts["seq_len"], view.limits.max_seq_len),
        (capitalised(view.limits.unit), view.vision_load, view.limits.max_vision),
    ]


def group_text(view: GroupView) -> str:
    """The loads that no cap counts, in one line."""
    counts = view.counts
    other = counted(counts["num_image_patches"], "patches")
    if view.limits.vision_unit == "image_patches":
        other = counted(counts["num_vit_tokens"], "ViT tokens")
    number = counted(len(view.samples), "samples")
    return f"{number}; {_parts(counts)}, {counts['num_loss_tokens']:,} with a label; {other}"


def sample_text(sample: SampleView, unit: str) -> str:
    """The loads of a sample, in one line."""
    counts = sample.counts
    vision = f"; {counted(sample.vision_load, unit)}" if sample.vision_load else ""
    return f"{_parts(counts)}, {counts['num_loss_tokens']:,} with a label{vision}"


def image_text(image: ImageView) -> str:
    """Size, bytes and tokens of an image or a video, in one line."""
    size = "" if image.num_bytes is None else f", {size_text(image.num_bytes)}"
    patches = counted(image.num_patches, "patches")
    tokens = f"{patches}, {counted(image.num_tokens, 'LLM tokens')}"
    frames = f", {counted(image.num_frames, 'frames')}" if image.num_frames else ""
    frames += f" at {image.rate:.5g} per second" if image.rate else ""
    return f"{image.width} x {image.height}{frames}{size}: {tokens}"


def extra_text(name: str, value: object) -> str:
    """A kept column of a sample, in one line."""
    return f"{visible_line(name)}: {_cut(visible(json.dumps(value, ensure_ascii=False)))}"


def file_text(piece: Piece) -> str:
    """The text shown instead of a file's tokens."""
    return f"<{piece.kind} {(piece.file or 0) + 1} x {len(piece.input_ids):,}>"


def ids_text(piece: Piece, at_most: int | None = None) -> str:
    """The ids of a piece without text.

    >>> ids_text(Piece(kind=PieceKind.text, input_ids=(5, 6, 7)), 2)
    '[5 6 +1 more]'
    """
    shown = piece.input_ids[:at_most]
    more = len(piece.input_ids) - len(shown)
    return f"[{' '.join(map(str, shown))}{f' +{more:,} more' if more else ''}]"


def _print_sample(number: int, sample: SampleView, unit: str, console: Console) -> None:
    console.print()
    title = f"{number}  {visible_line(sample.sample_id)}", "bold"
    console.print(Text.assemble(title, f"  ({visible_line(sample.source)})"))
    _print_indented(Text(sample_text(sample, unit)), console)
    for name, value in sample.extras.items():
        _print_indented(Text(extra_text(name, value)), console)
    for place, image in enumerate(sample.images, start=1):
        name = f"  {visible_line(image.name)}" if image.name else ""
        about = f"{image.kind} {place}"
        _print_indented(Text(f"{about}: {image_text(image)}{name}"), console)
        if image.problem:
            _print_indented(Text(f"{about} {visible_line(image.problem)}", "bold red"), console)
    for place, seconds in enumerate(sample.audio_seconds, start=1):
        _print_indented(Text(f"clip {place}: {seconds:.1f} s"), console)
    content = Text()
    for piece in sample.pieces:
        content.append_text(_piece(piece))
    content.rstrip()
    _print_indented(content, console)


def _piece(piece: Piece) -> Text:
    if piece.file is not None:
        return Text(file_text(piece), "cyan")
    shown = ids_text(piece, SHOWN_IDS) if piece.text is None else visible(_cut(piece.text))
    if piece.kind is not PieceKind.label:
        return Text(shown, "dim")
    # learned too, and shown so, but the bracket belongs in front of it
    end = "\n" if shown.endswith("\n") else ""
    return Text(f"\u27e6{shown.removesuffix(end)}{NEWLINE if end else ''}\u27e7{end}", "green")


def _cut(text: str) -> str:
    """The text, or its ends and how much is left out between them."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    head, tail = SHOWN_CHARACTERS * 2 // 3, SHOWN_CHARACTERS // 3
    return f"{text[:head]} [... {len(text) - head - tail:,} more characters ...] {text[-tail:]}"


def _print_indented(text: Text, console: Console) -> None:
    for line in text.wrap(console, max(console.width - INDENT, 20)):
        line.rstrip()
        console.print(Text(" " * INDENT) + line, soft_wrap=True)


def _bar(used: int, cap: int) -> str:
    share = used / cap if cap else 0.0
    full = min(round(share * BAR_WIDTH), BAR_WIDTH)
    return f"{share:>6.1%}  {'█' * full}{'░' * (BAR_WIDTH - full)}"


def _parts(counts: dict[str, int]) -> str:
    """The tokens by modality, without the modalities that have none.

    >>> _parts({"seq_len": 7, "num_image_tokens": 4, "num_text_tokens": 3, "num_audio_tokens": 0})
    '7 tokens = 4 image + 3 text'
    """
    kinds = [(counts[f"num_{kind}_tokens"], kind) for kind in ("image", "text", "audio")]
    parts = " + ".join(f"{number:,} {kind}" for number, kind in kinds if number)
    return f"{counted(counts['seq_len'], 'tokens')} = {parts}"

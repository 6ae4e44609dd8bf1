"""Where programs print: results and messages, with foreign text made safe.

The one place through which text reaches a terminal: whatever a console renders has its control
characters as escapes (`visible_text`), the colours are rich's own. Markup is the caller's: foreign
text inside of it goes through `foreign`, since rich drops some control characters.
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from isobatch.common.visible_text import visible, visible_line

PIPE_WIDTH = 10_000
"""Columns of results that go to a file or another program: lines are not wrapped there."""


class SafeConsole(Console):
    """A console of rich that shows control characters as escapes; `:names:` are no pictures.

    With `is_log` it prints for machines: each line is a JSON object, `{"event": ..., ...}`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)
        self.is_log = False

    def print(self, *texts: Any, **options: Any) -> None:
        """Print for people; in a log, the events `note` with the same texts."""
        if not self.is_log:
            super().print(*texts, **options)
        for text in texts if self.is_log else ():
            has_markup = options.get("markup", True)
            self.event("note", text=Text.from_markup(text).plain if has_markup else text)

    def event(self, name: str, **values: Any) -> None:
        """Write one line of a log; nothing if this is none."""
        if self.is_log and not self.quiet:
            self.file.write(json.dumps({"event": name, **values}, default=str) + "\n")
            self.file.flush()

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of what is printed; a console's own control codes stay."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else Segment(visible(segment.text), segment.style)


def foreign(text: str) -> str:
    """Foreign text for a line of rich's markup: no markup, no line breaks, nothing hidden."""
    return escape(visible(text).replace("\n", r"\n"))


messages = SafeConsole(stderr=True)
"""Progress and messages; standard output is for results."""


def results() -> Console:
    """Standard output; wrapped on a terminal only, or to the COLUMNS that are asked for."""
    console = SafeConsole()
    fits = console.is_terminal or "COLUMNS" in os.environ
    return console if fits else SafeConsole(width=PIPE_WIDTH)


def print_line(text: str) -> None:
    """Print one line of results as it is: no markup, no wrapping."""
    print(visible_line(text))


def escape_what_does_not_fit() -> None:
    """Print as escapes what the encoding of standard output or error has no characters for."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def flush_results() -> None:
    """Write what is still to be written to standard output; OSError if it cannot be.

    Python would try again at its end, and print a traceback: after a failure nothing is left.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise

"""Foreign text made safe to show: names of files, ids, keys, what a library says.

Control characters steer a terminal (ESC), ring it (BEL), begin a line that looks like one of ours
(a newline in a file's name) or turn the text after them around (Unicode's directional marks). All
that shows text goes through here: errors when they become text, and `consoles`. Escapes are
printable, so doing it twice changes nothing. Pure.
"""

import re

SHOWN_CHARACTERS = 200
"""Most characters of a value that an error shows."""

_MAY_BE_HIDDEN = re.compile(r"[^ -~\n\t]")
_LIST_ITEM = "\n  - "
"""What an error that lists things begins each with: the only line breaks in one."""


def visible(text: str) -> str:
    r"""Text with its control characters as escapes; line breaks and tabs stay.

    >>> visible("a\x1b[2J\tb\n")
    'a\\x1b[2J\tb\n'
    """
    return text if text.isprintable() else _MAY_BE_HIDDEN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else ascii(character)[1:-1]


def visible_line(text: str) -> str:
    r"""The same in one line: line breaks and tabs are escapes too, but for the items of a list.

    >>> visible_line("no file a\nb; missing:\n  - c\x07")
    'no file a\\nb; missing:\n  - c\\x07'
    """
    if text.isprintable():
        return text
    return visible(re.sub(rf"\n(?!{_LIST_ITEM[1:]})", r"\\n", text)).replace("\t", r"\t")


def shown(value: object) -> str:
    """A value as an error shows it: as Python writes it, cut where it is long.

    >>> shown(["a"]), len(shown("9" * 5000))
    ("['a']", 204)
    """
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."

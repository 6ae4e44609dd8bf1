"""The errors of Isobatch that a caller may want to catch.

Their text is safe to show wherever it goes, a terminal or a log (`common.visible_text`).

IsobatchError
├── DataError          the raw data or one of our files cannot be used
│   ├── DamagedShard   a shard is not what its manifest says
│   └── MediaRejected  a model cannot take an image or a clip (ImageRejected, AudioRejected)
└── ConfigError        a preset, a configuration or an option is wrong
"""

from isobatch.common.visible_text import visible_line


class IsobatchError(Exception):
    """Root of all errors raised on purpose; one line for the user: what, where, what to do."""

    def __str__(self) -> str:
        return visible_line(super().__str__())


class Cancelled(Exception):
    """Whoever wanted the result wants it no longer."""


class DataError(IsobatchError):
    """The raw data or one of our files cannot be used."""


class DamagedShard(DataError):
    """A shard is missing, has another size or another checksum than its manifest says."""


class ConfigError(IsobatchError, ValueError):
    """A preset, a configuration or an option is wrong."""


class MediaRejected(DataError, ValueError):
    """A model cannot take an image or a clip; `reason` is a slug for the list of rejections."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)  # both, so that it survives pickling between processes
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return visible_line(self.detail)


def os_reason(error: OSError) -> str:
    """What a system call's error says, without the path."""
    return error.strerror or first_line(error)


def first_line(error: BaseException) -> str:
    """First line of what a library's error says; its type if it says nothing.

    >>> first_line(ValueError("too long\\nsee the docs")), first_line(KeyError())
    ('too long', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

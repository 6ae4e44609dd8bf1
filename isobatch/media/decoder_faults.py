"""Whatever a decoder raises for a file -> what is wrong with it, in one line.

The one place for it, of the packer and the loaders. Pillow, PyAV and soundfile give files to some
thirty decoders, whose errors are of any type: a list of types was incomplete twice (RuntimeError of
AVIF, NotImplementedError of DDS, AttributeError of SPIDER). So callers catch `Exception`, which
leaves Ctrl-C and the end of the program alone, and ask here.
"""

import ctypes
import errno
import logging
from functools import cache
from typing import Literal, NamedTuple

from PIL import Image, UnidentifiedImageError

from isobatch.common.errors import IsobatchError, first_line

FaultKind = Literal["corrupt", "unreadable", "too_many_pixels"]

_SPARE_BYTES = 64 << 20
"""Memory that a machine has, unless it is really out of it."""
_OF_THE_CONTENT = (errno.EINVAL, errno.EOVERFLOW, errno.ERANGE)
"""Errors of a file system for places that a damaged file names, such as -5."""
_LONGEST = 200
"""Characters of an error that are shown: some decoders put the file's own bytes into theirs."""


class FileFault(NamedTuple):
    """What is wrong with a file."""

    kind: FaultKind
    """"corrupt": its content; "unreadable": the file system does not give it."""
    detail: str
    """One line."""


def fault_of(error: Exception) -> FileFault:
    """What is wrong with the file that a decoder raised this for.

    Raises the error again where it is not the file's fault: one of ours, such as a store that
    cannot be reached, and a MemoryError of a machine that has no memory left. A MemoryError of a
    file that asks for more than any machine has is the file's.
    """
    if isinstance(error, IsobatchError) or (
        isinstance(error, MemoryError) and not _has_memory_left()
    ):
        raise error
    if isinstance(error, Image.DecompressionBombError):
        return FileFault("too_many_pixels", _one_line(error))
    if isinstance(error, UnidentifiedImageError):  # its own words name the address of a buffer
        return FileFault("corrupt", "not an image that Pillow knows")
    if isinstance(error, MemoryError):
        return FileFault("corrupt", "it asks for more memory than there is")
    if type(error).__module__.partition(".")[0] == "av":
        return FileFault("corrupt", getattr(error, "strerror", None) or _one_line(error))
    if isinstance(error, OSError) and error.errno not in (None, *_OF_THE_CONTENT):
        return FileFault("unreadable", error.strerror or _one_line(error))
    return FileFault("corrupt", _one_line(error))


def _one_line(error: Exception) -> str:
    """What the error says, without characters that a terminal would obey."""
    line = "".join(char if char.isprintable() else " " for char in first_line(error))[:_LONGEST]
    if isinstance(error, OSError | ValueError | SyntaxError | RuntimeError):
        return line
    # of a KeyError 7 the text is just "7"
    return line if line == type(error).__name__ else f"{type(error).__name__}: {line}"


def _has_memory_left() -> bool:
    try:
        bytearray(_SPARE_BYTES)
    except MemoryError:
        return False
    return True


@cache
def quiet_decoders() -> None:
    """Stop Pillow, and the copy of libtiff that it uses, from writing to the terminal.

    What they would say of a damaged file is in the error that is raised. libtiff's handlers are
    taken out, instead of sending standard error elsewhere meanwhile, which would hide what other
    threads write. Where the library cannot be found by name it stays as it is. Pillow's log gets a
    handler that does nothing, so a program that handles logs itself still has it.
    """
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    try:
        from PIL import _imaging  # noqa: PLC0415  (a part that another build may not have)

        library = ctypes.CDLL(_imaging.__file__)  # what it links is found through it
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            setter = getattr(library, name)
            setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
            setter(None)
    except (AttributeError, ImportError, OSError, TypeError):
        return

"""Video files as PyAV (FFmpeg) opens them: only containers of a list."""

from typing import IO, Any

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,flv,asf,ogg"
"""By FFmpeg's names; others, such as playlists, could lead it to other files."""
_LENIENT = 19
"""PyAV from which on metadata that is no UTF-8 is no error by itself, and no option."""


def open_container(av: Any, file: IO[bytes]) -> Any:
    """An open container; `av.ArgumentError` for one that is not on the list."""
    lenient = int(av.__version__.partition(".")[0]) >= _LENIENT
    errors = {} if lenient else {"metadata_errors": "ignore"}
    return av.open(file, options={"format_whitelist": CONTAINERS}, **errors)

"""The demo, drawn once per machine and version: a file in the user's cache folder.

The file is an archive with its checksum first. One that is damaged, or was drawn by other code, is
never read: its name is a hash of the code. Where no file can be kept, the demo is drawn each time.
Both ways write out an archive, so what they write is the same.
"""

import hashlib
import platform
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from zipfile import ZipFile, ZipInfo

import numpy as np
import PIL

from isobatch.common.cache_files import DEMOS, MAX_BYTES, note_use, remove_files
from isobatch.packer.demo import _pictures, dataset, texts
from isobatch.packer.demo.dataset import DEMO_SAMPLES, draw_demo
from isobatch.shards.folders import cache_folder

_DRAWING = (_pictures, dataset, texts)


def place_demo(folder: Path, *, num_samples: int = DEMO_SAMPLES) -> None:
    """Write the demo into `folder`, its `annotations.json` last; drawn if it is not kept."""
    archive = read_kept(num_samples) or _draw(num_samples)
    with ZipFile(BytesIO(archive)) as files:
        files.extractall(folder)


def demo_key(num_samples: int) -> str:
    """A hash of all that decides the demo's bytes: our code, and the libraries' versions."""
    versions = (num_samples, PIL.__version__, np.__version__, platform.python_version())
    code = hashlib.sha256(repr(versions).encode())
    for module in _DRAWING:
        code.update(Path(str(module.__file__)).read_bytes())
    return code.hexdigest()[:24]


def read_kept(num_samples: int) -> bytes | None:
    """The archive, if it is kept and whole."""
    with suppress(OSError, RuntimeError):  # no such file, or no home
        file = _file(num_samples)
        content = file.read_bytes()
        checksum, archive = content[:32], content[32:]
        if hashlib.sha256(archive).digest() == checksum:
            note_use(file)
            return archive
    return None


def _draw(num_samples: int) -> bytes:
    """The archive, newly drawn, and kept where that is possible."""
    buffer = BytesIO()
    with ZipFile(buffer, "w") as files:
        for name, content in draw_demo(num_samples):
            files.writestr(ZipInfo(name), content)  # without the time: the same bytes at any
    archive = buffer.getvalue()
    with suppress(OSError, RuntimeError):  # no room, no right to write there, or no home
        _keep(_file(num_samples), archive)
    return archive


def _keep(file: Path, archive: bytes) -> None:
    """Write the whole file or none: others may read and write it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, suffix=DEMOS, delete=False) as temporary:
        try:
            temporary.write(hashlib.sha256(archive).digest() + archive)
            temporary.flush()
            Path(temporary.name).replace(file)
        except OSError:
            Path(temporary.name).unlink(missing_ok=True)
            raise
    remove_files(file.parent, DEMOS, MAX_BYTES[DEMOS], keep=file)


def _file(num_samples: int) -> Path:
    return cache_folder("demo") / (demo_key(num_samples) + DEMOS)

"""The peers of benchmarks/loader_speed.py in virtual environments of their own, made once and used
again.

Made by `uv` (`pip install uv`): pip goes back through the versions of botocore for many minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = {"peers": HERE / "peers.txt", "mosaicml": HERE / "peers-mosaicml.txt"}
"""Environment -> what is in it, next to the CPU build of torch."""
OWN = ""
"""The environment of the benchmark itself."""
STAMP = "installed.txt"
INSTALL_S = 1800


def python_of(name: str, envs: Path) -> Path:
    """The interpreter of an environment, which is made if it is not there or holds something else.

    Ends the program with the last of what pip says if that fails.
    """
    if name == OWN:
        return Path(sys.executable)
    folder, wanted = envs.absolute() / name, REQUIREMENTS[name].read_text()
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    # torch first and alone: the index of its CPU build has no other package that is wanted here
    _run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "-r",
            str(HERE.parent / "requirements-cpu.txt"),
        ]
    )
    _run(
        [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--python",
            str(python),
            "-r",
            str(REQUIREMENTS[name]),
        ]
    )
    stamp.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-2000:]}"
        )

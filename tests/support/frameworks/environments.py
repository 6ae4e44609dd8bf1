"""Other training frameworks in virtual environments of their own, made once and used again.

Each holds what packages/NAME.txt lists, and finds all else, torch above all, among the packages
of the environment that runs the tests: tens of seconds, and no second torch. pip runs without
dependencies, so that it brings no other torch, and since the lists are complete.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from support import ROOT, child_env

LISTS = Path(__file__).parent / "packages"
INSTALL_S = CHECKS_S = 900


def python_of(name: str, envs: Path) -> Path:
    """The interpreter of a framework's environment in the folder `envs`, which is made if it is not
    there or holds something else.
    """
    folder, listed = envs / name, LISTS / f"{name}.txt"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = f"{sys.version}\n{shared_packages()}\n{torch.__version__}\n{listed.read_text()}"
    with (envs / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", "--without-pip", folder)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "shared.pth").write_text(shared_packages())  # after its own, so that these win
        pip = (sys.executable, "-m", "pip", "--python", python)
        _run(*pip, "install", "--quiet", "--no-deps", "--no-compile", "-r", listed)
        if torch.version.cuda is None:
            # PyPI's are built for CUDA and do not load without; torchaudio does without them
            for library in own.glob("torchaudio/lib/*.so"):
                library.unlink()
        stamp.write_text(wanted)
    return python


def run_checks(name: str, checks: str, pytestconfig: pytest.Config, folder: Path) -> None:
    """The tests of a file beside this one pass with a framework, by its own pytest."""
    python = python_of(name, pytestconfig.cache.mkdir("frameworks"))
    # with the S3 server, which is among the programs of this environment
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--basetemp={folder / 'checks'}", Path(__file__).parent / checks],
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1", PATH=programs),
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECKS_S,
    )
    assert not done.returncode, done.stdout[-6000:]
    assert " passed" in done.stdout


def shared_packages() -> str:
    """The folders of packages of this environment, one a line."""
    return "\n".join(sorted({sysconfig.get_path(each) for each in ("purelib", "platlib")}))


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    assert not done.returncode, f"{' '.join(words)}: {done.stderr[-2000:]}"

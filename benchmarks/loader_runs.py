"""Runs one loader once, in a process of its own, for benchmarks/loader_speed.py; and what comes of
it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader_envs import OWN

from counting import MemoryWatch

SCRIPTS = Path(__file__).parent / "loader_peers"
RUN_S = 600
"""A run takes seconds; a loader that hangs must not hold up the others."""


class RunFailed(Exception):
    """A loader did not do what it was to do; one line says why."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loader that can be measured."""

    name: str
    """As on the command line and in file names."""
    title: str
    script: str
    environment: str = OWN
    """In `loader_envs.REQUIREMENTS`, or our own."""


ADAPTERS = (
    Adapter("isobatch", "Isobatch", "run_ours.py"),
    Adapter("litdata", "LitData", "run_litdata.py", "peers"),
    Adapter("mosaicml", "MosaicML Streaming", "run_mosaicml.py", "mosaicml"),
    Adapter("webdataset", "WebDataset", "run_webdataset.py", "peers"),
    Adapter("energon", "Megatron-Energon", "run_energon.py", "peers"),
    Adapter("datasets", "HF datasets", "run_datasets.py", "peers"),
)
OURS, PEERS = ADAPTERS[0], ADAPTERS[1:]


@dataclass(frozen=True, slots=True)
class Run:
    """What a process has measured."""

    version: str
    """Of the loader's package."""
    open_seconds: float
    passes: list[dict[str, Any]]
    """The fields of `loader_peers.measure.Pass`."""
    peak_bytes: int = 0
    """Over all its processes; 0 unless it was watched."""

    @property
    def first_pass_seconds(self) -> float:
        """From opening the loader to the end of the first pass."""
        return float(self.open_seconds + self.passes[0]["seconds"])

    @property
    def best_seconds(self) -> float:
        """Of a pass, without the first."""
        return min(float(each["seconds"]) for each in self.passes[1:])

    @property
    def first_batch_seconds(self) -> float:
        """From opening the loader to the first batch."""
        return float(self.open_seconds + self.passes[0]["first_seconds"])

    def check(self, images: int, image_bytes: int, tokens: int) -> None:
        """RunFailed unless each pass gave exactly that."""
        for number, each in enumerate(self.passes):
            found = tuple(each[name] for name in ("images", "image_bytes", "tokens"))
            if found != (images, image_bytes, tokens):
                raise RunFailed(
                    f"pass {number} gave (images, bytes, tokens) {found}, not "
                    f"{(images, image_bytes, tokens)}"
                )


def run(
    command: list[str], environment: Mapping[str, str], *, folder: Path, watch: bool = False
) -> Run:
    """Run a script of `loader_peers`; whatever it keeps goes into a new folder in `folder`.
    RunFailed says why not.

    "CACHE" in the command stands for that folder.
    """
    cache = Path(tempfile.mkdtemp(dir=folder, prefix="cache-"))
    # some peers keep files where they are not told to
    homes = {
        "HF_HOME": str(cache / "home"),
        "TMPDIR": str(cache / "tmp"),
        "PYTHONWARNINGS": "ignore",
    }
    (cache / "tmp").mkdir()
    (cache / "data").mkdir()
    given = [str(cache / "data") if text == "CACHE" else text for text in command]
    try:
        printed, peak = _communicate(given, {**os.environ, **homes, **environment}, watch)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    found = json.loads(printed.splitlines()[-1])
    return Run(
        found.get("version", ""), found.get("open_seconds", 0.0), found.get("passes", []), peak
    )


def _communicate(command: list[str], environment: dict[str, str], watch: bool) -> tuple[str, int]:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=SCRIPTS,
    ) as process:
        watched = MemoryWatch(process.pid) if watch else None
        try:
            printed, errors = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RunFailed(f"nothing within {RUN_S} s") from None
        finally:
            peak = watched.stop() if watched else 0
    if process.returncode or not printed.strip():
        lines = [line for line in errors.splitlines() if line.strip()] or ["nothing printed"]
        raise RunFailed(f"status {process.returncode}: {lines[-1].strip()[:200]}")
    return printed, peak

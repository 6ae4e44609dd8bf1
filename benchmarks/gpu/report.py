"""Results of a run as tables and JSON, with what made them."""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tables import new_table

from gpu.device import Bench

WIDTH = 200
"""Characters: nothing may be cut off."""


class Report:
    """Tables and figures of one run of `gpu_training.py`."""

    def __init__(self, bench: Bench, command: str, arguments: Sequence[str], folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._console = Console(width=WIDTH, record=True, highlight=False)
        device = re.sub(r"[^a-z0-9]+", "_", bench.name.lower()).strip("_")
        self.name = f"gpu_{command}_{device}_{date.today():%Y-%m-%d}"
        self.figures: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/gpu_training.py", *arguments]),
            "date": f"{date.today():%Y-%m-%d}",
            "device": bench.name,
            "dtype": str(bench.dtype),
            "cluster": bench.cluster.name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "tiny": bench.tiny,
        }
        self.line(f"$ {self.figures['command']}")
        self.line(
            f"{bench.name}, torch {torch.__version__}, {bench.dtype}, predictions for "
            f"{bench.cluster.name}"
        )
        if bench.tiny:
            self.line(
                "Tiny shapes on a CPU: this shows that the path runs, and says nothing of a GPU."
            )

    def line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)

    def table(self, title: str, headings: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table; the first column is left-aligned."""
        made = new_table(title, headings)
        for row in rows:
            made.add_row(*row)
        self._console.print(made)

    def path(self, ending: str) -> Path:
        """A file of this run."""
        return self.folder / f"{self.name}.{ending}"

    def save(self) -> None:
        """Write `<name>.json` and `<name>.txt`; now and then, so that what was measured is kept if
        a run is cut off.
        """
        figures = json.dumps(self.figures, indent=1, default=_plain)
        self.path("json").write_text(figures + "\n", "utf-8")
        self.path("txt").write_text(self._console.export_text(clear=False), "utf-8")


def _plain(value: object) -> object:
    """What JSON does not know."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} does not go into a report")

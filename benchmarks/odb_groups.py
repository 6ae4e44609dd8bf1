"""ODB's own grouping among simulated ranks: the peer of `benchmarks/online.py`.

Ranks are threads of this process. The package is installed where it is wanted, and its
`grouping_data` runs unmodified.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from order import Data

from isobatch.common.types import IntArray

Steps = list[list[list[int]]]
"""Of each micro-step: of each rank, its samples."""
HERE = Path(__file__).parent


def open_odb(folder: Path) -> Any:
    """ODB's module of groups, installed into a folder if it is not there."""
    if not (folder / "odb").exists():
        wanted = ["--no-deps", "--target", str(folder), "-r", str(HERE / "peers-odb.txt")]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
    sys.path.insert(0, str(folder))
    return importlib.import_module("odb.grouping")


class Ranks:
    """torch.distributed as far as ODB asks for it, among threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self._own = size, threading.local()
        self._barrier, self._told = threading.Barrier(size), dict[int, Any]()

    def join(self, rank: int) -> None:
        """This thread is a rank."""
        self._own.rank = rank

    def get_world_size(self, group: object) -> int:
        return self.size

    def get_rank(self, group: object) -> int:
        return int(self._own.rank)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        self._told[self._own.rank] = value
        self._barrier.wait()
        values = [self._told[rank] for rank in range(self.size)]
        self._barrier.wait()
        return values

    def all_gather_into_tensor(self, out: Any, own: Any, group: object) -> None:
        for row, value in zip(out.view(self.size, -1), self.gather(own), strict=True):
            row.copy_(value)


def odb_steps(data: Data, dp: int, buffer: int, grouping: Any) -> tuple[Steps, float]:
    """Micro-steps of an epoch: each rank groups the samples that it has loaded."""
    ranks = Ranks(dp)
    order = np.random.default_rng(0).permutation(len(data.counts))
    with mock.patch.object(grouping, "dist", ranks, create=True), ThreadPoolExecutor(dp) as pool:
        runs = [
            pool.submit(odb_rank, data, ranks, rank, order[rank::dp], buffer, grouping)
            for rank in range(dp)
        ]
        rounds, times = zip(*(run.result() for run in runs), strict=True)
    steps = []
    for groups in zip(*rounds, strict=True):
        for number in range(max(map(len, groups))):
            steps.append([each[number] if number < len(each) else [] for each in groups])
    return steps, sum(times)


def odb_rank(
    data: Data, ranks: Ranks, rank: int, samples: IntArray, buffer: int, grouping: Any
) -> tuple[list[list[list[int]]], float]:
    """Groups of a rank's samples by round, and the time that grouping takes."""
    ranks.join(rank)
    vision, tokens = data.loads
    left = [
        {"index": i, "input_ids": torch.empty(int(tokens[i])), "odb_n_patches": int(vision[i])}
        for i in samples.tolist()
    ]
    held: list[dict[str, Any]] = []
    rounds, taking_s = [], 0.0
    while any(ranks.gather(bool(left or held))):
        room = max(0, buffer - len(held))
        held, left = held + left[:room], left[room:]
        begun = time.thread_time()
        groups, held, _, _ = grouping.grouping_data(
            [held],
            data.limits.max_seq_len,
            ddp_group=ranks,
            idx_budget=buffer,
            max_groups=buffer,
            max_patches=data.limits.max_vision,
        )
        taking_s += time.thread_time() - begun
        rounds.append([[sample["index"] for sample in group] for group in groups])
    return rounds, taking_s

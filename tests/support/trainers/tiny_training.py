"""Training by the example's step, and its script with the ids of what it trains on.

    python tiny_training.py IDS BUILD STATE ...

writes the lines `step sample_id` into the folder IDS, a file per process.
"""

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import train_tiny
from tiny_vlm import endless


def train(model, loader, steps):
    """The mean loss per label of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    batches = islice(endless(loader), steps)
    return [train_tiny.train_step(model, optimizer, step) for step in batches]


def main(ids, build, state, *options):
    """Run the example; append a step's ids before it is trained on."""
    first = torch.load(state)["steps"] if os.path.exists(state) else 0
    file = Path(ids) / f"{first:06d}-rank-{os.environ.get('RANK', '0')}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    original, steps = train_tiny.train_step, iter(range(first, sys.maxsize))

    def recorded(model, optimizer, batches):
        step = next(steps)
        lines = [f"{step} {sample_id}\n" for batch in batches for sample_id in batch.sample_ids]
        with file.open("a") as opened:
            opened.writelines(lines)
        return original(model, optimizer, batches)

    train_tiny.train_step = recorded
    train_tiny.main([build, state, *options])


if __name__ == "__main__":
    main(*sys.argv[1:])

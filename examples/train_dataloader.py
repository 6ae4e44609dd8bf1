"""Train with torch's DataLoader, in plain torch: the steps come out of a worker process, and each
carries its state.

    python examples/train_dataloader.py BUILD_DIR CHECKPOINT_FILE [--steps 20] [--workers 1]

A StreamingLoader reads and decodes in threads of its own, so most trainers iterate over it directly
(train_tiny.py). This is for those that are built around a DataLoader, or want the work out of the
training process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import islice

import torch
from torch.utils.data import DataLoader
from train_tiny import accumulate, make_model

from balance.errors import IsobatchError
from loaders import StreamingLoader
from loaders.integrations.torch_dataset import StepDataset


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on from CHECKPOINT_FILE; 2 if the build cannot be used."""
    parser = argparse.ArgumentParser(
        description="Train a tiny vision-language model with torch's DataLoader"
    )
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("checkpoint", help="file to go on from, if it is there, and to save in")
    parser.add_argument("--steps", type=int, default=20, help="steps of this call")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1, choices=(0, 1))
    parser.add_argument("--micro-batches-per-step", type=int, default=2)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        loader = StreamingLoader(
            args.build,
            dp_rank=0,
            dp_world_size=1,
            micro_batches_per_step=args.micro_batches_per_step,
        )
        model = make_model(loader)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if os.path.exists(args.checkpoint):
            saved = torch.load(args.checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        # batch_size=None: an item is a whole step already
        steps = DataLoader(StepDataset(loader), batch_size=None, num_workers=args.workers)
        for number, step in enumerate(islice(steps, args.steps), start=1):
            optimizer.zero_grad()
            loss = accumulate(model, step.micro_batches)
            optimizer.step()
            print(f"epoch {step.state['epoch']}  step {number}  loss {loss:.4f}")
            if number % args.save_every == 0 or number == args.steps:
                # not loader.state_dict(): the worker's loader is ahead of this step, and this
                # process's never moved
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": step.state,
                }
                torch.save(state, f"{args.checkpoint}.new")
                os.replace(f"{args.checkpoint}.new", args.checkpoint)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

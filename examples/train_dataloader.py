"""Train through torch's DataLoader: steps come from a worker process, each with its state.

    python examples/train_dataloader.py BUILD STATE [--steps 20]

A StreamingLoader reads and decodes in threads of its own, so most trainers iterate over it directly
(train_tiny.py). This is for trainers that are built around a DataLoader.
"""

import os
from itertools import islice

import torch
from arguments import parse
from tiny_vlm import accumulate, make_model, per_label
from torch.utils.data import DataLoader

from isobatch import StepDataset, StreamingLoader


def main(argv=None):
    args = parse(__doc__, argv)
    loader = StreamingLoader(args.build, micro_batches_per_step=args.micro_batches_per_step)
    model = make_model(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if os.path.exists(args.out):
        saved = torch.load(args.out)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    # batch_size=None: an item is a whole step already
    # forkserver, the default from Python 3.14: a fork of a process with threads may hang
    steps = DataLoader(
        StepDataset(loader), batch_size=None, num_workers=1, multiprocessing_context="forkserver"
    )
    for number, step in enumerate(islice(steps, args.steps), start=1):
        optimizer.zero_grad()
        loss = per_label(accumulate(model, step.micro_batches), step.micro_batches)
        optimizer.step()
        print(f"epoch {step.state['epoch']}  step {number}  loss {loss:.4f}")
        if number % args.save_every == 0 or number == args.steps:
            # not loader.state_dict(): the worker's loader is ahead, and this process's never moved
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"loader": step.state}, f"{args.out}.new")
            os.replace(f"{args.out}.new", args.out)


if __name__ == "__main__":
    main()

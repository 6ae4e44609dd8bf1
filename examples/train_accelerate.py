"""Train with Accelerate: `save_state` writes the loader's state beside model and optimizer, and a
second call goes on.

    python examples/train_accelerate.py BUILD_DIR OUT_DIR [--steps 20]
    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py BUILD_DIR OUT_DIR

The loader is registered for checkpoints and not given to `prepare`, which would deal its steps out
to the ranks a second time. A run that was stopped may go on with another number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from tiny_internvl import make_internvl

from balance.errors import IsobatchError
from loaders import MicroBatch, StreamingLoader
from loaders.batch.model_inputs import model_inputs


def train_step(
    accelerator: Accelerator, model: torch.nn.Module, config: object, batches: list[MicroBatch]
) -> float:
    """Add the gradients of one step's micro-batches; -> this rank's part of the step's mean
    loss.
    """
    total = 0.0
    for place, batch in enumerate(batches):
        is_last = place == len(batches) - 1
        # ranks exchange gradients once per step, behind the last micro-batch
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            loss = model(**_to(model_inputs(batch, config), accelerator.device)).loss
            # loss is divided by the step's labels over all ranks; DDP divides by their number once
            # more
            accelerator.backward(loss * accelerator.num_processes)
        total += loss.item()
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on from the checkpoint in OUT_DIR; 2 if the build cannot be used."""
    parser = argparse.ArgumentParser(description="Train a tiny InternVL with Accelerate")
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("out", help="directory for the checkpoint")
    parser.add_argument("--steps", type=int, default=20, help="steps of this call")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--micro-batches-per-step", type=int, default=2)
    args = parser.parse_args(argv)
    accelerator = Accelerator(cpu=True)  # tiny tensors; leave cpu=True out to train on GPUs
    try:
        loader = StreamingLoader(
            args.build,
            dp_rank=accelerator.process_index,
            dp_world_size=accelerator.num_processes,
            micro_batches_per_step=args.micro_batches_per_step,
        )
        plain = make_internvl(loader)
        model, optimizer = accelerator.prepare(
            plain, torch.optim.AdamW(plain.parameters(), lr=3e-3)
        )
        accelerator.register_for_checkpointing(loader)
        if Path(args.out).is_dir():
            accelerator.load_state(args.out)
        done = 0
        while done < args.steps:
            for batches in loader:  # one epoch, or what is left of it
                optimizer.zero_grad()
                loss = train_step(accelerator, model, plain.config, batches)
                optimizer.step()
                done += 1
                accelerator.print(f"epoch {loader.epoch}  step {done}  loss {loss:.4f}")
                if done % args.save_every == 0 or done == args.steps:
                    accelerator.save_state(args.out)
                if done == args.steps:
                    break
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _to(inputs: dict[str, object], device: torch.device) -> dict[str, object]:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


if __name__ == "__main__":
    sys.exit(main())

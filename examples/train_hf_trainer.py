"""Train with transformers' Trainer: its checkpoints hold the loader's state, and a second call goes
on exactly.

    python examples/train_hf_trainer.py BUILD_DIR OUT_DIR [--steps 20]
    torchrun --nproc-per-node 2 examples/train_hf_trainer.py BUILD_DIR OUT_DIR

A run that was stopped may go on with another number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tiny_internvl import make_internvl
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from balance.errors import IsobatchError
from loaders import StreamingLoader
from loaders.integrations.hf_trainer import StreamingTrainer


def make_trainer(build: str, out: str, **options: object) -> StreamingTrainer:
    """A trainer on `build`; `options` are those of TrainingArguments."""
    args = TrainingArguments(output_dir=out, report_to=[], disable_tqdm=True, **options)
    # the loader deals the data to the ranks, so it has to know them; one micro-batch per
    # accumulation step
    loader = StreamingLoader(
        build,
        dp_rank=args.process_index,
        dp_world_size=args.world_size,
        micro_batches_per_step=args.gradient_accumulation_steps,
    )
    return StreamingTrainer(model=make_internvl(loader), args=args, loader=loader)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on from the last checkpoint in OUT_DIR; 2 if the build cannot be used."""
    parser = argparse.ArgumentParser(description="Train a tiny InternVL with transformers' Trainer")
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("out", help="directory for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--micro-batches-per-step", type=int, default=2)
    args = parser.parse_args(argv)
    try:
        trainer = make_trainer(
            args.build,
            args.out,
            max_steps=args.steps,
            save_steps=args.save_every,
            gradient_accumulation_steps=args.micro_batches_per_step,
            learning_rate=3e-3,
            logging_steps=5,
            use_cpu=True,  # tiny tensors; leave this out to train on GPUs
        )
        last = get_last_checkpoint(args.out) if os.path.isdir(args.out) else None
        trainer.train(resume_from_checkpoint=last)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

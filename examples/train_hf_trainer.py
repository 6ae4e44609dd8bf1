"""Train with transformers' Trainer: checkpoints hold the loader's state, so a run resumes exactly.

    python examples/train_hf_trainer.py BUILD OUT [--steps 20]
    torchrun --nproc-per-node 2 examples/train_hf_trainer.py BUILD OUT

A stopped run may resume with another number of processes.
"""

import os

from arguments import parse
from tiny_internvl import make_internvl
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from isobatch import BalancedTrainer, StreamingLoader


def make_trainer(build, out, **options):
    """A trainer on `build`; `options` are those of TrainingArguments."""
    args = TrainingArguments(output_dir=out, report_to=[], disable_tqdm=True, **options)
    loader = StreamingLoader(
        build,
        dp_rank=args.process_index,
        dp_world_size=args.world_size,
        micro_batches_per_step=args.gradient_accumulation_steps,
    )
    return BalancedTrainer(model=make_internvl(loader), args=args, train_dataset=loader)


def main(argv=None):
    args = parse(__doc__, argv)
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


if __name__ == "__main__":
    main()

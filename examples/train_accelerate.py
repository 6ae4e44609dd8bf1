"""Train with Accelerate: `save_state` also saves the loader's state, so a run resumes exactly.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py BUILD OUT [--steps 20]

The loader is registered for checkpoints and not given to `prepare`, which would distribute its
steps over the ranks a second time. A stopped run may resume with another number of processes.
"""

import contextlib
import os
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from arguments import parse
from tiny_internvl import make_internvl
from tiny_vlm import endless, per_label

from loaders import StreamingLoader, model_inputs


def train_step(accelerator, model, config, batches):
    """Add the gradients of one step's micro-batches; -> its mean loss per label, over all ranks."""
    total = 0.0
    for number, batch in enumerate(batches, start=1):
        inputs = send_to_device(model_inputs(batch, config), accelerator.device)
        # ranks exchange gradients once per step, after the last micro-batch
        last = number == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = model(**inputs).loss
            # the loss is divided by the divisor of all ranks' step, but DDP takes the mean
            accelerator.backward(loss * accelerator.num_processes)
        total += loss.item()
    return per_label(accelerator.reduce(torch.tensor(total)).item(), batches)


def main(argv=None):
    args = parse(__doc__, argv)
    accelerator = Accelerator(cpu=True)  # tiny tensors; leave cpu=True out to train on GPUs
    loader = StreamingLoader(args.build, micro_batches_per_step=args.micro_batches_per_step)
    plain = make_internvl(loader)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3))
    accelerator.register_for_checkpointing(loader)
    if os.path.isdir(args.out):
        accelerator.load_state(args.out)
    for step, batches in enumerate(islice(endless(loader), args.steps), start=1):
        optimizer.zero_grad()
        loss = train_step(accelerator, model, plain.config, batches)
        optimizer.step()
        accelerator.print(f"epoch {loader.epoch}  step {step}  loss {loss:.4f}")
        if step % args.save_every == 0 or step == args.steps:
            accelerator.save_state(args.out)


if __name__ == "__main__":
    main()

"""Train with Accelerate: `save_state` also saves the loader's state, so a run resumes exactly.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py BUILD OUT [--steps 20]

The loader is registered for checkpoints and needs no `prepare`: each rank has its own steps. A
stopped run may resume with another number of processes.
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

from isobatch import StreamingLoader, model_inputs


def train_step(accelerator, model, batches):
    """Add the gradients of one step's micro-batches; -> its mean loss per label, over all ranks."""
    total = 0.0
    for number, batch in enumerate(batches, start=1):
        inputs = send_to_device(model_inputs(batch, model), accelerator.device)
        # ranks exchange gradients once per step, after the last micro-batch
        last = number == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
        total += loss.item()
    # as DDP averages gradients, a rank's losses are as many times larger as there are ranks
    return per_label(accelerator.reduce(torch.tensor(total), "mean").item(), batches)


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
        loss = train_step(accelerator, model, batches)
        optimizer.step()
        accelerator.print(f"epoch {loader.epoch}  step {step}  loss {loss:.4f}")
        if step % args.save_every == 0 or step == args.steps:
            accelerator.save_state(args.out)


if __name__ == "__main__":
    main()

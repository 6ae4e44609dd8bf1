"""Train a tiny vision-language model in plain PyTorch, alone or under torchrun.

    python examples/train_tiny.py BUILD [STATE] [--steps 20]
    torchrun --nproc-per-node 2 examples/train_tiny.py BUILD STATE

A killed run resumes from the file STATE, after the last step that it saved, on any number of
processes, with exactly the samples that are left.
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from arguments import parse
from tiny_vlm import accumulate, endless, make_model, per_label

from isobatch import StreamingLoader


def train_step(model, optimizer, batches):
    """One optimizer step; -> its mean loss per label, over all ranks."""
    optimizer.zero_grad()
    loss = torch.tensor(accumulate(model, batches))
    if dist.is_initialized():  # sums, as the loader is told; DDP would take means
        for tensor in (loss, *(weight.grad for weight in model.parameters())):
            dist.all_reduce(tensor)
    optimizer.step()
    return per_label(loss.item(), batches)


def main(argv=None):
    args = parse(__doc__, argv)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    # the loader takes this rank's part of every step
    loader = StreamingLoader(
        args.build, micro_batches_per_step=args.micro_batches_per_step, gradients="sum"
    )
    model, done = make_model(loader), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if args.out and os.path.exists(args.out):
        saved = torch.load(args.out)
        done = saved["steps"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step, batches in enumerate(islice(endless(loader), args.steps), start=done + 1):
        loss = train_step(model, optimizer, batches)
        if is_first:
            print(f"step {step}  loss {loss:.4f}")
        if is_first and args.out and step % args.save_every == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states | {"steps": step}, f"{args.out}.new")
            os.replace(f"{args.out}.new", args.out)  # when killed here, the old state is whole


if __name__ == "__main__":
    main()

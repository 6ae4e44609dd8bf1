"""Train a tiny vision-language model on a build made with `--model tiny`, on the CPU.

    python examples/train_tiny.py BUILD_DIR [--steps 60] [--seed 0]
    torchrun --nproc-per-node 2 examples/train_tiny.py BUILD_DIR --state FILE --save-every 10

Shows all that a trainer needs: one loader per data-parallel rank, losses divided by the step's
`num_loss_tokens`, and gradients summed over ranks, which then are those of the whole step as one
batch. With `--state`, a run that was killed goes on behind the last step that it saved, on any
number of processes; `--ids` writes down which samples were seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_vlm import PATCH_SIDE, TOKENS_PER_PATCH, TinyVLM, token_losses

from balance.errors import ConfigError, IsobatchError
from balance.presets import TilesRule
from loaders import MicroBatch, StreamingLoader

COMPARED_STEPS = 5
"""First and last steps whose mean losses are compared: single steps are noisy."""


def main() -> int:
    """Train, print a line per step, and return 0 if the loss fell, 1 if not, 2 if the build cannot
    be used.
    """
    parser = argparse.ArgumentParser(
        description="Train a tiny vision-language model on a build made with --model tiny"
    )
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batches-per-step", type=int, default=1)
    parser.add_argument(
        "--state", type=Path, help="file to go on from, if it is there, and to save in"
    )
    parser.add_argument(
        "--save-every", type=int, default=10, help="steps between two saves in --state"
    )
    parser.add_argument(
        "--ids", type=Path, help="directory for the lines `step sample_id`, one file per process"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small lose more to threads than they gain
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        loader = StreamingLoader(
            args.build,
            dp_rank=rank,
            dp_world_size=world_size,
            micro_batches_per_step=args.micro_batches_per_step,
            seed=args.seed,
        )
        torch.manual_seed(args.seed)  # the same weights on all ranks
        model = make_model(loader)
        run = Run(model, loader, args.state, args.save_every)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    if world_size > 1:
        dist.init_process_group("gloo")
    seen = write_ids(args.ids / f"{run.step:06d}-rank-{rank}.txt") if args.ids else None
    losses = train(model, loader, args.steps, verbose=rank == 0, run=run, seen=seen)
    if world_size > 1:
        dist.destroy_process_group()
    count = min(COMPARED_STEPS, len(losses) // 2)
    if not count:
        return 0
    first, last = sum(losses[:count]) / count, sum(losses[-count:]) / count
    if rank == 0:
        print(f"loss {'fell' if last < first else 'did not fall'}: {first:.3f} -> {last:.3f}")
    return 0 if last < first else 1


class Run:
    """Model, optimizer and loader of a run, in a file that is always whole: what a run goes on
    from.
    """

    def __init__(
        self, model: TinyVLM, loader: StreamingLoader, path: Path | None = None, save_every: int = 1
    ) -> None:
        self.model, self.loader, self.path, self.save_every = model, loader, path, save_every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.step = 0
        if path is not None and path.exists():
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            self.step = saved["step"]

    def finish_step(self) -> None:
        """Count a step, and save every few; the state is the same on all ranks, so the first one's
        is enough.
        """
        self.step += 1
        if self.path is None or self.step % self.save_every or os.environ.get("RANK", "0") != "0":
            return
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        new = self.path.with_suffix(".new")
        torch.save(
            {"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}, new
        )
        os.replace(new, self.path)  # killed while it writes, the run still has the state before


def write_ids(path: Path) -> Callable[[int, list[MicroBatch]], None]:
    """A function that appends the sample ids of a step to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(step: int, batches: list[MicroBatch]) -> None:
        lines = [f"{step} {sample_id}\n" for batch in batches for sample_id in batch.sample_ids]
        with path.open("a") as file:
            file.writelines(lines)

    return write


def train(
    model: TinyVLM,
    loader: StreamingLoader,
    steps: int,
    *,
    verbose: bool = False,
    run: Run | None = None,
    seen: Callable[[int, list[MicroBatch]], None] | None = None,
) -> list[float]:
    """Train for `steps` steps, epoch after epoch; the mean loss per label of each step, over all
    ranks.
    """
    run = run or Run(model, loader)
    losses = []
    started = time.perf_counter()
    for _, batches in zip(range(steps), endless(loader), strict=False):
        run.optimizer.zero_grad()
        sums = torch.tensor(
            [accumulate(model, batches), sum(len(batch.input_ids) for batch in batches)]
        )
        # the same gradients on all ranks: TinyVLM leaves none out, whatever the micro-batch holds
        sum_over_ranks(
            [sums, *(weight.grad for weight in model.parameters() if weight.grad is not None)]
        )
        run.optimizer.step()
        losses.append(float(sums[0]))
        if seen is not None:
            seen(run.step, batches)
        if verbose:
            seconds, started = time.perf_counter() - started, time.perf_counter()
            print(
                f"step {run.step:4d}  loss {losses[-1]:.4f}  tokens {int(sums[1]):6d}  {1000 * seconds:6.0f} ms"
            )
        run.finish_step()
    return losses


def make_model(loader: StreamingLoader) -> TinyVLM:
    """A model with random weights that fits the build."""
    rule = loader.model.vision
    if not isinstance(rule, TilesRule) or (rule.image_size, rule.llm_tokens_per_patch) != (
        PATCH_SIDE,
        TOKENS_PER_PATCH,
    ):
        raise ConfigError(
            f"the build is for the model {loader.model.name}; build it with --model tiny"
        )
    return TinyVLM(loader.vocab_size, loader.image_token_id)


def endless(loader: StreamingLoader) -> Iterator[list[MicroBatch]]:
    """The steps of epoch after epoch."""
    while True:
        yield from loader


def accumulate(model: TinyVLM, batches: list[MicroBatch]) -> float:
    """Add the gradients of a rank's micro-batches; -> their part of the step's mean loss.

    Divided by the step's labels, not by this rank's: parts and gradients then only have to be
    summed.
    """
    total = 0.0
    for batch in batches:
        loss = token_losses(model(batch), batch).sum() / max(1, batch.num_loss_tokens)
        loss.backward()
        total += loss.item()
    return total


def sum_over_ranks(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)


if __name__ == "__main__":
    sys.exit(main())

"""Train a model of images, audio and text, every phase balanced over the ranks (OrchMLLM).

    torchrun --nproc-per-node 2 examples/train_three_modalities.py BUILD

BUILD is of `packer build --model tiny_audio`. Data parallel: the loader's step planner assigns each
step's images, clips and texts to ranks, phase by phase. What a rank encodes is decoded there and
only there; features go to where the language model wants them, and their gradients back.
"""

import sys

import torch
import torch.distributed as dist

from engine import (
    DispatchedSteps,
    DispatchOptions,
    exchange_features,
    make_three_modalities,
    sum_gradients,
)
from loaders import StreamingLoader


def main(build: str, steps: int = 40) -> list[float]:
    """Train for at most an epoch; -> the losses, the same on all ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # no phase of this model pads its batches
    options = DispatchOptions(
        algorithms=dict.fromkeys(("vision", "audio", "llm"), "sums"),
        padded=frozenset(),
        reads_directly=True,
    )
    planner = DispatchedSteps(options=options)
    loader = StreamingLoader(build, micro_batches_per_step=2, planner=planner, audio="features")
    torch.manual_seed(0)  # the same weights on all ranks
    model = make_three_modalities(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, _ in zip(loader, range(steps), strict=False):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, (batch, routes) in enumerate(zip(step, step.note.rounds, strict=True)):
            features = {name: model[name](step.encoders[name][number]) for name in routes}
            received = exchange_features(features, routes)
            loss = model["language"](batch, received.features) / max(1, batch.num_loss_tokens)
            (loss + received.link).backward()
            total += loss.detach()
        # losses are parts of the step's mean, so parts and gradients are summed, not averaged
        sum_gradients([total, *(weight.grad for weight in model.parameters())], dist.group.WORLD)
        optimizer.step()
        losses.append(float(total))
        print(f"rank {dist.get_rank()}: loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])

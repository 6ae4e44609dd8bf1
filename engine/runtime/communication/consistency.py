"""Whether the ranks of a pipeline were given the same step: each has its own loader, and only
tensors travel.

Two loaders that disagree are otherwise found out by a message of another size, which ends a process
without a word, or by nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from balance.errors import ConfigError
from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.errors import peers
from engine.runtime.stage_io import Batch, TensorSpecs
from engine.simulator.schedule import Schedule


def check_agreement(
    groups: ProcessGroups, told: Sequence[tuple[str, bytes]], device: torch.device
) -> None:
    """ConfigError on all ranks of a pipeline, if what each tells differs; (its name, what it is).
    One small message.
    """
    marks = [int.from_bytes(blake2b(value, digest_size=7).digest(), "little") for _, value in told]
    # the least and the greatest in one go
    both = torch.tensor([*marks, *(-mark for mark in marks)], dtype=torch.int64, device=device)
    with peers(groups.ranks):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups.pipeline)
    most, least = both[: len(marks)].tolist(), (-both[len(marks) :]).tolist()
    differing = [
        name for (name, _), high, low in zip(told, most, least, strict=True) if high != low
    ]
    if differing:
        raise ConfigError(
            f"the ranks {list(groups.ranks)} of a pipeline were given different {', '.join(differing)}; each must be "
            "given the same"
        )


def describe_step(
    schedule: Schedule,
    batches: Sequence[Batch],
    normalizer: int,
    cuts: Sequence[int],
    specs: TensorSpecs,
) -> list[tuple[str, bytes]]:
    """What must be the same on all ranks; of micro-batches their number, ids, and the shapes at the
    cuts.
    """
    shapes = [
        [
            getattr(batch, "sample_ids", None),
            *(
                [
                    (name, spec.shape, str(spec.dtype))
                    for name, spec in sorted(specs(cut, batch).items())
                ]
                for cut in cuts
            ),
        ]
        for batch in batches
    ]
    actions = (schedule.kinds, schedule.stages, schedule.micro_batches, schedule.rank_offsets)
    return [
        ("micro-batches", repr(shapes).encode()),
        ("normalizers", str(normalizer).encode()),
        ("schedules", b"".join(part.astype("<i8").tobytes() for part in actions)),
    ]

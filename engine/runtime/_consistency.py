"""Check that all ranks of a pipeline were given the same step.

Each rank has its own loader, and only tensors are sent. Loaders that disagree would otherwise show
as a message of another size, which ends a process without a word, or not at all.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from balance.errors import ConfigError
from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.errors import peer_errors
from engine.runtime.stage_io import Batch, TensorSpecs
from engine.simulator.schedule import Schedule


def check_consistent(
    groups: ProcessGroups, parts: Sequence[tuple[str, bytes]], device: torch.device
) -> None:
    """ConfigError on all ranks of a pipeline if any part, (name, content), differs between them.

    Costs one small message.
    """
    hashes = [
        int.from_bytes(blake2b(value, digest_size=7).digest(), "little") for _, value in parts
    ]
    # maximum and negated minimum in one message
    both = torch.tensor([*hashes, *(-value for value in hashes)], dtype=torch.int64, device=device)
    with peer_errors(groups.ranks):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=groups.pipeline)
    most, least = both[: len(hashes)].tolist(), (-both[len(hashes) :]).tolist()
    differing = [
        name for (name, _), high, low in zip(parts, most, least, strict=True) if high != low
    ]
    if differing:
        raise ConfigError(
            f"the ranks {list(groups.ranks)} of a pipeline were given different"
            f" {', '.join(differing)}; give each the same"
        )


def describe_step(
    schedule: Schedule,
    batches: Sequence[Batch],
    normalizer: int,
    cuts: Sequence[int],
    specs: TensorSpecs,
) -> list[tuple[str, bytes]]:
    """Parts of a step that must be equal on all ranks, for `check_consistent`.

    Micro-batches are described by their number, sample ids and shapes at the cuts.
    """
    shapes = [
        [
            getattr(batch, "sample_ids", None),
            *(
                [(name, spec.shape, str(spec.dtype)) for name, spec in sorted(crossing.items())]
                for crossing in (specs(cut, batch) for cut in cuts)
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

"""Check that all ranks of a pipeline were given the same step.

Each rank has its own loader, and only tensors are sent. Loaders that disagree would otherwise show
as a message of another size, which ends a process without a word, or not at all.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.communication.process_groups import ProcessGroups
from isobatch.engine.runtime.stage_executor import RankLayers
from isobatch.engine.runtime.stage_io import Batch
from isobatch.engine.simulator.schedule import Schedule


def check_same_step(
    groups: ProcessGroups,
    local: RankLayers,
    schedule: Schedule,
    batches: Sequence[Batch],
    normalizer: float,
) -> None:
    """ConfigError on all ranks of a pipeline if any part of a step differs between them.

    Compares sample ids and shapes at the cuts of all micro-batches. Costs one small message.
    """
    actions = (schedule.kinds, schedule.stages, schedule.micro_batches, schedule.rank_offsets)
    parts = {
        "micro-batches": repr([_describe(local, batch) for batch in batches]).encode(),
        "normalizers": str(normalizer).encode(),
        "schedules": b"".join(part.astype("<i8").tobytes() for part in actions),
    }
    digests = (blake2b(part, digest_size=7).digest() for part in parts.values())
    hashes = torch.tensor([int.from_bytes(digest, "little") for digest in digests])
    # maximum and negated minimum in one message
    both = torch.stack([hashes, -hashes]).to(local.device)
    all_reduce(both, groups.pipeline, dist.ReduceOp.MAX)
    differs = both.sum(0).tolist()
    differing = [name for name, spread in zip(parts, differs, strict=True) if spread]
    if differing:
        raise ConfigError(
            f"the ranks {list(groups.ranks)} of a pipeline were given different"
            f" {', '.join(differing)}; give each the same"
        )


def _describe(local: RankLayers, batch: Batch) -> list[object]:
    """Sample ids of a micro-batch, and its tensors at each cut."""
    crossings = (local.specs(cut, batch) for cut in local.borders[1:-1])
    return [
        getattr(batch, "sample_ids", None),
        *(
            [(name, spec.shape, str(spec.dtype)) for name, spec in sorted(crossing.items())]
            for crossing in crossings
        ),
    ]

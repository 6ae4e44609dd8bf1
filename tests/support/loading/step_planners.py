"""Simple step planners, made of the packages' own algorithms."""

import numpy as np

from isobatch.balance.dispatching.post_balancing import as_batches, balance_sums
from isobatch.balance.steps.step_planner import StepAssignment, StepRequest
from isobatch.common.types import Groups
from isobatch.engine.tuning.pack import pack_balanced

MAX_LEN = 80


def repack(samples: StepRequest) -> StepAssignment:
    """OrchMLLM's cut of the step's tokens into ranks, then PipeTune's packing of each rank's
    samples.
    """
    lengths = samples.counts.seq_len
    ranks = as_batches(balance_sums(lengths, samples.dp), samples.dp)
    micro_batches = []
    for rank in range(samples.dp):
        own = ranks[rank]
        packed = pack_balanced(lengths[own], lengths[own], max_len=MAX_LEN)
        micro_batches.append(Groups(own[packed.samples], packed.offsets))
    return StepAssignment(micro_batches=tuple(micro_batches))


def dispatch(samples: StepRequest) -> StepAssignment:
    """As `repack`, and images are encoded wherever the sums of ViT tokens are even."""
    vit_tokens = samples.counts.num_vit_tokens
    ranks = as_batches(balance_sums(vit_tokens, samples.dp), samples.dp)
    encoding = []
    for rank in range(samples.dp):
        own = ranks[rank][vit_tokens[ranks[rank]] > 0]
        encoding.append(Groups(own, np.array([0, len(own)])))
    return StepAssignment(
        micro_batches=repack(samples).micro_batches, encoders={"vision": tuple(encoding)}
    )

"""What ranks run in the tests of recomputation adapted to memory: the choice, beside all choices
that there are.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.engine.cost_model.costs import MEMORY, Costs
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.recompute_trials import (
    AdaptOptions,
    StepObserver,
    adapt_running,
)
from isobatch.engine.runtime.stage_io import LayerStack, TensorSpec
from support.models.toy_model import make_model, run_alone
from support.rank_programs.rank_faults import batches_of, make_pipeline
from support.rank_programs.rank_out_of_memory import gradients_off

WIDTH, PLENTY = 16, 1 << 40
TIMES = {"start": 1, "wide": 5, "narrow": 2, "end": 3}
"""Of recomputation, by kind."""
STAGES = (("start", "wide", "wide", "narrow"), ("narrow", "wide", "wide", "end"))
KINDS = (*STAGES[0], *STAGES[1])
BORDERS = (0, len(STAGES[0]), len(KINDS))


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A micro-batch."""

    values: Tensor


class Layer(nn.Module):
    """Holds its input and, unless it is recomputed, several times as much between."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        inner = {"start": 2, "wide": 12, "narrow": 4, "end": 3}[kind] * WIDTH
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, inner),
            nn.Linear(inner, WIDTH),
        )

    def forward(self, carry, batch):
        hidden = batch.values if self.kind == "start" else carry["hidden"]
        hidden = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        return {"loss": hidden.square().sum()} if self.kind == "end" else {"hidden": hidden}


def two_kinds():
    torch.manual_seed(0)

    def specs(cut, batch):
        return {"hidden": TensorSpec(shape=tuple(batch.values.shape), dtype=torch.float32)}

    return LayerStack(layers=[Layer(kind) for kind in KINDS], specs=specs)


def costs_of_kinds(kinds=KINDS):
    """All that counts of them: kinds and times."""
    nothing, ones = np.zeros((len(kinds), 1), np.int64), np.ones((len(kinds), 1), np.int64)
    times = np.array([[TIMES.get(kind, 1)] for kind in kinds])
    return Costs(
        names=kinds,
        kinds=kinds,
        **dict.fromkeys(("forward_ns", "input_grad_ns", "weight_grad_ns", "send_ns"), ones),
        recompute_ns=times * (1 + dist.get_rank()),  # as if each rank had measured other times
        **dict.fromkeys(MEMORY, nothing),
        state_bytes=nothing[:, 0],
        param_counts=nothing[:, 0],
        sends_grad=np.ones(len(kinds), bool),
    )


def adapt_both(said, dp, shares, folder):
    """For memories between what everything recomputed needs and what nothing recomputed does: the
    choices.
    """
    replica, generator = dist.get_rank() // 2, torch.Generator().manual_seed(3)
    batches = [
        Rows(values=torch.randn(40 + 8 * replica, WIDTH, generator=generator)) for _ in range(2)
    ]
    pipelines = [list(range(first, first + 2)) for first in range(0, 2 * dp, 2)]
    for schedule in shares:
        options = PipelineOptions(schedule=schedule)
        pipeline = Pipeline(two_kinds(), BORDERS, np.zeros(len(KINDS), bool), pipelines, options)
        said[schedule] = _adapt_beside_all(
            pipeline, [batches, batches[:1]], shares[schedule], Path(folder)
        )


def _adapt_beside_all(pipeline, steps, shares, folder):
    needs = PLENTY - np.array(
        [StepObserver(pipeline, steps, limit_bytes=PLENTY)(mask) for mask in every_mask()]
    )
    least, most = int(needs[-1].max()), int(needs[0].max())
    found = {"needs": needs.tolist(), "limits": [], "adapted": []}
    for share in shares:
        limit = int(least + share * (most - least))
        file = folder / f"{share}.json"
        adapted = adapt_running(
            pipeline, costs_of_kinds(), steps, AdaptOptions(limit_bytes=limit, evidence=file)
        )
        assert pipeline.recompute.tolist() == adapted.recompute.tolist()
        told = json.loads(file.read_text()) if dist.get_rank() == 0 else None
        found["limits"].append(limit)
        found["adapted"].append(
            {"left": adapted.left_bytes.tolist(), "mask": pipeline.recompute.tolist(), "told": told}
        )
    pipeline.set_recompute(np.arange(len(KINDS)) % 2 == 0)
    found["refused"] = [_refusal(pipeline, steps, limit) for limit in (least - 1, 0)]
    found["mask then"] = pipeline.recompute.tolist()
    return found


def every_mask():
    """Both stages alike: any of each one's layers; the first recomputes nothing, the last
    everything.
    """
    size = len(STAGES[0])
    return [
        np.tile([bool(number >> place & 1) for place in range(size)], 2)
        for number in range(1 << size)
    ]


def _refusal(pipeline, steps, limit):
    try:
        adapt_running(pipeline, costs_of_kinds(), steps, AdaptOptions(limit_bytes=limit))
    except IsobatchError as error:
        return type(error).__name__, str(error)


def observe(said):
    """Gradients with masks that change; what an observation leaves as it was; optimizer state; bad
    questions.
    """
    batches, alone = batches_of(4), make_model()
    labels = sum(batch.num_loss_tokens for batch in batches)
    run_alone(alone, batches, labels)
    pipeline, said["off"] = make_pipeline(2), []
    for seed in range(4):
        pipeline.set_recompute(np.random.default_rng(seed).random(11) < 0.5)
        pipeline.step(batches, labels)
        pipeline.reduce_gradients()
        said["off"].append(gradients_off(pipeline, alone))
        for weight in pipeline.parameters():
            weight.grad = None
    model = make_model(dropout=0.3)
    pipeline = make_pipeline(2, model=model, schedule="zero_bubble")
    weights = [weight.detach().clone() for weight in pipeline.parameters()]
    optimizer = torch.optim.Adam(pipeline.parameters())
    state, mask = torch.get_rng_state(), np.arange(11) % 3 == 0
    without = StepObserver(pipeline, [batches], limit_bytes=PLENTY, optimizer=optimizer)(mask)
    said["same generator"] = bool((torch.get_rng_state() == state).all())
    said["same weights"] = all(map(torch.equal, weights, pipeline.parameters()))
    said["no gradients"] = all(weight.grad is None for weight in pipeline.parameters())
    said["steps run"] = pipeline.steps_run
    for weight in pipeline.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    left = StepObserver(pipeline, [batches], limit_bytes=PLENTY, optimizer=optimizer)(mask)
    said["state"] = [int((without - left)[dist.get_rank()]), _state_bytes(optimizer)]
    said["exact limit"] = _with_exact_limit(pipeline, batches, mask)
    said["questions"] = _questions(pipeline, batches)


def _state_bytes(optimizer):
    return sum(tensor.nbytes for fields in optimizer.state.values() for tensor in fields.values())


def _with_exact_limit(pipeline, batches, mask):
    """Left with just enough for the fullest stage; and who ran out with a byte less."""
    needs = PLENTY - StepObserver(pipeline, [batches], limit_bytes=PLENTY)(mask)
    left = StepObserver(pipeline, [batches], limit_bytes=int(needs.max()))(mask)
    try:
        StepObserver(pipeline, [batches], limit_bytes=int(needs.min()) - 1)(mask)
    except OutOfMemory as error:
        return int(left.min()), list(error.stages)


def _questions(pipeline, batches):
    """What is refused, in one line."""
    several = Pipeline(
        make_model(),
        (0, 3, 6, 9, 11),
        np.zeros(11),
        [[0, 1]],
        PipelineOptions(schedule="interleaved", stages_per_rank=2),
    )
    questions = [
        lambda: StepObserver(several, [batches], limit_bytes=1),
        lambda: StepObserver(pipeline, [batches]),
        lambda: StepObserver(pipeline, [], limit_bytes=1),
        lambda: StepObserver(pipeline, [[]], limit_bytes=1),
        lambda: adapt_running(
            pipeline, costs_of_kinds(), [batches], AdaptOptions(limit_bytes=PLENTY)
        ),
        lambda: adapt_running(
            pipeline,
            costs_of_kinds((f"rank {dist.get_rank()}",) * 11),
            [batches],
            AdaptOptions(limit_bytes=PLENTY),
        ),
        lambda: pipeline.set_recompute([True]),
    ]
    said = []
    for question in questions:
        try:
            question()
        except ConfigError as error:
            said.append(str(error))
    return said

"""Three modalities balanced phase by phase: losses and gradients as of one process; what travels is
as planned.
"""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from papers.dispatch_times import phase_volumes

from isobatch.balance.steps.step_planner import StepAssignment, StepRequest, check_assignment
from isobatch.common.errors import ConfigError
from isobatch.common.types import Groups
from isobatch.engine.dispatching.dispatch import DispatchedSteps, DispatchOptions
from isobatch.engine.runtime.communication.feature_all_to_all import exchange_features
from support.costs.step_routes import step_routes
from support.models.three_modalities import TOKENS, counts_of, deliver, draw, make_model, run_alone
from support.ranks import on_ranks

TOLERANCE = 1e-6
STEPS, ROUNDS = 3, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    algorithms: tuple[str, ...] = ("vision", "audio", "llm")
    frozen: tuple[str, ...] = ()
    text_only: bool = False
    alone_on: int | None = None
    """A rank that draws everything; the others draw nothing."""


CASES = [
    Case(name="balanced"),
    Case(name="not balanced", algorithms=()),
    Case(name="as one phase, by the language model's load", algorithms=("llm",)),
    Case(name="encoders only", algorithms=("vision", "audio")),
    Case(name="vision frozen", frozen=("vision",)),
    Case(name="both encoders frozen", frozen=("vision", "audio")),
    Case(name="text only", text_only=True),
    Case(
        name="one rank draws everything, encoders balanced",
        algorithms=("vision", "audio"),
        alone_on=1,
    ),
]
ON_FOUR = (
    "balanced",
    "not balanced",
    "vision frozen",
    "one rank draws everything, encoders balanced",
)
ALGORITHMS = {"vision": "sums", "audio": "padded", "llm": "sums"}


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, CASES), (4, [case for case in CASES if case.name in ON_FOUR])],
    ids=["two", "four"],
)
def test_losses_and_gradients_equal_one_process_and_volumes_the_plan(tmp_path, world_size, cases):
    on_ranks(world_size, tmp_path, _run_all, cases)


def _run_all(cases):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for case in cases:
        try:
            _run_case(case, rank, world_size)
        except Exception as error:
            raise AssertionError(f"{case.name}, rank {rank}: {error}") from error
    _wrong_lengths_are_named(rank)


def _run_case(case, rank, world_size):
    models = [make_model(), make_model()]
    for model in models:
        for name in case.frozen:
            model[name].requires_grad_(False)
    dispatched, alone = models
    optimizers = [
        torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=0.2)
        for model in models
    ]
    options = DispatchOptions(
        ranks_per_node=max(1, world_size // 2),
        algorithms={name: ALGORITHMS[name] for name in case.algorithms},
        reads_directly=True,
    )
    for step in range(STEPS):
        samples = draw(10 + step, 9 + 5 * step, text_only=case.text_only)
        expected = run_alone(alone, samples)
        found = _run_step(
            dispatched, samples, DispatchedSteps(options=options), case, (rank, world_size)
        )
        assert abs(found - expected) <= TOLERANCE * expected, (
            f"step {step}: loss {found}, not {expected}"
        )
        _compare(dispatched, alone, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dispatched.load_state_dict(alone.state_dict())


def _run_step(model, samples, planner, case, place):
    """One step on one rank, gradients summed over ranks; -> the loss of all ranks."""
    rank, world_size = place
    drawn = StepRequest(
        counts=counts_of(samples),
        offsets=_offsets(len(samples), world_size * ROUNDS, case),
        dp=world_size,
        micro_batches=ROUNDS,
    )
    work = planner(drawn)
    check_assignment(work, drawn)
    step = deliver(samples, work, rank)
    rounds = pickle.loads(pickle.dumps(step.note)).rounds  # a loader may plan in another process
    loss = torch.zeros(())
    with _Traffic(world_size) as traffic:
        for number, (batch, routes) in enumerate(zip(step, rounds, strict=True)):
            made = {name: model[name](step.encoders[name][number]) for name in routes}
            came = exchange_features(made, routes, frozen=case.frozen)
            here = {name: model[name](batch) for name in TOKENS if name not in routes}
            own = model["language"](batch, came.features | here) / batch.num_loss_tokens
            (own + came.link).backward()
            loss += own.detach()
    _check_traffic(traffic, planner.plan(drawn), set(TOKENS) - set(case.frozen), planner.options)
    dist.all_reduce(loss)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
    return float(loss)


def _offsets(count, parts, case):
    if case.alone_on is not None:
        first = case.alone_on * ROUNDS
        return np.array([0] * (first + 1) + [count // 2] + [count] * (parts - first - 1))
    rng = np.random.default_rng(count)
    return np.concatenate([[0], np.sort(rng.integers(0, count + 1, parts - 1)), [count]])


class _Traffic:
    """Counts rows that `dist.all_to_all_single` is really given for each rank; int64, (calls,
    ranks).
    """

    def __init__(self, world_size):
        self.calls, self._world_size = [], world_size

    def __enter__(self):
        self._real = dist.all_to_all_single
        dist.all_to_all_single = self._count
        return self

    def __exit__(self, *_):
        dist.all_to_all_single = self._real

    def _count(self, output, given, receives, sends, group=None):
        assert sum(sends) == len(given)
        self.calls.append(sends)
        return self._real(output, given, receives, sends, group=group)


def _check_traffic(traffic, plans, trained, options):
    """All ranks' sends, summed up as the plan predicts them: there once, gradients back once."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, traffic.calls)
    sent = np.array(every).reshape(len(every), -1, len(every))  # (senders, calls, receivers)
    nodes = np.arange(len(every)) // options.ranks_per_node
    calls = 0
    for plan in plans:
        there = []
        for name in sorted(options.algorithms.keys() - {"llm"}):
            volumes = phase_volumes(plan, name).features
            if volumes.total:
                there.append((name, volumes, sent[:, calls]))
                calls += 1
        for _, volumes, rows in there:
            assert rows.sum() - np.trace(rows) == volumes.total
            abroad = (rows * (nodes[:, None] != nodes)).sum(axis=1)
            assert abroad.max() == volumes.largest_inter_node
        for name, _, rows in there:
            if name in trained:
                np.testing.assert_array_equal(sent[:, calls], rows.T)
                calls += 1
    assert calls == sent.shape[1]


def _compare(dispatched, alone, step):
    """Each part's gradients as one vector: single ones may be sums that cancel out."""
    for name in dispatched:
        own, wanted = (_gradients(model[name]) for model in (dispatched, alone))
        off = float((own - wanted).norm() / wanted.norm().clamp(min=1e-6))
        assert off <= TOLERANCE, f"step {step}, {name}: gradients off by {off:.1e}"


def _gradients(part):
    weights = [weight for weight in part.parameters() if weight.requires_grad]
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights
    ]
    return torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in gradients)])


def _wrong_lengths_are_named(rank):
    one, other = Groups(np.array([0]), np.array([0, 1])), Groups(np.array([1]), np.array([0, 1]))
    work = StepAssignment(micro_batches=(one, other), encoders={"vision": (other, one)})
    if rank < 2:
        routes = step_routes(work, {"vision": np.array([3, 2])}, rank)[0]
        with pytest.raises(
            ConfigError, match="vision encoder made 7 features, its batch should give"
        ):
            exchange_features({"vision": torch.zeros(7, 4)}, routes)

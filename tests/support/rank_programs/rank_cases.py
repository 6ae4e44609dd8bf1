"""What each rank runs in these tests: the pipeline beside the same steps in one process, gradients
compared.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from isobatch.engine.cost_model.costs import MEMORY, Costs
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.communication.p2p import make_p2p_schedule
from isobatch.engine.runtime.layer_rng import LayerRng
from isobatch.engine.runtime.optimizer.main_weights import MainWeights, main_param
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.simulator.schedule import Action, PassKind, Schedule, make_schedule
from isobatch.engine.simulator.simulate import Deadlock
from isobatch.engine.simulator.stages import stage_costs
from isobatch.engine.tuning.order_times import order_problem
from isobatch.engine.tuning.precompute import encode_ahead, frozen_encoder, where_to_encode
from support.models.toy_model import freeze, make_batch, make_model, run_alone
from support.ranks import on_ranks

SEED = 5
TOLERANCE = 1e-6
"""Of gradients and losses, relative to their size; float32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline and steps to run."""

    name: str
    pp: int
    dp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    deferred: tuple[int, ...] | None = None
    recompute: str = "none"
    frozen: tuple[str | int, ...] = ()
    """Parts of the model, or places of layers."""
    tied: bool = True
    clip: float | None = None
    counts: tuple[int, ...] = (3, 1)
    """Micro-batches of each step and replica."""
    text_only: tuple[int, ...] = (1,)
    """Places of micro-batches without images."""
    borders: tuple[int, ...] = field(default=())
    mode: TrainingMode | None = None
    dropout: float = 0.0
    """Drawn by (step, micro-batch, layer), here and in one process."""
    reorder: bool = False
    encode_on: tuple[int, ...] = ()
    """Ranks that encode some micro-batches ahead."""
    seed: int = 0
    """Of what is drawn; 0 for the length of the name."""
    planned: bool = False
    """Whether the planner says which are encoded ahead and in which order micro-batches enter;
    otherwise, by chance.
    """


def run_cases(folder: str, world_size: int, cases: list[Case]) -> None:
    """Run all cases in `world_size` processes; the first failure of any is raised."""
    on_ranks(world_size, folder, _run_all, cases)


def _run_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            run_case(case)
        except Exception as error:
            raise AssertionError(f"{case.name}, rank {dist.get_rank()}: {error}") from error


def run_case(case: Case) -> None:
    """Steps in the pipeline and alone, with an optimizer step after each; every gradient must
    agree.
    """
    piped, alone = (make_model(tied=case.tied, dropout=case.dropout) for _ in range(2))
    # in bf16 a product of other rows rounds otherwise
    alone.layers[-1].all_logits = case.mode is None or case.mode.precision == "fp32"
    for part in case.frozen:
        freeze(piped, part)
        freeze(alone, part)
    num_stages, rng = (
        case.pp * case.stages_per_rank,
        np.random.default_rng(case.seed or len(case.name)),
    )
    num_layers = len(piped.layers)
    borders = case.borders or (
        0,
        *sorted(rng.choice(np.arange(1, num_layers), num_stages - 1, replace=False)),
        num_layers,
    )
    recompute = {"none": np.zeros, "all": np.ones}.get(
        case.recompute, lambda n: rng.random(n) < 0.5
    )(num_layers)
    pipelines = [
        list(range(first, first + case.pp)) for first in range(0, case.pp * case.dp, case.pp)
    ]
    options = PipelineOptions(
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        deferred=case.deferred,
        encoder_ranks=case.encode_on,
        dropout_seed=SEED if case.dropout else None,
        mode=case.mode,
    )
    pipeline = Pipeline(piped, borders, recompute.astype(bool), pipelines, options)
    replica = dist.get_rank() // case.pp
    # the same dtypes in one process
    whole = MainWeights(_weights(alone), case.mode and replace(case.mode, zero_stage=0), None)
    mains = [main_param(weight) for weight in whole.weights]
    optimizers = [_optimizer(pipeline.parameters()), _optimizer(mains)]
    for step, count in enumerate(case.counts):
        generator = torch.Generator().manual_seed(100 + step + 1000 * case.seed)
        batches = [_batch(generator, place, step, case) for place in range(count * case.dp)]
        normalizer = max(1, sum(batch.num_loss_tokens for batch in batches))
        expected = run_alone(
            alone, batches, normalizer, _drawing(step, count) if case.dropout else None
        )
        own = batches[replica * count : (replica + 1) * count]
        order = rng.permutation(count) if case.reorder else None
        schedule = (
            _planned(case, borders, order, rng) if case.planned else _schedule(case, count, rng)
        )
        if order is not None:
            schedule = schedule or options.make_schedule(case.pp, count)
            schedule = replace(schedule, micro_batches=order[schedule.micro_batches])
        result = pipeline.step(own, normalizer, schedule)
        loss = torch.tensor(result.loss)
        if case.dp > 1:
            dist.all_reduce(loss)
            loss /= case.pp
        assert abs(float(loss) - expected) <= TOLERANCE * abs(expected), (
            f"step {step}: loss {float(loss)}, not {expected}"
        )
        pipeline.reduce_gradients()
        whole.reduce_gradients()
        if case.clip is not None:
            _clip_both(pipeline, mains, case.clip)
        _compare(pipeline, alone, step)
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        # so that roundings of one step do not grow in the next
        whole.gather()
        for place, layer in pipeline.layers.items():
            copy_weights(layer, alone.layers[place])


def _drawing(step, count):
    """What one process does before each layer, to draw what the pipeline does."""

    def seed(layer, number):
        draws = LayerRng(seed=SEED, step=step, replica=number // count)
        draws.seed_layer(layer, number % count, torch.device("cpu"))

    return seed


def _schedule(case, count, rng):
    """The case's own, with encodings anywhere; None for that which the pipeline makes itself."""
    if not case.encode_on:
        return None
    plain = make_schedule(case.schedule, case.pp, count, case.stages_per_rank)
    encoded = rng.permutation(count)[: -(-2 * count // 3)].tolist()
    while True:
        actions = [plain.of_rank(rank) for rank in range(case.pp)]
        for number in encoded:
            own = actions[rng.choice(case.encode_on)]
            own.insert(rng.integers(len(own)), Action(PassKind.ENCODE, 0, number))
        made = Schedule.of("encoding", plain.num_stages, count, actions)
        try:
            make_p2p_schedule(made, (True,) * (plain.num_stages - 1) + (False,), 0)
        except Deadlock:
            continue
        return made


def _planned(case, borders, order, rng):
    """The case's schedule with encodings where the planner puts them, for layers that take any
    time.
    """
    layers, frozen, shape = borders[-1], 4, (borders[-1], len(order))
    times = [rng.integers(1, 50, shape) for _ in range(5)]
    nothing = np.zeros(shape, np.int64)
    costs = Costs(
        names=("layer",) * layers,
        kinds=("layer",) * layers,
        **dict(
            zip(
                ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns"),
                times,
                strict=True,
            )
        ),
        **dict.fromkeys(MEMORY, nothing),
        state_bytes=nothing[:, 0],
        param_counts=nothing[:, 0],
        sends_grad=np.arange(layers) >= frozen,
    )
    costs.send_ns[-1] = 0
    stages = stage_costs(costs, np.array(borders), np.zeros(layers, bool))
    plain = make_schedule(case.schedule, case.pp, len(order), case.stages_per_rank)
    encoder = frozen_encoder(costs, np.array(borders))
    ahead = where_to_encode(encoder, plain, stages, where="any")
    schedule = encode_ahead(order_problem(plain, stages, None, ahead), encoder, order).schedule
    assert (schedule.kinds == PassKind.ENCODE).any() or len(order) == 1
    return schedule


def _weights(model):
    """Each once, tied or not."""
    return list(
        {id(weight): weight for layer in model.layers for weight in layer.parameters()}.values()
    )


def _optimizer(weights):
    trained = [weight for weight in weights if weight.requires_grad]
    return torch.optim.SGD(trained, lr=0.1) if trained else None


def _batch(generator, place, step, case):
    lengths = torch.randint(2, 12, (1 + place % 3,), generator=generator).tolist()
    # steps after the first are shorter
    lengths = [max(2, length - 3 * step) for length in lengths]
    patches = 0 if place in case.text_only else min(sum(lengths) - 1, 1 + place % 4)
    batch = make_batch(generator, lengths, patches)
    if torch.rand(1, generator=generator) < 0.2:
        batch = replace(batch, labels=torch.full_like(batch.labels, -100))
    return batch


@torch.no_grad()
def copy_weights(layer, other):
    """All weights of another layer, and what the optimizer has of them."""
    layer.load_state_dict(other.state_dict())
    for weight, given in zip(layer.parameters(), other.parameters(), strict=True):
        main = main_param(weight)
        if isinstance(main, DTensor):
            mesh, placements = main.device_mesh, main.placements
            main.copy_(distribute_tensor(main_param(given).detach().clone(), mesh, placements))
        else:
            main.copy_(main_param(given))


def reduced_gradient(weight):
    """A weight's gradient as the optimizer gets it, gathered; None without one."""
    gradient = main_param(weight).grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _clip_both(pipeline, mains, most):
    own = [weight for weight in mains if weight.grad is not None]
    expected = float(torch.nn.utils.clip_grad_norm_(own, most))
    found = pipeline.clip_gradients(most)
    assert abs(found - expected) <= 1e-5 * expected, f"norm {found}, not {expected}"


def _compare(pipeline, alone, step):
    """A layer's gradients as one vector: single ones may be sums that cancel out."""
    for place, layer in pipeline.layers.items():
        own, wanted = [], []
        for weight, other in zip(layer.parameters(), alone.layers[place].parameters(), strict=True):
            found, expected = reduced_gradient(weight), reduced_gradient(other)
            if not weight.requires_grad:
                assert found is None
                continue
            own.append(found.flatten())
            expected = torch.zeros_like(found) if expected is None else expected
            wanted.append(expected.flatten())
        if own:
            difference = (torch.cat(own) - torch.cat(wanted)).norm()
            off = float(difference / torch.cat(wanted).norm().clamp(min=1e-6))
            assert off <= TOLERANCE, f"step {step}, layer {place}: gradients off by {off:.1e}"

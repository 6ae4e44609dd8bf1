"""`Pipeline`: one rank of a pipeline, trained as a plan says.

A step is a list of micro-batches of any number and lengths; the schedule is made for their number.
Each rank runs its own operations in order (`engine.simulator.schedule`); the messages between ranks
are the edges of the `Program` that the simulator runs. Losses are divided by the step's labels on
all ranks: gradients, summed over replicas once per step, are those of the step as one batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.communication.collectives import all_reduce, on_all_ranks
from isobatch.engine.runtime.communication.p2p import forward_only, make_p2p_schedule
from isobatch.engine.runtime.communication.process_groups import (
    ProcessGroups,
    make_groups,
    open_links,
    sum_gradients,
)
from isobatch.engine.runtime.cpu_memory import uncounted
from isobatch.engine.runtime.errors import GradientNotFinite
from isobatch.engine.runtime.layer_rng import LayerRng
from isobatch.engine.runtime.optimizer.main_weights import (
    MainWeights,
    gradient_of,
    local_part,
    main_param,
    message_specs,
)
from isobatch.engine.runtime.stage_executor import RankLayers, StageExecutor, StepResult
from isobatch.engine.runtime.stage_io import Batch, LayerStack
from isobatch.engine.runtime.stopwatch import clock_offsets
from isobatch.engine.simulator.measured_timeline import measured_timeline
from isobatch.engine.simulator.schedule import PassKind, Schedule, make_schedule
from isobatch.engine.simulator.simulate import Timeline
from isobatch.engine.simulator.stages import check_partition

ROW, PART = 1 << 12, 1 << 24
"""Numbers of a gradient whose norm is taken at once: in float32, and in float64, which copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options of a pipeline other than its partition."""

    schedule: str = "1f1b"
    stages_per_rank: int = 1
    deferred: Sequence[int] | None = None
    """Weight gradients that each rank may hold back, as a plan has it (`Plan.deferred`)."""
    device: torch.device | str = "cpu"
    mode: TrainingMode | None = None
    """Dtypes and sharding of weights and optimizer, as a plan has it (`Plan.training.mode`). None:
    the model's own dtypes, and every replica has all of the optimizer's state."""
    encoder_ranks: Sequence[int] = ()
    """Ranks besides the first that hold a copy of the frozen layers in front: they can encode
    ahead, as schedules of `engine.tuning.precompute` ask."""
    dropout_seed: int | None = None
    """Seed with which random numbers do not depend on partition, schedule and recomputation
    (`LayerRng`). None: torch's generators; a recomputed layer gets the same numbers twice."""
    timeout_s: float = 300.0
    """Time that a rank waits for another: longer than any step takes."""

    def make_schedule(self, num_ranks: int, num_micro_batches: int) -> Schedule:
        """The schedule of a step of so many micro-batches."""
        per_rank = self.stages_per_rank
        return make_schedule(self.schedule, num_ranks, num_micro_batches, per_rank, self.deferred)


class Pipeline:
    """One rank of a pipeline. All ranks make it with all layers; each loads and runs its own."""

    def __init__(
        self,
        model: LayerStack,
        borders: IntArray | Sequence[int],
        recompute: NDArray[np.bool_] | Sequence[bool],
        pipelines: Sequence[Sequence[int]],
        options: PipelineOptions | None = None,
    ) -> None:
        """`pipelines`: the world's ranks of each replica, first stage first.

        Arguments and weights must be equal on all ranks. ConfigError if they do not fit together.
        """
        self._options = options or PipelineOptions()
        cuts = tuple(int(border) for border in borders)
        _check(model, cuts, pipelines, self._options)
        chosen = _as_tuple(recompute, len(model.layers))
        ahead = self._options.encoder_ranks
        self._groups = make_groups(pipelines, model, cuts, ahead, self._options.timeout_s)
        self.steps_run = 0
        """Steps so far, on which dropout depends; set it when training resumes from a state."""
        self._checked = False
        device = torch.device(self._options.device)
        rank = self._groups.rank
        open_links(self._groups, device)
        encodes = rank in (0, *ahead) and model.first_trained <= cuts[1]
        ahead_of_all = range(model.first_trained if encodes else 0)
        indices = layers_of_rank(cuts, rank, len(self._groups.ranks))
        if model.load is not None:
            load = model.load
            on_all_ranks(lambda: [load(index) for index in (*ahead_of_all, *indices)])
        encoder = [model.layers[index].to(device) for index in ahead_of_all]
        layers = {index: model.layers[index].to(device) for index in indices}
        mode = self._options.mode
        weights = (
            weight for layer in [*layers.values(), *encoder] for weight in layer.parameters()
        )
        self._weights = MainWeights(dict.fromkeys(weights), mode, self._groups.replicas)
        self._local = RankLayers(
            layers=layers,
            encoder=encoder,
            borders=cuts,
            recompute=chosen,
            specs=model.specs if mode is None else partial(message_specs, model.specs, mode),
            first_trained=model.first_trained,
            device=device,
        )

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Layers of this rank, by index in the model."""
        return self._local.layers

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's layers for an optimizer, each once: in a training mode these
        may be float32 masters, or rows of them (`engine.runtime.optimizer.main_weights`)."""
        every = (weight for layer in self.layers.values() for weight in layer.parameters())
        return [main_param(weight) for weight in dict.fromkeys(every)]

    def gather_weights(self) -> None:
        """Set the layers' weights to what the optimizer made of `parameters()`; `step` does too.

        All ranks call it.
        """
        self._weights.gather()

    def drop_gradients(self) -> None:
        """Leave no gradients, neither reduced ones nor those of a step that was not reduced."""
        self._weights.drop_gradients()

    @property
    def recompute(self) -> NDArray[np.bool_]:
        """Which layers are recomputed, (layers,)."""
        return np.array(self._local.recompute)

    def set_recompute(self, recompute: NDArray[np.bool_] | Sequence[bool]) -> None:
        """Change which layers are recomputed, (layers,), from the next step; equal on all ranks."""
        self._local = replace(self._local, recompute=_as_tuple(recompute, self._local.borders[-1]))

    def step(
        self,
        batches: Sequence[Batch],
        normalizer: float,
        schedule: Schedule | None = None,
    ) -> StepResult:
        """Forward and backward passes of a step; adds to the gradients of `parameters()`.

        `batches`: on the CPU, each copied to the device when it first runs; of those on it already,
        reading sizes waits. `normalizer`: divisor of the losses of all replicas. `schedule`: one
        other than the plan's, for as many micro-batches; it may encode ahead. PeerLost if another
        rank is lost; LossNotFinite and SpecMismatch name the samples. OutOfMemory on all ranks of
        all replicas if any ran out of memory in a pass: the gradients are then invalid, and the
        next step may be run.
        """
        options, groups = self._options, self._groups
        if schedule is None:
            schedule = options.make_schedule(len(groups.ranks), len(batches))
        self._check_schedule(schedule)
        if not self._checked:
            with uncounted():
                _check_same_step(groups, self._local, schedule, batches, normalizer)
            self._checked = True
        rng = None
        if options.dropout_seed is not None:
            rng = LayerRng(seed=options.dropout_seed, step=self.steps_run, replica=groups.replica)
        self.gather_weights()
        try:
            result = StageExecutor(self._local, groups, schedule, batches, normalizer, rng).run()
        except IsobatchError:
            self._weights.drop_invalid()
            raise
        self.steps_run += 1
        return result

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Sum of the losses of this replica's micro-batches, by forward passes without dropout.

        All ranks call it, equally often. Gradients, random numbers and `steps_run` stay as they
        are. Errors as of `step`.
        """
        options, groups = self._options, self._groups
        schedule = options.make_schedule(len(groups.ranks), len(batches))
        local = replace(self._local, first_trained=self._local.borders[-1])  # no gradient is sent
        modules = [module for layer in self.layers.values() for module in layer.modules()]
        training = [module.training for module in modules]
        self.gather_weights()
        try:
            for layer in self.layers.values():
                layer.eval()
            executor = StageExecutor(local, groups, forward_only(schedule), batches, 1.0, None)
            return executor.run().loss
        finally:
            for module, was_training in zip(modules, training, strict=True):
                module.training = was_training

    def timeline(self, result: StepResult) -> Timeline:
        """Measured times of this pipeline's ranks, for charts and traces; all of them call it."""
        groups, schedule = self._groups, result.schedule
        first, last = schedule.rank_offsets[groups.rank : groups.rank + 2].tolist()
        begun = result.begun_ns - int(clock_offsets(groups, self._local.device)[groups.rank])
        times = torch.zeros(2, len(schedule), dtype=torch.int64, device=self._local.device)
        times[:, first:last] = torch.from_numpy(begun + np.stack([result.start_ns, result.end_ns]))
        all_reduce(times, groups.pipeline)
        start_ns, end_ns = times.cpu().numpy()
        program = make_p2p_schedule(schedule, self._local.sends_grad, groups.rank).program
        return measured_timeline(program, start_ns, end_ns)

    def peak_bytes(self) -> int | None:
        """Peak GPU memory of torch on this rank since the last call; None on a CPU."""
        device = self._local.device
        if device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def reduce_gradients(self) -> None:
        """Sum gradients over replicas, those of tied parameters over their ranks; once per step."""
        for tie in self._groups.ties:
            trained = [weight for weight in tie.weights if weight.requires_grad]
            sum_gradients([gradient_of(weight) for weight in trained], tie.group)
        self._weights.reduce_gradients()

    def clip_gradients(self, max_norm: float) -> float:
        """Scale reduced gradients of the model to a norm of at most `max_norm`; -> that before.

        GradientNotFinite, on all ranks of all replicas, if one is NaN or infinite: the optimizer
        would make all weights so. `math.inf`: only this check.
        """
        norm = math.sqrt(self._square_sum(_squares))
        if not math.isfinite(norm):  # or squares above float32
            norm = math.sqrt(self._square_sum(_exact_squares))
        if not math.isfinite(norm):
            raise GradientNotFinite(
                f"the loss is finite, but the norm of the gradients is {norm}; no weight has"
                " changed"
            )
        if norm > max_norm:
            for weight in self._trained():
                gradient = main_param(weight).grad
                if gradient is not None:
                    gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    def _square_sum(self, squares: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Sum of squares of the model's gradients, the same on all ranks of all replicas."""
        # tied parameters count once, on the first rank that has them
        counted_elsewhere = {
            id(weight)
            for tie in self._groups.ties
            if dist.get_rank(tie.group) > 0
            for weight in tie.weights
        }
        total = torch.zeros((), dtype=torch.float64, device=self._local.device)
        for weight in self._trained():
            gradient = main_param(weight).grad
            if gradient is not None and id(weight) not in counted_elsewhere:
                share = self._weights.share_of(weight)
                total += share * squares(local_part(gradient).reshape(-1))
        all_reduce(total, self._groups.pipeline)
        if self._groups.replicas is None:
            return float(total)
        # equal already, unless memory is damaged: a rank must not skip a step that others take
        all_reduce(total, self._groups.replicas)
        return float(total)

    def _trained(self) -> list[nn.Parameter]:
        return [weight for weight in self._weights.weights if weight.requires_grad]

    def _check_schedule(self, schedule: Schedule) -> None:
        """ConfigError if this pipeline cannot run a schedule; the same on all ranks."""
        local = self._local
        num_ranks = len(self._groups.ranks)
        num_stages = len(local.borders) - 1
        if (schedule.num_stages, schedule.num_ranks) != (num_stages, num_ranks):
            raise ConfigError(
                f"the schedule has {schedule.num_stages} stages on {schedule.num_ranks} ranks, the"
                f" pipeline {num_stages} on {num_ranks}"
            )
        if not (schedule.kinds != PassKind.FORWARD).any():
            raise ConfigError("the schedule has no backward passes: use `evaluate`")
        encoding = set(schedule.ranks[schedule.kinds == PassKind.ENCODE].tolist())
        if encoding and not 0 < local.first_trained <= local.borders[1]:
            raise ConfigError(
                f"the schedule encodes ahead: the layers in front must be frozen, but layer"
                f" {local.first_trained} is the first that is trained and the first stage ends"
                f" after layer {local.borders[1] - 1}"
            )
        missing = encoding - {0, *self._options.encoder_ranks}
        if missing:
            raise ConfigError(
                f"the schedule encodes on the ranks {sorted(encoding)}; add {sorted(missing)} to"
                " encoder_ranks"
            )


def layers_of_rank(borders: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """Indices of the layers in all stages of a rank of a pipeline.

    >>> layers_of_rank([0, 2, 3, 5, 6], 1, 2)
    [2, 5]
    """
    stages = range(rank, len(borders) - 1, num_ranks)
    return [index for stage in stages for index in range(borders[stage], borders[stage + 1])]


def _squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares, float64, from rows that float32 sums up exactly enough: one pass, no copy.

    40 M numbers on one core: 6 ms; 155 in float64, and in float32 .3 % are lost.
    """
    whole = len(flat) // ROW * ROW
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype).double()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype).double()
    total: torch.Tensor = rows.square().sum() + rest.square()
    return total


def _exact_squares(flat: torch.Tensor) -> torch.Tensor:
    """The same where squares may be above float32."""
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in torch.split(flat, PART)
    ]
    return torch.stack(norms).square().sum()


def _check(
    model: LayerStack,
    borders: tuple[int, ...],
    pipelines: Sequence[Sequence[int]],
    options: PipelineOptions,
) -> None:
    check_partition(np.array(borders), len(model.layers))
    lengths = {len(pipeline) for pipeline in pipelines}
    num_stages = len(borders) - 1
    if lengths != {num_stages // options.stages_per_rank} or num_stages % options.stages_per_rank:
        raise ConfigError(
            f"{num_stages} stages, {options.stages_per_rank} per rank, but pipelines of"
            f" {sorted(lengths)} ranks"
        )
    beyond = [rank for rank in options.encoder_ranks if not 0 <= rank < max(lengths)]
    if beyond or (options.encoder_ranks and not 0 < model.first_trained <= borders[1]):
        raise ConfigError(
            f"encoder_ranks is {list(options.encoder_ranks)}: these must be ranks of the pipeline,"
            f" and the layers in front frozen and in the first stage; layer {model.first_trained}"
            " is the first that is trained"
        )
    if not any(dist.get_rank() in pipeline for pipeline in pipelines):
        raise ConfigError(
            f"rank {dist.get_rank()} is in none of the pipelines"
            f" {[list(pipeline) for pipeline in pipelines]}"
        )


def _as_tuple(recompute: NDArray[np.bool_] | Sequence[bool], num_layers: int) -> tuple[bool, ...]:
    if len(recompute) != num_layers:
        raise ConfigError(f"recompute names {len(recompute)} layers; the model has {num_layers}")
    return tuple(bool(chosen) for chosen in recompute)


def _check_same_step(
    groups: ProcessGroups,
    local: RankLayers,
    schedule: Schedule,
    batches: Sequence[Batch],
    normalizer: float,
) -> None:
    """ConfigError on all ranks of a pipeline if any part of a step differs between them.

    Each rank has its own loader, and only tensors are sent. Loaders that disagree would otherwise
    show as a message of another size, which ends a process without a word, or not at all. Compares
    sample ids and shapes at the cuts of all micro-batches. Costs one small message.
    """
    actions = (schedule.kinds, schedule.stages, schedule.micro_batches, schedule.rank_offsets)
    described = []
    for batch in batches:
        cuts = [sorted(local.specs(cut, batch).items()) for cut in local.borders[1:-1]]
        tensors = [[(name, spec.shape, str(spec.dtype)) for name, spec in cut] for cut in cuts]
        described.append([getattr(batch, "sample_ids", None), *tensors])
    parts = {
        "micro-batches": repr(described).encode(),
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

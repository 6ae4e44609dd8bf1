"""What each step is: `Steps` gives this rank's `StepPlan` of every step.

For the loader. Every rank computes the same steps from builds, seed and epoch, and keeps its own
part, without communication. No shard is read. A step of 8 ranks costs .1 ms.
"""

import json
import time
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from typing import Any, Literal

import numpy as np

from isobatch.balance.loss_weights import LossNormalizer, LossWeights, sample_weights
from isobatch.balance.order.step_order import GroupOrder, take_steps
from isobatch.balance.steps.step_planner import (
    StepAssignment,
    StepPlanner,
    StepRequest,
    check_assignment,
)
from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.common.types import COUNT_COLUMNS, FloatArray, IntArray
from isobatch.loaders.steps.saved_state import NOTHING_DONE, STATE_VERSION, checked_state
from isobatch.loaders.steps.source import GroupSource, GroupTable, sample_counts
from isobatch.loaders.steps.step_plan import StepFigures, StepPlan, StepTotals
from isobatch.models.flops import FlopsModel

Remainder = Literal["pad", "drop", "split"]

_LLM_TOKENS = ("num_image_tokens", "num_text_tokens", "num_audio_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """How an epoch's groups are assigned to steps and ranks; `loaders.LoaderConfig` checks it."""

    dp_rank: int
    dp_world_size: int
    micro_batches: int
    """Micro-batches per step and rank."""
    seed: int
    remainder: Remainder
    loss_normalizer: LossNormalizer = "epoch"
    loss_weights: LossWeights = "token"


class StepNormalizer:
    """Divisors of the steps' losses, from counts alone: every rank computes the same.

    Weights other than "token" need each sample's labels, which the index does not have: they are
    read once.
    """

    def __init__(self, normalizer: LossNormalizer, weights: LossWeights, step_groups: int) -> None:
        """`step_groups`: groups of a whole step."""
        self._weights, self._step_groups = weights, step_groups
        self._normalizer = normalizer
        self._mean: tuple[GroupTable, float] | None = None

    def weights(self, table: GroupTable, groups: IntArray) -> FloatArray:
        """Weights of the labels of each group, float64, same shape."""
        if self._weights == "token":
            return table.column("num_loss_tokens", groups).astype(np.float64)
        # first, as it measures the samples of groups that come from a state
        owners = np.repeat(np.arange(len(groups)), table.column("num_samples", groups))
        labels = table.sample_column("num_loss_tokens", table.samples(groups))
        sums = np.bincount(owners, sample_weights(labels, self._weights), len(groups))
        return np.asarray(sums, np.float64)

    def divisors(self, table: GroupTable, step_weights: FloatArray) -> FloatArray:
        """Divisors of steps, from the weights of their labels. Never 0: 1 without any label.

        Of "step" those weights; of "epoch" the weights of an average step of the epoch.
        """
        if self._normalizer == "step":
            return np.where(step_weights == 0, 1.0, step_weights)
        mean = self._mean
        if mean is None or mean[0] is not table:
            # once, because an epoch that is planned while it runs does not know its length
            size, total = -1, 0.0
            while size != len(table):  # a thread has planned more of it since
                size, total = len(table), table.label_weights(self._weights)
            mean = self._mean = table, total / max(1, size) * self._step_groups
        return np.full(len(step_weights), mean[1] or 1.0)


class Steps:
    """A position in the steps of all epochs, from epoch 0 on."""

    _stream: GroupOrder
    """Shared with plans and copies, so only a copy of it is moved."""
    _groups: GroupTable
    epoch: int
    """Epoch of the next step; after its last step, the epoch that `finish_epoch` ends."""
    _begun: GroupOrder
    """Where this epoch began here: at its start, or where a state said."""
    _num_used: int
    """Samples of the steps given since then, on all ranks."""
    num_steps = 0
    """Steps of the training so far, those before a resume included."""
    num_tokens = 0
    """LLM tokens of these steps on all ranks, padding included."""
    _flops: FlopsModel | None = None
    """Model by which figures have attention, if somebody asks for it."""

    def __init__(
        self, source: GroupSource[Any], config: StepConfig, planner: StepPlanner | None = None
    ) -> None:
        self._source, self._config, self._planner = source, config, planner
        self._vision = f"num_{source.model.vision_unit}"
        step_groups = config.dp_world_size * config.micro_batches
        self._normalizer = StepNormalizer(config.loss_normalizer, config.loss_weights, step_groups)
        self.epoch = -1
        self._start(0)

    def copy(self) -> "Steps":
        """The same position, to move on its own."""
        return copy(self)

    @property
    def remaining(self) -> int:
        """Steps until the epoch ends, the same on every rank."""
        return self._num_steps(self._stream.remaining)

    @property
    def position(self) -> GroupOrder:
        """The order after the last step that was given; not to be moved."""
        return self._stream

    @property
    def is_after_last(self) -> bool:
        """Whether the epoch's steps have been given; an epoch without any step is not begun."""
        return not self.remaining and self._stream.remaining < len(self._groups)

    @property
    def has_grown(self) -> bool:
        """Whether this epoch has other groups than the next, since its build has grown."""
        return bool(self._stream.state().keys() & {"grown_from", "rest_of"})

    @property
    def is_quick(self) -> bool:
        """Whether a step takes microseconds to plan, so that many can be planned in advance."""
        return self._planner is None

    def __len__(self) -> int:
        """Steps of the whole epoch, the same on every rank."""
        return self._num_steps(len(self._groups))

    def check_epoch(self) -> None:
        """ConfigError if the whole epoch makes no step: a trainer would wait for one forever."""
        if len(self):
            return
        if not len(self._groups):
            raise ConfigError("the build has no groups; its report.html says why")
        config = self._config
        raise ConfigError(
            f"the {len(self._groups)} groups of an epoch are less than one step of "
            f"{config.dp_world_size} ranks x {config.micro_batches} micro-batches; use "
            "remainder='pad', or smaller steps"
        )

    def state(self) -> dict[str, Any]:
        """This position: plain JSON, the same on every rank, for any number of ranks."""
        return {
            "version": STATE_VERSION,
            "order": self._source.order,
            "seed": self._config.seed,
            "epoch": self.epoch,
            "stream": self._stream.state(),
            "done": {"steps": self.num_steps, "tokens": self.num_tokens},
            **self._source.identity,
        }

    def agreed(self) -> dict[str, str]:
        """What must be equal on all ranks at this position, digests where values are long."""
        fields = {
            "samples": str(self._source.identity.get("samples")),
            "epoch": str(self.epoch),
            "steps left in the epoch": str(self.remaining),
            "position in the epoch": _digest(json.dumps(self._stream.state()).encode()),
        }
        if self.remaining:
            size = self._config.dp_world_size, self._config.micro_batches
            step = np.array(self._stream.copy().take_step(*size, self._stream_loads))
            counts = (self._spread(step, name) for name in ("num_samples", *COUNT_COLUMNS))
            fields["content of the next step"] = _digest(np.stack([step, *counts]).tobytes())
        return fields

    def load(self, state: dict[str, Any]) -> None:
        """Move to `state`. ConfigError, and no move, if it is of other builds, order or seed."""
        state = checked_state(state, self.state(), self._source.adopted)
        try:
            self._start(state["epoch"], state["stream"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"state of another stream: {error}") from None
        done = state.get("done", NOTHING_DONE)
        self.num_steps, self.num_tokens = done["steps"], done["tokens"]

    def watch_attention(self) -> None:
        """Let figures have attention from now on; ConfigError or DataError if it is not known."""
        flops = FlopsModel.of(self._source.model)
        self._groups.require_counts()
        self._flops = flops

    def prepare_next_epoch(self) -> None:
        """Start in the background what the next epoch needs, if that takes long."""
        self._source.prepare(self.epoch + 1)

    def plan(self, count: int) -> list[StepPlan]:
        """This rank's next steps in the epoch, moving past them. ConfigError of a wrong planner."""
        shape = self._config.dp_world_size, self._config.micro_batches
        count = min(count, self.remaining)
        if not count:
            return []
        # (steps, dp, micro_batches)
        steps, streams = take_steps(self._stream, count, shape, self._stream_loads)
        self._stream = streams[-1]
        figures = self._figures(steps)
        # each (steps,)
        labels, samples = (
            self._spread(steps, name).sum(axis=(1, 2)).tolist()
            for name in ("num_loss_tokens", "num_samples")
        )
        tokens = figures.llm_tokens.sum(axis=(1, 2)).tolist()
        totals = list(map(StepTotals, labels, samples, figures.loss_normalizers.tolist(), tokens))
        self._num_used += sum(samples)
        plans = self._stored(steps[:, self._config.dp_rank], totals, streams, figures)
        if self._planner is None:
            return plans
        both = zip(steps, plans, strict=True)
        return [self._packed(self._planner, step, plan) for step, plan in both]

    def move_past(self, plan: StepPlan) -> None:
        """Move to the position after `plan`, which a copy in the same epoch has made."""
        self._stream = plan.stream
        self._num_used += plan.totals.num_samples
        self.num_steps += 1
        self.num_tokens += plan.totals.num_tokens
        self._source.forget(plan.stream)

    def finish_epoch(self) -> int:
        """Move to the next epoch; -> the number of samples left out of this one.

        IsobatchError if a sample of this one is neither used nor rejected nor left out.
        """
        left_out = self._stream.copy().take(self._stream.remaining)
        num_samples = int(self._groups.column("num_samples", left_out).sum())
        self._check_samples()
        self._start(self.epoch + 1, self._source.next_state(self._stream))
        return num_samples

    def _check_samples(self) -> None:
        """IsobatchError unless the steps since the epoch began here had every sample once."""
        expected = self._source.samples_between(self._groups, self._begun, self._stream)
        if expected != self._num_used:
            raise IsobatchError(
                f"epoch {self.epoch} should have used {expected:,} samples and has used "
                f"{self._num_used:,}: that is an error of Isobatch's; please report it"
            )

    def start_epoch(self, epoch: int) -> None:
        """Move to the beginning of another epoch; the rest of this one is not given.

        ConfigError with `mixing_weights`: a position is then reached by steps alone.
        """
        self._source.require_start(epoch)
        self._start(epoch)

    def _start(self, epoch: int, state: dict[str, Any] | None = None) -> None:
        is_split = self._config.remainder == "split"
        ranks = self._config.dp_world_size if is_split else 1
        groups, stream = self._source.begin(epoch, state or {}, ranks)
        # only now: a stream that raised has changed nothing
        self.epoch, self._groups, self._stream = epoch, groups, stream
        self._begun, self._num_used = stream.copy(), 0

    def _num_steps(self, num_groups: int) -> int:
        step_groups = self._config.dp_world_size * self._config.micro_batches
        whole, rest = divmod(num_groups, step_groups)
        return whole + (rest > 0 and self._config.remainder != "drop")

    def _stream_loads(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        image, text, audio = (self._groups.column(name, groups) for name in _LLM_TOKENS)
        return self._groups.column(self._vision, groups), image + text + audio

    def _figures(self, steps: IntArray) -> StepFigures:
        """Figures of steps, which have shape (steps, dp, micro_batches), in the stream's order."""
        exists = steps >= 0
        groups, step_of_group = steps[exists], np.nonzero(exists)[0]
        weights = self._normalizer.weights(self._groups, groups)
        sums = np.bincount(step_of_group, weights, len(steps)).astype(np.float64)
        builds, numbers = self._groups.origins(groups)
        caps = self._groups.max_seq_len
        image, text, audio = (self._spread(steps, name) for name in _LLM_TOKENS)
        return StepFigures(
            epoch=self.epoch,
            loss_normalizers=self._normalizer.divisors(self._groups, sums),
            ends=np.cumsum(np.bincount(step_of_group, minlength=len(steps))),
            builds=builds,
            numbers=numbers,
            weights=weights,
            vit_tokens=self._spread(steps, "num_vit_tokens"),
            llm_tokens=image + text + audio,
            complete=np.asarray(exists.all(axis=1)),
            room=np.bincount(step_of_group, caps[builds], len(steps)).astype(np.int64),
            llm_squares=None if self._flops is None else self._spread(steps, "llm_squares"),
        )

    def _stored(
        self,
        steps: IntArray,
        totals: list[StepTotals],
        streams: list[GroupOrder],
        figures: StepFigures,
    ) -> list[StepPlan]:
        """Plans of steps as the stream gave them: this rank's groups, (steps, micro_batches)."""
        exists, is_padded = steps >= 0, self._config.remainder == "pad"
        selections = iter(self._groups.selections(steps[exists]))
        micro_batches = [
            tuple([next(selections) if there else () for there in step if there or is_padded])
            for step in exists.tolist()
        ]
        # each (steps,)
        rows, tokens, audio_tokens = (
            values.sum(axis=1).tolist()
            for values in (
                self._spread(steps, self._vision),
                figures.llm_tokens[:, self._config.dp_rank],
                self._spread(steps, "num_audio_tokens"),
            )
        )
        columns = micro_batches, totals, rows, tokens, audio_tokens, streams
        return list(map(StepPlan, *columns, repeat(figures), range(len(steps))))

    def _packed(self, planner: StepPlanner, step: IntArray, plan: StepPlan) -> StepPlan:
        """The plan of a step as `planner` packs it; `step` has shape (dp, micro_batches)."""
        groups, rank = step[step >= 0], self._config.dp_rank
        refs = self._groups.samples(groups)
        counts = sample_counts(self._groups, refs)
        sizes = self._spread(step, "num_samples")
        request = StepRequest(
            counts=counts,
            offsets=np.concatenate([[0], np.cumsum(sizes.ravel())]).astype(np.int64),
            dp=self._config.dp_world_size,
            micro_batches=self._config.micro_batches,
            rank=rank,
        )
        # Ask the planner
        begun = time.perf_counter()
        work = planner(request)
        planning_s = time.perf_counter() - begun
        check_assignment(work, request)
        # This rank's part
        part = work.micro_batches[rank]
        encoded = {name: ranks[rank] for name, ranks in work.encoders.items()}
        with_images, with_clips = (encoded.get(name, part).samples for name in ("vision", "audio"))
        return plan._replace(
            micro_batches=refs.select_batches(part),
            num_pixel_rows=int(getattr(counts, self._vision)[with_images].sum()),
            num_tokens=int(counts.seq_len[part.samples].sum()),
            num_audio_tokens=int(counts.num_audio_tokens[with_clips].sum()),
            figures=_packed_figures(
                plan.figures.part(plan.place, plan.place), work, request, self._flops
            ),
            place=0,
            encoders={name: refs.select_batches(batches) for name, batches in encoded.items()},
            note=work.notes[rank] if work.notes else None,
            planning_s=planning_s,
        )

    def _spread(self, groups: IntArray, name: str) -> IntArray:
        """A column's values for `groups`, same shape; 0 where there is no group."""
        exists = groups >= 0
        if exists.all():
            return self._groups.column(name, groups.ravel()).reshape(groups.shape)
        spread = np.zeros(groups.shape, np.int64)
        spread[exists] = self._groups.column(name, groups[exists])
        return spread


def _packed_figures(
    stored: StepFigures, work: StepAssignment, request: StepRequest, flops: FlopsModel | None
) -> StepFigures:
    """Figures of a step with the costs of what a planner packed.

    By micro-batch if ranks have equally many and encode their own images, else by step.
    """
    encoding = work.encoders.get("vision", work.micro_batches)
    vit_tokens = [groups.sum(request.counts.num_vit_tokens) for groups in encoding]
    columns = [request.counts.seq_len]
    if flops is not None:
        columns.append(flops.attention(request.counts.seq_len))
    llm = [np.stack([groups.sum(column) for column in columns]) for groups in work.micro_batches]
    if encoding is not work.micro_batches or len({loads.shape for loads in llm}) > 1:
        vit_tokens, llm = (
            [loads.sum(axis=-1, keepdims=True) for loads in ranks] for ranks in (vit_tokens, llm)
        )
    llm_tokens, *squares = np.stack(llm, axis=1)
    return stored._replace(
        vit_tokens=np.stack(vit_tokens)[None],
        llm_tokens=llm_tokens[None],
        llm_squares=squares[0][None] if squares else None,
        room=stored.room
        * sum(int((of.sizes > 0).sum()) for of in work.micro_batches)
        // max(1, len(stored.builds)),
        complete=np.full((1, llm_tokens.shape[1]), stored.complete.all()),
    )


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=6).hexdigest()

"""What a step is, apart from how it is loaded: `Steps` gives this rank's `StepPlan` of each step of
each epoch.

For the loader. Every rank computes the same steps from builds, seed and epoch, and keeps its own
part; so ranks never talk, all have the same number of steps, and each knows what every other one
does. No shard is read. A step of 8 ranks costs .1 ms (blocks) or .7 ms (random, 8 micro-batches),
one of 512 ranks .2 or 32 ms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.order.block_shuffle import BlockShuffle, GroupOrder
from balance.steps.step_planner import StepAssignment, StepPlanner, StepRequest, check_assignment
from balance.types import IntArray
from loaders.batch.collate import StepTotals
from loaders.plan.epoch_groups import EpochSource
from loaders.plan.selection import Selection

STATE_VERSION = 2
REMAINDERS = ("pad", "drop")
ORDERS = ("blocks", "random")
_TOTALS = ("num_loss_tokens", "num_samples")
_LLM_TOKENS = ("num_image_tokens", "num_text_tokens", "num_audio_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoads:
    """What the micro-batches of all ranks cost; int64 arrays of shape (dp, rounds).

    A round is what ranks do between two meetings: a micro-batch; or the whole step, where they meet
    once per step.
    """

    vit_tokens: IntArray
    llm_tokens: IntArray
    complete: NDArray[np.bool_]
    """Shape (rounds,): whether every rank had work, as far as the stream is concerned; only an
    epoch's last are not.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step for one rank."""

    micro_batches: tuple[Selection, ...]
    totals: StepTotals
    loads: StepLoads
    num_pixel_rows: int
    """Rows of `pixel_values` that this rank makes: image patches, or ViT tokens at native
    resolution.
    """
    num_tokens: int
    """LLM tokens of this rank."""
    num_audio_tokens: int
    """What the clips add that this rank makes features or waveforms of."""
    stream: GroupOrder
    """Where the epoch's stream stands behind this step."""
    encoders: Mapping[str, tuple[Selection, ...]] = field(default_factory=dict)
    """By encoder, this rank's batches; the micro-batches then come without that encoder's input."""
    note: object = None
    """What the planner tells this rank's trainer."""
    planning_s: float | None = None
    """Time that the planner took; None without one."""

    @property
    def items(self) -> list[Selection]:
        """All that is to be read."""
        return [
            *self.micro_batches,
            *(item for batches in self.encoders.values() for item in batches),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """How an epoch's groups are dealt out. ConfigError names an option that is wrong."""

    dp_rank: int
    dp_world_size: int
    micro_batches: int
    """Micro-batches per step and rank."""
    seed: int
    remainder: str
    order: str

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_world_size:
            raise ConfigError(
                f"dp_rank is {self.dp_rank}; it must be in 0..{self.dp_world_size - 1} (dp_world_size - 1)"
            )
        if self.micro_batches < 1:
            raise ConfigError(
                f"micro_batches_per_step is {self.micro_batches}; it must be at least 1"
            )
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must not be negative")
        if self.remainder not in REMAINDERS:
            raise ConfigError(
                f"remainder is {self.remainder!r}; use one of {', '.join(REMAINDERS)}"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"order is {self.order!r}; use one of {', '.join(ORDERS)}")


class Steps:
    """A position in the steps of all epochs, from epoch 0 on; `vision_unit` as in
    `balance.types.Limits`.
    """

    _stream: GroupOrder
    """Plans and copies have it too, so it is moved only as a copy."""

    def __init__(
        self,
        source: EpochSource,
        config: StepConfig,
        vision_unit: str,
        planner: StepPlanner | None = None,
    ) -> None:
        self._source, self._config, self._planner = source, config, planner
        self._vision = f"num_{vision_unit}"
        self._start(0)

    def copy(self) -> Steps:
        """The same position, to move on its own."""
        twin = object.__new__(Steps)
        twin.__dict__.update(self.__dict__)
        return twin

    @property
    def epoch(self) -> int:
        """The epoch of the next step, or, behind its last step, the epoch that `finish_epoch`
        ends.
        """
        return self._epoch

    @property
    def remaining(self) -> int:
        """Steps until the epoch ends, the same on every rank."""
        return self._num_steps(self._stream.remaining)

    @property
    def is_behind_last(self) -> bool:
        """Whether the epoch's steps have been given; an epoch without any step is not begun."""
        return not self.remaining and self._stream.remaining < len(self._groups)

    def __len__(self) -> int:
        """Steps of the whole epoch, the same on every rank."""
        return self._num_steps(len(self._groups))

    def check_epoch(self) -> None:
        """ConfigError if the whole epoch makes no step: who waits for one would wait for ever."""
        if len(self):
            return
        if not len(self._groups):
            raise ConfigError(
                "the build has no groups; its report.html says why samples were rejected"
            )
        config = self._config
        raise ConfigError(
            f"the {len(self._groups)} groups of an epoch are less than one step of {config.dp_world_size} ranks x "
            f"{config.micro_batches} micro-batches; use remainder='pad', or smaller steps"
        )

    def state(self) -> dict[str, Any]:
        """This position, plain JSON; the same on every rank, and good for any number of ranks and
        micro-batches.
        """
        return {
            "version": STATE_VERSION,
            "order": self._config.order,
            "seed": self._config.seed,
            "epoch": self._epoch,
            "stream": self._stream.state(),
            **self._source.identity,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Move to `state`. ConfigError, and no move, if it is of other builds, or of another order,
        seed or version.
        """
        own = self.state()
        if state.get("version") != STATE_VERSION and "version" in state:
            raise _mismatch("version", state, own, "it was saved by another version of Isobatch")
        if set(state) != set(own):
            raise ConfigError(
                f"state has the keys {sorted(state)}; a StreamingLoader's state has {sorted(own)}"
            )
        for key, reason in (
            ("manifest_hash", "it belongs to another build"),
            ("order", "give the loader the order of the run that saved it"),
            ("seed", "give the loader the seed of the run that saved it"),
            ("regroup", "give the loader the regroup and regroup_window of the run that saved it"),
        ):
            if state[key] != own[key]:
                raise _mismatch(key, state, own, reason)
        if not isinstance(state["epoch"], int) or state["epoch"] < 0:
            raise ConfigError(f"state has epoch {state['epoch']!r}; epochs are numbered from 0")
        try:
            self._start(state["epoch"], state["stream"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"state of another stream: {error}") from None

    def prepare_next_epoch(self) -> None:
        """Begin in the background what the next epoch needs, if that takes long."""
        self._source.prepare(self._epoch + 1)

    @property
    def is_quick(self) -> bool:
        """Whether steps cost microseconds to plan, so that many can be planned before the first one
        is wanted.
        """
        return self._planner is None and self._config.order == "blocks"

    def next(self) -> StepPlan:
        """This rank's part of the next step, and move behind it. ConfigError if the planner is
        wrong.
        """
        return self.plan(1)[0]

    def plan(self, count: int) -> list[StepPlan]:
        """This rank's part of the next steps, at most `count` of this epoch; a third of the time of
        one by one.
        """
        config, taken, streams = self._config, [], []
        for _ in range(min(count, self.remaining)):
            self._stream = self._stream.copy()
            taken.append(
                self._stream.take_step(
                    config.dp_world_size, config.micro_batches, self._stream_loads
                )
            )
            streams.append(self._stream)
        # (steps, dp, micro_batches)
        steps = np.array(taken).reshape(len(taken), config.dp_world_size, config.micro_batches)
        # (steps,)
        loss_tokens, num_samples = (self._spread(steps, name).sum(axis=(1, 2)) for name in _TOTALS)
        totals = [
            StepTotals(num_loss_tokens=loss, num_samples=samples)
            for loss, samples in zip(loss_tokens.tolist(), num_samples.tolist(), strict=True)
        ]
        works = (
            self._stored(steps)
            if self._planner is None
            else [self._planned(step, self._planner) for step in steps]
        )
        return [
            StepPlan(totals=total, stream=stream, **work)
            for total, stream, work in zip(totals, streams, works, strict=True)
        ]

    def move_behind(self, plan: StepPlan) -> None:
        """Move to where another position of the same epoch stood after `plan`."""
        self._stream = plan.stream

    def finish_epoch(self) -> int:
        """Move to the next epoch; -> the samples that are left out of this one."""
        left_out = self._stream.copy().take(self._stream.remaining)
        num_samples = int(self._groups.column("num_samples", left_out).sum())
        self._start(self._epoch + 1)
        return num_samples

    def _start(self, epoch: int, state: dict[str, Any] | None = None) -> None:
        groups, seed, stream = self._source.epoch(epoch), self._config.seed, state or {}
        if self._config.order == "random":
            from balance.order.global_shuffle import GlobalShuffle  # noqa: PLC0415  (see `loaders`)

            started: GroupOrder = GlobalShuffle(
                num_groups=len(groups), seed=seed, epoch=epoch, **stream
            )
        else:
            started = BlockShuffle(
                num_groups=len(groups), order=groups.order, seed=seed, epoch=epoch, **stream
            )
        # only now: a stream that raised has changed nothing
        self._epoch, self._groups, self._stream = epoch, groups, started

    def _num_steps(self, num_groups: int) -> int:
        step_groups = self._config.dp_world_size * self._config.micro_batches
        return (
            num_groups // step_groups
            if self._config.remainder == "drop"
            else -(-num_groups // step_groups)
        )

    def _stream_loads(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        return self._groups.column(self._vision, groups), self._seq_len(groups)

    def _seq_len(self, groups: IntArray) -> IntArray:
        image, text, audio = (self._groups.column(name, groups) for name in _LLM_TOKENS)
        return image + text + audio

    def _stored(self, steps: IntArray) -> list[dict[str, Any]]:
        """The micro-batches as the stream gave them; `steps` has shape (steps, dp,
        micro_batches).
        """
        rank = self._config.dp_rank
        # each of shape (steps, dp, micro_batches)
        vit, vision = self._spread(steps, "num_vit_tokens"), self._spread(steps, self._vision)
        image, text, audio = (self._spread(steps, name) for name in _LLM_TOKENS)
        llm = image + text + audio
        # (steps, micro_batches)
        complete = np.asarray((steps >= 0).all(axis=1))
        # (steps,)
        rows, tokens, audio_tokens = (
            values[:, rank].sum(axis=1).tolist() for values in (vision, llm, audio)
        )
        return [
            {
                "micro_batches": tuple(
                    [self._groups.item(group) if group >= 0 else () for group in groups]
                ),
                "loads": self._rounds(
                    StepLoads(vit_tokens=vit[at], llm_tokens=llm[at], complete=complete[at])
                ),
                "num_pixel_rows": rows[at],
                "num_tokens": tokens[at],
                "num_audio_tokens": audio_tokens[at],
            }
            for at, groups in enumerate(steps[:, rank].tolist())
        ]

    def _planned(self, step: IntArray, planner: StepPlanner) -> dict[str, Any]:
        """The micro-batches and encoders' batches as the planner packs them."""
        groups, rank = step[step >= 0], self._config.dp_rank
        members = self._groups.members(groups)
        sizes = self._spread(step, "num_samples")
        samples = StepRequest(
            counts=self._source.counts(members),
            offsets=np.concatenate([[0], np.cumsum(sizes.ravel())]).astype(np.int64),
            dp=self._config.dp_world_size,
            micro_batches=self._config.micro_batches,
        )
        begun = time.perf_counter()
        work = planner(samples)
        planning_s = time.perf_counter() - begun
        check_assignment(work, samples)
        seen, heard = (
            work.encoders.get(name, work.micro_batches)[rank].samples
            for name in ("vision", "audio")
        )
        return {
            "micro_batches": members.items(work.micro_batches[rank]),
            "encoders": {name: members.items(ranks[rank]) for name, ranks in work.encoders.items()},
            "loads": self._rounds(_work_loads(work, samples, complete=bool((step >= 0).all()))),
            "num_pixel_rows": int(getattr(samples.counts, self._vision)[seen].sum()),
            "num_tokens": int(samples.counts.seq_len[work.micro_batches[rank].samples].sum()),
            "num_audio_tokens": int(samples.counts.num_audio_tokens[heard].sum()),
            "note": work.notes[rank] if work.notes else None,
            "planning_s": planning_s,
        }

    def _spread(self, groups: IntArray, name: str) -> IntArray:
        """A column's values for `groups`, same shape; 0 where there is none."""
        there = groups >= 0
        if there.all():
            return self._groups.column(name, groups.ravel()).reshape(groups.shape)
        spread = np.zeros(groups.shape, np.int64)
        spread[there] = self._groups.column(name, groups[there])
        return spread

    def _rounds(self, loads: StepLoads) -> StepLoads:
        """Loads by what ranks wait for: with order="random" the step."""
        return loads if self._config.order == "blocks" else _as_one_round(loads)


def _work_loads(work: StepAssignment, samples: StepRequest, *, complete: bool) -> StepLoads:
    """Loads of what a planner packed: by micro-batch if ranks have equally many and encode their
    own, else by step.
    """
    encoding = work.encoders.get("vision", work.micro_batches)
    vit_tokens = [groups.sum(samples.counts.num_vit_tokens) for groups in encoding]
    llm_tokens = [groups.sum(samples.counts.seq_len) for groups in work.micro_batches]
    if encoding is not work.micro_batches or len({len(loads) for loads in llm_tokens}) > 1:
        vit_tokens, llm_tokens = (
            [loads.sum(keepdims=True) for loads in ranks] for ranks in (vit_tokens, llm_tokens)
        )
    rounds = len(llm_tokens[0])
    return StepLoads(
        vit_tokens=np.stack(vit_tokens),
        llm_tokens=np.stack(llm_tokens),
        complete=np.full(rounds, complete),
    )


def _as_one_round(loads: StepLoads) -> StepLoads:
    """The sums over each rank's micro-batches."""
    return StepLoads(
        vit_tokens=loads.vit_tokens.sum(axis=1, keepdims=True),
        llm_tokens=loads.llm_tokens.sum(axis=1, keepdims=True),
        complete=np.asarray(loads.complete.all(keepdims=True)),
    )


def _mismatch(key: str, state: dict[str, Any], own: dict[str, Any], reason: str) -> ConfigError:
    return ConfigError(f"state has {key} {state[key]!r}, this loader {own[key]!r}: {reason}")

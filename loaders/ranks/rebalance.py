"""`rebalance`: samples of a step to other ranks, so that none waits.

For loaders that are not ours. All ranks tell each other what their samples cost; each computes the
same plan (`balance.dispatching.even_ranks`), with the price of what travels; and samples change
ranks in one all-to-all, or stay where they are if the step would gain less than the exchange takes.
A sample is whatever pickle can write. Where it is a reference (an index, a path, a record), some
bytes travel and pixels are read where they are needed; where it holds pixels, they travel.

Gradients stay those of the step (OrchMLLM, section 4) if losses are divided by numbers of all
ranks. `dispatch` moves an encoder's inputs alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from isobatch.balance.dispatching.even_ranks import (
    MoveCosts,
    bound_ms,
    even_ranks,
    slot_loads,
    step_ms,
)
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import Counts, FloatArray, IntArray
from isobatch.loaders.ranks.mesh import data_group
from isobatch.loaders.ranks.object_exchange import (
    all_gather_rows,
    exchange_objects,
    measure_link,
    object_bytes,
)
from isobatch.models.flops import FlopsModel, GpuSpeed
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import ModelPreset

S = TypeVar("S")
Lengths = Sequence[int] | IntArray

NUM_SIZES, REST = 2, 2
"""Columns after the costs: ViT and LLM tokens if they are known; bytes and the micro-batch."""
MEDIA = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Pixels in a sample, and where models of native resolution have their sizes."""
CROP_DIMS = 3
"""Of one crop: channels, height, width."""


class SampleCosts:
    """Times of a sample by a model's FLOPs: (vision_ms, llm_ms); give it to `rebalance`."""

    def __init__(self, model: str | ModelPreset, speed: GpuSpeed | None = None) -> None:
        """`model` as `packer build --model` takes it. ConfigError if its dimensions are unknown.

        `speed`: how fast a GPU computes; without, an A100 at 37 % of its peak.
        """
        preset = find_model(model) if isinstance(model, str) else model
        self._model = FlopsModel.of(preset, speed)
        self._per_crop = getattr(preset.vision, "vit_tokens_per_patch", None)

    def __call__(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """Of a dict of tensors as transformers' processors make it, for one sample.

        `input_ids` (tokens,) or (1, tokens); `image_grid_thw` and `video_grid_thw` (media, 3), or
        for models of crops `pixel_values` and `pixel_values_videos` (..., channels, height, width),
        of which every crop, frame, and crop of padding counts. DataError without `input_ids`, and
        for pixels of another kind.
        """
        vision, llm = self.of_lengths(*([length] for length in self._lengths(sample)))[0]
        return float(vision), float(llm)

    def sizes(self, sample: Mapping[str, Any]) -> tuple[int, int]:
        """ViT tokens and LLM tokens of such a sample, which fill a rank's memory."""
        return self._lengths(sample)[1:]

    def _lengths(self, sample: Mapping[str, Any]) -> tuple[int, int, int]:
        """Images (or crops), ViT tokens and LLM tokens."""
        if "input_ids" not in sample:
            raise DataError(
                f"a sample has {', '.join(map(str, sample)) or 'nothing'}, but no input_ids; give "
                "`costs=` a function of your samples that calls SampleCosts.of_lengths"
            )
        tokens = int(np.asarray(sample["input_ids"]).size)
        images = vit_tokens = 0
        for name, grid_name in MEDIA.items():
            if sample.get(grid_name) is not None:
                grid = np.asarray(sample[grid_name]).reshape(-1, 3)
                images += int(grid[:, 0].sum())
                vit_tokens += int(grid.prod(axis=1).sum())
            elif sample.get(name) is not None:
                crops = self._num_crops(name, tuple(np.shape(sample[name])), grid_name)
                images += crops
                vit_tokens += crops * (self._per_crop or 0)
        return images, vit_tokens, tokens

    def _num_crops(self, name: str, shape: tuple[int, ...], grid_name: str) -> int:
        """Crops in pixels that have no grid."""
        if 0 in shape:
            return 0
        if not self._per_crop or len(shape) < CROP_DIMS:
            raise DataError(
                f"a sample has {name} of shape {shape} and no {grid_name}, so its ViT tokens are "
                "not known; give `costs=` a function of your samples that calls "
                "SampleCosts.of_lengths"
            )
        return prod(shape[:-CROP_DIMS])

    def of_lengths(self, images: Lengths, vit_tokens: Lengths, tokens: Lengths) -> FloatArray:
        """Of samples by numbers: crops, or images and frames; ViT tokens; LLM tokens.

        -> ms of vision and LLM, float64, (samples, 2).
        """
        phases = self.phases_of_lengths(images, vit_tokens, tokens)
        return np.stack([phases[:, 0], phases[:, 1] + phases[:, 2]], axis=1)

    def phases_of_lengths(
        self, images: Lengths, vit_tokens: Lengths, tokens: Lengths
    ) -> FloatArray:
        """-> ms of vision, the LLM without attention, its attention, float64, (samples, 3).

        For `assign_rollouts`; arguments as of `of_lengths`.
        """
        return self._model.phase_ms(counts_of(images, vit_tokens, tokens))


def counts_of(images: Lengths, vit_tokens: Lengths, tokens: Lengths) -> Counts:
    """Counts of samples of which only lengths are known; all LLM tokens count as text."""
    columns = {"num_image_patches": images, "num_vit_tokens": vit_tokens, "num_text_tokens": tokens}
    arrays = {name: np.asarray(values, np.int64) for name, values in columns.items()}
    nothing = np.zeros(len(arrays["num_text_tokens"]), np.int64)
    rest = ("num_image_tokens", "num_audio_tokens", "num_loss_tokens")
    return Counts(**arrays, **dict.fromkeys(rest, nothing))


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrediction:
    """What an exchange of samples is predicted to bring; the same on all ranks."""

    before_ms: float
    """Time of the step as samples came: of the slowest rank, micro-batch by micro-batch."""
    after_ms: float
    """As they are now, without the exchange."""
    bound_ms: float
    """No plan of these samples is below."""
    move_ms: float
    """Time of the exchange; 0 if nothing moves."""
    moved_samples: int
    """On all ranks."""
    moved_bytes: int
    """On all ranks."""
    num_samples: int
    """On all ranks."""

    @property
    def is_moved(self) -> bool:
        """Whether any sample changes its rank."""
        return self.moved_samples > 0

    def __str__(self) -> str:
        what = f"step {self.before_ms:.1f} ms"
        bound = f"bound {self.bound_ms:.1f} ms"
        if not self.is_moved:
            return f"{what} -> {self.after_ms:.1f} ms ({bound}): no sample changes its rank"
        return (
            f"{what} -> {self.after_ms:.1f} ms ({bound}), exchange {self.move_ms:.1f} ms: "
            f"{self.moved_samples} of {self.num_samples} samples, {self.moved_bytes:,} bytes"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rebalanced(Generic[S]):
    """A rank's micro-batches after `rebalance`; iterates over them."""

    batches: list[list[S]]
    """As many micro-batches as were given."""
    prediction: MovePrediction
    _places: "_Places" = field(repr=False)

    def __iter__(self) -> Iterator[list[S]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> list[S]:
        return self.batches[number]

    def give_back(self, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Values of the samples in `batches`, where the samples came from, in their order there.

        `values`: one per sample, micro-batch by micro-batch; whatever pickle can write, tensors on
        the CPU, without gradients. A collective, unless nothing has moved. ConfigError on all ranks
        if any's values are not as many as its samples, or cannot be sent; where nothing has moved,
        on that rank.
        """
        sizes = [len(batch) for batch in self.batches]
        numbers = [len(batch) if hasattr(batch, "__len__") else -1 for batch in values]
        places = self._places
        if numbers != sizes:
            shown = [number if number >= 0 else "no list" for number in numbers]
            problem = ConfigError(
                f"give_back got {shown} values for micro-batches of {sizes} samples; give one per "
                "sample"
            )
            if self.prediction.is_moved:
                exchange_objects(problem, places.group)  # so that the others do not wait
            raise problem
        flat = [value for batch in values for value in batch]
        return _moved(places.now, places.before, flat, places)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Slots of all samples, numbered rank after rank as they came."""

    before: IntArray
    now: IntArray
    num_ranks: int
    num_rounds: int
    rank: int
    group: dist.ProcessGroup | None


def rebalance(  # noqa: PLR0913 - options by name
    batches: Sequence[Sequence[S]],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    costs: Callable[[S], Sequence[float]],
    gb_per_s: float | None = None,
    num_bytes: Callable[[S], int] | None = None,
    sizes: Callable[[S], Sequence[float]] | None = None,
    max_tokens: int | None = None,
    max_vision: int | None = None,
    keep_sizes: bool = False,
    ranks_per_node: int = 8,
) -> Rebalanced[S]:
    """Samples of a step to the ranks of `group`, so that vision and LLM take all equally long.

    `batches`: this rank's micro-batches of the step, as many on each rank; a sample is an index, a
    path, a record, or a dict of tensors on the CPU. `group`: the data-parallel ranks, by default
    all; of a DeviceMesh its data-parallel dimension. `costs`: ms of each phase (vision, LLM) of a
    sample, as many on all ranks: `SampleCosts(model)`, or a function.

    Nothing moves unless the step gains more than the exchange takes: `gb_per_s` (of one rank, each
    way), or what is measured with the first call. `num_bytes`: what a sample takes on its way; by
    default its tensors, arrays and strings are counted. `keep_sizes`: micro-batches keep their
    numbers of samples, for losses that are means over samples. `ranks_per_node`: samples rather
    stay in a node.

    No rank needs more memory than the step would have needed: no micro-batch gets more of either
    size than the largest that any rank brought, or than `max_vision` and `max_tokens`. `sizes`: ViT
    and LLM tokens of a sample; of `SampleCosts` its own; else the costs take their place.

    A collective: call it on all ranks. ConfigError on all of them if numbers of micro-batches or
    phases differ, where any rank's `costs` fail or its samples cannot be pickled, and if no plan
    within caps was found. Without torch.distributed, or on one rank, batches stay, and samples may
    change micro-batches.
    """
    group = data_group(group)
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    sizes = sizes or getattr(costs, "sizes", None)
    caps = {"max_vision": max_vision, "max_tokens": max_tokens}
    flags = keep_sizes, ranks_per_node, *(cap or 0 for cap in caps.values()), sizes is not None
    options = (gb_per_s or 0.0, *map(float, flags))
    bytes_of = num_bytes or object_bytes

    def measure(sample: S) -> list[float]:
        vision_and_tokens = sizes(sample) if sizes else ()
        if len(vision_and_tokens) != NUM_SIZES * bool(sizes):
            raise ConfigError(f"sizes of a sample are {vision_and_tokens}; give ViT and LLM tokens")
        return [*map(float, (*costs(sample), *vision_and_tokens, bytes_of(sample)))]

    table, counts = _gathered(batches, measure, options, group)
    num_rounds = len(batches)
    # slots of all samples, rank after rank
    ranks = np.repeat(np.arange(num_ranks), counts)
    before = table[:, -1].astype(np.int64) * num_ranks + ranks
    travelling = table[:, -2].astype(np.int64)
    num_phases = table.shape[1] - REST - (NUM_SIZES if sizes else 0)
    phases = np.ascontiguousarray(table[:, :num_phases])
    filling = table[:, num_phases:-REST] if sizes else phases
    if gb_per_s is None:
        link = measure_link(group) if num_ranks > 1 else (np.inf, 0.0)
    elif gb_per_s > 0:
        link = gb_per_s * 1e6, 0.0
    else:
        raise ConfigError(f"gb_per_s is {gb_per_s}; give more than 0, or leave it out")
    move = MoveCosts(
        num_bytes=travelling,
        bytes_per_ms=link[0],
        latency_ms=link[1],
        ranks_per_node=ranks_per_node,
    )
    now = even_ranks(
        phases,
        num_ranks=num_ranks,
        num_rounds=max(1, num_rounds),
        start=before,
        move=move,
        keep_sizes=keep_sizes,
        sizes=filling,
        max_sizes=[*caps.values()] if sizes else None,
    )
    _check_fits(slot_loads(filling, now, num_ranks), caps, has_sizes=sizes is not None)
    targets = now % num_ranks
    moved = ranks != targets
    prediction = MovePrediction(
        before_ms=step_ms(phases, before, num_ranks),
        after_ms=step_ms(phases, now, num_ranks),
        bound_ms=bound_ms(phases, num_ranks),
        move_ms=move.ms(ranks, targets, num_ranks),
        moved_samples=int(moved.sum()),
        moved_bytes=int(travelling[moved].sum()),
        num_samples=len(now),
    )
    places = _Places(
        before=before, now=now, num_ranks=num_ranks, num_rounds=num_rounds, rank=rank, group=group
    )
    flat = [sample for batch in batches for sample in batch]
    result = _moved(before, now, flat, places)
    return Rebalanced(batches=result, prediction=prediction, _places=places)


def _check_fits(loads: FloatArray, caps: Mapping[str, int | None], *, has_sizes: bool) -> None:
    for number, (name, cap) in enumerate(caps.items()):
        if cap is not None and not has_sizes:
            raise ConfigError(f"{name} needs sizes=: of a sample, ViT tokens and LLM tokens")
        if cap is not None and loads[..., number].max(initial=0) > cap:
            raise ConfigError(
                f"no plan within {name} {cap:,} was found, the best has a micro-batch of "
                f"{loads[..., number].max():,.0f}; give more micro-batches, or fewer samples"
            )


def _gathered(
    batches: Sequence[Sequence[S]],
    measure: Callable[[S], list[float]],
    options: Sequence[float],
    group: dist.ProcessGroup | None,
) -> tuple[FloatArray, IntArray]:
    """All ranks' samples, and their numbers: costs, sizes, bytes, micro-batch, a column each.

    A rank that cannot tell its costs says so to the others before it raises.
    """
    failure: Exception | None = None
    rows: list[list[float]] = []
    try:
        rows = [
            [*measure(sample), float(number)]
            for number, batch in enumerate(batches)
            for sample in batch
        ]
        if len({len(row) for row in rows}) > 1:
            raise ConfigError("costs of samples have different lengths; give all phases of each")
        table = np.array(rows, np.float64).reshape(len(rows), len(rows[0]) if rows else 0)
        wrong = np.flatnonzero(~((table >= 0) & np.isfinite(table)).all(axis=1))
        if len(wrong):
            raise ConfigError(
                f"costs (and sizes) of sample {wrong[0]} are {rows[wrong[0]][:-REST]}; give finite "
                "ones from 0 on"
            )
    except Exception as error:  # a user's function may raise anything
        failure = error
        table = np.zeros((0, 0))
    head = [failure is not None, len(batches), len(table), table.shape[1], *options]
    gathered = all_gather_rows(np.array([head], np.float64), np.ones(1, np.int64), group)
    heads = gathered.astype(np.int64)
    if failure is not None:
        raise failure
    if heads[:, 0].any():
        failed = int(np.flatnonzero(heads[:, 0])[0])
        raise ConfigError(f"rank {failed} could not tell what its samples cost; it says why")
    if len({tuple(row) for row in gathered[:, 4:].tolist()}) > 1:
        raise ConfigError(
            "ranks give rebalance different gb_per_s, keep_sizes, ranks_per_node, sizes or caps; "
            "give all the same, or they would make different plans"
        )
    for column, what in ((1, "micro-batches"), (3, "columns of costs")):
        numbers = heads[heads[:, 2] > 0, column] if column == 3 else heads[:, column]
        if len(set(numbers.tolist())) > 1:
            less = REST + NUM_SIZES * int(options[-1]) if column == 3 else 0
            raise ConfigError(
                f"ranks have {(numbers - less).tolist()} {what}; give the same number on each"
            )
    width = int(heads[:, 3].max()) or 1 + NUM_SIZES + REST
    sizes = heads[:, 2]
    return all_gather_rows(table.reshape(len(table), width), sizes, group), sizes


def _moved(
    before: IntArray, now: IntArray, values: Sequence[Any], places: _Places
) -> list[list[Any]]:
    """This rank's values of the slots `before`, in order, -> by the slots `now`."""
    rank, num_ranks = places.rank, places.num_ranks
    sources, targets = before % num_ranks, now % num_ranks
    # values are given micro-batch by micro-batch, in each by the number of the sample
    held = np.flatnonzero(sources == rank)
    held = held[np.argsort(before[held], kind="stable")]
    value_of = dict(zip(held.tolist(), values, strict=True))
    if (sources != targets).any():
        leaving = [
            np.flatnonzero((sources == rank) & (targets == other)) for other in range(num_ranks)
        ]
        leaving[rank] = leaving[rank][:0]
        parts = [[value_of[int(sample)] for sample in part] for part in leaving]
        for source, received in enumerate(exchange_objects(parts, places.group)):
            if source != rank:
                samples = np.flatnonzero((sources == source) & (targets == rank))
                value_of.update(zip(samples.tolist(), received, strict=True))
    slots = [number * num_ranks + rank for number in range(places.num_rounds)]
    return [[value_of[int(sample)] for sample in np.flatnonzero(now == slot)] for slot in slots]

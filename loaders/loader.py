"""`StreamingLoader`: a build, step by step, for one data-parallel rank.

Every rank computes the same stream of groups from the build, the seed and the epoch alone, and takes its own places in
it; so ranks never talk, all have the same number of steps, and each knows the sums of the whole step. The position in
the stream is the whole state, so that a run goes on exactly on another number of ranks.

Two orders: "blocks" balances each micro-batch across ranks; "random" draws a step's groups at random and balances only
each rank's sum over the step, for trainers whose ranks meet once per step (`balance.order`, `balance.ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from balance.errors import ConfigError
from balance.order import GroupStream, Stream
from balance.presets import ModelPreset
from balance.records import IntArray
from balance.shuffle import RandomStream
from loaders.batch import MicroBatch
from loaders.collate import StepTotals, collate
from loaders.index import GroupIndex, read_manifest
from loaders.shards import open_shards

STATE_VERSION = 1
REMAINDERS = ("pad", "drop")
ORDERS = ("blocks", "random")


class StreamingLoader:
    """Iterating gives one `list[MicroBatch]` per step, `micro_batches_per_step` long, until the epoch ends.

    An iterator continues where the last one stopped, be it in the middle of an epoch; after a complete pass the next
    one starts the next epoch. `url` is a build directory. `pixel_dtype` torch.uint8 gives raw pixels, to be normalised
    on the device with `loaders.normalize`: a quarter of the bytes. `image_root` replaces the image folder of a refs
    build. The last step of an epoch may lack groups: `remainder="pad"` fills it up with empty micro-batches, so that
    every sample is seen; `"drop"` leaves it out and counts its samples in `num_dropped_samples`. `order="random"` is
    for plain data parallelism with eight or more micro-batches per step: as random as a shuffle, as balanced as blocks.
    """

    def __init__(  # noqa: PLR0913  (the options of the one public class)
        self,
        url: str | Path,
        *,
        dp_rank: int,
        dp_world_size: int,
        micro_batches_per_step: int = 1,
        seed: int = 0,
        pixel_dtype: torch.dtype = torch.float32,
        image_root: str | Path | None = None,
        remainder: str = "pad",
        order: str = "blocks",
    ) -> None:
        if not 0 <= dp_rank < dp_world_size:
            raise ConfigError(f"dp_rank is {dp_rank}; it must be in 0..{dp_world_size - 1} (dp_world_size - 1)")
        if micro_batches_per_step < 1:
            raise ConfigError(f"micro_batches_per_step is {micro_batches_per_step}; it must be at least 1")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; it must not be negative")
        if remainder not in REMAINDERS:
            raise ConfigError(f"remainder is {remainder!r}; use one of {', '.join(REMAINDERS)}")
        if order not in ORDERS:
            raise ConfigError(f"order is {order!r}; use one of {', '.join(ORDERS)}")
        if pixel_dtype != torch.uint8 and not pixel_dtype.is_floating_point:
            raise ConfigError(f"pixel_dtype is {pixel_dtype}; use torch.uint8 (raw) or a floating type (normalised)")
        self._manifest = read_manifest(_local_path(url))
        self._index = GroupIndex(self._manifest.root / "index.arrow", self._manifest.num_groups)
        self._shards = open_shards(self._manifest, self._index, Path(image_root) if image_root is not None else None)
        self._dp_rank, self._dp_world_size = dp_rank, dp_world_size
        self._micro_batches, self._remainder, self._pixel_dtype = micro_batches_per_step, remainder, pixel_dtype
        self._order, self._seed, self._epoch = order, seed, 0
        self._stream = self._start_epoch(0)
        self.num_dropped_samples = 0
        """Samples that `remainder="drop"` has left out so far, over all epochs that this loader has finished."""

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0; advances when an iterator has come to its end."""
        return self._epoch

    @property
    def model(self) -> ModelPreset:
        """The model preset that the build was made for."""
        return self._manifest.model

    @property
    def image_token_id(self) -> int:
        """The token in `input_ids` that vision features replace."""
        return self._manifest.image_token_id

    @property
    def vocab_size(self) -> int:
        """Size of the build's vocabulary."""
        return self._manifest.vocab_size

    @property
    def remaining_steps(self) -> int:
        """Steps until the epoch ends: what the next iterator gives."""
        return self._num_steps(self._stream.remaining)

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return self._num_steps(self._manifest.num_groups)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        if not self.remaining_steps:
            self._finish_epoch()
        while self.remaining_steps:
            stream = self._stream.copy()
            step = self._load_step(stream)
            # only now: a step that raised is not lost for a state that is taken afterwards
            self._stream = stream
            yield step
        self._finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain JSON: behind the last step that an iterator gave.

        The same on every rank, so one rank's is enough for a run on any number of ranks.
        """
        return {
            "version": STATE_VERSION,
            "order": self._order,
            "seed": self._seed,
            "epoch": self._epoch,
            "stream": self._stream.state(),
            "manifest_hash": self._manifest.hash,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the step after the one it was taken behind; on any number of ranks.

        Raises ConfigError, and changes nothing, if the state is of another build, order, seed or version.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ConfigError(f"state has the keys {sorted(state)}; a StreamingLoader's state has {sorted(own)}")
        for key, reason in (
            ("version", "it was saved by another version of Isobatch"),
            ("manifest_hash", "it belongs to another build"),
            ("order", "give the loader the order of the run that saved it"),
            ("seed", "give the loader the seed of the run that saved it"),
        ):
            if state[key] != own[key]:
                raise ConfigError(f"state has {key} {state[key]!r}, this loader {own[key]!r}: {reason}")
        try:
            stream = self._start_epoch(state["epoch"], state["stream"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"state of another stream: {error}") from None
        self._epoch, self._stream = state["epoch"], stream

    def _start_epoch(self, epoch: int, state: dict[str, Any] | None = None) -> Stream:
        num_groups, state = self._manifest.num_groups, state or {}
        if self._order == "random":
            return RandomStream(num_groups=num_groups, seed=self._seed, epoch=epoch, **state)
        return GroupStream(num_groups=num_groups, order=self._manifest.order, seed=self._seed, epoch=epoch, **state)

    def _finish_epoch(self) -> None:
        left_out = self._stream.take(self._stream.remaining)
        self.num_dropped_samples += int(self._index.column("num_samples", left_out).sum())
        self._epoch += 1
        self._stream = self._start_epoch(self._epoch)

    def _num_steps(self, num_groups: int) -> int:
        step_groups = self._dp_world_size * self._micro_batches
        return num_groups // step_groups if self._remainder == "drop" else -(-num_groups // step_groups)

    def _load_step(self, stream: Stream) -> list[MicroBatch]:
        """The next step of `stream`, which it moves: this rank's groups of it."""
        step = stream.take_step(self._dp_world_size, self._micro_batches, self._loads)
        groups = step[step >= 0]
        totals = StepTotals(
            num_loss_tokens=int(self._index.column("num_loss_tokens", groups).sum()),
            num_samples=int(self._index.column("num_samples", groups).sum()),
        )
        raws = [None if group < 0 else self._shards.read(group) for group in step[self._dp_rank].tolist()]
        return [collate(raw, self.model.vision, self._pixel_dtype, totals) for raw in raws]

    def _loads(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """(vision load, LLM tokens) of `groups`."""
        return self._index.column(f"num_{self.model.vision_unit}", groups), self._index.seq_len(groups)


def _local_path(url: str | Path) -> Path:
    scheme, separator, rest = str(url).partition("://")
    if separator and scheme != "file":
        raise ConfigError(f"{url}: object storage cannot be streamed yet; copy the build to a local directory")
    return Path(rest if separator else url)

"""`BalancedGroups`: a build as a dataset of Energon's, in our order of groups.

`.nv-meta/dataset.yaml` of a build names it, so Energon's loader makes it. Energon would give each
worker a stretch of the shards, shuffled for itself, so ranks meet whatever comes. Here step after
step has groups that cost about the same (`balance.order.step_order`): the t-th sample of each
rank is of step t, whatever the number of ranks and workers. Every worker computes the same order,
and the state that Energon saves has its position.
"""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from megatron.energon import CrudeWebdataset, SavableDataset, WorkerConfig, __version__
from megatron.energon.epathlib import EPath

try:
    from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
    from megatron.energon.flavors.webdataset.metadata import get_dataset_info
    from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
    from megatron.energon.wrappers import MapDataset
except ImportError as error:
    raise ImportError(
        f"megatron-energon {__version__} has no {error.name}; BalancedGroups was tested with 7.4.1."
        " Read the build with `dataset_config='stored_order.yaml'`, or install that version"
    ) from None

from isobatch.balance.order.step_order import DEFAULT_BALANCE, MAX_BALANCE, GlobalShuffle
from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray

LOADS_NAME = "loads.npy"
"""In `.nv-meta`: vision load and LLM tokens of each group, in the order of `.info.json`."""
OPEN_TARS = 16
"""Tars that a worker keeps open, as many as Energon does."""


class BalancedGroups(CrudeWebdataset):  # type: ignore[misc]
    """Groups of a build: in training in balanced order, in evaluation as they are stored."""

    def __init__(self, path: EPath, *, balance: float = DEFAULT_BALANCE, **options: Any) -> None:
        """`balance` is that of `LoaderConfig`; `options` are what Energon gives each dataset.

        Energon's own shuffling (`max_samples_per_sequence`, `parallel_shard_iters`,
        `shuffle_over_epochs`) has no effect. ConfigError for another `balance`.
        """
        super().__init__(path, **options)
        if not 0 <= balance <= MAX_BALANCE:
            raise ConfigError(f"balance is {balance}; use 0 (random) to {MAX_BALANCE}")
        self.balance = balance
        self.is_endless = False
        """Whether an iterator goes on with the next epoch; `PackedTaskEncoder` sets it."""

    def build(self, worker_rotation_offset: int = 0) -> Any:
        """The dataset of this rank. ConfigError if the loads are not of these shards."""
        if not self.training:
            return super().build(worker_rotation_offset)
        loads, total = self._loads(), len(self)
        first, last = self.subset.compute_subset(total) if self.subset else (0, total)
        reader = ShardInfosITarReader(
            self.path,
            self.shards,
            part_filter=self.part_filter,
            sample_filter=self.sample_filter,
            itar_cache_size=OPEN_TARS,
        )
        dataset = _Steps(
            reader,
            loads[first:last],
            first=first,
            balance=self.balance,
            is_endless=self.is_endless,
            worker_config=self.worker_config,
        )
        return MapDataset(
            dataset,
            self._load,
            stateless_map_fn=True,
            map_fn_config=self.config,
            worker_config=self.worker_config,
        )

    def _load(self, raw: Any) -> Any:
        return self.load_sample(raw.data[0])

    def config(self) -> dict[str, Any]:
        """What must be the same where a state is restored."""
        return {**super().config(), "balance": self.balance}

    def _loads(self) -> IntArray:
        """Vision load and tokens of the groups of this split, (groups, 2)."""
        path = self.path / ".nv-meta" / LOADS_NAME
        if not path.is_file():
            raise ConfigError(f"{path} is not there; build with `packer build --format energon`")
        loads: IntArray = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        counts: dict[str, int] = get_dataset_info(self.path)["shard_counts"]
        if sum(counts.values()) != len(loads):
            raise ConfigError(
                f"{path} has {len(loads)} groups, .info.json {sum(counts.values())}; build again"
            )
        starts = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
        parts = [loads[starts[one.name] : starts[one.name] + one.count] for one in self.shards]
        return np.concatenate([loads[:0], *parts])


class _Steps(SavableDataset):  # type: ignore[misc]
    """The raw samples of one worker: its rank's of every n-th step."""

    _savable_fields = ("_epoch", "_step", "_order_state")

    def __init__(
        self,
        reader: Any,
        loads: IntArray,
        *,
        first: int,
        balance: float,
        is_endless: bool,
        worker_config: WorkerConfig,
    ) -> None:
        """`first`: number of the first group, of which `loads` are, for the reader."""
        super().__init__(worker_config=worker_config)
        self._reader, self._first = reader, first
        self._vision, self._tokens = loads.T
        self._balance, self._is_endless = balance, is_endless
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Begin with the first step of the first epoch."""
        self._epoch = self._step = 0
        self._order = self._new_order()

    @property
    def _order_state(self) -> dict[str, Any]:
        return self._order.state()

    @_order_state.setter
    def _order_state(self, state: dict[str, Any]) -> None:
        self._order = self._new_order(**state)

    def _new_order(self, **state: Any) -> GlobalShuffle:
        return GlobalShuffle(
            num_groups=len(self._vision),
            seed=abs(self.worker_config.seed_offset),
            epoch=self._epoch,
            balance=self._balance,
            **state,
        )

    def __iter__(self) -> Iterator[Any]:
        self.worker_config.assert_worker()
        rank, worker = self.worker_config.rank, self.worker_config.rank_worker_id()
        num_workers = max(1, self.worker_config.num_workers)
        while self._order.remaining:
            groups = self._next_step()
            # steps go on over epochs, so that ranks stay in step whatever worker is next
            is_mine = self._step % num_workers == worker
            self._step += 1
            if is_mine and groups[rank] >= 0 and (raw := self._raw(int(groups[rank]))) is not None:
                yield raw
        self._epoch += 1
        self._order = self._new_order()

    def _next_step(self) -> IntArray:
        """The group of each rank; -1 for ranks that have none in an epoch's last step."""
        size = self.worker_config.world_size
        groups = self._order.take_step(size, 1, self._loads_of)[:, 0]
        if self._is_endless and not self._order.remaining:
            self._epoch += 1
            self._order = self._new_order()
            lacking = np.flatnonzero(groups < 0)
            # fewer groups than ranks: some ranks get what others have
            groups[lacking] = np.resize(self._order.take(len(lacking)), len(lacking))
        return groups

    def _loads_of(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        return self._vision[groups], self._tokens[groups]

    def _raw(self, group: int) -> Any:
        """A group as it is in its tar; None if the split leaves it out."""
        index = self._first + group
        sample = self._reader[index]
        if sample is None:
            return None
        return RawSampleData(__restore_key__=("Webdataset", index), data=(sample,))

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Steps of an epoch that a worker, by default this one, gives its rank's group of."""
        number = self.worker_config.rank_worker_id() if worker_idx is None else worker_idx
        num_steps = -(-len(self._vision) // self.worker_config.world_size)
        return len(range(number, num_steps, max(1, self.worker_config.num_workers)))

    def worker_has_samples(self) -> bool:
        """Whether there is any group."""
        return len(self._vision) > 0

    def can_restore_sample(self) -> bool:
        """Yes: by the number of its group."""
        return True

    def assert_can_restore(self) -> None:
        """Do nothing: any sample can be read again."""

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """The sample of a key that was given with it."""
        return self._raw(restore_key[1] - self._first)

    def config(self) -> dict[str, Any]:
        """What must be the same where a state is restored."""
        return {
            "type": type(self).__qualname__,
            "num_groups": len(self._vision),
            "balance": self._balance,
            "worker_config": self.worker_config.config(),
        }

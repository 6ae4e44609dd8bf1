"""`PackedTaskEncoder`: groups of a build for Megatron-Energon's own loader.

Only this module and `energon_dataset` import megatron.energon. A build that `packer build --format
energon` made has one Energon sample per group. Energon's loader reads them, has worker processes
and the state; `BalancedGroups` says in which order, and the task encoder makes each a `MicroBatch`.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon.errors import FatalSampleError
from megatron.energon.metadataset.loader_interface import DatasetBlendMode

from isobatch.common.errors import ConfigError, DamagedShard, IsobatchError, first_line
from isobatch.common.types import LABEL_IGNORE
from isobatch.common.visible_text import visible_line
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import config_of, model_inputs
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.integrations.energon_dataset import BalancedGroups
from isobatch.loaders.read.build import open_builds
from isobatch.loaders.steps.build_groups import StoredGroups
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.shards.stored_group import DECODE_ERRORS, StoredGroup
from isobatch.shards.tar_shards import decode_members

OPTIONS = frozenset(
    {"micro_batches_per_step", "shuffle", "loss_weights", "gradients", "pixel_dtype", "images"}
    | {"transparency", "exact_resize", "reduced_decode", "audio", "on_error", "storage"}
)
"""Fields of `LoaderConfig` that the task encoder takes. Energon has its own of the others."""


@edataclass
class PackedSample(Sample):  # type: ignore[misc]
    """A group as Energon gives it to the training."""

    micro_batch: MicroBatch
    """`num_loss_tokens` and `num_step_samples` are of the micro-batch: Energon has no steps."""
    inputs: dict[str, Any] | None = None
    """What `model_inputs` makes of it, if the task encoder was given a model."""


class PackedTaskEncoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Makes each group of a build a `PackedSample`; for `get_train_dataset` and others.

    A group is a whole micro-batch: give Energon `batch_size=None` (or 1, which is the same) and no
    `packing_buffer_size`. Losses are divided by the labels of an average step: those of the mean
    group times the world size of Energon's `WorkerConfig` times `micro_batches_per_step`.

    A file that cannot be used ends the training with FatalSampleError, since Energon would log any
    other error and leave out the whole group; with `on_error="skip"` its sample teaches nothing.
    """

    decoder = None

    def __init__(
        self,
        builds: str | Path | Sequence[str | Path],
        *,
        model: Any = None,
        always_encode: bool = True,
        **options: Any,
    ) -> None:
        """Read the manifests of `builds`, folders or URIs, of one model and tokenizer.

        `model`: a model of transformers, or its config, to get `PackedSample.inputs` as well;
        `always_encode` is that of `model_inputs`. `options` are those of `LoaderConfig` that
        `OPTIONS` names; `shuffle=False` is for an evaluation. ConfigError for another option or a
        build that was not packed with `--format energon`; DataError if there is none.
        """
        super().__init__()
        if others := sorted(options.keys() - OPTIONS):
            raise ConfigError(
                f"PackedTaskEncoder takes no {others[0]}; it takes {', '.join(sorted(OPTIONS))}. "
                "Order, ranks and workers are Energon's"
            )
        self._config = LoaderConfig(**options, check_ranks=False)
        self._model_config = None if model is None else config_of(model)
        self._always_encode = always_encode
        opened = open_builds(
            [builds] if isinstance(builds, str | Path) else builds, options=self._config.storage
        )
        try:
            for build in opened:
                if (shard_format := build.manifest.format) != "energon":
                    raise ConfigError(
                        f"{build.manifest.place} was packed with --format {shard_format}; pack it "
                        "with --format energon"
                    )
            groups = [StoredGroups(build) for build in opened]
            weight = sum(table.label_weights(self._config.loss_weights) for table in groups)
            self._group_weight = weight / max(1, sum(map(len, groups)))
            """Weights of the labels of a mean group of all builds."""
            self._model = opened[0].manifest.model
        finally:
            for build in opened:
                build.close()
        self.cookers = (Cooker(self.cook),)

    @stateless  # type: ignore[untyped-decorator]
    def cook(self, sample: Mapping[str, Any]) -> PackedSample:
        """The group of a crude sample. FatalSampleError for one that cannot be used."""
        where = f"{sample['__shard__']}, group {sample['__key__']}"
        members = {name: data for name, data in sample.items() if not name.startswith("__")}
        try:
            batch = self._micro_batch(_decoded(members, where))
            inputs = None
            if self._model_config is not None:
                inputs = model_inputs(batch, self._model_config, always_encode=self._always_encode)
        except IsobatchError as error:  # Energon would go on without the group
            raise FatalSampleError(str(error)) from error
        return PackedSample(**basic_sample_keys(sample), micro_batch=batch, inputs=inputs)

    def build_train_datasets(
        self,
        *,
        datasets: Sequence[Any],
        blend_mode: DatasetBlendMode = DatasetBlendMode.NONE,
        repeat: bool = True,
        shuffle_buffer_size: int | None = None,
        **others: Any,
    ) -> Any:
        """The dataset to train on; ranks stay in step over epochs where it has no end.

        `shuffle_buffer_size` has no effect on our order, as all shuffling of Energon's.
        """
        if all(isinstance(loaded.dataset, BalancedGroups) for loaded in datasets):
            shuffle_buffer_size = None
        for loaded in datasets:
            if isinstance(loaded.dataset, BalancedGroups):
                by_epoch = blend_mode == DatasetBlendMode.SAMPLE_REPETITIONS
                loaded.dataset.is_endless = repeat and not by_epoch
        return super().build_train_datasets(
            datasets=datasets,
            blend_mode=blend_mode,
            repeat=repeat,
            shuffle_buffer_size=shuffle_buffer_size,
            **others,
        )

    def build_batch(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        packing_buffer_size: int | None = None,
        **others: Any,
    ) -> Any:
        """The dataset without batches. ConfigError for any that Energon is asked to make."""
        if batch_size not in (None, 1):
            raise ConfigError(f"batch_size is {batch_size}; a group is a micro-batch: give None")
        if packing_buffer_size is not None:
            raise ConfigError("packing_buffer_size is for samples; groups are packed: give None")
        return super().build_batch(dataset, batch_size=None, **others)

    def _micro_batch(self, stored: StoredGroup) -> MicroBatch:
        active = WorkerConfig.active_worker_config
        rank, size = (0, 1) if active is None else (active.rank, active.world_size)
        config = replace(self._config, dp_rank=rank, dp_world_size=size)
        step_groups = size * config.micro_batches_per_step
        totals = StepTotals(
            num_loss_tokens=int((stored.labels != LABEL_IGNORE).sum()),
            num_samples=len(stored.sample_ids),
            loss_normalizer=self._group_weight * step_groups or 1.0,
        )
        batch = collate(stored, self._model, config, totals)
        for why in batch.skipped.values():
            warnings.warn(visible_line(f"skipped: {why}"), stacklevel=2)
        return replace(batch, sample_builds=(0,) * batch.num_samples)


def _decoded(members: Mapping[str, Any], where: str) -> StoredGroup:
    try:
        return decode_members(members, where)
    except DECODE_ERRORS as error:
        advice = "run `packer verify`"
        raise DamagedShard(f"{where}: not readable ({first_line(error)}); {advice}") from None

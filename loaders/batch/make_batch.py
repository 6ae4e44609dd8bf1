"""`make_batch`: a read group, decoded and transformed, in any thread or process."""

from dataclasses import replace

from isobatch.common.errors import IsobatchError
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.loaders.transforms import SampleSeeds, transform_batch
from isobatch.models.presets import ModelPreset
from isobatch.shards.stored_group import StoredGroup


def make_batch(
    model: ModelPreset,
    config: LoaderConfig,
    raw: StoredGroup,
    totals: StepTotals,
    seeds: SampleSeeds,
    are_padded: bool = False,
) -> MicroBatch:
    """The micro-batch of a group; `seeds` name its samples. Errors as of `collate`.

    `are_padded`: whether it is planned to be padded.
    """
    batch = collate(raw, model, config, totals, seeds)
    if len(batch.sample_ids) != len(seeds.samples):  # skipped ones are in it, without labels
        raise IsobatchError(
            f"a micro-batch of {len(seeds.samples)} samples has {len(batch.sample_ids)}: that is "
            "an error of Isobatch's; please report it"
        )
    builds = tuple(build for build, *_ in seeds.samples)
    batch = replace(batch, is_padded=are_padded, sample_builds=builds)
    if config.batch_transform is not None:
        batch = transform_batch(config.batch_transform, batch, raw.where, seeds)
    return batch

"""The positions of all ranks of a run, in one process."""

from isobatch.loaders.steps.steps import StepConfig, Steps


def make_ranks(source, world, micro_batches, *, seed=0, remainder="pad"):
    """`Steps` of each of `world` ranks, at the beginning of epoch 0."""
    return [
        Steps(
            source,
            StepConfig(
                dp_rank=rank,
                dp_world_size=world,
                micro_batches=micro_batches,
                seed=seed,
                remainder=remainder,
            ),
        )
        for rank in range(world)
    ]

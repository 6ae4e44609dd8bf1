"""What adapters to packed trainers share: options of ranks, and what they refuse."""

from collections.abc import Collection, Mapping
from typing import Any

from isobatch.common.errors import ConfigError
from isobatch.loaders.step_stream import StepStream


def with_ranks(options: Mapping[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """A loader's options with the trainer's ranks, unless they say themselves which ranks are."""
    if {"device_mesh", "process_group", "dp_rank"} & options.keys():
        return dict(options)
    return {**options, "dp_rank": rank, "dp_world_size": num_ranks}


def check_loss_weights(loader: StepStream, trainer: str) -> None:
    """ConfigError for weights of labels, of which the trainer's loss knows nothing."""
    if (weights := loader.config.loss_weights) != "token":
        raise ConfigError(
            f"loss_weights is {weights!r}; {trainer}'s losses have no weights: leave it out"
        )


def check_media(media: Collection[str], fields: Collection[str], trainer: str) -> None:
    """ConfigError for media, by their names in transformers, that an adapter does not pass on."""
    if others := [name for name in media if name not in fields]:
        raise ConfigError(
            f"{trainer} is given no {', '.join(others)}; leave out samples with such media, or "
            "use a model without them"
        )


def check_whole_step(num_left: int, advice: str) -> None:
    """ConfigError before a state in the middle of a loader's step, with what to do against it."""
    if num_left:
        raise ConfigError(
            f"{num_left} micro-batches of the loader's step are not trained; {advice}"
        )

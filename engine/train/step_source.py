"""`StepSource`: where a run's steps come from, as a protocol.

`engine` imports no loader: `engine.train.cli` passes in the class of one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from isobatch.engine.runtime.stage_io import Batch
from isobatch.engine.train.options import RunConfig
from isobatch.models.presets import ModelPreset


class SourceStep(Protocol):
    """Micro-batches of one step for one replica."""

    note: object
    """What a step planner decided about the step; None without one."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class StepSource(Protocol):
    """Steps of a build, epoch after epoch, for one replica."""

    model: ModelPreset
    """Preset that the build was made for."""
    image_token_id: int
    """Token of an image feature."""
    video_token_id: int | None
    """Token of a feature of a video; None for models without videos."""
    audio_token_id: int | None
    """Token of an audio feature; None without an audio encoder."""
    vocab_size: int
    """Tokens of the build's tokenizer."""

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch, as `SourceStep`."""

    def stats(self) -> Any:
        """Figures so far, with the fields of `loaders.LoaderStats`."""

    def log(self, figures: Mapping[str, float]) -> None:
        """Write the trainer's figures of its last step where the source logs its own."""

    def state_dict(self) -> dict[str, Any]:
        """Position, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""

    def close(self) -> None:
        """Stop all threads."""


OpenSource = Callable[..., StepSource]
"""Takes a build and keywords, the fields of `loaders.LoaderConfig`."""


def source_options(
    config: RunConfig, pipelines: Sequence[Sequence[int]], micro_batches: int
) -> dict[str, Any]:
    """Keywords for this rank's source; `pipelines` are the ranks of each replica.

    Micro-batches stay on the CPU: the pipeline copies each to its device when it runs.
    """
    rank = dist.get_rank()
    replica = next(number for number, ranks in enumerate(pipelines) if rank in ranks)
    return {
        "dp_rank": replica,
        "dp_world_size": len(pipelines),
        "micro_batches_per_step": micro_batches,
        "seed": config.seed,
        # only stage 0 needs pixels
        "images": "patches" if pipelines[replica][0] == rank else "encoded",
    }


def endless(source: StepSource) -> Iterator[SourceStep]:
    """The steps of epoch after epoch."""
    while True:
        yield from source

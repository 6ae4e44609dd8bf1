"""Commands `train` and `measure` of `python -m engine`, run under torchrun.

The one module of `engine` that imports `loaders`: an application where a loader's steps meet the
trainer. `engine.cli` loads it only when one of its commands is called, because torch takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

from balance.command_line import new_app
from engine.train.config import MeasureConfig, TrainConfig
from engine.train.measure import measure
from engine.train.step_source import OpenSource, SourceRequest, StepSource
from engine.train.trainer import train
from loaders import StreamingLoader

Config = TypeVar("Config")


def open_loader(request: SourceRequest) -> StepSource:
    """A loader for a rank's steps."""
    return StreamingLoader(
        request.build,
        dp_rank=request.replica,
        dp_world_size=request.num_replicas,
        micro_batches_per_step=request.micro_batches,
        seed=request.seed,
        planner=request.planner,
        device=request.device,
        decode_images=request.decode_images,
    )


def _command(
    kind: type[Config], work: Callable[[Config, OpenSource], None], text: str
) -> Callable[..., None]:
    """A command whose options are the fields of a config."""

    def command(**options: Any) -> None:
        work(kind(**options), open_loader)

    command.__doc__ = text
    command.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    command.__annotations__ = get_type_hints(kind, include_extras=True)
    return command


def make_app() -> typer.Typer:
    """The program with both commands."""
    app = new_app("engine", "Commands that train, under torchrun.")
    app.command("train")(
        _command(TrainConfig, train, "Train a vision-language model as a pipeline, by a plan.")
    )
    app.command("measure")(
        _command(
            MeasureConfig,
            measure,
            "Plan from measurements: profile the layers, run partitions, take the fastest.",
        )
    )
    return app

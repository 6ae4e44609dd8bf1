"""Commands `train` and `measure` of `python -m engine`, run under torchrun.

The one module of `engine` that imports `loaders`: an application where a loader's steps meet the
trainer. `engine.cli` loads it only when one of its commands is called, because torch takes seconds.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_type_hints

import torch
import torch.distributed as dist
import typer

from balance.interface.command_line import new_app
from engine.train.config import MeasureConfig, RunConfig, TrainConfig
from engine.train.launch import join_ranks
from engine.train.measure import measure
from engine.train.step_source import OpenSource
from engine.train.trainer import train
from loaders import StreamingLoader

Config = TypeVar("Config")


def command(
    kind: type[Config], run: Callable[[Config], None], text: str = ""
) -> Callable[..., None]:
    """A function for typer whose options are the fields of a config."""

    def call(**options: Any) -> None:
        run(kind(**options))

    call.__doc__, call.__annotations__ = text, get_type_hints(kind, include_extras=True)
    call.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    return call


def make_app() -> typer.Typer:
    """The program with both commands."""
    app = new_app("engine", "Commands that train, under torchrun.")
    text = "Train a vision-language model as a pipeline, by a plan."
    app.command("train")(command(TrainConfig, partial(_run, train), text))
    text = "Plan from measurements: profile the layers, run partitions, take the fastest."
    app.command("measure")(command(MeasureConfig, partial(_run, measure), text))
    return app


def _run(work: Callable[[Any, OpenSource, torch.device], None], config: RunConfig) -> None:
    work(config, StreamingLoader, join_ranks(config))
    dist.destroy_process_group()

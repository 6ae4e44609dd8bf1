"""Commands `train` and `measure` of `python -m engine`, run under torchrun.

The one module of `engine` that imports `loaders`: an application where a loader's steps meet the
trainer. `engine.cli` loads it only when one of its commands is called, because torch takes seconds.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer

from isobatch.common.command_line import (
    FAILED,
    INTERRUPTED,
    TERMINATED,
    WRONG_CALL,
    UsageError,
    new_app,
    print_error,
    read_settings,
    with_options,
)
from isobatch.common.config import options_of
from isobatch.common.errors import ConfigError
from isobatch.engine.train.dry_run import dry_run
from isobatch.engine.train.launch import is_first_rank, join_ranks, require_outputs
from isobatch.engine.train.measure import measure
from isobatch.engine.train.options import MeasureConfig, RunConfig, TrainConfig
from isobatch.engine.train.shutdown import StoppedBySignal, is_mine_to_print
from isobatch.engine.train.step_source import OpenSource
from isobatch.engine.train.trainer import train
from isobatch.loaders import StreamingLoader

Config = TypeVar("Config")


def command(
    kind: type[Config], run: Callable[[Config], None], text: str = ""
) -> Callable[..., None]:
    """A function for typer whose options are the fields of a config."""

    def call(
        context: typer.Context,
        build: Annotated[
            str,
            typer.Argument(
                metavar="BUILD",
                help="Folder of `packer build`, for this model; or a TOML file with a key `build`"
                " and any of these options, which the command line's override.",
            ),
        ],
    ) -> None:
        run(read_settings(kind, context, "build"))

    call.__doc__ = text
    return with_options(kind, *(name for name, *_ in options_of(kind)))(call)


def make_app() -> typer.Typer:
    """The program with both commands."""
    app = new_app("engine", "Commands that train, under torchrun.")
    text = (
        "Train a vision-language model as a pipeline, by a plan.\n\nAssumed: AdamW with float32"
        " moments, in the plan's training mode; without a plan float32 weights and gradients, and"
        " nothing shared out over replicas. SIGTERM saves and ends after the step."
    )
    app.command("train")(command(TrainConfig, _train, text))
    text = "Plan from measurements: profile the layers, run partitions, take the fastest."
    app.command("measure")(command(MeasureConfig, partial(_run, measure), text))
    return app


def run_command(arguments: list[str]) -> None:
    """Run a call of `train` or `measure`, given without the program's name."""
    try:
        make_app()(arguments, prog_name="python -m engine", standalone_mode=False)
    except (UsageError, ConfigError):
        if is_first_rank() or dist.is_initialized():
            raise
        sys.exit(WRONG_CALL)  # all ranks have the same command line: the first says what is wrong


def _train(config: TrainConfig) -> None:
    if not config.dry_run:
        _run(train, config)
    elif is_first_rank():
        require_outputs(config)
        dry_run(config, StreamingLoader)


def _run(work: Callable[[Any, OpenSource, torch.device], None], config: RunConfig) -> None:
    try:
        device = join_ranks(config)
        require_outputs(config)
        work(config, StreamingLoader, device)
    except StoppedBySignal as error:
        if is_first_rank():
            print_error(str(error))
        sys.exit(TERMINATED)
    except (Exception, KeyboardInterrupt) as error:
        if is_mine_to_print(error):
            raise
        if isinstance(error, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        sys.exit(WRONG_CALL if isinstance(error, ConfigError) else FAILED)
    dist.destroy_process_group()

"""`python -m engine train` and `measure` inside a test's process, and on forked ranks."""

import sys
from unittest import mock

import torch
import torch.distributed as dist
import typer

import isobatch.engine.cli
from isobatch.engine.train.cli import command
from isobatch.engine.train.measure import measure
from isobatch.engine.train.options import MeasureConfig, TrainConfig
from isobatch.engine.train.trainer import make_run, run_steps
from isobatch.loaders import StreamingLoader

__all__ = ["CPU", "main", "make", "measure_here", "parse", "run_steps"]

CPU = torch.device("cpu")


def main(arguments):
    """`python -m engine train ARGUMENTS`; -> its exit status."""
    before, sys.argv = sys.argv, ["engine", "train", *map(str, arguments)]
    try:
        isobatch.engine.cli.main()
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    return 0


def parse(arguments, kind=TrainConfig):
    """The config of a call."""
    found, app = [], typer.Typer(pretty_exceptions_enable=False)
    app.command()(command(kind, found.append))
    app(list(map(str, arguments)), standalone_mode=False)
    return found[0]


def make(config):
    """A run; without ranks that have met, of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return make_run(config, StreamingLoader, CPU)


def measure_here(arguments):
    """`measure` on ranks that have met, with the fewest runs of a pass."""
    with mock.patch("isobatch.engine.runtime.profiling.measure_plan.REPEATS", 2):
        measure(parse(arguments, MeasureConfig), StreamingLoader, CPU)

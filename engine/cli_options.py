"""The options of the commands of `engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from balance.config import preset_names
from engine.plan_config import PARTS, SEARCHES
from engine.simulator.schedule import SCHEDULES

BuildPlace = Annotated[
    str | None,
    typer.Argument(help="Folder of a build: what `packer build --out` wrote.", metavar="BUILD"),
]
PlanFile = Annotated[
    Path, typer.Argument(help="plan.json of `python -m engine plan`.", metavar="PLAN")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"Without a build: model preset, or a .toml file of yours: {', '.join(preset_names('models'))}."
    ),
]
ImagesOption = Annotated[
    int | None, typer.Option(min=0, help="Without a build: image patches of a micro-batch.")
]
SeqLenOption = Annotated[
    int | None, typer.Option(min=1, help="Without a build: LLM tokens of a micro-batch.")
]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, help="Without a build: samples that share these. Default: 1.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help=f"Cluster preset, or a .toml file of yours: {', '.join(preset_names('clusters'))}. Default: h100."
    ),
]
TpOption = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a tensor-parallel group. Default: 1.")
]
PpOption = Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline. Default: 4.")]
DpOption = Annotated[int | None, typer.Option(min=1, help="Replicas of the pipeline. Default: 1.")]
MicroBatchesOption = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches per step and replica. Default: 16.")
]
ScheduleOption = Annotated[str | None, typer.Option(help=f"{', '.join(SCHEDULES)}. Default: 1f1b.")]
StagesOption = Annotated[
    int | None, typer.Option(min=1, help="Stages of a rank; more than 1 for interleaved.")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(help="GiB that a GPU may hold. Default: what the cluster's preset calls usable."),
]
StepsOption = Annotated[
    int | None, typer.Option(min=1, help="Steps of the epoch to simulate. Default: 4.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the epoch's order, as the loaders'. Default: 0.")
]
FrozenOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Part that is not trained, may be repeated: {', '.join(PARTS)}."),
]
SearchOption = Annotated[
    str | None,
    typer.Option(
        help=f"{SEARCHES[0]}: the fastest partition; bmp: OmniBal's search. Default: exact."
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Samples of the random micro-batches to compare with. Default: 4, as in OmniBal.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for plan.json, gantt.html and trace.json.")
]
ChartOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for gantt.html and trace.json.")
]

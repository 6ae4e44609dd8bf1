"""The options that the commands of `packer` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from balance.config import preset_names


class Format(StrEnum):
    """Layouts of the shards."""

    arrow = "arrow"
    webdataset = "webdataset"
    refs = "refs"


DatasetOption = Annotated[
    str | None,
    typer.Option(
        help="File, folder or URI, a mixture (.toml), a Hub id, 'demo', or a name that `packer datasets` lists."
    ),
]
DataRootOption = Annotated[
    str | None,
    typer.Option(
        help="Folder or URI that image paths start from. Default: the annotations' folder."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"Model preset, or a .toml file of yours: {', '.join(preset_names('models'))}."
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="Folder with tokenizer.json and tokenizer_config.json, or a Hugging Face Hub id."
    ),
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        help="Chat template: a .jinja file, or the name of one of the tokenizer's templates."
    ),
]
OutOption = Annotated[
    str | None, typer.Option(help="Folder or URI (s3://, gs://, az://) to write to.")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        help="local: processes of this machine; ray: count on a Ray cluster. Default: local."
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Read so many records at most, for a quick look.")
]
MaxRejectedOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Stop if more than this share of the samples cannot be used. Default: 0.05.",
    ),
]
LinksOption = Annotated[
    bool | None,
    typer.Option(
        "--follow-links", help="Read images through links that lead out of the data root."
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Processes; the result does not depend on it. Default: all cores."),
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="TOML file with any of these options, and the rarer ones.")
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cap of a group in LLM tokens (Q_t). Default: the longest sample, at most the model's context.",
    ),
]
VisionOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Cap of a group in image patches, or in ViT tokens for native-resolution models (Q_v)."
        " Default: the smallest that costs no groups.",
    ),
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        help="GiB for a micro-batch's activations: the caps are then the best that fit, by the model's dimensions."
    ),
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the grouping and the order. Default: 0.")
]
FetchOption = Annotated[
    bool | None,
    typer.Option(
        "--fetch-annotations", help="Download a known dataset's annotation file from the Hub."
    ),
]
GROUPING_HELP = "fit: as few groups as can be found; isf: OmniBal's Algorithm 1. Default: fit."
CheckOption = Annotated[
    str | None,
    typer.Option(
        help="headers: look at each image's header and end; decode: decode every image once. Default: headers."
    ),
]
RanksOption = Annotated[
    int,
    typer.Option(min=1, max=65_536, help="Data-parallel ranks that the ratios are computed for."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
BuildPlace = Annotated[str, typer.Argument(help="Folder or URI of a build.", metavar="OUT")]
BuildFolder = Annotated[Path, typer.Argument(help="Folder of a build.", metavar="OUT")]

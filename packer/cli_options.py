"""Options that several commands of `packer` share."""

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


# What is packed, and for what

DatasetOption = Annotated[
    str | None,
    typer.Option(
        help="File, folder or URI, a mixture (.toml), a Hub id, 'demo', or a name that"
        " `packer datasets` lists."
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
FetchOption = Annotated[
    bool | None,
    typer.Option(
        "--fetch-annotations", help="Download a known dataset's annotation file from the Hub."
    ),
]
LinksOption = Annotated[
    bool | None,
    typer.Option(
        "--follow-links", help="Read images through links that lead out of the data root."
    ),
]

# How samples are counted

ExecutorOption = Annotated[
    str | None,
    typer.Option(
        help="local: processes of this machine; ray: count on a Ray cluster. Default: local."
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Processes; the result does not depend on it. Default: all cores."),
]
CheckOption = Annotated[
    str | None,
    typer.Option(
        help="headers: look at each image's header and end; decode: decode every image once."
        " Default: headers."
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

# How samples are grouped

SeqLenOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cap of a group in LLM tokens (Q_t). Default: the longest sample, at most the"
        " model's context.",
    ),
]
VisionOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Cap of a group in image patches, or in ViT tokens for native-resolution models"
        " (Q_v). Default: the smallest that costs no groups.",
    ),
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        help="GiB for a micro-batch's activations: the caps are then the best that fit, by the"
        " model's dimensions."
    ),
]
GROUPING_HELP = "fit: as few groups as can be found; isf: OmniBal's Algorithm 1. Default: fit."
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the grouping and the order. Default: 0.")
]

# Of a finished build

BuildPlace = Annotated[str, typer.Argument(help="Folder or URI of a build.", metavar="OUT")]
RanksOption = Annotated[
    int,
    typer.Option(min=1, max=65_536, help="Data-parallel ranks that the ratios are computed for."),
]
GroupOption = Annotated[
    int | None,
    typer.Option(help="Number of the group, from 0. Default: the middle one, by vision load."),
]
BuildTokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="The build's tokenizer: folder or Hub id. Default: only the demo's text is shown."
    ),
]
HtmlOption = Annotated[
    Path | None, typer.Option(help="Write a page with thumbnails of the images to this file.")
]

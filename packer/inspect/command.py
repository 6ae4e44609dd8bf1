"""The command `packer inspect`: its options, and which of the three views it gives. `packer.cli`
registers it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from balance.command_line import JsonOption
from packer.cli_options import BuildPlace, TemplateOption
from packer.inspect._read_group import inspect_group
from packer.inspect.html import write_group_html
from packer.inspect.terminal import group_title, print_group

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


def inspect_command(
    out: BuildPlace,
    group: GroupOption = None,
    tokenizer: BuildTokenizerOption = None,
    chat_template: TemplateOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one group of a build: its samples, their text and what has a label, and its images."""
    view = inspect_group(out, group, tokenizer=tokenizer, chat_template=chat_template)
    if html is not None:
        write_group_html(view, html)
    if as_json:
        print(json.dumps(view.to_json()))
        return
    if html is None:
        print_group(view, Console())
    else:
        print(f"{group_title(view)}: {html}")

"""The `packer` command: one sub-command per stage."""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.cache_files import LENGTHS, RECORDS, kept_files, remove_files
from isobatch.common.command_line import (
    ConfigOption,
    JsonOption,
    new_app,
    read_config,
    run_app,
    with_options,
)
from isobatch.common.config import preset_names, read_toml
from isobatch.common.consoles import foreign, messages, print_line, results
from isobatch.common.errors import ConfigError
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.models.presets import load_model
from isobatch.packer.build import Builder
from isobatch.packer.build_dir import REPORT_NAME
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.process_pool import default_workers
from isobatch.packer.format_text import counted
from isobatch.packer.group import group_files
from isobatch.packer.inspect.html import write_group_html
from isobatch.packer.inspect.terminal import group_title, print_group
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import count_rejected
from isobatch.packer.report.figures import make_report
from isobatch.packer.report.terminal import print_build, print_report
from isobatch.packer.sources.dataset import print_datasets
from isobatch.packer.upload import save_html
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.folders import cache_folder, is_uri, join
from isobatch.shards.tables import REJECTED_NAME

BuildPlace = Annotated[str, typer.Argument(help="Folder or URI of a build.", metavar="OUT")]
RanksOption = Annotated[
    int, typer.Option(min=1, max=65_536, help="Data-parallel ranks that the ratios are for.")
]

COUNTING = (
    *("dataset", "data_root", "model", "tokenizer", "chat_template", "template_date", "out"),
    *("executor", "workers", "check_images", "limit", "max_rejected", "follow_links"),
    *("fetch_annotations", "map", "choices", "answers", "unknown_marks"),
)
GROUPING = ("max_seq_len", "max_vision", "pad_each_to", "grouping", "seed")
"""Fields of `BuildConfig` that are options of a command."""

app = new_app(
    "packer",
    "Pack vision-language data into balanced micro-batches.\n\n"
    "Try it: packer build --dataset demo --out demo-packed",
)


@app.command()
@with_options(
    BuildConfig,
    *COUNTING,
    *GROUPING,
    *("format", "columns", "keep_columns", "memory_gib", "partition_samples", "partitions"),
)
def build(
    context: typer.Context,
    config: ConfigOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier build in OUT first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Count, group and write a dataset. Run it again to resume a build that was stopped."""
    builder = _builder(context)
    summary = builder.build(overwrite=overwrite)
    if summary is None:  # other shares of the partitions are missing
        if as_json:
            print(json.dumps({"out": builder.config.out, "complete": False}))
        return
    report = make_report(summary.out)
    # a build at a URI has written its page itself; one killed after its manifest has none yet
    has_page = summary.already_complete and Path(summary.out, REPORT_NAME).exists()
    if not is_uri(summary.out) and not has_page:
        save_html(report, summary.out)
    if as_json:
        limits = {"limits": summary.limits.to_json()}
        print(json.dumps({**asdict(summary), **limits, "report": report.to_json()}))
        return
    print_build(summary, report, results())


@app.command()
@with_options(BuildConfig, *COUNTING)
def count(context: typer.Context, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Only count patches and tokens of every sample.

    Leaves counts.parquet and rejected.parquet.
    """
    builder = _builder(context)
    counts, rejected = builder.count()
    reasons = count_rejected([rejected])
    read = len(counts) + len(rejected)
    if as_json:
        numbers = {reason: entry.number for reason, entry in reasons.items()}
        print(json.dumps({"num_read": read, "num_counted": len(counts), "rejected": numbers}))
        return
    sums = f"{len(counts):,} counted + {len(rejected):,} rejected"
    print_line(f"{counted(read, 'samples')} read = {sums}")
    for reason, entry in reasons.items():
        words = REASONS.get(reason, reason)
        print_line(f"  rejected {entry.number:,}, {reason}: {words}; first: {entry.first}")
    if reasons:
        print_line(f"  all of them: {join(builder.config.out, REJECTED_NAME)}")


@app.command()
@with_options(BuildConfig, *GROUPING, "isf_iterations")
def group(
    context: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="counts.parquet files, or OmniBal length files (JSON).", metavar="FILE..."
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="Folder for the groups and report.html. Default: only print.")
    ] = None,
    vision_unit: Annotated[
        str, typer.Option(help="What --max-vision counts: image_patches or vit_tokens.")
    ] = "image_patches",
    dp: RanksOption = 8,
    as_json: JsonOption = False,
) -> None:
    """Only group samples of known lengths, and report."""
    values = {name: context.params[name] for name in (*GROUPING, "isf_iterations")}
    options = GroupOptions(**{name: value for name, value in values.items() if value is not None})
    if out is not None and (is_uri(out) or not out.strip()):
        raise ConfigError(f"--out {out!r}: groups go to a folder; `packer build` writes to URIs")
    with TemporaryDirectory() as scratch:
        folder = Path(out or scratch)
        group_files(files, folder, options, StageProgress(messages), vision_unit=vision_unit)
        _report(str(folder), dp, as_json=as_json, save=out is not None)


@app.command()
def report(out: BuildPlace, dp: RanksOption = 8, as_json: JsonOption = False) -> None:
    """Print how balanced a build is, next to other samplers.

    report.html shows the distributions too.
    """
    _report(out, dp, as_json=as_json)


@app.command()
def verify(
    out: BuildPlace,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that read files. Default: all cores.")
    ] = None,
    media: Annotated[
        bool, typer.Option("--media", help="Also the files that a refs build points to.")
    ] = False,
    image_root: Annotated[
        str | None, typer.Option(help="Folder or URI of these files. Default: as when packed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every file of a build, and name those that differ."""
    result = verify_build(
        out,
        StageProgress(messages),
        workers=workers or default_workers(),
        media=media,
        image_root=image_root,
    )
    if as_json:
        print(json.dumps(asdict(result)))
    require_intact(result)
    if not as_json:
        files = counted(result.num_files, "files")
        print_line(f"intact: {files}, {result.num_bytes:,} bytes")
        if media:
            print_line(f"intact: {counted(result.num_media, 'files')} that the build points to")
        packed = (
            f"{counted(result.num_groups, 'groups')} of {counted(result.num_samples, 'samples')}"
        )
        print_line(f"{packed}, as the manifest says")


@app.command()
def inspect(
    out: BuildPlace,
    group: Annotated[
        int | None,
        typer.Option(help="Number of the group, from 0. Default: the middle one, by vision load."),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="Id of a sample, to show it alone and its group's loads.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The build's tokenizer: folder or Hub id. Default: only the demo's text is shown."
        ),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="The build's chat template, if it was given one.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with thumbnails of the images to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one group of a build: texts, labels, images."""
    if group is not None and sample is not None:
        raise ConfigError("give --group or --sample, not both")
    view = inspect_group(
        out, group, sample=sample, tokenizer=tokenizer, chat_template=chat_template
    )
    if html is not None:
        write_group_html(view, html)
    if as_json:
        print(json.dumps(view.to_json()))
    elif html is not None:
        print_line(f"{group_title(view)}: {html}")
    else:
        print_group(view, results())


@app.command()
def datasets() -> None:
    """List the known datasets and what each needs."""
    print_datasets(results())


@app.command()
def models() -> None:
    """List the presets of models, and what each does with images, audio and videos."""
    table = Table("name", "what it is", "takes, next to text", box=None, pad_edge=False)
    for name in preset_names("models"):
        preset = load_model(name)
        media = ["images", *["audio"] * bool(preset.audio), *["videos"] * bool(preset.video)]
        description = preset.description.removesuffix(".")
        table.add_row(f"[bold]{name}[/]", foreign(description), ", ".join(media))
    results().print(table, highlight=False)


@app.command()
def cache(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder of lengths_cache, to see its lengths too.", metavar="FOLDER"),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove all that nobody reads just now.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what loaders without a build keep for later runs: records, and lengths."""
    places = {RECORDS: cache_folder("records")} | ({} if folder is None else {LENGTHS: folder})
    numbers = {}
    for kind, place in places.items():
        freed = remove_files(place, kind, 0) if clean else 0
        files = kept_files(place, kind)
        num_bytes = sum(file.num_bytes for file in files)
        name = "records" if kind == RECORDS else "lengths"
        numbers[name] = {"folder": str(place), "files": len(files), "bytes": num_bytes}
        numbers[name]["freed_bytes"] = freed
        if not as_json:
            has = f"{counted(len(files), 'files')}, {num_bytes:,} bytes"
            print_line(f"{name} in {place}: {has}" + f"; {freed:,} bytes removed" * clean)
    if as_json:
        print(json.dumps(numbers))


def main() -> None:
    """Run the call in `sys.argv`."""
    run_app(app, "packer", stopped="stopped; run the same command again to continue")


def _builder(context: typer.Context) -> Builder:
    """The build that the command line and its --config ask for; says what they leave to us."""
    config = read_config(BuildConfig, context, command="packer build")
    file = context.params.get("config")
    options = context.params | ({} if file is None else read_toml(file, f"--config {file}"))
    assumed = [
        f"--{name} {value}"
        for name in ("model", "tokenizer", "out")
        if (value := getattr(config, name)) and not options.get(name)
    ]
    if assumed:
        messages.print(foreign(f"assumed: {' '.join(assumed)} (give others to change them)"))
    builder = Builder(config, StageProgress(messages))
    model = builder.model
    if config.max_seq_len and config.max_seq_len > model.context_len:
        cut = f"is cut to the context of {model.name}, {model.context_len:,}"
        messages.print(
            foreign(f"note: --max-seq-len {config.max_seq_len:,} {cut}"), highlight=False
        )
    return builder


def _report(out: str, dp: int, *, as_json: bool, save: bool = True) -> None:
    result = make_report(out, dp=dp)
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        print_report(result, results())
    if save:  # after printing: who may only read a bucket has the figures at least
        save_html(result, out)
    if save and not as_json:
        print_line(f"details: {join(out, REPORT_NAME)}")

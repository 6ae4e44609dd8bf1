"""The `packer` command: one sub-command per stage."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.cache_files import DEMOS, LENGTHS, RECORDS, kept_files, remove_files
from isobatch.common.command_line import (
    ConfigOption,
    JsonOption,
    new_app,
    print_result,
    read_config,
    require_writable,
    run_app,
    with_log,
    with_options,
)
from isobatch.common.config import preset_names, read_toml
from isobatch.common.consoles import foreign, messages, print_line, results
from isobatch.common.errors import ConfigError
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.models.presets import load_model
from isobatch.packer.build import Builder
from isobatch.packer.build_dir import REPORT_NAME
from isobatch.packer.changes.add import Adder, grown_config
from isobatch.packer.changes.merge import merge_builds
from isobatch.packer.changes.remove import remove_samples
from isobatch.packer.changes.sample_names import SampleNames, read_ids
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.process_pool import default_workers
from isobatch.packer.dry_run.estimate import estimate_build
from isobatch.packer.dry_run.terminal import print_estimate
from isobatch.packer.format_text import counted
from isobatch.packer.group import group_files
from isobatch.packer.inspect.html import write_group_html
from isobatch.packer.inspect.terminal import group_title, print_group
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.progress import StageProgress
from isobatch.packer.push import push_build
from isobatch.packer.report.build_summary import Rejection, count_rejected
from isobatch.packer.report.comparison import LETTERS, compare
from isobatch.packer.report.figures import make_report
from isobatch.packer.report.gpu_hours import MFU, GpuQuestion
from isobatch.packer.report.html import write_comparison, write_html
from isobatch.packer.report.terminal import print_build, print_comparison, print_report
from isobatch.packer.sources.dataset import print_datasets
from isobatch.packer.upload import save_html
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.folders import cache_folder, is_uri, join, naming_full_disk
from isobatch.shards.manifest import Manifest, read_manifest
from isobatch.shards.tables import REJECTED_NAME

BuildPlace = Annotated[str, typer.Argument(help="Folder or URI of a build.", metavar="OUT")]
RanksOption = Annotated[
    int, typer.Option(min=1, max=65_536, help="Data-parallel ranks that the ratios are for.")
]
Places = Annotated[
    list[str], typer.Argument(help="One build, or two to compare.", metavar="OUT...")
]
DiscardOption = Annotated[
    bool, typer.Option("--discard", help="Give up a change that was begun and not finished.")
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
@with_log
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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only predict groups, bytes, time and cost, by two per cent of the records.",
        ),
    ] = False,
    price_per_core_hour: Annotated[
        float | None, typer.Option(min=0, help="Price that --dry-run predicts the cost by.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count, group and write a dataset. Run it again to resume a build that was stopped."""
    if price_per_core_hour is not None and not dry_run:
        raise ConfigError("--price-per-core-hour is for --dry-run: add it")
    builder = _builder(context)
    if dry_run:
        estimate = estimate_build(
            builder.config, StageProgress(messages), price=price_per_core_hour
        )
        if print_result(estimate.to_json(), as_json=as_json):
            print_estimate(estimate, builder.config, results())
        return
    summary = builder.build(overwrite=overwrite)
    if summary is None:  # other shares of the partitions are missing
        print_result({"out": builder.config.out, "complete": False}, as_json=as_json)
        return
    report = make_report(summary.out)
    # a build at a URI has written its page itself; one killed after its manifest has none yet
    has_page = summary.already_complete and Path(summary.out, REPORT_NAME).exists()
    if not is_uri(summary.out) and not has_page:
        save_html(report, summary.out)
    values = {"limits": summary.limits.to_json(), "report": report.to_json()}
    if print_result(asdict(summary) | values, as_json=as_json):
        print_build(summary, report, results())


@app.command()
@with_log
@with_options(
    BuildConfig,
    *(name for name in COUNTING if name != "out"),
    *("columns", "partition_samples", "partitions"),
)
def add(
    context: typer.Context,
    out: BuildPlace,
    config: ConfigOption = None,
    discard: DiscardOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add data to a finished build; run it again to resume.

    New samples are packed to the build's caps. Nothing else is packed again, and who reads the
    build meanwhile is not disturbed.
    """
    manifest = read_manifest(out)
    context.params["model"] = context.params["model"] or manifest.model.name
    new = read_config(BuildConfig, context, command="packer add")
    addition = Adder(grown_config(manifest, new), StageProgress(messages)).add(discard=discard)
    if addition is None:  # other shares of the partitions are missing
        print_result({"out": out, "complete": False}, as_json=as_json)
        return
    values = {
        "out": out,
        "added": addition.totals,
        "rejected": {reason: entry.number for reason, entry in addition.rejected.items()},
        "totals": addition.manifest.values["totals"],
        "manifest_hash": addition.manifest.hash,
    }
    if not print_result(values, as_json=as_json):
        return
    if addition.is_new:
        new_groups = counted(addition.totals["num_groups"], "groups")
        read = counted(addition.totals["num_read"], "samples")
        print_line(f"{read} read: {addition.totals['num_packed']:,} added in {new_groups}")
        _print_rejected(addition.rejected)
    else:
        print_line(f"{out} has had this data already; nothing to do")
    _print_totals(out, addition.manifest)


@app.command()
@with_log
def merge(
    builds: Annotated[list[str], typer.Argument(help="Folders or URIs.", metavar="BUILD...")],
    out: Annotated[str, typer.Option(help="Folder or URI of the new build.")],
    as_json: JsonOption = False,
) -> None:
    """Make one build of several of one model, tokenizer and caps, without copying in a folder.

    Shards are links to the same files, or copies that the object store makes.
    """
    manifest = merge_builds(builds, out, StageProgress(messages))
    if print_result({"out": out, "totals": manifest.values["totals"]}, as_json=as_json):
        _print_totals(out, manifest)


@app.command()
@with_log
def remove(
    out: BuildPlace,
    ids: Annotated[
        Path | None, typer.Option(help="File of sample ids: one per line, or a JSON list.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="Source whose samples go. May be repeated.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: all cores.")
    ] = None,
    discard: DiscardOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take samples out of a finished build, and out of every file of it; run it again to resume.

    What is left of their groups is packed again, and their shards are written again. `packer
    verify --absent FILE` proves that they are gone. Raw data, and files that a refs build points
    to, stay where they are.
    """
    if ids is None and not source:
        raise ConfigError("packer remove: give --ids FILE or --source NAME")
    names = SampleNames(ids=read_ids(ids) if ids else (), sources=tuple(source or ()))
    result = remove_samples(
        out, names, StageProgress(messages), workers=workers or default_workers(), discard=discard
    )
    values = asdict(replace(result, manifest=None))  # type: ignore[arg-type]
    if not print_result(values | {"manifest": result.manifest.hash}, as_json=as_json):
        return
    if result.num_samples or result.num_rejected:
        groups, shards = counted(result.num_groups, "groups"), counted(result.num_shards, "shards")
        removed = counted(result.num_samples, "samples")
        print_line(f"removed {removed}, and {result.num_rejected:,} rejected: {groups}, {shards}")
    else:
        print_line(f"none of these samples is in {out}; its sources: {', '.join(result.sources)}")
    if result.num_unknown and (result.num_samples or result.num_rejected):
        print_line(f"note: {result.num_unknown:,} of the ids or sources are of no sample")
    _print_totals(out, result.manifest)


@app.command()
@with_log
@with_options(BuildConfig, *COUNTING)
def count(context: typer.Context, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Only count patches and tokens of every sample.

    Leaves counts.parquet and rejected.parquet.
    """
    builder = _builder(context)
    counts, rejected = builder.count()
    reasons = count_rejected([rejected])
    read = len(counts) + len(rejected)
    numbers = {reason: entry.number for reason, entry in reasons.items()}
    values = {"num_read": read, "num_counted": len(counts), "rejected": numbers}
    if not print_result(values, as_json=as_json):
        return
    sums = f"{len(counts):,} counted + {len(rejected):,} rejected"
    print_line(f"{counted(read, 'samples')} read = {sums}")
    _print_rejected(reasons)
    if reasons:
        print_line(f"  all of them: {join(builder.config.out, REJECTED_NAME)}")


@app.command()
@with_log
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
        page = None if out is None else folder / REPORT_NAME
        _report([str(folder)], dp, as_json=as_json, html=page)


@app.command()
@with_log
def report(
    outs: Places,
    dp: Annotated[
        int | None,
        typer.Option(min=1, max=65_536, help="Data-parallel ranks. Default: --gpus, or 8."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Predict GPU hours on such GPUs: h100, or any preset of configs/clusters."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many. Default: --dp.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of one GPU for an hour.")] = None,
    mfu: Annotated[
        float | None,
        typer.Option(help=f"Share of its peak that a GPU reaches. Default: {MFU:g}."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the distributions to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print how balanced a build is, next to other samplers; or two builds in one table.

    The build's own report.html, which stays as it is, is for 8 ranks.
    """
    if gpu is None and (gpus, price, mfu) != (None, None, None):
        raise ConfigError(
            "--gpus, --price and --mfu are for a prediction: add --gpu, as --gpu h100"
        )
    ranks = dp or gpus or 8
    question = gpu and GpuQuestion(
        gpu=gpu,
        num_gpus=ranks if gpus is None else gpus,
        price=price,
        mfu=MFU if mfu is None else mfu,
    )
    _report(outs, ranks, question or None, as_json=as_json, html=html)


@app.command()
@with_log
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
    absent: Annotated[
        Path | None,
        typer.Option(
            "--absent", help="Also that none of the samples is there whose ids are in this file."
        ),
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
        absent=SampleNames(ids=read_ids(absent)) if absent else None,
    )
    is_for_people = print_result(asdict(result), as_json=as_json)
    require_intact(result)
    if is_for_people:
        files = counted(result.num_files, "files")
        print_line(f"intact: {files}, {result.num_bytes:,} bytes")
        if media:
            print_line(f"intact: {counted(result.num_media, 'files')} that the build points to")
        if absent:
            print_line("absent: no sample of these ids is in a table or a shard")
        packed = (
            f"{counted(result.num_groups, 'groups')} of {counted(result.num_samples, 'samples')}"
        )
        print_line(f"{packed}, as the manifest says")


@app.command()
@with_log
def push(
    out: BuildPlace,
    repo: Annotated[str, typer.Argument(help="Name on the Hub: ORG/NAME.", metavar="NAME")],
    private: Annotated[bool, typer.Option("--private", help="Only for you and your org.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload a finished build to the Hugging Face Hub, with a dataset card.

    Run it again to continue a push that was stopped.
    """
    address = push_build(out, repo, StageProgress(messages), private=private)
    if print_result({"out": out, "url": address}, as_json=as_json):
        print_line(address)


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
    _prepare_page(html)
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
    """Show what is kept for later runs: records and lengths of loaders, and the drawn demo."""
    places = {RECORDS: cache_folder("records"), DEMOS: cache_folder("demo")}
    places |= {} if folder is None else {LENGTHS: folder}
    numbers = {}
    for kind, place in places.items():
        freed = remove_files(place, kind, 0) if clean else 0
        files = kept_files(place, kind)
        num_bytes = sum(file.num_bytes for file in files)
        name = {RECORDS: "records", LENGTHS: "lengths", DEMOS: "demo"}[kind]
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


def _print_rejected(reasons: Mapping[str, Rejection]) -> None:
    for reason, entry in reasons.items():
        words = REASONS.get(reason, reason)
        print_line(f"  rejected {entry.number:,}, {reason}: {words}; first: {entry.first}")


def _print_totals(out: str, manifest: Manifest) -> None:
    groups = counted(manifest.num_groups, "groups")
    print_line(f"{out} has {counted(manifest.num_packed, 'samples')} in {groups}")


def _prepare_page(html: Path | None) -> None:
    """Make the folder of a page. ConfigError if the page could not be written."""
    if html is not None:
        require_writable("--html", html, is_file=True)
        html.parent.mkdir(parents=True, exist_ok=True)


def _report(
    places: list[str],
    dp: int,
    question: GpuQuestion | None = None,
    *,
    as_json: bool,
    html: Path | None,
) -> None:
    if len(places) > len(LETTERS):
        raise ConfigError(f"packer report shows one build or compares two, not {len(places)}")
    _prepare_page(html)
    reports = [make_report(place, dp=dp, question=question) for place in places]
    first, *others = reports
    values = [
        {"out": place} | report.to_json() for place, report in zip(places, reports, strict=True)
    ]
    result = {"builds": values} if others else first.to_json()
    if print_result(result, as_json=as_json):
        if others:
            print_comparison(places, compare(reports), results())
        else:
            print_report(first, results())
    if html is not None:
        with naming_full_disk(html.parent):
            if others:
                write_comparison(reports, places, html)
            else:
                write_html(first, html)
        if not as_json:
            print_line(f"details: {html}")

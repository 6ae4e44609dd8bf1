"""The `packer` command: one sub-command per stage.

Exit status: 0 done, 1 the data or the build is bad, 2 the call is wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from balance.config import load_config
from balance.errors import ConfigError, IsobatchError
from balance.presets import load_model
from packer.build import Builder
from packer.build_dir import REPORT_NAME
from packer.cli_options import (
    GROUPING_HELP,
    BuildPlace,
    CheckOption,
    ConfigOption,
    DataRootOption,
    DatasetOption,
    ExecutorOption,
    FetchOption,
    Format,
    JsonOption,
    LimitOption,
    LinksOption,
    MaxRejectedOption,
    MemoryOption,
    ModelOption,
    OutOption,
    RanksOption,
    SeedOption,
    SeqLenOption,
    TemplateOption,
    TokenizerOption,
    VisionOption,
    WorkersOption,
)
from packer.config import MOST_TOKENS, BuildConfig
from packer.count.pool import default_workers
from packer.group import GroupOptions
from packer.group_command import group_files
from packer.inspect.command import inspect_command
from packer.progress import StageProgress
from packer.records.record import REASONS
from packer.report._summary_text import print_build
from packer.report.figures import make_report
from packer.report.summary import Rejection, summarise_rejected
from packer.report.terminal import print_report
from packer.sources.catalog import print_datasets
from packer.upload import save_html
from packer.verify import require_intact, verify_build
from shards.folders import is_uri, join
from shards.tables import REJECTED_NAME

app = typer.Typer(
    name="packer",
    help="Pack vision-language data into balanced micro-batches.\n\n"
    "Try it: packer build --dataset demo --out demo-packed",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C or SIGTERM stopped, by the shells' convention."""

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong call; it has no public name there."""

people = Console(stderr=True)
"""Progress and messages; standard output is for results."""


@app.command()
def build(
    context: typer.Context,
    dataset: DatasetOption = None,
    data_root: DataRootOption = None,
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    chat_template: TemplateOption = None,
    out: OutOption = None,
    shard_format: Annotated[
        Format | None, typer.Option("--format", help="Layout of the shards. Default: arrow.")
    ] = None,
    max_seq_len: SeqLenOption = None,
    max_vision: VisionOption = None,
    memory_gib: MemoryOption = None,
    grouping: Annotated[str | None, typer.Option(help=GROUPING_HELP)] = None,
    seed: SeedOption = None,
    executor: ExecutorOption = None,
    workers: WorkersOption = None,
    check_images: CheckOption = None,
    limit: LimitOption = None,
    max_rejected: MaxRejectedOption = None,
    follow_links: LinksOption = None,
    config: ConfigOption = None,
    fetch_annotations: FetchOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier build in OUT first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Count, group and write a dataset. Run it again to continue a build that was stopped."""
    builder = _builder(context)
    summary = builder.build(overwrite=overwrite)
    report = make_report(summary.out)
    # one at a URI has its page from the build; one killed behind its manifest has none yet
    if not is_uri(summary.out) and not (
        summary.already_complete and Path(summary.out, REPORT_NAME).exists()
    ):
        save_html(report, summary.out)
    if as_json:
        print(json.dumps({**asdict(summary), "report": report.to_json()}))
        return
    print_build(summary, report, Console())


@app.command()
def count(
    context: typer.Context,
    dataset: DatasetOption = None,
    data_root: DataRootOption = None,
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    chat_template: TemplateOption = None,
    out: OutOption = None,
    executor: ExecutorOption = None,
    workers: WorkersOption = None,
    check_images: CheckOption = None,
    limit: LimitOption = None,
    max_rejected: MaxRejectedOption = None,
    follow_links: LinksOption = None,
    config: ConfigOption = None,
    fetch_annotations: FetchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Only count: patches and tokens of every sample, as counts.parquet (and rejected.parquet)."""
    builder = _builder(context)
    counts, rejected = builder.count()
    reasons = summarise_rejected(rejected)
    if as_json:
        numbers = {reason: entry.number for reason, entry in reasons.items()}
        print(
            json.dumps(
                {
                    "num_read": len(counts) + len(rejected),
                    "num_counted": len(counts),
                    "rejected": numbers,
                }
            )
        )
        return
    print(
        f"{len(counts) + len(rejected):,} samples read = {len(counts):,} counted + {len(rejected):,} rejected"
    )
    _print_rejected(reasons, builder.config.out)


@app.command()
def group(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="counts.parquet files, or OmniBal length files (JSON).", metavar="FILE..."
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="Folder for the groups and report.html. Default: only print.")
    ] = None,
    max_seq_len: SeqLenOption = None,
    max_vision: VisionOption = None,
    vision_unit: Annotated[
        str, typer.Option(help="What --max-vision counts: image_patches or vit_tokens.")
    ] = "image_patches",
    seed: SeedOption = None,
    grouping: Annotated[str, typer.Option(help=GROUPING_HELP)] = "fit",
    isf_iterations: Annotated[int, typer.Option(min=1, help="ISF iterations at most.")] = 10,
    dp: RanksOption = 8,
    as_json: JsonOption = False,
) -> None:
    """Only group samples whose lengths are known already, and report the ratios."""
    options = GroupOptions(
        seed=seed or 0,
        max_seq_len=max_seq_len,
        max_vision=max_vision,
        grouping=grouping,
        isf_iterations=isf_iterations,
    )
    if out is not None and is_uri(out):
        raise ConfigError(
            f"--out {out}: groups alone go to a folder; `packer build` writes to URIs"
        )
    with TemporaryDirectory() as scratch:
        folder = Path(out or scratch)
        group_files(
            files,
            folder,
            options,
            StageProgress(people),
            vision_unit=vision_unit,
            context_len=MOST_TOKENS,
        )
        _report(str(folder), dp, as_json=as_json, kept=out is not None)


@app.command()
def report(
    out: BuildPlace,
    dp: RanksOption = 8,
    as_json: JsonOption = False,
) -> None:
    """OmniBal's Table 3 for this dataset, and report.html with the distributions before and
    after.
    """
    _report(out, dp, as_json=as_json)


@app.command()
def verify(out: BuildPlace, workers: WorkersOption = None, as_json: JsonOption = False) -> None:
    """Check sizes, checksums and totals of a build; name every file that is not what the manifest
    says.
    """
    result = verify_build(out, StageProgress(people), workers=workers or default_workers())
    if as_json:
        print(json.dumps(asdict(result)))
    require_intact(result)
    if not as_json:
        print(f"intact: {result.num_files} files, {result.num_bytes:,} bytes")
        print(
            f"{result.num_groups:,} groups of {result.num_samples:,} samples, as the manifest says"
        )


app.command("inspect")(inspect_command)


@app.command()
def datasets() -> None:
    """List the datasets and mixtures that are known by name, and what each needs."""
    print_datasets(Console())


def main() -> None:
    """Entry point: errors for the user are one line and an exit status, never a traceback."""
    signal.signal(
        signal.SIGTERM, signal.getsignal(signal.SIGINT)
    )  # a cluster's stop is as clean as a person's
    try:
        if len(sys.argv) == 1:
            sys.argv.append("--help")
        # typer turns an interrupt into this status
        if app(standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except UsageError as error:
        _fail(f"{error.format_message()} (packer --help, packer COMMAND --help)", 2)
    except (typer.Abort, KeyboardInterrupt):
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # an impatient second one ends the tidying up at once
        _fail("stopped; run the same command again to continue", INTERRUPTED)
    except ConfigError as error:
        _fail(str(error), 2)
    except IsobatchError as error:
        _fail(str(error), 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)


def _builder(context: typer.Context) -> Builder:
    """The build that the command line and its --config ask for."""
    given = dict(context.params)
    given["format"] = given.pop("shard_format", None)
    file = given.pop("config", None)
    known = {field.name for field in fields(BuildConfig)}
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in given.items()
        if name in known
    }
    config = load_config(BuildConfig, file, options, command="packer build")
    model = load_model(config.model) if config.model else None
    if model and config.max_seq_len and config.max_seq_len > model.context_len:
        people.print(
            f"note: --max-seq-len {config.max_seq_len:,} is cut to the context of {model.name}, {model.context_len:,}"
        )
    return Builder(config, StageProgress(people))


def _report(out: str, dp: int, *, as_json: bool, kept: bool = True) -> None:
    result = make_report(out, dp=dp)
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        print_report(result, Console())
    if kept:  # behind the figures: who may only read a bucket has those at least
        save_html(result, out)
    if kept and not as_json:
        print(f"details: {join(out, REPORT_NAME)}")


def _print_rejected(reasons: dict[str, Rejection], out: str) -> None:
    """One line per reason, with the first sample that it met."""
    for reason, entry in reasons.items():
        print(
            f"  rejected {entry.number:,}, {reason}: {REASONS.get(reason, reason)}; first: {entry.first}"
        )
    if reasons:
        print(f"  all of them: {join(out, REJECTED_NAME)}")


def _fail(message: str, status: int) -> None:
    people.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(status)

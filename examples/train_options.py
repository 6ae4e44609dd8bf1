"""The options of `train_pipeline.py`, and which of them do not go together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipeline_models import PARTS
from pipeline_start import common_options, gib, positive

from balance.errors import ConfigError

ONE_STAGE = (
    "--recompute adapt is for one stage per rank: use --stages-per-rank 1 with --schedule 1f1b or zero_bubble, or "
    "--recompute plan, all or none"
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common_options("Train a vision-language model as a pipeline, by a plan")
    parser.add_argument(
        "--plan", default="auto", help="plan.json (default: auto, layers cut evenly)"
    )
    parser.add_argument(
        "--borders", type=borders, help="first layer of each stage and the end, as 0,20,45"
    )
    parser.add_argument(
        "--dp", type=int, help="replicas of the pipeline (default: the plan's; auto: 1)"
    )
    parser.add_argument(
        "--schedule", help="1f1b, gpipe, interleaved, zero_bubble (default: the plan's; auto: 1f1b)"
    )
    parser.add_argument(
        "--stages-per-rank", type=positive, help="for interleaved (default: the plan's; auto: 1)"
    )
    parser.add_argument(
        "--micro-batches-per-step", type=positive, help="per replica (default: the plan's; auto: 4)"
    )
    parser.add_argument(
        "--recompute",
        choices=("plan", "none", "all", "adapt"),
        help="layers that are; adapt: as few as memory allows, tried out by --profile's times behind the first step, "
        "and again behind any that runs out, which is repeated with all of them (default: plan; auto: none)",
    )
    parser.add_argument(
        "--memory-gib",
        type=gib,
        help="of a rank, for adapt (default: on a CPU the plan's, on a GPU what is free) and --tune (the plan's)",
    )
    parser.add_argument(
        "--reserve-gib", type=gib, default=0.0, help="for adapt: of it, what its trials leave free"
    )
    parser.add_argument(
        "--steps", type=positive, default=60, help="in all, those before a resume included"
    )
    parser.add_argument(
        "--lr", type=float, default=3e-3, help="for random weights; give less for trained ones"
    )
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of the gradients; inf: any"
    )
    parser.add_argument(
        "--freeze",
        choices=PARTS,
        action="append",
        default=[],
        help="part that is not trained, besides those of the plan; may be repeated",
    )
    parser.add_argument(
        "--tune", action="store_true", help="pack each step anew, with a schedule of its own"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        help="for --tune and adapt: what the layers take, as it was measured",
    )
    parser.add_argument(
        "--encode",
        choices=("never", "own", "any"),
        help="for --tune: ranks in whose idle time a frozen encoder runs ahead, none, the first stage's, or any, which "
        "then has a copy of it and decodes images (default: own, if the first stage has all of it)",
    )
    parser.add_argument(
        "--effort",
        type=int,
        default=20_000,
        help="for --tune: how long a search for an order may take",
    )
    parser.add_argument(
        "--state", type=Path, help="folder to go on from, if it has a state, and to save in"
    )
    parser.add_argument(
        "--save-every", type=positive, default=10, help="steps between two saves in --state"
    )
    parser.add_argument("--export", type=Path, help="folder for the trained model of transformers")
    parser.add_argument(
        "--figures",
        type=Path,
        help="file to which each step's figures are appended, as a line of JSON",
    )
    parser.add_argument(
        "--trace", type=Path, help="file for the last step as it was measured, for ui.perfetto.dev"
    )
    return parser.parse_args(argv)


def borders(text: str) -> list[int]:
    """A partition on the command line."""
    return [int(border) for border in text.split(",")]


def check_options(args: argparse.Namespace) -> None:
    """ConfigError for options that do not go together, whatever build and plan are."""
    adapts = args.recompute == "adapt"
    if adapts and args.tune:
        raise ConfigError(
            "--recompute adapt tries out micro-batches as they are stored, --tune makes others: use --tune with "
            "--memory-gib and --recompute plan, all or none"
        )
    if adapts and (args.stages_per_rank or 1) > 1:
        raise ConfigError(ONE_STAGE)
    if (args.tune or adapts) != bool(args.profile) or (args.encode and not args.tune):
        raise ConfigError(
            "--tune needs --profile, and so does --recompute adapt; --profile needs one of them, --encode needs --tune"
        )
    if args.reserve_gib and not adapts:
        raise ConfigError("--reserve-gib is for --recompute adapt: give that too, or leave it out")
    if args.memory_gib is not None and not (adapts or args.tune):
        raise ConfigError(
            "--memory-gib is for --recompute adapt and --tune: give one of them, or plan with this --memory-gib"
        )
    if args.export and args.export.exists() and not args.export.is_dir():
        raise ConfigError(f"--export {args.export}: this is a file; give a folder")

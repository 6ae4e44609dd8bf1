"""What two ranks run for `test_pipeline_families`: models of transformers planned by measuring, and
trained by that.
"""

from pathlib import Path

import torch.distributed as dist

from support.trainers.engine_train import make, measure_here, parse, run_steps

STEPS = 3


def plan_and_train(said, folder, builds):
    """Of each build: a plan, and steps by it; `NAME` has plan and profile, `NAME.jsonl` the
    losses.
    """
    for name, build in builds.items():
        out = Path(folder) / name
        measuring = [
            build,
            f"--out={out}",
            f"--model={name}",
            "--micro-batches-per-step=3",
            "--most-run=2",
        ]
        measure_here([*measuring, "--device=cpu"])
        dist.barrier()  # the first rank writes
        said[name] = train(
            build, f"--model={name}", f"--plan={out}/plan.json", f"--figures={out}.jsonl"
        )


def tune(said, folder, build):
    """Every step tuned by the plan's profile, with a frozen encoder that may run ahead and
    without.
    """
    out = Path(folder) / "internvl"
    for name, more in {"tuned": (), "frozen": ("--freeze=vision", "--encode=any")}.items():
        given = (
            f"--plan={out}/plan.json",
            f"--profile={out}/profile.json",
            f"--figures={folder}/{name}.jsonl",
        )
        said[name] = train(build, "--model=internvl", "--tune", *given, *more)


def train(build, *options):
    """-> steps that were trained."""
    config = parse([build, "--device=cpu", f"--steps={STEPS}", *options])
    run = make(config)
    run_steps(run, config)
    run.source.close()
    return run.step


def everything(said, folder, builds):
    """All of it."""
    plan_and_train(said, folder, builds)
    tune(said, folder, builds["internvl"])

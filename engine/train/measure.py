"""`python -m engine measure`: a plan from measurements on these ranks.

`profile.json` holds the time and memory of every layer, for all planners
(`engine.cost_model.profile_table`). The partitions that rank best by it are run for three steps
each (OmniBal 4.2); `evidence.json` has their times. The fastest becomes `plan.json`, with as few
recomputed layers as fit. Nothing is trained. Uses the build's first step that has images.
"""

import json
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.cost_model.layer_list import phases_of
from isobatch.engine.cost_model.loads import largest_micro_batch
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.profile_table import Profile, misfit, write_profile
from isobatch.engine.planning.plan import Plan, PlanRequest, write_plan
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.engine.runtime.pipeline import PipelineOptions
from isobatch.engine.runtime.profiling.measure_plan import choose_plan, profile_step
from isobatch.engine.runtime.profiling.partition_trials import (
    MeasuredPartitions,
    evidence,
)
from isobatch.engine.runtime.stage_io import Batch
from isobatch.engine.simulator.schedule import default_stages
from isobatch.engine.train.launch import is_first_rank
from isobatch.engine.train.models.open_model import open_model
from isobatch.engine.train.options import MeasureConfig
from isobatch.engine.train.step_source import OpenSource, StepSource, source_options
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import ModelPreset

MOST_STEPS = 17
"""Steps among which one must have load for every phase of the model."""


def measure(config: MeasureConfig, open_source: OpenSource, device: torch.device) -> None:
    """Measure, choose, write. All ranks call it; the first one writes."""
    world = [list(range(dist.get_world_size()))]
    # the first rank has the first stage in every partition
    loader_options = source_options(config, world, config.micro_batches_per_step)
    source = open_source(config.build, **loader_options)
    torch.manual_seed(config.seed)  # the same weights on all ranks
    model = open_model(config.model, config.config, source)
    per_rank = config.stages_per_rank or default_stages(config.schedule)
    options = PipelineOptions(
        schedule=config.schedule,
        stages_per_rank=per_rank,
        device=device,
        mode=config.training_mode(),
    )
    batches = first_of_all_phases(source, model.preset)
    source.close()
    cluster = load_cluster(config.cluster)
    loads = batch_loads(batches, model.preset)
    memory = config.memory_bytes
    request = PlanRequest(
        model=model.preset,
        cluster=cluster,
        parallel=Parallelism(pp=dist.get_world_size()),
        training=Training(mode=config.training_mode()),
        schedule=config.schedule,
        stages_per_rank=per_rank,
        num_micro_batches=len(batches),
        memory_bytes=cluster.usable_memory_bytes if memory is None else memory,
        loads=loads,
        full=largest_micro_batch(loads),
    )
    of_images, of_videos = source.image_token_id, source.video_token_id
    tokens = [of_images] if of_videos is None else [of_images, of_videos]
    profile = profile_step(model.stack, request, batches, tokens, options)
    measured, plan = choose_plan(model.stack, request, profile, batches, options, config.most_run)
    if is_first_rank():
        _write(config.out, profile, measured, plan)
        print(_text(profile, measured, model.names))


def first_of_all_phases(source: StepSource, model: ModelPreset) -> list[Batch]:
    """The first step with load for every phase of a model. ConfigError if there is none."""
    phases = dict.fromkeys(phases_of(model).values())
    for batches in islice(source, MOST_STEPS):
        loads = batch_loads(batches, model)
        if all(getattr(loads, phase).tokens.any() for phase in phases):
            return list(batches)
    raise ConfigError(
        f"none of the first {MOST_STEPS} steps has something for each of {' and '.join(phases)}:"
        " give more --micro-batches-per-step, a build with images, or use `python -m engine plan`"
    )


def _write(folder: Path, profile: Profile, measured: MeasuredPartitions, plan: Plan) -> None:
    """Write the three files. DataError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(profile, folder / "profile.json")
        text = json.dumps(evidence(measured), indent=1)
        (folder / "evidence.json").write_text(text + "\n", "utf-8")
        write_plan(plan, folder / "plan.json")
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None


def _text(profile: Profile, measured: MeasuredPartitions, names: Sequence[str]) -> str:
    """Measurements and choice, for people."""
    report = evidence(measured)
    lines = [
        f"profile: fits are off by at most {misfit(profile):.0%}",
        "  predicted   measured  borders",
    ]
    for row in report["candidates"]:
        predicted, median = (
            f"{row[name]:8.1f} ms" if row[name] else "          -"
            for name in ("predicted_ms", "median_ms")
        )
        chosen = "  <- chosen" if row["borders"] == report["chosen"] else ""
        lines.append(f"{predicted} {median}  {row['borders']}{chosen}")
    lines += [
        f"stage {stage}: {', '.join(names[first:end])}"
        for stage, (first, end) in enumerate(pairwise(report["chosen"]))
    ]
    return "\n".join(lines)

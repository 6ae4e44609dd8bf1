"""Plan the tiny vision-language model's pipeline from measurements: profile its layers, run partitions, take the best.

    torchrun --nproc-per-node 2 examples/plan_pipeline.py BUILD_DIR --out DIR
    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan DIR/plan.json

`profile.json` holds what every layer takes and holds, for all that plans (`engine.profile_costs`). The partitions that
rank best by it are run for three steps each (OmniBal 4.2); `evidence.json` says which, and how long they took. The
fastest becomes `plan.json`, with as few recomputed layers as fit. Nothing is trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tiny_vlm import TOKENS_PER_PATCH
from tiny_vlm_layers import KINDS, layer_names, make_layers
from train_pipeline import join
from train_tiny import make_model

from balance.errors import ConfigError, IsobatchError
from engine.clusters import load_cluster
from engine.layer_list import phases_of
from engine.parallel import Parallelism, Training
from engine.partition import even_partition
from engine.plan import write_plan
from engine.planner import Question
from engine.profile_costs import Profile, misfit, write_profile
from engine.profile_plan import largest_micro_batch, measured_costs, plan_of_profile
from engine.recompute import choose_recompute
from engine.runtime.batch_loads import batch_loads
from engine.runtime.carries import LayeredModel
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.profile import MeasureOptions, measure_layers
from engine.runtime.trials import Measured, TrialOptions, TrialStep, evidence, measure_partitions, write_evidence
from loaders import MicroBatch, StreamingLoader

SHARES = (0.25, 0.5, 0.75)
"""Of a micro-batch's samples: a profile needs smaller ones than those of a step."""
REPEATS = 5
"""Of every pass; the first warms up."""
GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and plan; 0 if done, 2 if build, ranks and options do not fit together."""
    args = parse(argv)
    torch.set_num_threads(1)  # tensors this small lose more to threads than they gain
    try:
        plan(args)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Plan a tiny vision-language model's pipeline from measurements")
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("--out", type=Path, required=True, help="folder for profile.json, evidence.json and plan.json")
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, interleaved, zero_bubble")
    parser.add_argument("--stages-per-rank", type=int, default=1, help="for interleaved")
    parser.add_argument("--micro-batches-per-step", type=int, default=4)
    parser.add_argument("--most-run", type=int, default=12, help="partitions to run")
    parser.add_argument("--cluster", default="h100", help="preset that the plan names for what was not measured")
    parser.add_argument("--memory-gib", type=float, help="of a rank (default: what the cluster's preset calls usable)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> None:
    """Measure, choose, write. All ranks; the first one writes."""
    device = join(args.device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    loader = StreamingLoader(
        args.build,
        dp_rank=0,
        dp_world_size=1,
        micro_batches_per_step=args.micro_batches_per_step,
        seed=args.seed,
        device=device if device.type == "cuda" else None,
        # only the first stage sees pixels, and the first rank has it in every partition
        decode_images=rank == 0,
    )
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_layers(make_model(loader))
    options = PipelineOptions(
        schedule=args.schedule,
        stages_per_rank=args.stages_per_rank,
        device=device,
        autocast=torch.bfloat16 if args.bf16 else None,
    )
    batches = next(iter(loader), [])
    if not batches:
        raise ConfigError(f"{args.build} has no step of {args.micro_batches_per_step} micro-batches: give fewer")
    profile = measure(model, batches, loader, options)
    question = ask(args, loader, batches, num_ranks)
    measured = choose(model, profile, batches, question, options, args.most_run)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        write_profile(profile, args.out / "profile.json")
        write_evidence(measured, args.out / "evidence.json")
        borders = measured.bmp.best.borders
        recompute = fewest_recomputed(question, profile, borders)
        made = plan_of_profile(question, profile, borders, recompute, own_places(profile, question))
        write_plan(made, args.out / "plan.json")
        print(describe(profile, measured, layer_names(model)))


def measure(
    model: LayeredModel, batches: Sequence[MicroBatch], loader: StreamingLoader, options: PipelineOptions
) -> Profile:
    """The profile of the model's layers, however they are cut meanwhile: for parts of micro-batches, then for all."""
    num_stages = dist.get_world_size() * options.stages_per_rank
    borders = even_partition(np.ones(len(model.layers), np.int64), num_stages)
    everyone = [list(range(dist.get_world_size()))]
    pipeline = Pipeline(model, borders, [False] * len(model.layers), everyone, options)
    few = largest(batches, loader)
    parts = [first_samples(batch, share, loader.image_token_id) for share in SHARES for batch in few] + [*batches]
    return measure_layers(
        pipeline,
        parts,
        batch_loads(parts, loader.model),
        names=layer_names(model),
        kinds=[KINDS[type(layer)][0] for layer in model.layers],
        phases=phases_of(loader.model),
        options=MeasureOptions(repeats=REPEATS, apart=options.schedule == "zero_bubble"),
    )


def largest(batches: Sequence[MicroBatch], loader: StreamingLoader) -> list[MicroBatch]:
    """The micro-batches that have most of anything: parts of them are of all sizes."""
    loads = batch_loads(batches, loader.model)
    phases = (loads.vision, loads.audio, loads.llm)
    places = {int(each.argmax()) for phase in phases for each in (phase.tokens, phase.squares)}
    return [batches[place] for place in sorted(places)]


def first_samples(batch: MicroBatch, share: float, image_token_id: int) -> MicroBatch:
    """The first samples of a micro-batch, with their images."""
    count = round(share * batch.num_samples)
    borders = batch.cu_seqlens[: count + 1]
    ids = batch.input_ids[: int(borders[-1])]
    num_patches = int((ids == image_token_id).sum()) // TOKENS_PER_PATCH
    num_images = int((batch.patches_per_image.cumsum(0) <= num_patches).sum())
    return replace(
        batch,
        sample_ids=batch.sample_ids[:count],
        input_ids=ids,
        labels=batch.labels[: len(ids)],
        position_ids=batch.position_ids[: len(ids)],
        cu_seqlens=borders,
        pixel_values=batch.pixel_values[:num_patches],  # where they are not decoded, there are none
        patches_per_image=batch.patches_per_image[:num_images],
        image_sizes=batch.image_sizes[:num_images],
        images=batch.images[:num_images],
    )


def ask(args: argparse.Namespace, loader: StreamingLoader, batches: Sequence[MicroBatch], num_ranks: int) -> Question:
    """What the plan is wanted for."""
    cluster, loads = load_cluster(args.cluster), batch_loads(batches, loader.model)
    memory = cluster.usable_memory_bytes if args.memory_gib is None else int(args.memory_gib * GIB)
    return Question(
        model=loader.model,
        cluster=cluster,
        parallel=Parallelism(pp=num_ranks),
        training=Training(),
        schedule=args.schedule,
        stages_per_rank=args.stages_per_rank,
        num_micro_batches=len(batches),
        memory_bytes=memory,
        loads=loads,
        full=largest_micro_batch(loads),
    )


def choose(
    model: LayeredModel,
    profile: Profile,
    batches: Sequence[MicroBatch],
    question: Question,
    options: PipelineOptions,
    most_run: int,
) -> Measured:
    """Run the partitions that rank best by the profile."""
    step = TrialStep(
        batches=batches,
        normalizer=batches[0].num_loss_tokens,
        pipelines=[list(range(dist.get_world_size()))],
        options=options,
        recompute=lambda borders: fewest_recomputed(question, profile, borders),
    )
    costs = measured_costs(profile, own_places(profile, question))
    return measure_partitions(model, costs, step, TrialOptions(most_run=most_run))


def own_places(profile: Profile, question: Question) -> np.ndarray:
    """Where the step's micro-batches are among those measured: at the end."""
    return np.arange(len(profile.loads))[-len(question.loads) :]


def fewest_recomputed(question: Question, profile: Profile, borders: np.ndarray) -> np.ndarray:
    """The layers to recompute so that this partition fits into memory, (layers,)."""
    costs = measured_costs(profile, own_places(profile, question))
    return choose_recompute(costs, borders, question.order(len(borders) - 1), question.memory_bytes)


def describe(profile: Profile, measured: Measured, names: Sequence[str]) -> str:
    """What was measured and chosen, for people."""
    found = evidence(measured)
    lines = [f"profile: fits are off by at most {misfit(profile):.0%}", "  predicted   measured  borders"]
    for row in found["candidates"]:
        times = [f"{row[name]:8.1f} ms" if row[name] else "          -" for name in ("predicted_ms", "median_ms")]
        lines.append(f"{times[0]} {times[1]}  {row['borders']}{'  <- chosen' * (row['borders'] == found['chosen'])}")
    lines += [
        f"stage {stage}: {', '.join(names[first:end])}"
        for stage, (first, end) in enumerate(zip(found["chosen"], found["chosen"][1:], strict=False))
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

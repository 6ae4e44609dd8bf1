"""Train LLaVA, InternVL or Qwen2-VL of transformers as a pipeline, out of packed shards.

    packer build --dataset DATA --model llava_1_5 --tokenizer TOKENIZER --out packed
    torchrun --nproc-per-node 2 examples/train_transformers_pipeline.py packed --model llava --steps 20 --state state
    torchrun --nproc-per-node 8 examples/train_transformers_pipeline.py packed --model llava --config llava-1.5-7b-hf \\
        --dp 2 --bf16 --recompute --steps 1000 --state state --export trained

The model is a tiny one with random weights, unless `--config` names a `config.json` (random weights) or a folder of
`save_pretrained` (its weights). `--export` writes such a folder: any program that knows transformers reads it. With
`--state`, a run goes on behind the last step that it saved, with the same or other numbers of ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tiny_transformers import MODELS, make_config
from train_pipeline import join, replicas
from train_tiny import endless

from balance.errors import ConfigError, IsobatchError, first_line
from engine.partition import even_partition
from engine.runtime.models import from_transformers
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.saving import Progress, load_state, save_state
from engine.runtime.weights import Prefixes, gather_state_dict, names_of
from loaders import MicroBatch, StreamingLoader


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line per step; 0 if done, 1 if the run failed, 2 if build, model and ranks do not fit together."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        run = start(args)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        train(run, args)
        if args.export:
            export(run, args.export)
    except IsobatchError as error:  # a rank that has gone, a loss that is no number, a disk that is full
        print(error, file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a vision-language model of transformers as a pipeline")
    parser.add_argument("build", help="output directory of `packer build` with a preset of the model")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--config", type=Path, help="config.json, or a folder with weights (default: a tiny model)")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--borders", help="first layer of each stage and the end, as 0,20,45 (default: cut evenly)")
    parser.add_argument("--micro-batches-per-step", type=int, default=4, help="per replica")
    parser.add_argument("--steps", type=int, default=20, help="in all, those before a resume included")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--recompute", action="store_true", help="recompute all layers, for less memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each rank on the CPU")
    parser.add_argument("--state", type=Path, help="folder to go on from, if it has a state, and to save in")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saves in --state")
    parser.add_argument("--export", type=Path, help="folder for the trained model, as save_pretrained writes it")
    return parser.parse_args(argv)


@dataclass(slots=True, kw_only=True)
class Run:
    """All that one rank trains with."""

    model: Any
    """The whole model; trained are this rank's layers alone."""
    prefixes: Prefixes
    pipeline: Pipeline
    loader: StreamingLoader
    optimizer: torch.optim.Optimizer
    device: torch.device
    num_ranks: int
    """Ranks per pipeline."""
    step: int
    """Steps that are done."""


def start(args: argparse.Namespace) -> Run:
    """Meet the other ranks, and make this one's part. ConfigError or DataError if that cannot be."""
    device = join(args.device)
    if args.dp < 1 or dist.get_world_size() % args.dp:
        raise ConfigError(f"--dp is {args.dp}; {dist.get_world_size()} processes cannot be so many equal pipelines")
    pipelines = replicas(dist.get_world_size(), args.dp, None)
    own = next(place for place, ranks in enumerate(pipelines) if dist.get_rank() in ranks)
    loader = StreamingLoader(
        args.build,
        dp_rank=own,
        dp_world_size=args.dp,
        micro_batches_per_step=args.micro_batches_per_step,
        seed=args.seed,
        device=device if device.type == "cuda" else None,
        # only the first stage sees pixels
        decode_images=pipelines[own][0] == dist.get_rank(),
    )
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_model(args, loader)
    layered = from_transformers(model)
    num_layers, num_ranks = len(layered.layers), len(pipelines[own])
    borders = even_partition(np.ones(num_layers, np.int64), num_ranks)
    if args.borders:
        borders = np.array([int(border) for border in args.borders.split(",")])
    prefixes = names_of(model, layered.layers)
    options = PipelineOptions(device=device, autocast=torch.bfloat16 if args.bf16 else None)
    pipeline = Pipeline(layered, borders, [args.recompute] * num_layers, pipelines, options)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=args.lr)
    done = load_state(args.state, pipeline.layers, optimizer) if args.state else None
    if done:
        loader.load_state_dict(done.loader)
        pipeline.steps_run = done.step
    if dist.get_rank() == 0:
        behind = f"; goes on behind step {done.step - 1}" if done else ""
        print(f"{num_layers} layers cut at {borders.tolist()}, {args.dp} x {num_ranks} ranks{behind}", flush=True)
    return Run(
        model=model,
        prefixes=prefixes,
        pipeline=pipeline,
        loader=loader,
        optimizer=optimizer,
        device=device,
        num_ranks=num_ranks,
        step=done.step if done else 0,
    )


def make_model(args: argparse.Namespace, loader: StreamingLoader) -> Any:
    """The model, on the CPU. ConfigError if it cannot be read, or is not of the build."""
    auto, given = transformers.AutoModelForImageTextToText, args.config
    try:
        if given is None:
            model = auto.from_config(make_config(args.model, loader))
        elif given.is_dir():
            model = auto.from_pretrained(given, dtype=torch.float32, local_files_only=True)
        else:
            model = auto.from_config(transformers.AutoConfig.from_pretrained(given, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given or args.model}: {first_line(error)}") from error
    config, num_tokens = model.config, model.get_input_embeddings().num_embeddings
    if config.model_type != args.model:
        raise ConfigError(f"{given} is a model of type {config.model_type}, not {args.model}")
    if config.image_token_id != loader.image_token_id or num_tokens < loader.vocab_size:
        raise ConfigError(
            f"{given} has {num_tokens} tokens, image token {config.image_token_id}; the build {loader.vocab_size}, "
            f"image token {loader.image_token_id}: build with the model's own tokenizer"
        )
    return model.train()


def train(run: Run, args: argparse.Namespace) -> None:
    """Train until `--steps` are done."""
    begun = time.perf_counter()
    for _, batches in zip(range(args.steps - run.step), endless(run.loader), strict=False):
        loss = train_step(run, batches, args.clip)
        run.step += 1
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begun
            print(f"step {run.step - 1:4d}  loss {loss:.6f}  {1000 * seconds:6.0f} ms", flush=True)
        if args.state and (run.step % args.save_every == 0 or run.step == args.steps):
            progress = Progress(step=run.step, loader=run.loader.state_dict())
            save_state(args.state, run.pipeline.layers, run.optimizer, progress)
        begun = time.perf_counter()


def train_step(run: Run, batches: list[MicroBatch], clip: float) -> float:
    """One optimizer step; -> the mean loss per label, over all replicas."""
    run.optimizer.zero_grad()
    result = run.pipeline.step(batches, batches[0].num_loss_tokens)
    run.pipeline.reduce_gradients()  # over replicas, once per step
    run.pipeline.clip_gradients(clip)
    run.optimizer.step()
    loss = torch.tensor(result.loss, dtype=torch.float64, device=run.device)
    dist.all_reduce(loss)  # all ranks of a pipeline have its replica's
    return float(loss) / run.num_ranks


def export(run: Run, folder: Path) -> None:
    """Write the model for transformers; replicas are alike, so the first one's ranks are enough."""
    state = gather_state_dict(run.model, run.pipeline.layers, run.prefixes)
    if state is not None:
        run.model.save_pretrained(folder, state_dict=state)
        print(f"wrote {folder}")


if __name__ == "__main__":
    sys.exit(main())

"""Settings of plans, given to a trainer's own parser: TRAINER FILE, in that trainer's environment.

Run by tests/engine/planning/trainers/test_settings.py.
"""

import itertools
import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import torch

PP = 4
"""Ranks of every case."""


def words_of(text):
    """The words of a bash array."""
    inside = text[text.index("(\n") + 2 : text.rindex(")")]
    return shlex.split(inside)


def check_megatron(case):
    """Its layout gives each stage the planned layers; its config takes the other fields."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    words = words_of(case["text"])
    values = dict(itertools.pairwise(words))
    text, count = values["--pipeline-model-parallel-layout"], sum(case["counts"])
    layout = PipelineParallelLayerLayout.from_str(text, PP)
    layout.validate_layer_layout(num_layers=count, mtp_num_layers=0)
    stages = [
        layout.layout[rank][chunk]
        for chunk in range(len(case["counts"]) // PP)
        for rank in range(PP)
    ]
    assert [stage.count(LayerType.decoder) for stage in stages] == case["counts"]
    recompute = {
        f"recompute_{name}": values[f"--recompute-{name.replace('_', '-')}"]
        for name in ("granularity", "method", "num_layers")
        if f"--recompute-{name.replace('_', '-')}" in values
    }
    if "recompute_num_layers" in recompute:
        recompute["recompute_num_layers"] = int(recompute["recompute_num_layers"])
    chunks = len(case["counts"]) // PP
    config = TransformerConfig(
        num_layers=count,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=PP,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_layout=text,
        **recompute,
    )
    number = config.recompute_num_layers or 0
    chosen = Counter(case["recomputed"])
    assert chosen["llm_layer"] == sum(min(number, one) for one in case["counts"])
    assert bool(chosen["vision_layer"]) == ("--recompute-vision" in words)


def check_torchtitan(case):
    """Its command line gives these fields, and its model is cut into these stages."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.activation_checkpoint import FullAC

    words = words_of(case["text"])
    call = ["--module", "qwen3_5", "--config", "qwen35_debugmodel", *words]
    config = ConfigManager().parse_args(call)
    parallelism = config.parallelism
    stages = parallelism.module_fqns_per_model_part
    counts = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    assert counts == case["counts"]
    assert stages[0][:2] == ["vision_encoder", "tok_embeddings"]
    assert stages[-1][-2:] == ["norm", "lm_head"]
    assert parallelism.pipeline_parallel_degree == PP
    assert config.training.local_batch_size == case["num_micro_batches"]
    assert isinstance(config.activation_checkpoint, FullAC.Config) == bool(case["recomputed"])
    check_order(get_schedule_class(parallelism.pipeline_parallel_schedule), case)


def check_automodel(case):
    """Its recipe's parser makes its dataclasses of the section."""
    import yaml
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch.distributed.pipelining.schedules import get_schedule_class

    parsed = parse_distributed_section(yaml.safe_load(case["text"])["distributed"])
    pipeline, strategy = parsed["pipeline_config"], parsed["strategy_config"]
    stages = pipeline.module_fqns_per_model_part
    counts = [sum(".layers." in name for name in stage) for stage in stages]
    assert counts == case["counts"]
    assert parsed["pp_size"] == PP
    chosen = Counter(case["recomputed"])
    scopes = set()
    if parsed["activation_checkpointing"]:
        scopes = set(strategy.activation_checkpointing_scope)
    assert bool(chosen["vision_layer"]) == bool(scopes & {"all", "vision"})
    assert bool(chosen["llm_layer"]) == bool(scopes & {"all", "language"})
    check_order(get_schedule_class(pipeline.pp_schedule), case)


def check_order(kind, case):
    """Torch's schedule of this name runs each rank's passes in the order that was simulated.

    Its list for 1F1B counts the last rank's forward passes from 1, so numbers are not compared.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from isobatch.engine.simulator.schedule import PassKind, make_schedule

    count, chunks = case["num_micro_batches"], len(case["counts"]) // PP
    ours = make_schedule(case["schedule"], PP, count, chunks)
    names = {PassKind.FORWARD: "FORWARD", PassKind.BACKWARD: "FULL_BACKWARD"}
    for rank, row in enumerate(get_schedule_ops(kind, PP, count, chunks)):
        passes = [
            (one.computation_type.name, one.stage_index, one.microbatch_index)
            for one in row
            if one is not None and one.computation_type.name in names.values()
        ]
        planned = [(names[one.kind], one.stage, one.micro_batch) for one in ours.of_rank(rank)]
        width = 2 if case["schedule"] == "1f1b" else 3
        assert [one[:width] for one in passes] == [one[:width] for one in planned], rank


CHECKS = {
    "megatron": check_megatron,
    "torchtitan": check_torchtitan,
    "automodel": check_automodel,
}

if __name__ == "__main__":
    trainer, path = sys.argv[1:]
    if trainer == "torchtitan" and torch.version.cuda is None:
        for name in ("nms", "qnms"):  # operators of torchvision, which is built for CUDA
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    cases = json.loads(Path(path).read_text("utf-8"))
    for one in cases:
        CHECKS[trainer](one)
    print(f"{len(cases)} accepted")

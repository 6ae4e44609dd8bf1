"""Settings of other trainers: beside their fields as pinned, and by their own parsers."""

import json
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import yaml

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.planning import planner
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.trainers.expressible import TORCH_SCHEDULES, TRAINERS
from isobatch.engine.planning.trainers.plan_for import plan_for
from isobatch.engine.planning.trainers.settings import llm_layers, settings_text
from isobatch.models.presets import load_model
from support import TESTS, child_env
from support.costs.plan_questions import plan_request
from support.frameworks.environments import python_of

CHECKS = TESTS / "support" / "frameworks" / "checks" / "plan_settings.py"
MODELS = {"megatron": "internvl_1_5", "torchtitan": "qwen3_5", "automodel": "qwen3_5"}
MEGATRON = {
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--pipeline-model-parallel-layout",
    "--micro-batch-size",
    "--global-batch-size",
    "--sequence-parallel",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-vision",
}
"""Of megatron/training/arguments.py and examples/multimodal/multimodal_args.py."""


def request_for(model, **changes):
    """Two replicas of four ranks with eight equal micro-batches."""
    images = {"images": 9, "vit_tokens_per_image": 1025, "seq_len": 4_096}
    parallel = changes.pop("parallel", Parallelism(tp=4, pp=4, dp=2))
    loads = Loads.constant(8 * parallel.dp, **images)
    asked = plan_request(parallel=parallel, loads=loads, **changes)
    return replace(asked, model=load_model(model))


def planned_for(trainer, *, best_schedule=False, **changes):
    asked = request_for(MODELS[trainer], **changes)
    return plan_for(trainer, asked, planner.plan(asked), best_schedule=best_schedule)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_plan_is_what_is_simulated_and_no_faster_than_the_free_one(trainer):
    planned = planned_for(trainer)
    plan, best, free = planned.result.plan, planned.result.best, planned.result.free
    assert best.borders.tolist() == list(plan.borders)
    assert max(plan.predicted.full_peak_bytes) <= plan.memory_bytes
    assert free.step_ns <= best.step_ns
    first = plan.layer_names[: plan.borders[1]]
    assert "token_embedding" in first
    assert sum(llm_layers(plan)) == load_model(MODELS[trainer]).llm.num_layers


@pytest.mark.parametrize("memory_gib", [30, 48, 72])
def test_megatrons_flags_say_what_the_plan_has(memory_gib):
    planned = planned_for("megatron", memory_bytes=memory_gib << 30)
    plan, text = planned.result.plan, settings_text(planned)
    flags = dict(re.findall(r"^  (--[\w-]+) ?(.*)$", text, re.MULTILINE))
    assert set(flags) <= MEGATRON
    stages = flags["--pipeline-model-parallel-layout"].strip("'").split("|")
    counts = [int((re.findall(r"t\*(\d+)", stage) or [stage.count("t")])[0]) for stage in stages]
    assert counts == llm_layers(plan)
    assert stages[0][0] + stages[-1][-1] == "EL"
    assert flags["--global-batch-size"] == "16"
    kinds = [name.partition(" ")[0] for name in plan.layer_names]
    chosen = [kinds[layer] for layer in plan.recompute]
    assert ("--recompute-vision" in flags) == ("vision_layer" in chosen)
    number = int(flags.get("--recompute-num-layers", 0))
    assert chosen.count("llm_layer") == sum(min(number, count) for count in counts)
    assert chosen.count("vision_layer") in (0, 45)


def test_interleaved_stages_are_in_the_order_of_the_layout():
    planned = planned_for("megatron", schedule="interleaved", stages_per_rank=2)
    (layout,) = re.findall(r"layout '(.*)'", settings_text(planned))
    assert layout.count("|") + 1 == 8 == len(planned.result.plan.borders) - 1


def test_any_schedule_of_the_trainer_is_tried():
    planned = planned_for("torchtitan", best_schedule=True)
    assert planned.result.plan.schedule in TORCH_SCHEDULES
    asked = request_for("qwen3_5", parallel=Parallelism(tp=4, pp=3, dp=2))
    uneven = plan_for("torchtitan", asked, planner.plan(asked), best_schedule=True)
    assert uneven.result.plan.schedule == "1f1b"  # 8 micro-batches, rounds of 3
    assert planned.result.best.step_ns <= planned_for("torchtitan").result.best.step_ns


def test_automodels_section_names_each_module_once():
    planned = planned_for("automodel")
    section = yaml.safe_load(settings_text(planned))["distributed"]
    stages = section["pipeline"]["module_fqns_per_model_part"]
    layers = [name for stage in stages for name in stage if ".layers." in name]
    assert layers == [f"model.language_model.layers.{number}" for number in range(32)]
    assert stages[0][:2] == ["model.visual", "model.language_model.embed_tokens"]
    assert stages[-1][-3:-1] == ["model.language_model.norm", "lm_head"]


def test_what_cannot_be_expressed_is_an_error_of_one_line():
    asked = request_for("internvl_1_5")
    free = planner.plan(asked)
    for trainer in ("torchtitan", "automodel"):
        with pytest.raises(ConfigError, match="has no pipeline for internvl_1_5; it has"):
            plan_for(trainer, asked, free)
    with pytest.raises(ConfigError, match="planned for with 1f1b, interleaved, not zero_bubble"):
        plan_for("megatron", asked.changed(schedule="zero_bubble"), free)
    uneven = asked.changed(schedule="interleaved", stages_per_rank=2, num_micro_batches=6)
    with pytest.raises(ConfigError, match="interleaves rounds of 4 micro-batches; 6 are"):
        plan_for("megatron", uneven, free)
    with pytest.raises(InfeasiblePlan, match=r"nothing that Megatron-LM .* fits into 9\.0 GiB"):
        plan_for("megatron", asked.changed(memory_bytes=9 << 30), free)


@pytest.mark.other_trainers
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("trainer", "environment"),
    [
        ("megatron", "megatron_core"),
        ("torchtitan", "torchtitan"),
        ("automodel", "nemo_automodel"),
    ],
)
def test_the_trainers_own_parser_takes_them(trainer, environment, pytestconfig, tmp_path):
    variants = ({}, {"schedule": "interleaved", "stages_per_rank": 2}, {"memory_bytes": 40 << 30})
    cases = []
    for variant in variants:
        planned = planned_for(trainer, **variant)
        plan = planned.result.plan
        kinds = np.array([name.partition(" ")[0] for name in plan.layer_names])
        case = {"text": settings_text(planned), "counts": llm_layers(plan)}
        case |= {"schedule": plan.schedule, "recomputed": kinds[list(plan.recompute)].tolist()}
        cases.append(case | {"num_micro_batches": plan.num_micro_batches})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    python = python_of(environment, pytestconfig.cache.mkdir("frameworks"))
    command = [python, CHECKS, trainer, tmp_path / "cases.json"]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("3 accepted\n")

"""The settings with which a trainer follows a plan, as text. Pure.

Fields were read in the versions that `expressible` names. Tests give the text to the trainer's own
parser: megatron-core's layout, TorchTitan's `ConfigManager`, Automodel's `distributed` section.
"""

import json
import shlex
from collections.abc import Sequence

from isobatch.engine.planning.plan import Plan
from isobatch.engine.planning.trainers.expressible import TORCH_SCHEDULES, TRAINERS
from isobatch.engine.planning.trainers.plan_for import LLM_LAYER, TrainerPlan

FILES = {
    "megatron": "megatron.sh",
    "torchtitan": "torchtitan.sh",
    "automodel": "automodel.yaml",
}
"""Names of the files that the settings are written to."""
_TITAN_NAMES = ("tok_embeddings", "layers.{}", "norm", "lm_head")
_AUTOMODEL_NAMES = (
    "model.language_model.embed_tokens",
    "model.language_model.layers.{}",
    "model.language_model.norm",
    "lm_head",
)


def settings_text(planned: TrainerPlan) -> str:
    """What the trainer's command or recipe is given."""
    texts = {
        "megatron": _megatron_text,
        "torchtitan": _titan_text,
        "automodel": _automodel_text,
    }
    return f"# {TRAINERS[planned.trainer].title}\n{texts[planned.trainer](planned)}"


def llm_layers(plan: Plan) -> list[int]:
    """Number of LLM layers of each stage."""
    is_layer = [name.partition(" ")[0] == LLM_LAYER for name in plan.layer_names]
    pairs = zip(plan.borders[:-1], plan.borders[1:], strict=True)
    return [sum(is_layer[first:end]) for first, end in pairs]


def layout_text(counts: Sequence[int]) -> str:
    """Megatron's `--pipeline-model-parallel-layout`: embedding, layers, loss.

    >>> layout_text([0, 12, 1])
    'E|t*12|tL'
    """
    stages = ["t" * count if count < 2 else f"t*{count}" for count in counts]
    return f"E{'|'.join(stages)}L"


def module_names(
    counts: Sequence[int], encoder: Sequence[str], names: Sequence[str], *, everywhere: str = ""
) -> list[list[str]]:
    """Names of each stage's modules; `names`: of embedding, layer, last norm, head.

    >>> module_names([1, 2], ["encoder"], ["embedding", "layers.{}", "norm", "head"])
    [['encoder', 'embedding', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'head']]
    """
    embedding, layer, *last = names
    stages: list[list[str]] = []
    first = 0
    for count in counts:
        stages.append([layer.format(number) for number in range(first, first + count)])
        first += count
    stages[0] = [*encoder, embedding, *stages[0]]
    stages[-1] += last
    return [[*stage, everywhere] if everywhere else stage for stage in stages]


def _megatron_text(planned: TrainerPlan) -> str:
    plan, rule = planned.result.plan, planned.rule
    parallel = plan.parallel
    values: list[object] = ["--tensor-model-parallel-size", parallel.tp]
    values += ["--pipeline-model-parallel-size", parallel.pp]
    values += ["--pipeline-model-parallel-layout", layout_text(llm_layers(plan))]
    values += ["--micro-batch-size", 1]
    values += ["--global-batch-size", parallel.dp * plan.num_micro_batches]
    if parallel.tp > 1 and parallel.sequence_parallel:
        values += ["--sequence-parallel"]
    if rule.encoder or rule.num_layers:
        values += ["--recompute-granularity", "full", "--recompute-method", "block"]
        values += ["--recompute-num-layers", rule.num_layers]
        values += ["--recompute-vision"] * rule.encoder
    return (
        "# encoder and projector lie in the first stage (add_encoder): give their configs no\n"
        "# pipeline_model_parallel_layout. In Megatron-Bridge the same names, with _, are fields\n"
        "# of the model's provider; --recompute-vision is of Megatron-LM's examples/multimodal\n"
        + _shell_text("MEGATRON_ARGS", values)
    )


def _titan_text(planned: TrainerPlan) -> str:
    plan, knows = planned.result.plan, TRAINERS["torchtitan"]
    modules = module_names(llm_layers(plan), knows.modules_of(plan.model), _TITAN_NAMES)
    values: list[object] = ["--parallelism.tensor_parallel_degree", plan.parallel.tp]
    values += ["--parallelism.pipeline_parallel_degree", plan.parallel.pp]
    values += ["--parallelism.pipeline_parallel_schedule", TORCH_SCHEDULES[plan.schedule]]
    values += ["--parallelism.pipeline_parallel_microbatch_size", 1]
    values += ["--training.local_batch_size", plan.num_micro_batches]
    values += ["--training.disable_cuda_graphs"]  # its config refuses them with stages
    values += ["--parallelism.module_fqns_per_model_part", *map(",".join, modules)]
    values += [f"activation-checkpoint:{'full' if planned.rule.encoder else 'none'}"]
    return "# after all other options: the last word is a subcommand\n" + _shell_text(
        "TORCHTITAN_ARGS", values
    )


def _automodel_text(planned: TrainerPlan) -> str:
    plan, rule, knows = planned.result.plan, planned.rule, TRAINERS["automodel"]
    scopes = {(True, True): "all", (True, False): "vision", (False, True): "language"}
    scope = scopes.get((rule.encoder, rule.num_layers > 0))
    rotary = "model.language_model.rotary_emb"
    modules = module_names(
        llm_layers(plan), knows.modules_of(plan.model), _AUTOMODEL_NAMES, everywhere=rotary
    )
    lines = [
        "step_scheduler:",
        f"  local_batch_size: {plan.num_micro_batches}",
        f"  global_batch_size: {plan.parallel.dp * plan.num_micro_batches}",
        "distributed:",
        "  strategy: fsdp2",
        f"  tp_size: {plan.parallel.tp}",
        f"  pp_size: {plan.parallel.pp}",
        f"  dp_size: {plan.parallel.dp}",
        f"  sequence_parallel: {json.dumps(plan.parallel.sequence_parallel)}",
        f"  activation_checkpointing: {json.dumps(scope is not None)}",
        *([f"  activation_checkpointing_scope: {scope}"] if scope else []),
        "  pipeline:",
        f"    pp_schedule: {TORCH_SCHEDULES[plan.schedule].lower()}",
        "    pp_microbatch_size: 1",
        "    module_fqns_per_model_part:",
        *(f"      - {json.dumps(stage)}" for stage in modules),
    ]
    return "\n".join(lines) + "\n"


def _shell_text(name: str, values: Sequence[object]) -> str:
    """An array of bash, a line per option: `source FILE`, then `"${NAME[@]}"`."""
    words = [shlex.quote(str(value)) for value in values]
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or ":" in word or not lines:
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join([f"{name}=(", *lines, ")", ""])

"""What other trainers can express, read in their packages. Data and pure checks.

- Megatron-LM by megatron-core 0.16.1 (`transformer/pipeline_parallel_layer_layout.py`,
  `transformer_block.py`): any LLM layers per stage; the first n of each stage recomputed, or none;
  the encoder in the first stage, recomputed as a whole or not at all (`--recompute-vision`,
  `examples/multimodal/multimodal_args.py` of NVIDIA/Megatron-LM, commit 00caa53a; layout flags:
  its `megatron/training/arguments.py`). Megatron-Bridge 0.3.1 has the same fields.
- TorchTitan 0.3.0 (`distributed/pipeline_parallel.py`, `activation_checkpoint.py`): any modules per
  stage, the encoder in the first (`pipeline_vlm`); all layers recomputed, or none.
- NeMo Automodel 0.7.0 (`components/distributed/pipelining`, `distributed/config.py`): modules as
  TorchTitan's; recomputed are the LLM's layers, the encoder's, both or none.

Zero bubble is not in Megatron's main line. Torch's own zero-bubble schedules and GPipe have another
order than those simulated here, so trainers that run them are planned for without them. All
interleave in rounds of as many micro-batches as ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from isobatch.common.errors import ConfigError
from isobatch.models.presets import ModelPreset

Trainer = Literal["megatron", "torchtitan", "automodel"]
TORCH_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""Torch's names of the schedules that all trainers run as they are simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressible:
    """What a trainer can express."""

    title: str
    """Name and version."""
    encoders: dict[str, tuple[str, ...]]
    """Names of the encoder's modules, by the beginning of a model's name."""
    models: str
    """Models whose pipeline it builds, for people."""
    numbers: Callable[[int], dict[bool, Sequence[int]]]
    """LLM layers -> what can be recomputed: `rules` of `search_restricted`."""

    def check(self, schedule: str, num_ranks: int, num_micro_batches: int) -> None:
        """ConfigError if the trainer does not run a schedule."""
        if schedule not in TORCH_SCHEDULES:
            names = ", ".join(TORCH_SCHEDULES)
            raise ConfigError(f"{self.title} is planned for with {names}, not {schedule}")
        if schedule == "interleaved" and num_micro_batches % num_ranks:
            raise ConfigError(
                f"{self.title} interleaves rounds of {num_ranks} micro-batches; {num_micro_batches}"
                f" are no multiple: give --micro-batches one of {num_ranks}"
            )

    def modules_of(self, model: ModelPreset) -> tuple[str, ...]:
        """Names of the encoder's modules. ConfigError for a model that it cannot express."""
        for name, modules in self.encoders.items():
            if model.name.startswith(name) and model.audio_encoder is None:
                return modules
        raise ConfigError(
            f"{self.title} has no pipeline for {model.name}; it has one for {self.models}"
        )


_VISUAL = ("model.visual",)
TRAINERS: dict[Trainer, Expressible] = {
    "megatron": Expressible(
        title="Megatron-LM (megatron-core 0.16.1)",
        encoders={"": ()},
        models="models without an audio encoder",
        numbers=lambda count: dict.fromkeys((False, True), range(count + 1)),
    ),
    "torchtitan": Expressible(
        title="TorchTitan 0.3.0",
        encoders={"qwen3_5": ("vision_encoder",)},
        models="Qwen3.5, of our presets",
        numbers=lambda count: {False: (0,), True: (count,)},
    ),
    # classes with `_pp_keep_self_forward`, and those with a forward function for stages
    "automodel": Expressible(
        title="NeMo Automodel 0.7.0",
        encoders={
            **dict.fromkeys(("qwen3_5", "qwen3_vl_moe", "qwen3_vl_30b", "qwen3_vl_235b"), _VISUAL),
            "mistral3": ("model.vision_tower", "model.multi_modal_projector"),
        },
        models="Qwen3.5, Qwen3-VL with experts and Mistral 3, of our presets",
        numbers=lambda count: dict.fromkeys((False, True), (0, count)),
    ),
}

"""The model that a build is trained with: `open_model` -> `PipelineModel`.

Opens the demo model `tiny`, and those of transformers that `from_transformers` takes. A model of
your own needs a `LayerStack`, and a preset whose `engine.cost_model.layer_list.layers_of` are its
layers.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.analytical import layer_names
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.operations import Layer
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.runtime.models.preset_from_model import preset_from_model
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.models.weights import gather_shards, names_of, state_dict_of
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.runtime.stage_io import LayerStack
from isobatch.engine.train.models._transformers_files import TINY_KINDS, read_model, write_model
from isobatch.engine.train.models.model_weights import LazyWeights
from isobatch.engine.train.models.tiny_vlm import make_tiny_vlm
from isobatch.engine.train.step_source import StepSource
from isobatch.models.image_rules import VisionRule
from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.image_rules.native import NativeRule
from isobatch.models.image_rules.tiles import TilesRule
from isobatch.models.presets import ModelPreset, load_model

TINY = "tiny"
RULES: dict[str, type[VisionRule]] = {
    "llava": FixedRule,
    "internvl": TilesRule,
    "qwen2_vl": NativeRule,
    "llava_next": AnyresRule,
    "llava_onevision": AnyresRule,
    "qwen2_5_vl": NativeRule,
    "qwen3_vl": NativeRule,
    "gemma3": FixedRule,
}
"""Image rule of a build for each model of transformers."""
MODELS = (TINY, *RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """A model as the trainer takes it."""

    stack: LayerStack
    preset: ModelPreset
    """Sizes of the model, and the build's image rule."""
    whole: Any = None
    """Model of transformers; layers that this rank does not run stay on the meta device."""
    weights: LazyWeights | None = None
    """Weights of `whole`."""

    @property
    def listed(self) -> tuple[Layer, ...]:
        """The layers as planning lists them."""
        return layers_of(self.preset, Parallelism())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers in plans and profiles."""
        return layer_names(self.listed)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether any parameter of each layer is trained."""
        return tuple(
            any(weight.requires_grad for weight in layer.parameters())
            for layer in self.stack.layers
        )

    @property
    def param_counts(self) -> list[int]:
        """Parameters of each layer as a profile counts them: shared ones in each."""
        return [sum(weight.numel() for weight in layer.parameters()) for layer in self.stack.layers]

    def freeze(self, parts: Sequence[str]) -> None:
        """Stop training these parts."""
        for layer, listed in zip(self.stack.layers, self.listed, strict=True):
            if listed.part in parts:
                layer.requires_grad_(False)

    def shards(self, pipeline: Pipeline, *, only: str = "") -> Iterator[dict[str, Tensor]]:
        """The trained parameters as `gather_shards` gives them; all ranks take all shards."""
        assert self.weights is not None  # a model of transformers
        pipeline.gather_weights()
        local = state_dict_of(pipeline.layers, names_of(self.whole, self.stack.layers))
        return gather_shards(self.whole, local, self.weights.value, only=only)

    def export(self, pipeline: Pipeline, folder: Path) -> bool:
        """Write it for transformers; -> whether this rank wrote. All ranks call it. DataError."""
        shards = self.shards(pipeline)
        if dist.get_rank() > 0:
            deque(shards, maxlen=0)
            return False
        write_model(self.whole, folder, shards)
        return True


def open_model(name: str | None, config: Path | None, source: StepSource) -> PipelineModel:
    """The model for a build. ConfigError if they do not fit, or the folder lacks weights.

    A model of transformers is on the meta device: a `Pipeline` loads the layers of its rank. Random
    weights follow from torch's seed, which must be equal on all ranks.

    `name`: one of `MODELS`; None: that of `config`, or the one for the build's preset.
    `config`: a `config.json` of transformers (random weights) or a folder with weights; None for a
    tiny model.
    """
    preset = source.model
    if source.audio_token_id is not None:
        raise ConfigError(
            f"the build is for {preset.name}, which has an audio encoder; none of"
            f" {', '.join(MODELS)} has one: build with a preset without [audio], or use"
            " `engine.exchange_features` in a loop of your own (docs/train.md)"
        )
    name = _model_name(name, config, preset)
    if name == TINY:
        if config is not None:
            raise ConfigError(
                f"--config {config}: the model tiny has none; give --model {', '.join(RULES)}"
            )
        stack = make_tiny_vlm(preset, source.vocab_size, source.image_token_id)
        tiny = load_model(TINY)
        assert tiny.llm is not None  # a preset of ours
        llm = replace(tiny.llm, vocab_size=source.vocab_size)
        return PipelineModel(stack=stack, preset=replace(preset, vit=tiny.vit, llm=llm))
    whole, weights = read_model(name, config, source)
    stack = from_transformers(whole)
    layers = stack.layers
    stack = replace(stack, load=lambda index: weights.fill(layers[index].parameters()))
    preset = preset_from_model(whole, stack, preset)
    return PipelineModel(stack=stack, preset=preset, whole=whole, weights=weights)


def kinds_text(names: Sequence[str]) -> str:
    """Layers by kind, for people: '1 patch_embedding, 2 vision_layer'."""
    kinds = Counter(name.split()[0] for name in names)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _model_name(option: str | None, config: Path | None, preset: ModelPreset) -> str:
    """The model of the option, else the config's or the build's.

    ConfigError if images do not fit (tiny checks its own).
    """
    fitting = [name for name, rule in RULES.items() if isinstance(preset.vision, rule)]
    kind = _type_in(config)
    default = (
        kind if kind in fitting else next((tiny for tiny in TINY_KINDS if tiny in fitting), "")
    )
    name = option or (TINY if preset.name == TINY else default)
    if not name or (name != TINY and not isinstance(preset.vision, RULES[name])):
        raise ConfigError(
            f"the build is for {preset.name}, whose images are not cut for"
            f" {option or ', '.join(MODELS)}: build with a preset of the model to train"
        )
    return name


def _type_in(config: Path | None) -> str | None:
    """`model_type` of a `config.json` or a folder, if that is a model known here."""
    if config is None:
        return None
    try:
        text = (config / "config.json" if config.is_dir() else config).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError):
        return None  # reading the model says why
    return content.get("model_type") if isinstance(content, dict) else None

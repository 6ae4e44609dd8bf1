"""The models that the pipeline examples train: the tiny one, and LLaVA, InternVL and Qwen2-VL of
transformers.

`PipelineModel` is all that the examples know of a model. One of your own needs a `LayerStack` and a
preset with its sizes, whose `engine.cost_model.layer_list.layers_of` are its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiny_vlm_layers import make_layers
from train_tiny import make_model

from balance.errors import ConfigError
from balance.presets import FixedRule, ModelPreset, NativeRule, TilesRule, load_model
from engine.cost_model.analytical import layer_names
from engine.cost_model.layer_list import layers_of
from engine.cost_model.operations import Layer
from engine.cost_model.parallel import Parallelism
from engine.runtime.models.preset_from_model import preset_from_model
from engine.runtime.models.transformers_models import from_transformers
from engine.runtime.models.weights import gather_state_dict, names_of
from engine.runtime.pipeline import Pipeline
from engine.runtime.stage_io import LayerStack
from loaders import StreamingLoader

TINY = "tiny"
RULES = {"llava": FixedRule, "internvl": TilesRule, "qwen2_vl": NativeRule}
"""How each model of transformers has its images cut."""
MODELS = (TINY, *RULES)
PARTS = ("vision", "projector", "llm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """A model as the pipeline examples take it."""

    layered: LayerStack
    preset: ModelPreset
    """Its own sizes, and how the build cuts images."""
    whole: Any = None
    """Of transformers, to be exported; trained are a rank's own layers alone."""

    @property
    def listed(self) -> tuple[Layer, ...]:
        """The layers as planning lists them."""
        return layers_of(self.preset, Parallelism())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers, as plans and profiles have them."""
        return layer_names(self.listed)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether anything of each layer is."""
        return tuple(
            any(weight.requires_grad for weight in layer.parameters())
            for layer in self.layered.layers
        )

    @property
    def param_counts(self) -> list[int]:
        """Parameters of each layer, as a profile counts them: those that layers share, in each."""
        return [
            sum(weight.numel() for weight in layer.parameters()) for layer in self.layered.layers
        ]

    def freeze(self, parts: Sequence[str]) -> None:
        """Train these parts no more."""
        for layer, listed in zip(self.layered.layers, self.listed, strict=True):
            if listed.part in parts:
                layer.requires_grad_(False)

    def export(self, pipeline: Pipeline, folder: Path) -> bool:
        """Write it for transformers; all ranks call it. Replicas are alike, so the first one's
        weights are enough.

        DataError if it cannot be written.
        """
        state = gather_state_dict(
            self.whole, pipeline.layers, names_of(self.whole, self.layered.layers)
        )
        if state is not None:
            import tiny_transformers  # noqa: PLC0415  (transformers takes seconds to import)

            tiny_transformers.write_model(self.whole, folder, state)
        return state is not None


def open_model(name: str | None, config: Path | None, loader: StreamingLoader) -> PipelineModel:
    """The model for a build, on the CPU; by the build's own preset if `name` is None. ConfigError
    if they do not fit.

    `config`: of transformers, a `config.json` (random weights) or a folder with weights; None for a
    tiny model.
    """
    preset = loader.model
    if loader.audio_token_id is not None:
        raise ConfigError(
            f"the build is for {preset.name}, which hears, and none of {', '.join(MODELS)} does: build with a preset "
            "without [audio], or train with examples/train_three_modalities.py"
        )
    name = model_of(name, preset)
    if name == TINY:
        if config is not None:
            raise ConfigError(
                f"--config {config}: the model tiny has none; give --model {', '.join(RULES)}"
            )
        tiny = load_model(TINY)
        sizes = {"vit": tiny.vit, "llm": replace(tiny.llm, vocab_size=loader.vocab_size)}
        return PipelineModel(
            layered=make_layers(make_model(loader)), preset=replace(preset, **sizes)
        )
    whole = read_model(name, config, loader)
    layered = from_transformers(whole)
    return PipelineModel(layered=layered, preset=preset_from_model(whole, layered, preset), whole=whole)


def model_of(given: str | None, preset: ModelPreset) -> str:
    """The model that is given, else the one that a build is for. ConfigError if the build's images
    are not cut for it.

    Whether a build is for the tiny model, that model says.
    """
    fitting = (name for name, rule in RULES.items() if isinstance(preset.vision, rule))
    name = given or (TINY if preset.name == TINY else next(fitting, ""))
    if not name or (name != TINY and not isinstance(preset.vision, RULES[name])):
        raise ConfigError(
            f"the build is for {preset.name}, whose images are not cut for {given or ', '.join(MODELS)}: build with a "
            "preset of the model that shall train"
        )
    return name


def read_model(name: str, config: Path | None, loader: StreamingLoader) -> Any:
    """A model of transformers that fits a build; ConfigError if transformers is not there."""
    try:
        import tiny_transformers  # noqa: PLC0415  (transformers takes seconds to import, and not all models need it)
    except ImportError as error:
        raise ConfigError(
            f"--model {name} needs transformers ({error}): pip install 'isobatch[hf]'"
        ) from error
    return tiny_transformers.read_model(name, config, loader)


def kinds_text(names: Sequence[str]) -> str:
    """Layers by their kinds, for people: '1 patch_embedding, 2 vision_layer'."""
    return ", ".join(
        f"{count} {kind}" for kind, count in Counter(name.split()[0] for name in names).items()
    )

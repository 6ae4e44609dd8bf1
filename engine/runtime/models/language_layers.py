"""Language half of a model as layers: embedding, decoder layers, head.

The layers hold the model's own modules. `hidden` crosses cuts, and deep features of images until
their decoder layer adds them (Qwen3-VL). The first decoder layer of a stage computes rotary
embeddings, sample borders and places of images from the micro-batch, for the next ones too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.models._sample_attention import packed_attention
from isobatch.engine.runtime.models.layer_specs import (
    FEATURES,
    HIDDEN,
    OutputSpecs,
    SpecLayer,
    add_specs,
    deep_name,
    deep_tensors,
    hidden_specs,
)
from isobatch.engine.runtime.stage_io import (
    LOSS,
    Batch,
    StageTensors,
    TensorSpec,
    host_of,
    samples_text,
    to_device,
)
from isobatch.tensors.rotary_positions import image_runs
from isobatch.tensors.token_loss import labelled_loss

_COS, _SIN, _BORDERS, _IMAGES = "cos", "sin", "borders", "images_of_tokens"
_SHARED = (_COS, _SIN, _BORDERS, _IMAGES)

Positions = Callable[[Tensor, Batch], Tensor]
"""(is vision, micro-batch) -> positions: (tokens,), or M-RoPE's (3, tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRules:
    """What differs between language models."""

    positions: Positions
    image_token_id: int
    video_token_id: int | None = None
    """Token of videos; None where they have that of images."""
    two_way_images: bool = False
    """Tokens of an image see each other (Gemma 3)."""
    rotary_by_type: bool = False
    """Layers of different attention have different rotary embeddings (Gemma 3)."""
    deep_specs: OutputSpecs | None = None
    """Specs of the projector's output, if decoder layers add deep features of images."""
    num_deep: int = 0

    def is_vision(self, batch: Batch) -> Tensor:
        """Whether a feature of an image or a video takes each token's place: bool, (tokens,)."""
        is_image: Tensor = batch.input_ids == self.image_token_id
        if self.video_token_id is None or getattr(batch, "video_seconds", None) is None:
            return is_image
        is_video: Tensor = batch.input_ids == self.video_token_id
        return is_image | is_video


class TokenEmbedding(SpecLayer):
    """Embeds tokens, with image features in place of the image tokens."""

    def __init__(
        self, embed_tokens: nn.Module, rules: LanguageRules, output_specs: OutputSpecs
    ) -> None:
        super().__init__(output_specs)
        self.embed_tokens, self._rules = embed_tokens, rules

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (image tokens, width) -> `hidden` (1, tokens, width)."""
        hidden: Tensor = self.embed_tokens(batch.input_ids)
        places = _vision_places(batch, self._rules, hidden.device)
        features = inputs[FEATURES]
        if len(places) != len(features):
            raise ConfigError(
                f"{len(places)} image tokens (id {self._rules.image_token_id}), but the images give"
                f" {len(features)} features ({samples_text(batch)}): the model's image_token_id"
                " must be the build's, and its preset this model's"
            )
        hidden = hidden.index_copy(0, places, features.to(hidden.dtype))[None]
        return {HIDDEN: hidden, **deep_tensors(inputs)}


class LanguageLayer(SpecLayer):
    """A decoder layer, packed: attention within samples only."""

    def __init__(
        self,
        layer: nn.Module,
        rotary: nn.Module,
        rules: LanguageRules,
        number: int,
        output_specs: OutputSpecs,
    ) -> None:
        """`number`: of the layer among the decoder's."""
        super().__init__(output_specs)
        self.layer, self.rotary, self._rules, self._number = layer, rotary, rules, number
        attention: Any = layer.self_attn
        self._type = str(attention.layer_type) if rules.rotary_by_type else ""

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`hidden` (1, tokens, width) -> the same."""
        hidden = inputs[HIDDEN]
        passed = deep_tensors(inputs, after=self._number)
        if not hidden.shape[1]:  # a micro-batch that fills up an epoch's last step
            return {HIDDEN: hidden, **passed}
        shared = {name: inputs[name] for name in inputs if name.startswith(_SHARED)}
        self._add_shared(shared, hidden, batch)
        images = shared.get(_IMAGES)
        with packed_attention(self.layer.self_attn, shared[_BORDERS], hidden, images) as arguments:
            output = self.layer(
                hidden,
                attention_mask=None,
                position_ids=batch.position_ids[None],
                position_embeddings=(shared[_COS + self._type], shared[_SIN + self._type]),
                use_cache=False,
                **arguments,
            )
        # some versions of transformers return a tuple
        hidden = output[0] if isinstance(output, tuple) else output
        deep = inputs.get(deep_name(self._number))
        if deep is not None and len(deep):
            places = _vision_places(batch, self._rules, hidden.device)
            hidden = hidden.index_add(1, places, deep.to(hidden.dtype)[None])
        return {HIDDEN: hidden, **passed, **shared}

    def _add_shared(self, shared: StageTensors, hidden: Tensor, batch: Batch) -> None:
        """Add what this layer needs, and layers before it in this stage did not."""
        host = host_of(batch)
        if _BORDERS not in shared:
            shared[_BORDERS] = host.cu_seqlens.cpu().long()
            if self._rules.two_way_images:
                is_image = host.input_ids.cpu() == self._rules.image_token_id
                shared[_IMAGES] = image_runs(is_image, shared[_BORDERS])
        if _COS + self._type not in shared:
            kind = (self._type,) if self._type else ()
            positions = self._rules.positions(self._rules.is_vision(host), host)
            positions = to_device(positions.unsqueeze(-2), hidden.device)
            cos, sin = self.rotary(hidden, positions, *kind)
            shared[_COS + self._type], shared[_SIN + self._type] = cos, sin


class Head(SpecLayer):
    """Final norm, logits of the tokens whose next one has a label, and the sum of their losses."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__(lambda batch: {LOSS: TensorSpec(shape=(), dtype=torch.float32)})
        self.norm, self.lm_head = norm, lm_head

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`hidden` (1, tokens, width) -> `loss`, over all tokens with a label."""
        logits_of = nn.Sequential(self.norm, self.lm_head)
        return {LOSS: labelled_loss(inputs[HIDDEN][0], logits_of, host_of(batch))}


def language_layers(model: Any, rules: LanguageRules) -> list[SpecLayer]:
    """Language half of a transformers model with `model.language_model` and `lm_head`."""
    decoder = model.model.language_model
    table = decoder.embed_tokens.weight
    specs = hidden_specs(table.shape[1], table.dtype)

    def specs_before(number: int) -> OutputSpecs:
        """Specs before a decoder layer."""
        if rules.deep_specs is None:
            return specs
        return add_specs(specs, range(number, rules.num_deep), rules.deep_specs)

    layers = [
        LanguageLayer(layer, decoder.rotary_emb, rules, number, specs_before(number + 1))
        for number, layer in enumerate(decoder.layers)
    ]
    embedding = TokenEmbedding(decoder.embed_tokens, rules, specs_before(0))
    return [embedding, *layers, Head(decoder.norm, model.lm_head)]


def _vision_places(batch: Batch, rules: LanguageRules, device: torch.device) -> Tensor:
    """Places of the tokens of images and videos: (image tokens,)."""
    return to_device(rules.is_vision(host_of(batch)).nonzero().squeeze(1), device)

"""Language half of a model as layers: embedding, decoder layers, head.

The layers hold the model's own modules. Only `hidden` crosses cuts: the first decoder layer of a
stage computes rotary embeddings and sample borders from the micro-batch, for the next ones too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from balance.errors import ConfigError
from engine.runtime.models._sample_attention import packed_attention
from engine.runtime.models.layer_specs import FEATURES, HIDDEN, OutputSpecs, SpecLayer, hidden_specs
from engine.runtime.models.token_loss import loss_sum
from engine.runtime.stage_io import LOSS, Batch, StageTensors, TensorSpec, samples_text

_COS, _SIN, _BORDERS = "cos", "sin", "borders"

Positions = Callable[[Batch], Tensor]
"""Positions of a micro-batch as the model's rotary embedding takes them."""


class TokenEmbedding(SpecLayer):
    """Embeds tokens, with image features in place of the image tokens."""

    def __init__(
        self, embed_tokens: nn.Module, image_token_id: int, output_specs: OutputSpecs
    ) -> None:
        super().__init__(output_specs)
        self.embed_tokens, self._image_token_id = embed_tokens, image_token_id

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`features` (image tokens, width) -> `hidden` (1, tokens, width)."""
        hidden: Tensor = self.embed_tokens(batch.input_ids)
        places = (batch.input_ids == self._image_token_id).nonzero().squeeze(1)
        features = inputs[FEATURES]
        if len(places) != len(features):
            raise ConfigError(
                f"{len(places)} image tokens (id {self._image_token_id}), but the images give"
                f" {len(features)} features ({samples_text(batch)}): the model's image_token_id"
                " must be the build's, and its preset this model's"
            )
        return {HIDDEN: hidden.index_copy(0, places, features.to(hidden.dtype))[None]}


class LanguageLayer(SpecLayer):
    """A decoder layer, packed: attention within samples only."""

    def __init__(
        self, layer: nn.Module, rotary: nn.Module, positions: Positions, output_specs: OutputSpecs
    ) -> None:
        super().__init__(output_specs)
        self.layer, self.rotary, self._positions = layer, rotary, positions

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`hidden` (1, tokens, width) -> the same."""
        hidden = inputs[HIDDEN]
        if not hidden.shape[1]:  # a micro-batch that fills up an epoch's last step
            return {HIDDEN: hidden}
        shared = {name: inputs[name] for name in (_COS, _SIN, _BORDERS) if name in inputs}
        shared = shared or self._shared(hidden, batch)
        with packed_attention(self.layer.self_attn, shared[_BORDERS], hidden) as arguments:
            output = self.layer(
                hidden,
                attention_mask=None,
                position_ids=batch.position_ids[None],
                position_embeddings=(shared[_COS], shared[_SIN]),
                use_cache=False,
                **arguments,
            )
        # some versions of transformers return a tuple
        return {HIDDEN: output[0] if isinstance(output, tuple) else output, **shared}

    def _shared(self, hidden: Tensor, batch: Batch) -> StageTensors:
        cos, sin = self.rotary(hidden, self._positions(batch))
        return {_COS: cos, _SIN: sin, _BORDERS: batch.cu_seqlens.cpu().long()}


class Head(SpecLayer):
    """Final norm, logits, and the sum of the tokens' losses."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__(lambda batch: {LOSS: TensorSpec(shape=(), dtype=torch.float32)})
        self.norm, self.lm_head = norm, lm_head

    def forward(self, inputs: StageTensors, batch: Batch) -> StageTensors:
        """`hidden` (1, tokens, width) -> `loss`, over all tokens with a label."""
        logits = self.lm_head(self.norm(inputs[HIDDEN][0]))
        return {LOSS: loss_sum(logits, batch)}


def language_layers(model: Any, positions: Positions) -> list[SpecLayer]:
    """Language half of a transformers model with `model.language_model` and `lm_head`."""
    decoder, image_token_id = model.model.language_model, int(model.config.image_token_id)
    table = decoder.embed_tokens.weight
    specs = hidden_specs(table.shape[1], table.dtype)
    layers = [
        LanguageLayer(layer, decoder.rotary_emb, positions, specs) for layer in decoder.layers
    ]
    embedding = TokenEmbedding(decoder.embed_tokens, image_token_id, specs)
    return [embedding, *layers, Head(decoder.norm, model.lm_head)]

"""The language half of a transformers model as layers of a pipeline: token embedding, decoder
layers, head.

For `engine.runtime.models.transformers_models`. The layers hold the model's own modules. Between
cuts only `hidden` travels; rotary embeddings and the samples' borders are computed by the first
decoder layer of each stage out of the micro-batch, and handed on to the next ones, which need them
too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from balance.errors import ConfigError
from balance.types import LABEL_IGNORE
from engine.runtime.models._sample_attention import attention_inside_samples
from engine.runtime.models.layer_specs import FEATURES, HIDDEN, CutLayer, Gives, gives_hidden
from engine.runtime.stage_io import LOSS, Batch, StageTensors, TensorSpec, ids_text

_COS, _SIN, _BORDERS = "cos", "sin", "borders"

Positions = Callable[[Batch], Tensor]
"""A micro-batch's positions as the model's rotary embedding takes them."""


class TokenEmbedding(CutLayer):
    """Embeds tokens, and puts the features of images in the places of image tokens."""

    def __init__(self, embed_tokens: nn.Module, image_token_id: int, gives: Gives) -> None:
        super().__init__(gives)
        self.embed_tokens, self._image_token_id = embed_tokens, image_token_id

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`features` (image tokens, width) -> `hidden` (1, tokens, width)."""
        hidden: Tensor = self.embed_tokens(batch.input_ids)
        places = (batch.input_ids == self._image_token_id).nonzero().squeeze(1)
        features = carry[FEATURES]
        if len(places) != len(features):
            raise ConfigError(
                f"{len(places)} image tokens (id {self._image_token_id}), but the images give {len(features)} features "
                f"({ids_text(batch)}): the model's image_token_id must be the build's, and its preset this model's"
            )
        return {HIDDEN: hidden.index_copy(0, places, features.to(hidden.dtype))[None]}


class LanguageLayer(CutLayer):
    """A decoder layer, packed: attention only inside samples."""

    def __init__(
        self, layer: nn.Module, rotary: nn.Module, positions: Positions, gives: Gives
    ) -> None:
        super().__init__(gives)
        self.layer, self.rotary, self._positions = layer, rotary, positions

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`hidden` (1, tokens, width) -> the same."""
        hidden = carry[HIDDEN]
        if not hidden.shape[1]:  # a micro-batch that fills up an epoch's last step
            return {HIDDEN: hidden}
        shared = {
            name: carry[name] for name in (_COS, _SIN, _BORDERS) if name in carry
        } or self._shared(hidden, batch)
        with attention_inside_samples(self.layer.self_attn, shared[_BORDERS], hidden) as arguments:
            after = self.layer(
                hidden,
                attention_mask=None,
                position_ids=batch.position_ids[None],
                position_embeddings=(shared[_COS], shared[_SIN]),
                use_cache=False,
                **arguments,
            )
        # some versions of transformers give a tuple
        return {HIDDEN: after[0] if isinstance(after, tuple) else after, **shared}

    def _shared(self, hidden: Tensor, batch: Batch) -> StageTensors:
        cos, sin = self.rotary(hidden, self._positions(batch))
        return {_COS: cos, _SIN: sin, _BORDERS: batch.cu_seqlens.cpu().long()}


class Head(CutLayer):
    """Final norm, logits, and the sum of the tokens' losses."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__(lambda batch: {LOSS: TensorSpec(shape=(), dtype=torch.float32)})
        self.norm, self.lm_head = norm, lm_head

    def forward(self, carry: StageTensors, batch: Batch) -> StageTensors:
        """`hidden` (1, tokens, width) -> `loss`, over all tokens with a label."""
        logits = self.lm_head(self.norm(carry[HIDDEN][0]))
        targets = next_labels(batch.labels, batch.cu_seqlens)
        loss = functional.cross_entropy(
            logits.float(), targets, ignore_index=LABEL_IGNORE, reduction="sum"
        )
        return {LOSS: loss}


def language_layers(model: Any, positions: Positions) -> list[CutLayer]:
    """The language half of a model of transformers that has `model.language_model` and
    `lm_head`.
    """
    decoder, image_token_id = model.model.language_model, int(model.config.image_token_id)
    table = decoder.embed_tokens.weight
    gives = gives_hidden(table.shape[1], table.dtype)
    layers = [
        LanguageLayer(layer, decoder.rotary_emb, positions, gives) for layer in decoder.layers
    ]
    embedding = TokenEmbedding(decoder.embed_tokens, image_token_id, gives)
    return [embedding, *layers, Head(decoder.norm, model.lm_head)]


def next_labels(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """What each position has to predict: the label one further in its sample; none at a sample's
    end.

    >>> next_labels(torch.tensor([-100, 3, 4, 7, 9]), torch.tensor([0, 3, 5])).tolist()
    [3, 4, -100, 9, -100]
    """
    targets = labels.roll(-1)
    targets[cu_seqlens[1:].long() - 1] = LABEL_IGNORE
    return targets

"""A small vision-language model whose costs are linear in a micro-batch's loads, and steps of
heavy-tailed samples.
"""

from dataclasses import dataclass

import numpy as np

from isobatch.common.types import Groups
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads, PhaseLoads


@dataclass(frozen=True)
class LinearModel:
    """`encoders` layers of a vision encoder, then `layers` of an LLM; times in ns, sizes in
    bytes.
    """

    encoders: int = 2
    layers: int = 8
    encoder_trained: bool = False
    token_ns: int = 3_000
    square_ns: float = 0.1
    vit_token_ns: int = 2_000
    overhead_ns: int = 200_000
    send_ns: int = 50
    token_bytes: int = 1_000
    state_bytes: int = 10_000_000

    def __call__(self, loads: Loads) -> Costs:
        encoder = np.array(self.vit_token_ns * loads.vision.tokens, np.int64)
        layer = (
            self.token_ns * loads.llm.tokens
            + np.rint(self.square_ns * loads.llm.squares).astype(np.int64)
        ) + self.overhead_ns
        tokens = loads.llm.tokens
        count = self.encoders + self.layers
        is_encoder = np.arange(count)[:, np.newaxis] < self.encoders
        trained = ~is_encoder | self.encoder_trained
        forward = np.where(is_encoder, encoder, layer)
        saved = np.where(is_encoder, loads.vision.tokens, 8 * tokens) * self.token_bytes * trained
        sent = np.where(is_encoder, loads.vision.tokens, tokens)
        flows = trained[:, 0]
        working = np.where(
            np.arange(count)[:, np.newaxis] == count - 1, tokens * self.token_bytes, 0
        )
        return Costs(
            names=tuple(f"{'vit' if n < self.encoders else 'llm'}.{n}" for n in range(count)),
            kinds=tuple("vit" if n < self.encoders else "llm" for n in range(count)),
            forward_ns=forward,
            input_grad_ns=forward * (trained & (np.arange(count) > 0)[:, np.newaxis]),
            weight_grad_ns=forward * trained,
            recompute_ns=forward * trained,
            send_ns=np.where(np.arange(count)[:, np.newaxis] < count - 1, sent * self.send_ns, 0),
            saved_bytes=saved,
            kept_bytes=saved // 8,
            deferred_bytes=saved // 2,
            working_bytes=working,
            input_working_bytes=working,
            weight_working_bytes=np.zeros_like(working),
            sent_bytes=sent * self.token_bytes,
            state_bytes=np.full(count, self.state_bytes),
            param_counts=np.full(count, self.state_bytes // 16),
            sends_grad=flows,
        )


def even_borders(model: LinearModel, num_stages: int) -> np.ndarray:
    """The whole encoder in the first stage, the LLM's layers dealt evenly."""
    cuts = [
        round(model.layers * stage / num_stages) + model.encoders for stage in range(1, num_stages)
    ]
    return np.array([0, *cuts, model.encoders + model.layers])


def mixed_samples(rng, count: int, *, images: float = 0.5, longest: int = 4096) -> Loads:
    """One sample per column: log-normal texts, and in a share `images` of them 1 to 5 images of 576
    tokens.
    """
    text = np.clip(rng.lognormal(4.5, 1.3, count), 4, longest - 5 * 576).astype(np.int64)
    number = np.where(rng.random(count) < images, rng.integers(1, 6, count), 0)
    tokens = text + 576 * number
    return Loads(
        vision=PhaseLoads(tokens=576 * number, squares=576**2 * number, items=number),
        audio=PhaseLoads.nothing(count),
        llm=PhaseLoads(tokens=tokens, squares=tokens**2, items=np.ones(count, np.int64)),
    )


def as_groups(lists) -> Groups:
    return Groups(
        np.array([sample for own in lists for sample in own], np.int64),
        np.cumsum([0, *map(len, lists)]),
    )

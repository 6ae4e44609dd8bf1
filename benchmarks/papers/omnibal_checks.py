"""What OmniBal's text offers to check a cost model by, beside ours; and with what we disagree."""

from __future__ import annotations

import numpy as np

from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.models.flops import ComputeLoad, FlopsModel
from isobatch.models.presets import load_model
from papers.omnibal_models import (
    IMAGES,
    INTERNVL,
    SAMPLES,
    SEQ_LEN,
    VIT_TOKENS,
    a100,
    borders_of,
)
from papers.page import Section, percent, table, times

COUNT = 56
"""Micro-batches per step and replica: of 4.6 samples, on 4 replicas, about the 1,024 samples of
InternVL's steps.
"""
MIB = 1 << 20
GPU_DAYS, SAMPLES_IN_ALL, PER_GROUP = 21.3, 1.2e6, 4.6


def checks() -> Section:
    """One row per check."""
    costs = INTERNVL.costs(_loads(COUNT))
    model, kinds = load_model(INTERNVL.preset), costs.kinds
    vision, language = kinds.index("vision_layer"), kinds.index("llm_layer")
    borders = borders_of(costs, INTERNVL.layers)
    schedule = make_schedule("1f1b", INTERNVL.pp, COUNT)
    free, full = (
        evaluate(costs, borders, np.full(costs.num_layers, everything), schedule).step_ns
        for everything in (False, True)
    )
    gpus = INTERNVL.tp * INTERNVL.pp
    seconds, papers_seconds = (
        free / COUNT / 1e9,
        GPU_DAYS * 86400 * PER_GROUP / SAMPLES_IN_ALL / gpus,
    )
    tiles, tokens = np.array([IMAGES]), np.array([SEQ_LEN])
    load = ComputeLoad(
        vit_tokens=tiles * VIT_TOKENS,
        vit_squares=tiles * VIT_TOKENS**2,
        llm_tokens=tokens,
        llm_squares=tokens**2,
    )
    flops = float(FlopsModel.of(model).train_flops(load)[0])
    mfu = [flops / (gpus * each) / a100().peak_flops_per_s for each in (seconds, papers_seconds)]
    assert model.vit is not None
    assert model.llm is not None
    vit, llm = (
        shape.num_layers * shape.layer_weights * count
        for shape, count in ((model.vit, IMAGES * VIT_TOKENS), (model.llm, SEQ_LEN))
    )
    cuts = [
        costs.sent_bytes[kinds.index(kind), 0] * INTERNVL.tp / MIB
        for kind in ("vision_layer", "llm_layer", "vision_projector")
    ]
    saved = [
        float(costs.saved_bytes[layer, 0] - costs.kept_bytes[layer, 0]) / 1e9
        for layer in (vision, language)
    ]
    small, large = (
        float(INTERNVL.costs(_loads(1, images, seq_len)).forward_ns.sum()) / 1e6
        for images, seq_len in ((4, 2048), (IMAGES, SEQ_LEN))
    )
    rows = [
        (
            "the encoder's share of the layers' products at 9 images and 4K tokens",
            percent(vit / (vit + llm)),
            "almost 40 %",
        ),
        (
            "Table 4: what cuts in encoder, LLM and behind the projector send, MiB",
            _listed(cuts),
            "56.3, 48.0, 27.0",
        ),
        (
            "seconds per group, MFU (fitted to these)",
            f"{seconds:.3f}, {percent(mfu[0], 0)}",
            f"{papers_seconds:.3f}, {percent(mfu[1], 0)}",
        ),
        ("Table 7: what not recomputing gains", times(full / free), times(29.0 / 21.3)),
        ("Table 5: bytes of an encoder layer and micro-batch, GB", f"{saved[0]:.3f}", ".522, .500"),
        ("Table 5: of an LLM layer, GB", f"{saved[1]:.3f}", ".163, .113"),
        (
            "Figure 2: forward ms at 4 images and 2K tokens, and 9 and 4K",
            f"{small:.0f}, {large:.0f}",
            "970, 1,730",
        ),
        ("the ratio of these", times(large / small), times(1730 / 970)),
    ]
    figure_2 = 3 * 1.730 / INTERNVL.pp
    return Section(
        title="OmniBal: what the text offers to check by",
        body=(
            "InternVL 6B + 20B, TP 2, PP 4 on A100-80G. The paper's seconds per group and MFU "
            "follow from its GPU days.",
            table(("check", "ours", "paper"), rows),
            "Where we disagree. *An LLM layer's bytes*: the paper's are less than the layer's "
            "backward pass needs of inputs of its matrix products alone; they come out of "
            "differences between rows of Table 5, in stages where it may not have recomputed "
            "everything before. The row without recomputation fits better. *Figure 2*: forward "
            f"passes of 1,730 ms, and backward passes of twice that, would make a group last at "
            f"least {figure_2:.2f} s on four stages, not the {papers_seconds:.2f} s of the GPU "
            f"days. The two cannot both hold. Our times grow as FLOPs do.",
        ),
    )


def _loads(count: int, images: int = IMAGES, seq_len: int = SEQ_LEN) -> Loads:
    return Loads.constant(
        count, images=images, vit_tokens_per_image=VIT_TOKENS, seq_len=seq_len, samples=SAMPLES
    )


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)

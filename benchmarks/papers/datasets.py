"""The samples that the papers' tables are simulated on: drawn to match what each paper tells of its
data.

Each function returns `Counts`, and says in its docstring what the paper tells and what is assumed.
"""

from __future__ import annotations

from math import log, sqrt

import numpy as np
from numpy.random import Generator

from isobatch.common.types import Counts, IntArray
from isobatch.models.audio_tokens import AudioRule, plan_audio
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import ModelPreset

VIT_TOKENS = 1025
"""Of one of InternVL's tiles."""


INTERNVL_TILES = (0.03, 0.62, 0.05, 0.13, 0.05, 0.12)
"""Shares of samples with 0 to 5 tiles: at most 4 and a thumbnail."""


def internvl_samples(count: int, seed: int = 0) -> Counts:
    """Samples like InternVL-1.2M's, whose lengths are not published in full.

    Shares of tiles, and log-normal texts (median 330 tokens, sigma .6), are chosen so that what
    OmniBal's Table 3 tells comes out nearly: 4.6 samples per group of 9 tiles and 4,096 tokens;
    with 4 random samples a pad ratio of .31 and dist ratios of .34 and .30.
    `omnibal_steps.data_table` shows what does come out.
    """
    rng = np.random.default_rng(seed)
    tiles = rng.choice(len(INTERNVL_TILES), count, p=INTERNVL_TILES).astype(np.int64)
    text = np.clip(rng.lognormal(log(330), 0.6, count), 20, 2_800).astype(np.int64)
    return counts_of(
        patches=tiles, vit_tokens=tiles * VIT_TOKENS, image_tokens=256 * tiles, text_tokens=text
    )


def caption_samples(count: int, seed: int = 0) -> Counts:
    """Samples like LCS-558K's (OmniBal, Table 11): one image, 5.8 of them in 9 tiles, and a short
    caption.
    """
    rng = np.random.default_rng(seed)
    tiles = rng.choice([1, 3, 5], count, p=[0.76, 0.2, 0.04]).astype(np.int64)
    text = np.clip(rng.lognormal(log(40), 0.4, count), 15, 300).astype(np.int64)
    return counts_of(
        patches=tiles, vit_tokens=tiles * VIT_TOKENS, image_tokens=256 * tiles, text_tokens=text
    )


ANYRES_TOKENS = 577
"""Of a tile of LLaVA-1.6, in the encoder; the LLM gets one less."""


def anyres_samples(count: int, seed: int = 0) -> Counts:
    """Samples like LLaVA-1.6's (OmniBal, Table 13): most images are 2 x 2 tiles and the whole, some
    1 x 2.
    """
    rng = np.random.default_rng(seed)
    tiles = rng.choice([0, 3, 5], count, p=[0.06, 0.2, 0.74]).astype(np.int64)
    text = np.clip(rng.lognormal(log(250), 0.7, count), 20, 2_000).astype(np.int64)
    image = (ANYRES_TOKENS - 1) * tiles
    return counts_of(
        patches=tiles, vit_tokens=tiles * ANYRES_TOKENS, image_tokens=image, text_tokens=text
    )


PIPETUNE_MIXES = {"DataMix1": (5, 5, 90), "DataMix2": (30, 30, 40), "DataMix3": (45, 45, 10)}
"""MMC4 : COYO : FLAN."""
SIGLIP_TOKENS = 576
"""Of an image, in the encoder and in the LLM."""


def pipetune_samples(mix: str, count: int, longest: int, seed: int = 0) -> Counts:
    """Samples of PipeTune's mixtures: log-normal lengths of the mean, median and longest of its
    Table 1.

    Samples of over `longest` LLM tokens are drawn again: the paper does not say what becomes of
    them.
    """
    rng = np.random.default_rng(seed)
    source = rng.choice(3, count, p=np.array(PIPETUNE_MIXES[mix]) / 100)
    images, text = np.zeros(count, np.int64), np.zeros(count, np.int64)
    missing = np.ones(count, np.bool_)
    while missing.any():
        drawn = [
            (_log_normal(rng, count, 4.08, 3, 15), _log_normal(rng, count, 408.94, 362, 16_470)),
            (np.ones(count, np.int64), _log_normal(rng, count, 17.24, 13, 1_523)),
            (np.zeros(count, np.int64), _log_normal(rng, count, 154.68, 52, 222_109)),
        ]
        images[missing] = np.choose(source, [pair[0] for pair in drawn])[missing]
        text[missing] = np.choose(source, [pair[1] for pair in drawn])[missing]
        missing = images * SIGLIP_TOKENS + text > longest
    tokens = SIGLIP_TOKENS * images
    return counts_of(patches=images, vit_tokens=tokens, image_tokens=tokens, text_tokens=text)


def _log_normal(rng: Generator, count: int, mean: float, median: float, most: int) -> IntArray:
    """Whole numbers from 1 to `most`."""
    drawn = rng.lognormal(log(median), sqrt(2 * log(mean / median)), count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


ORCHMLLM_SHARES = (0.65, 0.04, 0.29, 0.02)
"""Of 665 k samples of LLaVA-1.5 (with an image, and without), 281 k of LibriSpeech and 19 k of
AIR-Bench.
"""
PHOTO_SIDES = (
    (640, 480),
    (480, 640),
    (640, 427),
    (500, 375),
    (427, 640),
    (640, 640),
    (1024, 768),
    (336, 500),
)
"""Of LLaVA-1.5's images, most of which are COCO's."""


def orchmllm_samples(model: ModelPreset, count: int, seed: int = 0) -> Counts:
    """Samples of OrchMLLM's mixture of images and speech, by the preset's own rules of patches and
    frames.

    The paper names the datasets. Assumed: shares by size, images of PHOTO_SIDES, utterances of 2 to
    35 seconds with LibriSpeech's mean of 12.3, AIR-Bench's of 1 to 60, and LLaVA's texts log-normal
    (median 200, mean 300 tokens).
    """
    rng = np.random.default_rng(seed)
    assert model.audio is not None
    kind = rng.choice(4, count, p=ORCHMLLM_SHARES)
    plans = [plan_image(model.vision, width, height) for width, height in PHOTO_SIDES]
    side = rng.integers(0, len(plans), count)
    seen = kind == 0
    vit = np.where(seen, np.array([plan.num_vit_tokens for plan in plans])[side], 0)
    image = np.where(seen, np.array([plan.num_image_tokens for plan in plans])[side], 0)
    seconds = np.where(
        kind == 2,
        np.clip(rng.gamma(6.0, 2.05, count), 2, 35),
        np.clip(rng.gamma(2, 8, count), 1, 60),
    )
    audio = np.array([_audio_tokens(model.audio, value) for value in seconds.tolist()])
    audio = np.where(kind >= 2, audio, 0)
    llava, speech = _log_normal(rng, count, 300, 200, 4_000), _log_normal(rng, count, 45, 40, 200)
    return counts_of(
        patches=seen.astype(np.int64),
        vit_tokens=vit,
        image_tokens=image,
        text_tokens=np.where(kind < 2, llava, speech),
        audio_tokens=audio,
    )


def _audio_tokens(rule: AudioRule, seconds: float) -> int:
    return plan_audio(rule, int(seconds * rule.sampling_rate), rule.sampling_rate).num_audio_tokens


def counts_of(
    *,
    patches: IntArray,
    vit_tokens: IntArray,
    image_tokens: IntArray,
    text_tokens: IntArray,
    audio_tokens: IntArray | None = None,
) -> Counts:
    """Counts in which every text token has a label."""
    return Counts(
        num_image_patches=patches,
        num_vit_tokens=vit_tokens,
        num_image_tokens=image_tokens,
        num_text_tokens=text_tokens,
        num_audio_tokens=np.zeros_like(patches) if audio_tokens is None else audio_tokens,
        num_loss_tokens=text_tokens,
    )

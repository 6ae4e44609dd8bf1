"""Samples and micro-batches of samples as loads."""

import numpy as np

from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.common.types import COUNT_COLUMNS, Counts
from isobatch.engine.cost_model.loads import Loads, joined_loads, packed_loads, sample_loads
from isobatch.models.presets import load_model
from support.costs.linear_costs import mixed_samples


def test_micro_batches_bring_the_sums_of_their_samples():
    samples = mixed_samples(np.random.default_rng(1), 9)
    groups = pack_in_order(samples.llm.tokens, 3000)
    loads = packed_loads(samples, groups)
    for group in range(len(groups)):
        own = samples.take(groups[group])
        assert loads.llm.squares[group] == (own.llm.tokens**2).sum()
        assert loads.vision.items[group] == own.vision.items.sum()
    both = joined_loads([loads, loads])
    assert both.llm.tokens.tolist() == [*loads.llm.tokens, *loads.llm.tokens]


def test_loads_of_counts_are_those_of_the_model():
    model = load_model("llava_1_5")
    counts = Counts(
        num_image_patches=np.array([2, 0]),
        num_vit_tokens=np.array([1154, 0]),
        num_image_tokens=np.array([1152, 0]),
        num_text_tokens=np.array([100, 30]),
        num_audio_tokens=np.array([0, 0]),
        num_loss_tokens=np.array([50, 20]),
    )
    loads = sample_loads(counts, model)
    assert loads.llm.tokens.tolist() == [1252, 30]
    assert loads.vision.items.tolist() == [2, 0]
    assert loads.llm.items.tolist() == [1, 1]
    assert loads.labels.tokens.tolist() == [50, 20]
    # where labels are not known, and where a trainer computes all logits
    for unknown in (
        Loads(vision=loads.vision, audio=loads.audio, llm=loads.llm),
        loads.all_labelled(),
    ):
        assert unknown.labels.tokens.tolist() == [1252, 30]


def test_audio_is_cut_into_windows_of_one_clip():
    counts = Counts(
        **{name: np.zeros(2, np.int64) for name in COUNT_COLUMNS}
        | {"num_audio_tokens": np.array([0, 800])}
    )
    audio = sample_loads(counts, load_model("tiny_audio")).audio
    assert audio.tokens.tolist() == [0, 1600]
    assert audio.squares.tolist() == [0, 1500**2 + 100**2]
    assert audio.items.tolist() == [0, 2]

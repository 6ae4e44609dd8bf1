"""Loads of micro-batches: what their tensors say, and the same as the counts of the same
samples.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups
from isobatch.engine.cost_model.loads import packed_loads, sample_loads
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.models.presets import load_model

PHASES, QUANTITIES = ("vision", "audio", "llm", "labels"), ("tokens", "squares", "items")


def batch(lengths, **more):
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    more = {"labels": torch.full((sum(lengths),), -100), **more}
    return SimpleNamespace(cu_seqlens=borders, sample_ids=tuple(map(str, lengths)), **more)


def labels_of(counts, samples):
    """The last tokens of each sample have labels."""
    labels = []
    for length, count in zip(counts.seq_len[samples], counts.num_loss_tokens[samples], strict=True):
        labels += [-100] * int(length - count) + [1] * int(count)
    return torch.tensor(labels, dtype=torch.int64)


def test_micro_batches_of_tiles_bring_what_their_counts_say():
    model, rng = load_model("tiny"), np.random.default_rng(2)
    patches, text = rng.integers(0, 5, 12), rng.integers(1, 60, 12)
    counts = Counts(
        num_image_patches=patches,
        num_vit_tokens=patches * 17,
        num_image_tokens=patches * 4,
        num_text_tokens=text,
        num_audio_tokens=np.zeros(12, np.int64),
        num_loss_tokens=text // 2,
    )
    # one micro-batch has nothing in it
    groups = Groups(np.arange(12), np.array([0, 5, 5, 12]))
    made = [
        batch(
            (counts.seq_len[groups[group]]).tolist(),
            patches_per_image=torch.from_numpy(patches[groups[group]]),
            labels=labels_of(counts, groups[group]),
        )
        for group in range(3)
    ]
    found, expected = batch_loads(made, model), packed_loads(sample_loads(counts, model), groups)
    for phase in PHASES:
        for name in QUANTITIES:
            own, other = (
                getattr(getattr(loads, phase), name).tolist() for loads in (found, expected)
            )
            assert own == other, (phase, name)


def test_images_at_native_resolution_count_each_with_its_own_length():
    grids = torch.tensor([[1, 4, 6], [2, 2, 2]])
    found = batch_loads([batch([9, 3], image_grid_thw=grids)], load_model("qwen2_vl"))
    assert found.vision.tokens.tolist() == [24 + 8]
    assert found.vision.squares.tolist() == [24**2 + 2 * 4**2]
    assert found.vision.items.tolist() == [3]
    assert found.llm.squares.tolist() == [81 + 9]
    assert found.audio.tokens.tolist() == [0]


def test_audio_counts_by_windows():
    none = torch.zeros(0, dtype=torch.int64)
    heard = batch([8], patches_per_image=none, audio_frames=torch.tensor([3000, 101]))
    found = batch_loads([heard, batch([8], patches_per_image=none)], load_model("tiny_audio"))
    assert found.audio.tokens.tolist() == [1500 + 51, 0]
    assert found.audio.squares.tolist() == [1500**2 + 51**2, 0]
    assert found.audio.items.tolist() == [2, 0]


def test_a_micro_batch_that_does_not_tell_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"a micro-batch \(samples 4, 5\) has no patches_per_image"
    ):
        batch_loads([batch([4, 5])], load_model("tiny"))

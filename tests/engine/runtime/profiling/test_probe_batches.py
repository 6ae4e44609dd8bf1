"""Parts of micro-batches to profile with: their first samples with their images, decoded or not."""

import dataclasses
import operator
from dataclasses import replace

import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.engine.runtime.profiling.measure_plan import (
    SHARES,
    first_samples,
    largest_batches,
    probe_batches,
)
from isobatch.models.presets import load_model
from support.cases import for_each
from support.models import video_samples
from support.models.image_batches import IMAGE, make_batch

COUNTS = (1, 0, 3, 2, 0, 1)
"""Images of each sample."""
PRESETS = {"llava": "llava_1_5", "internvl": "internvl_1_5", "qwen2_vl": "qwen2_vl"}


@pytest.fixture(scope="module", params=PRESETS)
def name(request):
    return request.param


def undecoded(batch):
    return replace(batch, pixel_values=batch.pixel_values[:0])


@for_each(("share", "count"), [(0.0, 1), (0.25, 2), (0.5, 3), (0.75, 4), (1.0, 6)])
def test_first_samples_are_those_of_the_micro_batch_with_their_images(name, share, count):
    batch = make_batch(name, COUNTS)
    part = first_samples(batch, share, (IMAGE,))
    assert part.sample_ids == batch.sample_ids[:count]
    own = int(batch.cu_seqlens[count])
    for field in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(part, field), getattr(batch, field)[:own]), field
    assert torch.equal(part.cu_seqlens, batch.cu_seqlens[: count + 1])
    num_images = sum(COUNTS[:count])
    assert len(part.image_sizes) == num_images
    for field in (
        "patches_per_image",
        "image_sizes",
        *(("image_grid_thw",) if name == "qwen2_vl" else ()),
    ):
        assert torch.equal(getattr(part, field), getattr(batch, field)[:num_images]), field
    per_image = part.image_grid_thw.prod(1) if name == "qwen2_vl" else part.patches_per_image
    assert torch.equal(part.pixel_values, batch.pixel_values[: int(per_image.sum())])


def test_first_samples_come_with_their_videos():
    pytest.importorskip("av")
    for family in ("qwen2_5_vl", "qwen3_vl", "internvl"):
        samples = video_samples.make_samples(family, ["v", "t", "iv", "l"], seed=3)
        batch = video_samples.packed(family, samples, loss_weights="sample")
        for count in (1, 2, 3):
            part = first_samples(batch, count / 4, (IMAGE, video_samples.VIDEO))
            first = video_samples.packed(family, samples[:count], loss_weights="sample")
            for field in dataclasses.fields(first):
                found, wanted = getattr(part, field.name), getattr(first, field.name)
                is_same = torch.equal if isinstance(wanted, torch.Tensor) else operator.eq
                assert is_same(found, wanted) or field.name == "num_step_samples", field.name


def test_without_pixels_parts_are_the_same_but_for_them(name):
    batch = make_batch(name, COUNTS)
    for share in SHARES:
        part, bare = (
            first_samples(batch, share, (IMAGE,)),
            first_samples(undecoded(batch), share, (IMAGE,)),
        )
        assert not len(bare.pixel_values)
        assert len(part.pixel_values)
        assert torch.equal(part.patches_per_image, bare.patches_per_image)
        assert torch.equal(part.input_ids, bare.input_ids)


def test_micro_batches_without_images_or_samples_have_parts(name):
    assert first_samples(make_batch(name, (0, 0)), 0.5, (IMAGE,)).num_samples == 1
    assert first_samples(make_batch(name, ()), 0.5, (IMAGE,)).num_samples == 0


def test_parts_of_the_largest_come_before_all(name):
    batches = [
        make_batch(name, counts, seed=seed)
        for seed, counts in enumerate([(0,), COUNTS, (1, 0), ()])
    ]
    loads = batch_loads(batches, load_model(PRESETS[name]))
    parts = probe_batches(batches, loads, (IMAGE,))
    assert largest_batches(loads) == [1]
    assert [len(part.sample_ids) for part in parts[: len(SHARES)]] == [2, 3, 4]
    assert parts[len(SHARES) :] == batches


@for_each(("counts", "sizes"), [((2,), []), ((1, 1), [1]), ((1, 0, 1), [1, 2])])
def test_no_part_is_another_one_or_the_whole_once_more(name, counts, sizes):
    batch = make_batch(name, counts)
    parts = probe_batches([batch], batch_loads([batch], load_model(PRESETS[name])), (IMAGE,))
    assert [part.num_samples for part in parts] == [*sizes, len(counts)]
    assert parts[-1] is batch


def test_what_cannot_be_cut_is_refused(name):
    batch = make_batch(name, COUNTS)
    with pytest.raises(ConfigError, match="do not belong together"):
        first_samples(batch, 0.5, (60,))
    with pytest.raises(ConfigError, match="with audio"):
        first_samples(replace(batch, audio_values=torch.zeros(3)), 0.5, (IMAGE,))

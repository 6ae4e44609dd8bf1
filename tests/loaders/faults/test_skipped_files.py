"""`on_error="skip"`: files that break after packing cost what their samples teach, nothing else."""

import warnings
from itertools import pairwise

import pytest
import torch
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import StreamingLoader
from support.builds.shard_fixture import group_samples, make_samples, write_build

NUM_SAMPLES = 24


def steps_of(build, rank=0, size=1, **options):
    """-> (all micro-batches, stats, what was warned of) of an epoch of one rank."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = StreamingLoader(
            build, dp_rank=rank, dp_world_size=size, check_ranks=False, **options
        )
        batches = [batch for step in loader for batch in step]
        stats = loader.stats()
        loader.close()
    return batches, stats, [str(one.message) for one in said if "skipped" in str(one.message)]


def spans(batch):
    borders = batch.cu_seqlens.tolist()
    return dict(zip(batch.sample_ids, pairwise(borders), strict=True))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """(build, its epochs by form before any file broke, id -> what is said of its file)"""
    folder = tmp_path_factory.mktemp("skip")
    samples = make_samples(NUM_SAMPLES)
    build = write_build(folder / "build", group_samples(samples), "refs")
    before = {form: steps_of(build, images=form)[0] for form in ("patches", "resized")}
    with_images = [sample.sample_id for sample in samples if sample.images]
    victims = dict(
        zip(with_images, ("is missing", "cannot be decoded", "when it was", "Pillow"), strict=False)
    )
    for number, sample_id in enumerate(victims):
        path = build / "images" / sample_id / "0.img"
        content = path.read_bytes()
        path.unlink()
        if number == 1:
            path.write_bytes(content[: len(content) // 2])
        elif number == 2:
            Image.new("RGB", (31, 17)).save(path, "PNG")
        elif number == 3:
            path.write_text("not a picture")
    return build, before, victims


def test_a_broken_file_costs_its_samples_labels_and_nothing_else(broken):
    build, before, victims = broken
    for form, expected in before.items():
        for options in ({"workers": 0}, {"workers": 2}, {"workers": 0, "exact_resize": True}):
            batches, stats, said = steps_of(build, images=form, on_error="skip", **options)
            assert stats.skipped_samples == len(victims) == len(said)
            for sample_id, what in victims.items():
                (line,) = (line for line in said if repr(sample_id) in line)
                assert what in line
            skipped = {}
            for batch, whole in zip(batches, expected, strict=True):
                skipped |= batch.skipped
                assert batch.sample_ids == whole.sample_ids
                assert batch.input_ids.equal(whole.input_ids)
                assert batch.num_loss_tokens == whole.num_loss_tokens
                assert batch.loss_normalizer == whole.loss_normalizer
                assert batch.pixel_values.shape == whole.pixel_values.shape
                assert [x.shape for x in batch.images] == [x.shape for x in whole.images]
                for sample_id, (start, end) in spans(batch).items():
                    labels = batch.labels[start:end]
                    if sample_id in victims:
                        assert (labels == -100).all()
                    else:
                        assert labels.equal(whole.labels[start:end])
            assert skipped.keys() == victims.keys()


def test_each_rank_has_the_steps_that_it_would_have(broken):
    build, _, victims = broken
    numbers, skipped = [], []
    for rank in range(2):
        batches, stats, _ = steps_of(build, rank, 2, on_error="skip", micro_batches_per_step=2)
        numbers.append(len(batches))
        skipped += [sample_id for batch in batches for sample_id in batch.skipped]
        assert stats.skipped_samples == sum(len(batch.skipped) for batch in batches)
    assert numbers[0] == numbers[1]
    assert sorted(skipped) == sorted(victims)


def test_images_of_skipped_samples_are_black_where_they_cannot_be_used(broken):
    build, _, victims = broken
    options = {"images": "resized", "on_error": "skip", "pixel_dtype": torch.uint8}
    batches, _, _ = steps_of(build, **options)
    black = [image for batch in batches for image in batch.images if not image.any()]
    assert len(black) == len(victims)


def test_without_the_option_it_is_an_error_and_encoded_images_are_not_looked_at(broken):
    build, _, _ = broken
    with pytest.raises(DataError, match=r"sample '.*restore it"):
        steps_of(build)
    with pytest.raises(ConfigError, match="on_error='skip' needs decoded images"):
        steps_of(build, images="encoded", on_error="skip")
    with pytest.raises(ConfigError, match="on_error"):
        steps_of(build, on_error="ignore")

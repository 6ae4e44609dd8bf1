"""A user's transforms: the same numbers for a sample whoever packs it; one line if they fail."""

import pickle
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from isobatch.common.errors import ConfigError
from isobatch.loaders import MicroBatch, StepDataset, StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.loading.step_planners import dispatch, repack
from support.loading.transforms import marked

torch.set_num_threads(1)
SAMPLES = make_samples(50)
NUM_IMAGES = sum(len(sample.images) for sample in SAMPLES)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    groups = group_samples(SAMPLES, max_tokens=50)
    return {form: write_tabled(root / form, groups, form) for form in ("arrow", "webdataset")}


def one_colour(image, rng):
    """The whole image in a colour that is drawn."""
    image[:] = rng.integers(0, 256, size=3, dtype=np.uint8)
    return image


def load(build, rank=0, world=1, **options):
    hooks = {"image_transform": one_colour, "batch_transform": marked, "pixel_dtype": torch.uint8}
    return StreamingLoader(build, dp_rank=rank, dp_world_size=world, **hooks | options)


def seen_in(loader, num_steps=None):
    """What was drawn for each sample: {(epoch, sample, "mark" or number of the image): drawn}."""
    seen, epoch = {}, loader.epoch
    for step in islice(loader, num_steps):
        for batch in chain(step, *step.encoders.values()):
            for (sample, image), colour in colours(batch):
                seen[epoch, sample, image] = colour
        for batch in step:
            for sample, start in zip(batch.sample_ids, batch.cu_seqlens.tolist(), strict=False):
                seen[epoch, sample, "mark"] = int(batch.position_ids[start])
    return seen


def colours(batch):
    if not len(batch.pixel_values):
        return
    by_id = {sample.sample_id: sample for sample in SAMPLES}
    images = [(one, image) for one in batch.sample_ids for image in range(len(by_id[one].images))]
    patches = batch.pixel_values.split(batch.patches_per_image.tolist())
    for image, own in zip(images, patches, strict=True):
        assert torch.equal(own.amin((0, 2, 3)), own.amax((0, 2, 3)))
        yield image, own[0, :, 0, 0].tolist()


MODES = [
    ("arrow", 2, {}),
    ("webdataset", 0, {"balance": 0, "micro_batches_per_step": 2}),
    ("arrow", 0, {"regroup": "epoch", "regroup_window": 12}),
    ("webdataset", 2, {"planner": repack}),
    ("arrow", 2, {"planner": dispatch}),
]
"""Format, threads, and other options."""


def test_a_sample_is_changed_in_the_same_way_whoever_packs_it_and_when(builds):
    whole = load(builds["arrow"], workers=0)
    expected = seen_in(whole) | seen_in(whole)
    assert len(expected) == 2 * (len(SAMPLES) + NUM_IMAGES)
    # every draw is another one: of epochs, samples and images
    marks = [drawn for (*_, use), drawn in expected.items() if use == "mark"]
    assert len(set(marks)) == len(marks) == 2 * len(SAMPLES)
    assert len({str(drawn) for drawn in expected.values()}) == len(expected)
    assert expected.items().isdisjoint(seen_in(load(builds["arrow"], seed=1)).items())
    for form, workers, mode in MODES:
        seen = {}
        for rank in range(2):
            first = load(builds[form], rank, 2, workers=workers, **mode)
            seen |= seen_in(first, 2)
        # the rest of the first epoch, and the second, on another number of ranks
        resumed = load(builds[form], workers=2 - workers, **mode)
        resumed.load_state_dict(first.state_dict())
        seen |= seen_in(resumed) | seen_in(resumed)
        assert seen == expected, mode


def test_worker_processes_transform_as_this_one(builds):
    loader, expected = load(builds["arrow"]), [*load(builds["arrow"])]
    data = DataLoader(StepDataset(loader), batch_size=None, num_workers=1)
    for step, (batch,) in zip(islice(data, len(expected)), expected, strict=True):
        assert torch.equal(step.micro_batches[0].position_ids, batch.position_ids)
        assert torch.equal(step.micro_batches[0].pixel_values, batch.pixel_values)


def test_a_function_that_other_processes_cannot_import_is_named(builds):
    pickle.loads(pickle.dumps(load(builds["arrow"]))).close()
    for name in ("image_transform", "batch_transform", "planner"):
        loader = load(builds["arrow"], **{name: lambda one, other=None: one})
        with pytest.raises(ConfigError, match=f"^{name} cannot be sent to a worker process .*def"):
            pickle.dumps(loader)


@pytest.mark.parametrize("options", [{}, {"exact_resize": True}, {"reduced_decode": True}])
def test_an_image_is_the_transforms_own_and_what_it_returns_is_cut(builds, options):
    kept = []

    def keep(image, rng):
        assert (image.dtype, image.shape[2], image.flags.writeable) == (np.uint8, 3, True)
        kept.append(image)
        return image

    def mirrored(image, rng):
        return image[:, ::-1]  # a view with negative strides

    plain = [*load(builds["arrow"], image_transform=None, **options)]
    same = [*load(builds["arrow"], image_transform=keep, workers=0, **options)]
    copies = [image.copy() for image in kept]
    other = [*load(builds["arrow"], image_transform=mirrored, **options)]
    assert len(kept) == NUM_IMAGES
    assert all(map(np.array_equal, kept, copies))
    for (one,), (two,), (three,) in zip(plain, same, other, strict=True):
        assert torch.equal(one.pixel_values, two.pixel_values)
        assert not len(one.pixel_values) or not torch.equal(one.pixel_values, three.pixel_values)


def test_every_micro_batch_goes_through_batch_transform_also_those_without_samples(builds):
    sizes = []

    def count(batch, rngs):
        sizes.append((batch.num_samples, len(rngs)))
        return batch

    options = {"micro_batches_per_step": 8, "batch_transform": count, "workers": 0}
    steps = [*load(builds["arrow"], 0, 3, **options)]
    assert sizes == [(batch.num_samples,) * 2 for step in steps for batch in step]
    assert (0, 0) in sizes


def raising(image, rng):
    raise ZeroDivisionError("of one's own\nand more")


IMAGE_NAMED = r"image [01] of sample 'sample-\d{5}' \(shard-0000\d.arrow, group \d+\)"
BATCH_NAMED = r"the micro-batch of sample-\d{5}.* \(shard-0000\d.arrow, group \d+\)"
WRONG = [
    ("image_transform", raising, "failed on {}: ZeroDivisionError: of one's own$"),
    ("image_transform", lambda image, rng: None, "gave a NoneType for {};"),
    ("image_transform", lambda image, rng: image / 255, r"gave an array of float64 \(.*\) for {};"),
    ("image_transform", lambda image, rng: image[1:], r"gave an array of uint8 \(.* for {}; .*own"),
    ("image_transform", lambda image: image, "failed on {}: TypeError: "),
    ("batch_transform", raising, "failed on {}: ZeroDivisionError: of one's own$"),
    ("batch_transform", lambda batch, rngs: None, "gave a NoneType for {}; give a MicroBatch"),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_fails_is_one_line_with_the_sample(builds, workers):
    for name, transform, message in WRONG:
        named = message.format(IMAGE_NAMED if name == "image_transform" else BATCH_NAMED)
        loader = load(builds["arrow"], workers=workers, **{name: transform})
        with pytest.raises(ConfigError, match=f"^{name} {named}") as caught:
            list(loader)
        assert "\n" not in str(caught.value)
        if transform is raising:
            assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_options_that_exclude_each_other_are_refused(builds):
    with pytest.raises(ConfigError, match="image_transform is 'flip'; it must be a function"):
        load(builds["arrow"], image_transform="flip")
    with pytest.raises(ConfigError, match="images='encoded' decodes none"):
        load(builds["arrow"], images="encoded")
    with pytest.raises(ConfigError, match="images is 'raw'; it must be one of patches, resized"):
        load(builds["arrow"], images="raw")
    with pytest.raises(ConfigError, match="decode_images is now images: write images='encoded'"):
        load(builds["arrow"], decode_images=False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_resized_images_are_what_patches_are_cut_from(builds, dtype):
    cut, whole = (
        [*load(builds["arrow"], images=images, pixel_dtype=dtype)]
        for images in ("patches", "resized")
    )
    found = 0
    for (patches,), (batch,) in zip(cut, whole, strict=True):
        assert len(batch.images) == len(batch.image_sizes)
        assert not len(batch.pixel_values)
        rows = patches.pixel_values.split(patches.patches_per_image.tolist())
        for image, own in zip(batch.images, rows, strict=True):
            assert (image.dtype, image.ndim) == (dtype, 3)
            side = own.shape[-1]
            tiles = image.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
            tiles = tiles.reshape(-1, 3, side, side)
            assert torch.equal(own[: len(tiles)], tiles)
            found += 1
        again = pickle.loads(pickle.dumps(batch))
        assert all(map(torch.equal, again.images, batch.images))
        assert {image.device.type for image in batch.to("meta").images} <= {"meta"}
        assert isinstance(again, MicroBatch)
    assert found == NUM_IMAGES

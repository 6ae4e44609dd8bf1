"""From raw records through `packer` to micro-batches: nothing lost, and pixels fill exactly the
image tokens.
"""

import io
from collections import Counter

import pytest
import torch
from rich.console import Console

from isobatch.loaders import StreamingLoader
from isobatch.models.image_tokens import plan_image
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from support.builds.raw_data import good_records, options, record, write_dataset, write_image

BUILDS = [("tiny", "arrow"), ("tiny", "webdataset"), ("tiny", "refs"), ("qwen2_vl", "arrow")]
BUILDS += [("mistral3", "arrow")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    return write_dataset(folder, good_records(folder))


@pytest.fixture(scope="module", params=BUILDS, ids="-".join)
def ranks(request, dataset, tmp_path_factory):
    """The loaders of 4 ranks, and all that they give in an epoch."""
    model, format = request.param
    out = tmp_path_factory.mktemp("packed") / "out"
    progress = StageProgress(Console(file=io.StringIO()))
    Builder(BuildConfig(**options(dataset, out, model=model, format=format)), progress).build()
    loaders = [
        StreamingLoader(out, dp_rank=rank, dp_world_size=4, pixel_dtype=torch.uint8)
        for rank in range(4)
    ]
    return loaders, [[batch for step in loader for batch in step] for loader in loaders]


def test_every_sample_arrives_once(ranks):
    _, batches = ranks
    ids = Counter(sample_id for rank in batches for batch in rank for sample_id in batch.sample_ids)
    assert ids == Counter(f"s{number}" for number in range(60))


def test_pixels_fill_exactly_the_image_tokens(ranks):
    loaders, batches = ranks
    seen = 0
    for batch in (batch for rank in batches for batch in rank):
        num_image_tokens = int((batch.input_ids == loaders[0].image_token_id).sum())
        per_row = (
            4 if batch.image_grid_thw is None else 1 / 4
        )  # a tiny patch has 4 tokens, 4 native squares have one
        assert num_image_tokens == len(batch.pixel_values) * per_row
        assert not (batch.labels == loaders[0].image_token_id).any()
        assert not (batch.input_ids >= loaders[0].vocab_size).any()
        seen += num_image_tokens
    assert seen > 0


def test_the_global_sum_counts_each_label_that_survives_the_shift(ranks):
    _, batches = ranks
    for step in zip(*batches, strict=True):
        first_tokens = torch.cat([batch.labels[batch.cu_seqlens[:-1].long()] for batch in step])
        assert bool(
            (first_tokens == -100).all()
        )  # nothing comes before them that could predict them
        assert {batch.num_loss_tokens for batch in step} == {
            sum(int((b.labels != -100).sum()) for b in step)
        }


@pytest.mark.parametrize("model", ["llava_onevision", "smolvlm2"])
def test_tokens_and_patches_of_several_images_are_those_of_their_sample(model, tmp_path):
    for name, size in {"a": (90, 40), "b": (30, 60)}.items():
        write_image(tmp_path / f"{name}.png", *size, seed=1)
    rows = [record(1, ["a.png"]), record(2, ["a.png", "b.png"]), record(3)]
    rows += [record(4, ["b.png", "a.png", "b.png"])]
    progress = StageProgress(Console(file=io.StringIO()))
    folder, out = write_dataset(tmp_path, rows), tmp_path / "out"
    Builder(BuildConfig(**options(folder, out, model=model)), progress).build()
    loader = StreamingLoader(out, dp_rank=0, dp_world_size=1, pixel_dtype=torch.uint8)
    rule, seen = loader.model.vision, {}
    for batch in (batch for step in loader for batch in step):
        sizes = batch.image_sizes.tolist()
        for i, sample_id in enumerate(batch.sample_ids):
            ids = batch.input_ids[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
            seen[sample_id] = int((ids == loader.image_token_id).sum())
        assert batch.patches_per_image.sum() == len(batch.pixel_values)
        assert len(sizes) == len(batch.patches_per_image)
    of = {"a": (90, 40), "b": (30, 60)}
    assert seen == {
        f"s{number}": sum(
            plan_image(rule, *of[name], len(names)).num_image_tokens for name in names
        )
        for number, names in {1: "a", 2: "ab", 3: "", 4: "bab"}.items()
    }

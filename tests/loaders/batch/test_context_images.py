"""Context-parallel ranks that share a row: whole images dealt to them, gradients as of one rank."""

import itertools

import numpy as np
import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.context_images import deal_images, encode_dealt
from support.cases import for_each
from support.ranks import run_ranks


def test_images_are_dealt_whole_and_nearly_evenly():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 4):
        for count in (0, 1, 3, 7, 40):
            loads = rng.integers(4, 2000, count).tolist()
            ranks = deal_images(loads, size)
            assert sorted(itertools.chain(*ranks)) == list(range(count))
            assert all(images == sorted(images) for images in ranks)
            totals = [sum(loads[image] for image in images) for images in ranks]
            bound = max(sum(loads) / size, max(loads, default=0))
            assert max(totals) <= bound * 4 / 3 + 1e-9 or count <= 2 * size


@for_each(("size", "scheme"), [(2, "zigzag"), (2, "head_tail"), (2, "ulysses"), (4, "zigzag")])
def test_gradients_of_ranks_that_share_a_row_are_those_of_one(tmp_path, size, scheme):
    pytest.importorskip("transformers")
    from support.frameworks.context_ranks import train  # noqa: PLC0415
    from support.models.tiny_models import make_batch, make_model, run_alone  # noqa: PLC0415

    # three images for four ranks: one of them is dealt none
    counts = [2, 0, 1]
    folder = tmp_path / f"{scheme}-{size}"
    folder.mkdir()
    results = run_ranks(folder, size, train, counts, scheme, str(folder / "gradients"))
    model = make_model("qwen2_vl")
    batch = make_batch("qwen2_vl", counts, seed=3, num_loss_tokens=7)
    loss = run_alone("qwen2_vl", model, batch, batch.loss_normalizer)
    assert [result["loss"] for result in results] == pytest.approx([loss] * size, rel=1e-5)
    gradients = torch.load(folder / "gradients")
    scale = max(float(weight.grad.norm()) for weight in model.parameters())
    for name, weight in model.named_parameters():
        difference = float((gradients[name] - weight.grad).norm())
        assert difference <= 1e-5 * float(weight.grad.norm()) + 1e-7 * scale, name


def bad_calls(said):
    for loads, num_tokens in (([], []), ([4, 8], [1])):
        with pytest.raises(ConfigError, match="one per image of a row"):
            encode_dealt(lambda images: torch.zeros(0, 2), loads, num_tokens)
    with pytest.raises(ConfigError, match=r"encode gave 3 embeddings for the images \[0\].* 1"):
        encode_dealt(lambda images: torch.zeros(3, 2), [4], [1])
    said["done"] = True


def test_lists_that_do_not_fit_are_refused(tmp_path):
    assert run_ranks(tmp_path, 1, bad_calls) == [{"done": True}]

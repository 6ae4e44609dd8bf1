"""Real documents through the pipeline: the losses and weights of transformers alone, saved and
continued elsewhere.
"""

from dataclasses import dataclass, field
from itertools import islice

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from support.builds.manuals_build import (
    SAMPLES,
    build_manuals,
    choose_samples,
    image_names,
)
from support.models.manuals_models import endless, load, make_model, train_alone
from support.rank_programs.manuals_ranks import SAVED_BEHIND, STEPS, Run, train_on_two_ranks
from support.ranks import run_ranks, what_they_said

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.slow,
]

TOLERANCE = 1e-6
"""Of losses and weights, relative; float32, over several steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how two ranks run it before and after it was saved."""

    name: str
    num_layers: int
    borders: tuple[int, ...]
    others: tuple[int, ...]
    options: dict = field(default_factory=dict)


CASES = (
    # first cut inside the vision encoder, then inside the language model
    Case(name="llava", num_layers=8, borders=(0, 2, 8), others=(0, 6, 8)),
    # then four stages, two a rank, so that both parts lie on both
    Case(
        name="internvl",
        num_layers=9,
        borders=(0, 3, 9),
        others=(0, 2, 4, 7, 9),
        options={"schedule": "interleaved", "stages_per_rank": 2},
    ),
    # with tied embeddings on two ranks, then on one
    Case(name="qwen2_vl", num_layers=9, borders=(0, 6, 9), others=(0, 2, 9)),
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a case."""

    case: Case
    folder: object
    expected: list
    """Losses of transformers alone."""
    alone: dict
    """Weights that it trained, by name."""
    said: list
    """What each of two ranks said."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def trained(request, shared):
    case = request.param
    folder = shared(f"manuals-{case.name}", lambda folder: train_all(case, folder))
    expected, alone = torch.load(folder / "alone.pt")
    said = what_they_said(folder, 2)
    return Trained(case=case, folder=folder, expected=expected, alone=alone, said=said)


def train_all(case, folder):
    """Transformers alone, then two ranks."""
    expected, model = train_alone(case.name, load(build_manuals(folder, case.name)), STEPS)
    named = model.named_parameters()
    used = {name: weight.detach() for name, weight in named if weight.grad is not None}
    torch.save((expected, used), folder / "alone.pt")
    arguments = case.name, str(folder), case.borders, case.others, case.options
    run_ranks(folder, 2, train_on_two_ranks, *arguments)


def assert_same(losses, expected):
    assert len(losses) == len(expected)
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        assert loss == pytest.approx(wanted, rel=TOLERANCE), f"step {step}"


def test_steps_hold_samples_without_images_with_one_and_with_several_of_many_sizes(trained):
    num_images = {sample["id"]: len(image_names(sample)) for sample in choose_samples()}
    counts, sizes, rows, lengths = set(), set(), set(), set()
    for batches in islice(endless(load(trained.folder / "build", images="encoded")), STEPS):
        for batch in batches:
            own = [num_images[sample] for sample in batch.sample_ids]
            assert sum(own) == len(batch.image_sizes)
            counts |= set(own)
            sizes |= set(map(tuple, batch.image_sizes.tolist()))
            grids = batch.image_grid_thw
            rows |= set((batch.patches_per_image if grids is None else grids.prod(1)).tolist())
            lengths.add(len(batch.input_ids))
    assert counts == set(SAMPLES)
    assert len(sizes) > 5
    assert len(lengths) > 3
    # LLaVA sees every image as one patch, InternVL cuts some into several, Qwen2-VL takes each as
    # it is
    least = {"llava": 1, "internvl": 2, "qwen2_vl": 6}[trained.case.name]
    assert len(rows) >= least
    assert min(rows) >= 1
    assert (rows == {1}) == (trained.case.name == "llava")


def test_two_ranks_train_with_the_losses_of_transformers_alone(trained):
    for said in trained.said:
        assert_same(said["losses"], trained.expected)
    # and they depend on the steps
    assert max(trained.expected) > 1.01 * min(trained.expected)


def test_saved_and_reloaded_with_other_stages_it_goes_on_with_the_same_losses(trained):
    for said in trained.said:
        assert said["goes on behind"] == SAVED_BEHIND
        assert_same(said["continued"], said["losses"][SAVED_BEHIND:])


def test_saved_by_two_ranks_one_goes_on_with_the_same_losses(trained):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        folder, case = trained.folder, trained.case
        run = Run(
            case.name, folder / "build", (0, case.num_layers), seed=2, state=folder / "states"
        )
        assert run.step == SAVED_BEHIND
        assert_same(run.train(STEPS), trained.said[0]["losses"][SAVED_BEHIND:])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("file", ["weights.pt", "continued.pt"])
def test_weights_come_out_as_those_of_transformers(trained, file):
    weights = torch.load(trained.folder / file)
    model = make_model(trained.case.name, load(trained.folder / "build"))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert weights.keys() == before.keys()  # tied ones once
    used = trained.alone.keys()
    for name, expected in trained.alone.items():
        off = float((weights[name] - expected).norm() / expected.norm())
        assert off <= TOLERANCE, f"{name} off by {off:.1e}"
        assert not torch.equal(weights[name], before[name]), name
    # LLaVA looks at its vision encoder's last layer but one: what is behind it is never run
    unused = before.keys() - used
    assert all("layers.2." in name or "post_layernorm" in name for name in unused)
    assert bool(unused) == (trained.case.name == "llava")

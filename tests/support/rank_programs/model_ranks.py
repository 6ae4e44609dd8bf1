"""What each rank runs for `test_models`: a model of transformers in a pipeline beside the same
training alone.
"""

import os
import random
from dataclasses import dataclass, field, replace
from itertools import chain
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from isobatch.engine.runtime.communication.collectives import broadcast
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.models.weights import gather_shards, names_of, state_dict_of
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from support.models import video_samples
from support.models.family_models import (
    FAMILIES,
    make_family_batch,
    make_family_model,
    run_family_alone,
)
from support.models.tiny_models import lazy_model, make_batch, make_model, run_alone
from support.ranks import on_ranks

STEPS = [[(1, 0), (0, 0), (2,)], [(0,), (1,)], [(), (1, 1, 0), (0, 3), (1,)]]
"""Images of each sample of each micro-batch of each step; some without images, one without
samples.
"""
_drawn = random.Random(4)
STEPS += [
    [tuple(_drawn.choices(range(4), k=_drawn.randint(1, 3))) for _ in range(2)]
    for _ in range(int(os.environ.get("ISOBATCH_TEST_DRAWS", "0")) // 2)
]


VIDEO_STEPS = [["v", "t t", "iv"], ["", "vi t"], ["l v", "i"]]
"""Words of `video_samples.make_samples` for each micro-batch, one per sample."""


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model and its pipeline."""

    name: str
    borders: tuple[int, ...]
    recompute: tuple[int, ...] = ()
    """Places of layers."""
    options: PipelineOptions = field(default_factory=PipelineOptions)
    tied: bool = False
    frozen: str | None = None
    """A part of the model."""
    videos: bool = False
    tolerance: float = 1e-5
    """Of losses and weights, relative."""


def run_model_cases(folder: str, cases: list[ModelCase]) -> None:
    """Run all cases on two ranks; the first failure of any is raised."""
    on_ranks(2, folder, _run_all, cases)


def _run_all(cases: list[ModelCase]) -> None:
    for case in cases:
        try:
            _run_case(case)
        except Exception as error:
            raise AssertionError(f"{case.name}, rank {dist.get_rank()}: {error}") from error


def _run_case(case: ModelCase) -> None:
    """Steps with an optimizer in the pipeline and alone; losses and, in the end, all weights must
    agree. Each rank of the pipeline reads its own layers from a folder.
    """
    alone = made(case)
    with TemporaryDirectory() as local:
        folder = broadcast(local)
        alone.save_pretrained(folder, max_shard_size="30KB")  # the first rank does
        dist.barrier()
        piped, weights = lazy_model(alone, folder)
        _run_steps(case, piped, weights, alone)


def _run_steps(case, piped, weights, alone):
    if case.frozen is not None:
        for model in (piped, alone):
            model.get_submodule(case.frozen).requires_grad_(False)
    layered = from_transformers(piped)
    layers = layered.layers
    layered = replace(layered, load=lambda index: weights.fill(layers[index].parameters()))
    recompute = [place in case.recompute for place in range(len(layered.layers))]
    pipeline = Pipeline(layered, case.borders, recompute, [[0, 1]], case.options)
    local = {weight for layer in pipeline.layers.values() for weight in layer.parameters()}
    assert {weight for weight in piped.parameters() if not weight.is_meta} == local
    optimizers = [
        torch.optim.SGD(part, lr=1e-3, momentum=0.9)
        for part in (pipeline.parameters(), alone.parameters())
    ]
    for step in range(len(VIDEO_STEPS if case.videos else STEPS)):
        batches, normalizer, run_alone = functions_of(case, step)
        expected = run_alone(alone)
        found = pipeline.step(batches, normalizer).loss
        assert abs(found - expected) <= case.tolerance * expected, (
            f"step {step}: loss {found}, not {expected}"
        )
        pipeline.reduce_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pipeline.gather_weights()
    local = state_dict_of(pipeline.layers, names_of(piped, layers))
    shards = list(gather_shards(piped, local, weights.value, max_bytes=4096))
    assert len(shards) > 5
    gathered = {name: value for shard in shards for name, value in shard.items()}
    assert bool(gathered) == (dist.get_rank() == 0)
    if gathered:
        _compare(gathered, alone, made(case), case.tolerance)


def made(case, seed=0):
    if case.videos:
        return video_samples.make_video_model(case.name)
    if case.name in FAMILIES:
        return make_family_model(case.name, seed=seed)
    return make_model(case.name, tied=case.tied, seed=seed)


def functions_of(case, step):
    """A step's batches, its labels, and model -> loss, with gradients, of each sample alone."""
    if case.videos:
        return video_step(case.name, step)
    make, run = (
        (make_family_batch, run_family_alone) if case.name in FAMILIES else (make_batch, run_alone)
    )
    seeds = range(10 * step, 10 * step + len(STEPS[step]))
    batches = [
        make(case.name, own, seed=seed) for own, seed in zip(STEPS[step], seeds, strict=True)
    ]
    labels = sum(int((batch.labels >= 0).sum()) for batch in batches)
    return (
        batches,
        labels,
        lambda model: sum(run(case.name, model, batch, labels) for batch in batches),
    )


def video_step(name, step):
    """`functions_of`, with videos; pixels are there on the first rank only."""
    made = [
        video_samples.make_samples(name, kinds.split(), seed=10 * step + place)
        for place, kinds in enumerate(VIDEO_STEPS[step])
    ]
    made = broadcast(made)  # an encoder with threads does not always write the same video
    batches = [video_samples.packed(name, samples) for samples in made]
    labels = sum(int((batch.labels[1:] >= 0).sum()) for batch in batches)
    if dist.get_rank():
        batches = [replace(batch, pixel_values=batch.pixel_values[:0]) for batch in batches]

    def run(model):
        total = 0.0
        for sample in chain.from_iterable(made):
            given = video_samples.alone(name, sample) | {"num_items_in_batch": labels}
            loss = model(**given).loss
            loss.backward()
            total += loss.item()
        return total

    return batches, labels, run


def _compare(gathered, alone, before, tolerance):
    """Weights that were trained have moved, and all are where they are without a pipeline."""
    expected, old = dict(alone.named_parameters()), before.state_dict()
    assert sorted(gathered) == sorted(expected)
    for name, tensor in expected.items():
        off = float((gathered[name] - tensor).norm() / tensor.norm())
        assert off <= tolerance, f"{name} off by {off:.1e}"
    trained = [name for name, weight in alone.named_parameters() if weight.requires_grad]
    moved = [name for name in trained if not torch.equal(gathered[name], old[name])]
    assert len(moved) > len(trained) // 2

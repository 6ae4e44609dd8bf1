"""What a step planner tells the trainer, and how long it took: with the step that it belongs to,
whoever fetches it.
"""

import time
from itertools import islice

import pytest
from torch.utils.data import DataLoader

from isobatch.balance.steps.step_planner import StepAssignment
from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.integrations.torch_dataset import StepDataset
from support.builds.sample_tables import path_groups, text_samples, write_tabled
from support.loading.step_planners import repack

DP, PLANNING_S = 2, 0.002


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return write_tabled(tmp_path_factory.mktemp("packed") / "build", path_groups(text_samples(120)))


def noting(samples):
    """As `repack`; each rank is told how long its samples are."""
    work = repack(samples)
    notes = tuple(
        (rank, samples.counts.seq_len[own.samples].tolist())
        for rank, own in enumerate(work.micro_batches)
    )
    return StepAssignment(micro_batches=work.micro_batches, notes=notes)


def noting_slowly(samples):
    end = time.perf_counter() + PLANNING_S
    while time.perf_counter() < end:
        pass
    return noting(samples)


def load(build, rank=0, **options):
    given = {"dp_rank": rank, "dp_world_size": DP, "micro_batches_per_step": 2, "planner": noting}
    return StreamingLoader(build, **given | options)


def lengths(step):
    return [length for batch in step for length in batch.cu_seqlens.diff().tolist()]


def fetched(dataset, workers):
    """Steps that torch's DataLoader fetched."""
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    return [step.micro_batches for step in islice(loader, len(dataset.loader))]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_gets_its_own_note_with_the_step_that_it_is_of(build, workers):
    for rank in range(DP):
        loader = load(build, rank, workers=workers)
        steps = list(loader)
        assert len(steps) > 6
        assert [step.note for step in steps] == [(rank, lengths(step)) for step in steps]


@pytest.mark.parametrize("workers", [0, 1])
def test_notes_travel_with_their_steps_through_a_data_loader_and_to_a_device(build, workers):
    expected = [step.note for step in load(build)]
    steps = fetched(StepDataset(load(build)), workers)
    assert [step.note for step in steps] == expected
    step = next(iter(StepDataset(load(build))))  # endless
    assert step.to("cpu").micro_batches.note == expected[0]


def test_notes_go_on_where_a_run_was_resumed(build):
    expected = [step.note for step in load(build)]
    loader = load(build, workers=2)
    _ = list(islice(loader, 3))
    resumed = load(build)
    resumed.load_state_dict(loader.state_dict())
    loader.close()
    assert [step.note for step in resumed] == expected[3:]


def test_without_a_planner_or_notes_there_is_none(build):
    for planner in (None, repack):
        assert {step.note for step in load(build, planner=planner)} == {None}


def test_notes_for_other_ranks_than_there_are_are_refused(build):
    def wrong(samples):
        return StepAssignment(micro_batches=repack(samples).micro_batches, notes=("alone",))

    with pytest.raises(ConfigError, match="gave notes to 1 ranks; there are 2"):
        next(iter(load(build, planner=wrong)))


def test_planned_steps_and_their_time_are_those_of_the_steps_that_the_trainer_got(build):
    loader = load(build, planner=noting_slowly, workers=1)
    taken = islice(loader, 3)
    found = []
    for _ in taken:
        stats = loader.stats()
        found.append((stats.steps, stats.planned_steps, stats.planning_s))
    loader.close()
    assert [count[:2] for count in found] == [(1, 1), (2, 2), (3, 3)]
    assert all(seconds >= steps * PLANNING_S for steps, _, seconds in found)
    plain = load(build, planner=None)
    assert len(list(plain)) == plain.stats().steps
    assert (plain.stats().planned_steps, plain.stats().planning_s) == (0, 0.0)

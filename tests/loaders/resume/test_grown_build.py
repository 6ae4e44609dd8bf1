"""States of a build that has grown since: the epoch goes on without the new data, or with it."""

import contextlib
import shutil
import warnings
from collections import Counter

import pytest

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.packer.changes.remove import remove_samples
from isobatch.packer.changes.sample_names import SampleNames
from support.builds.packed import quiet
from support.builds.raw_data import record, write_dataset
from support.growing.halves import add, pack, samples_of, write_halves

OPTIONS = {
    "plain": {},
    "random": {"balance": 0.0, "micro_batches_per_step": 3},
    "regroup": {"regroup": "epoch", "regroup_window": 64},
    "split": {"split": "train", "validation_fraction": 0.3},
    "drop": {"remainder": "drop", "micro_batches_per_step": 2},
    "square": {"loss_weights": "square"},
}


@pytest.fixture(scope="module")
def halves(shared):
    return shared("halves", write_halves)


@pytest.fixture(scope="module")
def builds(halves, shared):
    """(a build of the first half, the same with the second added)"""

    def make(folder):
        pack(halves, folder / "old", max_seq_len=768)
        shutil.copytree(folder / "old", folder / "new")
        add(halves, folder / "new")

    folder = shared("old and grown", make)
    return folder / "old", folder / "new"


def steps_of(loader):
    return [sorted(name for batch in step for name in batch.sample_ids) for step in loader]


def begun(place, steps, **options):
    """(what the first steps of an epoch had, the state after them)"""
    with contextlib.closing(StreamingLoader(place, **options)) as loader:
        iterator = iter(loader)
        return [sorted(n for b in next(iterator) for n in b.sample_ids) for _ in range(steps)], (
            loader.state_dict()
        )


@contextlib.contextmanager
def resumed(place, state, **options):
    with contextlib.closing(StreamingLoader(place, **options)) as loader:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader.load_state_dict(state)
        loader.said = [str(warning.message) for warning in said]
        yield loader


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_epoch_in_progress_ends_as_in_the_old_build_and_the_next_has_all(builds, options):
    old, new = builds
    with contextlib.closing(StreamingLoader(old, **options)) as loader:
        whole = steps_of(loader)
    first, state = begun(old, 3, **options)
    assert whole[:3] == first
    with resumed(new, state, **options) as loader:
        assert "they come with the next epoch" in loader.said[0]
        assert steps_of(loader) == whole[3:]
        later = steps_of(loader)
    with contextlib.closing(StreamingLoader(new, **options)) as fresh:
        fresh.set_epoch(1)
        assert later == steps_of(fresh)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_rest_of_an_epoch_has_the_new_data_shuffled_in_and_nothing_twice(builds, options):
    old, new = builds
    wanted = samples_in_an_epoch(new, **options)
    first, state = begun(old, 3, **options)
    with resumed(new, state, added="now", **options) as loader:
        assert "they come now" in loader.said[0]
        assert loader.epochs_vary
        rest = steps_of(loader)
        dropped = loader.num_dropped_samples
        assert loader.epoch == 1
    seen = Counter(name for step in (*first, *rest) for name in step)
    assert set(seen.values()) == {1}
    assert len(seen) + dropped == len(wanted)
    assert seen.keys() <= wanted
    if len(rest) > 4:  # the new ones are not at the end
        half = {name for step in rest[: len(rest) // 2] for name in step}
        assert half & (wanted - samples_of(old))


@pytest.mark.parametrize("added", ["next_epoch", "now"])
@pytest.mark.parametrize(
    "options", [OPTIONS["plain"], OPTIONS["regroup"]], ids=["plain", "regroup"]
)
def test_it_resumes_in_the_middle_on_other_ranks_and_after_growing_again(
    builds, options, added, tmp_path
):
    old, new = builds
    first, state = begun(old, 3, **options)
    with resumed(new, state, added=added, **options) as loader:
        iterator = iter(loader)
        second = [sorted(n for b in next(iterator) for n in b.sample_ids) for _ in range(2)]
        state = loader.state_dict()
        rest = steps_of(loader)
    with resumed(new, state, added=added, **options) as loader:
        assert not loader.said
        assert steps_of(loader) == rest
    ranks = []
    for rank in range(2):
        with resumed(new, state, added=added, dp_rank=rank, dp_world_size=2, **options) as loader:
            ranks += [name for step in steps_of(loader) for name in step]
    assert sorted(ranks) == sorted(name for step in rest for name in step)
    # the build grows once more
    rows = [record(5000 + number, answer="word " * 40) for number in range(60)]
    write_dataset(tmp_path / "third", rows)
    again = shutil.copytree(new, tmp_path / "again")
    add(tmp_path, again, "third")
    with resumed(again, state, added=added, **options) as loader:
        after = [name for step in steps_of(loader) for name in step]
        following = [name for step in steps_of(loader) for name in step]
    seen = [name for step in (*first, *second) for name in step]
    third = {f"s{5000 + number}" for number in range(60)}
    expected = samples_of(again) if added == "now" else samples_of(old)
    assert sorted(seen + after) == sorted(expected)
    assert set(following) == samples_of(again) > third


def test_a_state_between_epochs_begins_the_next_with_all(builds):
    old, new = builds
    steps = len(samples_in_steps(old))
    _, ended = begun(old, steps)
    _, not_begun = begun(old, 0)
    for added in ("next_epoch", "now"):
        with resumed(new, ended, added=added) as loader:
            assert {name for step in steps_of(loader) for name in step} == samples_of(new)
            assert loader.epoch == 2
        with resumed(new, not_begun, added=added) as loader:
            assert {name for step in steps_of(loader) for name in step} == samples_of(new)
            assert loader.epoch == 1


def test_states_that_do_not_fit_are_refused(builds, halves, tmp_path):
    old, new = builds
    _, state = begun(old, 2)
    limited = begun(old, 2, limit=50)[1]
    with (
        contextlib.closing(StreamingLoader(new, limit=50)) as loader,
        pytest.raises(ConfigError, match="belongs to another build"),
    ):
        loader.load_state_dict(limited)
    with (
        contextlib.closing(StreamingLoader([new, old])) as loader,
        pytest.raises(ConfigError, match="belongs to another build"),
    ):
        loader.load_state_dict(state)
    smaller = shutil.copytree(new, tmp_path / "smaller")
    remove_samples(str(smaller), SampleNames(ids=("id-003",)), quiet(), workers=1)
    with (
        contextlib.closing(StreamingLoader(smaller)) as loader,
        pytest.raises(ConfigError, match="before samples were removed"),
    ):
        loader.load_state_dict(state)
    for damage in ({"stream": {"consumed": "x"}}, {"epoch": "x"}, {"stream": {"spare": [10**9]}}):
        with contextlib.closing(StreamingLoader(new)) as loader, pytest.raises(ConfigError):
            loader.load_state_dict(state | damage)
    with pytest.raises(ConfigError, match="added"):
        StreamingLoader(new, added="later")


def samples_in_steps(place, **options):
    with contextlib.closing(StreamingLoader(place, **options)) as loader:
        return steps_of(loader)


def samples_in_an_epoch(place, **options):
    """All samples that an epoch may have, those that it drops among them."""
    options = {name: value for name, value in options.items() if name != "remainder"}
    return {name for step in samples_in_steps(place, **options) for name in step}

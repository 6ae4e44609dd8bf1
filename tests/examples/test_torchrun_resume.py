"""Real processes: four ranks killed in the middle of an epoch, and two or three that go on with
what is left.
"""

import shutil
from collections import Counter

import pytest
import torch

from isobatch.loaders import StreamingLoader
from support import TESTS
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import kill_once, launch, start

NUM_SAMPLES = 200
SAVE_EVERY = 2

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def samples():
    return make_samples(NUM_SAMPLES)


@pytest.fixture(scope="module")
def build(samples, tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("packed") / "build", group_samples(samples))


def train(build, state, ids, steps):
    """The script and its arguments."""
    script = TESTS / "support" / "trainers" / "tiny_training.py"
    options = ("--save-every", SAVE_EVERY, "--micro-batches-per-step", 1, "--steps", steps)
    return script, ids, build, state, *options


@pytest.fixture(scope="module")
def killed(build, tmp_path_factory):
    """The state file and the ids that four ranks left when all of them were killed in the middle of
    the epoch.
    """
    root = tmp_path_factory.mktemp("killed")
    state, ids = root / "state.pt", root / "ids"
    ranks = start(4, root, *train(build, state, ids, 10_000))
    # between two saves, so that some steps are lost with the processes and have to be given again
    lines = ids / "000000-rank-0.txt"
    kill_once(ranks, lambda: len(trained_steps(lines)) > 2 * SAVE_EVERY)
    return state, ids


def trained_steps(path):
    """The steps that have lines in a file of ids."""
    return {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()


@pytest.mark.parametrize("processes", [2, 3])
def test_killed_ranks_are_continued_by_another_number_of_them(
    build, samples, killed, tmp_path, processes
):
    state, ids = tmp_path / "state.pt", tmp_path / "ids"
    shutil.copy(killed[0], state)
    saved = torch.load(state)
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=processes)
    loader.load_state_dict(saved["loader"])
    assert loader.epoch == 0
    assert saved["steps"] >= 2 * SAVE_EVERY
    remaining = loader.remaining_steps
    assert 0 < remaining < len(loader)
    result = launch(processes, tmp_path / "printed", *train(build, state, ids, remaining))
    assert f"step {saved['steps'] + remaining} " in result.stdout, result.stderr
    before = [
        line.split() for file in killed[1].iterdir() for line in file.read_text().splitlines()
    ]
    kept = [sample_id for step, sample_id in before if int(step) < saved["steps"]]
    after = [line.split()[1] for file in ids.iterdir() for line in file.read_text().splitlines()]
    assert len(list(ids.iterdir())) == processes
    assert kept
    assert Counter(kept + after) == Counter(sample.sample_id for sample in samples)

"""SIGTERM saves and ends on all ranks, a second one ends at once, a kill in a save loses nothing
but steps, and an error is one line of one rank.
"""

import json
import os
import signal
import time

import pytest
import torch

from isobatch.engine.runtime.checkpoints.training_state import PROGRESS_NAME, newest_state
from isobatch.engine.train import shutdown
from support import ROOT
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.ranks import kill_once, launch, process, start

TERMINATED, MORE, DEADLINE_S = 143, 4, 120
"""MORE: steps after a resume that are compared."""
STEPS = 20
"""Of the run that they are compared with, at least."""
COMMAND = ("engine", "train")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""Starts ranks of its own."""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(100))
    return write_tabled(tmp_path_factory.mktemp("packed") / "build", groups)


def given(build, folder, name, **options):
    """A call's arguments, with its figures in `NAME.jsonl`."""
    every = {"plan": "auto", "device": "cpu", "figures": folder / f"{name}.jsonl", **options}
    return [build, *(f"--{key.replace('_', '-')}={value}" for key, value in every.items())]


def losses(folder, name):
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def wait_until(is_time):
    deadline = time.monotonic() + DEADLINE_S
    while not is_time():
        assert time.monotonic() < deadline, "its time did not come"
        time.sleep(0.005)


def ended(ranks):
    """Exit statuses of ranks that end by themselves."""
    try:
        for rank in ranks:
            rank.join(DEADLINE_S)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def whole(shared, build):
    """Losses of a run that nobody stopped, by its replicas and of so many steps at least."""

    def losses_of(least, dp):
        steps = STEPS * -(-least // STEPS)

        def train(folder):
            arguments = given(build, folder, "whole", steps=steps, dp=dp)
            result = launch(2, folder / "printed", *COMMAND, *arguments)
            assert result.returncode == 0, result.stderr

        return losses(shared(f"never-stopped-{dp}-{steps}", train), "whole")

    return losses_of


def assert_resumes_to_the_same_losses(build, folder, whole, dp=1):
    """The newest state, against a run that nobody stopped; -> its steps."""
    newest = newest_state(folder / "state")
    saved = json.loads((newest / PROGRESS_NAME).read_text())["step"]
    steps = {"steps": saved + MORE, "state": folder / "state", "dp": dp}
    result = launch(2, folder / "printed", *COMMAND, *given(build, folder, "resumed", **steps))
    assert result.returncode == 0, result.stderr
    resumed, expected = losses(folder, "resumed"), whole(saved + MORE, dp)
    assert sorted(resumed) == list(range(saved, saved + MORE))
    assert resumed == {step: expected[step] for step in resumed}
    stopped = losses(folder, "stopped")
    assert all(stopped[step] == expected[step] for step in range(saved))
    return saved


@pytest.mark.parametrize("dp", [1, 2])
def test_sigterm_to_any_rank_saves_on_all_and_ends(build, whole, tmp_path, dp):
    """Each time to others, where the run before was stopped."""
    options = {"dp": dp, "state": tmp_path / "state", "steps": 100_000, "save_every": 100_000}
    arguments = given(build, tmp_path, "stopped", **options)
    before = 0
    for victims in [(0,), (1,), (0, 1)]:
        printed = tmp_path / f"printed{victims}"
        ranks = start(2, printed, *COMMAND, *arguments)
        wait_until(lambda before=before: len(losses(tmp_path, "stopped")) > before + 2)
        for victim in victims:
            os.kill(ranks[victim].pid, signal.SIGTERM)
        assert ended(ranks) == [TERMINATED] * 2
        trained = losses(tmp_path, "stopped")
        before = len(trained)
        assert sorted(trained) == list(range(before)), victims
        (line,) = (printed / "stderr").read_text().splitlines()
        assert line == (
            f"error: stopped by SIGTERM after step {before - 1}: saved in {tmp_path / 'state'}; the"
            " same command continues there"
        )
    assert assert_resumes_to_the_same_losses(build, tmp_path, whole, dp) == before


def test_without_a_state_it_ends_after_the_step_and_says_that_nothing_is_saved(build, tmp_path):
    ranks = start(2, tmp_path, *COMMAND, *given(build, tmp_path, "stopped", steps=100_000))
    wait_until(lambda: losses(tmp_path, "stopped"))
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert ended(ranks) == [TERMINATED] * 2
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line.endswith("nothing is saved without --state")


@pytest.mark.slow
def test_torchrun_passes_sigterm_on_and_the_run_resumes(build, whole, tmp_path):
    options = {"state": tmp_path / "state", "steps": 100_000, "save_every": 100_000}
    arguments = given(build, tmp_path, "stopped", **options)
    (launcher,) = start(1, tmp_path, *TORCHRUN, "-m", *COMMAND, *arguments)  # each a new Python
    try:
        wait_until(lambda: len(losses(tmp_path, "stopped")) > 2)
        launcher.terminate()
    finally:
        ended([launcher])
    said = (tmp_path / "stderr").read_text()
    assert said.count("error: stopped by SIGTERM after step") == 1
    assert said.count("error:") == 1
    assert_resumes_to_the_same_losses(build, tmp_path, whole)


def test_a_kill_in_a_save_leaves_a_state_that_resumes_to_the_same_losses(build, whole, tmp_path):
    state = tmp_path / "state"
    options = {"state": state, "steps": 100_000, "save_every": 1}
    ranks = start(2, tmp_path, *COMMAND, *given(build, tmp_path, "stopped", **options))
    kill_once(
        ranks,
        lambda: len(losses(tmp_path, "stopped")) > 3 and list(state.glob("*.new/*")),
        DEADLINE_S,
    )
    # the save before may have been written still
    assert assert_resumes_to_the_same_losses(build, tmp_path, whole) >= 2


def note_signals(folder):
    """Train forever, as far as signals are concerned."""
    stop = shutdown.StopSignal()
    with stop.noting():
        (folder / "ready").touch()
        while True:
            time.sleep(0.01)
            if stop.is_noted:
                (folder / "noted").touch()


def test_a_second_signal_ends_at_once_unless_it_is_the_same_one_twice(tmp_path):
    run = process(note_signals, tmp_path)
    run.start()
    try:
        wait_until((tmp_path / "ready").exists)
        os.kill(run.pid, signal.SIGTERM)
        wait_until((tmp_path / "noted").exists)
        begun = time.monotonic()
        os.kill(run.pid, signal.SIGTERM)  # torchrun's, after the scheduler's
        while run.is_alive():
            assert time.monotonic() < begun + DEADLINE_S
            run.join(0.05)
            if time.monotonic() > begun + shutdown.TOGETHER_S:
                run.terminate()
        assert time.monotonic() > begun + shutdown.TOGETHER_S / 2
        assert run.exitcode == TERMINATED
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"plan": "none.json"}, 1, "none.json: No such file"),
        ({"dp": 2}, 2, "--dp is 2; 3 processes"),
        ({"borders": "0;9"}, 2, "--borders 0;9: give numbers"),
        ({"steps": "few"}, 2, "'--steps'"),
        ({"lr": 1e37, "steps": 3, "micro_batches_per_step": 3}, 1, "the loss is not finite"),
    ],
)
def test_what_is_wrong_on_all_ranks_is_one_line(build, tmp_path, options, status, message):
    result = launch(3, tmp_path, *COMMAND, *given(build, tmp_path, "figures", **options))
    (line,) = result.stderr.splitlines()
    assert message in line
    assert result.returncode == status


def test_a_lost_rank_is_told_once_by_those_that_are_left(build, tmp_path):
    ranks = start(3, tmp_path, *COMMAND, *given(build, tmp_path, "figures", steps=100_000))
    wait_until(lambda: losses(tmp_path, "figures"))
    ranks[1].kill()
    assert ended(ranks) == [1, -signal.SIGKILL, 1]
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert "rank 1 does not answer any more" in line


@pytest.mark.slow
def test_the_fault_of_one_rank_is_told_by_that_rank_alone(build, tmp_path):
    arguments = [build, "--plan=auto", "--device=cpu", "--figures=/dev/full"]  # of the first
    # forked, so that none imports torch again
    command = (*TORCHRUN, "--run-path", "--start-method=fork", ROOT / "engine" / "__main__.py")
    result = launch(1, tmp_path, *command, "train", *arguments, most_s=DEADLINE_S)
    lines = [line for line in result.stderr.splitlines() if "error: " in line]
    assert [line for line in lines if "/dev/full: No space left" in line] == lines[:1] != []
    assert "does not answer" not in result.stderr

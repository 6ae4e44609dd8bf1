"""A rank that dies, a disk that refuses: all ranks say so in one line, soon, and the state before
can be used.
"""

import json
import subprocess
import sys

import pytest
import torch

from isobatch.engine.runtime.checkpoints.training_state import load_state, newest_state
from support import TESTS, child_env
from support.models.toy_model import make_model
from support.rank_programs.rank_saving_faults import damage, fail_while_saving, lose
from support.ranks import run_ranks

SOON_S = 20
torch.set_num_threads(1)


def assert_told(found, kind, *parts):
    assert found["type"] == kind
    assert "\n" not in found["text"]
    for part in parts:
        assert part in found["text"]
    assert found["seconds"] < SOON_S


@pytest.mark.parametrize(
    ("num_ranks", "victim", "when"), [(3, 1, "save"), (2, 0, "save"), (2, 1, "load")]
)
def test_a_rank_that_dies_meanwhile_ends_the_others_who_name_it(tmp_path, num_ranks, victim, when):
    folder = tmp_path / "states"
    said = run_ranks(tmp_path, num_ranks, lose, str(folder), victim, when)
    assert said[victim] is None
    for rank, own in enumerate(said):
        if rank != victim:
            assert_told(
                own["lost"],
                "PeerLost",
                f"rank {rank} stops: rank {victim} does not answer any more",
            )
    # by one process: the state before
    assert newest_state(folder).name == "step-1"
    assert load_state(folder, dict(enumerate(make_model().layers)), None).step == 1


def test_what_one_rank_cannot_write_is_told_by_all_and_training_goes_on(tmp_path):
    said = run_ranks(tmp_path, 2, fail_while_saving, str(tmp_path / "states"))
    for own in said:
        assert_told(
            own["save"],
            "DataError",
            "states/step-2.new cannot be written: ",
            "(rank 1); ",
            "free some space",
        )
        assert own["left"] == ["step-1"]
        assert_told(
            own["no folder"],
            "DataError",
            "file/step-2.new cannot be made: Not a directory (rank 0); ",
        )
        assert own["loaded"] == 1
        assert own["again"] is None
        assert own["newest"] == "step-3"
    assert said[0]["save"]["text"] == said[1]["save"]["text"]


@pytest.mark.slow
def test_a_full_disk_is_told_by_all_and_the_state_before_can_be_used(tmp_path, small_disk):
    disk, inside = small_disk("4m")
    program = TESTS / "support" / "rank_programs" / "rank_saving_faults.py"
    result = subprocess.run(
        [*inside, sys.executable, str(program), str(tmp_path), str(disk)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=child_env(),
    )
    for own in json.loads(result.stdout):
        assert_told(
            own["save"],
            "DataError",
            "step-2.new cannot be ",
            "No space left on device",
            "free some space",
        )
        assert own["left"] == ["filling", "step-1"]
        assert own["loaded"] == 1
        assert own["again"] is None
        assert own["newest"] == "step-2"


def test_a_state_that_one_rank_cannot_read_is_refused_by_all(tmp_path):
    said = run_ranks(tmp_path, 2, damage, str(tmp_path / "states"))
    for own in said:
        assert_told(own["other model"], "ConfigError", "step-1 has it as")
        assert_told(
            own["tensors"],
            "DataError",
            "step-1 cannot be read: ",
            "remove it to use the state before it",
        )
        assert_told(
            own["metadata"],
            "DataError",
            "step-1 cannot be read: ",
            "remove it to use the state before it",
        )
        # ranks are not out of step with each other
        assert own["trains"] > 0

"""Trainers on a dataset that are killed by SIGKILL, and resume from their checkpoint."""

import importlib.util
import json
import os
import signal

import pytest

from support import TESTS
from support.loading.online_data import records
from support.ranks import launch

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "1"))
KINDS = {"trainer": 1, "sft": 1, "lora": 1, "fsdp": 2}
"""Ranks of each kind of trainer."""
NEEDED = ("accelerate", "transformers", "trl", "peft")
if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(lacking)}", allow_module_level=True)


def test_a_killed_training_resumes_with_the_same_losses(tmp_path):
    chosen = KINDS if DRAWS > 1 else {"trainer": 1}  # all of them take minutes
    rows = records(tmp_path, 26 * max(chosen.values()))  # as many steps on several ranks
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for kind, world in chosen.items():
        whole = train(tmp_path, kind, world, f"{kind}-whole")
        steps = len(whole["losses"])
        assert steps > 7
        for kill in range(min(DRAWS, 3)):
            name, step = f"{kind}-{kill}", 3 + 2 * kill  # between two checkpoints, and at one
            train(tmp_path, kind, world, name, step + kill % 2)
            resumed = train(tmp_path, kind, world, name)
            assert resumed == whole, name


def train(folder, kind, world, name, *killed):
    """What a run found; None of one that was killed."""
    script = TESTS / "support" / "trainers" / "killed_training.py"
    logs = folder / f"{name}-logs{len(killed)}"
    result = launch(world, logs, script, kind, folder, name, *killed)
    if killed:
        assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]
        assert list((folder / name).glob("checkpoint-*"))
        return None
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / f"{name}.json").read_text())

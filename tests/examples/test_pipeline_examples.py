"""The pipeline examples on two ranks, by a plan measured on them."""

import re
import subprocess
import sys

import pytest

from support import EXAMPLES, child_env
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(80))
    return write_build(tmp_path_factory.mktemp("packed") / "build", groups)


@pytest.fixture(scope="module")
def measured(build, shared):
    """The folder with a plan for two ranks and the profile that it is by."""

    def measure(folder):
        options = ("--device=cpu", "--micro-batches-per-step=2", "--most-run=1", f"--out={folder}")
        succeed(folder / "ranks", "engine", "measure", build, *options)

    return shared("measured-for-examples", measure)


def succeed(folder, *command):
    """What two ranks print."""
    result = launch(2, folder, *command)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_a_loop_of_ones_own_trains_by_a_plan(build, measured, tmp_path):
    printed = succeed(tmp_path, EXAMPLES / "train_pipeline.py", build, measured / "plan.json")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_with_enough_memory_nothing_is_recomputed(build, measured, tmp_path):
    printed = succeed(tmp_path, EXAMPLES / "adapt_recompute.py", build, measured, 1000)
    assert "recomputed: nothing" in printed


def test_planning_by_the_command_imports_no_torch():
    code = "import sys, isobatch.engine.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=child_env())

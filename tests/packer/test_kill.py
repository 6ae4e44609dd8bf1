"""A build that is killed again and again, at any moment, ends as one that nobody disturbed.

`ISOBATCH_TEST_DRAWS=10` asks for 10 kills, and 5 on Ray.
"""

import contextlib
import importlib.util
import os
import random
import shutil
import time

import pytest

from support import ranks
from support.builds.packed import build, digests
from support.builds.raw_data import (
    CUT,
    good_records,
    options,
    write_dataset,
    write_partitioned,
)
from support.workers.ray_cluster import RUN_S, ray_cluster

KILLS = min(10, int(os.environ.get("ISOBATCH_TEST_DRAWS", "4")))
NEEDS_RAY = [
    pytest.mark.ray,
    pytest.mark.timeout(2 * RUN_S),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install ray",
    ),
]
SCRIPT = """
import os
if __name__ == "__main__":
    os.setsid()  # so that it can be told when all its processes have ended
    from isobatch.packer.cli import main
    main()
"""


def begin(folder, out, executor, **changes):
    """A build's process, forked from one that has imported what it needs."""
    settings = options(folder, out, executor=executor, workers=2, chunk_records=8, format="arrow")
    settings |= changes
    file = out.parent / f"{out.name}.toml"
    file.write_text(
        "\n".join(f"{name} = {value!r}" for name, value in {**settings, "shard_mb": 1}.items())
    )
    script, printed = file.with_suffix(".py"), file.with_suffix(".printed")
    script.write_text(SCRIPT)
    shutil.rmtree(printed, ignore_errors=True)
    (process,) = ranks.start(1, printed, script, "build", "--config", file)
    return process


def run(folder, out, executor, **changes):
    """-> what it wrote to stderr."""
    process = begin(folder, out, executor, **changes)
    process.join(RUN_S)
    said = out.with_name(f"{out.name}.printed").joinpath("stderr").read_text()
    assert process.exitcode == 0, said
    return said


@pytest.fixture(scope="module")
def dataset(shared):
    return shared("to kill", lambda folder: write_dataset(folder, good_records(folder, 240)))


@pytest.fixture(scope="module")
def undisturbed(dataset, shared):
    """(a build, its seconds when kernels are compiled, as they are in those killed)."""

    def make(folder):
        run(dataset, folder / "first", "local")
        started = time.monotonic()
        run(dataset, folder / "out", "local")
        (folder / "seconds").write_text(str(time.monotonic() - started))

    folder = shared("not killed", make)
    return folder / "out", float((folder / "seconds").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=NEEDS_RAY)])
def test_a_build_killed_at_random_moments_goes_on_and_ends_as_if_undisturbed(
    dataset, undisturbed, tmp_path, executor
):
    kills = KILLS // 2 if executor == "ray" else KILLS
    with ray_cluster() if executor == "ray" else contextlib.nullcontext():
        kill_builds(dataset, undisturbed, tmp_path, executor, kills)


def kill_builds(dataset, undisturbed, tmp_path, executor, kills):
    whole, seconds = undisturbed
    draw = random.Random(f"{executor}{time.time_ns()}")  # other moments in every run
    out, moments = tmp_path / "out", []
    for _ in range(kills):
        child = begin(dataset, out, executor)
        moments.append(draw.uniform(0.3, 1.1) * seconds * (2 if executor == "ray" else 1))
        time.sleep(moments[-1])
        child.kill()
        child.join()
        if executor == "local":
            wait_for_end(child.pid)
    run(dataset, out, executor)
    assert digests(out) == digests(whole), f"killed after {moments} s"


@pytest.mark.slow
def test_a_build_of_several_partitions_killed_at_random_moments_ends_as_if_undisturbed(
    shared, tmp_path
):
    raw = shared("partitions raw", write_partitioned)
    whole = shared("partitions packed", lambda folder: build(raw, folder / "out", **CUT)) / "out"
    draw, out, moments = random.Random(), tmp_path / "out", []
    for _ in range(KILLS):
        child = begin(raw, out, "local", **CUT)
        moments.append(draw.uniform(1, 12))
        time.sleep(moments[-1])
        child.kill()
        child.join()
        wait_for_end(child.pid)
    run(raw, out, "local", **CUT)
    (out / "report.html").unlink()  # which the command writes
    assert digests(out) == digests(whole), f"killed after {moments} s"


def wait_for_end(group, timeout=60):
    """Workers notice within moments that nobody leads them any more."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("processes of a killed build are still there")


@pytest.mark.ray
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install ray",
)
def test_ray_counts_to_the_same_bytes(dataset, undisturbed, tmp_path):
    said = run(dataset, tmp_path / "out", "ray")
    assert digests(tmp_path / "out") == digests(undisturbed[0])
    assert "Traceback" not in said


def test_a_build_killed_behind_its_manifest_is_completed_by_the_next_run(
    dataset, undisturbed, tmp_path
):
    out = shutil.copytree(undisturbed[0], tmp_path / "out")
    (out / "report.html").unlink()
    (out / "staging").mkdir()
    (out / "staging" / "samples.arrow").write_bytes(b"left")
    run(dataset, out, "local")
    assert digests(out) == digests(undisturbed[0])
    assert not (out / "staging").exists()

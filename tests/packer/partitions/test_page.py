"""The commands of docs/many_machines.md, word for word, each way to the same build."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from isobatch.packer.verify import require_intact, verify_build
from support import ROOT, child_env
from support.builds.packed import digests, quiet
from support.builds.raw_data import CUT
from support.models.saved_folders import save_folder
from support.workers.ray_cluster import ray_cluster

PAGE = (ROOT / "docs" / "many_machines.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONFIG, MACHINE, SLURM, KUBERNETES, RAY = (text for _, text in BLOCKS)
PARTITIONS = 3


@pytest.fixture(scope="module")
def ways(raw, shared):
    """What the page asks for, `data/` and a model, and the command `packer`."""

    def make(folder):
        (folder / "bin").mkdir()
        command = folder / "bin" / "packer"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m isobatch.packer "$@"\n')
        command.chmod(0o755)
        save_folder("qwen2_5_vl", folder / "model")
        place = new_place(folder, raw, "machine")
        run(place, MACHINE)

    return shared("page of many machines", make)


def new_place(folder: Path, raw: Path, name: str, **more: int) -> Path:
    """A current folder in which the commands can be run; `more` goes into the page's file."""
    place = folder / name
    (place / "Qwen").mkdir(parents=True)
    (place / "Qwen" / "Qwen2.5-VL-3B-Instruct").symlink_to(folder / "model")
    (place / "data").symlink_to(raw)
    small = "".join(f"{key} = {value!r}\n" for key, value in (CUT | more).items())
    (place / "build.toml").write_text(CONFIG + small)
    return place


def run(place: Path, commands: str, **told: str) -> str:
    """Run a block in a shell; -> what it says."""
    path = f"{place.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=place,
        env=child_env(PATH=path, **told),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def assert_same_build(place: Path) -> None:
    require_intact(verify_build(place / "packed", quiet(), workers=1))
    first = place.parent / "machine" / "packed"
    names = {name: digest for name, digest in digests(first).items() if name != "report.html"}
    found = {name: digest for name, digest in digests(place / "packed").items() if name in names}
    assert found == names


def test_one_machine_packs_several_partitions(ways):
    shards = (ways / "machine" / "packed" / "shards").iterdir()
    # and what they have left over is one more
    assert len({path.name.split("-")[1] for path in shards}) == PARTITIONS + 1


def test_jobs_of_slurm_complete_the_build(ways, raw):
    place = new_place(ways, raw, "slurm")
    array = re.search(r"^#SBATCH --array=(\d+)-(\d+)$", SLURM, re.MULTILINE)
    first, last = map(int, array.groups())
    assert f"/{last}\n" in SLURM
    for task in range(first, PARTITIONS + 1):
        said = run(place, SLURM, SLURM_ARRAY_TASK_ID=str(task))
        assert ("completes the build" in said) == (task < PARTITIONS)
    assert_same_build(place)
    assert "is a finished build" in run(place, SLURM, SLURM_ARRAY_TASK_ID=str(last))


def test_a_job_of_kubernetes_completes_the_build(ways, raw):
    job = yaml.safe_load(KUBERNETES)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    bash, option = container["command"]
    (line,) = container["args"]
    assert (bash, option) == ("bash", "-c")
    assert line.endswith(f"/{spec['completions']}")
    # workers inside a share are Slurm's part
    place = new_place(ways, raw, "kubernetes", workers=1)
    for index in reversed(range(PARTITIONS)):
        run(place, line, JOB_COMPLETION_INDEX=str(index))
    assert_same_build(place)


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install ray",
)
def test_ray_completes_the_build(ways, raw):
    place = new_place(ways, raw, "ray")
    with ray_cluster():
        run(place, RAY, RAY_AUTH_MODE="disabled")
    assert_same_build(place)

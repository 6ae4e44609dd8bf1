"""The wheel in an environment of its own, in a folder whose modules have all of our short names."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support import ROOT

pytestmark = pytest.mark.slow

PIP = (sys.executable, "-m", "pip")
NAMES = ("balance", "shards", "configs", "packer", "loaders", "engine")
ONLINE = """
import torch.multiprocessing
from torch import distributed
from isobatch import BalancedLoader


def work(rank, meeting):
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    with open(f"seen.{rank}", "w") as file:
        loader = BalancedLoader("demo", model="tiny", max_tokens=2048)
        for step in loader:
            for batch in step:
                file.writelines(f"{name}\\n" for name in batch.sample_ids)
        print(loader.rejected, file=open(f"rejected.{rank}", "w"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    from pathlib import Path
    torch.multiprocessing.spawn(work, (f"file://{Path('meet').absolute()}",), nprocs=2)
"""
TYPED = """
from isobatch import BalancedLoader, StreamingLoader
from loaders import StreamingLoader as Same

loader = StreamingLoader("packed", seed=1)
for step in loader:
    for batch in step:
        print(batch.input_ids)
also: StreamingLoader = Same("packed")
StreamingLoader("packed", sed=0)
BalancedLoader([], modle="tiny")
"""
MYPY = """
[mypy]
strict = True
[mypy-torch.*,transformers.*,pyarrow.*,datasets.*,numpy.*,numba.*]
follow_imports = skip
"""
"""Types of what we depend on, which take minutes to check, are in no keyword of ours."""
SAME = """
import pickle, sys
sys.path.remove("")
from loaders.integrations.torch_dataset import StepDataset
import engine, loaders, packer, isobatch
assert loaders.StreamingLoader is isobatch.StreamingLoader
assert StepDataset is isobatch.StepDataset is pickle.loads(pickle.dumps(StepDataset))
assert packer.Builder is isobatch.Builder
"""


@pytest.fixture(scope="session")
def wheel(shared):
    def build(folder):
        command = [*PIP, "wheel", "-q", "--no-deps", "-w", folder, ROOT]
        subprocess.run(command, check=True)

    return next(shared("wheel", build).glob("*.whl"))


@pytest.fixture(scope="session")
def scripts(wheel, shared):
    """The folder of the programs of an environment with the wheel and `balance` 0.23.

    What the wheel depends on is that of the tests: a path in a `.pth` brings no checkout along.
    """

    def install(folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = folder / "bin" / "python"
        command = [*PIP, "--python", python, "install", "-q", "--no-deps", wheel, "balance==0.23"]
        subprocess.run(command, check=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": folder}))
        Path(packages, "tests.pth").write_text(sysconfig.get_path("purelib"))
        share_machine_code(packages / "isobatch")

    return shared("environment", install) / "bin"


def share_machine_code(package):
    """Let an installed package keep what is compiled with that of the same files of the checkout.

    Python and numba take it for files of the same time and size only.
    """
    for file in package.rglob("*.py"):
        source = ROOT / "isobatch" / file.relative_to(package)
        if source.read_bytes() == file.read_bytes():
            shutil.copystat(source, file)
    for folder in {file.parent for file in package.rglob("*.py")}:
        shared = ROOT / "isobatch" / folder.relative_to(package) / "__pycache__"
        shared.mkdir(exist_ok=True)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        (folder / "__pycache__").symlink_to(shared)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, with modules and packages of our names that must not be imported."""
    theirs = "raise RuntimeError('a module of the user')\n"
    for name in NAMES:
        if name in ("loaders", "engine"):
            Path(tmp_path, f"{name}.py").write_text(theirs)
        else:
            Path(tmp_path, name).mkdir()
            Path(tmp_path, name, "__init__.py").write_text(theirs)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def run(folder, *command, status=0):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_one_package_and_the_users_three_short_names(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    own = [name for name in names if not name.startswith(("isobatch/", "isobatch-"))]
    assert {name.partition("/")[0] for name in own} == {"packer", "loaders", "engine"}
    assert {name.rpartition("/")[2] for name in own} == {"__init__.py", "__main__.py", "py.typed"}
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("isobatch/**/*.py")}
    for top in ("packer", "loaders", "engine"):
        files |= {f"isobatch/{path.relative_to(ROOT)}" for path in (ROOT / top).rglob("*.py")}
    assert {name for name in names if name.startswith("isobatch/") and name[-3:] == ".py"} == files


def test_a_loader_without_a_build_runs_on_spawned_ranks(scripts, folder):
    Path(folder, "online.py").write_text(ONLINE)
    run(folder, scripts / "python", "online.py")
    seen = [Path(folder, f"seen.{rank}").read_text().splitlines() for rank in (0, 1)]
    assert all(seen)
    assert len(seen[0] + seen[1]) == len({*seen[0], *seen[1]}) == 1_000


def test_the_commands_run(scripts, folder):
    run(folder, scripts / "packer", "build", "--dataset", "demo", "--out", "packed")
    run(folder, scripts / "isobatch", "verify", "packed")
    run(folder, scripts / "isobatch", "plan", "packed", "--pp", "2", "--out", "plan")
    assert Path(folder, "plan", "plan.json").exists()
    # which is what `python -m` finds first: theirs
    run(folder, scripts / "python", "-m", "isobatch", "report", "packed")
    for name in ("arguments", "tiny_vlm", "tiny_internvl", "train_hf_trainer"):
        Path(folder, f"{name}.py").write_text((ROOT / "examples" / f"{name}.py").read_text())
    run(folder, scripts / "python", "train_hf_trainer.py", "packed", "trained", "--steps", "2")
    assert Path(folder, "trained", "checkpoint-2").is_dir()


def test_a_wrong_keyword_is_a_type_error_for_users(scripts, folder):
    Path(folder, "typed.py").write_text(TYPED)
    Path(folder, "mypy.ini").write_text(MYPY)
    command = [scripts / "python", "-m", "mypy", "--cache-dir", "cache", "typed.py"]
    # their own loaders.py hides the short name for the type checker too
    os.remove(folder / "loaders.py")
    lines = run(folder, *command, status=1).splitlines()
    assert [line.partition(" error:")[0] for line in lines if "error" in line][:-1] == [
        "typed.py:10:",
        "typed.py:11:",
    ]
    assert 'did you mean "seed"?' in "".join(lines)


def test_short_names_are_the_same_modules_where_nothing_hides_them(scripts, tmp_path):
    run(tmp_path, scripts / "python", "-c", SAME)

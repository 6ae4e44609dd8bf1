"""Everything that must hold before a commit: format, lint, import contracts, types, tests. The same
here and in CI.

    python scripts/check.py [pytest arguments]

Stops at the first check that fails, with its exit status. Types are checked while the first tests
run.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent

QUICK = {
    "format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "lint": [sys.executable, "-m", "ruff", "check", "."],
    "imports": [str(SCRIPTS / "lint-imports")],
}
TYPES = [sys.executable, "-m", "mypy"]
# two processes more than cores: a third of the time a test waits for servers or other processes
TESTS = [
    *(sys.executable, "-m", "pytest", "--dist", "worksteal"),
    *("-n", str((os.cpu_count() or 1) + 2)),
]


def main() -> int:
    """Run the checks; -> the exit status of the first that fails, else 0."""
    for name, command in QUICK.items():
        print(f"== {name}", flush=True)
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return failed(name, status)
    print("== types, tests", flush=True)
    types = subprocess.Popen(
        TYPES, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with subprocess.Popen([*TESTS, *sys.argv[1:]], cwd=ROOT) as tests:
        found, _ = types.communicate()
        print(f"\n== types: {found.rstrip()}", flush=True)
        if types.returncode:
            tests.terminate()
            tests.wait()
            return failed("types", types.returncode)
        return failed("tests", tests.returncode) if tests.wait() else 0


def failed(name: str, status: int) -> int:
    """Say which check failed; -> its exit status."""
    print(f"== {name} failed", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

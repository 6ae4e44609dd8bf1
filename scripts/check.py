"""Everything that must hold before a commit: format, lint, types, import contracts, tests. The same
here and in CI.

    python scripts/check.py [pytest arguments]

Stops at the first check that fails, with its exit status.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent

CHECKS = {
    "format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "lint": [sys.executable, "-m", "ruff", "check", "."],
    "types": [sys.executable, "-m", "mypy"],
    "imports": [str(SCRIPTS / "lint-imports")],
    "tests": [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal"],
}


def main() -> int:
    """Run the checks in order; -> the exit status of the first that fails, else 0."""
    for name, command in CHECKS.items():
        print(f"== {name}", flush=True)
        arguments = sys.argv[1:] if name == "tests" else []
        status = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
        if status:
            print(f"== {name} failed", flush=True)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

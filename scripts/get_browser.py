"""Fetches a headless Chromium for the tests that look at pages: 64 MB from the npm registry, 190 MB
unpacked.

    python scripts/get_browser.py

Needs node and npm. Goes to `.browser/` of the repository, which git ignores, and is not fetched
twice. The tests find it there, and any other Chromium in PATH does as well.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".browser"
PROGRAM = FOLDER / "chromium"
PACKAGE = "@sparticuz/chromium@147.0.0"
"""Chromium's headless shell for Linux on x86-64; MIT and BSD."""
UNPACK = 'import("@sparticuz/chromium").then((package) => package.default.executablePath())'
"""Unpacks the program into the folder for temporary files."""
SECONDS = 600


def main() -> int:
    """Fetch and try the browser; -> exit status."""
    if not PROGRAM.exists():
        missing = [name for name in ("node", "npm") if shutil.which(name) is None]
        if missing:
            # no failure: the tests that need it skip, and say so
            print(
                f"{' and '.join(missing)} not found: install Node.js, or any Chromium, "
                "to test pages in a browser"
            )
            return 0
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / ".gitignore").write_text("*\n")
        run("npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", ".", PACKAGE)
        run("node", "-e", UNPACK)
        shutil.rmtree(FOLDER / "node_modules")
    tried = subprocess.run(
        [PROGRAM, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    print(
        tried.stdout.strip()
        or f"{PROGRAM} does not run; remove {FOLDER} to fetch it again: {tried.stderr.strip()}"
    )
    return tried.returncode


def run(*command: str) -> None:
    """Run a command in the folder; CalledProcessError if it fails."""
    subprocess.run(
        command, cwd=FOLDER, env=os.environ | {"TMPDIR": str(FOLDER)}, timeout=SECONDS, check=True
    )


if __name__ == "__main__":
    sys.exit(main())

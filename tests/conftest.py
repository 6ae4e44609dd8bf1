"""Tests mirror the packages; oracles lie beside the tests that use them."""

import sys
from pathlib import Path

for folder in ("balance", "packer", "loaders"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

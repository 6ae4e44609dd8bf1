"""Makes the reference processors of tests/balance importable, also when only this folder is
tested.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "balance"))

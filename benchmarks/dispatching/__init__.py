"""What `benchmarks/dispatch_ablation.py` runs: samples, model and stand-ins, variants of a step,
and the clock.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

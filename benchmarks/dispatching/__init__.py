"""Parts of `benchmarks/dispatch_ablation.py`: samples, models, variants of a step, clock."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

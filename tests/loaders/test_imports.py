"""What a training process does not load: it costs memory in every rank and time before the first
batch.
"""

import subprocess
import sys

from support.builds.shard_fixture import group_samples, make_samples, write_build

PROGRAM = """
import sys
from isobatch.loaders import StreamingLoader
for build, steps in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=1, workers=0)
    assert sum(1 for step in loader) == int(steps)
heavy = {"numba", "pandas", "scipy", "sympy", "pyarrow.parquet", "torch.distributed.fsdp"}
print(*heavy & set(sys.modules))
"""


def test_no_compiler_no_tables_and_no_wrapper_of_models(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    for model in ("tiny", "internvl_1_5", "llava_next"):
        groups = group_samples(make_samples(12, model=model), max_tokens=4096)
        command += [str(write_build(tmp_path / model, groups, model=model)), str(len(groups))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []

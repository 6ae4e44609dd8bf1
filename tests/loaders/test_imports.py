"""What a training process does not load: it costs memory in every rank and time before the first
batch.
"""

import subprocess
import sys

import pytest

from support.builds.shard_fixture import group_samples, make_samples, write_build

PROGRAM = """
import sys
from loaders import StreamingLoader
loader = StreamingLoader(sys.argv[1], dp_rank=0, dp_world_size=1, workers=0)
assert sum(1 for step in loader) == int(sys.argv[2])
print(*{"numba", "pandas", "scipy", "pyarrow.parquet"} & set(sys.modules))
"""


@pytest.mark.parametrize("model", ["tiny", "internvl_1_5", "llava_next"])
def test_no_compiler_and_no_tables(tmp_path, model):
    groups = group_samples(make_samples(12, model=model), max_tokens=4096)
    write_build(tmp_path / "build", groups, model=model)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "build"), str(len(groups))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []

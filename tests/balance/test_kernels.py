"""Kernels need no folder that can be written, and are compiled ahead, once per machine."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isobatch.balance.grouping import compile_ahead
from isobatch.balance.radix_sort import FEW, counting_sort, sort_by

GROUPS = (
    "import numpy as np; from isobatch.balance import group_best_fit;"
    " from isobatch.common.types import Limits;"
    " limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4);"
    " print(len(group_best_fit(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)))"
)


def grouped(prefix: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", prefix + GROUPS]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_kernels_run_where_no_folder_of_a_cache_can_be_written(tmp_path: Path) -> None:
    # a file where a folder must be stops the administrator too; next to the source, a locator that
    # finds no place is what a package of another user is
    file = tmp_path / "file"
    file.write_text("")
    nowhere = (
        "from numba.core.caching import InTreeCacheLocator as tree;"
        " tree.from_function = classmethod(lambda *_: None);"
    )
    folders = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(file), "HOME": str(file)}
    run = grouped(nowhere, **folders)
    assert (run.returncode, run.stdout, run.stderr) == (0, "3\n", "")


@pytest.mark.slow
def test_kernels_run_where_the_cache_cannot_be_written_any_more(tmp_path: Path) -> None:
    full = (
        "from numba.core.caching import IndexDataCacheFile as file;"
        " file.save = lambda *_: open('/dev/full', 'w', 1).write('x\\n');"
    )
    run = grouped(full, NUMBA_CACHE_DIR=str(tmp_path))
    assert (run.returncode, run.stdout, run.stderr) == (0, "3\n", "")


@pytest.mark.slow
def test_what_is_compiled_ahead_is_all_that_grouping_needs(tmp_path: Path) -> None:
    # in another process, for this one has compiled them
    ahead = (
        "from isobatch.balance.grouping import compile_ahead as ahead;"
        " said = []; ahead.begin(); ahead.finish(lambda: said.append(1)); assert said;"
        " ahead.finish(lambda: said.append(2)); assert said == [1], said;"
        " from isobatch.balance.grouping.even_out import group_balanced;"
        " import numpy as np; from isobatch.common.types import Limits;"
        " limits = Limits(max_seq_len=400, max_vision=9, min_seq_len=400, min_vision=9);"
        " rng = np.random.default_rng(0);"
        " group_balanced(rng.integers(0, 8, 99), rng.integers(1, 99, 99), limits, seed=0);"
        " missed = [sum(k.stats.cache_misses.values()) for k in ahead.KERNELS];"
        " assert missed == [0, 0], missed;"
    )
    run = grouped(ahead, NUMBA_CACHE_DIR=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    loaded = (  # the next process finds them in the cache, and loads them beside what it does
        "from isobatch.balance.grouping import compile_ahead as ahead;"
        " said = []; ahead.begin(); ahead.load(); assert ahead._process is None;"
        " ahead.finish(lambda: said.append(1)); assert not said;"
        " assert [sum(k.stats.cache_hits.values()) for k in ahead.KERNELS] == [1, 1];"
        " assert [sum(k.stats.cache_misses.values()) for k in ahead.KERNELS] == [0, 0];"
    )
    run = grouped(loaded, NUMBA_CACHE_DIR=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.thorough
def test_a_build_begins_to_compile_before_its_command_is_loaded(tmp_path: Path) -> None:
    begun = (
        "import sys; sys.argv = ['packer', 'build'];"
        " from isobatch.common import command_line; command_line.run_module = lambda _: None;"
        " from isobatch.packer.__main__ import main; main();"
        " from isobatch.balance.grouping import compile_ahead as ahead;"
        " assert ahead._process.poll() is None; assert 'isobatch.packer.cli' not in sys.modules;"
        " ahead.finish(lambda: None); assert ahead.are_compiled(ahead.KERNELS);"
    )
    run = grouped(begun, NUMBA_CACHE_DIR=str(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")


def test_the_process_that_compiles_ends_with_the_one_that_waits() -> None:
    program = compile_ahead.PROGRAM.replace("compile_all", "_end_with_parent")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


def test_few_numbers_are_sorted_as_many() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        keys = rng.integers(0, 1 << int(rng.integers(1, 32)), int(rng.integers(1, 400)))
        column = keys.astype(np.uint32)
        many = counting_sort(np.arange(len(column), dtype=np.int32), column)
        assert sort_by(column).tolist() == many.tolist()
    column = np.random.default_rng(0).integers(0, 50, FEW + 1).astype(np.uint32)
    assert sort_by(column).tolist() == np.argsort(column, kind="stable").tolist()

"""Builds that repeat a real one are whole builds, and simulated cores pack every partition."""

from pathlib import Path

import numpy as np
import pytest
from scale_index import repeat_build
from scale_packing import NODE, makespan

from isobatch.loaders import StreamingLoader
from isobatch.shards.manifest import read_manifest
from support.builds.sample_tables import write_texts


def test_a_repeated_build_gives_each_of_its_groups_once(tmp_path: Path) -> None:
    (base,) = write_texts(tmp_path, {"a": 60})
    number = repeat_build(Path(base), tmp_path / "repeated", 500)
    manifest = read_manifest(tmp_path / "repeated")
    assert manifest.num_groups == number > 250
    assert len(manifest.shards) > len(read_manifest(base).shards)
    loader = StreamingLoader(tmp_path / "repeated", dp_rank=0, dp_world_size=1)
    names = [name for step in loader for batch in step for name in batch.sample_ids]
    loader.close()
    assert len(names) == manifest.num_packed
    assert {names.count(name) for name in names} == {manifest.num_packed // 60}


@pytest.mark.parametrize("kind", ["even", "stragglers", "losses"])
def test_a_simulated_build_takes_as_long_as_its_work_at_least(kind: str) -> None:
    draw = np.random.default_rng(0)
    for cores in (1, NODE, 5 * NODE + 7):
        times = draw.uniform(500, 1500, 4 * cores + 3)
        span, lost = makespan(times, cores, **({} if kind == "even" else {kind: True}))
        assert span >= max(times.sum() / cores, times.max())
        if kind != "losses":
            assert span <= 3 * (times.sum() / cores + times.max())
            assert not lost
    if kind == "losses":
        assert lost

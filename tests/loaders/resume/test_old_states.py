"""States saved by version 0.1.0 before its redesign resume exactly.

Version 0.1.0 saved `old_loader_states.json` on rank 0 of 2 after 20 steps of two micro-batches,
then resumed on rank 1 of 3 with one micro-batch per step; the digest is of the next 40 steps' ids.
"""

import hashlib
import json
from pathlib import Path

import pytest

from loaders import StreamingLoader
from support.builds.sample_tables import path_groups, text_samples, write_tabled

STATES = json.loads((Path(__file__).parents[2] / "data/old_loader_states.json").read_text())
SIZES = {"a": 200, "b": 120}
WEIGHTS = {"a": 1.0, "b": 0.4}


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.builds.shard_fixture.VERSION", 2)
        for name, size in SIZES.items():
            write_tabled(root / name, path_groups(text_samples(size, name)))
    for name in SIZES:
        manifest = json.loads((root / name / "manifest.json").read_text())
        del manifest["totals"]["num_loss_tokens"]  # a state knows the manifest's hash
        (root / name / "manifest.json").write_text(json.dumps(manifest))
    return {name: root / name for name in SIZES}


def make_loader(builds, saved, rank, world, micro_batches):
    url = [(builds[name], WEIGHTS[name]) for name in saved["builds"]]
    return StreamingLoader(
        url if len(url) > 1 else url[0][0],
        dp_rank=rank,
        dp_world_size=world,
        micro_batches_per_step=micro_batches,
        seed=5,
        workers=0,
        **saved["options"],
    )


def take(loader, count):
    """Sample ids of the next steps, in lists of micro-batches."""
    ids = []
    while len(ids) < count:
        for step in loader:
            ids.append([list(batch.sample_ids) for batch in step])
            if len(ids) == count:
                break
    return ids


@pytest.mark.parametrize("name", STATES)
def test_an_old_state_resumes_with_the_same_samples(builds, name):
    loader = make_loader(builds, STATES[name], rank=1, world=3, micro_batches=1)
    loader.load_state_dict(STATES[name]["state"])
    ids = json.dumps(take(loader, 40)).encode()
    assert hashlib.sha256(ids).hexdigest() == STATES[name]["next_ids_sha256"]


@pytest.mark.parametrize("name", STATES)
def test_the_same_steps_still_give_the_same_state(builds, name):
    loader = make_loader(builds, STATES[name], rank=0, world=2, micro_batches=2)
    take(loader, 20)
    assert loader.state_dict() == STATES[name]["state"]

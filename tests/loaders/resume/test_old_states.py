"""States saved by version 0.1.0, whose order this version does not have: one line, no surprise.

Version 0.1.0 saved `old_loader_states.json` on rank 0 of 2 after 20 steps of two micro-batches.
"""

import json
from pathlib import Path

import pytest

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
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
        **{name: value for name, value in saved["options"].items() if name != "order"},
    )


@pytest.mark.parametrize("name", STATES)
def test_a_state_from_within_an_epoch_is_refused_with_what_to_do(builds, name):
    loader = make_loader(builds, STATES[name], rank=1, world=3, micro_batches=1)
    before = loader.state_dict()
    with pytest.raises(
        ConfigError, match=r"middle of epoch \d.* finish that epoch with 0.1, or start"
    ):
        loader.load_state_dict(STATES[name]["state"])
    assert loader.state_dict() == before


@pytest.mark.parametrize("name", STATES)
def test_a_state_from_the_beginning_of_an_epoch_starts_it(builds, name):
    loader = make_loader(builds, STATES[name], rank=1, world=3, micro_batches=1)
    state = STATES[name]["state"]
    consumed = [0] * 8 if isinstance(state["stream"]["consumed"], list) else 0
    own = {name: loader.state_dict()[name] for name in ("manifest_hash", "regroup")}
    loader.load_state_dict({**state, **own, "epoch": 3, "stream": {"consumed": consumed}})
    assert loader.epoch == 3
    assert len(loader) == loader.remaining_steps


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_build_is_still_told_apart(builds, name):
    loader = make_loader(builds, STATES[name], rank=0, world=1, micro_batches=1)
    state = {**STATES[name]["state"], "stream": {"consumed": 0}, "manifest_hash": "0"}
    with pytest.raises(ConfigError, match="belongs to another build"):
        loader.load_state_dict(state)

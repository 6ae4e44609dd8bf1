"""Ranks that check one another: real processes whose loaders differ in one thing each, and ranks
by a DeviceMesh.
"""

import pytest

from isobatch.common.errors import ConfigError
from isobatch.loaders import LoaderConfig
from isobatch.loaders.ranks.compare import find_difference
from isobatch.loaders.ranks.mesh import data_dims
from isobatch.shards.manifest import read_manifest
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.cases import for_each
from support.rank_programs.rank_checks import disagree, mesh_ranks, with_other_index
from support.ranks import run_ranks

SECONDS = 30
"""With what is compiled when first used; ranks wait for 600."""
MESSAGES = {
    "build": "ranks disagree: the build's manifest is {build} on rank 0, {other} on rank 1;",
    "weights": "weights is [1.0, 0.5] on rank 0, [1.0, 0.25] on rank 1;",
    "seed": "seed is 0 on rank 0, 7 on rank 1; give every rank the same",
    "balance": "balance is 0.5 on rank 0, 0.9 on rank 1;",
    "remainder": "remainder is None on rank 0, 'drop' on rank 1;",
    "regroup": "regroup is None on rank 0, 'epoch' on rank 1;",
    "regroup_window": "regroup_window is 8 on rank 0, 9 on rank 1;",
    "micro_batches_per_step": "micro_batches_per_step is 1 on rank 0, 2 on rank 1;",
    "loss_normalizer": "loss_normalizer is 'epoch' on rank 0, 'step' on rank 1;",
    "planner": "planner is dispatch on rank 0, repack on rank 1;",
    "filter": "samples is ",
    "dp_world_size": "dp_world_size is 2 on rank 0, 3 on rank 1;",
    "dp_rank": "no rank has dp_rank 1 of dp_world_size 2: its samples would be left out",
    "index": "content of the next step is ",
    "state": "steps left in the epoch is ",
    "resumed alone": "steps left in the epoch is ",
    "epoch": "epoch is 1 on rank 0, 6 on rank 1;",
    "before a worker": "seed is 0 on rank 0, 1 on rank 1;",
}
GO_ON = {"agree", "evaluation", "may differ", "next epoch", "same state", "switched off"}
GO_ON |= {f"{victim} {name}" for victim in (0, 1) for name in ("begins", "opens another")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    groups = group_samples(make_samples(60))
    write_tabled(root / "build", groups)
    write_tabled(root / "other", groups[:9])
    with_other_index(root / "build", root / "index")
    return root


def test_ranks_that_disagree_end_with_one_line_in_seconds(folder, tmp_path):
    first, second = run_ranks(tmp_path, 2, disagree, folder)
    hashes = {name: read_manifest(folder / name).hash[:12] for name in ("build", "other")}
    for name, message in MESSAGES.items():
        assert first[name][:2] == second[name][:2], name
        kind, line, _ = first[name]
        assert kind == "ConfigError", (name, line)
        assert message.format(**hashes) in line
        assert "\n" not in line
        assert max(first[name][2], second[name][2]) < SECONDS
    for name in GO_ON:
        assert first[name][1] == second[name][1] == "went on", (name, first[name], second[name])
    assert first["worker"] == second["worker"] == 2
    reason = "state has seed 0, this loader 1: give the loader the seed of the run that saved it"
    for victim, waiting in enumerate((second, first)):
        kind, line, seconds = waiting[f"{victim} refused"]
        assert (kind, line) == ("ConfigError", f"rank {victim} does not resume: {reason}")
        assert seconds < SECONDS
        kind, line, seconds = waiting[f"{victim} has no build"]
        told = (first, second)[victim][f"{victim} has no build"]
        assert (kind, line) == ("ConfigError", f"rank {victim} cannot open its build: {told}")
        assert "nowhere" in told
        assert seconds < SECONDS
        kind, line, seconds = waiting[f"{victim} has a wrong option"]
        told = (first, second)[victim][f"{victim} has a wrong option"]
        assert (kind, line) == ("ConfigError", f"rank {victim} has wrong options: {told}")
        assert told.startswith("balance is 2.0")
        assert seconds < SECONDS
    said = {*MESSAGES, *GO_ON, "worker", "missing", "warnings", "0 had none", "1 had none"}
    said |= {f"{n} has {what}" for n in (0, 1) for what in ("no build", "a wrong option")}
    assert first.keys() == said | {"1 refused"}
    assert second.keys() == said | {"0 refused"}
    for rank, said in enumerate((first, second)):
        kind, line, seconds = said["missing"]
        assert kind == "RankMissing"
        assert f"rank {rank} has waited 1 s for rank {1 - rank} to begin the same epoch" in line
        assert seconds < SECONDS
    (warning,) = first["warnings"]
    assert warning == (
        "rank 0 has waited 0.25 s for rank 1 to begin the same epoch, and waits up to 1 s; where "
        "ranks load on their own, give check_ranks=False"
    )
    assert not second["warnings"]


def test_ranks_of_a_mesh_that_differ_only_in_tp_get_the_same_data(folder, tmp_path):
    ranks = run_ranks(tmp_path, 4, mesh_ranks, folder)
    for way in ("mesh", "group", "submesh", "explicit"):
        assert ranks[0][way] == ranks[1][way] != ranks[2][way] == ranks[3][way]
        assert ranks[0][way] == ranks[0]["mesh"]
        assert ranks[2][way] == ranks[2]["mesh"]
        assert len({*ranks[0][way], *ranks[2][way]}) == 60
    for way in ("flat", "world"):
        assert len({sample for said in ranks for sample in said[way]}) == 60
        assert sum(len(said[way]) for said in ranks) == 60
    assert len({said["other mesh"][1] for said in ranks}) == 1
    assert "ranks disagree: device_mesh is (('dp', 'tp'), " in ranks[0]["other mesh"][1]


@for_each(
    ("names", "chosen", "expected"),
    [
        (["dp", "tp"], None, ["dp"]),
        (["pp", "dp_replicate", "dp_shard", "cp", "tp"], None, ["dp_replicate", "dp_shard"]),
        (["ddp", "tp"], None, ["ddp"]),
        (["fsdp"], None, ["fsdp"]),
        (["0"], None, ["0"]),
        (["tp"], None, []),
        (["replicate", "tp"], "replicate", ["replicate"]),
        (["a", "b", "c"], ["c", "a"], ["a", "c"]),
        (["fsdp", "tp"], None, "fsdp may be data parallel or not; name those that are in dp_dims"),
        (["0", "1"], None, "0 may be data parallel or not"),
        (["dp", "ep"], None, "ep may be"),
        (["dp_shard_cp", "tp"], None, "dp_shard_cp may be"),
        (["dp", "tp"], ["data"], "dp_dims has data; the device_mesh has dp, tp"),
    ],
)
def test_data_parallel_dimensions_are_known_by_name_or_asked_for(names, chosen, expected):
    if isinstance(expected, list):
        assert data_dims(names, chosen) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            data_dims(names, chosen)


def test_thousands_of_ranks_are_named_in_one_line():
    told = {rank: {"dp_world_size": "4096", "dp_rank": str(rank)} for rank in range(4096)}
    assert find_difference(told) is None
    odd = {rank: each | {"seed": str(rank)} for rank, each in told.items()}
    assert find_difference(odd) == (
        "ranks disagree: seed is 0 on rank 0, 1 on rank 1, 2 on rank 2, others on 4093 ranks; give "
        "every rank the same"
    )
    some = {rank: each | {"seed": str(rank in {5, 6, 9})} for rank, each in told.items()}
    assert find_difference(some) == (
        "ranks disagree: seed is False on ranks 0-4, 7-8, 10-4095, True on ranks 5-6, 9; "
        "give every rank the same"
    )
    told[7]["dp_rank"] = "6"
    assert "no rank has dp_rank 7 of dp_world_size 4096" in find_difference(told)


def test_one_way_to_say_which_rank_this_is():
    with pytest.raises(ConfigError, match=r"dp_dims is \['dp'\]; it is for a device_mesh"):
        LoaderConfig(dp_dims=["dp"])

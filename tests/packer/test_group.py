import io
import json

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.errors import ConfigError, DataError
from isobatch.packer.group import group_files, read_lengths
from isobatch.packer.progress import StageProgress
from isobatch.shards.tables import read_groups
from support.cases import for_each

ROWS = [
    {"vit_num": 1, "token_num": 300, "image_flags": 1},
    {"vit_num": 1, "token_num": 80, "image_flags": 0},
]


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def group(files, out, **changes):
    progress = StageProgress(Console(file=io.StringIO()))
    return group_files(
        files,
        out,
        GroupOptions(**changes),
        progress,
        vision_unit="image_patches",
    )


def test_omnibal_lengths_become_counts_without_the_dummy_tile(tmp_path):
    table = read_lengths(write(tmp_path / "ai2d.json", ROWS)).to_pylist()
    assert [row["num_image_patches"] for row in table] == [1, 0]
    assert [row["num_vit_tokens"] for row in table] == [1025, 0]
    assert [(row["num_image_tokens"], row["num_text_tokens"], row["seq_len"]) for row in table] == [
        (256, 44, 300),
        (0, 80, 80),
    ]
    assert [row["sample_id"] for row in table] == ["ai2d:0", "ai2d:1"]


def test_a_meta_file_names_several_length_files_from_its_own_folder_too(tmp_path):
    write(tmp_path / "a.json", ROWS)
    write(tmp_path / "deep" / "b.json", ROWS[:1])
    meta = write(
        tmp_path / "meta.json",
        {
            "one": {"token_lengths": "./a.json"},
            "two": {"token_lengths": "elsewhere/../deep/b.json"},
        },
    )
    (tmp_path / "elsewhere").mkdir()
    assert read_lengths(meta).column("source").to_pylist() == ["one", "one", "two"]


def test_text_only_length_files_need_no_vision_columns(tmp_path):
    table = read_lengths(write(tmp_path / "llm.json", [{"token_num": 70}]))
    assert table.column("num_image_patches").to_pylist() == [0]


def test_several_files_become_one_dataset_of_which_nothing_is_lost(tmp_path):
    files = [write(tmp_path / f"{name}.json", ROWS * 20) for name in "ab"]
    grouping, rejected = group(files, tmp_path / "out", max_seq_len=600)
    counts = pq.read_table(tmp_path / "out" / "counts.parquet")
    groups = read_groups(pq.read_table(tmp_path / "out" / "groups.parquet"))
    assert sorted(groups.samples.tolist()) == list(range(80))
    assert counts.column("position").to_pylist() == list(range(80))
    assert len(rejected) == 0
    assert json.loads((tmp_path / "out" / "limits.json").read_text())["max_seq_len"] == 600
    assert len(grouping.groups) == len(groups)


def test_samples_over_a_cap_are_listed(tmp_path):
    group([write(tmp_path / "a.json", ROWS)], tmp_path / "out", max_seq_len=200)
    rejected = pq.read_table(tmp_path / "out" / "rejected.parquet").to_pylist()
    assert [(row["sample_id"], row["reason"]) for row in rejected] == [
        ("a:0", "longer_than_max_seq_len")
    ]


@for_each(
    ("value", "message"),
    [
        ({"x": {}}, "no `token_lengths`"),
        ({"x": {"token_lengths": "no.json"}}, r"no file no\.json"),
        (3, "expected a list"),
        ([3], "sample 0 is 3"),
        ([{"vit_num": 1}], "token_num is None"),
        ([{"vit_num": 2, "token_num": 100}], "fewer than the 512"),
        ([{"token_num": 2**40}], "token_num is 1099511627776"),
        ([{"vit_num": -1, "token_num": 100}], "is -1"),
    ],
)
def test_what_is_no_length_file_is_one_clear_error(tmp_path, value, message):
    with pytest.raises(DataError, match=message):
        read_lengths(write(tmp_path / "a.json", value))


def test_a_finished_build_is_not_overwritten_by_groups(tmp_path):
    write(tmp_path / "out" / "manifest.json", {})
    with pytest.raises(ConfigError, match="finished build"):
        group([write(tmp_path / "a.json", ROWS)], tmp_path / "out")

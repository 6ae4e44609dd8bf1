"""Mixtures: repeats, weights and limits through whole builds, three layouts in one, presets, and
what is missing.
"""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from isobatch.common.config import preset_names
from isobatch.common.errors import ConfigError, DataError
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources import mixture as mixture_module
from isobatch.packer.sources.dataset import describe_known, find_dataset, print_datasets
from isobatch.packer.sources.mixture import (
    is_meta,
    is_mixture,
    missing_parts,
    read_meta,
    read_mixture,
)
from isobatch.shards.local_folder import LocalFolder
from isobatch.shards.manifest import read_manifest
from support.builds.layouts import write_saved, write_tar
from support.builds.raw_data import options, record, write_dataset, write_image


def build(place, out, **changes):
    """Totals, the samples of all shards and the rejected ones of a build."""
    config = BuildConfig(**options(place, out, max_rejected=1.0, **changes))
    Builder(config, StageProgress(Console(file=io.StringIO()))).build()
    manifest = read_manifest(out).values
    samples = []
    for shard in manifest["shards"]:
        samples += pa.ipc.open_file(str(out / shard["name"])).read_all().to_pylist()
    totals, rejected = manifest["totals"], pq.read_table(out / "rejected.parquet").to_pylist()
    assert (
        totals["num_read"] + totals["num_repeated"] == totals["num_packed"] + totals["num_rejected"]
    )
    assert len(samples) == totals["num_packed"]
    assert len(rejected) == totals["num_rejected"]
    ids = [sample["sample_id"] for sample in samples]
    assert len(set(ids)) == len(ids)
    return totals, {sample["sample_id"]: sample for sample in samples}, rejected


def write_mixture(folder, *entries, **top):
    """A mixture file of entries given as dicts."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    for entry in entries:
        lines += [
            "",
            "[[datasets]]",
            *(f"{key} = {json.dumps(value)}" for key, value in entry.items()),
        ]
    path = folder / "mix.toml"
    path.write_text("\n".join(lines))
    return path


def texts(prefix, count):
    return [record(number) | {"id": f"{prefix}{number}"} for number in range(count)]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Two text datasets of 20 and 30 records, one of them broken in the second."""
    folder = tmp_path_factory.mktemp("raw")
    write_dataset(folder / "a", texts("a", 20))
    write_dataset(folder / "b", [*texts("b", 29), {"id": "bad"}])
    return folder


def numbers(samples):
    """Samples, copies included, whose ids begin with a and with b."""
    return [sum(name.startswith(prefix) for name in samples) for prefix in "ab"]


def test_repeats_make_copies_with_names_of_their_own(raw, tmp_path):
    path = write_mixture(raw, {"dataset": "a", "repeat": 2.5}, {"dataset": "b", "repeat": 0.5})
    totals, samples, rejected = build(path, tmp_path / "out")
    assert numbers(samples) == [50, round(29 * 0.5)]
    assert (totals["num_read"], totals["num_repeated"]) == (50, 30)
    assert {f"a{number}#2" for number in range(20)} <= set(samples)
    assert sum(name.endswith("#3") for name in samples) == 10
    assert sorted({row["reason"] for row in rejected}) == ["no_conversation", "not_drawn"]
    assert sum(row["reason"] == "not_drawn" for row in rejected) == 29 - round(29 * 0.5)
    assert all(samples[f"a{n}"]["input_ids"] == samples[f"a{n}#2"]["input_ids"] for n in range(20))


def test_weights_share_out_the_usable_samples(raw, tmp_path):
    path = write_mixture(raw, {"dataset": "a", "weight": 1}, {"dataset": "b", "weight": 1})
    totals, samples, _ = build(path, tmp_path / "out")
    assert numbers(samples) == [20, 20]
    assert totals["num_repeated"] == 0


def test_num_samples_repeats_what_is_too_few(raw, tmp_path):
    entries = ({"dataset": "a", "weight": 30}, {"dataset": "b", "weight": 10})
    totals, samples, _ = build(write_mixture(raw, *entries, num_samples=60), tmp_path / "out")
    assert numbers(samples) == [45, 15]
    assert totals["num_repeated"] == 25


def test_limits_of_parts_and_of_the_build_hold_together(raw, tmp_path):
    path = write_mixture(raw, {"dataset": "a", "limit": 5}, {"dataset": "b"})
    totals, samples, _ = build(path, tmp_path / "out", limit=12)
    assert numbers(samples) == [5, 7]
    assert totals["num_read"] == 12


def test_the_same_id_in_two_parts_is_two_samples(raw, tmp_path):
    write_dataset(raw / "again", texts("a", 3))
    path = write_mixture(raw, {"dataset": "a", "limit": 4}, {"dataset": "again"})
    _, samples, _ = build(path, tmp_path / "out")
    assert set(samples) == {"a0", "a1", "a2", "a3", "a0#2", "a1#2", "a2#2"}


def test_parts_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for number, name in enumerate(("x/one", "x/two", "y/one")):
        write_dataset(tmp_path / name, texts("ab"[number % 2], 3))
    file, folder = "annotations.json", "x/one"
    for places, names in [
        (("x/one/" + file, "x/two/" + file), ["one/annotations", "two/annotations"]),
        (("x/one/" + file, "y/one/" + file), ["x/one/annotations", "y/one/annotations"]),
        (("x/one", "y/one"), ["x/one", "y/one"]),
        (("x/one", "x/two"), ["one", "two"]),
        (("x/one", "x/two/" + file), ["one", "annotations"]),
    ]:
        found = find_dataset(str(write_mixture(tmp_path, *({"dataset": p} for p in places))), None)
        assert [part.name for part in found.parts] == names
    for given in ({}, {"name": "one"}):
        path = write_mixture(tmp_path, {"dataset": folder, **given}, {"dataset": folder})
        with pytest.raises(ConfigError, match=r"named 'one'; give each a `name`"):
            find_dataset(str(path), None)


def image(folder, name, seed):
    write_image(folder / name, 50 + seed, 40, seed)
    return (folder / name).read_bytes()


def test_a_mixture_of_all_layouts_keeps_every_image_byte(tmp_path):
    """JSON with files, Parquet and `save_to_disk` with structs, tars with byte ranges; MMC4, COYO
    and FLAN shapes.
    """
    folder, images = tmp_path / "raw", {}
    pixels = {n: image(tmp_path / "pixels", f"{n}.png", n) for n in range(12)}
    write_dataset(folder / "json", [record(n, [f"i/{n}.png"]) for n in range(3)])
    for n in range(3):
        images[f"s{n}"] = [image(folder / "json", f"i/{n}.png", n)]
    rows = [
        {
            "id": f"p{n}",
            "images": [{"bytes": pixels[n], "path": None}] * 2,
            "texts": [{"user": "?", "assistant": "!"}],
        }
        for n in range(3, 6)
    ]
    (folder / "parquet").mkdir()
    pq.write_table(
        pa.Table.from_pylist(rows), folder / "parquet" / "train.parquet", row_group_size=2
    )
    images |= {f"p{n}": [pixels[n]] * 2 for n in range(3, 6)}
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]
    write_saved(
        folder / "saved",
        [
            {"id": f"d{n}", "image": {"bytes": pixels[n], "path": "x"}, "conversations": turns}
            for n in (6, 7)
        ],
    )
    images |= {f"d{n}": [pixels[n]] for n in (6, 7)}
    write_tar(
        folder / "tar" / "0.tar",
        [
            (f"t{n}.{end}", data)
            for n in (8, 9)
            for end, data in (("png", pixels[n]), ("txt", b"A thing"))
        ],
    )
    images |= {f"t{n}": [pixels[n]] for n in (8, 9)}
    mmc4 = {
        "id": "m",
        "text_list": ["One.", "Two."],
        "image_info": [{"image_name": "z.png", "matched_text_index": 1}],
    }
    write_dataset(folder / "mmc4", [mmc4])
    images["m"] = [image(folder / "mmc4", "z.png", 11)]
    write_dataset(folder / "flan", [{"id": "f", "inputs": "1+1?", "targets": "2"}], lines=True)
    images["f"] = []
    parts = ("json", "parquet", "saved", "tar", "mmc4", "flan")
    path = write_mixture(folder, *({"dataset": part} for part in parts))
    for workers in (1, 2):
        totals, samples, _ = build(
            path, tmp_path / f"out{workers}", workers=workers, chunk_records=2
        )
        assert {name: sample["images"] for name, sample in samples.items()} == images
        assert totals["num_rejected"] == 0
    assert [one["part"] for one in read_manifest(tmp_path / "out1").values["raw_files"]] == list(
        parts
    )
    shards = [read_manifest(tmp_path / f"out{workers}").values["shards"] for workers in (1, 2)]
    assert shards[0] == shards[1]


def test_a_tar_that_is_cut_costs_one_record_of_a_build(tmp_path):
    members = [
        (f"t{n}.{end}", data)
        for n in range(6)
        for end, data in (("png", image(tmp_path, f"{n}.png", n)), ("txt", b"A"))
    ]
    path = write_tar(tmp_path / "tars" / "0.tar", members)
    path.write_bytes(path.read_bytes()[:-14_000])
    totals, samples, (cut,) = build(path, tmp_path / "out")
    assert 0 < len(samples) < 6
    assert totals["num_read"] == len(samples) + 1
    assert "0.tar" in cut["detail"]


META = {
    "one": {
        "root": "a",
        "annotation": "a/annotations.json",
        "data_augment": False,
        "repeat_time": 2,
        "length": 999,
    },
    "two": {
        "root": "b",
        "annotation": "b/annotations.json",
        "data_augment": True,
        "repeat_time": 0.5,
        "length": 1,
    },
}


def test_internvl_meta_files_are_mixtures_of_repeats(raw, tmp_path):
    path = raw / "meta.json"
    path.write_text(json.dumps(META))
    assert is_meta(str(path))
    dataset = find_dataset(str(path), None)
    assert [(part.name, part.repeat, part.data_root) for part in dataset.parts] == [
        ("one", 2.0, str(raw / "a")),
        ("two", 0.5, str(raw / "b")),
    ]
    _, samples, _ = build(path, tmp_path / "out")
    assert numbers(samples) == [40, 14]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeat_time": "2"}, "one: repeat"),
        ({"repeat_time": 0}, "one: repeat"),
        ({"annotation": 5}, "one: dataset"),
    ],
)
def test_a_wrong_meta_file_is_one_line(raw, change, message):
    path = raw / "wrong.json"
    path.write_text(json.dumps({"one": META["one"] | change}))
    with pytest.raises(ConfigError, match=message):
        read_meta(str(path))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"a": 1}', '{"a": {"root": "x"}}', "{", "[" * 100_000]
)
def test_other_json_is_no_meta_file(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert not is_meta(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "not valid TOML"),
        ("description = 'no datasets'", "names at least one"),
        ("[[datasets]]\ndataset = 'a'\nweigth = 1", "unknown key weigth"),
        ("[[datasets]]\nweight = 1", "missing key dataset"),
        ("[[datasets]]\ndataset = 'a'\nweight = -1", "weight is -1"),
        ("[[datasets]]\ndataset = 'a'\nlimit = 0", "limit is 0"),
        ("[[datasets]]\ndataset = 'a'\nweight = 1\nrepeat = 2.0", "a weight or a repeat"),
        (
            "[[datasets]]\ndataset = 'a'\nweight = 1\n[[datasets]]\ndataset = 'b'",
            "1 of 2 datasets have a weight",
        ),
        ("num_samples = 5\n[[datasets]]\ndataset = 'a'", "num_samples needs weights"),
    ],
)
def test_a_wrong_mixture_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_mixture(str(path))
    with pytest.raises(DataError, match=r"none\.toml: cannot be read"):
        read_mixture(str(tmp_path / "none.toml"))


def test_only_shipped_names_and_toml_files_are_mixtures(tmp_path):
    (tmp_path / "x.toml").write_text("[[datasets]]\ndataset = 'a'")
    assert is_mixture(str(tmp_path / "x.toml"))
    assert not is_mixture(str(tmp_path / "x"))
    assert is_mixture("datamix1")
    assert not is_mixture("llava665k")


@pytest.mark.parametrize("name", preset_names("datasets"))
def test_every_preset_loads_and_lists_all_that_is_missing(name, tmp_path):
    description, needs = describe_known(name)
    assert description
    assert all(origin for _, origin in needs)
    with pytest.raises(DataError, match=r"is incomplete under .*; missing:") as caught:
        find_dataset(name, str(tmp_path))
    for places, _ in needs:
        assert all(place in str(caught.value) for place in places.split(" and "))


def test_parts_that_are_there_are_not_missing(tmp_path):
    (tmp_path / "coyo").mkdir()
    missing = missing_parts(read_mixture("datamix2"), str(tmp_path))
    assert [line.partition(":")[0] for line in missing] == ["mmc4", "flan"]
    for name in ("mmc4", "flan"):
        (tmp_path / name).mkdir()
    assert missing_parts(read_mixture("datamix2"), str(tmp_path)) == []


def test_parts_in_a_bucket_are_looked_for_there(tmp_path, monkeypatch):
    (tmp_path / "data" / "coyo").mkdir(parents=True)
    (tmp_path / "data" / "flan").write_text("a file")
    roots = {"s3://bucket": tmp_path, "s3://bucket/data": tmp_path / "data"}
    monkeypatch.setattr(
        mixture_module,
        "open_folder",
        lambda uri: LocalFolder(str(roots.get(uri, tmp_path / uri.removeprefix("s3://bucket/")))),
    )
    missing = missing_parts(read_mixture("datamix2"), "s3://bucket/data")
    assert [line.partition(":")[0] for line in missing] == ["mmc4"]


def test_missing_without_a_data_root_says_how_to_give_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"in the current folder \(--data-root\); missing"):
        find_dataset("datamix2", None)


@pytest.mark.parametrize(
    ("name", "shares"),
    [("datamix1", (5, 5, 90)), ("datamix2", (30, 30, 40)), ("datamix3", (45, 45, 10))],
)
def test_the_mixes_of_pipetune_have_its_shares(name, shares):
    mixture = read_mixture(name)
    assert tuple((part.name, part.weight) for part in mixture.datasets) == tuple(
        zip(("mmc4", "coyo", "flan"), shares, strict=True)
    )


def test_a_mix_of_pipetune_builds_from_folders_recognised_by_looking(tmp_path):
    folder = tmp_path / "root"
    names = ["x.png", "y.png"]
    data = [image(folder / "mmc4", name, number) for number, name in enumerate(names)]
    documents = [
        {"text_list": ["One."], "image_info": [{"image_name": name, "matched_text_index": 0}]}
        for name in names
    ]
    for number, document in enumerate(documents):
        (folder / "mmc4" / f"docs_shard_{number}_v2.jsonl").write_text(json.dumps(document))
    write_tar(
        folder / "coyo" / "00000.tar",
        [(f"{n}.{end}", one) for n in range(2) for end, one in (("png", data[n]), ("txt", b"A"))],
    )
    (folder / "flan").mkdir()
    pq.write_table(
        pa.table({"inputs": ["1?"] * 40, "targets": ["2"] * 40}), folder / "flan" / "train.parquet"
    )
    _, samples, _ = build("datamix1", tmp_path / "out", data_root=str(folder))
    flan = [name for name in samples if name.startswith("train.parquet:")]
    assert len(flan) == 36
    assert sum(bool(sample["images"]) for sample in samples.values()) == 4
    assert all(sample["images"][0] in data for name, sample in samples.items() if name not in flan)


def test_the_catalog_prints_every_name():
    console = Console(file=io.StringIO(), width=200)
    print_datasets(console)
    text = console.file.getvalue()
    assert all(
        name in text for name in ["demo", *preset_names("datasets"), "coco/train2017", "geoqa+"]
    )

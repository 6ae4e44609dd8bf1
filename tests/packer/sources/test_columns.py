"""Datasets with names of their own: `--columns`, mixtures, and LLaMA-Factory's dataset_info.json.

https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md, whose examples these are, and
src/llamafactory/data/parser.py and converter.py of that repository for what is not told there.
"""

import io
import json
from itertools import chain, pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from isobatch.common.errors import ConfigError
from isobatch.counting.records.record import RawSample
from isobatch.loaders import BalancedLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.record_table import read_records
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.columns import parse_columns
from isobatch.packer.sources.dataset import find_dataset
from isobatch.shards.manifest import read_manifest
from support.builds.layouts import write_tar
from support.builds.raw_data import options, parse_record, write_image

CHAT = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}]
TEXTS = ["<image>What?", "A cat."]
OPENAI_TAGS = {
    **{"role_tag": "role", "content_tag": "content"},
    **{"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"},
}


def parsed(dataset):
    """What becomes of all records of a dataset."""
    records = [
        (record, part.name)
        for part in dataset.parts
        for chunk in part.open().chunks(3, lambda _: None)
        for record in chunk.records()
    ]
    return [parse_record(*each) for each in records]


def texts(sample):
    assert isinstance(sample, RawSample), sample
    return [turn.text for turn in sample.turns]


def write_as(layout, folder, records):
    """Records in a layout; its place."""
    folder.mkdir(exist_ok=True)
    if layout == "parquet":
        pq.write_table(pa.Table.from_pylist(records), folder / "data.parquet")
        return folder / "data.parquet"
    if layout == "tar":
        write_tar(
            folder / "0.tar", [(f"{i}.json", json.dumps(r).encode()) for i, r in enumerate(records)]
        )
        return folder / "0.tar"
    text = "\n".join(map(json.dumps, records)) if layout == "jsonl" else json.dumps(records)
    (folder / f"data.{layout}").write_text(text)
    return folder / f"data.{layout}"


OWN = [{"id": str(n), "my_conv": CHAT, "pics": ["a.png"], "level": "hard"} for n in range(5)]


@pytest.mark.parametrize("layout", ["json", "jsonl", "parquet", "tar"])
def test_columns_are_named_in_every_layout(tmp_path, layout):
    place = write_as(layout, tmp_path / "raw", OWN)
    columns = parse_columns(["messages=my_conv, images=pics"])
    found = parsed(find_dataset(str(place), None, columns=columns))
    assert [texts(sample) for sample in found] == [TEXTS] * 5
    assert [image.name for image in found[0].images] == ["a.png"]


def test_columns_of_a_mixture_are_those_of_its_datasets(tmp_path):
    write_as("jsonl", tmp_path / "a", OWN)
    write_as("json", tmp_path / "b", [{"q": "What?", "a": "A cat."}])
    (tmp_path / "mix.toml").write_text(
        '[[datasets]]\ndataset = "a"\n[datasets.columns]\nmessages = "my_conv"\nimages = "pics"\n'
        '[[datasets]]\ndataset = "b"\ncolumns = {question = "q", answer = "a"}\n'
    )
    found = parsed(find_dataset(str(tmp_path / "mix.toml"), None))
    assert [texts(sample)[-1] for sample in found] == ["A cat."] * 6


def test_a_column_that_gives_its_name_away_is_reported(tmp_path):
    place = write_as("json", tmp_path, [{"q": "What?", "question": "Other?", "answer": "A cat."}])
    (sample,) = parsed(find_dataset(str(place), None, columns=parse_columns(["question=q"])))
    assert texts(sample) == ["What?", "A cat."]
    assert sample.unread == ((".question", '"Other?"'),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("messages", "columns 'messages': give OURS=THEIRS"),
        ("messges=my_conv", "no field 'messges'; known: TEXT, answer, "),
        ("messages=", "messages is ''; give the name of a column"),
        ("messages=my_conv,messages=pics", "'messages' is given twice"),
        ("messages=my_conv,images=my_conv", "'my_conv' is given twice"),
        ("messages=conv", "no 'conv' in the first records of .*: id, level, my_conv, pics"),
    ],
)
@pytest.mark.parametrize("layout", ["jsonl", "parquet"])
def test_a_name_that_is_not_there_is_one_line(tmp_path, layout, given, message):
    place = write_as(layout, tmp_path, OWN)
    with pytest.raises(ConfigError, match=message):
        find_dataset(str(place), None, columns=parse_columns([given]))


def build(place, out, **changes):
    """The settings in the manifest of a build, and the samples of its only shard."""
    config = BuildConfig(**options(place, out, **changes))
    Builder(config, StageProgress(Console(file=io.StringIO()))).build()
    manifest = read_manifest(out).values
    shard = pa.ipc.open_file(str(out / manifest["shards"][0]["name"])).read_all().to_pylist()
    return manifest["config"], sorted(sample["input_ids"] for sample in shard)


def test_a_build_with_columns_is_that_of_the_known_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("own", "known"):
        (tmp_path / name).mkdir()
        write_image(tmp_path / name / "a.png", 32, 32, 0)
    own = write_as("json", tmp_path / "own", OWN)
    known = [{"id": r["id"], "messages": r["my_conv"], "images": r["pics"]} for r in OWN]
    columns = ("messages=my_conv", "images=pics")
    settings, packed = build(own, tmp_path / "out", columns=columns)
    plain, expected = build(write_as("json", tmp_path / "known", known), tmp_path / "plain")
    assert packed == expected
    assert "columns" in settings["parts"][0]
    assert "columns" not in plain["parts"][0]
    table = read_records(str(own), None, (), 0, StageProgress(), columns)
    assert table.record(0).value["messages"] == CHAT


# --- dataset_info.json ---


def write_info(folder, entry, records, **others):
    folder.mkdir(exist_ok=True)
    entry = {"file_name": "data.json", **entry}
    (folder / "dataset_info.json").write_text(json.dumps({"mine": entry, **others}))
    (folder / "data.json").write_text(json.dumps(records))
    return folder


ALPACA = {
    **{"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."},
    "history": [["Hi.", "Hello."]],
}
CASES = {
    "alpaca by default": ({}, ALPACA, ["Add.\n1 2", "3"]),
    "alpaca columns": (
        {"columns": {"prompt": "q", "query": "x", "response": "a", "history": "h", "system": "s"}},
        {"q": "Add.", "x": "1 2", "a": "3", "h": [["Hi.", "Hello."]], "s": "Be brief."},
        ["Be brief.", "Hi.", "Hello.", "Add.\n1 2", "3"],
    ),
    "alpaca without an instruction": ({}, {**ALPACA, "instruction": ""}, ["1 2", "3"]),
    "pre-training": ({"columns": {"prompt": "words"}}, {"words": "One. Two."}, ["One. Two."]),
    "sharegpt by default": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "system", "value": "Be brief."}, *CHAT[1:]]},
        ["Be brief.", "A cat."],
    ),
    "sharegpt columns and tags": (
        {
            **{"formatting": "sharegpt", "columns": {"messages": "c", "system": "s"}},
            "tags": {
                "role_tag": "who",
                "content_tag": "says",
                "user_tag": "Q",
                "assistant_tag": "A",
            },
        },
        {"c": [{"who": "Q", "says": "What?"}, {"who": "A", "says": "A cat."}], "s": "Be brief."},
        ["Be brief.", "What?", "A cat."],
    ),
    "openai": (
        {"formatting": "openai", "columns": {"messages": "messages"}, "tags": OPENAI_TAGS},
        {
            "messages": [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": "A cat."},
            ]
        },
        ["What?", "A cat."],
    ),
    "ranking of alpaca": (
        {
            "ranking": True,
            "columns": {"prompt": "instruction", "chosen": "good", "rejected": "bad"},
        },
        {"instruction": "What?", "good": "A cat.", "bad": "A dog."},
        ["What?", "A cat."],
    ),
    "ranking of sharegpt": (
        {
            **{"ranking": True, "formatting": "sharegpt"},
            "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"},
        },
        {"conversations": CHAT[:1], "good": CHAT[1], "bad": {"from": "gpt", "value": "No."}},
        TEXTS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_format_of_dataset_info_is_read_as_it_says(tmp_path, case):
    entry, values, expected = CASES[case]
    values = {**values, "image": "a.png"} if "<image>" in str(values) else values
    place = write_info(tmp_path, entry, [values])
    (sample,) = parsed(find_dataset(str(place), None))
    assert texts(sample) == expected
    assert ("bad" in dict(sample.unread)) == ("ranking" in case)


def test_other_columns_with_text_are_reported_and_not_learned(tmp_path):
    entry = {"columns": {"prompt": "q", "response": "a"}}
    record = {"q": "What?", "a": "A cat.", "system": "No.", "messages": CHAT, "input": "No."}
    (sample,) = parsed(find_dataset(str(write_info(tmp_path, entry, [record])), None))
    assert texts(sample) == ["What?", "A cat."]
    assert {path for path, _ in sample.unread} == {".system", ".messages", ".input"}


def test_one_of_several_datasets_is_named_after_an_at_sign(tmp_path):
    other = {"file_name": "other.json", "num_samples": 2}
    place = write_info(tmp_path, {}, [ALPACA], other=other)
    (tmp_path / "other.json").write_text(json.dumps([ALPACA] * 9))
    for named in (f"{place}@other", f"{place}/dataset_info.json@other"):
        dataset = find_dataset(named, None)
        assert dataset.name == "other"
        assert len(parsed(dataset)) == 2
    with pytest.raises(ConfigError, match="has the datasets mine, other; say which one"):
        find_dataset(str(place), None)
    with pytest.raises(ConfigError, match="has the datasets mine, other, and no 'third'"):
        find_dataset(f"{place}@third", None)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"colums": {}}, "unknown key 'colums'; known: cloud_file_name, "),
        ({"columns": {"image": "pics"}}, "columns: unknown key 'image'; known: audios, "),
        ({"tags": {"role": "who"}}, "tags: unknown key 'role'; known: assistant_tag, "),
        ({"columns": []}, None),
        ({"columns": {"prompt": 3}}, "columns: prompt is not a text"),
        ({"hf_hub_url": "org/name"}, "hf_hub_url is not fetched from here; name that dataset"),
        ({"script_url": "code"}, "script_url is not fetched from here"),
        ({"subset": "en"}, "subset is for datasets on the Hub"),
        ({"split": "test"}, "a file has no split 'test'"),
        ({"num_samples": 0}, "num_samples is 0; give a number above 0"),
        ({"formatting": "chatml"}, "formatting is 'chatml'; known: alpaca, sharegpt, openai"),
        ({"columns": {"kto_tag": "label"}}, "kto_tag marks answers that are not to be learned"),
        ({"ranking": True}, "a ranking without the column `chosen`"),
        ({"file_name": "none.json"}, "no data file .*none.json"),
        ({"columns": {"prompt": "q"}}, "no 'q' in the first records of mine .*: history, input"),
    ],
)
def test_what_dataset_info_says_and_is_not_read_is_one_line(tmp_path, entry, message):
    place = write_info(tmp_path, entry, [ALPACA])
    if message is None:  # an empty list is as good as none
        assert len(parsed(find_dataset(str(place), None))) == 1
        return
    with pytest.raises(ConfigError, match=message):
        find_dataset(str(place), None)


def test_the_dataset_info_of_datasets_is_no_such_file(tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {}, "splits": {}}))
    (tmp_path / "data.json").write_text(json.dumps([ALPACA]))
    assert find_dataset(str(tmp_path), None).parts[0].located.columns is None


def test_without_a_build_the_same_ids_come(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = {"columns": {"prompt": "q", "response": "a"}}
    records = [{"q": f"What is {n}?", "a": "A number."} for n in range(12)]
    place = write_info(tmp_path / "raw", entry, records)
    _, packed = build(place, tmp_path / "out")
    loader = BalancedLoader(str(place), model="tiny", tokenizer=options(place, "")["tokenizer"])
    ids = []
    for batch in chain.from_iterable(loader):
        borders = batch.cu_seqlens.tolist()
        ids += [batch.input_ids.tolist()[a:b] for a, b in pairwise(borders)]
    assert sorted(ids) == packed

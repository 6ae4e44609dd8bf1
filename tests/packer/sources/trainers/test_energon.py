"""Energon's folders: the split, the exclusions and the field map of `.nv-meta`, by Energon's rules.

https://nvidia.github.io/Megatron-Energon/latest/basic/data_prep.html and
https://nvidia.github.io/Megatron-Energon/latest/advanced/remote_dataset.html tell of the files;
samples of each type are as in megatron-energon 7.4's `flavors`.
"""

import json

import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.record import RawSample
from isobatch.packer.sources.detect import locate, open_located
from isobatch.packer.sources.trainers.energon import _paths
from support.builds.layouts import CRUDE, JPEG, pair, write_prepared
from support.builds.raw_data import parse_record

VQA = {"image": "jpg", "context": "json[q]", "answers": "json[a]"}


def typed(name, **fields):
    return {
        "__module__": "megatron.energon",
        "sample_type": {"__module__": "megatron.energon", "__class__": name},
        "field_map": fields,
    }


def samples(place, **changes):
    located = locate(str(place), known=[])
    root = str(place).partition("@")[0]
    chunks = open_located(located, "set", root).chunks(4, lambda _: None)
    return [parse_record(record, "set") for chunk in chunks for record in chunk.records()]


@pytest.mark.parametrize("yaml_info", [False, True])
def test_the_split_is_read_and_what_it_leaves_out_is_not(tmp_path, yaml_info):
    shards = {f"s{n}.tar": [pair(f"{n}_{k}") for k in range(3)] for n in range(5)}
    split = {
        "split_parts": {"train": ["s{0..2}.tar"], "val": ["s3.tar"], "test": ["s4.tar"]},
        "exclude": ["s1.tar", "s2.tar/2_1"],
    }
    about = typed("CaptioningSample", image="jpg", caption="txt")
    place = write_prepared(tmp_path / "set", shards, split=split, yaml_info=yaml_info, about=about)
    found = {
        name: [sample.sample_id for sample in samples(f"{place}{name}")]
        for name in ("", "@train", "@val", "@test")
    }
    train = ["0_0", "0_1", "0_2", "2_0", "2_2"]
    rest = {f"@{name}": [f"{n}_{k}" for k in range(3)] for name, n in (("val", 3), ("test", 4))}
    assert found == {"": train, "@train": train, **rest}
    with pytest.raises(ConfigError, match="splits test, train, val, and no 'dev'"):
        samples(f"{place}@dev")


ABOUT = {"q": "What?", "a": ["cat", "dog"], "c": ["dog", "cat"], "n": 1, "w": [1.0, 0.5]}
TYPES = [
    (typed("CaptioningSample", image="jpg", caption="json[q]"), "<image>What?", None),
    (typed("OCRSample", image="jpg", text="txt"), "<image>words", None),
    (typed("TextSample", text="json[c][1]"), "cat", None),
    (typed("VQASample", **VQA), "<image>\nWhat?", "cat"),
    (typed("VQASample", **VQA, answer_weights="json[w]"), "<image>\nWhat?", "cat"),
    (typed("VQASample", image="jpg", context="md,txt", answers="txt"), "<image>\nwords", "words"),
    (typed("VQAOCRSample", **VQA, text="txt"), "<image>\nWhat?", "cat"),
    (
        typed(
            "MultiChoiceVQASample",
            image="jpg",
            context="json[q]",
            choices="json[c]",
            correct_choice_idx="json[n]",
        ),
        "<image>\nWhat?",
        "cat",
    ),
    (
        typed("VidQASample", video="mp4", context="json[q]", answers="txt"),
        "<video>\nWhat?",
        "words",
    ),
    (typed("InterleavedSample", sequence="json[c]"), "dog\n\ncat", None),
    ({"__class__": "VQAWebdataset", "field_map": VQA}, "<image>\nWhat?", "cat"),
]


@pytest.mark.parametrize(("about", "first", "answer"), TYPES)
def test_fields_of_a_sample_type_come_from_the_members_of_the_field_map(
    tmp_path, about, first, answer
):
    ends = {"jpg": JPEG, "mp4": b"\0\0\0\x20ftypisom", "txt": b"words"}
    ends |= {"json": json.dumps(ABOUT).encode(), "npy": b"1234"}
    place = write_prepared(tmp_path / "set", {"0.tar": [("a", ends)]}, about=about)
    (sample,) = samples(place)
    assert isinstance(sample, RawSample), sample
    assert [turn.text for turn in sample.turns] == [first, *([answer] if answer else [])]
    unread = dict(sample.unread)
    used = str(about["field_map"])
    assert {end for end in ends if f".{end}" in unread} == {end for end in ends if end not in used}
    assert ("answer_weights" in unread) == ("answer_weights" in used)


def test_without_a_field_map_members_are_read_by_their_suffixes(tmp_path):
    place = write_prepared(tmp_path / "set", {"0.tar": [pair("a")]})
    assert samples(place)[0].turns[0].text == "<image>A cat."


def test_crude_samples_are_read_by_their_suffixes_and_subflavors_are_reported(tmp_path):
    about = {**CRUDE, "subflavors": {"kind": "web"}}
    place = write_prepared(tmp_path / "set", {"0.tar": [pair("a")]}, about=about)
    assert samples(place)[0].turns[0].text == "<image>A cat."
    unread = locate(str(place), known=[]).unread
    assert dict(unread) == {"subflavors of dataset.yaml": '{"kind": "web"}'}


def test_a_sample_without_a_mapped_member_is_rejected(tmp_path):
    about = typed("CaptioningSample", image="jpg", caption="json[text][0]")
    place = write_prepared(tmp_path / "set", {"0.tar": [pair("a")]}, about=about)
    (sample,) = samples(place)
    assert (sample.reason, sample.detail.partition(": ")[2]) == (
        "broken_member",
        "field_map of dataset.yaml: no json.text.0 for `caption`",
    )


LOADER = {
    **typed("VQASample"),
    "sample_loader": "sample_loader.py:sample_loader",
    "part_filter": "sample_loader.py:part_filter",
}
del LOADER["field_map"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({**CRUDE, "part_filter": "jpg"}, "part_filter is not read; name its tars"),
        (LOADER, "made by a sample_loader, code not run here; name its tars"),
        (typed("ImageSample", image="jpg"), "type 'ImageSample'; read are CaptioningSample, "),
        (typed("CaptioningSample", image="jpg"), "field_map has no caption, which Captioning"),
        ({**typed("TextSample", text="txt"), "feld": 1}, "unknown key 'feld'; known: __class__"),
        ({**typed("TextSample", text="txt"), "part_filter": []}, "for a sample_loader only"),
        ({"sample_type": "TextSample", "field_map": "txt"}, "no field_map of texts"),
    ],
)
def test_samples_that_only_code_makes_are_one_line(tmp_path, about, message):
    place = write_prepared(tmp_path / "set", {"0.tar": [pair("a")]}, about=about)
    with pytest.raises(ConfigError, match=message):
        samples(place)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": {"split_parts": {"train": []}}}, "split 'train' has no shards"),
        ({"split": {"split_parts": {"train": ["1.tar"]}}}, "1.tar has no count in .info.json"),
        ({"split": {"split_parts": {"train": ["{0.tar"]}}}, "without its other one|no count"),
        ({"split": {"split_parts": {"train": ["{0..9999999}"]}}}, "more than a million shards"),
        ({"split": {"split_parts": "train"}}, "no `split_parts`"),
        ({"counts": {"0.tar": 2}}, "0.tar: has 1 samples, and .nv-meta says 2; prepare it again"),
    ],
)
def test_metadata_that_do_not_fit_are_one_line(tmp_path, options, message):
    place = write_prepared(tmp_path / "set", {"0.tar": [pair("a")]}, **options)
    with pytest.raises(DataError, match=message):
        samples(place)


@pytest.mark.parametrize("content", ["a: [", "- 1", "!!python/object:os.system {}"])
def test_a_damaged_split_is_named(tmp_path, content):
    place = write_prepared(tmp_path / "set", {"0.tar": [pair("a")]})
    (place / ".nv-meta" / "split.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"split\.yaml: "):
        samples(place)


def test_field_maps_split_as_energon_splits_them():
    assert _paths("json[a][b],TXT") == (("json", "a", "b"), ("txt",))


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (["s1.tar", "s2.tar/2_1", "s3.tar/3_0"], "4 samples"),
        (["s2.tar/2_{0..1}"], "2 samples"),
        (["s3.tar"], None),
    ],
)
def test_the_number_of_samples_that_the_split_leaves_out_is_said(tmp_path, exclude, said):
    shards = {f"s{n}.tar": [pair(f"{n}_{k}") for k in range(3)] for n in range(4)}
    split = {"split_parts": {"train": ["s{0..2}.tar"], "val": ["s3.tar"]}, "exclude": exclude}
    place = write_prepared(tmp_path / "set", shards, split=split)
    found = dict(locate(str(place), known=[]).unread)
    assert found == ({} if said is None else {"exclude of split.yaml": said})

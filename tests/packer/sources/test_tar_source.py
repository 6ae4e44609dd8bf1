"""Tars of samples: what the webdataset library would read, nothing skipped in silence, every byte
range right.
"""

import gzip
import io
import json
import pickle
import tarfile
from dataclasses import replace
from itertools import chain

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.media import open_media
from isobatch.counting.records.reject_reasons import Rejected
from isobatch.packer.sources import tar_source
from isobatch.packer.sources.detect import locate, open_located
from isobatch.packer.sources.tar_members import BrokenTarError, read_members
from isobatch.packer.sources.tar_source import key_of
from isobatch.shards.folders import open_folder
from support.builds.layouts import FOLDER, LINK, tar_bytes, write_tar
from support.builds.raw_data import parse_record


def pairs(count, first=0):
    """Members as img2dataset writes them."""
    members = []
    for number in range(first, first + count):
        key = f"{number:09d}"
        about = {
            "caption": f"C{number}",
            "url": "http://x",
            "key": key,
            "status": "success",
            "error_message": None,
        }
        members += [
            (f"{key}.jpg", f"pixels {number}".encode() * (number % 5 + 1)),
            (f"{key}.json", json.dumps(about).encode()),
            (f"{key}.txt", f"C{number}".encode()),
        ]
    return members


def source_of(place, data_root=None):
    located = locate(str(place), known=[])
    return open_located(located, "set", str(data_root or located.folder))


def read(place, data_root=None, num_records=10):
    chunks = [
        pickle.loads(pickle.dumps(c))
        for c in source_of(place, data_root).chunks(num_records, lambda _: None)
    ]
    return list(chain.from_iterable(chunk.records() for chunk in chunks))


def samples(place, data_root=None):
    return [parse_record(record, "set") for record in read(place, data_root)]


def contents(sample, root, kind="image"):
    files = sample.images if kind == "image" else sample.audios
    return [open_media(open_folder(str(root)), media, kind).read() for media in files]


def test_pairs_of_img2dataset_become_captioned_images_by_byte_range(tmp_path):
    write_tar(tmp_path / "00000.tar", pairs(20))
    write_tar(tmp_path / "00001.tar", pairs(20, 20))
    # img2dataset leaves these next to the tars
    (tmp_path / "00000.parquet").write_bytes(b"")
    (tmp_path / "00000_stats.json").write_text("{}")
    found = samples(tmp_path)
    assert [sample.sample_id for sample in found] == [f"{n:09d}" for n in range(40)]
    for number, sample in enumerate(found):
        (turn,) = sample.turns
        assert (turn.role, turn.text) == ("document", f"<image>C{number}")
        assert contents(sample, tmp_path) == [f"pixels {number}".encode() * (number % 5 + 1)]
        assert sample.images[0].data is None
        assert sample.images[0].container == f"0000{number // 20}.tar"


def test_the_webdataset_library_sees_the_same_samples(tmp_path):
    members = [
        ("a/b.c/1.jpg", b"1"),
        ("a/b.c/1.left.png", b"2"),
        ("README", b"no sample"),
        ("a/b.c/1.txt", b"caption"),
        ("a/2.PNG", b"3"),
        ("a/2.txt", b"caption"),
        (".hidden", b"no sample"),
        ("b/2.png", b"4"),
        ("b/2.txt", b"caption"),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    theirs = [
        (sample["__key__"], sorted(value for key, value in sample.items() if key[0] != "_"))
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    ours = [
        (
            sample.sample_id,
            sorted([*contents(sample, tmp_path), sample.turns[0].text.split(">")[-1].encode()]),
        )
        for sample in samples(path)
    ]
    assert ours == theirs
    assert len(ours) == 3


def test_tars_lie_anywhere_under_the_data_root(tmp_path):
    write_tar(tmp_path / "coyo" / "part" / "00000.tar", pairs(2))
    for place in (tmp_path / "coyo", tmp_path / "coyo" / "part" / "00000.tar"):
        (sample, _) = samples(place, tmp_path)
        assert sample.images[0].container == "coyo/part/00000.tar"
        assert contents(sample, tmp_path) == [b"pixels 0"]
    with pytest.raises(ConfigError, match="must be under the data root"):
        read(tmp_path / "coyo", tmp_path / "other")


def test_a_large_tar_is_cut_into_runs_of_samples(tmp_path, monkeypatch):
    long = "k" * 150  # a name that needs a header of its own
    members = [(f"{long}/{name}", content) for name, content in pairs(25)]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = write_tar(tmp_path / f"{form}.tar", members, format=form)
        whole = read(path)
        with monkeypatch.context() as patch:
            patch.setattr(tar_source, "WHOLE_TAR_BYTES", 1)
            told = []
            chunks = list(source_of(path).chunks(10, told.append))
            assert [sum(1 for _ in chunk.records()) for chunk in chunks] == [10, 10, 5]
            assert read(path) == whole
            assert sum(told) == path.stat().st_size
        assert len(whole) == 25


def test_json_is_the_record_and_images_fill_it(tmp_path):
    turns = [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": "!"}]
    about = {"id": "mine", "conversations": turns}
    members = [
        ("1.10.jpg", b"b"),
        ("1.9.jpg", b"a"),
        ("1.json", json.dumps(about).encode()),
        ("2.json", json.dumps(about | {"id": 2, "image": ["coco/p.jpg", "coco/q.jpg"]}).encode()),
        ("2.y.jpg", b"y"),
        ("2.x.jpg", b"x"),
        ("3.json", json.dumps(about | {"id": 3, "images": ["here/2.jpg", "other/1.jpg"]}).encode()),
        ("3.1.jpg", b"1"),
        ("3.2.jpg", b"2"),
        ("4.json", json.dumps(about | {"id": 4, "images": ["4.p.png", "there.png"]}).encode()),
        ("4.p.png", b"p"),
        ("5.json", json.dumps({"id": 5, "text": "no image"}).encode()),
    ]
    found = samples(write_tar(tmp_path / "x.tar", members))
    assert [sample.sample_id for sample in found] == ["mine", "2", "3", "4", "5"]
    assert contents(found[0], tmp_path) == [b"a", b"b"]  # by number
    assert contents(found[1], tmp_path) == [b"y", b"x"]  # the names are from elsewhere, and as many
    assert contents(found[2], tmp_path) == [b"2", b"1"]  # by name
    assert contents(replace(found[3], images=found[3].images[:1]), tmp_path) == [b"p"]
    assert found[3].images[1].name == "there.png"  # a file of its own, if there is one
    assert found[4].images == ()


def test_mmc4_in_tars_finds_its_images_by_name(tmp_path):
    about = {
        "text_list": ["A.", "B."],
        "image_info": [
            {"image_name": "z.jpg", "matched_text_index": 1},
            {"image_name": "y.jpg", "matched_text_index": 0},
        ],
    }
    members = [("d.json", json.dumps(about).encode()), ("d.y.jpg", b"y"), ("d.z.jpg", b"z")]
    (sample,) = samples(write_tar(tmp_path / "x.tar", members))
    assert sample.turns[0].text == "<image>A. <image>B."
    assert contents(sample, tmp_path) == [b"y", b"z"]


@pytest.mark.parametrize("names", [["d.z.jpg", None, "d.y.jpg"], ["far/1.jpg", None, "far/2.jpg"]])
def test_images_between_texts_keep_their_places(tmp_path, names):
    about = json.dumps({"texts": [None, "A.", None], "images": names}).encode()
    sample = only(tmp_path, ("d.json", about), ("d.z.jpg", b"z"), ("d.y.jpg", b"y"))
    assert sample.turns[0].text.split() == ["<image>", "A.", "<image>"]
    assert contents(sample, tmp_path) == [b"z", b"y"]


def test_sound_and_plain_text_are_samples_too(tmp_path):
    members = [("a.flac", b"sound"), ("a.txt", b"Rain"), ("b.txt", "Nur Text \u00e4".encode())]
    speech, text = samples(write_tar(tmp_path / "x.tar", members))
    assert (speech.turns[0].text, contents(speech, tmp_path, "audio")) == (
        "<audio>Rain",
        [b"sound"],
    )
    assert (text.turns[0].text, text.audios) == ("Nur Text \u00e4", ())


def test_a_pair_without_its_image_says_why(tmp_path):
    failed = {
        "caption": "C",
        "url": "http://x",
        "status": "failed_to_download",
        "error_message": "404 gone",
    }
    members = [
        ("1.json", json.dumps(failed).encode()),
        ("1.txt", b"C"),
        ("2.jpg", b"x"),
        ("2.txt", b"D"),
    ]
    rejected, good = samples(write_tar(tmp_path / "x.tar", members))
    assert (rejected.reason, rejected.sample_id) == ("missing_image", "1")
    assert "404 gone" in rejected.detail
    assert good.sample_id == "2"


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("2.json", b"{"), "not valid JSON"),
        (("2.json", b"\xff"), "not valid JSON"),
        (("2.json", b"1" * 5000), "not valid JSON"),
        (("2.json", b"[1]"), "a list, not an object"),
        (("2.jpg", b"again"), "two members jpg"),
        (("2.png", LINK), "a link"),
        (("2.\udcff.png", b"x"), "not valid UTF-8"),
    ],
)
def test_a_damaged_sample_costs_that_sample(tmp_path, member, message):
    members = [
        ("1.jpg", b"1"),
        ("1.txt", b"A"),
        ("2.jpg", b"2"),
        member,
        ("folder", FOLDER),
        *pairs(1, 3),
    ]
    good, bad, last = samples(write_tar(tmp_path / "x.tar", members))
    assert isinstance(bad, Rejected)
    assert bad.sample_id == "2"
    assert message in bad.detail
    assert "x.tar" in bad.detail
    assert (good.sample_id, last.sample_id) == ("1", "000000003")


def expected_keys(data):
    """Keys of the samples that are whole in the first bytes of a tar of `pairs`, by an independent
    walk.
    """
    keys, offset = {}, 0
    while offset + 512 <= len(data):
        header = data[offset : offset + 512]
        if header == bytes(512):
            break
        size = int(header[124:135], 8)
        if offset + 512 + size > len(data):
            break
        key = header[:9].decode()
        keys[key] = keys.get(key, 0) + 1
        offset += 512 + -(-size // 512) * 512
    return [key for key, members in keys.items() if members == 3]


@given(st.integers(0, 20 * 3 * 1024))
def test_a_cut_tar_gives_what_is_whole_and_one_broken_record(tmp_path_factory, size):
    data = tar_bytes(pairs(20))[:size]
    path = tmp_path_factory.mktemp("cut") / "x.tar"
    path.write_bytes(data)
    *good, cut = samples(path)
    assert isinstance(cut, Rejected)
    assert "x.tar" in cut.detail
    if size % 512 == 0 and good and isinstance(good[-1], Rejected):
        good.pop()  # the cut cannot be told from a missing end mark, but the caption is not there
    assert not any(isinstance(sample, Rejected) for sample in good)
    keys = [sample.sample_id for sample in good]
    whole = expected_keys(data)
    # a sample whose last member is the last thing in the file may have had more
    assert keys in (whole, whole[:-1], [f"{n:09d}" for n in range(len(whole) + 1)])
    for sample in good:
        assert contents(sample, path.parent) == [
            f"pixels {int(sample.sample_id)}".encode() * (int(sample.sample_id) % 5 + 1)
        ]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "empty file"),
        (100, "header"),
        (512 + 3, "ends inside a file"),
        (4 * 512 + 100, "header"),
        (3 * 1024, "no end"),
    ],
)
def test_a_cut_says_where_it_is(tmp_path, size, message):
    (tmp_path / "x.tar").write_bytes(tar_bytes(pairs(2))[:size])
    cut = samples(tmp_path / "x.tar")[-1]
    assert message in cut.detail
    assert "at byte" in cut.detail


def test_a_tar_without_an_end_mark_keeps_its_last_sample(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_bytes(pairs(3))[: 3 * 3 * 1024])
    *good, cut = samples(tmp_path / "x.tar")
    assert [sample.turns[0].text for sample in good] == ["<image>C0", "<image>C1", "<image>C2"]
    assert "no end mark and may be cut" in cut.detail


def test_a_damaged_header_in_the_middle_is_not_the_end(tmp_path):
    data = bytearray(tar_bytes(pairs(6)))
    third = data.index(b"000000003.jpg")
    data[third + 150] ^= 0xFF  # in its checksum
    (tmp_path / "x.tar").write_bytes(data)
    found = samples(tmp_path / "x.tar")
    # the sample in front of the damage may have had members there
    assert [sample.sample_id for sample in found] == ["000000000", "000000001", "000000002"]
    assert isinstance(found[-1], Rejected)
    assert "damaged or cut header" in found[-1].detail


def test_tars_joined_with_cat_are_read_to_the_end(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(pairs(3)) + tar_bytes(pairs(3, 3)))
    assert [sample.sample_id for sample in samples(path)] == [f"{n:09d}" for n in range(6)]


@given(st.binary(max_size=3000), st.integers(0, 2000))
def test_any_bytes_end_in_members_or_a_broken_tar(garbage, place):
    data = bytearray(tar_bytes(pairs(1)))
    data[place : place + len(garbage)] = garbage
    try:
        members = list(read_members(io.BytesIO(data)))
    except BrokenTarError:
        return
    assert all(0 <= member.offset <= member.offset + member.size <= len(data) for member in members)


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz"])
def test_a_compressed_tar_gives_the_same_samples_with_their_contents(tmp_path, name):
    members = pairs(25)
    (tmp_path / "plain").mkdir()
    write_tar(tmp_path / "plain" / "x.tar", members)
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "plain" / "x.tar").read_bytes()))
    source = source_of(tmp_path / name)
    chunks = list(source.chunks(10, lambda _: None))
    assert [len(list(chunk.records())) for chunk in chunks] == [10, 10, 5]
    plain, packed = (
        [parse_record(record, "set") for record in records]
        for records in (read(tmp_path / "plain"), read(tmp_path / name))
    )
    assert [(s.sample_id, s.turns) for s in packed] == [(s.sample_id, s.turns) for s in plain]
    folder = open_folder(str(tmp_path / "plain"))
    for sample, other in zip(packed, plain, strict=True):
        (image,), (expected,) = sample.images, other.images
        assert image.data == open_media(folder, expected, "image").read()


def test_a_compressed_tar_that_is_cut_ends_with_a_broken_sample(tmp_path):
    write_tar(tmp_path / "x.tar", pairs(25))
    packed = gzip.compress((tmp_path / "x.tar").read_bytes())
    (tmp_path / "y.tgz").write_bytes(packed[: len(packed) // 2])
    records = read(tmp_path / "y.tgz")
    assert [bool(record.broken) for record in records] == [False] * (len(records) - 1) + [True]
    assert len(records) > 3
    assert "damaged or cut" in records[-1].broken


def test_a_tar_that_is_gone_is_named(tmp_path):
    path = write_tar(tmp_path / "x.tar", pairs(1))
    source = source_of(path)
    (chunk,) = source.chunks(10, lambda _: None)
    path.unlink()
    with pytest.raises(DataError, match=r"x\.tar: cannot be read"):
        list(chunk.records())
    with pytest.raises(DataError, match=r"x\.tar: cannot be read"):
        source.describe()


@given(st.text("ab./", max_size=8))
def test_keys_are_those_of_the_webdataset_library(name):
    theirs = webdataset.tariterators.base_plus_ext(name.removeprefix("./"))[0]
    assert key_of(name) == theirs or (theirs or "").endswith("/")


JPEG = b"\xff\xd8\xff\xe0" + b"pixels" * 50


def only(tmp_path, *members):
    """The only sample of a tar with these members."""
    write_tar(tmp_path / "0.tar", members)
    (sample,) = samples(tmp_path / "0.tar")
    return sample


@pytest.mark.parametrize("suffix", ["jfif", "jpe", "img", "foo", "IMG", "0.blob"])
def test_an_image_under_an_unusual_suffix_is_told_by_its_content(tmp_path, suffix):
    sample = only(tmp_path, (f"a.{suffix}", JPEG), ("a.txt", b"A cat."))
    assert contents(sample, tmp_path) == [JPEG]
    assert sample.turns[0].text == "<image>A cat."
    assert sample.unread == ()


@pytest.mark.parametrize("suffix", ["heic", "jp2", "img"])
def test_what_should_be_an_image_stays_one_even_if_it_is_damaged(tmp_path, suffix):
    assert len(only(tmp_path, (f"a.{suffix}", b"damaged"), ("a.txt", b"A cat.")).images) == 1


def test_other_media_are_told_by_their_content_too(tmp_path):
    video = b"\0\0\0\x20ftypisom" + bytes(40)
    sample = only(tmp_path, ("a.clip", video), ("a.sound", b"fLaC" + bytes(60)), ("a.txt", b"x"))
    assert (len(sample.images), len(sample.videos), len(sample.audios)) == (0, 1, 1)


def test_members_of_no_use_are_reported_and_change_nothing(tmp_path):
    used = ("a.jpg", JPEG), ("a.txt", b"A cat.")
    others = ("a.npy", JPEG), ("a.seg.png", JPEG), ("a.cls", b"7"), ("a.foo", b"words")
    sample = only(tmp_path, *used, *others)
    plain = only(tmp_path, *used)
    assert (sample.turns, sample.images) == (plain.turns, plain.images)
    size = f'"{len(JPEG)} bytes"'
    expected = {".npy": size, ".seg.png": size, ".cls": '"1 bytes"', ".foo": '"5 bytes"'}
    assert dict(sample.unread) == expected


def test_of_two_captions_the_first_is_learned_and_the_other_reported(tmp_path):
    sample = only(tmp_path, ("a.long.txt", b"more"), ("a.jpg", JPEG), ("a.txt", b"A cat."))
    assert sample.turns[0].text == "<image>A cat."
    assert sample.unread == ((".long.txt", '"more"'),)


def test_energons_questions_in_members_of_their_own_are_conversations(tmp_path):
    context, answers = ("a.context.txt", b"What?"), ("a.answers.json", b'["cat", "dog"]')
    sample = only(tmp_path, ("a.jpg", JPEG), context, answers)
    assert [turn.text for turn in sample.turns] == ["<image>\nWhat?", "cat"]


@pytest.mark.parametrize("whole_tar_bytes", [1 << 30, 0])
@pytest.mark.parametrize("compressed", [False, True])
def test_members_of_one_key_that_are_apart_are_said_at_the_first(
    tmp_path, monkeypatch, whole_tar_bytes, compressed
):
    monkeypatch.setattr(tar_source, "WHOLE_TAR_BYTES", whole_tar_bytes)
    members = [("a.jpg", JPEG), ("b.jpg", JPEG), ("a.txt", b"A"), ("b.txt", b"B")]
    data = tar_bytes(members)
    place = tmp_path / ("0.tar.gz" if compressed else "0.tar")
    place.write_bytes(gzip.compress(data) if compressed else data)
    with pytest.raises(DataError, match=r"members of a are not next .* jpg in sample 1, txt in"):
        read(place)


def test_two_whole_samples_of_one_key_are_two(tmp_path):
    write_tar(tmp_path / "0.tar", pairs(2) + pairs(2))
    assert len(samples(tmp_path / "0.tar")) == 4

import base64
import os
import random
import string

import pytest

from isobatch.counting.headers.image_header import read_header
from isobatch.counting.records.fields import Fields
from isobatch.counting.records.media import (
    Media,
    SampleProblem,
    media_of,
    media_of_part,
    open_media,
    read_into,
)
from isobatch.counting.records.record import RawRecord
from isobatch.shards.folders import open_folder
from support.builds.raw_data import parse_record


def read(root, media):
    with open_media(open_folder(str(root)), media, "image") as file:
        return file.read()


def test_a_file_of_its_own_a_range_of_a_container_and_bytes_in_hand_read_alike(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"picture")
    (tmp_path / "b.tar").write_bytes(b"header picture tail")
    kinds = [Media("a.jpg"), Media("a.jpg", "b.tar", 7, 7), Media("a.jpg", data=b"picture")]
    assert [read(tmp_path, media) for media in kinds] == [b"picture"] * 3


def test_missing_files_and_folders_are_missing(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for media in (
        Media("nothing.jpg"),
        Media("folder"),
        Media("file/b.jpg"),
        Media("x", "nothing.tar", 0, 5),
    ):
        with pytest.raises(SampleProblem, match="missing_image"):
            read(tmp_path, media)


def test_a_pipe_in_place_of_an_image_does_not_keep_the_build_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    with (
        pytest.raises(SampleProblem, match=r"corrupt_image.*not seekable"),
        open_media(open_folder(str(tmp_path)), Media("a.jpg"), "image") as file,
    ):
        read_header(file, "a.jpg")


def test_what_the_file_system_refuses_is_not_called_corrupt(tmp_path):
    with pytest.raises(SampleProblem, match="unreadable_image"):
        read(tmp_path, Media("x" * 300))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../x.jpg", "outside"),
        ("/etc/x.jpg", "outside"),
        ("a/../../x.jpg", "outside"),
        ("https://a/b.jpg", "image_url"),
    ],
)
def test_paths_that_leave_the_data_root_are_refused(tmp_path, name, reason):
    with pytest.raises(SampleProblem, match=reason):
        read(tmp_path, Media(name))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_out_of_the_data_root_are_refused_unless_they_are_to_be_followed(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jpg").write_bytes(b"picture")
    root = tmp_path / "root"
    root.mkdir()
    if kind == "file":
        (root / "a.jpg").symlink_to(tmp_path / "elsewhere" / "a.jpg")
        name = "a.jpg"
    else:
        (root / "images").symlink_to(tmp_path / "elsewhere")
        name = "images/a.jpg"
    with pytest.raises(SampleProblem, match=r"outside_data_root.*--follow-links"):
        read(root, Media(name))
    with open_media(open_folder(str(root), follow_links=True), Media(name), "image") as file:
        assert file.read() == b"picture"


def test_a_link_inside_the_data_root_and_a_root_that_is_a_link_are_fine(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.jpg").write_bytes(b"picture")
    (tmp_path / "root" / "b.jpg").symlink_to("a.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    assert (
        read(tmp_path / "root", Media("b.jpg"))
        == read(tmp_path / "link", Media("a.jpg"))
        == b"picture"
    )


def test_a_file_that_changed_since_it_was_counted_is_named(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"picture")
    root = open_folder(str(tmp_path))
    kinds = [Media("a.jpg", size=7), Media("x", "a.jpg", 0, 7), Media("x", "blob:a.jpg", 0, 7)]
    for media in kinds:
        buffer = bytearray(7)
        read_into(root, media, root, memoryview(buffer))
        assert buffer == b"picture"
    for size in (5, 9):
        with pytest.raises(
            SampleProblem, match=rf"media_changed: a.jpg: {size} bytes when counted, 7 now"
        ):
            read_into(root, Media("a.jpg", size=size), root, memoryview(bytearray(size)))
    with pytest.raises(SampleProblem, match=r"media_changed: b.jpg"):
        read_into(root, Media("b.jpg", size=7), root, memoryview(bytearray(7)))


CONTENT = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
BASE64 = base64.b64encode(CONTENT).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": BASE64}},
        {"type": "image_url", "image_url": BASE64},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"type": "image", "image": BASE64},
        {"type": "image", "url": BASE64},
        {"type": "image", "base64": BASE64},
        {"type": "image", "base64": "\n".join([BASE64[:76], BASE64[76:]])},
        {"type": "image", "base64": f"data:image/png;base64,{BASE64}"},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
        },
    ],
)
def test_a_part_may_hold_its_image_as_base64(part):
    messages = [
        {"role": "user", "content": [part, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    sample = parse_record(RawRecord(0, {"messages": messages}), "set")
    assert [image.data for image in sample.images] == [CONTENT]
    assert sample.unread == ()


def test_damaged_base64_is_rejected():
    part = {"type": "image", "base64": BASE64[:-3]}
    with pytest.raises(SampleProblem, match="base64 of the image is damaged"):
        media_of_part(Fields(part), ("image",), "image")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/a%20b.png", "/data/a b.png"),
        ("file://localhost/data/a.png", "/data/a.png"),
        ("file://images/a.png", "images/a.png"),
    ],
)
def test_a_file_url_is_a_path(url, path):
    assert media_of(url, "image") == Media(path)


def test_a_long_path_is_no_content():
    draw = random.Random(0)
    letters = string.ascii_letters + string.digits + "/+"
    for _ in range(200):
        path = "images/" + "".join(draw.choices(letters, k=draw.randrange(100, 240)))
        assert media_of(path, "image") == Media(path)

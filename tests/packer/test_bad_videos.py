"""Every line of the table of videos in docs/reference/bad_input.md, in one build."""

import json
import sys

import pyarrow.parquet as pq
import pytest

from isobatch.counting.headers import video_header
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.media.frame_archive import pack_frames
from support.builds.bad_samples import rows_of
from support.builds.packed import build, read_samples
from support.odd_videos import audio_only, cut_without_encoding, encoded, picture

FILM = encoded(30)
FILES = {
    "film.mp4": FILM,
    "empty.mp4": b"",
    "cut.mp4": FILM[: len(FILM) // 2],
    "cut.mkv": encoded(20, container="matroska")[:-500],
    "page.mp4": b"<!DOCTYPE html>404" * 50,
    "picture.mp4": picture("JPEG"),
    "playlist.mp4": b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n",
    "sound.mp4": audio_only(),
    "none.avi": encoded(0, container="avi"),
    "one.mp4": encoded(1),
    "turned.mp4": encoded(4, rotation=90),
    "varying.mov": encoded(
        4, codec="mjpeg", pixel_format="yuvj420p", times_ms=[0, 10, 400, 500], container="mov"
    ),
    "hidden.mp4": cut_without_encoding(FILM, hidden=7),
    "still.gif": picture("GIF"),
    "frames/1.png": picture(),
    "frames/2.png": picture(shade=9),
    "frames/10.png": picture(shade=200),
    "texts/a.txt": b"no image",
    "wide.png": picture(size=(80, 30)),
    "broken.png": picture()[:60],
}


def turns(text="<video> what?"):
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "An answer."}]


def sample(video, text="<video> what?"):
    return {"conversations": turns(text), "video": video}


CASES: list[tuple[str, str, str, dict]] = [
    ("file of no bytes", "rejected", "corrupt_video", sample("empty.mp4")),
    ("MP4 cut short", "rejected", "corrupt_video", sample("cut.mp4")),
    ("MKV or WebM cut short", "rejected", "corrupt_video", sample("cut.mkv")),
    ("web page under the name of a video", "rejected", "corrupt_video", sample("page.mp4")),
    ("image under the name of a video", "rejected", "video_format", sample("picture.mp4")),
    ("playlist under the name of a video", "rejected", "corrupt_video", sample("playlist.mp4")),
    ("file with sound only", "rejected", "no_video_stream", sample("sound.mp4")),
    ("video of no frames", "rejected", "empty_video", sample("none.avi")),
    ("video of 1 frame", "used, if the model takes it", "", sample("one.mp4")),
    ("the same for a model that needs two", "rejected", "short_video", sample("one.mp4")),
    ("video turned by its metadata", "used upright", "", sample("turned.mp4")),
    ("variable frame rate", "used, with its average rate", "", sample("varying.mov")),
    ("frames hidden by a cut without encoding", "used without them", "", sample("hidden.mp4")),
    ("GIF", "used", "", sample("still.gif")),
    ("missing file", "rejected", "missing_video", sample("nowhere.mp4")),
    ("folder of images", "used: its images by their numbers", "", sample("frames")),
    ("folder without images", "rejected", "missing_video", sample("texts")),
    (
        "list of images",
        "used: one video",
        "",
        sample(["frames/1.png", "frames/10.png"]),
    ),
    (
        "list of images of different sizes",
        "rejected",
        "frame_sizes",
        sample(["frames/1.png", "wide.png"]),
    ),
    ("list with a damaged image", "rejected", "corrupt_image", sample([["broken.png"]])),
    ("list with a missing image", "rejected", "missing_image", sample([["frames/3.png"]])),
    ("list of no images", "rejected", "bad_video_field", sample([[]])),
    ("path with `../`", "rejected", "outside_data_root", sample("../film.mp4")),
    ("video URL", "rejected", "video_url", sample("https://example.com/1.mp4")),
    ("`video` that is a number", "rejected", "bad_video_field", sample(7)),
    (
        "`video` and `videos` that differ",
        "rejected",
        "bad_video_field",
        {**sample("film.mp4"), "videos": ["one.mp4"]},
    ),
    (
        "fewer `<video>` markers than videos",
        "used; videos without a marker come before the first question",
        "",
        sample(["film.mp4", "turned.mp4"], "what?"),
    ),
    (
        "more `<video>` markers than videos",
        "rejected",
        "marker_without_video",
        sample("film.mp4", "<video><video>"),
    ),
    (
        "part of the type `video` without a video",
        "rejected",
        "marker_without_video",
        {
            "messages": [
                {"role": "user", "content": [{"type": "video"}]},
                {"role": "assistant", "content": "An answer."},
            ]
        },
    ),
    ("video for a model without videos", "rejected", "no_video", sample("film.mp4")),
    ("without PyAV", "rejected; the line says what to install", "video_format", sample("film.mp4")),
]
"""What, what happens, the reason, and the record."""
MODELS = {
    "the same for a model that needs two": "qwen2_5_vl",
    "video for a model without videos": "tiny",
}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def packed(raw, out, cases, **changes):
    """(counts by place, rejected by place, stored samples by id) of a build of some cases."""
    lines = [{"id": what, **record} for what, _, _, record in cases]
    lines.append({"id": "good", "conversations": turns("no file")})
    (raw / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"max_seq_len": 100_000, "max_rejected": 1.0, "workers": 1}
    totals = build(raw, out, **options, **changes).totals
    assert totals["num_read"] == len(lines) == totals["num_packed"] + totals["num_rejected"]
    tables = [pq.read_table(out / f"{name}.parquet").to_pylist() for name in ("counts", "rejected")]
    return tables[0], tables[1], {row["sample_id"]: row for row in read_samples(out)}


def test_each_video_is_used_or_rejected_for_its_reason(raw, tmp_path, capfd):
    builds = {model: [] for model in ("internvl3", *MODELS.values())}
    for case in CASES:
        if case[0] != "without PyAV":
            builds[MODELS.get(case[0], "internvl3")].append(case)
    stored = {}
    for model, cases in builds.items():
        counts, rejected, samples = packed(raw, tmp_path / model, cases, model=model)
        reasons = {row["sample_id"]: row["reason"] for row in rejected}
        reasons |= {row["sample_id"]: "" for row in counts}
        assert reasons == {what: reason for what, _, reason, _ in cases} | {"good": ""}
        for row in rejected:
            assert row["detail"], row
            assert "\n" not in row["detail"], row
        stored |= samples
    assert capfd.readouterr() == ("", "")  # no line of FFmpeg's
    facts = {
        what: list(zip(row["image_widths"], row["image_heights"], row["image_frames"], strict=True))
        for what, row in stored.items()
        if row.get("image_frames")
    }
    assert facts["video turned by its metadata"] == [(48, 64, 4)]
    assert facts["frames hidden by a cut without encoding"][0][2] < 30
    assert facts["folder of images"] == [(40, 30, 3)]
    assert facts["list of images"] == [(40, 30, 2)]
    assert facts["fewer `<video>` markers than videos"] == [(64, 48, 30), (48, 64, 4)]
    frames = pack_frames([FILES[f"frames/{number}.png"] for number in (1, 2, 10)])
    assert stored["folder of images"]["images"] == [frames]
    assert stored["video of 1 frame"]["images"] == [FILES["one.mp4"]]


def test_without_pyav_videos_are_rejected_with_what_to_install(raw, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    video_header._import_av.cache_clear()
    cases = [case for case in CASES if case[0] == "without PyAV"]
    _, rejected, _ = packed(raw, tmp_path / "out", cases, model="internvl3")
    assert [(row["sample_id"], row["reason"]) for row in rejected] == [
        ("without PyAV", "video_format")
    ]
    assert "pip install av" in rejected[0]["detail"]


def test_the_table_of_videos_and_the_cases_are_the_same():
    assert rows_of("Videos") == [
        (what, happens, f"`{reason}`" if reason else "") for what, happens, reason, _ in CASES
    ]
    assert {reason for _, _, reason, _ in CASES} <= {"", *REASONS}

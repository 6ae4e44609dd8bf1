"""A finished build is a dataset: `packer build` of it has the same samples."""

import json
import shutil
from fractions import Fraction

import pytest
from PIL import Image

from isobatch.common.errors import ConfigError, DamagedShard
from isobatch.counting.sample_counter import count_chunk
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.packer.count import count_dataset
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.manifest import read_manifest
from isobatch.shards.tables import read_table
from support.builds.audio_build import MAX_SEQ_LEN, build_heard
from support.builds.layouts import write_mds
from support.builds.packed import build, digests, read_samples
from support.builds.raw_data import good_records, write_dataset
from support.builds.remote_builds import upload, use
from support.clips import make_clip
from support.models.saved_videos import save_video_folder

FORMATS = ("energon", "webdataset", "arrow")
COUNTED = ("sample_id", "num_image_patches", "num_vit_tokens", "num_image_tokens")
COUNTED += ("num_text_tokens", "num_audio_tokens", "num_loss_tokens")


def samples(out):
    return {row.pop("sample_id"): row for row in read_samples(out)}


def counts(out):
    table = read_table(out / "counts.parquet").select(COUNTED)
    return sorted(table.to_pylist(), key=lambda row: row["sample_id"])


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Images and texts, with a column that builds keep."""
    folder = tmp_path_factory.mktemp("raw")
    rows = good_records(folder, 90)
    for number, row in enumerate(rows):
        row["score"] = number / 8
    return write_dataset(folder, rows)


@pytest.mark.parametrize("shards", FORMATS)
def test_samples_are_the_same_under_other_caps(raw, tmp_path, shards):
    kept = {"keep_columns": ("score",)}
    build(raw, tmp_path / "first", format=shards, shard_mb=1, max_seq_len=3000, **kept)
    build(raw, tmp_path / "plain", max_seq_len=5000, **kept)
    again, place = tmp_path / "again", tmp_path / "first"
    build(place, again, max_seq_len=5000, **kept)
    assert len(read_manifest(place).shards) > 1
    assert samples(again) == samples(tmp_path / "plain")
    assert counts(again) == counts(tmp_path / "plain")
    assert "never_read" not in read_manifest(again).values


def test_sounds_are_the_same(tmp_path):
    plain = build_heard(tmp_path)
    options = {"model": "tiny_audio", "max_seq_len": MAX_SEQ_LEN}
    for shards in FORMATS:
        build(tmp_path, tmp_path / shards, format=shards, **options)
        again = tmp_path / f"{shards}-again"
        build(tmp_path / shards, again, **options)
        assert samples(again) == samples(plain)
        assert counts(again) == counts(plain)


@pytest.mark.parametrize("kind", ["build", "mds"])
def test_a_build_that_was_stopped_goes_on(raw, tmp_path, monkeypatch, kind):
    place = tmp_path / "in"
    if kind == "build":
        build(raw, place, format="energon")
    else:
        rows = [{"text": "word " * number} for number in range(1, 91)]
        write_mds(place, {"text": "str"}, rows, per_shard=20)
    build(place, tmp_path / "whole")
    done = []

    def stopping(job):
        done.append(job.number)
        if len(done) == 3:
            raise KeyboardInterrupt
        return count_chunk(job)

    monkeypatch.setattr(count_dataset, "count_chunk", stopping)
    with pytest.raises(KeyboardInterrupt):
        build(place, tmp_path / "again")
    build(place, tmp_path / "again")
    assert done[:4] == [0, 1, 2, 2]
    assert digests(tmp_path / "again") == digests(tmp_path / "whole")


def test_options_of_reading_and_kept_columns_do_not_touch_its_samples(raw, tmp_path):
    rows = json.loads((raw / "annotations.json").read_text())
    more = {"question": "What?", "answers": ["a", "b"], "options": 7, "weight": 0}
    kept = tuple(more)
    shutil.copytree(raw, tmp_path / "raw")
    write_dataset(tmp_path / "raw", [row | more for row in rows[:30]])
    build(tmp_path / "raw", tmp_path / "first", keep_columns=kept)
    build(tmp_path / "first", tmp_path / "again", answers="all", choices="letters")
    build(tmp_path / "first", tmp_path / "kept", keep_columns=kept)
    again = samples(tmp_path / "kept")
    assert again == samples(tmp_path / "first")
    assert samples(tmp_path / "again").keys() == again.keys()


def test_a_column_that_is_not_kept_again_is_reported(raw, tmp_path):
    build(raw, tmp_path / "first", keep_columns=("score",))
    build(tmp_path / "first", tmp_path / "again")
    (keys,) = read_manifest(tmp_path / "again").values["never_read"].values()
    assert keys["score"][0] == 90


@pytest.mark.parametrize("shards", FORMATS)
def test_videos_keep_their_places(tmp_path, shards):
    folder = tmp_path / "raw"
    folder.mkdir()
    clip = make_clip(30, (80, 60), rate=Fraction(24))
    (folder / "clip.mp4").write_bytes(clip.content)
    for number in range(4):
        Image.new("RGB", (90, 60), (60, 90, 30 + number)).save(folder / f"{number}.png")
    frames = [f"{number}.png" for number in range(4)]
    media = (
        {"video": "clip.mp4"},
        {"image": "0.png"},
        {"videos": ["clip.mp4", frames], "image": "1.png"},
        {},
    )
    rows = []
    for number in range(12):
        about = media[number % 4]
        marks = "<video><image><video>" if "videos" in about else "".join(f"<{k}>" for k in about)
        turns = [("human", f"{marks} what? {number}"), ("gpt", f"answer {number}")]
        turns = [{"from": role, "value": text} for role, text in turns]
        rows.append({"id": f"s{number}", "conversations": turns, **about})
    (folder / "annotations.json").write_text(json.dumps(rows))
    model = save_video_folder("qwen2_5_vl", tmp_path / "model", {})
    options = {"model": model, "tokenizer": model}
    build(folder, tmp_path / "plain", **options)
    build(folder, tmp_path / "first", format=shards, **options)
    build(tmp_path / "first", tmp_path / "again", **options)
    assert len(samples(tmp_path / "plain")) == 12
    assert samples(tmp_path / "again") == samples(tmp_path / "plain")
    assert counts(tmp_path / "again") == counts(tmp_path / "plain")


@pytest.mark.parametrize("shards", FORMATS)
def test_loaders_give_its_samples_without_a_build(raw, tmp_path, monkeypatch, shards):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build(raw, tmp_path / "first", format=shards)
    ranks = {"workers": 0, "dp_rank": 0, "dp_world_size": 1}
    online = BalancedLoader(
        str(tmp_path / "first"), model="tiny", tokenizer=str(demo_tokenizer_path()), **ranks
    )
    found = []
    for loader in (StreamingLoader(tmp_path / "first", **ranks), online):
        found.append({})
        for step in loader:
            for batch in step:
                borders = batch.cu_seqlens.tolist()
                for number, name in enumerate(batch.sample_ids):
                    part = slice(*borders[number : number + 2])
                    row = [batch.input_ids.ravel()[part], batch.labels.ravel()[part]]
                    found[-1][name] = [values.tolist() for values in row]
        loader.close()
    assert len(found[0]) == 90
    assert found[0] == found[1]


@pytest.mark.server
@pytest.mark.parametrize("shards", FORMATS)
def test_a_build_in_a_bucket_is_read_there(raw, s3, tmp_path, monkeypatch, shards):
    use(monkeypatch, s3)
    build(raw, tmp_path / "first", format=shards, shard_mb=1)
    build(raw, tmp_path / "plain")
    uri = upload(s3, tmp_path / "first", f"{tmp_path.name}/first")
    build(uri, tmp_path / "again")
    assert samples(tmp_path / "again") == samples(tmp_path / "plain")


def test_a_build_and_new_data_are_a_mixture(raw, tmp_path):
    build(raw, tmp_path / "first", format="energon")
    lines = f'[[datasets]]\ndataset = "{tmp_path / "first"}"\nname = "old"\nrepeat = 2\n'
    lines += f'[[datasets]]\ndataset = "{raw}"\nname = "new"\nlimit = 7\n'
    (tmp_path / "mix.toml").write_text(lines)
    build(tmp_path / "mix.toml", tmp_path / "out")
    assert read_manifest(tmp_path / "out").values["totals"]["num_packed"] == 187


def test_what_does_not_fit_is_one_line(raw, tmp_path):
    place = tmp_path / "first"
    build(raw, place, format="energon")
    with pytest.raises(ConfigError, match=r"was packed with another one.*give its own --model"):
        build(place, tmp_path / "out", model="internvl_1_5")
    with pytest.raises(ConfigError, match="is a build, which has no splits, so no 'val'"):
        build(f"{place}@val", tmp_path / "out")
    refs = tmp_path / "refs"
    build(raw, refs, format="refs")
    with pytest.raises(ConfigError, match="a build that refers to its files: name what it was"):
        build(refs, tmp_path / "out")


@pytest.mark.parametrize("shards", ["energon", "arrow"])
def test_a_damaged_group_ends_the_build(raw, tmp_path, shards):
    place = tmp_path / "first"
    build(raw, place, format=shards)
    shard = next((place / "shards").glob("shard-00000.*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 :] = b"\1" * (len(data) - len(data) // 2)
    shard.write_bytes(data)
    with pytest.raises(DamagedShard, match=r"group \d+: not readable .*; run `packer verify`"):
        build(place, tmp_path / "out")

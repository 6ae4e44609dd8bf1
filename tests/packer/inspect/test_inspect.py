"""`packer inspect`: every token of a group is shown, as what it is; what is damaged is said and
does not stop it.
"""

import io
import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from isobatch.common.errors import ConfigError, DamagedShard, DataError
from isobatch.common.visible_text import visible
from isobatch.packer.build import Builder
from isobatch.packer.cli import app
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.inspect.html import render_group
from isobatch.packer.inspect.terminal import print_group
from isobatch.packer.inspect.token_text import PieceKind, read_pieces
from isobatch.packer.inspect.view import Thumbnail, inspect_group, make_thumbnail
from isobatch.packer.progress import StageProgress
from isobatch.shards.index import open_index
from isobatch.shards.manifest import read_manifest
from support.builds.raw_data import good_records, options, record, write_dataset
from support.cases import for_each

TOKENIZER = str(demo_tokenizer_path())
FORMATS = ("arrow", "webdataset", "refs")
LONG = "long " * 500
EVIL = "\x1b[2J[bold]red[/bold] <script>alert(1)</script>"


def build(dataset, out, shard_format):
    config = BuildConfig(**options(dataset, out, format=shard_format))
    return Builder(config, StageProgress(Console(file=io.StringIO()))).build()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "raw"
    rows = good_records(folder, 40)
    sideways = Image.new("RGB", (300, 100), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways.save(folder / "images" / "sideways.jpg", exif=exif)
    rows.append(record(900, ["images/sideways.jpg"], text=EVIL))
    rows.append(record(901, text=LONG, answer="short"))
    return write_dataset(folder, rows)


@pytest.fixture(scope="module")
def builds(dataset, tmp_path_factory):
    """Format -> folder of a build of the dataset."""
    root = tmp_path_factory.mktemp("builds")
    for name in FORMATS:
        build(dataset, root / name, name)
    return {name: root / name for name in FORMATS}


def views(out, **arguments):
    number = read_manifest(out).values["totals"]["num_groups"]
    return [inspect_group(out, group, **arguments) for group in range(number)]


def sample_of(out, sample_id, **arguments):
    samples = [sample for view in views(out, **arguments) for sample in view.samples]
    return next(sample for sample in samples if sample.sample_id == sample_id)


def ids_of(sample):
    return [token for piece in sample.pieces for token in piece.input_ids]


def test_every_token_of_every_group_is_shown_once_in_order(builds):
    stored = {}
    for path in sorted((builds["arrow"] / "shards").iterdir()):
        for batch in pa.ipc.open_file(str(path)).read_all().to_batches():
            stored |= {row["sample_id"]: row for row in batch.to_pylist()}
    shown = [sample for view in views(builds["arrow"]) for sample in view.samples]
    assert sorted(sample.sample_id for sample in shown) == sorted(stored)
    for sample in shown:
        row = stored[sample.sample_id]
        assert ids_of(sample) == row["input_ids"]
        learned = [
            t for piece in sample.pieces for t in piece.input_ids if piece.kind is PieceKind.label
        ]
        assert learned == [label for label in row["labels"] if label != -100]
        assert [image.num_bytes for image in sample.images] == [len(data) for data in row["images"]]
        assert [(i.width, i.height) for i in sample.images] == list(
            zip(row["image_widths"], row["image_heights"], strict=True)
        )


def test_all_formats_show_the_same(builds):
    shown = {name: views(out, tokenizer=TOKENIZER) for name, out in builds.items()}
    for groups in zip(*shown.values(), strict=True):
        plain = [group.to_json() for group in groups]
        for value in plain:
            value.pop("shard")
            value.pop("num_bytes")
            for sample in value["samples"]:
                for image in sample["images"]:
                    image.pop("name")
        assert plain[0] == plain[1] == plain[2]
    assert any(
        image.name == "images/sideways.jpg" for s in shown["refs"][0].samples for image in s.images
    ) or (sample_of(builds["refs"], "s900").images[0].name == "images/sideways.jpg")


def test_loads_are_those_of_the_samples_and_of_the_tables(builds):
    out = builds["arrow"]
    counts = {row["sample_id"]: row for row in pq.read_table(out / "counts.parquet").to_pylist()}
    for view in views(out):
        for sample in view.samples:
            row = counts[sample.sample_id]
            assert sample.counts == {name: row[name] for name in sample.counts}
            assert sample.source == row["source"]
            assert len(ids_of(sample)) == row["seq_len"]
            assert sum(image.num_patches for image in sample.images) == row["num_image_patches"]
        for name, total in view.counts.items():
            assert total == sum(sample.counts[name] for sample in view.samples)
        values = view.to_json()
        assert values["fill"] == view.counts["seq_len"] / view.limits.max_seq_len <= 1
        patches = view.counts["num_image_patches"]
        assert values["vision_fill"] == patches / view.limits.max_vision <= 1


def test_text_is_the_conversation_and_what_is_learned_is_the_answer(builds, dataset):
    raw = {row["id"]: row for row in json.loads((dataset / "annotations.json").read_text())}
    for view in views(builds["arrow"], tokenizer=TOKENIZER):
        for sample in view.samples:
            question, answer = (turn["value"] for turn in raw[sample.sample_id]["conversations"])
            text = "".join(
                "<image>" if piece.file is not None else piece.text for piece in sample.pieces
            )
            assert question in text.replace("<img><image></img>", "<image>")
            assert [piece.text for piece in sample.pieces if piece.kind is PieceKind.label] == [
                f"{answer}<|im_end|>\n"
            ]
            files = [
                (piece.file, len(piece.input_ids))
                for piece in sample.pieces
                if piece.kind is PieceKind.image
            ]
            assert files == [(place, image.num_tokens) for place, image in enumerate(sample.images)]


def test_images_and_clips_without_markup_between_them_are_told_apart():
    files = {PieceKind.image: (9, [(0, 3), (1, 2)]), PieceKind.audio: (8, [(0, 1), (1, 2)])}
    ids = np.array([1, 9, 9, 9, 9, 9, 8, 8, 8, 5], np.int32)
    pieces = read_pieces(ids, np.full(10, -100, np.int32), files, None)
    assert [(str(piece.kind), piece.file, len(piece.input_ids)) for piece in pieces] == [
        ("text", None, 1), ("image", 0, 3), ("image", 1, 2),
        ("audio", 0, 1), ("audio", 1, 2), ("text", None, 1),
    ]  # fmt: skip
    assert read_pieces(ids[:0], ids[:0], files, None) == ()


def test_a_model_without_audio_and_tokens_of_no_file_lose_no_token():
    files = {PieceKind.image: (9, [(0, 2)]), PieceKind.audio: (None, [])}
    ids = np.array([9, 9, 9, 9, 7], np.int32)
    pieces = read_pieces(ids, np.array([-100, -100, -100, -100, 7], np.int32), files, None)
    assert [token for piece in pieces for token in piece.input_ids] == ids.tolist()
    assert pieces[-1].kind is PieceKind.label


def test_pieces_of_a_sentencepiece_tokenizer_keep_their_spaces():
    words = ["<unk>", "\u2581a", "\u2581b", "\u2581c"]
    decoder = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>")
    )
    decoder.pre_tokenizer = pre_tokenizers.Metaspace()
    decoder.decoder = decoders.Metaspace()
    ids = np.array([1, 2, 3], np.int32)
    pieces = read_pieces(ids, np.array([-100, 2, -100], np.int32), {}, decoder)
    assert [piece.text for piece in pieces] == ["a", " b", " c"]


def test_without_a_tokenizer_ids_are_shown_and_how_to_get_text_is_said(builds):
    view = inspect_group(builds["arrow"])
    assert {piece.text for sample in view.samples for piece in sample.pieces} == {None}
    assert "--tokenizer" in printed(view)
    assert "--tokenizer" in render_group(view)
    first = view.samples[0].pieces[0].input_ids
    assert f"[{' '.join(map(str, first[:3]))}" in printed(view)


def test_another_tokenizer_is_refused(builds, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(TOKENIZER, other)
    path = other / "tokenizer_config.json"
    template = other / "chat_template.jinja"
    if template.exists():
        template.write_text(template.read_text() + " ")
    else:
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"chat_template": config["chat_template"] + " "}))
    with pytest.raises(ConfigError, match="not the one of this build"):
        inspect_group(builds["arrow"], tokenizer=str(other))
    with pytest.raises(ConfigError, match="no such folder"):
        inspect_group(builds["arrow"], tokenizer="no/such/folder/here")


def test_the_group_shown_by_default_is_the_middle_one_and_says_so(builds):
    loads = open_index(read_manifest(builds["arrow"])).column("num_image_patches")
    view = inspect_group(builds["arrow"])
    assert view.vision_load == np.sort(loads)[len(loads) // 2] == loads[view.group]
    assert loads.min() < loads.max()
    assert "middle" in printed(view)
    assert "middle" not in printed(inspect_group(builds["arrow"], 0))


@pytest.mark.parametrize("group", [-1, 10**6])
def test_a_group_that_is_not_there_is_a_wrong_call(builds, group):
    with pytest.raises(ConfigError, match=rf"--group {group}: .* 0 to"):
        inspect_group(builds["arrow"], group)


def test_an_unfinished_build_is_said_to_be_one(builds, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        inspect_group(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no finished build"):
        inspect_group(tmp_path)


def test_a_missing_or_damaged_image_is_said_where_it_belongs(builds, dataset, tmp_path):
    raw = tmp_path / "raw"
    shutil.copytree(dataset, raw)
    out = tmp_path / "out"
    build(raw, out, "refs")
    target = raw / "images" / "sideways.jpg"
    target.write_bytes(target.read_bytes()[:200])
    cut = sample_of(out, "s900").images[0]
    assert cut.thumbnail is None
    assert (cut.num_bytes, cut.width, cut.height) == (200, 100, 300)
    assert "truncated" in cut.problem.lower()
    Image.new("RGB", (10, 10)).save(target)
    assert (
        "is 10 x 10 now, but was counted as 100 x 300" in sample_of(out, "s900").images[0].problem
    )
    target.unlink()
    missing = sample_of(out, "s900").images[0]
    assert (missing.num_bytes, missing.thumbnail) == (None, None)
    assert "No such file" in missing.problem
    view = next(
        view for view in views(out) if "s900" in [sample.sample_id for sample in view.samples]
    )
    words = printed(view).split()  # a long folder's name moves where a line ends
    assert " ".join(words).count("No such file") == 1
    assert render_group(view).count("no picture") == 1


@pytest.mark.parametrize("name", ["arrow", "webdataset"])
def test_a_damaged_group_is_one_line_with_its_shard(builds, name, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(builds[name], out)
    manifest = read_manifest(out)
    index = open_index(manifest)
    number, offset, length = index.row(0, "shard", "offset", "length")
    shard = out / manifest.shards[number].name
    whole = shard.read_bytes()
    shard.write_bytes(whole[:offset] + b"\x07" * length + whole[offset + length :])
    with pytest.raises(DamagedShard, match=rf"{shard.name}.*packer verify"):
        inspect_group(out, 0)
    shard.write_bytes(whole[: offset + length // 2])
    with pytest.raises(DamagedShard, match=rf"{shard.name}.*packer verify"):
        inspect_group(out, 0)
    shard.unlink()
    with pytest.raises(DamagedShard, match=rf"{shard.name}.*No such file"):
        inspect_group(out, 0)


def test_thumbnails_are_small_upright_and_keep_their_shape(builds):
    image = sample_of(builds["arrow"], "s900").images[0]
    assert (image.thumbnail.width, image.thumbnail.height) == (53, 160)
    assert (image.width, image.height) == (100, 300)
    assert image.problem == ""


@for_each("mode", ["RGB", "L", "P", "1", "CMYK", "RGBA", "LA", "I;16", "F"])
def test_every_kind_of_picture_has_a_thumbnail(mode):
    buffer = io.BytesIO()
    Image.new(mode, (400, 10)).save(
        buffer, "TIFF" if mode in ("CMYK", "F", "I;16", "LA") else "PNG"
    )
    thumbnail = make_thumbnail(buffer.getvalue())
    assert isinstance(thumbnail, Thumbnail)
    assert (thumbnail.width, thumbnail.height) == (160, 4)
    assert thumbnail.uri.startswith("data:image/")


@pytest.mark.parametrize(
    "data",
    [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + bytes(40), b"\xff\xd8\xff\xe0", b"BM" + bytes(60)],
)
def test_what_is_no_picture_is_a_reason_in_one_line(data):
    reason = make_thumbnail(data)
    assert isinstance(reason, str)
    assert 0 < len(reason.splitlines()) == 1
    assert "0x" not in reason


def printed(view, width=100):
    text = io.StringIO()
    print_group(view, Console(file=text, width=width))
    return text.getvalue()


def test_the_terminal_view_fits_100_columns_and_obeys_no_control_character(builds):
    for view in views(builds["refs"], tokenizer=TOKENIZER):
        text = printed(view)
        assert max(map(len, text.splitlines())) <= 100
        assert "\x1b" not in text
    texts = "".join(printed(view) for view in views(builds["arrow"], tokenizer=TOKENIZER))
    assert "\\x1b[2J[bold]red[/bold] <script>" in texts, "markup of the data must be text"
    assert re.search(r"\[\.\.\. 2,\d{3} more", texts), "a long text is cut, and says so"
    assert "\u27e6short 901<|im_end|>\u21b5\u27e7" in texts


def test_the_page_shows_hostile_text_as_text(builds):
    pages = "".join(render_group(view) for view in views(builds["arrow"], tokenizer=TOKENIZER))
    assert "<script" not in pages
    assert "&lt;script&gt;alert(1)" in pages
    assert visible("\x1b[2J") in pages
    assert LONG in pages, "the page cuts nothing"


def test_a_sample_is_shown_alone_with_its_groups_loads_or_why_it_is_not_there(
    builds, dataset, tmp_path, run
):
    for out in builds.values():
        for number, whole in enumerate(views(out, tokenizer=TOKENIZER)):
            sample = whole.samples[-1]
            view = inspect_group(out, sample=sample.sample_id, tokenizer=TOKENIZER)
            assert (view.group, view.samples) == (number, whole.samples)
            text = printed(view)
            assert f"\n{len(whole.samples)}  {sample.sample_id}  (" in text
            others = [each.sample_id for each in whole.samples[:-1]]
            assert not any(f"  {each}  (" in text or f">{each}<" in text for each in others)
            (shown,) = view.to_json()["samples"]
            assert shown["sample_id"] == sample.sample_id
    bad = write_dataset(tmp_path / "raw", [record(0), record(1, ["no.png"]), *([record(2)] * 40)])
    build(bad, tmp_path / "out", "arrow")
    for sample, message in (("s1", "rejected: missing_image: no.png"), ("s9", "no sample with")):
        with pytest.raises(ConfigError, match=f"--sample {sample}: .*{message}"):
            inspect_group(tmp_path / "out", sample=sample)
    with pytest.raises(ConfigError, match="--group or --sample"):
        run(tmp_path / "out", "--group", 0, "--sample", "s0")


def test_one_of_a_thing_has_its_own_word(builds):
    texts = "".join(printed(view) for out in builds.values() for view in views(out))
    assert not re.search(r"(?<![\d,.])1 (patches|image patches|samples|tokens|LLM tokens)", texts)
    assert "1 patch," in texts


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(
        app, ["inspect", *map(str, arguments)], catch_exceptions=False
    )


def test_the_command_prints_json_or_writes_a_page(builds, run, tmp_path):
    out = builds["webdataset"]
    assert "LLM tokens" in run(out, "--group", 0).stdout
    values = json.loads(run(out, "--group", 1, "--tokenizer", TOKENIZER, "--json").stdout)
    assert values == json.loads(json.dumps(inspect_group(out, 1, tokenizer=TOKENIZER).to_json()))
    page = tmp_path / "group.html"
    assert str(page) in run(out, "--html", page).stdout
    assert "data:image/" in page.read_text("utf-8")

"""Energon's datasets by its own code, packed; `test_trainers_datasets.py` runs these in its
environment.

What Energon reads of each dataset is what the build has, and a build is that of the same records as
JSON.
"""

import io
import json
import shutil
import tarfile
from collections import Counter

import pytest
import yaml
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    InterleavedSample,
    Sample,
    SampleDecoder,
    WorkerConfig,
    edataclass,
    get_loader,
    get_val_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from megatron.energon.metadataset.loader import load_dataset

from isobatch.loaders import BalancedLoader
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.sources.dataset import find_dataset
from isobatch.shards.manifest import read_manifest
from isobatch.shards.tables import read_table
from support.builds.packed import build, read_samples
from support.builds.raw_data import write_image
from support.builds.remote_builds import upload, use

COUNT = 24


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        write_image(folder / f"{number:03d}.jpg", 40 + 9 * number, 50, number)
    return folder


def rows_of(kind):
    """Records as JSON, whose images are those of `images`."""
    rows = []
    for number in range(COUNT):
        row = {"id": f"{number:03d}", "image": f"{number:03d}.jpg"}
        question, answers = f"What is {number}?", [f"cat {number}", "dog"]
        rows.append(
            row
            | {
                "captioning": {"caption": "word " * number + "end."},
                "vqa": {"question": question, "answers": answers},
                "crude": {
                    "conversations": [
                        {"from": "human", "value": f"<image>\n{question}"},
                        {"from": "gpt", "value": "word " * number},
                    ]
                },
            }[kind]
        )
    return rows


def members_of(kind, row, image):
    """Members of a sample as people write them for Energon."""
    about = json.dumps({key: row[key] for key in row if key != "id"}).encode()
    return {
        "captioning": {"jpg": image, "txt": row.get("caption", "").encode()},
        "vqa": {
            "jpg": image,
            "context.txt": row.get("question", "").encode(),
            "answers.json": json.dumps(row.get("answers")).encode(),
        },
        "crude": {"jpg": image, "json": about},
    }[kind]


ABOUT = {
    "captioning": ("CaptioningSample", {"image": "jpg", "caption": "txt"}),
    "vqa": ("VQASample", {"image": "jpg", "context": "context.txt", "answers": "answers.json"}),
    "crude": None,
}


def write_tars(folder, samples, per_tar=7):
    folder.mkdir(parents=True)
    names = []
    for start in range(0, len(samples), per_tar):
        names.append(f"shard-{start:03d}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for key, members in samples[start : start + per_tar]:
                for suffix, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return names


def prepare(folder, names, about=None, **others):
    WebdatasetPreparator.prepare_dataset(
        folder,
        names,
        split_parts_ratio=[("train", 0.7), ("val", 0.3)],
        shuffle_seed=None,
        workers=1,
    )
    values = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    if about is not None:
        kind, fields = about
        values = {
            "sample_type": {"__module__": "megatron.energon", "__class__": kind},
            "field_map": fields,
        }
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(values | others))
    return folder


def write_kind(kind, images, folder, **others):
    samples = [
        (row["id"], members_of(kind, row, (images / row["image"]).read_bytes()))
        for row in rows_of(kind)
    ]
    return prepare(folder, write_tars(folder, samples), ABOUT[kind], **others)


def json_build(rows, images, out):
    (images / f"{out.name}.json").write_text(json.dumps(rows))
    build(images / f"{out.name}.json", out, data_root=str(images))
    return by_id(out)


def by_id(out):
    return {row["sample_id"]: row for row in read_samples(out)}


def same(ours, expected):
    for name, row in ours.items():
        for column in ("input_ids", "labels", "images", "image_widths", "image_heights"):
            assert row[column] == expected[name][column], (name, column)


@edataclass
class Keyed(Sample):
    """A crude sample's key and what its cooker finds."""

    image: bytes = b""


class Keys(DefaultTaskEncoder):
    """Gives what Energon reads, undecoded."""

    decoder = None

    def __init__(self, cook=None):
        super().__init__()
        self.cookers = () if cook is None else (Cooker(cook),)

    def encode_sample(self, sample):
        return sample

    def batch(self, samples):
        return samples

    def encode_batch(self, batch):
        return batch


class Texts(Keys):
    """Gives what Energon reads, JSON as values."""

    decoder = SampleDecoder()


def energon_keys(place, split, cook=None, encoder=Keys):
    """Keys of the samples that Energon's own loader gives, in its order."""
    dataset = get_val_dataset(
        place,
        split_part=split,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        task_encoder=encoder(cook),
    )
    return [sample for batch in get_loader(dataset) for sample in batch]


@stateless
def cook_crude(sample):
    return Keyed(
        __key__=sample["__key__"],
        __restore_key__=sample["__restore_key__"],
        image=sample.get("jpg", b""),
    )


@pytest.mark.parametrize("kind", ABOUT)
def test_each_kind_is_packed_as_the_same_records_of_json(images, tmp_path, kind):
    place = write_kind(kind, images, tmp_path / "set", subflavors={"from": "web"})
    expected = json_build(rows_of(kind), images, tmp_path / "json")
    seen = Counter()
    for split in ("train", "val"):
        out = tmp_path / f"out-{split}"
        build(f"{place}@{split}", out)
        ours = by_id(out)
        same(ours, expected)
        cook = cook_crude if kind == "crude" else None
        theirs = [sample.__key__.rpartition("/")[2] for sample in energon_keys(place, split, cook)]
        assert sorted(ours) == sorted(theirs)
        seen.update(ours.keys())
        (never,) = read_manifest(out).values["never_read"].values()
        assert never["subflavors of dataset.yaml"][1] == '{"from": "web"}'
    assert set(seen.values()) == {1}
    assert seen.keys() == expected.keys()


def interleaved_rows():
    """Texts with 0 to 2 pictures between them; a picture may come first or follow another."""
    rows = []
    for number in range(COUNT):
        name, other = f"{number:03d}.jpg", f"{(number + 1) % COUNT:03d}.jpg"
        start, end = f"It is {number}.", "word " * number + "end."
        parts = [[start, end], [start, name, end], [name, other, end], [name, start, other, end]]
        rows.append({"id": f"{number:03d}", "parts": parts[number % 4]})
    return rows


def as_document(parts, names=None):
    """The record whose texts and images take turns as `parts` do; `names` of images in their place.

    Lists of one length, as in OBELICS: where one has a value, the other has none.
    """
    names = [part if part.endswith(".jpg") else None for part in parts] if names is None else names
    texts = [None if name else part for part, name in zip(parts, names, strict=True)]
    return {"texts": texts, "images": names}


@pytest.mark.parametrize("has_images", [False, True])
def test_interleaved_samples_are_those_that_energon_gives(images, tmp_path, has_images):
    """Texts by its `field_map`. Pictures between them are crude samples, which a cooker joins."""
    samples, expected, sequences = [], [], {}
    for row in interleaved_rows():
        parts = [part for part in row["parts"] if has_images or not part.endswith(".jpg")]
        files = {
            f"{n}.jpg": (images / part).read_bytes()
            for n, part in enumerate(parts)
            if part.endswith(".jpg")
        }
        names = [f"{row['id']}.{n}.jpg" if f"{n}.jpg" in files else None for n in range(len(parts))]
        about = as_document(parts, names) if has_images else {"sequence": parts}
        samples.append((row["id"], {"json": json.dumps(about).encode(), **files}))
        expected.append({"id": row["id"], **as_document(parts)})
        sequences[row["id"]] = [files.get(f"{n}.jpg", part) for n, part in enumerate(parts)]
    about = None if has_images else ("InterleavedSample", {"sequence": "json[sequence]"})
    place = prepare(tmp_path / "set", write_tars(tmp_path / "set", samples), about)
    expected = json_build(expected, images, tmp_path / "json")
    num_samples = 0
    for split in ("train", "val"):
        build(f"{place}@{split}", tmp_path / split)
        ours = by_id(tmp_path / split)
        same(ours, expected)
        cook, encoder = (cook_interleaved, Keys) if has_images else (None, Texts)
        theirs = energon_keys(place, split, cook, encoder)
        assert len(theirs) == len(ours)
        num_samples += len(ours)
        for sample in theirs:
            name = sample.__key__.rpartition("/")[2]
            assert sample.sequence == sequences[name]
            pictures = [part for part in sample.sequence if isinstance(part, bytes)]
            assert ours[name]["images"] == pictures
    assert num_samples == COUNT


@stateless
def cook_interleaved(sample):
    about, key = json.loads(sample["json"]), sample["__key__"].rpartition("/")[2]
    parts = zip(about["texts"], about["images"], strict=True)
    return InterleavedSample(
        __key__=sample["__key__"],
        __restore_key__=sample["__restore_key__"],
        sequence=[
            sample[image.removeprefix(f"{key}.")] if image else text for text, image in parts
        ],
    )


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    JsonlPreparator.prepare_dataset(EPath(file))
    return file


def write_yaml(file, splits, version="MetadatasetV2"):
    values = {"__module__": "megatron.energon", "__class__": version, "splits": splits}
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def data(images, tmp_path_factory):
    """Datasets of all kinds, JSON lines, and images in shards of their own."""
    folder = tmp_path_factory.mktemp("data")
    for kind in ABOUT:
        write_kind(kind, images, folder / kind)
    names = write_tars(
        folder / "pixels",
        [(path.stem, {"jpg": path.read_bytes()}) for path in sorted(images.glob("*.jpg"))],
    )
    prepare(folder / "pixels", names)
    shutil.copytree(images, folder / "files", ignore=shutil.ignore_patterns("*.json"))
    write_lines(folder / "lines" / "chat.jsonl", rows_of("crude"))
    return folder


BLEND = [
    {"path": "captioning", "weight": 2, "subflavors": {"kind": "a"}},
    {"path": "vqa", "weight": 1, "split_part": "val"},
    {"path": "inner.yaml", "weight": 1},
]


def test_weights_of_a_nested_blend_are_those_of_the_mixture(data):
    write_yaml(
        data / "inner.yaml",
        {"train": {"datasets": [{"path": "crude", "weight": 3}, {"path": "vqa"}]}},
        "Metadataset",
    )
    place = write_yaml(data / "mix.yaml", {"train": {"blend": BLEND}, "val": {"path": "vqa"}})
    dataset = find_dataset(str(place), None)
    weights = {part.name: part.weight for part in dataset.parts}
    assert weights == {"captioning": 0.5, "vqa": 0.25, "crude": 0.1875, "vqa-2": 0.0625}
    assert dict(dataset.parts[0].located.unread) == {"subflavors of mix.yaml": '{"kind": "a"}'}
    # as Energon blends them
    loaded = get_val_dataset_weights(place)
    assert loaded == pytest.approx(sorted(weights.values()))
    (part,) = find_dataset(f"{place}@val", None).parts
    assert (part.weight, part.repeat) == (None, 1.0)


def get_val_dataset_weights(place):
    found = load_dataset(place).get_datasets(
        training=True,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    return sorted(one.weight for one in found.datasets)


def test_a_blend_is_packed_by_its_weights(data, tmp_path):
    blend = [{"path": "captioning", "weight": 3}, {"path": "crude", "weight": 1}]
    place = write_yaml(data / "shares.yaml", {"train": {"blend": blend}})
    build(place, tmp_path / "out")
    train = find_dataset(f"{data / 'crude'}", None).parts[0].located
    each = sum(dict(train.options)["counts"])
    rejected = read_table(tmp_path / "out" / "rejected.parquet").to_pylist()
    drawn = round(each / 3)  # as many as there are at 3 to 1 without repeating any
    assert read_manifest(tmp_path / "out").values["totals"]["num_packed"] == each + drawn
    assert Counter((row["source"], row["reason"]) for row in rejected) == {
        ("crude", "not_drawn"): each - drawn
    }


def test_repetitions_and_subsets_are_those_that_energon_reads(data, tmp_path):
    epochized = [
        {"path": "captioning", "repetitions": 2, "subset": {"range": ["25%", "75%"]}},
        {"path": "vqa", "subset": {"range": [3, 9]}},
        {"path": "lines/chat.jsonl", "subset": {"range": [20, "end"]}, "aux": {"px": "pixels"}},
    ]
    splits = {"train": {"blend_epochized": epochized, "subset": {"range": ["0%", "50%"]}}}
    splits["train"]["blend_epochized"][2].pop("aux")
    splits["train"]["blend_epochized"][2]["aux"] = {"images": "filesystem://files"}
    place = write_yaml(data / "often.yaml", splits)
    build(place, tmp_path / "out")
    ours = Counter(row["sample_id"].partition("#")[0] for row in read_samples(tmp_path / "out"))

    @stateless
    def cook(sample, images):
        about = sample["json"]
        return Keyed(
            __key__=json.loads(about)["id"] if isinstance(about, bytes) else about["id"],
            __restore_key__=sample["__restore_key__"],
        )

    single = {}
    for number, entry in enumerate(epochized):
        inner = {"path": entry["path"], "subset": entry["subset"], "aux": entry.get("aux")}
        inner = {key: value for key, value in inner.items() if value}
        one = {"train": {"blend": [inner], "subset": {"range": ["0%", "50%"]}}}
        file = write_yaml(data / f"one{number}.yaml", one)
        for sample in energon_keys(file, "train", cook):
            key = sample.__key__.rpartition("/")[2]
            single[key] = single.get(key, 0) + entry.get("repetitions", 1)
    assert ours == single


@pytest.mark.parametrize("aux", [{"px": "pixels"}, {"px": "filesystem://files"}])
def test_files_of_json_lines_are_found_in_other_datasets(data, images, tmp_path, aux):
    entry = {"path": "lines/chat.jsonl", "aux": aux}
    place = write_yaml(data / "poly.yaml", {"train": entry})
    build(place, tmp_path / "out")
    ours, expected = (
        by_id(tmp_path / "out"),
        json_build(rows_of("crude"), images, tmp_path / "json"),
    )
    same(ours, expected)
    assert ours.keys() == expected.keys()

    @stateless
    def cook(sample, px):
        about = sample["json"]
        return Keyed(
            __key__=about["id"],
            __restore_key__=sample["__restore_key__"],
            image=px.get(about["image"], sample),
        )

    for sample in energon_keys(place, "train", cook):
        image = sample.image
        assert bytes(image) == ours[sample.__key__]["images"][0]


@pytest.mark.server
def test_metadatasets_and_their_files_are_read_from_a_bucket(
    data, images, s3, tmp_path, monkeypatch
):
    use(monkeypatch, s3)
    entry = {"path": "lines/chat.jsonl", "aux": {"px": "pixels"}}
    write_yaml(data / "remote.yaml", {"train": {"blend_epochized": [entry]}})
    uri = upload(s3, data, f"{tmp_path.name}/data")
    build(f"{uri}/remote.yaml", tmp_path / "out")
    expected = json_build(rows_of("crude"), images, tmp_path / "json")
    ours = by_id(tmp_path / "out")
    same(ours, expected)
    assert ours.keys() == expected.keys()


def test_the_loader_without_a_build_reads_metadatasets(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = {"path": "lines/chat.jsonl", "aux": {"px": "pixels"}, "repetitions": 2}
    blend = {"blend_epochized": [entry, {"path": "captioning"}]}
    place = write_yaml(data / "online.yaml", {"train": blend})
    loader = BalancedLoader(
        str(place),
        model="tiny",
        tokenizer=str(demo_tokenizer_path()),
        workers=0,
        dp_rank=0,
        dp_world_size=1,
    )
    found = Counter(name for step in loader for batch in step for name in batch.sample_ids)
    build(place, tmp_path / "out")
    packed = Counter(row["sample_id"] for row in read_samples(tmp_path / "out"))
    assert found == packed
    assert not loader.rejected
    loader.close()


def test_a_build_for_energon_may_be_in_a_metadataset(data, tmp_path):
    build(data / "captioning", data / "packed", format="energon")
    blend = [{"path": "packed", "repetitions": 2}, {"path": "vqa"}]
    place = write_yaml(data / "old.yaml", {"train": {"blend_epochized": blend}})
    build(place, tmp_path / "out")
    packed = read_manifest(data / "packed").values["totals"]["num_packed"]
    ours = read_manifest(tmp_path / "out").values["totals"]
    assert ours["num_packed"] - 2 * packed == sum(
        dict(find_dataset(str(data / "vqa"), None).parts[0].located.options)["counts"]
    )

"""Tests of builds in Energon's own loader; `test_energon.py` runs them in its environment."""

import copy
import importlib.metadata
import importlib.util
import json
import re
import shutil
import warnings
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
import transformers
import yaml
from megatron.energon import (
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from PIL import Image

from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader, model_inputs
from isobatch.loaders.integrations.energon import PackedTaskEncoder
from isobatch.shards.manifest import read_manifest
from support import ROOT
from support.builds.audio_build import MAX_SEQ_LEN, build_heard
from support.builds.packed import build, read_index
from support.builds.raw_data import good_records, write_dataset
from support.builds.remote_builds import upload, use
from support.clips import make_clip
from support.models.saved_videos import save_video_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Texts and images in several shards."""
    folder = tmp_path_factory.mktemp("built")
    raw = write_dataset(folder / "raw", good_records(folder / "raw", 150))
    for form in ("energon", "arrow"):
        build(raw, folder / form, format=form, shard_mb=1, max_seq_len=2000)
    assert len(read_manifest(folder / "energon").shards) > 2
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Videos, images and text for Qwen2.5-VL, with the folder of the model's processor."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "raw").mkdir()
    clip = make_clip(30, (80, 60), rate=Fraction(24))
    (folder / "raw" / "clip.mp4").write_bytes(clip.content)
    Image.new("RGB", (90, 60), (60, 90, 30)).save(folder / "raw" / "image.png")
    media = ({"video": "clip.mp4"}, {"image": "image.png"}, {})
    records = []
    for number in range(12):
        about = media[number % 3]
        mark = "".join(f"<{kind}>" for kind in about)
        turns = [("human", f"{mark} what? {number}"), ("gpt", f"answer {number}")]
        turns = [{"from": role, "value": text} for role, text in turns]
        records.append({"id": f"s{number}", "conversations": turns, **about})
    (folder / "raw" / "annotations.json").write_text(json.dumps(records))
    model = save_video_folder("qwen2_5_vl", folder / "model", {})
    build(folder / "raw", folder / "out", format="energon", model=model, tokenizer=model)
    config, manifest = transformers.AutoConfig.from_pretrained(model), read_manifest(folder / "out")
    config.image_token_id, config.video_token_id = manifest.image_token_id, manifest.video_token_id
    config.text_config.vocab_size = manifest.vocab_size
    return folder / "out", config


def loader(place, *, rank=0, ranks=1, workers=0, repeat=False, encoder=None, **options):
    dataset = get_train_dataset(
        place,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=workers),
        task_encoder=encoder or PackedTaskEncoder(place),
        repeat=repeat,
        **{"batch_size": None, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
        | options,
    )
    return get_savable_loader(dataset)


def group_of(sample):
    return int(sample.__key__.removeprefix("g"))


def some(iterable, count):
    """The first `count`, without asking for one more."""
    return [value for _, value in zip(range(count), iterable, strict=False)]


def our_steps(place, ranks, epoch=0):
    index = read_index(place)
    columns = {name: index.column(name).to_numpy() for name in index.column_names[:-1]}
    kinds = ("image", "text", "audio")
    tokens = sum(columns[f"num_{kind}_tokens"].astype(np.int64) for kind in kinds)
    vision = columns[f"num_{read_manifest(place).limits.vision_unit}"].astype(np.int64)
    return epoch_steps((vision, tokens), (ranks, 1), epoch=epoch)[:, :, 0]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2), (3, 0), (3, 3)])
def test_each_rank_gets_its_groups_of_our_steps_and_all_samples_come_once(built, ranks, workers):
    place = built / "energon"
    steps, seen = our_steps(place, ranks), Counter()
    for rank in range(ranks):
        samples = list(loader(place, rank=rank, ranks=ranks, workers=workers))
        assert [group_of(sample) for sample in samples] == [g for g in steps[:, rank] if g >= 0]
        seen.update(name for sample in samples for name in sample.micro_batch.sample_ids)
    assert set(seen.values()) == {1}
    assert len(seen) == read_manifest(place).num_packed


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_stay_in_step_over_epochs(built, workers):
    place, ranks = built / "energon", 3
    first, num_groups = our_steps(place, ranks), read_manifest(place).num_groups
    streams = (
        loader(place, rank=rank, ranks=ranks, workers=workers, repeat=True) for rank in range(ranks)
    )
    taken = [list(map(group_of, some(stream, 2 * len(first)))) for stream in streams]
    steps, is_filled = np.array(taken).T, first < 0
    assert is_filled.any()
    assert np.array_equal(steps[: len(first)][~is_filled], first[~is_filled])
    # what fills the last step is the beginning of the next pass
    full = (num_groups - is_filled.sum()) // ranks
    assert full > 1
    later = [*steps[: len(first)][is_filled], *steps[len(first) :][:full].ravel()]
    assert len(set(later)) == len(later)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(built, workers):
    place = built / "energon"
    whole = loader(place, ranks=2, workers=workers, repeat=True)
    num_steps = len(our_steps(place, 2))
    for stop in (3, num_steps - 1, num_steps + 2):
        want = [group_of(sample) for sample in some(whole, stop + 6)]
        whole = loader(place, ranks=2, workers=workers, repeat=True)
        begun = loader(place, ranks=2, workers=workers, repeat=True)
        got = [group_of(sample) for sample in some(begun, stop)]
        state = begun.save_state_rank()
        resumed = loader(place, ranks=2, workers=workers, repeat=True)
        resumed.restore_state_rank(state)
        assert got + [group_of(sample) for sample in some(resumed, 6)] == want


def same(left, right):
    assert (left is None) == (right is None)
    if left is not None:
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens", "pixel_values", "image_grid_thw")
FIELDS += ("patches_per_image", "image_sizes", "video_seconds")


def test_tensors_are_those_of_our_loader(built, videos):
    for place in (built / "energon", videos[0]):
        ours = {}
        for step in StreamingLoader(place, workers=0):
            ours |= {batch.sample_ids: batch for batch in step}
        for sample in loader(place):
            batch = ours.pop(sample.micro_batch.sample_ids)
            for name in FIELDS:
                same(getattr(sample.micro_batch, name), getattr(batch, name))
            assert sample.micro_batch.loss_normalizer == pytest.approx(batch.loss_normalizer)
        assert not ours


def bridge_reader():
    """Megatron-Bridge's module alone: the package imports Transformer Engine."""
    (folder,) = importlib.metadata.files("megatron-bridge")[0].locate().parents[:1]
    while not (folder / "megatron").is_dir():
        folder = folder.parent
    path = folder / "megatron" / "bridge" / "data" / "energon" / "base_energon_datamodule.py"
    spec = importlib.util.spec_from_file_location("bridge_energon", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_megatron_bridges_reader_gives_our_order(built, tmp_path):
    place = shutil.copytree(built / "energon", tmp_path / "out")
    split = place / ".nv-meta" / "split.yaml"
    names = yaml.safe_load(split.read_text())["split_parts"]["train"]
    split.write_text(yaml.safe_dump({"split_parts": {"train": names, "val": names[:1]}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Apex, which megatron-core would rather have
        bridge = bridge_reader()
    data = bridge.EnergonMultiModalDataModule(
        str(place),
        tokenizer=None,
        image_processor=None,
        task_encoder=PackedTaskEncoder(place),
        num_workers=1,
    )
    stream = data.train_dataloader()
    steps = our_steps(place, 1)
    assert [group_of(sample) for sample in some(stream, len(steps))] == steps[:, 0].tolist()
    assert stream.save_state() is not None
    assert next(data.val_dataloader()).micro_batch.num_samples > 0


AUDIO = ("audio_values", "audio_lengths", "audio_frames", "input_ids", "labels")


def test_sounds_are_those_of_our_loader(tmp_path):
    build_heard(tmp_path)
    place = tmp_path / "out"
    build(tmp_path, place, model="tiny_audio", format="energon", max_seq_len=MAX_SEQ_LEN)
    ours = {}
    for step in StreamingLoader(place, workers=0):
        ours |= {batch.sample_ids: batch for batch in step}
    assert any(
        batch.audio_lengths is not None and len(batch.audio_lengths) for batch in ours.values()
    )
    for workers in (0, 1):
        samples = list(loader(place, workers=workers))
        assert len(samples) == len(ours)
        for sample in samples:
            for name in AUDIO:
                batch = ours[sample.micro_batch.sample_ids]
                same(getattr(sample.micro_batch, name), getattr(batch, name))


@pytest.mark.server
@pytest.mark.parametrize("workers", [0, 2])
def test_a_build_in_s3_is_read_through_energons_client(built, s3, tmp_path, monkeypatch, workers):
    use(monkeypatch, s3)
    uri = upload(s3, built / "energon", f"{tmp_path.name}/packed")
    keys = {"access_key": s3.access_key, "secret_key": s3.secret_key}
    profile = {
        "storage_provider": {
            "type": "s3",
            "options": {
                "base_path": s3.bucket, "endpoint_url": s3.endpoint, "region_name": "us-east-1",
            },
        },
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }  # fmt: skip
    config = tmp_path / "msc.yaml"
    config.write_text(yaml.safe_dump({"profiles": {"bucket": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    place, steps = f"msc://bucket/{tmp_path.name}/packed", our_steps(built / "energon", 2)
    for rank in range(2):
        stream = loader(place, rank=rank, ranks=2, workers=workers, encoder=PackedTaskEncoder(uri))
        assert list(map(group_of, stream)) == [g for g in steps[:, rank] if g >= 0]
    stored = loader(
        place,
        workers=workers,
        dataset_config="stored_order.yaml",
        encoder=PackedTaskEncoder(uri),
    )
    assert len(list(stored)) == read_manifest(built / "energon").num_groups
    state = stored.save_state_rank()
    assert state is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_with_a_model_samples_have_its_inputs(videos, workers):
    place, config = videos
    samples = list(loader(place, workers=workers, encoder=PackedTaskEncoder(place, model=config)))
    assert any("pixel_values_videos" in sample.inputs for sample in samples)
    for sample in samples:
        expected = model_inputs(sample.micro_batch, config)
        assert sample.inputs.keys() == expected.keys()
        assert sample.inputs["position_ids"].shape[0] == 4  # M-RoPE
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                same(sample.inputs[name], value)
            else:
                assert sample.inputs[name] == value


def test_the_program_of_the_docs_trains_and_goes_on(videos, monkeypatch):
    place, config = videos
    config = copy.deepcopy(config)
    monkeypatch.chdir(place.parent)
    place.rename("packed")
    page = (ROOT / "docs/load/trainers/energon.md").read_text()
    (program,) = re.findall(r"<!-- program: energon -->\n```python\n(.*?)```", page, re.DOTALL)
    small = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    small |= {"out_hidden_size": 32, "fullatt_block_indexes": [0]}
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text["rope_parameters"]["rope_theta"] = 10_000.0
    for part, sizes in ((config.vision_config, small), (config.text_config, text)):
        for name, value in sizes.items():
            setattr(part, name, value)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scope = {"rank": 0, "world_size": 1, "max_steps": 2, "model": model}
    scope["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
    try:
        exec(program, scope)
    finally:
        (place.parent / "packed").rename(place)
    after = list(model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert scope["state"] is not None


def test_the_loss_is_divided_by_the_labels_of_an_average_step(built):
    place = built / "energon"
    totals = read_manifest(place).values["totals"]
    encoder = PackedTaskEncoder(place, micro_batches_per_step=3, gradients="sum")
    (sample,) = some(loader(place, ranks=2, encoder=encoder), 1)
    mean = totals["num_loss_tokens"] / totals["num_groups"]
    assert sample.micro_batch.loss_divisor == pytest.approx(mean * 6)
    square = PackedTaskEncoder(place, loss_weights="square")
    weights = sum(
        float(sample.micro_batch.loss_weights[sample.micro_batch.labels != -100].sum())
        for sample in loader(place, encoder=square)
    )
    (sample,) = some(loader(place, encoder=square), 1)
    assert sample.micro_batch.loss_normalizer * totals["num_groups"] == pytest.approx(weights)


@pytest.mark.parametrize("workers", [0, 2])
def test_energons_own_order_and_its_evaluation_give_every_group_once(built, tmp_path, workers):
    place = shutil.copytree(built / "energon", tmp_path / "out")
    everything = [*range(read_manifest(place).num_groups)]
    stored = loader(place, workers=workers, dataset_config="stored_order.yaml")
    assert sorted(map(group_of, stored)) == everything
    split = place / ".nv-meta" / "split.yaml"
    names = yaml.safe_load(split.read_text())["split_parts"]["train"]
    parts = {"train": names[1:], "val": names[:1]}
    split.write_text(yaml.safe_dump({"split_parts": parts}))
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    encoder = PackedTaskEncoder(place, shuffle=False)
    held = get_savable_loader(
        get_val_dataset(place, worker_config=config, batch_size=1, task_encoder=encoder)
    )
    held = [group_of(sample) for sample in held]
    assert held == everything[: len(held)]
    assert sorted(map(group_of, loader(place, workers=workers))) == everything[len(held) :]


def test_blends_of_two_builds_read_both(built, tmp_path):
    blend = [{"path": str(built / "energon"), "weight": 1}]
    blend.append({**blend[0], "weight": 2, "dataset_config": "stored_order.yaml"})
    mixture = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    mixture["splits"] = {"train": {"blend": blend}}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    encoder = PackedTaskEncoder([built / "energon"])
    samples = some(loader(tmp_path / "mixture.yaml", encoder=encoder, repeat=True), 20)
    assert len({group_of(sample) for sample in samples}) > 5


def test_our_index_of_a_tar_and_the_counts_are_those_that_energon_makes(built, tmp_path):
    place = shutil.copytree(built / "energon", tmp_path / "out")
    ours = {path.name: path.read_bytes() for path in (place / "shards").glob("*.idx")}
    counts = json.loads((place / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    for name in (*ours, ".info.json"):
        for path in place.rglob(name):
            path.unlink()
    WebdatasetPreparator.prepare_dataset(
        place, list(counts), split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    assert json.loads((place / ".nv-meta" / ".info.json").read_text())["shard_counts"] == counts
    theirs = {path.name: path.read_bytes() for path in (place / "shards").glob("*.idx")}
    assert theirs == ours


def damaged(folder, built):
    """A build with a picture of which the first byte is another."""
    place = shutil.copytree(built / "energon", folder / "out")
    shard = place / "shards" / "shard-00000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"\x89PNG") + 1] ^= 1
    shard.write_bytes(data)
    return place


def test_a_file_that_is_broken_ends_the_training_and_names_its_sample(built, tmp_path):
    place = damaged(tmp_path, built)
    with pytest.raises(FatalSampleError, match=r"sample 's\d+' .*shard-00000.tar, group g0"):
        list(loader(place))
    encoder = PackedTaskEncoder(place, on_error="skip")
    with pytest.warns(UserWarning, match="skipped: sample 's"):
        samples = list(loader(place, encoder=encoder))
    assert sum(len(sample.micro_batch.skipped) for sample in samples) == 1
    assert len(samples) == read_manifest(place).num_groups


def test_what_does_not_fit_is_one_line(built):
    place = built / "energon"
    with pytest.raises(ConfigError, match="batch_size is 4; a group is a micro-batch"):
        loader(place, batch_size=4)
    with pytest.raises(ConfigError, match="packing_buffer_size is for samples"):
        loader(place, packing_buffer_size=10)
    with pytest.raises(ConfigError, match="takes no balance; it takes audio, "):
        PackedTaskEncoder(place, balance=0.5)
    with pytest.raises(ConfigError, match="was packed with --format arrow; pack it with"):
        PackedTaskEncoder(built / "arrow")
    assert len(list(loader(place, batch_size=1))) == read_manifest(place).num_groups


def test_another_balance_and_missing_loads_are_one_line(built, tmp_path):
    place = shutil.copytree(built / "energon", tmp_path / "out")
    about = place / ".nv-meta" / "dataset.yaml"
    about.write_text(about.read_text() + "balance: 2\n")
    with pytest.raises(Exception, match=r"balance is 2; use 0 \(random\) to 0.999"):
        loader(place)
    about.write_text(about.read_text().replace("balance: 2", "balance: 0.999"))
    assert len(list(loader(place))) == read_manifest(place).num_groups
    np.save(place / ".nv-meta" / "loads.npy", np.zeros((1, 2), np.int64))
    with pytest.raises(ConfigError, match=r"loads.npy has 1 groups, .info.json \d+; build again"):
        loader(place)
    (place / ".nv-meta" / "loads.npy").unlink()
    with pytest.raises(ConfigError, match=r"loads.npy is not there; build with `packer build"):
        loader(place)

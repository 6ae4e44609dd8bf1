"""Tests of our loaders in TorchTitan 0.3; `test_torchtitan.py` runs them in its environment."""

import copy
import json
import re
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from PIL import Image

if torch.version.cuda is None:
    # PyPI's torchvision is built for CUDA: its operators do not load, and two are asked for by name
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)

from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
from torchtitan.models.qwen3_5 import model_registry
from torchtitan.trainer import Trainer

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader, model_inputs, packed_batch
from isobatch.loaders.integrations.torchtitan import (
    BalancedDataLoader,
    special_tokens,
    titan_batch,
)
from isobatch.shards.manifest import read_manifest
from support import ROOT
from support.builds.packed import build
from support.clips import make_clip
from support.models.family_models import make_family_batch, make_family_model
from support.models.saved_videos import save_video_folder

CAP, SEQ_LEN, NUM_RECORDS = 300, 384, 40
PAGE = ROOT / "docs/load/trainers/torchtitan.md"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts, images and videos for Qwen3-VL, packed, packed without videos, and as records."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "raw"
    raw.mkdir()
    clip = make_clip(30, (80, 60), rate=Fraction(24)).content
    (raw / "clip.mp4").write_bytes(clip)
    picture = Image.effect_mandelbrot((90, 60), (-2, -1, 1, 1), 50).convert("RGB")
    picture.save(raw / "image.png")
    media = ({"video": "clip.mp4"}, {"image": "image.png"}, {})
    records = []
    for number in range(NUM_RECORDS):
        about = media[number % 3]
        mark = "".join(f"<{kind}>" for kind in about)
        answer = f"answer {number} " * (1 + number % 5)
        turns = [("human", f"{mark} what? {number}"), ("gpt", answer)]
        turns = [{"from": role, "value": text} for role, text in turns]
        records.append({"id": f"s{number}", "conversations": turns, **about})
    model = save_video_folder("qwen3_vl", folder / "model", {})
    options = {"model": model, "tokenizer": model, "max_seq_len": CAP, "format": "arrow"}
    stills = [record for record in records if "video" not in record]
    for name, rows in (("packed", records), ("stills", stills)):
        (raw / "annotations.json").write_text(json.dumps(rows))
        build(raw, folder / name, **options)
    manifest = read_manifest(folder / "packed")
    config = transformers.AutoConfig.from_pretrained(model)
    config.image_token_id, config.video_token_id = manifest.image_token_id, manifest.video_token_id
    config.text_config.vocab_size = manifest.vocab_size
    config.save_pretrained(model)
    return SimpleNamespace(
        folder=folder, raw=raw, model=model, config=config, records=records, manifest=manifest
    )


def configs(data):
    """Of the build, and of the records without one."""
    config = BalancedDataLoader.Config(dataset_path=str(data.folder / "packed"), model=data.model)
    options = {"max_tokens": CAP, "data_root": data.raw}
    records = BalancedDataLoader.Config(records=data.records, model=data.model, options=options)
    return [config, records]


def made(config, rank=0, ranks=1, size=1, **more):
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,
        seq_len=SEQ_LEN,
        local_batch_size=size,
        snapshot_every_n_steps=None,
        **more,
    )


def collator(data, size):
    config = data.config
    tokens = {"image_id": config.image_token_id, "video_id": config.video_token_id, "pad_id": 0}
    names = SimpleNamespace(TOKEN_FIELDS=("image", "video"), **tokens)
    vision = config.vision_config
    return MultiModalCollator(
        batch_size=size,
        seq_len=SEQ_LEN,
        max_images_per_batch=1_000,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        spatial_merge_size=vision.spatial_merge_size,
        tokenizer=names,
        build_mrope_positions=True,
    )


def pictures(patches, grids, vision):
    """Frames (frames, height, width, 3) of Qwen's patches."""
    side, merge, pair = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    for part, (frames, rows, columns) in zip(
        patches.split(grids.prod(dim=1).tolist()), grids.tolist(), strict=True
    ):
        shape = frames, rows // merge, columns // merge, merge, merge, 3, pair, side, side
        whole = part.view(shape).permute(0, 6, 1, 3, 7, 2, 4, 8, 5)
        yield whole.reshape(frames * pair, rows * side, columns * side, 3)


def rows_of(batches, data):
    """What TorchTitan's dataset gives its collator, of our samples."""
    rows = []
    for batch in batches:
        row = packed_batch(batch, data.config)
        vision, media = data.config.vision_config, row.media
        entry = {
            "input_ids": row.samples.input_ids,
            "labels": row.samples.labels,
            "positions": row.samples.position_ids,
        }
        for suffix, grids in (("", "image_grid_thw"), ("_videos", "video_grid_thw")):
            if grids in media:
                values = media[f"pixel_values{suffix}"], media[grids]
                entry[f"pixel_values{suffix}"] = list(pictures(*values, vision))
        rows.append(entry)
    return rows


def same(ours, want):
    assert ours.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_batches_are_those_of_torchtitans_collator(data, number, size):
    config = configs(data)[number]
    config.epochs = 1
    ours = list(made(config, ranks=2, size=size))
    loader = made(config, ranks=2, size=size).loader
    steps = [list(step) for step in loader]
    assert len(ours) == len(steps) > 1
    has_videos = False
    for (inputs, labels), batches in zip(ours, steps, strict=True):
        want, wanted = collator(data, size)(rows_of(batches, data))
        same(inputs, want | {"special_tokens": inputs["special_tokens"]})
        assert {"image_id", "video_id"} == inputs["special_tokens"].keys()
        assert inputs["special_tokens"].items() <= want["special_tokens"].items()
        assert labels.dtype == wanted.dtype
        assert torch.equal(labels, wanted)
        has_videos |= inputs["pixel_values_videos"] is not None
    assert has_videos


def test_pixels_are_those_that_it_cuts_from_the_resized_images(data):
    vision = StreamingLoader(data.folder / "stills", shuffle=False)
    whole = StreamingLoader(data.folder / "stills", shuffle=False, images="resized")
    seen = 0
    for ours, resized in zip(vision, whole, strict=True):
        for batch, other in zip(ours, resized, strict=True):
            if not len(batch.image_sizes):
                continue
            images = [each.permute(1, 2, 0)[None] for each in other.images]  # one frame each
            patches, grids = collator(data, 1).collate_images(images)
            special = {"image_id": 1}
            inputs, _ = titan_batch([batch], data.config, seq_len=SEQ_LEN, special=special)
            assert torch.equal(inputs["grid_thw"], grids)
            assert torch.allclose(inputs["pixel_values"], patches, atol=1e-5)
            seen += len(images)
    assert seen > 5


def tokens_of(loading, count=None):
    """Rows of tokens without what fills them up."""
    rows, iterator = [], iter(loading)
    while count is None or len(rows) < count:
        try:
            inputs, _ = next(iterator)
        except StopIteration:
            break
        rows.append(tuple(inputs["input"][0].tolist()))
    return rows


@pytest.mark.parametrize("number", [0, 1])
def test_epochs_end_on_all_ranks_and_a_checkpoint_resumes_on_another_number(data, number, tmp_path):
    config = configs(data)[number]
    config.epochs = 1
    lengths = {len(tokens_of(made(config, rank, 2))) for rank in range(2)}
    assert len(lengths) == 1
    whole = sorted(row for rank in range(3) for row in tokens_of(made(config, rank, 3)))
    taken = []
    for rank in range(2):
        loading = made(config, rank, 2)
        assert isinstance(loading, BaseDataLoader)
        taken += tokens_of(loading, 2)
    dcp.save({"dataloader": loading}, checkpoint_id=tmp_path / "saved", no_dist=True)
    for rank in range(3):
        loading = made(config, rank, 3)
        dcp.load({"dataloader": loading}, checkpoint_id=tmp_path / "saved", no_dist=True)
        taken += tokens_of(loading)
    count = sum(map(len, samples_in(taken)))
    assert count == sum(map(len, samples_in(whole))) == NUM_RECORDS


def samples_in(rows):
    """Numbers of the questions in rows of tokens: `what? N`."""
    return [[token for token in row if token in QUESTIONS] for row in rows]


QUESTIONS = set()


@pytest.fixture(autouse=True)
def questions(data):
    """The token that every question has once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(data.model)
    counts = None
    for step in StreamingLoader(data.folder / "packed"):
        for batch in step:
            for part in batch.input_ids.split(batch.cu_seqlens.diff().tolist()):
                once = {token for token in part.tolist() if part.tolist().count(token) == 1}
                counts = once if counts is None else counts & once
    assert counts, tokenizer
    QUESTIONS.clear()
    QUESTIONS.add(min(counts))


@pytest.mark.parametrize("number", [0, 1])
def test_a_run_that_was_saved_at_its_end_has_no_more_batches(data, number):
    config = configs(data)[number]
    config.epochs = 2
    loading = made(config)
    assert len(tokens_of(loading)) > 2
    count = len(tokens_of(made(config)))
    loading = made(config)
    iterator = iter(loading)
    for _ in range(count):
        next(iterator)
    state = loading.state_dict()
    resumed = made(config)
    resumed.load_state_dict({})
    resumed.load_state_dict(state)
    assert not tokens_of(resumed)


def test_a_loader_without_further_steps_ends(data):
    loading = made(configs(data)[0])
    passes = iter([[]])  # another pass is an error

    class Spent(SimpleNamespace):
        def __iter__(self):
            return iter(next(passes))

    loading.loader = Spent(epoch=2, is_at_end=False)
    assert not tokens_of(loading)


def test_the_trainers_own_generator_ends_with_its_error(data):
    config = configs(data)[0]
    config.epochs = 1
    meter = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[])
    trainer = SimpleNamespace(metrics_processor=meter)
    generator = Trainer.batch_generator(trainer, made(config))
    count = len(tokens_of(made(config)))
    for _ in range(count):
        next(generator)
    with pytest.raises(DataloaderExhaustedError):
        next(generator)
    assert meter.ntokens_since_last_log == count * SEQ_LEN


def test_what_does_not_fit_is_refused(data):
    config = configs(data)[0]
    for changes, message in (
        ({"records": []}, "give either dataset_path"),
        ({"model": ""}, "give model"),
        ({"options": {"micro_batches_per_step": 3}}, "use a multiple of local_batch_size, 2"),
        ({"options": {"loss_weights": "sample"}}, "loss_weights is 'sample'"),
        ({"options": {"epochs": 2}}, "give epochs of BalancedDataLoader.Config"),
    ):
        other = copy.copy(config)
        for name, value in changes.items():
            setattr(other, name, value)
        with pytest.raises(ConfigError, match=message):
            made(other, size=2)
    names = SimpleNamespace(TOKEN_FIELDS=("image", "pad"), image_id=1, pad_id=0)
    with pytest.raises(ConfigError, match="the image token is 1 in TorchTitan's tokenizer"):
        special_tokens(data.config, names)
    names.image_id = data.config.image_token_id
    assert special_tokens(data.config, names) == {"image_id": names.image_id, "pad_id": 0}
    name = "qwen2_5_omni_thinker"
    batch, omni = make_family_batch(name, [1]), make_family_model(name).config
    with pytest.raises(ConfigError, match="TorchTitan is given no input_features"):
        titan_batch([batch], omni, seq_len=SEQ_LEN, special={})
    config.options = {"micro_batches_per_step": 2}
    loading = made(config)
    iterator = iter(loading)
    next(iterator)
    with pytest.raises(ConfigError, match="1 micro-batches of the loader's step"):
        loading.state_dict()


def tiny_model(data):
    """TorchTitan's Qwen3.5 with its vision encoder and only layers of full attention."""
    config = model_registry("debugmodel").model
    config.layers = [layer for layer in config.layers if layer.attention is not None][:1]
    vocab = data.manifest.vocab_size
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = vocab
    model = config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


@torch.no_grad()
def test_torchtitans_vlm_and_loss_of_packed_samples_are_those_of_single_ones(data):
    """Without a backward pass, which FlexAttention does not have on a CPU, and uncompiled."""
    torch.compiler.set_stance("force_eager")
    config = configs(data)[0]
    config.dataset_path = str(data.folder / "stills")
    set_spmd_backend("partial_dtensor")
    model = tiny_model(data)
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=data.manifest.vocab_size).build(
        compile_config=SimpleNamespace(enable=False, components=[])
    )

    def loss_of(inputs, labels):
        others = {name: value for name, value in inputs.items() if name != "input"}
        masks = model.get_attention_masks(positions=inputs["positions"])
        out = model(inputs["input"], attention_masks=masks, **others)
        return float(loss_fn(out, labels, torch.tensor(1), positions=inputs["positions"])[0])

    for _, (inputs, labels) in zip(range(3), made(config), strict=False):
        positions = inputs["positions"][0]
        starts = [*torch.nonzero(positions == 0).ravel().tolist(), SEQ_LEN]
        documents = [(start, end) for start, end in pairwise(starts) if end - start > 1]
        assert len(documents) > 1
        total, image = 0.0, 0
        for start, end in documents:
            part = {name: inputs[name][:, start:end] for name in TEXT} | {
                "special_tokens": inputs["special_tokens"]
            }
            has_image = bool((part["input"] == data.config.image_token_id).any())
            if has_image:
                part["pixel_values"] = inputs["pixel_values"][image : image + 1]
                part["grid_thw"] = inputs["grid_thw"][image : image + 1]
                image += 1
            total += loss_of(part, labels[:, start:end])
        assert image == len(inputs["grid_thw"])
        assert loss_of(inputs, labels) == pytest.approx(total, rel=1e-5)


TEXT = "input", "positions", "mrope_positions"


def test_losses_are_those_of_plain_transformers(data):
    """By a tiny Qwen3-VL: TorchTitan's inputs in transformers' names, and TorchTitan's loss."""
    config = copy.deepcopy(data.config)
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    for part, sizes in ((config.vision_config, vision), (config.text_config, text)):
        for name, value in sizes.items():
            setattr(part, name, value)
    config.text_config.rope_parameters["mrope_section"] = [4, 2, 2]
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=data.manifest.vocab_size).build(
        compile_config=SimpleNamespace(enable=False, components=[])
    )
    steps = StreamingLoader(data.folder / "stills")
    for (batch,) in steps:
        inputs, labels = titan_batch([batch], config, seq_len=SEQ_LEN, special={})
        num_labels = int((labels != -100).sum())
        assert num_labels == batch.num_loss_tokens
        positions = torch.cat(
            [inputs["positions"][None], inputs["mrope_positions"].permute(2, 0, 1)]
        )
        grids = inputs["grid_thw"]
        patches = [
            each[: int(grid.prod())]
            for each, grid in zip(inputs["pixel_values"], grids, strict=True)
        ]
        logits = model(
            input_ids=inputs["input"],
            position_ids=positions,
            pixel_values=torch.cat(patches),
            image_grid_thw=grids,
            use_cache=False,
        ).logits
        loss, _ = loss_fn(logits, labels, torch.tensor(num_labels))
        want = model(**model_inputs(batch, model) | {"num_items_in_batch": num_labels}).loss
        assert float(loss) == pytest.approx(float(want), abs=1e-5)


def test_the_program_of_the_docs_makes_the_trainers_config(data, monkeypatch):
    (program,) = re.findall(
        r"<!-- program: torchtitan -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    monkeypatch.chdir(data.folder)
    scope = {"model": data.model}
    exec(program, scope)
    loading = made(scope["config"].dataloader)
    inputs, labels = next(iter(loading))
    assert inputs["input"].shape == labels.shape == (1, SEQ_LEN)
    json.dumps(scope["config"].dataloader.to_dict())


@pytest.fixture
def mesh():
    """Of one process, which is data parallel alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    finally:
        torch.distributed.destroy_process_group()


def test_a_device_mesh_says_which_rank_this_is(data, mesh):
    config = configs(data)[0]
    config.options = {"device_mesh": mesh}
    loading = made(config, rank=1, ranks=2)
    assert (loading.loader.config.dp_rank, loading.loader.config.dp_world_size) == (0, 1)

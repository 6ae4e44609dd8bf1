"""Tests of our loaders in VeOmni; `test_veomni.py` runs them in its environment."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from itertools import chain, islice, pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
import yaml
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from veomni.arguments import arguments_types
from veomni.data import MainCollator, build_dataloader, build_dataset
from veomni.data.data_transform import build_data_transform
from veomni.models import build_foundation_model, load_model_weights
from veomni.models.transformers.qwen2_5vl.generated import patched_modeling_qwen2_5_vl_gpu
from veomni.ops.config.singleton import set_ops_config
from veomni.utils.constants import IMAGE_INPUT_INDEX

from isobatch import BalancedLoader, StreamingLoader, model_inputs
from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import shift_labels
from isobatch.loaders.integrations.veomni import (
    VeOmniLoader,
    register,
    sample_features,
    with_block_mask,
)
from support import ROOT, TESTS
from support.frameworks.page_programs import yaml_block
from support.frameworks.veomni.data import write_packed

RATE, EPOCHS = 0.02, 3
RANKS = TESTS / "support" / "frameworks" / "veomni" / "ranks.py"
OPERATIONS = {
    field.name: {"attn_implementation": "sdpa", "qat_implementation": "none"}.get(
        field.name, "eager"
    )
    for field in fields(arguments_types.OpsImplementationConfig)
}
"""Those that run on a CPU."""
SETTINGS = {"micro_batch_size": 1, "global_batch_size": 2, "dyn_bsz": False, "seed": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("veomni")
    records, config = write_packed(folder, 40)
    return SimpleNamespace(folder=folder, records=records, config=config)


@pytest.fixture(scope="module")
def theirs(data):
    """VeOmni's model."""
    kind = patched_modeling_qwen2_5_vl_gpu.Qwen2_5_VLForConditionalGeneration
    return kind(kind.config_class.from_pretrained(data.folder / "model"))


def loader_of(data, **options):
    return StreamingLoader(data.folder / "packed", dp_rank=0, dp_world_size=1, **options)


def attend_by(name):
    """Install operations as VeOmni's trainers do when they build a model."""
    set_ops_config(SimpleNamespace(attn_implementation=name))


@pytest.fixture(autouse=True)
def attention():
    attend_by("sdpa")
    yield
    set_ops_config(None)


def veomni_loader(**changes):
    settings = SETTINGS | {"collate_fn": MainCollator()} | changes
    return build_dataloader("isobatch", dataset=build_dataset("isobatch"), **settings)


def same(ours, theirs, place=""):
    assert type(ours) is type(theirs), place
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, place
        assert ours.shape == theirs.shape, place
        if "pixel_values" in place:  # divided by 255 and by the deviation, at once or in turn
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        else:
            assert torch.equal(ours, theirs), place
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for name, value in ours.items():
            same(value, theirs[name], f"{place} {name}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), place
        for left, right in zip(ours, theirs, strict=True):
            same(left, right, place)
    else:
        assert ours == theirs, place


def test_batches_are_those_that_veomni_makes_of_the_same_samples(data, theirs, monkeypatch):
    """By its transform of Qwen2.5-VL, with the processor's pictures and its positions, and its
    collator. Only the words come from the build, through a chat template that repeats them.
    """
    # its readers of videos need torchvision, and are imported with those of images
    monkeypatch.setitem(sys.modules, "veomni.data.multimodal.video_utils", mock.MagicMock())
    images = Qwen2VLImageProcessorPil.from_pretrained(data.folder / "model")
    records = {record["id"]: record for record in data.records}
    collate = MainCollator(metadata_collate_func=theirs.get_metadata_collate_func())
    num_images = 0
    for (batch,) in loader_of(data, exact_resize=True):
        if not len(batch.image_sizes):
            continue
        borders, features = batch.cu_seqlens.tolist(), []
        for name, start, end in zip(batch.sample_ids, borders, borders[1:], strict=False):
            ids, labels = batch.input_ids[start:end].clone(), batch.labels[start:end].clone()
            ids[ids == data.config.image_token_id] = IMAGE_INPUT_INDEX
            words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
            files = [str(data.folder / "raw" / file) for file in records[name]["image"]]
            num_images += len(files)
            transform = build_data_transform(
                "qwen2_5_vl",
                processor=SimpleNamespace(image_processor=images),
                chat_template=SimpleNamespace(encode_messages=lambda *_, words=words, **__: words),
                position_id_func=theirs.get_position_id_func(),
            )
            turns = {"source_name": "fineweb_100BT", "images": files, "text": ""}
            features += transform(turns)
        same(collate(sample_features(batch, data.config)), collate(features))
    assert num_images > 20


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_are_those_of_transformers_where_samples_are_kept_apart(data, theirs, attention):
    """Its own batches have another loss: each sample sees those before it."""
    theirs.set_attn_implementation(attention)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(data.folder / "model")
    theirs.load_state_dict(plain.state_dict())
    collate = MainCollator(metadata_collate_func=theirs.get_metadata_collate_func())

    def veomni_loss(features, collate=collate):
        batch = collate(features)
        labels = batch.pop("labels")[0, 1:]
        return float(cross_entropy(theirs(**batch, use_cache=False).logits[0, :-1], labels))

    num_apart = 0
    for (batch,) in loader_of(data, loss_normalizer="step"):
        inputs = model_inputs(batch, plain)
        ones = {"attention_mask": torch.ones_like(inputs["input_ids"])}
        features = partial(sample_features, batch, data.config)
        with torch.no_grad():
            apart, joined = (float(plain(**(inputs | mask)).loss) for mask in ({}, ones))
            assert veomni_loss(features()) == pytest.approx(joined, rel=1e-5)
            masked = veomni_loss(
                features(), with_block_mask(collate, is_added=attention == "eager")
            )
            assert masked == pytest.approx(apart, rel=1e-5)
            if not len(batch.image_sizes):  # else the first has the pixels of all
                samples = [(one, (one["labels"] != -100).sum()) for one in features()]
                total = sum(veomni_loss([one]) * int(num) for one, num in samples if num)
                mean = total / sum(int(num) for _, num in samples)
                assert mean == pytest.approx(apart, rel=1e-5)
        num_apart += abs(joined - apart) > 1e-3 * apart
    assert num_apart > 5


@pytest.mark.parametrize("kind", ["build", "records"])
def test_loaders_go_on_from_a_state(data, kind, monkeypatch):
    monkeypatch.chdir(data.folder / "raw")
    make = partial(StreamingLoader, data.folder / "packed")
    if kind == "records":
        options = {"model": str(data.folder / "model"), "max_tokens": 160}
        make = partial(BalancedLoader, data.records, **options)
    register(make, data.config)
    whole, begun = veomni_loader(), veomni_loader()
    expected = list(islice(whole, 2 * len(whole)))
    list(islice(begun, len(whole) + 1))
    resumed = veomni_loader()
    resumed.load_state_dict(begun.state_dict())
    same(list(islice(resumed, 2)), expected[len(whole) + 1 :][:2])


def test_a_state_without_a_build_is_gone_on_from_by_other_ranks(data, monkeypatch):
    """Two ranks begin, three go on, and one ends the epoch: each sample comes once."""
    monkeypatch.chdir(data.folder / "raw")
    options = {"model": str(data.folder / "model"), "max_tokens": 160, "epochs": 1}
    options |= {"check_ranks": False, "remainder": "drop"}
    collate, state, found = MainCollator(), None, []
    for num_ranks, count in ((2, 2), (3, 1), (1, None)):
        for rank in range(num_ranks):
            ours = BalancedLoader(data.records, dp_rank=rank, dp_world_size=num_ranks, **options)
            loader = VeOmniLoader(ours, collate, data.config)
            if state is not None:
                loader.load_state_dict(state)
            batches = [batch for step in islice(loader, count) for batch in step]
            assert batches
            for batch in batches:
                rows = batch["input_ids"][0].tensor_split(batch["cu_seq_lens_q"][1:-1].tolist())
                found += [tuple(row.tolist()) for row in rows]
            if rank == 0:
                after = loader.state_dict()
            assert loader.state_dict() == after
        state = after
    whole = [
        ids
        for step in BalancedLoader(data.records, dp_rank=0, dp_world_size=1, **options)
        for batch in step
        for ids in sample_rows(batch, data.config)
    ]
    assert len(set(whole)) == len(whole) == len(data.records)
    assert sorted(found) == sorted(whole)


def sample_rows(batch, config):
    """Each sample's ids, as VeOmni has them."""
    return [tuple(sample["input_ids"].tolist()) for sample in sample_features(batch, config)]


def test_what_does_not_fit_is_one_line(data):
    register(partial(StreamingLoader, data.folder / "packed"), data.config)
    with pytest.raises(ConfigError, match="dyn_bsz=True, micro_batch_size=1; a group is a micro"):
        veomni_loader(dyn_bsz=True)
    with pytest.raises(ConfigError, match=r"data\.datasets_type of VeOmni must be 'isobatch' too"):
        build_dataloader("isobatch", dataset=[], collate_fn=MainCollator(), **SETTINGS)
    with pytest.raises(
        ConfigError, match="loss_weights is 'square'; VeOmni's losses have no weights"
    ):
        VeOmniLoader(loader_of(data, loss_weights="square"), MainCollator())
    with pytest.raises(ConfigError, match="has shuffle=False; VeOmni trains on it"):
        VeOmniLoader(loader_of(data, shuffle=False), MainCollator())
    (batch,) = next(iter(loader_of(data)))
    unlabelled = replace(batch, labels=torch.full_like(batch.labels, -100))
    with pytest.raises(DataError, match="a micro-batch has no labels"):
        sample_features(unlabelled, data.config)
    batch = next(batch for step in loader_of(data) for batch in step if len(batch.image_sizes))
    with pytest.raises(ConfigError, match="has images or clips; give register the model"):
        sample_features(batch)
    with pytest.raises(ConfigError, match="model type 'llava': VeOmni is given samples of qwen2"):
        register(partial(StreamingLoader, "packed"), transformers.LlavaConfig())


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("sdpa", torch.bool), ("eager", torch.float32), ("flash_attention_2", None)],
)
def test_samples_are_kept_apart_as_the_models_attention_does_it(data, attention, dtype):
    attend_by(attention)
    register(partial(StreamingLoader, data.folder / "packed"), data.config)
    (batch, *_) = next(iter(veomni_loader()))
    mask, size = batch["attention_mask"], batch["input_ids"].shape[1]
    if dtype is None:
        assert mask.shape == (1, size)
        return
    assert (mask.shape, mask.dtype) == ((1, 1, size, size), dtype)
    borders = batch["cu_seq_lens_q"].tolist()
    assert len(borders) > 2
    is_seen = mask[0, 0] if dtype is torch.bool else mask[0, 0] == 0
    for start, end in pairwise(borders):
        assert not is_seen[start:end, :start].any()
        assert torch.equal(
            is_seen[start:end, start:end], torch.ones(end - start, end - start).tril() > 0
        )
        assert not is_seen[start:end, end:].any()


def test_attention_that_is_not_known_must_be_told(data):
    make = partial(StreamingLoader, data.folder / "packed")
    for attention in ("native-sparse", None):
        attend_by(attention)
        register(make, data.config)
        with pytest.raises(ConfigError, match=f"attn_implementation is {attention!r}: it is not k"):
            veomni_loader()
        for block_mask, rank in ((True, 4), (False, 2)):
            register(make, data.config, block_mask=block_mask)
            assert next(iter(veomni_loader()))[0]["attention_mask"].dim() == rank
    attend_by("veomni_flash_attention_3_with_sp")
    register(make, data.config, block_mask=True)
    with pytest.raises(
        ConfigError, match="block_mask is True, but veomni_flash_attention_3_with_sp"
    ):
        veomni_loader()


def test_its_models_find_weights_by_names_of_modules_and_draw_the_others(data, tmp_path):
    plain = transformers.AutoModelForImageTextToText.from_config(data.config)
    for is_original in (True, False):
        plain.save_pretrained(tmp_path, save_original_format=is_original)
        with mock.patch.dict(LOSS_MAPPING):  # it registers its own
            model = build_foundation_model(
                str(tmp_path),
                torch_dtype="float32",
                init_device="cpu",
                ops_implementation=arguments_types.OpsImplementationConfig(**OPERATIONS),
            )
        load_model_weights(model, str(tmp_path), "cpu")
        values = model.state_dict()
        same_names = [n for n, value in plain.state_dict().items() if value.equal(values[n])]
        assert (len(same_names) == len(values)) is not is_original
        assert "lm_head.weight" in same_names


def settings_of_the_page(attention):
    """veomni.yaml, with what a CPU needs."""
    settings = yaml.safe_load(yaml_block("veomni"))
    settings["model"]["ops_implementation"] = OPERATIONS | {"attn_implementation": attention}
    optimizer = {"lr": RATE, "weight_decay": 0.0, "max_grad_norm": 1e9}
    settings["train"] |= {"optimizer": optimizer, "vit_lr": RATE, "num_train_epochs": EPOCHS}
    settings["train"]["checkpoint"] = {"save_epochs": 0, "save_hf_weights": False}
    precision = {"enable": True, "param_dtype": "float32"}
    settings["train"]["accelerator"] = {"fsdp_config": {"mixed_precision": precision}}
    return settings


@pytest.mark.parametrize(
    ("attention", "mask"), [("sdpa", ""), ("eager", ""), ("sdpa", ", block_mask=False")]
)
def test_its_trainer_trains_on_two_ranks_and_ulysses_peers_share_sequences(data, attention, mask):
    (data.folder / "veomni.yaml").write_text(yaml.safe_dump(settings_of_the_page(attention)))
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*launch, RANKS, data.folder, "found", mask],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert not done.returncode, done.stderr[-5000:]
    ranks = torch.load(data.folder / "found.pt", weights_only=False)
    assert [rank["steps"] for rank in ranks] == [2, 2]
    assert all(len(step) == 2 for step in ranks[0]["given"])
    losses = [rank["losses"] for rank in ranks]
    check_losses(data, ranks[0]["weights"], losses, are_apart=not mask)
    if mask:
        check_shards(data, [rank["shards"] for rank in ranks])


def check_losses(data, weights, losses, *, are_apart):
    """Each step's mean loss per label is that of a plain loop from the saved weights."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(data.folder / "model")
    saved = model.state_dict()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    about = {"dp_world_size": 2, "micro_batches_per_step": 2, "loss_normalizer": "step"}
    about |= {"seed": 42, "check_ranks": False, "remainder": "drop"}
    loaders = [StreamingLoader(data.folder / "packed", dp_rank=rank, **about) for rank in range(2)]
    expected = []
    for steps in chain.from_iterable(zip(*loaders, strict=True) for _ in range(EPOCHS)):
        total = 0.0
        for batch in (batch for step in steps for batch in step):
            inputs = model_inputs(batch, model)
            if not are_apart:  # nothing tells VeOmni's sdpa where samples begin
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            loss = model(**inputs).loss
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    # a rank's loss is multiplied by the number of ranks, for the mean of their gradients
    found = [sum(parts) / 2 for parts in zip(*losses, strict=True)]
    assert len(found) == len(expected) == 6
    assert found == pytest.approx(expected, rel=1e-5)


def check_shards(data, ranks):
    """Peers have the same samples, and their shards together are the whole row."""
    lengths, steps = zip(*ranks, strict=True)
    assert lengths[0] == lengths[1] == len(loader_of(data, remainder="drop"))
    (first,) = islice(loader_of(data, micro_batches_per_step=2, seed=3, remainder="drop"), 1)
    for batch, *shards in zip(first, *steps, strict=True):
        rows = {name: [shard[name] for shard in shards] for name in shards[0]}
        tokens = torch.cat(rows["input_ids"], dim=-1)
        labels = torch.cat(rows["labels"], dim=-1)[0]
        num_tokens = len(batch.input_ids)
        is_text = batch.input_ids != data.config.image_token_id
        assert tokens.shape[-1] % 2 == 0
        assert torch.equal(tokens[0, :num_tokens], batch.input_ids * is_text)
        assert torch.equal(labels[:num_tokens], shift_labels(batch.labels, batch.cu_seqlens))
        assert (labels[num_tokens:] == -100).all()
        for shard in shards:
            assert shard["cu_seq_lens_q"][: len(batch.cu_seqlens)].equal(batch.cu_seqlens)
        pixels = torch.cat(rows["pixel_values"])
        assert torch.equal(pixels[: len(batch.pixel_values)], batch.pixel_values)
        assert shards[0]["image_grid_thw"].equal(shards[1]["image_grid_thw"])

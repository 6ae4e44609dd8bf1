"""Tests of our loaders in NeMo Automodel; `test_automodel.py` runs them in its environment."""

import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from nemo_automodel.components.datasets.vlm.collate_fns import (
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
)
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import (
    NeatPackConfig,
    PackedDatasetWrapper,
)
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.models.common.packing import configure_packing_for_models
from nemo_automodel.components.training.step_scheduler import StepScheduler
from nemo_automodel.components.utils.model_utils import filter_forward_kwargs
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, StreamingLoader, model_inputs, packed_batch
from isobatch.loaders.integrations.automodel import (
    BalancedDataloader,
    BalancedDataloaderConfig,
    BalancedDataset,
    automodel_pack,
)
from isobatch.shards.manifest import read_manifest
from support import ROOT, TESTS
from support.builds.packed import build
from support.clips import make_clip
from support.models.saved_videos import save_video_folder

CAP, NUM_RECORDS = 400, 40
PAGE = ROOT / "docs/load/trainers/automodel.md"
ON_CPU = TESTS / "support" / "frameworks" / "checks" / "automodel_on_cpu.py"
RECIPE = """
step_scheduler: {{global_batch_size: {batch}, local_batch_size: 1, max_steps: {steps},
                 ckpt_every_steps: 3}}
dist_env: {{backend: gloo, timeout_minutes: 1}}
model:
  _target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained
  pretrained_model_name_or_path: {model}
  torch_dtype: float32
  attn_implementation: sdpa
checkpoint: {{enabled: true, checkpoint_dir: checkpoints, save_consolidated: false}}
distributed: {{strategy: fsdp2}}
loss_fn: {{_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-3}}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts, images and videos, packed and as records, and a tiny Qwen2.5-VL."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "raw"
    raw.mkdir()
    (raw / "clip.mp4").write_bytes(make_clip(30, (80, 60), rate=Fraction(24)).content)
    Image.new("RGB", (90, 60), (60, 90, 30)).save(raw / "image.png")
    media = ({"video": "clip.mp4"}, {"image": "image.png"}, {})
    records = []
    for number in range(NUM_RECORDS):
        about = media[number % 3]
        mark = "".join(f"<{kind}>" for kind in about)
        answer = f"answer {number} " * (1 + number % 5)
        turns = [("human", f"{mark} what? {number}"), ("gpt", answer)]
        turns = [{"from": role, "value": text} for role, text in turns]
        records.append({"id": f"s{number}", "conversations": turns, **about})
    (raw / "annotations.json").write_text(json.dumps(records))
    model = save_video_folder("qwen2_5_vl", folder / "model", {})
    options = {"model": model, "tokenizer": model, "max_seq_len": CAP}
    build(raw, folder / "packed", format="arrow", **options)
    build(raw, folder / "padded", format="arrow", pad_each_to=4, **options)
    # transformers runs the encoder for images and for videos, so FSDP needs both on all ranks
    stills = folder / "stills"
    stills.mkdir()
    (stills / "image.png").write_bytes((raw / "image.png").read_bytes())
    kept = [record for record in records if "video" not in record]
    (stills / "annotations.json").write_text(json.dumps(kept))
    build(stills, folder / "packed_stills", format="arrow", **options)
    manifest = read_manifest(folder / "packed")
    config = transformers.AutoConfig.from_pretrained(model)
    config.image_token_id, config.video_token_id = manifest.image_token_id, manifest.video_token_id
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    text |= {"layer_types": ["full_attention"], "vocab_size": manifest.vocab_size}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "fullatt_block_indexes": [0]}
    for part, sizes in ((config.vision_config, vision), (config.text_config, text)):
        for name, value in sizes.items():
            setattr(part, name, value)
    torch.manual_seed(0)
    net = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    net.save_pretrained(model)
    return SimpleNamespace(
        folder=folder, raw=raw, stills=stills, name=model, model=net, records=records
    )


def datasets(data):
    """The build, and the records without one."""
    options = {"model": data.name, "max_tokens": CAP, "data_root": data.raw}
    return [
        BalancedDataset(url=data.folder / "packed"),
        BalancedDataset(dataset=data.records, options=options),
    ]


def theirs(batch, model, multiple, *, with_mrope):
    """Automodel's own pack of the samples of a micro-batch, blank ones included."""
    row = packed_batch(batch, model)
    samples, media = [], row.media
    merge = model.config.vision_config.spatial_merge_size
    seconds = row.samples.video_seconds
    given = {"image": 0, "video": 0}, {"image": 0, "video": 0}
    borders = row.samples.cu_seqlens.tolist()
    for start, end in pairwise(borders):
        ids, labels = row.samples.input_ids[start:end], row.samples.labels[start:end]
        # one more token, since Automodel leaves out the last one of each sample
        sample = {
            "input_ids": torch.cat([ids, torch.tensor([5])]),
            "labels": torch.cat([labels, torch.tensor([-100])]),
            "attention_mask": torch.ones(len(ids) + 1, dtype=torch.long),
            "mm_token_type_ids": torch.cat([row.mm_token_type_ids[start:end], torch.tensor([0])]),
        }
        for kind, suffix, kind_id in (("image", "", 1), ("video", "_videos", 2)):
            num_tokens = int((row.mm_token_type_ids[start:end] == kind_id).sum())
            first = count = given[0][kind]
            while num_tokens > 0:
                num_tokens -= int(media[f"{kind}_grid_thw"][count].prod()) // merge**2
                count += 1
            if count > first:
                grids = media[f"{kind}_grid_thw"][first:count]
                rows = given[1][kind], given[1][kind] + int(grids.prod(dim=1).sum())
                sample[f"{kind}_grid_thw"] = grids
                sample[f"pixel_values{suffix}"] = media[f"pixel_values{suffix}"][slice(*rows)]
                if kind == "video":
                    sample["second_per_grid_ts"] = seconds[seconds > 0].float()[first:count]
                given[0][kind], given[1][kind] = count, rows[1]
        samples.append(sample)
    rope = model.model.get_rope_index if with_mrope else None
    packs = PackedDatasetWrapper(
        samples, [[*range(len(samples))]], 10_000, 0, multiple, get_rope_index=rope
    )
    return packs[0]


def same(ours, want):
    assert ours.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, name
            assert ours[name].device == value.device, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


def contract(mask, *, with_metadata=False):
    return SimpleNamespace(packed_mask_type=mask, requires_packed_sequence_metadata=with_metadata)


THD, NEAT = packed_sequence_thd_vlm_collater, neat_packed_vlm_collater
CASES = {
    "thd": ("thd", {}, THD, {}),
    "thd to a length": ("thd", {"collate_max_length": 512}, THD, {"max_length": 512}),
    "neat": ("neat", {}, NEAT, {}),
    "neat to a length": ("neat", {"collate_max_length": 512}, NEAT, {"max_length": 512}),
    **{
        f"neat {mask}": ("neat", {}, NEAT, {"packing": contract(mask, with_metadata=True)})
        for mask in ("document_ids", "flash_varlen")
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", [1, 3])
def test_batches_are_those_of_automodels_collators(data, case, number, size):
    form, packing, collater, options = CASES[case]
    if size > 1 and "flash" in case:
        pytest.skip("its collator takes one row")
    dataset = datasets(data)[number]
    config = BalancedDataloaderConfig(
        dataset, packing=NeatPackConfig(packing_format=form, **packing)
    )
    runtime = {"packing_contract": options["packing"]} if "packing" in options else {}
    loading = config.build(
        pretrained_model_name_or_path=data.name,
        dp_rank=0,
        dp_world_size=2,
        batch_size=size,
        get_rope_index=data.model.model.get_rope_index,
        pp_n_microbatches=None,
        cp_size=1,
        **runtime,
    ).dataloader
    batches = [batch for step in dataset.build(rank=0, world_size=2) for batch in step]
    packs = [theirs(batch, data.model, 1, with_mrope=True) for batch in batches]
    want = [collater(packs[at : at + size], **options) for at in range(0, len(packs), size)]
    ours = list(loading)
    assert len(ours) == len(want) > 1
    assert any("pixel_values_videos" in batch for batch in want)
    for one, other in zip(ours, want, strict=True):
        same(one, other)


def test_samples_are_padded_for_context_parallelism_as_automodel_pads_them(data):
    config = BalancedDataloaderConfig(
        BalancedDataset(url=data.folder / "padded"), packing=NeatPackConfig(packing_format="thd")
    )
    args = {"pretrained_model_name_or_path": data.name, "dp_rank": 0, "dp_world_size": 1}
    args |= {"batch_size": 1, "cp_size": 2}
    batches = StreamingLoader(data.folder / "padded", dp_rank=0, dp_world_size=1)
    for ours, (batch,) in zip(config.build(**args).dataloader, batches, strict=True):
        pack = theirs(batch, data.model, 4, with_mrope=False)
        same(ours, packed_sequence_thd_vlm_collater([pack]))
        assert ours["input_ids"].shape[1] <= CAP + 8  # the cap, and a blank image
    config.dataset_config = BalancedDataset(url=data.folder / "packed")
    with pytest.raises(ConfigError, match="packer build --pad-each-to 4"):
        config.build(**args)
    with pytest.raises(ConfigError, match="does not cut M-RoPE"):
        config.build(**args, get_rope_index=data.model.model.get_rope_index)


@pytest.mark.parametrize("number", [0, 1])
def test_losses_and_gradients_are_those_of_transformers(data, number):
    model = data.model
    model.set_attn_implementation("sdpa")
    config = BalancedDataloaderConfig(datasets(data)[number])
    loading = config.build(
        pretrained_model_name_or_path=data.name,
        dp_rank=0,
        dp_world_size=1,
        batch_size=1,
        get_rope_index=model.model.get_rope_index,
        packing_contract=configure_packing_for_models([model]),
    ).dataloader
    steps = datasets(data)[number].build(rank=0, world_size=1)
    for batch, (ours,) in zip(loading, steps, strict=True):
        labels = batch.pop("labels")
        num_labels = int((labels != -100).sum())
        assert num_labels == ours.num_loss_tokens
        logits = model(**filter_forward_kwargs(model, batch)).logits
        loss = MaskedCrossEntropy()(logits, labels, num_label_tokens=num_labels)
        inputs = model_inputs(ours, model, with_labels=True) | {"num_items_in_batch": num_labels}
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:  # Automodel's type
                inputs[name] = inputs[name].bfloat16()
        want = model(**inputs).loss
        assert float(loss) == pytest.approx(float(want), abs=1e-5)
        weight = model.lm_head.weight
        (gradient,), (wanted,) = (torch.autograd.grad(each, [weight]) for each in (loss, want))
        assert torch.allclose(gradient, wanted, atol=1e-5)


def ids_of(dataset, rank, ranks, **options):
    """A dataloader whose batches are lists of the samples' ids."""
    one = BalancedDataset(dataset.url, dataset.dataset, dict(dataset.options) | options)
    make = partial(one.build, rank=rank, world_size=ranks)
    return BalancedDataloader(make(), lambda batch: batch.sample_ids, lambda packs: sum(packs, ()))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_resumes_on_another_number_of_ranks(data, number, stop):
    dataset, taken = datasets(data)[number], []
    for rank in range(2):
        loading = ids_of(dataset, rank, 2)
        loading.set_epoch(0)
        iterator = iter(loading)
        taken += [name for _ in range(stop) for name in next(iterator)]
        state = json.loads(json.dumps(loading.state_dict()))
    for rank in range(3):
        loading = ids_of(dataset, rank, 3)
        loading.load_state_dict(state)
        loading.set_epoch(0)
        taken += [name for names in loading for name in names]
    assert sorted(taken) == sorted(f"s{number}" for number in range(NUM_RECORDS))


@pytest.mark.parametrize("number", [0, 1])
def test_an_epoch_that_was_saved_after_its_last_batch_is_not_begun_again(data, number):
    dataset = datasets(data)[number]
    loading = ids_of(dataset, 0, 1)
    epochs = []
    for epoch in range(3):
        loading.set_epoch(epoch)
        epochs.append(list(loading))
    loading = ids_of(dataset, 0, 1)
    loading.set_epoch(0)
    iterator = iter(loading)
    for _ in epochs[0]:
        next(iterator)
    state = loading.state_dict()
    loading = ids_of(dataset, 0, 1)
    loading.load_state_dict(state)
    resumed = []
    for epoch in range(3):
        loading.set_epoch(epoch)
        resumed.append(list(loading))
    assert resumed == [[], *epochs[1:]]


def test_an_epoch_whose_last_batches_are_fewer_than_accumulated_is_saved_as_spent(data):
    def trained(state=None, *, until=3):
        loading = ids_of(datasets(data)[0], 0, 1)
        num_steps = next(number for number in range(2, 9) if len(loading) % number)
        options = {"global_batch_size": num_steps, "local_batch_size": 1, "dp_size": 1}
        scheduler = StepScheduler(
            **options, dataloader=loading, num_epochs=3, preemption_signal=None
        )
        if state is not None:
            loading.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        taken = []
        for epoch in scheduler.epochs:
            scheduler.set_epoch(epoch)
            for batches in scheduler:
                taken.append((epoch, batches))
                state = loading.state_dict(), scheduler.state_dict()
            if epoch + 1 == until:
                break
        return taken, state

    whole, _ = trained()
    begun, state = trained(until=1)
    assert state[1]["epoch"] == 0
    assert begun + trained(state)[0] == whole


def test_lengths_are_known_of_builds_and_not_without_one(data):
    build_of, records = datasets(data)
    loading = ids_of(build_of, 0, 2, micro_batches_per_step=2)
    assert len(loading) == sum(1 for _ in loading)
    with pytest.raises(TypeError, match="max_steps"):
        len(ids_of(records, 0, 2))


def test_a_state_in_the_middle_of_a_step_is_refused(data):
    loading = ids_of(datasets(data)[0], 0, 1, micro_batches_per_step=2)
    iterator = iter(loading)
    next(iterator)
    with pytest.raises(ConfigError, match="global_batch_size must be a multiple"):
        loading.state_dict()
    next(iterator)
    assert loading.state_dict()


def test_what_our_batches_cannot_do_is_refused(data):
    dataset = datasets(data)[0]
    for options, message in (
        ({"num_workers": 2}, "num_workers is 2; groups are packed"),
        ({"packing": NeatPackConfig(packing_ratio=0.9)}, "packing_ratio is 0.9"),
    ):
        with pytest.raises(ConfigError, match=message):
            BalancedDataloaderConfig(dataset, **options)
    args = {"pretrained_model_name_or_path": data.name, "dp_rank": 0, "dp_world_size": 1}
    args |= {"batch_size": 1}
    with pytest.raises(ConfigError, match=r"gives new, which is not known here; .* 0\.7\.0"):
        BalancedDataloaderConfig(dataset).build(**args, new=1)
    for wrong in (BalancedDataset(), BalancedDataset(url="a", dataset=[])):
        with pytest.raises(ConfigError, match="either url="):
            wrong.build(rank=0, world_size=1)
    dataset.options = {"loss_weights": "sample"}
    with pytest.raises(ConfigError, match="loss_weights is 'sample'"):
        BalancedDataloaderConfig(dataset).build(**args)


def test_other_media_come_along_too(data):
    batch = next(iter(StreamingLoader(data.folder / "packed")))[0]
    pack = automodel_pack(batch, data.model) | {"media": {"image_sizes": torch.ones(2, 2)}}
    loading = BalancedDataloaderConfig(datasets(data)[0]).build(
        pretrained_model_name_or_path=data.name, dp_rank=0, dp_world_size=1, batch_size=1
    )
    assert loading.dataloader.collate_fn([pack, pack])["image_sizes"].shape == (4, 2)


def train(folder, program, *, ranks=1):
    """Run Automodel's recipe to its end, and give the losses of its log."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(ON_CPU), program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not done.returncode, done.stderr[-5000:]
    rows = (folder / "checkpoints" / "training.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, rows)}


def parts_of_page():
    text = PAGE.read_text()
    (settings,) = re.findall(r"<!-- settings: automodel -->\n```yaml\n(.*?)```", text, re.DOTALL)
    (program,) = re.findall(r"<!-- program: automodel -->\n```python\n(.*?)```", text, re.DOTALL)
    return settings, program


def test_the_recipe_of_the_docs_trains_on_two_ranks_and_goes_on_on_one(data, tmp_path):
    settings, program = parts_of_page()
    (tmp_path / "packed").symlink_to(data.folder / "packed_stills")
    recipe = RECIPE.format(batch=2, steps=6, model=data.name)
    (tmp_path / "recipe.yaml").write_text(recipe + settings)
    losses = train(tmp_path, "recipe.yaml", ranks=2)
    assert losses[5] < losses[0]
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(batch=2, steps=9, model=data.name))
    (tmp_path / "program.py").write_text(program)
    later = train(tmp_path, "program.py")
    assert sorted(later) == list(range(9))
    assert later[8] < losses[0]
    assert {step: later[step] for step in losses} == losses  # its log goes on too


def test_the_recipe_trains_on_two_ranks_without_a_build(data, tmp_path):
    settings, _ = parts_of_page()
    options = {"model": data.name, "max_tokens": CAP}
    settings = settings.replace("url: packed", f"dataset: {data.stills}\n  options: {options}")
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.format(batch=4, steps=4, model=data.name) + settings
    )
    losses = train(tmp_path, "recipe.yaml", ranks=2)
    assert sorted(losses) == [0, 1, 2, 3]
    assert losses[3] < losses[0]


def test_loaders_of_both_kinds_are_made(data):
    build_of, records = datasets(data)
    assert isinstance(build_of.build(rank=1, world_size=2), StreamingLoader)
    loader = records.build(rank=1, world_size=2)
    assert isinstance(loader, BalancedLoader)
    assert (loader.config.dp_rank, loader.config.dp_world_size) == (1, 2)


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
    dataset = BalancedDataset(url=data.folder / "packed", options={"device_mesh": mesh})
    config = dataset.build(rank=1, world_size=2).config
    assert (config.dp_rank, config.dp_world_size) == (0, 1)

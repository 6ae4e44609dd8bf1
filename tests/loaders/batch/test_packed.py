"""`packed_batch`: what packed trainers take, next to plain loops over samples."""

import random
import subprocess
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.loaders.batch.packed import packed_batch, packed_length, seq_lens
from support.cases import for_each
from support.frameworks.environments import python_of

pytest.importorskip("transformers")
pytest.importorskip("av")
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.processing_utils import ProcessorMixin

from support.models.family_models import make_family_batch, make_family_model
from support.models.tiny_models import NAMES, make_batch, make_config, make_model
from support.models.video_samples import make_samples, make_video_model, packed

torch.set_num_threads(1)

CASES = [
    (name, multiple, counts, fixed)
    for name in NAMES
    for multiple in (1, 8, 64)
    for counts, fixed in (([2, 0, 1], False), ([0, 0], True), ([], True), ([1], True), ([], False))
]
"""With images, text alone, nothing at all; to any and to a fixed number of tokens."""


def rounded_up(number, multiple):
    while number % multiple:
        number += 1
    return number


def oracle(batch, positions, *, multiple, total):
    """The row of a micro-batch, token by token; `positions` are M-RoPE's three rows, or None."""
    row = {name: [] for name in ("ids", "labels", "mask", "positions", "mrope", "is_token")}
    lengths, slots = [], []
    borders = batch.cu_seqlens.tolist()
    weights = batch.loss_weights
    for number, (start, end) in enumerate(pairwise(borders)):
        length, slot = end - start, rounded_up(end - start, multiple)
        if total and number == batch.num_samples - 1:
            slot = total - sum(slots)
        lengths.append(length)
        slots.append(slot)
        last = -1 if positions is None else int(positions[:, start:end].max())
        for place in range(slot):
            is_token = place < length
            token = start + place
            label = int(batch.labels[token + 1]) if place + 1 < length else -100
            row["ids"].append(int(batch.input_ids[token]) if is_token else 0)
            row["labels"].append(label)
            weight = 1.0 if weights is None or label == -100 else float(weights[token])
            row["mask"].append(weight if label != -100 else 0.0)
            row["positions"].append(place)
            row["is_token"].append(is_token)
            if positions is not None:
                after = [last + 1 + place - length] * 3
                row["mrope"].append(positions[:, token].tolist() if is_token else after)
    return row, lengths, slots


@for_each(("name", "multiple", "counts", "fixed"), CASES)
def test_a_row_is_what_a_loop_over_samples_makes(name, multiple, counts, fixed):
    for seed in range(3):
        config = make_config(name)
        batch = make_batch(name, counts, seed=seed)
        if seed == 1:
            sizes = batch.cu_seqlens.diff().long()
            weights = torch.rand(len(sizes)).repeat_interleave(sizes)
            batch = replace(batch, loss_weights=weights)
        total = None
        if fixed:
            total = packed_length(len(batch.input_ids) + 512, config, pad_each_to=multiple)
        result = packed_batch(batch, config, pad_each_to=multiple, pad_total_to=total)
        unweighted = replace(batch, loss_weights=None)
        inputs = model_inputs(unweighted, config)
        positions = inputs["position_ids"][1:, 0] if name == "qwen2_vl" else None
        # with the blank samples that model_inputs adds too
        samples = result.samples
        assert torch.equal(samples.input_ids, inputs["input_ids"][0])
        if batch.loss_weights is not None:
            weights, blank = samples.loss_weights.split_with_sizes(
                [len(batch.input_ids), len(samples.input_ids) - len(batch.input_ids)]
            )
            assert torch.equal(weights, batch.loss_weights)
            assert not blank.any()
        row, lengths, slots = oracle(samples, positions, multiple=multiple, total=total)
        assert result.input_ids.tolist() == row["ids"]
        assert result.labels.tolist() == row["labels"]
        assert result.loss_mask.tolist() == pytest.approx(row["mask"])
        assert result.position_ids.tolist() == row["positions"]
        assert result.is_token.tolist() == row["is_token"]
        assert result.cu_seqlens.diff().tolist() == lengths
        assert result.cu_seqlens_padded.diff().tolist() == slots
        assert (result.max_seqlen, result.num_tokens) == (max(slots), sum(slots))
        assert all(slot % multiple == 0 for slot in slots)
        assert total in (None, result.num_tokens)
        if positions is None:
            assert result.mrope_positions is None
        else:
            assert result.mrope_positions.T.tolist() == row["mrope"]
        for key, value in result.media.items():
            assert torch.equal(value, inputs[key])
        assert "pixel_values" in result.media  # also without images: the blank one
        dtypes = [result.input_ids, result.labels, result.position_ids, result.mm_token_type_ids]
        assert {values.dtype for values in dtypes} == {torch.int64}
        assert result.cu_seqlens_padded.dtype == torch.int32
        assert result.loss_mask.dtype == torch.float32


@for_each("name", NAMES)
def test_padding_is_taken_off_again(name):
    for multiple in (1, 8, 64):
        batch = make_batch(name, [1, 0, 3], seed=multiple)
        result = packed_batch(batch, make_config(name), pad_each_to=multiple, pad_total_to=1024)
        assert torch.equal(result.unpadded(result.input_ids), batch.input_ids)
        assert torch.equal(result.unpadded(result.position_ids), batch.position_ids)
        assert torch.equal(result.cu_seqlens, batch.cu_seqlens)
        if result.mrope_positions is not None:
            positions = model_inputs(batch, make_config(name))["position_ids"][1:, 0]
            assert torch.equal(result.unpadded(result.mrope_positions), positions)


@for_each(("name", "multiple"), [("qwen2_vl", 8), ("llava", 64), ("internvl", 1)])
def test_a_padded_row_has_the_loss_of_the_unpadded_one(name, multiple):
    """Positions go on in the padding, so transformers takes it for the end of its sample."""
    model = make_model(name)
    batch = make_batch(name, [1, 0, 2], seed=4, num_loss_tokens=7)
    expected = model(**model_inputs(batch, model)).loss
    result = packed_batch(batch, model, pad_each_to=multiple, pad_total_to=512)
    positions = result.position_ids[None]
    if result.mrope_positions is not None:
        positions = torch.cat([positions, result.mrope_positions])[:, None]
    logits = model(
        input_ids=result.input_ids[None], position_ids=positions, use_cache=False, **result.media
    ).logits[0]
    losses = functional.cross_entropy(logits.float(), result.labels, reduction="none")
    loss = (losses * result.loss_mask).sum() / result.samples.loss_divisor
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@for_each("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_videos_have_the_positions_of_model_inputs_and_the_types_of_their_processor(name):
    config = make_video_model(name).config
    drawn = random.Random(name)
    for seed in range(3):
        kinds = ["t", "v", "i"] if name == "glm4v" else ["vi", "t", drawn.choice(["iv", "vtv"])]
        batch = packed(name, make_samples(name, kinds, seed=seed))
        result = packed_batch(batch, config, pad_each_to=8)
        positions = model_inputs(batch, config)["position_ids"]
        assert torch.equal(result.unpadded(result.mrope_positions), positions[1:, 0])
        assert set(result.media) >= {"pixel_values", "image_grid_thw"}
        types = result.unpadded(result.mm_token_type_ids)
        if name != "glm4v":
            kind = SimpleNamespace(
                image_token_ids=[config.image_token_id],
                video_token_ids=[config.video_token_id],
                audio_token_ids=[],
            )
            ids = [batch.input_ids.tolist()]
            assert [types.tolist()] == ProcessorMixin.create_mm_token_type_ids(kind, ids)
            continue
        # its videos have the images' token: the processor looks for the marks around them, which
        # these samples do not have; so they are put around each video's sample
        ids, borders = [], batch.cu_seqlens.tolist()
        owners = {"t": [], "v": [-1], "i": []}
        for what, start, end in zip(kinds, borders[:-1], borders[1:], strict=True):
            marks = owners[what], [-2] * len(owners[what])
            ids += [*marks[0], *batch.input_ids[start:end].tolist(), *marks[1]]
        kind = SimpleNamespace(
            video_start_id=-1, video_end_id=-2, image_token_id=config.image_token_id
        )
        (expected,) = Glm4vProcessor.create_mm_token_type_ids(kind, [ids])
        unmarked = [number for number, token in zip(expected, ids, strict=True) if token >= 0]
        assert types.tolist() == unmarked


def test_clips_of_sound_are_of_type_3():
    name = "qwen2_5_omni_thinker"
    config = make_family_model(name).config
    batch = make_family_batch(name, [1, 0], seed=1)
    result = packed_batch(batch, config, pad_each_to=8)
    is_audio = result.samples.input_ids == config.audio_token_id
    assert is_audio.any()
    assert ((result.unpadded(result.mm_token_type_ids) == 3) == is_audio).all()
    assert "input_features" in result.media


def test_without_a_model_there_is_text_alone():
    batch = make_batch("llava", [0, 0], seed=3)
    result = packed_batch(batch, pad_each_to=8)
    assert result.media == {}
    assert result.mm_token_type_ids is result.mrope_positions is None
    assert result.num_samples == 2
    empty = packed_batch(make_batch("llava", []), pad_each_to=8)
    assert (empty.num_samples, empty.num_tokens) == (1, 8)
    assert not empty.loss_mask.any()
    assert empty.cu_seqlens.tolist() == [0, 1]


def test_rows_of_lengths_are_filled_up():
    config = make_config("qwen2_vl")
    counts = [[1, 0, 2], [], [0]]
    batches = [packed_batch(make_batch("qwen2_vl", n), config, pad_each_to=8) for n in counts]
    lengths = seq_lens(batches)
    for row, padded, batch in zip(*lengths, batches, strict=True):
        number = batch.num_samples
        assert row[:number].tolist() == batch.cu_seqlens.diff().tolist()
        assert padded[:number].tolist() == batch.cu_seqlens_padded.diff().tolist()
        assert {*row[number:].tolist(), *padded[number:].tolist()} <= {-1000}
    assert seq_lens(batches, fill=0).seq_lens.min() == 0


def test_a_fixed_length_holds_the_blank_samples():
    """Of text that fills its cap to the last token, in every family of the packer's presets."""
    for name, multiple in [(name, multiple) for name in NAMES for multiple in (1, 8, 64)]:
        config = make_config(name)
        batch = make_batch(name, [0, 0, 0], seed=2)
        slots = [rounded_up(length, multiple) for length in batch.cu_seqlens.diff().tolist()]
        total = packed_length(sum(slots), config, pad_each_to=multiple)
        result = packed_batch(batch, config, pad_each_to=multiple, pad_total_to=total)
        assert result.num_samples == 4
        with pytest.raises(ConfigError, match="more than pad_total_to"):
            packed_batch(batch, config, pad_each_to=multiple, pad_total_to=total - multiple)


def test_wrong_multiples_and_padded_micro_batches_are_refused():
    batch, config = make_batch("llava", [1]), make_config("llava")
    for options, message in (
        ({"pad_each_to": 0}, "pad_each_to is 0; it must be at least 1"),
        ({"pad_each_to": 8, "pad_total_to": 1025}, "must be a multiple of pad_each_to, 8"),
        ({"pad_total_to": 0}, "pad_total_to is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            packed_batch(batch, config, **options)
    with pytest.raises(ConfigError, match="packing=False"):
        packed_batch(replace(batch, is_padded=True), config)
    with pytest.raises(ValueError, match="an empty micro-batch"):
        packed_batch(make_batch("llava", []), config, always_encode=False)


AUTOMODEL = """
import sys
import torch
from nemo_automodel.components.datasets.vlm.collate_fns import packed_sequence_thd_vlm_collater
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import _build_packed_vlm_sample

results = []
for samples, multiple, total in torch.load(sys.argv[1]):
    pack = _build_packed_vlm_sample(samples, total, 0, sequence_alignment=multiple)
    row = packed_sequence_thd_vlm_collater([pack], max_length=total)
    row["mm_token_type_ids"] = pack["mm_token_type_ids"]
    results.append(row)
torch.save(results, sys.argv[2])
"""
"""Its packs and its collator, as its recipe calls them for samples of one pack."""


@pytest.mark.other_trainers
def test_rows_are_those_of_automodel(pytestconfig, tmp_path):
    """Of samples whose labels are shifted, since Automodel shifts them before it packs."""
    config, cases, rows = make_config("qwen2_vl"), [], []
    for multiple in (1, 8, 64):
        batch = make_batch("qwen2_vl", [1, 0, 2], seed=multiple)
        rows.append(packed_batch(batch, config, pad_each_to=multiple, pad_total_to=512))
        samples = []
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            ids, labels = batch.input_ids[start:end], batch.labels[start:end]
            samples.append(
                {
                    "input_ids": ids,
                    "labels": torch.cat([labels[1:], torch.tensor([-100])]),
                    "attention_mask": torch.ones_like(ids),
                    "mm_token_type_ids": (ids == config.image_token_id).long(),
                }
            )
        cases.append((samples, multiple, 512))
    torch.save(cases, tmp_path / "cases.pt")
    python = python_of("nemo_automodel", pytestconfig.cache.mkdir("frameworks"))
    places = [tmp_path / "cases.pt", tmp_path / "rows.pt"]
    done = subprocess.run(
        [python, "-c", AUTOMODEL, *places], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for row, theirs in zip(rows, torch.load(tmp_path / "rows.pt"), strict=True):
        lengths = seq_lens([row])
        assert theirs["qkv_format"] == "thd"
        for name, values in (
            ("input_ids", row.input_ids[None]),
            ("labels", row.labels[None]),
            ("seq_lens", lengths.seq_lens),
            ("seq_lens_padded", lengths.seq_lens_padded),
        ):
            assert torch.equal(theirs[name], values), name
            assert theirs[name].dtype == values.dtype
        # what fills up the row has positions 0 there, and goes on here
        length = len(theirs["mm_token_type_ids"])
        assert torch.equal(theirs["position_ids"][0, :length], row.position_ids[:length])
        assert torch.equal(theirs["mm_token_type_ids"], row.mm_token_type_ids[:length])
        assert not row.mm_token_type_ids[length:].any()

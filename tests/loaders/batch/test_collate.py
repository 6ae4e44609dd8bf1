"""A group with audio becomes tensors in each form; images as `cut` makes them; errors name the
sample.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
import torch
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.decode.image import decode
from isobatch.loaders.decode.log_mel import log_mel_frames, log_mel_windows
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.models.audio_tokens import plan_audio
from isobatch.models.presets import load_model
from isobatch.shards.stored_group import EMPTY_GROUP, StoredGroup
from support.loading.extract_patches import extract_patches

MODEL = load_model("tiny_audio")
RULE = MODEL.audio
assert RULE is not None
TOTALS = StepTotals(num_loss_tokens=1, num_samples=3, loss_normalizer=1.0)
# (samples, rate, format): one window, two windows, resampled
CLIPS = [(4_000, 16_000, "WAV"), (500_000, 16_000, "FLAC"), (8_001, 8_000, "WAV")]
SIZES = [(60, 40), (40, 90)]


def _clip(count: int, rate: int, form: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.random.default_rng(count).normal(0, 0.1, count), rate, format=form)
    return buffer.getvalue()


def _image(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    rng = np.random.default_rng(width)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def group() -> StoredGroup:
    """Three samples; images in the first and the last, clips in the second (two) and the last."""
    return StoredGroup(
        where="shard-00000.arrow, group 7",
        sample_ids=("a", "b", "c"),
        input_ids=np.arange(9, dtype=np.int32),
        labels=np.arange(9, dtype=np.int32),
        cu_seqlens=np.array([0, 2, 5, 9], dtype=np.int32),
        images=[pa.py_buffer(_image(*size)) for size in SIZES],
        image_sizes=np.array([(height, width) for width, height in SIZES], dtype=np.int32),
        image_samples=np.array([0, 2], dtype=np.int32),
        audios=[pa.py_buffer(_clip(*clip)) for clip in CLIPS],
        audio_lengths=np.array([4_000, 500_000, 16_002], dtype=np.int32),
        audio_samples=np.array([1, 1, 2], dtype=np.int32),
    )


def _collate(group: StoredGroup, **options: Any) -> MicroBatch:
    return collate(group, MODEL, LoaderConfig(pixel_dtype=torch.uint8, **options), TOTALS)


def test_waveforms_lie_clip_behind_clip(group: StoredGroup) -> None:
    batch = _collate(group)
    assert batch.audio_values is not None
    assert batch.audio_lengths is not None
    assert (batch.audio_values.dtype, batch.audio_values.shape) == (torch.float32, (520_002,))
    assert batch.audio_lengths.tolist() == [4_000, 500_000, 16_002]
    first, second, _ = torch.split(batch.audio_values, batch.audio_lengths.tolist())
    for waveform, data in zip((first, second), group.audios, strict=False):
        expected, _ = soundfile.read(io.BytesIO(data), dtype="float32")
        assert np.array_equal(waveform.numpy(), expected)


@pytest.mark.parametrize("audio", ["features", "windows"])
def test_features_are_those_of_each_clip_in_order(group: StoredGroup, audio: str) -> None:
    waveforms, batch = _collate(group), _collate(group, audio=audio)
    assert waveforms.audio_values is not None
    assert waveforms.audio_lengths is not None
    assert batch.audio_values is not None
    make = log_mel_frames if audio == "features" else log_mel_windows
    clips = torch.split(waveforms.audio_values, waveforms.audio_lengths.tolist())
    assert torch.equal(batch.audio_values, torch.cat([make(RULE, clip) for clip in clips]))


@pytest.mark.parametrize("audio", ["waveform", "features", "windows"])
def test_frames_of_windows_are_the_planned_ones(group: StoredGroup, audio: str) -> None:
    batch = _collate(group, audio=audio)
    assert batch.audio_frames is not None
    assert batch.audio_frames.tolist() == [25, 3000, 125, 101]
    plans = [plan_audio(RULE, length, RULE.sampling_rate) for length in (4_000, 500_000, 16_002)]
    assert len(batch.audio_frames) == sum(plan.num_windows for plan in plans)
    assert batch.audio_frames.sum() == sum(plan.num_frames for plan in plans)
    if audio != "waveform":
        assert batch.audio_values is not None
        assert len(batch.audio_values) == (batch.audio_frames.sum() if audio == "features" else 4)


@pytest.mark.parametrize(
    ("audio", "shape"), [("waveform", (0,)), ("features", (0, 128)), ("windows", (0, 128, 3000))]
)
def test_nothing_to_hear_is_no_rows_of_the_usual_shape(audio: str, shape: tuple[int, ...]) -> None:
    batch = _collate(EMPTY_GROUP, audio=audio)
    for tensor, expected in (
        (batch.audio_values, shape),
        (batch.audio_lengths, (0,)),
        (batch.audio_frames, (0,)),
    ):
        assert tensor is not None
        assert tuple(tensor.shape) == expected


def test_a_model_without_an_audio_encoder_has_no_audio_fields(group: StoredGroup) -> None:
    silent = replace(
        group,
        audios=(),
        audio_lengths=EMPTY_GROUP.audio_lengths,
        audio_samples=EMPTY_GROUP.audio_samples,
    )
    batch = collate(silent, load_model("tiny"), LoaderConfig(), TOTALS)
    assert batch.audio_values is None
    assert batch.audio_lengths is None
    assert batch.audio_frames is None


def test_clips_are_never_dropped_for_want_of_a_rule(group: StoredGroup) -> None:
    with pytest.raises(ConfigError, match=r"group 7: 3 audio clips, but no audio rule"):
        collate(group, load_model("tiny"), LoaderConfig(), TOTALS)


def test_pixels_are_those_of_each_image_in_order(group: StoredGroup) -> None:
    for exact in (False, True):
        batch = _collate(group, exact_resize=exact)
        each = [extract_patches(MODEL.vision, decode(image), exact=exact) for image in group.images]
        assert torch.equal(batch.pixel_values, torch.cat(each))
        assert batch.patches_per_image.tolist() == [len(patches) for patches in each]


def test_images_that_are_encoded_elsewhere_have_no_rows_here(group: StoredGroup) -> None:
    batch = _collate(replace(group, images=(), audios=()))
    assert len(batch.pixel_values) == 0
    assert len(batch.patches_per_image) == 2
    assert batch.audio_values is not None
    assert batch.audio_lengths is not None
    assert (len(batch.audio_values), len(batch.audio_lengths)) == (0, 3)


def test_reduced_decoding_is_the_option_that_it_says(group: StoredGroup) -> None:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((1600, 1600)).convert("RGB").save(buffer, "JPEG")
    large = replace(
        group,
        images=[buffer.getvalue()],
        image_sizes=np.array([(1600, 1600)], np.int32),
        image_samples=np.array([1], np.int32),
    )
    full, reduced = _collate(large), _collate(large, reduced_decode=True)
    difference = (full.pixel_values.int() - reduced.pixel_values.int()).abs().float()
    assert full.pixel_values.shape == reduced.pixel_values.shape
    assert 0 < difference.mean() < 1


def test_errors_name_the_sample_and_the_group(group: StoredGroup) -> None:
    damaged = replace(group, audios=[*group.audios[:2], b"nothing"])
    with pytest.raises(
        DataError, match=r"sample 'c' \(shard-00000.arrow, group 7\): audio clip of 7 bytes"
    ):
        _collate(damaged)
    longer = replace(group, audio_lengths=np.array([4_000, 500_001, 16_002], np.int32))
    with pytest.raises(
        DataError, match=r"sample 'b' .* 500000 samples at 16000 per second, but had 500001 when"
    ):
        _collate(longer)
    resized = replace(group, image_sizes=np.array([(40, 60), (90, 41)], np.int32))
    with pytest.raises(
        DataError, match=r"sample 'c' .*: image has 40 x 90 pixels, but had 41 x 90 when"
    ):
        _collate(resized)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="audio is 'spectrum'; it must be one of waveform, features, windows"
    ):
        LoaderConfig(audio="spectrum")


def test_mel_bins_are_the_encoders() -> None:
    model = load_model("orchmllm_10b")
    assert model.audio_encoder is not None
    batch = collate(EMPTY_GROUP, model, LoaderConfig(audio="features"), TOTALS)
    assert batch.audio_values is not None
    assert batch.audio_values.shape == (0, model.audio_encoder.frame_values)

"""Real interleaved manuals: every sample accounted for, every id as transformers
would feed it.
"""

import json

import pytest
from transformers import AutoTokenizer

from isobatch.common.config import preset_names
from isobatch.models.audio_tokens import plan_audio
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_model
from isobatch.packer.verify import verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import build, digests, quiet, read_samples
from support.corpora import BYTE_LEVEL, MANUALS, SPEECH, TOKENIZERS, WHOLE

TOKENIZER = TOKENIZERS / BYTE_LEVEL
NUM_SAMPLES, NUM_CLIPS = (1795, 320) if WHOLE else (232, 40)


def pack(out, **changes):
    settings = {
        "model": "internvl_1_5",
        "tokenizer": str(TOKENIZER),
        "workers": 1,
        "chunk_records": 1024,
    }
    settings["max_rejected"] = 1.0  # a preset of a short context refuses a sixth of the samples
    return build(MANUALS, out, **settings | changes)


def distinct_presets():
    """A preset of each way to count: those that differ by dimensions and context alone pack
    equally.
    """
    found = {}
    for name in preset_names("models"):
        preset = load_model(name)
        found.setdefault((preset.vision, preset.image_markup, preset.audio), name)
    return sorted(found.values())


@pytest.mark.parametrize("model", distinct_presets())
def test_every_preset_packs_or_rejects_each_of_the_samples(tmp_path, model):
    totals = pack(tmp_path / "out", model=model).totals
    assert totals["num_packed"] + totals["num_rejected"] == totals["num_read"] == NUM_SAMPLES
    assert not verify_build(tmp_path / "out", quiet(), workers=2).problems


@pytest.mark.parametrize("shard_format", ["webdataset", "refs"])
def test_every_format_does_and_workers_do_not_matter(tmp_path, shard_format):
    totals = pack(tmp_path / "one", format=shard_format).totals
    assert totals["num_packed"] + totals["num_rejected"] == NUM_SAMPLES
    pack(tmp_path / "two", format=shard_format, workers=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


@pytest.mark.parametrize(
    ("model", "placeholder"),
    [
        ("internvl_1_5", "<img>{}</img>"),
        ("qwen2_vl", "<|vision_start|>{}<|vision_end|>"),
        ("llava_1_5", "{}"),
        ("llava_onevision", "{}"),
        ("gemma3", "\n\n<start_of_image>{}<end_of_image>\n\n"),
    ],
)
def test_ids_in_the_shards_equal_transformers_on_the_text_with_placeholders_written_out(
    tmp_path, model, placeholder
):
    pack(tmp_path / "out", model=model)
    preset = load_model(model)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_tokens(
        [t for t in preset_tokens(preset) if t not in tokenizer.get_vocab()], special_tokens=True
    )
    assert read_manifest(tmp_path / "out").values["tokenizer"][
        "image_token_id"
    ] == tokenizer.convert_tokens_to_ids(preset.image_markup.token)
    raw = {row["id"]: row for row in json.loads((MANUALS / "annotations.json").read_text())}
    samples = [sample for sample in read_samples(tmp_path / "out") if sample["images"]]
    assert len(samples) > (500 if WHOLE else 80)
    for sample in samples[::5]:
        sizes = list(zip(sample["image_widths"], sample["image_heights"], strict=True))
        plans = [plan_image(preset.vision, *size, len(sizes)) for size in sizes]
        counts = iter([plan.num_image_tokens for plan in plans])
        messages = [
            {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
            for turn in raw[sample["sample_id"]]["conversations"]
        ]
        for message in messages:
            pieces = message["content"].split("<image>")
            images = [
                placeholder.format(preset.image_markup.token * next(counts)) for _ in pieces[1:]
            ]
            message["content"] = "".join(a + b for a, b in zip(pieces, [*images, ""], strict=True))
        expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)[
            "input_ids"
        ]
        assert sample["input_ids"] == expected


def test_manuals_and_speech_pack_together_with_image_audio_and_text_loads(tmp_path):
    mixture = tmp_path / "mix.toml"
    mixture.write_text(
        f'[[datasets]]\ndataset = "{MANUALS}"\n[[datasets]]\ndataset = "{SPEECH}"\nrepeat = 2.5\n',
        "utf-8",
    )
    settings = {
        "model": "orchmllm_10b",
        "tokenizer": str(TOKENIZER),
        "max_rejected": 1.0,
        "workers": 2,
    }
    totals = build(mixture, tmp_path / "out", **settings).totals
    assert totals["num_read"] == NUM_SAMPLES + NUM_CLIPS
    assert totals["num_repeated"] == 1.5 * NUM_CLIPS
    assert (
        totals["num_packed"] + totals["num_rejected"] == totals["num_read"] + totals["num_repeated"]
    )
    assert min(totals[f"num_{kind}_tokens"] for kind in ("image", "audio", "text")) > (
        10_000 if WHOLE else 1_000
    )
    samples = read_samples(tmp_path / "out")
    spoken = [sample for sample in samples if sample["audios"]]
    assert len(spoken) == 2.5 * NUM_CLIPS
    by_id = {sample["sample_id"]: sample for sample in spoken}
    raw = {row["id"]: row for row in json.loads((SPEECH / "annotations.json").read_text())}
    rule = load_model("orchmllm_10b").audio
    token = read_manifest(tmp_path / "out").values["tokenizer"]["audio_token_id"]
    for sample_id, row in raw.items():
        sample = by_id[sample_id]
        assert sample["audios"] == [(SPEECH / row["audio"]).read_bytes()]
        (length,) = sample["audio_lengths"]
        assert abs(length / 16_000 - row["duration"]) < 0.01
        assert sample["input_ids"].count(token) == plan_audio(rule, length, 16_000).num_audio_tokens
    assert not verify_build(tmp_path / "out", quiet(), workers=2).problems


def preset_tokens(preset):
    if preset.image_markup.placeholder:
        return [preset.image_markup.placeholder, preset.image_markup.token]
    return [
        token
        for token in (
            preset.image_markup.prefix,
            preset.image_markup.suffix,
            preset.image_markup.token,
        )
        if token
    ]

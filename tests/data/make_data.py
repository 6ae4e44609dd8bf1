"""Makes the files next to it out of the whole corpora: `make_data.py CORPORA` (see README.md)."""

import hashlib
import io
import json
import shutil
import sys
import wave
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer

HERE = Path(__file__).parent

# Logos, pictures of people and some photographs have licences of their own, whatever their page's.
OTHERS_WORK = (
    *("testimonial", "sponsor", "logo", "face", "olivetti", "lfw", "china", "flower", "retina"),
    *("eye", "fundus", "brain", "cells", "skimage.data.", "datasets", "color_quant", "sample_im"),
)
SOURCES = {"python-sklearn-doc": 0.9e6, "python-scipy-doc": 0.7e6, "python-skimage-doc": 0.9e6}
"""Sources of the manuals, all BSD-3-Clause, and how many bytes of pictures to take of each."""
MOST_PER_IMAGES, MOST_TEXTS, MOST_CHARACTERS = 12, 45, 6_000
"""Per source: samples of one number of pictures, samples of text alone, characters of either."""
MOST_PIXELS = 250_000
"""Of a small picture, as the tests of training take."""


def make_manuals(corpora: Path) -> None:
    """The samples with the smallest files, from one picture to as many as there are."""
    whole, out = corpora / "corpora" / "manuals", HERE / "manuals"
    shutil.rmtree(out / "images", ignore_errors=True)
    chosen = []
    samples = json.loads((whole / "annotations.json").read_text("utf-8"))
    for source, most_bytes in SOURCES.items():
        own = [sample for sample in samples if sample["source"] == source and _is_free(sample)]
        by_images: dict[int, int] = {}
        taken: dict[str, int] = {}
        for sample in _new_sizes_first(whole, own):
            names = _images(sample)
            most = MOST_PER_IMAGES if names else MOST_TEXTS
            more = {name: (whole / name).stat().st_size for name in names if name not in taken}
            if (
                by_images.get(len(names), 0) >= most
                or sum(map(len, _texts(sample))) > MOST_CHARACTERS
            ):
                continue
            if sum(taken.values()) + sum(more.values()) > most_bytes:
                continue
            by_images[len(names)] = by_images.get(len(names), 0) + 1
            taken |= more
            chosen.append(sample["id"])
        for name in taken:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(whole / name, out / name)
    kept = [sample for sample in samples if sample["id"] in set(chosen)]
    _write(out / "annotations.json", json.dumps(kept, ensure_ascii=False, indent=0))


def _is_free(sample: dict) -> bool:
    return sample["license"] == "BSD-3-Clause" and not any(
        word in text.lower() for word in OTHERS_WORK for text in (sample["id"], *_texts(sample))
    )


def _new_sizes_first(whole: Path, samples: list[dict]) -> list[dict]:
    """The smallest first, but before all others one small picture of each size in pixels."""
    rising = sorted(samples, key=lambda sample: _num_bytes(whole, sample))
    firsts: dict[tuple[int, int], str] = {}
    for sample in rising:
        for name in _images(sample) if len(_images(sample)) == 1 else ():
            with Image.open(whole / name) as image:
                if image.width * image.height <= MOST_PIXELS and len(_texts(sample)[0]) < 900:
                    firsts.setdefault(image.size, sample["id"])
    return sorted(rising, key=lambda sample: sample["id"] not in firsts.values())


def _images(sample: dict) -> list[str]:
    names = sample.get("image", [])
    return [names] if isinstance(names, str) else names


def _texts(sample: dict) -> list[str]:
    return [turn["value"] for turn in sample["conversations"]]


def _num_bytes(whole: Path, sample: dict) -> int:
    return sum((whole / name).stat().st_size for name in _images(sample))


def make_lengths(corpora: Path) -> None:
    """As many samples of each dataset as are published, drawn from them with replacement."""
    rng, columns = np.random.default_rng(0), {}
    for path in sorted((corpora / "data" / "omnibal_lengths").glob("*.json")):
        rows = json.loads(path.read_text("utf-8"))
        drawn = np.sort(rng.integers(0, len(rows), len(rows)))
        for key in ("vit_num", "image_flags", "token_num"):
            values = np.array([row[key] for row in rows], np.int16)[drawn]
            columns[f"{path.stem.split('_')[0]}/{key}"] = values
    out = HERE / "lengths"
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "resampled.npz", **columns)


CHAT_ML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nFunctions that you may call, one per line:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
          or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
BOS_CHAT_ML = """\
{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' \
+ message.content + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
VOCAB_SIZE = 6_000


def make_tokenizers() -> None:
    """Two of the kinds that models have: on bytes as GPT's, and on pieces as SentencePiece's."""
    texts = [
        text
        for name in ("manuals", "speech")
        for sample in json.loads((HERE / name / "annotations.json").read_text("utf-8"))
        for text in _texts(sample)
    ]
    on_bytes = Tokenizer(models.BPE())
    on_bytes.normalizer = normalizers.NFC()
    on_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    on_bytes.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    on_bytes.train_from_iterator(texts, _trainer(initial_alphabet=sorted(alphabet)))
    own = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_ML}
    _finish("byte_level", on_bytes, ["<|endoftext|>"], **own)

    pieces = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pieces.normalizer = normalizers.Replace(" ", "▁")
    pieces.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # pieces begin with spaces: learned by cutting there, which is not done afterwards
    pieces.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    lines = [line for text in texts for line in text.split("\n")]
    pieces.train_from_iterator(lines, _trainer(special_tokens=first))
    pieces.pre_tokenizer = None
    pieces.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", pieces.token_to_id("<s>"))]
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _finish("byte_fallback", pieces, [], chat_template=BOS_CHAT_ML, **settings)


def _trainer(**options) -> BpeTrainer:
    return BpeTrainer(vocab_size=VOCAB_SIZE, min_frequency=2, show_progress=False, **options)


def _finish(name: str, tokenizer: Tokenizer, more: list[str], **config) -> None:
    """Write a tokenizer with its control tokens, which the second one's config alone lists."""
    out, control = HERE / "tokenizers" / name, [*more, *CONTROL]
    if name == "byte_level":
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in control])
    values = json.loads(tokenizer.to_str())
    listed = {str(token["id"]): token for token in values["added_tokens"]}
    if name == "byte_fallback":
        # as with InternLM2, the config alone knows control tokens, by numbers of other entries
        vocab = values["model"]["vocab"]
        first, flags = (
            len(vocab),
            {key: listed["1"][key] for key in listed["1"] if key != "content"},
        )
        vocab |= {f"[UNUSED_{number}]": first + number for number in range(len(control))}
        listed = {str(place): listed[str(place)] for place in range(3)}
        listed |= {str(first + n): {"content": text, **flags} for n, text in enumerate(control)}
        values["added_tokens"] = []
    _write(out / "tokenizer.json", json.dumps(values, ensure_ascii=False, indent=0))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            place: {key: value for key, value in token.items() if key != "id"}
            for place, token in listed.items()
        },
        **config,
    }
    _write(out / "tokenizer_config.json", json.dumps(about, ensure_ascii=False, indent=1))


CONTROL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]

RATE = 8_000
VOWELS = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
}
"""Formants in Hz (Peterson and Barney 1952)."""
WORDS = ("mina", "sole", "tari", "vano", "pelo", "keri", "lomi", "deno", "rasa", "hilo")
NUM_CLIPS = 40


def make_speech() -> None:
    """Words of a made-up language: pulses of a voice through resonators, noise for consonants."""
    rng, records = np.random.default_rng(0), []
    out = HERE / "speech"
    shutil.rmtree(out / "audio", ignore_errors=True)
    for number in range(NUM_CLIPS):
        words = rng.choice(WORDS, rng.integers(1, 7)).tolist()
        samples = np.concatenate([_spoken(word, rng.uniform(95, 210), rng) for word in words])
        data = np.round(samples / np.abs(samples).max() * 20_000).astype("<i2")
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(data.tobytes())
        name = f"audio/{number:02d}.wav"
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(buffer.getvalue())
        turns = ("human", "<audio>\nTranscribe the speech."), ("gpt", " ".join(words) + ".")
        records.append(
            {
                "id": f"clip-{number:02d}",
                "audio": name,
                "duration": round(len(data) / RATE, 3),
                "sampling_rate": RATE,
                "conversations": [{"from": who, "value": text} for who, text in turns],
            }
        )
    _write(out / "annotations.json", json.dumps(records, indent=0))


def _spoken(word: str, pitch: float, rng: np.random.Generator) -> np.ndarray:
    parts = [_vowel(letter, pitch, rng) if letter in VOWELS else _consonant(rng) for letter in word]
    return np.concatenate([*parts, np.zeros(RATE // 20)])


def _vowel(letter: str, pitch: float, rng: np.random.Generator) -> np.ndarray:
    size = int(RATE * rng.uniform(0.06, 0.12))
    sound = np.zeros(size)
    sound[(np.arange(0, size, RATE / pitch)).astype(int)] = 1
    for formant in VOWELS[letter]:
        sound = _resonate(sound, formant, width=90)
    return sound / (np.abs(sound).max() + 1e-9) * np.hanning(size)


def _consonant(rng: np.random.Generator) -> np.ndarray:
    size = int(RATE * rng.uniform(0.03, 0.06))
    return 0.2 * rng.standard_normal(size) * np.hanning(size)


def _resonate(sound: np.ndarray, formant: float, width: float) -> np.ndarray:
    """A resonator of two poles."""
    radius = np.exp(-np.pi * width / RATE)
    first, second = 2 * radius * np.cos(2 * np.pi * formant / RATE), -(radius**2)
    heard = np.zeros(len(sound) + 2)
    for place, value in zip(count(2), sound, strict=False):
        heard[place] = value + first * heard[place - 1] + second * heard[place - 2]
    return heard[2:]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", "utf-8")
    print(path.relative_to(HERE), hashlib.sha256(path.read_bytes()).hexdigest()[:12])


def main() -> None:
    make_manuals(Path(sys.argv[1]))
    make_lengths(Path(sys.argv[1]))
    make_speech()
    make_tokenizers()


if __name__ == "__main__":
    main()

"""The faster encoder gives the ids and spans of `tokenizers`, or leaves a text to it."""

import json
import random
import sys
import unicodedata
from itertools import pairwise

import gigatoken
import numpy as np
import pytest
from tokenizers import Tokenizer

from isobatch.common.errors import ConfigError
from isobatch.counting.text import text_encoder
from isobatch.counting.text.text_encoder import ProvenEncoder, TextEncoder, encode_slowly
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.demo.texts import sentence
from support.corpora import BYTE_FALLBACK, TOKENIZERS

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (
    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen2": None, "llama3": WORDS, "o200k": CASED}
"""Expressions of tokenizers of this name, by which others of byte-level BPE split texts too."""
ALPHABETS = {
    "ascii": [*map(chr, range(32, 127))],
    "latin": [*map(chr, range(0xA0, 0x600))],
    "cjk": [*map(chr, range(0x3000, 0xA000, 7))],
    "spaces": list(" \t\n\r\x0b\x0c\xa0\u2003\u3000\u200b\u2028\x85   \n\na1"),
    "emoji": [*map(chr, range(0x1F300, 0x1FB00)), "\u200d", "\ufe0f"],
    "digits": list("0123456789٣४Ⅷ½²"),
    "quotes": ["'s", "'S", "'t", "'re", "'RE", "'ll", "\u2019s", "'\u017f", "a", "I", " ", "'"],
    "marks": [*map(chr, range(0x300, 0x370)), *map(chr, range(0x900, 0xE00)), "e", "a"],
    "any": [chr(c) for c in range(0, 0x110000, 101) if not 0xD800 <= c < 0xE000],
}


def tokenizer_of(split=None, *, normal="NFC", trims=False):
    config = json.loads((demo_tokenizer_path() / "tokenizer.json").read_text("utf-8"))
    if split is not None:
        expression = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated"}
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        parts = [expression | {"invert": False}, to_bytes | {"trim_offsets": False}]
        config["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    config["normalizer"] = normal and {"type": normal}
    trimming = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
    config["post_processor"] = trimming | {"trim_offsets": trims}
    return Tokenizer.from_str(json.dumps(config))


def random_texts(rng, number, specials):
    """Strings of one alphabet or of several, and sentences with their characters or tokens."""
    for _ in range(number):
        length = rng.choice([0, 1, 2, 3, 5, 8, 20, 60])
        names = rng.choices(list(ALPHABETS), k=rng.choice([1, 1, 3]))
        text = "".join(rng.choice(ALPHABETS[rng.choice(names)]) for _ in range(length))
        if rng.random() < 0.5:
            words = sentence(rng)
            for _ in range(rng.randrange(4)):
                at = rng.randrange(len(words))
                part = rng.choice([text[:3], rng.choice(specials), ""])
                words = words[:at] + part + words[at + rng.randrange(2) :]
            text = words
        yield text


def random_spans(rng, text):
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice([0, 2, 4, 6])))
    return list(zip(cuts[::2], cuts[1::2], strict=True))


def require_equal(result, expected, text):
    ids, spans = result
    assert ids.dtype == np.int32
    assert ids.tolist() == expected[0].tolist(), ascii(text)
    assert spans == expected[1], ascii(text)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("normal", ["NFC", None])
def test_ids_and_spans_are_those_of_tokenizers(name, normal):
    backend = tokenizer_of(SPLITS[name], normal=normal)
    proven = ProvenEncoder.of(backend)
    rng = random.Random(f"{name} {normal}")
    specials = [token.content for token in backend.get_added_tokens_decoder().values()]
    texts = list(random_texts(rng, 1500, specials))
    spans = [random_spans(rng, text) for text in texts]
    results = proven.encode(texts, spans)
    expected = list(encode_slowly(backend, texts, spans))
    for text, result, of_tokenizers in zip(texts, results, expected, strict=True):
        if result is not None:
            require_equal(result, of_tokenizers, text)
    quick = [text for text, result in zip(texts, results, strict=True) if result is not None]
    assert not any(unicodedata.combining(char) for text in quick for char in text)
    assert any(ord(char) > 0x3000 for text in quick for char in text)
    assert len(quick) > 1000
    assert all(text in set(quick) for text in texts if text.isascii())


def test_spans_are_all_tokens_that_have_one_of_their_characters():
    """By the tokens' own bytes, without `tokenizers`' offsets."""
    backend = tokenizer_of()
    texts = ["The tower 😀 draws\n\nthe 東京 engine!", "a  b"]
    spans = [[(0, 5), (5, 11), (11, len(texts[0]))], [(1, 2), (3, 4)]]
    proven = ProvenEncoder.of(backend)
    results = proven.encode(texts, spans)
    vocab = {index: token for token, index in backend.get_vocab().items()}
    for text, of, (ids, token_spans) in zip(texts, spans, results, strict=True):
        ends = np.cumsum([len(vocab[index]) for index in ids.tolist()])
        edges = [0, *ends.tolist()]
        places = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in of]
        has = [
            [k for k, (first, last) in enumerate(pairwise(edges)) if first < end and start < last]
            for start, end in places
        ]
        done, expected = 0, []
        for tokens in has:
            if (first := max(done, tokens[0])) <= tokens[-1]:
                done = tokens[-1] + 1
                expected.append((first, done))
        assert token_spans == expected


def test_it_is_taken_when_it_is_worth_loading_and_made_again_for_its_memory(monkeypatch):
    backend = tokenizer_of()
    rng = random.Random(5)
    texts = [sentence(rng) for _ in range(60)]
    spans = [[(0, len(text))] for text in texts]
    expected = list(encode_slowly(backend, texts, spans))
    monkeypatch.setattr(text_encoder, "WORTH", 100)
    monkeypatch.setattr(text_encoder, "_RENEWED", 200)
    times = []
    from_json = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: times.append(1) or from_json(text)
    )
    encoder = TextEncoder(backend)
    for number in range(0, 60, 10):
        part = slice(number, number + 10)
        for text, result, of in zip(
            texts[part], encoder.encode(texts[part], spans[part]), expected[part], strict=True
        ):
            require_equal(result, of, text)
        assert bool(times) is (number > 0)
    assert len(times) > 2


class Wrong:
    """`gigatoken` with another id for one word."""

    def __init__(self, tokenizer, backend, word):
        self._tokenizer = tokenizer
        self._id = backend.encode(word).ids[0]

    def encode_batch(self, texts):
        result = self._tokenizer.encode_batch(texts)
        ids = np.asarray(result.layout.content.data)
        ids[ids == self._id] += 1
        return result


def test_other_ids_are_found_when_it_is_loaded_and_while_it_is_used(monkeypatch):
    backend = tokenizer_of()
    proven = ProvenEncoder.of(backend)
    rare = "qq zz"
    proven._gigatoken = Wrong(proven._gigatoken, backend, rare)
    with pytest.raises(ConfigError, match=r"gigatoken gives other ids .* uninstall gigatoken"):
        proven.encode([rare], [[]])
    from_json = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(
        gigatoken.Tokenizer, "from_json", lambda text: Wrong(from_json(text), backend, "1")
    )
    assert ProvenEncoder.of(backend) is None


def test_other_tokenizers_and_machines_without_it_go_the_slower_way(monkeypatch):
    assert ProvenEncoder.of(tokenizer_of(trims=True)) is None
    assert ProvenEncoder.of(tokenizer_of(normal="NFKC")) is None
    assert (
        ProvenEncoder.of(Tokenizer.from_file(str(TOKENIZERS / BYTE_FALLBACK / "tokenizer.json")))
        is None
    )
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    backend = tokenizer_of()
    assert ProvenEncoder.of(backend) is None
    monkeypatch.setattr(text_encoder, "WORTH", 0)
    (result,) = TextEncoder(backend).encode(["The tower."], [[(0, 3)]])
    (expected,) = encode_slowly(backend, ["The tower."], [[(0, 3)]])
    require_equal(result, expected, "The tower.")

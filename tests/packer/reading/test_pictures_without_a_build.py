"""Broken and transparent pictures by `BalancedLoader` as by a build: rejected, and on white."""

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.builds import bad_pictures as pictures
from support.builds.packed import quiet
from support.builds.raw_data import options, write_dataset

RANKS = {"workers": 0, "dp_rank": 0, "dp_world_size": 1}
MODEL = {"model": "tiny", "tokenizer": str(demo_tokenizer_path()), "max_tokens": 2048, **RANKS}
HIDDEN = (10, 20, 200)


def row(name, image=None):
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    return {"id": name, "conversations": turns} | ({"image": image} if image else {})


def write(folder, files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    rows = [*(row(name, name) for name in files), row("text")]
    return write_dataset(folder, rows), rows


def by_loaders(folder, rows, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for data in (str(folder), rows):
        yield BalancedLoader(data, data_root=str(folder), max_rejected=1.0, **MODEL)


def test_broken_pictures_are_rejected_and_the_text_is_loaded(tmp_path, monkeypatch):
    folder, rows = write(tmp_path / "raw", {"a.avif": pictures.AVIF, "b.dds": pictures.DDS})
    for loader in by_loaders(folder, rows, tmp_path / "cache", monkeypatch):
        ids = [name for step in loader for batch in step for name in batch.sample_ids]
        assert ids == ["text"]
        found = [(each.sample_id, each.reason) for each in loader.rejected]
        assert found == [("a.avif", "corrupt_image"), ("b.dds", "corrupt_image")]
        assert all(each.detail for each in loader.rejected)
        loader.close()


def slope():
    """A picture with a square of one colour."""
    line = np.add.outer(np.arange(56), np.arange(56)).astype(np.uint8)
    image = Image.fromarray(np.dstack([line] * 3))
    image.paste(HIDDEN, (0, 0, 20, 20))
    return image


def on_white(image, hidden):
    """The picture with its transparent colour white, as an opaque file."""
    pixels = np.asarray(image.convert("RGB")).copy()
    pixels[np.asarray(image) == hidden if image.mode != "RGB" else _equals(pixels, hidden)] = 255
    return pictures.encoded(Image.fromarray(pixels), "PNG")


def _equals(pixels, colour):
    return (pixels == colour).all(-1)


KINDS = {
    "palette.png": ("P", "PNG"),
    "palette.gif": ("P", "GIF"),
    "colour.png": ("RGB", "PNG"),
    "grey.png": ("L", "PNG"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_transparent_colour_is_white_in_all_loaders(tmp_path, monkeypatch, name):
    mode, form = KINDS[name]
    image = slope().quantize(16) if mode == "P" else slope().convert(mode)
    hidden = image.getpixel((5, 5))
    content = pictures.encoded(image, form, transparency=hidden)
    loaded = {}
    for kind, data in (("given", content), ("white", on_white(image, hidden))):
        folder, rows = write(tmp_path / kind, {name: data})
        out = tmp_path / f"{kind}-out"
        Builder(BuildConfig(**options(folder, out, max_seq_len=2048)), quiet()).build()
        loaders = list(by_loaders(folder, rows, tmp_path / "cache", monkeypatch))
        loaded[kind] = [
            torch.cat([batch.pixel_values for step in each for batch in step])
            for each in (StreamingLoader(out, **RANKS), *loaders)
        ]
    assert loaded["given"][0].numel()
    for one, other in zip(loaded["given"], loaded["white"], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, loaded["given"][0])

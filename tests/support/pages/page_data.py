"""Blocks of pages by how they begin, and records for their commands."""

from PIL import Image

from support import ROOT
from support.pages.blocks import blocks_of


def block(page, begin):
    """The block of a page that begins so."""
    (found,) = (each for each in blocks_of(ROOT / page) if each.code.startswith(begin))
    return found


def records(folder, first, last):
    """Pages of a document, with a picture each."""
    (folder / "images").mkdir(exist_ok=True)
    found = []
    for number in range(first, last):
        size = (100 + 37 * number % 200, 100 + 53 * number % 200)
        Image.new("RGB", size, "white").save(folder / "images" / f"{number}.png")
        turns = [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A page." + " It is nearly empty." * (number % 9)},
        ]
        found.append({"id": f"page-{number}", "image": f"{number}.png", "conversations": turns})
    return found

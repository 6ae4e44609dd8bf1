"""Pictures of the demo: icons, shapes, charts, pages and photos, with facts.

Pure: one state of the generator draws the same pixels (with one version of Pillow and NumPy). They
are drawn in palettes, a byte per pixel: a third of what is to be filled and compressed in RGB.
"""

import random
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont

from isobatch.packer.demo.texts import NUMBER_NAMES, name, sentence

Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "blue": (38, 84, 214),
    "green": (32, 150, 66),
    "yellow": (240, 200, 30),
    "purple": (140, 60, 170),
    "orange": (240, 130, 30),
    "black": (24, 24, 24),
}
SHAPES = ("circle", "square", "triangle", "diamond")

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_PAPERS = ((255, 255, 255), (250, 246, 236), (235, 240, 245))
_PAPER, _MAX_LEVEL = 127, 255
"""Number of the paper in a palette; that of one ink is 0, of the other 255, and between are their
mixtures, which smooth text takes.
"""
_LIGHT, _MEAN_LEVEL = 176, 121
"""Levels that a photo's light goes over, and the mean of light, clouds and grain. Their sum is at
most 255.
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn image and what is true of it."""

    image: Image.Image
    """With a palette."""
    facts: list[tuple[str, str]]
    photo: bool = False
    """Whether it is smooth and noisy like a photo, and so stored as JPEG."""
    sideways: bool = field(default=False, kw_only=True)
    """Whether the file stores it turned, with an EXIF tag that says so."""


def draw_picture(rng: random.Random, width: int, height: int) -> Picture:
    """A picture of some kind that fits into `width` x `height` pixels."""
    if max(width, height) < 100:
        return _icon(rng, width, height)
    kinds = {_shapes: 35, _photo: 40}
    if min(width, height) >= 100:
        kinds |= {_chart: 20, _page: 20}
    return rng.choices(list(kinds), list(kinds.values()))[0](rng, width, height)


def _icon(rng: random.Random, width: int, height: int) -> Picture:
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    image, pen = _sheet(_flat(rng.choice(_PAPERS)), width, height)
    _draw_shape(pen, shape, colour, (width / 2, height / 2), 0.42 * min(width, height))
    article = "an" if colour[0] in "aeiou" else "a"
    facts = [
        ("What does this icon show?", f"{article.capitalize()} {colour} {shape}."),
        ("Which colour is the shape?", f"{colour.capitalize()}."),
        ("Which shape is it?", f"It is a {shape}."),
    ]
    return Picture(image, facts)


def _shapes(rng: random.Random, width: int, height: int) -> Picture:
    """Shapes in the cells of an invisible grid, so that none covers another."""
    image, pen = _sheet(_flat(rng.choice(_PAPERS)), width, height)
    cell = max(48.0, min(width, height) / rng.randint(2, 4))
    columns, rows = max(1, int(width / cell)), max(1, int(height / cell))
    places = sorted(rng.sample(range(columns * rows), rng.randint(1, min(12, columns * rows))))
    palette = rng.sample(list(COLOURS), 3)
    drawn = [(rng.choice(palette), rng.choice(SHAPES)) for _ in places]
    for place, (colour, shape) in zip(places, drawn, strict=True):
        centre = (place % columns + 0.5) * width / columns, (place // columns + 0.5) * height / rows
        radius = rng.uniform(0.25, 0.42) * min(width / columns, height / rows)
        _draw_shape(pen, shape, colour, centre, radius)
    return Picture(image, _shape_facts(rng, drawn))


def _shape_facts(rng: random.Random, drawn: list[tuple[str, str]]) -> list[tuple[str, str]]:
    counts = Counter(drawn)
    colour, shape = rng.choice([*counts, (rng.choice(list(COLOURS)), rng.choice(SHAPES))])
    number = counts[colour, shape]
    inventory = ", ".join(
        f"{NUMBER_NAMES[n]} {c} {s}{'' if n == 1 else 's'}" for (c, s), n in sorted(counts.items())
    )
    in_order = "; ".join(f"a {c} {s}" for c, s in drawn)
    return [
        (f"How many {colour} {shape}s are there?", f"{number}"),
        ("How many shapes are there in the picture?", f"{len(drawn)}"),
        ("Describe the picture.", f"The picture shows {inventory}."),
        ("Name the shapes row by row, from left to right.", f"In this order: {in_order}."),
        ("Which colours occur?", ", ".join(sorted({c for c, _ in drawn})) + "."),
    ]


def _chart(rng: random.Random, width: int, height: int) -> Picture:
    paper = rng.choice(_PAPERS)
    num_bars = rng.randint(2, max(2, min(8, width // 45)))
    labels = sorted(rng.sample(_MONTHS, num_bars), key=_MONTHS.index)
    values = rng.sample(range(5, 100), num_bars)  # all different, so that one is the highest
    colour = rng.choice(list(COLOURS))
    font = _font(max(10, min(width // (4 * num_bars), height // 12)))
    image, pen = _sheet(_smooth(paper, COLOURS["black"], COLOURS[colour]), width, height)
    floor, scale, step = height - 1.6 * font.size, (height - 4 * font.size) / 100, width / num_bars
    for k, (label, value) in enumerate(zip(labels, values, strict=True)):
        middle, top = (k + 0.5) * step, floor - value * scale
        bar = (middle - 0.35 * step, top, middle + 0.35 * step, floor)
        pen.rectangle(bar, fill=_MAX_LEVEL)
        pen.text((middle, floor), label, fill=0, font=font, anchor="ma")
        pen.text((middle, top - 2), str(value), fill=0, font=font, anchor="mb")
    asked, best = rng.randrange(num_bars), values.index(max(values))
    highest = f"The {_ORDINALS[best]} bar, {labels[best]}, with {values[best]}."
    table = "\n".join(f"{label}: {value}" for label, value in zip(labels, values, strict=True))
    facts = [
        (f"What is the value of {labels[asked]}?", f"{values[asked]}"),
        ("Which bar is the highest?", highest),
        ("How many bars does the chart have?", f"{num_bars}"),
        ("Which colour are the bars?", f"They are {colour}."),
        ("Write the values of the chart as a table.", table),
    ]
    return Picture(image, facts)


def _page(rng: random.Random, width: int, height: int) -> Picture:
    paper = rng.choice(_PAPERS)
    font = _font(rng.choice((11, 13, 16, 20)))
    line_height, columns = 1.3 * font.size, max(8, int(width / (0.56 * font.size)))
    title = f"{name(rng)} and {name(rng)}"
    most_lines = max(1, int((height - 2 * line_height) / line_height) - 1)
    lines: list[str] = []
    while len(lines) < min(most_lines, 40) and rng.random() < 0.95:
        lines += textwrap.wrap(sentence(rng), columns - 2) or [""]
    lines = lines[:most_lines] or [sentence(rng)]
    ink = COLOURS[rng.choice(("black", "blue", "purple"))]
    image, pen = _sheet(_smooth(paper, ink, COLOURS["red"]), width, height)
    pen.text((font.size, 0.5 * line_height), title, fill=_MAX_LEVEL, font=font)
    for k, line in enumerate(lines):
        pen.text((font.size, (k + 2) * line_height), line, fill=0, font=font)
    facts = [
        ("What is the title of this page?", title),
        ("Read the text under the title.", "\n".join(lines)),
        ("How many lines stand under the title?", f"{len(lines)}"),
        ("What does the first line under the title say?", lines[0]),
    ]
    return Picture(image, facts)


def _photo(rng: random.Random, width: int, height: int) -> Picture:
    """A view in one colour, brighter towards one side, with soft clouds and grain."""
    colour = rng.choice([c for c in COLOURS if c != "black"])
    side = rng.choice(("left", "right", "top", "bottom"))
    noise = np.random.default_rng(rng.getrandbits(64))
    blotches = Image.fromarray(noise.integers(0, 60, (6, 8), dtype=np.uint8))
    clouds = blotches.resize((width, height), Image.Resampling.BICUBIC)
    ramp = np.linspace(0, _LIGHT, width if side in ("left", "right") else height).astype(np.uint8)
    ramp = ramp if side in ("right", "bottom") else ramp[::-1]
    grain = np.frombuffer(noise.bytes(width * height), np.uint8).reshape(height, width)
    pixels = grain & 7
    pixels += np.asarray(clouds)
    pixels += ramp[None, :] if side in ("left", "right") else ramp[:, None]
    image = Image.fromarray(pixels)
    base = np.array(COLOURS[colour]) * 0.7 + 40 - _MEAN_LEVEL
    image.putpalette(_bytes(np.add.outer(np.arange(256), base)))
    facts = [
        ("Which side of the photo is the brightest?", f"The {side}."),
        ("Which colour does the photo have?", f"It is mostly {colour}."),
        ("Describe the photo.", f"A soft {colour} view, brighter towards the {side}."),
    ]
    return Picture(image, facts, photo=True, sideways=rng.random() < 0.1)


def _sheet(palette: bytes, width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty sheet of paper, and a pen whose inks are numbers of the palette."""
    image = Image.new("P", (width, height), _PAPER)
    image.putpalette(palette)
    pen = ImageDraw.Draw(image)
    pen.fontmode = "L"  # smooth: the numbers between those of ink and paper
    return image, pen


def _flat(paper: Colour) -> bytes:
    """The palette of shapes: all colours, from 0 on."""
    return _bytes([*COLOURS.values(), *[paper] * (_PAPER + 1 - len(COLOURS))])


def _smooth(paper: Colour, ink: Colour, other: Colour) -> bytes:
    """The palette of paper with two inks and all between."""
    to_paper = np.linspace(ink, paper, _PAPER + 1)
    return _bytes(np.concatenate([to_paper, np.linspace(paper, other, _MAX_LEVEL - _PAPER)]))


def _bytes(colours: ArrayLike) -> bytes:
    return np.clip(colours, 0, 255).astype(np.uint8).tobytes()


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, colour: str, centre: tuple[float, float], radius: float
) -> None:
    x, y = centre
    fill = list(COLOURS).index(colour)
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1), (0.7, 0), (0, 1), (-0.7, 0)),
    }[shape]
    pen.polygon([(x + dx * radius, y + dy * radius) for dx, dy in corners], fill=fill)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # with a size, Pillow gives its built-in TrueType font
    return cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))

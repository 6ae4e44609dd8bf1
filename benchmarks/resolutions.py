"""Balance by image rule on real image sizes: OmniBal's Tables 10, 12 and 14.

    python benchmarks/resolutions.py [--dataset FOLDER --tokenizer PATH] [--resample 100000]
                                     [--dp 8] [--seed 0]

Table 10 varies Max-Patch-Num, 12 the resolution, 14 is Qwen2-VL. FOLDER: a dataset in LLaVA's
layout; PATH: a tokenizer's folder. Without them: the built-in demo dataset. Image headers and texts
are read once; each rule then counts the same samples from the upright image sizes. Samples are
drawn with replacement, --resample of them, so that there are enough steps. One core, about ten
seconds.

Rules: InternVL 1.5's tiles, the thumbnail on top. A tile of p pixels has (p / 14)^2 + 1 ViT tokens
(ViT patches and the class token) and (p / 28)^2 LLM tokens (2 x 2 ViT patches merged): 224: 257 and
64, 336: 577 and 144, 448: 1,025 and 256. Tables 12 and 14 keep what they do not vary at Table 3's
setting: at most 4 tiles, 4,096 tokens.

Methods, all on the samples that fit Q_t: `random`: 4 samples per micro-batch, padded to the
longest; `shuffled`: our groups in random order, the paper's setting; `Isobatch`: the same groups in
the loader's order. Q_t is the paper's, Q_v from the data. `OmniBal`: the figures that it prints, on
*other data* (InternVL-1.2M, not public in full) and an unstated number of ranks: compare the
direction, not the digits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table
from tables import DistRatios, Method, as_loaded, console, method_of, new_table, shuffled

from isobatch.balance.baseline_samplers import BATCH_SIZE, as_groups, random_batches
from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.errors import DataError, IsobatchError
from isobatch.common.types import Counts, Groups, IntArray
from isobatch.counting.sample_counter import CountSettings, SampleCounter
from isobatch.models.image_rules import TilesRule, VisionRule
from isobatch.models.image_tokens import ImageRejected, plan_image
from isobatch.models.presets import load_model
from isobatch.packer.demo.dataset import DEMO_SAMPLES, demo_tokenizer_path, write_demo
from isobatch.packer.group import group_counts
from isobatch.packer.sources.dataset import find_dataset

VIT_PATCH, MERGED = 14, 28
"""Pixels of a ViT patch, and of the 2 x 2 that become one LLM token."""
CHUNK_RECORDS = 1024
Q_T, LARGE_Q_T = 4096, 5120
"""The LLM's Max-Seq-Len of Tables 3 and 10: 4K, and 5K from 6 patches on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Real samples before any image rule."""

    num_text_tokens: IntArray
    """Shape (num_samples,); image wrappers included."""
    num_images: IntArray
    """Shape (num_samples,)."""
    widths: IntArray
    """Upright, of all images, sample after sample."""
    heights: IntArray
    num_rejected: int
    """Records that hold no usable sample."""

    def __len__(self) -> int:
        return len(self.num_text_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One image rule, its caps, and what the paper prints for it."""

    name: str
    rule: VisionRule
    vision_unit: str
    max_seq_len: int = Q_T
    paper: tuple[Method, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    samples = read(options)
    drawn = np.random.default_rng(options.seed).integers(len(samples), size=options.resample)
    console.print(
        f"{len(samples):,} samples ({samples.num_rejected:,} rejected), {len(samples.widths):,} "
        f"images, drawn {len(drawn):,} times with replacement;\nmicro-batches on {options.dp} "
        f"ranks. OmniBal's rows: as printed in the paper, on other data.",
        highlight=False,
    )
    for title, settings in tables().items():
        console.print(show(title, settings, samples, drawn, dp=options.dp, seed=options.seed))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset", help="folder or annotation file in LLaVA's layout; default: the demo dataset"
    )
    parser.add_argument("--tokenizer", help="folder of a tokenizer; default: the demo's")
    parser.add_argument(
        "--demo-samples", type=int, default=DEMO_SAMPLES, help="size of the demo dataset"
    )
    parser.add_argument(
        "--resample", type=int, default=100_000, help="samples to draw with replacement"
    )
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def read(options: argparse.Namespace) -> Samples:
    """The samples of `--dataset`, or of a demo dataset written for the moment."""
    tokenizer = options.tokenizer or str(demo_tokenizer_path())
    if options.dataset:
        return read_samples(options.dataset, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        write_demo(Path(folder), num_samples=options.demo_samples)
        return read_samples(folder, tokenizer)


def read_samples(dataset: str, tokenizer: str) -> Samples:
    """Sizes and texts by the packer's own count, whose tiles rule refuses no image and here is not
    used further.
    """
    found = find_dataset(dataset, None)
    counter = SampleCounter(CountSettings(model=load_model("internvl_1_5"), tokenizer=tokenizer))
    tables = [
        counter.count(chunk.records(), part.name, part.data_root, "").table
        for part in found.parts
        for chunk in part.open().chunks(CHUNK_RECORDS, lambda _: None)
    ]
    table = pa.concat_tables(tables).combine_chunks()
    usable = table.filter(pc.is_null(table.column("reason")))
    if len(usable) == 0:
        raise DataError(f"{dataset}: none of its {len(table):,} records is a usable sample")
    images = pc.list_flatten(usable.column("images"))
    return Samples(
        # prefix and suffix of an image are one token each for InternVL and for Qwen2-VL: the text
        # is the same
        num_text_tokens=usable.column("num_text_tokens").to_numpy().astype(np.int64),
        num_images=pc.list_value_length(usable.column("images")).to_numpy().astype(np.int64),
        widths=pc.struct_field(images, "width").to_numpy().astype(np.int64),
        heights=pc.struct_field(images, "height").to_numpy().astype(np.int64),
        num_rejected=len(table) - len(usable),
    )


def tables() -> dict[str, list[Setting]]:
    """The three tables' settings, each with the paper's figures."""
    tiles, native = load_model("internvl_1_5"), load_model("qwen2_vl")
    assert isinstance(tiles.vision, TilesRule)
    return {
        "Max-Patch-Num (Table 10)": list(patch_settings(tiles.vision)),
        "Resolution, at most 4 tiles (Table 12)": list(resolution_settings(tiles.vision)),
        "Qwen2-VL's rule, native resolution (Table 14)": [
            Setting(
                name="native",
                rule=native.vision,
                vision_unit=native.vision_unit,
                paper=(
                    printed(4, (0.408, 0.393), pad=0.31, name="OmniBal: random"),
                    printed(6.6, (0.12, 0.06), pad=0),
                ),
            )
        ],
    }


def patch_settings(rule: TilesRule) -> Iterator[Setting]:
    """Table 10: at most 1, 4, 6 or 12 tiles per image."""
    # of Table 3
    baseline = printed(4, (0.34, 0.30), most=(20_000, 16_000), pad=0.31, name="OmniBal: random")
    rows = (
        (1, Q_T, (printed(7.6, (0.06, 0.05), most=(9_000, 4_000)),)),
        (4, Q_T, (baseline, printed(4.6, (0.02, 0.14), most=(9_000, 4_000), pad=0))),
        (6, LARGE_Q_T, (printed(2.7, (0.019, 0.136), most=(14_000, 5_000)),)),
        (12, LARGE_Q_T, (printed(1.9, (0.03, 0.12), most=(14_000, 5_000)),)),
    )
    for most, max_seq_len, paper in rows:
        changed = replace(rule, max_patches=most)
        yield Setting(
            name=f"max {most}",
            rule=changed,
            vision_unit="image_patches",
            max_seq_len=max_seq_len,
            paper=paper,
        )


def resolution_settings(rule: TilesRule) -> Iterator[Setting]:
    """Table 12: tiles of 224, 336 or 448 pixels."""
    rows = (
        (224, printed(4.8, (0.009, 0.068))),
        (336, printed(3.3, (0.005, 0.07))),
        (448, printed(4.6, (0.02, 0.14))),
    )
    for pixels, paper in rows:
        changed = replace(
            rule,
            image_size=pixels,
            max_patches=4,
            vit_tokens_per_patch=(pixels // VIT_PATCH) ** 2 + 1,
            llm_tokens_per_patch=(pixels // MERGED) ** 2,
        )
        yield Setting(
            name=f"{pixels} px", rule=changed, vision_unit="image_patches", paper=(paper,)
        )


def printed(
    size: float,
    dist: tuple[float, float],
    *,
    most: tuple[int | None, int | None] = (None, None),
    pad: float | None = None,
    name: str = "OmniBal: ISF",
) -> Method:
    """A row of the paper; `dist` and `most` are (ViT, LLM)."""
    return Method(
        name=name,
        avg_batch_size=size,
        most_vit_tokens=most[0],
        most_llm_tokens=most[1],
        pad_ratio=pad,
        dist_ratios=DistRatios(*dist),
    )


def count(samples: Samples, rule: VisionRule) -> tuple[Counts, IntArray]:
    """(counts under the rule, rows of the samples that it refuses).

    Only aspect ratios at native resolution are refused.
    """
    # patches, ViT tokens, LLM tokens of each image
    plans = np.zeros((len(samples.widths), 3), np.int64)
    refused = np.zeros(len(samples.widths), dtype=bool)
    for image, (width, height) in enumerate(
        zip(samples.widths.tolist(), samples.heights.tolist(), strict=True)
    ):
        try:
            plan = plan_image(rule, width, height)
        except ImageRejected:
            refused[image] = True
        else:
            plans[image] = plan.num_patches, plan.num_vit_tokens, plan.num_image_tokens
    sample_of_image = np.repeat(np.arange(len(samples)), samples.num_images)
    sums = np.zeros((len(samples), 3), np.int64)
    np.add.at(sums, sample_of_image, plans)
    zeros = np.zeros(len(samples), np.int64)
    counts = Counts(
        num_image_patches=sums[:, 0],
        num_vit_tokens=sums[:, 1],
        num_image_tokens=sums[:, 2],
        num_text_tokens=samples.num_text_tokens,
        num_audio_tokens=zeros,
        num_loss_tokens=zeros,
    )
    return counts, np.unique(sample_of_image[refused])


def measure(
    setting: Setting, samples: Samples, drawn: IntArray, *, dp: int, seed: int
) -> tuple[list[Method], int]:
    """(our methods' rows, how many of the drawn samples are over Q_t or refused)."""
    counts, refused = count(samples, setting.rule)
    counts = counts.take(drawn[~np.isin(drawn, refused)])
    options = GroupOptions(seed=seed, max_seq_len=setting.max_seq_len)
    made = group_counts(
        counts, options, vision_unit=setting.vision_unit, context_len=setting.max_seq_len
    )
    packed = np.sort(made.groups.samples)
    if len(packed) == 0:
        raise DataError(f"{setting.name}: no sample has {setting.max_seq_len:,} tokens or fewer")
    batches = as_groups(random_batches(counts.seq_len[packed], dp, BATCH_SIZE, seed))
    random = Groups(packed[batches.samples], batches.offsets)
    isobatch = as_loaded(made.groups, counts, made.limits, dp=dp, seed=seed)
    methods = [
        method_of("random", random, counts, dp, padded=True),
        method_of("shuffled", shuffled(made.groups, seed), counts, dp),
        method_of("Isobatch", isobatch, counts, dp),
    ]
    return methods, len(drawn) - len(packed)


def show(
    title: str, settings: list[Setting], samples: Samples, drawn: IntArray, *, dp: int, seed: int
) -> Table:
    """One of the paper's tables, a section per setting."""
    most = ["most ViT\ntokens", "most LLM\ntokens"]
    headings = ["rule", "method", "samples /\nmicro-batch", *most, "pad", "dist ratio\nViT / LLM"]
    table = new_table(title, headings)
    table.columns[1].justify = "left"
    for setting in settings:
        methods, left_out = measure(setting, samples, drawn, dp=dp, seed=seed)
        notes = [
            setting.name,
            f"Q_t {setting.max_seq_len:,}",
            f"{left_out / len(drawn):.1%} over",
            "",
            "",
        ]
        for note, method in zip(notes, (*methods, *setting.paper), strict=False):
            table.add_row(note, *_cells(method), style="dim" if method in setting.paper else None)
        table.add_section()
    return table


def _cells(method: Method) -> list[str]:
    is_paper = method.name.startswith("OmniBal")
    tokens = [
        "-" if most is None else f"{most:,}"
        for most in (method.most_vit_tokens, method.most_llm_tokens)
    ]
    pad = "-" if method.pad_ratio is None else f"{method.pad_ratio:.3f}"
    ratios = method.dist_ratios
    shown = (
        f"{ratios.vit:g} / {ratios.llm:g}" if is_paper else f"{ratios.vit:.4f} / {ratios.llm:.4f}"
    )
    return [method.name, f"{method.avg_batch_size:.1f}", *tokens, pad, shown]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except IsobatchError as problem:
        sys.exit(f"error: {problem}")

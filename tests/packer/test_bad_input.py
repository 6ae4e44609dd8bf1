"""Every line of the tables in docs/reference/bad_input.md: what can be used is used, the rest is
rejected with its reason.
"""

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from isobatch.common.errors import DataError
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.loaders import StreamingLoader
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_model
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.build_summary import BuildSummary
from support.builds.bad_pictures import PNG
from support.builds.bad_samples import BUILDS, CASES, DOCS, LINKS, OUTSIDE, rows_of
from support.builds.raw_data import options, record
from support.cases import for_each
from support.loading.extract_patches import extract_patches

RULE = load_model("tiny").vision
NUM_GOOD = 3
OTHERS = ("undecodable", "native")
"""Builds whose pixels are not those of RULE."""


@dataclass(frozen=True)
class Built:
    """A build of all cases that share its options, and of some good samples."""

    raw: Path
    out: Path
    summary: BuildSummary
    positions: dict[str, list[int]]
    """Case -> places of its records."""
    outcomes: dict[int, dict]
    """Place -> its row of counts.parquet or rejected.parquet."""


def write_raw(folder, cases):
    """The data root of some cases; -> the places of each case's records."""
    folder.mkdir(parents=True)
    (folder.parent / OUTSIDE).write_bytes(PNG)
    (folder / "good.png").write_bytes(PNG)
    for link, target in LINKS.items():
        (folder / link).symlink_to(target)
    lines, positions = [], {}
    for case in cases:
        for name, data in case.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        positions[case.what] = list(range(len(lines), len(lines) + len(case.lines)))
        lines += [
            line if isinstance(line, bytes) else json.dumps(line).encode() for line in case.lines
        ]
    lines += [
        json.dumps(record(f"good-{k}", ["good.png"] * (k % 2))).encode() for k in range(NUM_GOOD)
    ]
    (folder / "annotations.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return positions


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Name of a build -> the build, made at first use."""
    made: dict[str, Built] = {}

    def build(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("bad")
            positions = write_raw(folder / "raw", [case for case in CASES if case.build == name])
            config = BuildConfig(
                **options(folder / "raw", folder / "out", max_rejected=1.0, **BUILDS[name])
            )
            summary = Builder(config, StageProgress(Console(file=io.StringIO()))).build()
            tables = [
                pq.read_table(folder / "out" / f"{table}.parquet")
                for table in ("counts", "rejected")
            ]
            # a sample above the caps is in both
            outcomes = {row["position"]: row for table in tables for row in table.to_pylist()}
            made[name] = Built(folder / "raw", folder / "out", summary, positions, outcomes)
        return made[name]

    return build


@pytest.fixture(scope="module")
def fed(builds):
    """Build -> {sample: (ids, pixels of all its images)}, as the loader feeds them to a model; made
    at first use.
    """
    made: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}

    def feed(name):
        if name not in made:
            counts = {
                row["sample_id"]: row for row in builds(name).outcomes.values() if "seq_len" in row
            }
            samples = made.setdefault(name, {})
            for (batch,) in StreamingLoader(
                builds(name).out, dp_rank=0, dp_world_size=1, pixel_dtype=torch.uint8
            ):
                patches = [counts[sample]["num_image_patches"] for sample in batch.sample_ids]
                cut = batch.pixel_values.split(patches)
                ids = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
                samples |= dict(zip(batch.sample_ids, zip(ids, cut, strict=True), strict=True))
        return made[name]

    return feed


@for_each("case", CASES)
def test_a_sample_is_used_or_rejected_for_its_reason(builds, case):
    built = builds(case.build)
    rows = [built.outcomes[position] for position in built.positions[case.what]]
    assert [row.get("reason", "") for row in rows] == [case.reason] * len(case.lines)
    for row in rows:
        assert not case.reason or (
            row["detail"] and "\n" not in row["detail"] and len(row["detail"]) < 500
        )


@pytest.mark.parametrize("name", BUILDS)
def test_the_totals_add_up(builds, name):
    built = builds(name)
    num_used, num_rejected = (
        sum(
            len(case.lines)
            for case in CASES
            if case.build == name and bool(case.reason) is rejected
        )
        for rejected in (False, True)
    )
    totals = built.summary.totals
    assert (
        totals["num_read"] + totals["num_repeated"] == totals["num_packed"] + totals["num_rejected"]
    )
    assert (totals["num_packed"], totals["num_rejected"]) == (num_used + NUM_GOOD, num_rejected)
    assert pq.read_table(built.out / "rejected.parquet").num_rows == num_rejected


def images_of(case, line):
    if case.images:
        return case.images[case.lines.index(line)]
    value = json.loads(line.decode("utf-8-sig", "replace")) if isinstance(line, bytes) else line
    parts = value["messages"][0]["content"] if "messages" in value else ()
    given = value.get("image") or [each["image"] for each in parts if "image" in each]
    return [given] if isinstance(given, str) else given


def as_fed(path):
    """As transformers loads it, but for grey of 16 bits, of which it keeps nothing above 255."""
    if not path.startswith("data:") and Image.open(path).mode.startswith("I"):
        return Image.fromarray((np.asarray(Image.open(path)) >> 8).astype(np.uint8)).convert("RGB")
    return Image.fromarray(convert_to_rgb(load_image(path), return_numpy=True))


@for_each("case", [case for case in CASES if not case.reason and case.build not in OTHERS])
def test_what_is_used_reaches_the_model_as_transformers_loads_it(builds, fed, case):
    built, samples = builds(case.build), fed(case.build)
    for position, line in zip(built.positions[case.what], case.lines, strict=True):
        row = built.outcomes[position]
        paths = [
            path if path.startswith("data:") else str(built.raw / path)
            for path in images_of(case, line)
        ]
        images = [as_fed(path) for path in paths]
        assert case.size is None or [image.size for image in images] == [case.size]
        plans = [plan_image(RULE, *image.size) for image in images]
        assert row["num_image_patches"] == sum(plan.num_patches for plan in plans)
        assert row["num_image_tokens"] == sum(plan.num_image_tokens for plan in plans)
        ids, cut = samples[row["sample_id"]]
        assert len(ids) == row["seq_len"]
        expected = [extract_patches(RULE, image) for image in images]
        assert torch.equal(cut, torch.cat([cut[:0], *expected]))


def sample_of(builds, fed, what):
    """The last sample of a case: its id, and what the model is fed."""
    built = builds("plain")
    sample_id = built.outcomes[built.positions[what][-1]]["sample_id"]
    return sample_id, *fed("plain")[sample_id]


def test_control_tokens_in_a_text_stay_letters(builds, fed):
    what = "control tokens in a text"
    (case,) = (case for case in CASES if case.what == what)
    _, ids, _ = sample_of(builds, fed, what)
    tokenizer = Tokenizer.from_file(str(demo_tokenizer_path() / "tokenizer.json"))
    question, answer = (turn["value"] for turn in case.lines[0]["conversations"])
    template = (
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    )
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == template
    for token in ("<|im_start|>", "<|im_end|>"):
        assert ids.tolist().count(tokenizer.token_to_id(token)) == 2
    assert tokenizer.token_to_id("<|endoftext|>") not in ids.tolist()
    image_token = StreamingLoader(builds("plain").out, dp_rank=0, dp_world_size=1).image_token_id
    assert image_token not in ids.tolist()


def test_only_the_first_frame_of_a_film_is_seen(builds, fed):
    for what in ("animated GIF", "animated WebP", "animated PNG", "TIFF of several pages"):
        red, _, blue = sample_of(builds, fed, what)[2][0].float().mean((1, 2)).tolist()
        assert (red, blue) == (pytest.approx(255, abs=3), pytest.approx(0, abs=3))


def test_samples_get_the_ids_that_the_table_says(builds, fed):
    assert sample_of(builds, fed, "an id twice")[0] == "stwice#2"
    assert sample_of(builds, fed, "invalid UTF-8 in an id")[0] == "s?"
    assert sample_of(builds, fed, "byte order mark at the beginning of the file")[0] == "sfirst"
    place = builds("plain").positions["record without an id"][0]
    assert sample_of(builds, fed, "record without an id")[0] == f"raw:{place}"


def test_the_loader_names_the_sample_whose_pixels_are_damaged(builds):
    (case,) = (case for case in CASES if case.build == "undecodable")
    loader = StreamingLoader(builds("undecodable").out, dp_rank=0, dp_world_size=1)
    with pytest.raises(DataError, match=case.lines[0]["id"]):
        list(loader)


def test_the_table_of_samples_and_the_cases_are_the_same():
    assert rows_of("Samples") == [
        (case.what, case.happens, f"`{case.reason}`" if case.reason else "") for case in CASES
    ]


def test_the_list_of_reasons_is_complete():
    assert rows_of("Reasons") == [(f"`{reason}`", words) for reason, words in REASONS.items()]
    assert {case.reason for case in CASES} <= {"", *REASONS}
    assert re.search(
        r"num_read \+ num_repeated = num_packed \+ num_rejected", DOCS.read_text("utf-8")
    )

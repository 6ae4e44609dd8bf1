"""The last lines of a build: few, and every number in them is that of the build."""

import io
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from isobatch.common.visible_text import visible
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.format_text import share_text, size_text
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.figures import make_report
from isobatch.packer.report.terminal import print_build
from isobatch.shards.manifest import read_manifest
from support.builds.raw_data import good_records, options, record, write_dataset


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summary")
    rows = good_records(folder / "raw", 80)
    rows += [record(100 + k, ["images/nowhere[red].png"]) for k in range(2)]
    rows.append({"id": "\x1b[2Jno turns", "conversations": []})
    dataset = write_dataset(folder / "raw", rows)
    return BuildConfig(**options(dataset, folder / "out", shard_mb=1))


@pytest.fixture(scope="module")
def first(config):
    return finish(config)


def finish(config):
    """-> (summary, report, the printed lines)"""
    summary = Builder(config, StageProgress(Console(quiet=True))).build()
    report = make_report(summary.out)
    text = io.StringIO()
    print_build(summary, report, Console(file=text, width=80))
    return summary, report, text.getvalue().splitlines()


def test_the_summary_is_short_and_starts_with_the_sum(first):
    _, report, lines = first
    assert (
        lines[0] == "83 samples read = 80 packed + 3 rejected (missing_image 2, no_conversation 1)"
    )
    assert f"{report.num_groups:,} groups" in lines[1]
    assert f"{report.fill:.1%} full" in lines[1]
    assert len(lines) < 24


def test_ratios_stand_before_and_after(first):
    _, report, lines = first
    before, after = report.methods["random"], report.methods["ours"]
    for name in ("pad_ratio", "dist_ratio_vit", "dist_ratio_llm"):
        pair = [share_text(getattr(method, name)) for method in (before, after)]
        assert any(line.split()[-2:] == pair for line in lines), name


def test_every_stage_has_its_time(first):
    summary, _, lines = first
    line = next(line for line in lines if line.startswith("time"))
    for stage in ("count", "group", "write", "finish"):
        assert f"{stage} {summary.seconds[stage]:.1f} s" in line


def test_rejected_samples_stand_by_reason_with_the_first_of_each(first):
    summary, _, lines = first
    rejected = pq.read_table(f"{summary.out}/rejected.parquet").to_pylist()
    for reason in {row["reason"] for row in rejected}:
        ids = [row["sample_id"] for row in rejected if row["reason"] == reason]
        line = next(line for line in lines if f" {reason}: " in line)
        assert f"{len(ids)} {reason}: " in line
        assert f"first: {visible(ids[0])}: " in line
    text = "\n".join(lines)
    assert "nowhere[red].png" in text, "markup of the data is text"
    assert "\x1b" not in text
    assert f"{summary.out}/rejected.parquet" in text


def test_where_things_lie_is_said(first):
    summary, _, lines = first
    manifest = read_manifest(summary.out).values
    line = next(line for line in lines if line.startswith("shards"))
    assert line.split()[1] == str(len(manifest["shards"]))
    assert size_text(sum(shard["size"] for shard in manifest["shards"])) in line
    assert any(line.endswith(f"{summary.out}/report.html") for line in lines)
    assert any(f"packer verify {summary.out}" in line for line in lines)
    assert any("<IMG_CONTEXT> = " in line for line in lines), (
        "tokens that the model has to learn of"
    )


def test_a_build_that_was_finished_before_says_so_first(first, config):
    lines = finish(config)[2]
    assert "is a finished build of these settings" in lines[0]
    assert lines[1] == first[2][0]
    assert not any(line.startswith("time") for line in lines)


def test_all_tokens_with_other_ids_are_one_note(first):
    summary, report, lines = first
    assert not any("tokenizer.json" in line for line in lines)
    for number in (1, 6):
        text = io.StringIO()
        conflicts = {f"<|t{k}|>": (92538 + k, 92550 + k) for k in range(number)}
        print_build(replace(summary, id_conflicts=conflicts), report, Console(file=text))
        (note,) = (line for line in text.getvalue().splitlines() if "tokenizer.json" in line)
        assert f"{number} token{'s' * (number > 1)} " in note
        for token, (declared, used) in conflicts.items():
            assert f"{token} {declared} ({used})" in note


def test_the_summary_says_how_many_samples_a_group_holds(first):
    _, report, lines = first
    (line,) = (line for line in lines if line.startswith("groups "))
    assert f"{report.num_packed / report.num_groups:.1f} samples each on average" in line
    assert "with --max-seq-len " in line or "no cap is above" in line

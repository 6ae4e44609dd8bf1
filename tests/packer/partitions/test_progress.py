"""What a person sees while partitions are packed: it moves, and ends at what was packed."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from isobatch.packer import progress as progress_module
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.partitions import reports
from isobatch.packer.partitions.reports import PartitionReport, Reporter, Tally
from isobatch.packer.progress import StageProgress
from support.builds.packed import quiet
from support.builds.raw_data import CUT, SAMPLES, UNUSABLE, options

USABLE = SAMPLES - len(UNUSABLE)


@pytest.fixture
def lines(monkeypatch):
    """`lines(raw, out, ...)` -> all that a log says of a build that tells everything."""
    monkeypatch.setattr(progress_module, "LINE_S", 0.0)
    monkeypatch.setattr(reports, "LOOK_S", 0.0)

    def build(raw, out, **changes):
        log = io.StringIO()
        config = BuildConfig(**options(raw, out, **CUT, **changes))
        Builder(config, StageProgress(Console(file=log, width=200))).build()
        return log.getvalue().splitlines()

    return build


def shown(lines, stage):
    """(partitions, of, samples, nodes) of each line of a stage."""
    pattern = rf"{stage} +([\d,]+) of (\d+) partitions, (?:(\d+) nodes?, )?([\d,]+) samples, "
    found = (re.match(pattern, line) for line in lines)
    return [
        (int(match[1]), int(match[2]), int(match[4].replace(",", "")), int(match[3] or 0))
        for match in found
        if match
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_log_tells_of_samples_while_partitions_are_packed(
    raw, tmp_path, monkeypatch, lines, workers
):
    monkeypatch.setattr(reports, "TELL_S", 0.0)
    said = lines(raw, tmp_path / "out", workers=workers)
    found = shown(said, "pack")
    assert {total for _, total, _, _ in found} == {3}
    assert [done for done, *_ in found] == sorted(done for done, *_ in found)
    samples = [count for *_, count, _ in found]
    left_over = shown(said, "remainder")[-1]
    assert left_over[:2] == (1, 1)
    # rejected ones are counted, and not written
    assert all(after >= before - len(UNUSABLE) for before, after in pairwise(samples))
    assert samples[-1] == USABLE > left_over[2] > 0
    early = [count for done, _, count, _ in found if done == 0]
    assert early  # workers are spawned, so they tell once a second, and first at once
    assert workers > 1 or any(0 < count < USABLE / 3 for count in early)
    assert any(" left" in line for line in said)
    assert f"{USABLE:,} samples in" in "\n".join(said)


def test_jobs_tell_what_all_have_done_and_on_how_many_machines(raw, tmp_path, monkeypatch, lines):
    said = []
    for machine, share in (("a", 1), ("b", 2), ("a", 3)):
        monkeypatch.setattr(
            "isobatch.packer.partitions.results.gethostname", lambda name=machine: name
        )
        said += lines(raw, tmp_path / "out", partitions=f"{share}/3")
    told = [line for line in said if line.startswith("all jobs: ")]
    assert told[0] == "all jobs: 0 partitions packed, 1 machine"
    assert "all jobs: 1 partition packed, 2 machines" in told
    assert told[-1] == "all jobs: 3 partitions packed, 2 machines"


def test_counting_alone_is_told_too(raw, tmp_path, lines):
    found = shown(lines(raw, tmp_path / "out", keep_columns=("score",)), "count")
    assert found[-1] == (3, 3, USABLE, 0)


def test_work_that_an_earlier_run_has_counted_takes_no_part_of_the_rest():
    told = []
    for counting in (0.5, 0.0):
        progress = quiet()
        progress.on_change = Reporter(4, told.append, counting)
        if counting:
            with progress.stage("count", 1000) as stage:
                stage.advance(500)
                stage.count(30)
                progress.on_change._told = 0.0
                stage.advance(500)
        with progress.stage("group", None) as stage:
            stage.count(60)
        with progress.stage("write", 4) as stage:
            progress.on_change._told = 0.0
            stage.advance(1)
            progress.on_change._told = 0.0
            stage.count(12)
    assert [(each.place, each.part, each.samples) for each in told] == [
        (4, 0.25, 0),
        (4, 1 / 2, 15),
        (4, 0.625, 30),
        (4, 0.625, 36),
        (4, 0.25, 0),
        (4, 0.25, 12),
    ]


def test_a_partition_that_begins_again_elsewhere_takes_its_report_back():
    with quiet().stage("pack", 10) as stage:
        tally = Tally(stage, 10, before=2)
        tally.hear(PartitionReport(3, 0.75, 900, "first"))
        tally.hear(PartitionReport(5, 0.5, 600, "second"))
        assert (stage.done, stage.task.completed) == (1500, 3.25)
        assert "2 of 10 partitions, 2 nodes, 1,500 samples" in stage.task.fields["detail"]
        tally.hear(PartitionReport(3, 0.25, 300, "second"))
        tally.hear(PartitionReport(5, 1.0, 1200))
        assert (stage.done, stage.task.completed) == (1500, 3.25)
        assert "3 of 10 partitions, 1 node, 1,500 samples" in stage.task.fields["detail"]
        tally.hear(PartitionReport(5, 0.9, 1000, "second"))  # which was on its way
        assert "3 of 10 partitions, 1 node, 1,500 samples" in stage.task.fields["detail"]

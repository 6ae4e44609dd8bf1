"""The report: its figures against plain readings of the definitions, its checks, and the two ways
people see it.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from isobatch.balance.baseline_samplers import BASELINES
from isobatch.balance.metrics import autocorrelation, source_autocorrelation, source_entropy
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.errors import ConfigError, DataError
from isobatch.models.presets import load_model, model_to_dict
from isobatch.packer.format_text import share_text
from isobatch.packer.report.charts import histogram, rank_bars, tick_label, ticks
from isobatch.packer.report.figures import BEFORE, make_report
from isobatch.packer.report.html import render_html, write_html
from isobatch.packer.report.terminal import print_report
from isobatch.shards.tables import COUNTS_SCHEMA, groups_table, write_table
from support.builds.report_data import make_counts, read_page, write_build

METHOD_KEYS = {
    "avg_batch_size",
    "longest_vit_tokens",
    "longest_seq_len",
    "pad_ratio",
    "dist_ratio_vit",
    "dist_ratio_llm",
}


def dist(loads: list[int], dp: int) -> float:
    """OmniBal eq. 2, mean over complete steps, in plain Python."""
    steps = [loads[start : start + dp] for start in range(0, len(loads) - dp + 1, dp)]
    return sum(
        sum(max(step) - load for load in step) / (max(step) * dp) if max(step) else 0
        for step in steps
    ) / len(steps)


def test_json_has_the_agreed_keys_and_totals_that_add_up(tmp_path: Path) -> None:
    counts = make_counts(900)
    groups, limits = write_build(tmp_path, counts, rejected={"missing_image": 4, "empty": 2})
    values = json.loads(json.dumps(make_report(tmp_path).to_json()))
    assert (values["num_read"], values["num_packed"], values["num_rejected"]) == (906, 900, 6)
    assert values["rejected"] == {"missing_image": 4, "empty": 2}
    assert (values["num_groups"], values["dp_world_size"]) == (len(groups), 8)
    assert list(values["methods"]) == ["random", "length_group", "device_group", "ours"]
    assert all(set(row) >= METHOD_KEYS for row in values["methods"].values())
    assert values["fill"] == pytest.approx(
        int(counts.seq_len.sum()) / (len(groups) * limits.max_seq_len)
    )


@pytest.mark.parametrize("name", ["random", "length_group", "device_group"])
def test_baselines_are_padded_to_the_longest_and_equal_the_definitions(
    tmp_path: Path, name: str
) -> None:
    counts = make_counts(1_000)
    write_build(tmp_path, counts)
    row = make_report(tmp_path, dp=4, seed=3).methods[name]
    batches = BASELINES[name](counts.seq_len, 4, 4, 3).reshape(-1, 4).tolist()
    tokens = [[int(counts.seq_len[s]) for s in batch] for batch in batches]
    vision = [sum(int(counts.num_vit_tokens[s]) for s in batch) for batch in batches]
    padded = [4 * max(batch) for batch in tokens]
    assert row.avg_batch_size == 4
    assert (row.longest_seq_len, row.longest_vit_tokens) == (max(padded), max(vision))
    assert row.pad_ratio == pytest.approx(1 - sum(map(sum, tokens)) / sum(padded))
    assert row.dist_ratio_llm == pytest.approx(dist(padded, 4))
    assert row.dist_ratio_vit == pytest.approx(dist(vision, 4))


def in_order(groups, counts, limits, *, dp, micro_batches, seed):
    loads = groups.sum(limits.vision_load(counts)), groups.sum(counts.seq_len)
    taken = epoch_steps(loads, (dp, micro_batches), seed=seed).transpose(0, 2, 1).ravel()
    return taken[taken >= 0]


def test_ours_are_the_stored_groups_in_the_loaders_order(tmp_path: Path) -> None:
    counts = make_counts(2_000)
    groups, limits = write_build(tmp_path, counts)
    report = make_report(tmp_path, dp=4, seed=7)
    order = in_order(groups, counts, limits, dp=4, micro_batches=1, seed=7).tolist()
    tokens = [int(counts.seq_len[groups[group]].sum()) for group in order]
    vision = [int(counts.num_vit_tokens[groups[group]].sum()) for group in order]
    row = report.methods["ours"]
    assert sorted(order) == list(range(len(groups)))
    assert (row.pad_ratio, row.avg_batch_size) == (0.0, 2_000 / len(groups))
    assert row.longest_seq_len == max(tokens) <= limits.max_seq_len
    assert row.longest_vit_tokens == max(vision) <= limits.max_vision * 1025
    assert row.dist_ratio_llm == pytest.approx(dist(tokens, 4))
    assert row.dist_ratio_vit == pytest.approx(dist(vision, 4))
    assert row.dist_ratio_vit < report.methods["ours_shuffled"].dist_ratio_vit, (
        "the order adds nothing"
    )


@pytest.mark.parametrize("num_samples", [1, 3, 9, 31, 33])
@pytest.mark.parametrize("dp", [1, 8])
def test_a_dataset_smaller_than_a_step_is_reported_and_said_to_be_so(
    tmp_path: Path, num_samples: int, dp: int
) -> None:
    write_build(tmp_path, make_counts(num_samples))
    report = make_report(tmp_path, dp=dp)
    text = json.dumps(report.to_json(), allow_nan=False)
    assert ("had nothing to do" in text or "have nothing to do" in text) == (
        num_samples < dp * 4 or report.num_groups < dp
    )
    assert not re.search(r"\b1 (samples|groups)\b", text)
    page = render_html(report)
    assert "nan" not in page
    steps = [figures.num_steps for of in report.methods.values() for figures in of.shuffle.values()]
    if max(steps) < 3:
        assert "random steps are is not known of fewer than three steps" in page
        assert "<br>corr" not in page


def test_text_only_data_has_a_balanced_vision_encoder(tmp_path: Path) -> None:
    write_build(tmp_path, make_counts(200, images=False))
    report = make_report(tmp_path)
    assert {row.dist_ratio_vit for row in report.methods.values()} == {0.0}
    assert "nan" not in render_html(report)


def test_source_mix_is_reported_when_there_are_several_sources(tmp_path: Path) -> None:
    write_build(tmp_path, make_counts(600), sources=3)
    report = make_report(tmp_path)
    assert report.num_sources == 3
    assert 0.5 < report.methods["ours"].shuffle[1].source_entropy <= 1.1
    assert 0.9 < report.methods["ours"].shuffle[8].source_entropy <= 1.1
    assert "source" in render_html(report)


def test_sources_have_their_share_of_labels_and_of_the_gradient(tmp_path: Path) -> None:
    counts = make_counts(400)
    rare = np.arange(400) % 4 == 0
    counts = replace(counts, num_loss_tokens=np.where(rare, 3, counts.num_loss_tokens))
    groups, limits = write_build(tmp_path, counts, sources=4)
    report = make_report(tmp_path, dp=2)
    order, steps = in_order(groups, counts, limits, dp=2, micro_batches=1, seed=0), []
    for first in range(0, len(groups), 2):
        step = np.concatenate([groups[group] for group in order[first : first + 2]])
        labels = counts.num_loss_tokens[step]
        steps.append(labels[rare[step]].sum() / labels.sum())
    own = report.sources["set0"]
    assert own.samples == pytest.approx(0.25)
    assert own.labels == pytest.approx(300 / counts.num_loss_tokens.sum())
    assert own.gradient[1] == pytest.approx(np.mean(steps))
    for share in ("samples", "labels"):
        assert sum(getattr(each, share) for each in report.sources.values()) == pytest.approx(1)
    assert 0 <= report.repeated_pairs[1] < (len(groups) - 1) / (2 - 1)
    out = io.StringIO()
    print_report(report, Console(file=out, width=200))
    for text in (out.getvalue(), render_html(report)):
        assert "set3" in text
        assert "loss_normalizer" in text
        assert share_text(own.gradient[1]) in text


def test_shuffle_figures_stand_beside_every_dist_ratio_for_one_and_eight_micro_batches(
    tmp_path: Path,
) -> None:
    counts = make_counts(3_000)
    groups, limits = write_build(tmp_path, counts, sources=3)
    values = json.loads(json.dumps(make_report(tmp_path, dp=2, seed=5).to_json()))
    sources = np.arange(3_000) % 3
    for row in values["methods"].values():
        assert list(row["shuffle"]) == ["1", "8"]
    for micro_batches in (1, 8):
        figures = values["methods"]["ours"]["shuffle"][str(micro_batches)]
        per_step = 2 * micro_batches
        shape = {"dp": 2, "micro_batches": micro_batches}
        taken = groups.take(in_order(groups, counts, limits, **shape, seed=5))
        assert figures == {
            "num_steps": -(-len(groups) // per_step),
            "source_entropy": source_entropy(taken, sources, per_step),
            "autocorrelation_source": source_autocorrelation(taken, sources, per_step),
            "autocorrelation_vit": autocorrelation(taken.sum(counts.num_vit_tokens), per_step),
            "autocorrelation_llm": autocorrelation(taken.sum(counts.seq_len), per_step),
        }


def test_copies_of_a_sample_are_packed_but_not_read(tmp_path: Path) -> None:
    write_build(tmp_path, make_counts(100), rejected={"missing_image": 4})
    counts = pq.read_table(tmp_path / "counts.parquet")
    positions = pa.array(
        np.maximum(np.arange(100) - 7, 0), pa.int64()
    )  # the first sample stands there eight times
    write_table(
        counts.set_column(0, COUNTS_SCHEMA.field("position"), positions),
        tmp_path / "counts.parquet",
    )
    report = make_report(tmp_path)
    values = report.to_json()
    assert [values[f"num_{name}"] for name in ("read", "repeated", "packed", "rejected")] == [
        97,
        7,
        100,
        4,
    ]
    text = io.StringIO()
    print_report(report, Console(file=text, width=120))
    assert "97 samples read + 7 repeated = 100 packed + 4 rejected" in text.getvalue()


def test_tables_that_do_not_add_up_are_an_error(tmp_path: Path) -> None:
    counts = make_counts(100)
    groups, _ = write_build(tmp_path, counts)
    write_table(
        groups_table(groups.take(np.arange(1, len(groups))), counts), tmp_path / "groups.parquet"
    )
    with pytest.raises(DataError, match="not in exactly one group"):
        make_report(tmp_path)


def test_a_manifest_that_says_otherwise_is_an_error(tmp_path: Path) -> None:
    groups, limits = write_build(tmp_path, make_counts(100))
    totals = {"num_read": 100, "num_packed": 100, "num_rejected": 0, "num_groups": len(groups)}
    manifest = {
        "format_version": 2,
        "format": "arrow",
        "model": model_to_dict(load_model("tiny")),
        "tokenizer": {"image_token_id": 1, "vocab_size": 2},
        "totals": totals,
        "limits": asdict(limits),
        "shards": [],
        "files": [],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert make_report(tmp_path).num_packed == 100
    totals["num_packed"] = 99
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json says .*99"):
        make_report(tmp_path)


def test_missing_parts_and_a_wrong_dp_are_each_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        make_report(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"counts\.parquet"):
        make_report(tmp_path)
    write_build(tmp_path, make_counts(20))
    with pytest.raises(ConfigError, match="dp is 0"):
        make_report(tmp_path, dp=0)
    (tmp_path / "limits.json").unlink()
    with pytest.raises(DataError, match="unfinished"):
        make_report(tmp_path)


def test_the_printed_table_fits_80_columns_and_shows_every_method(tmp_path: Path) -> None:
    write_build(tmp_path, make_counts(3_000), rejected={"too_long": 5}, sources=2)
    report = make_report(tmp_path)
    text = io.StringIO()
    print_report(report, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "3,005 samples read = 3,000 packed + 5 rejected (too_long 5)" in lines[0]
    for name in ("random", "length-group", "device-group", "Isobatch"):
        balance, shuffle = (line for line in lines if line.startswith(name))
        assert len(balance.split()) == 7, f"a cell of {name} is cut or wrapped: {balance}"
        assert len(shuffle.split()) == 9, f"a cell of {name} is cut or wrapped: {shuffle}"
    assert f"{report.methods['ours'].dist_ratio_llm:.4f}" in text.getvalue()


def test_the_page_is_whole_self_contained_and_shows_the_figures(tmp_path: Path) -> None:
    write_build(tmp_path, make_counts(1_000), rejected={"<script>alert(1)</script>": 2})
    report = make_report(tmp_path)
    write_html(report, tmp_path / "report.html")
    source = (tmp_path / "report.html").read_text("utf-8")
    page = read_page(source)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags), (
        "needs something from elsewhere"
    )
    assert not {"src", "href", "onload", "onclick"} & set(page.attributes)
    assert not re.search(r"https?:|url\(|@import", source)
    assert "<script>alert(1)</script>" in page.text, "the reason is shown as text"
    assert page.tags.count("svg") == 10
    for figure in (f"{report.fill:.1%}", "1,000", f"{report.methods['random'].pad_ratio:.3f}"):
        assert figure in page.text


@pytest.mark.parametrize("dp", [4, 16])
def test_the_chart_of_the_ranks_says_how_much_of_the_drawn_steps_is_waiting(
    tmp_path: Path, dp: int
) -> None:
    write_build(tmp_path, make_counts(2_000))
    report = make_report(tmp_path, dp=dp)
    said = re.findall(r"([\d.]+%) of the ranks' time for (LLM|ViT) tokens", render_html(report))
    expected = []
    for load, unit in (("llm_tokens", "LLM"), ("vit_tokens", "ViT")):
        for name in (BEFORE, "ours"):
            first_steps = report.loads[name][load][: 6 * dp].tolist()
            expected.append((share_text(dist(first_steps, dp)), unit))
    assert said == expected
    assert ("8 of 16 ranks" in render_html(report)) == (dp == 16)


def test_a_histogram_draws_a_bar_where_and_only_where_there_are_values() -> None:
    drawn = histogram(
        np.array([10] * 3 + [90]), upper=96, series="ours", unit="LLM tokens", counted="groups"
    )
    bars = re.search(r'class="ours" d="([^"]*)"', drawn)
    assert bars is not None
    places = [float(x) for x in re.findall(r"M([\d.]+) ", bars[1])]
    tops = [float(y) for y in re.findall(r"V([\d.]+)h", bars[1])]
    assert len(places) == 2
    bottom = 150 - 34
    assert (bottom - tops[0]) == pytest.approx(3 * (bottom - tops[1]), abs=0.2)
    assert "mean 30, largest 90" in drawn


def test_balanced_ranks_are_drawn_without_waiting() -> None:
    steps = np.array([[5, 5], [8, 4]])
    drawn = rank_bars(steps, slowest=steps.max(axis=1), upper=8, series="ours", unit="LLM tokens")
    wait = re.search(r'class="wait ours" d="([^"]*)"', drawn)
    assert wait is not None
    heights = [
        float(low) - float(high) for low, high in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)h", wait[1])
    ]
    assert [height > 0 for height in heights] == [False, False, False, True]


def test_ticks_are_round_and_thousands_are_k() -> None:
    assert ticks(7_328) == [0, 2_000, 4_000, 6_000]
    assert [tick_label(value) for value in (0, 4_000, 2_500, 1_500_000)] == [
        "0",
        "4K",
        "2.5K",
        "1.5M",
    ]
    for upper in (0, 0.013, 1, 7, 4_096, 20_500, 1e9):
        assert len(ticks(upper)) <= 7
        assert ticks(upper)[-1] <= upper

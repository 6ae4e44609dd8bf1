"""The benchmarks that mirror the paper's tables run on tiny generated inputs, and what they count
is right.
"""

from __future__ import annotations

import re
from dataclasses import astuple
from pathlib import Path

import context_parallel
import convergence
import numpy as np
import pytest
import resolutions

import counting
from isobatch.counting.sample_counter import CountSettings, SampleCounter
from isobatch.models.presets import load_model
from isobatch.packer.demo.dataset import demo_tokenizer_path, write_demo
from isobatch.packer.sources.base import FilePiece
from isobatch.packer.sources.json_source import read_json_records
from isobatch.shards.folders import open_folder

DEMO_SAMPLES = 60


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, num_samples=DEMO_SAMPLES)
    return folder


def numbers(printed: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*", printed)]


def assert_no_nan(printed: str) -> None:
    assert not re.search(r"\b(nan|inf)\b", printed, re.IGNORECASE), printed


def test_convergence_prints_finite_figures_for_every_number_of_iterations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert convergence.main(["--samples", "600", "--seeds", "1", "--dp", "4"]) == 0
    printed = capsys.readouterr().out
    assert_no_nan(printed)
    rows = [line for line in printed.splitlines() if line.lstrip().startswith(("ISF, ", "default"))]
    assert [line.split()[:2] for line in rows[:-1]] == [
        ["ISF,", str(number)] for number in convergence.ITERATIONS
    ]
    assert all(len(numbers(line)) >= 7 for line in rows)


def test_more_iterations_never_need_more_groups_and_the_loaders_order_is_no_worse_than_chance() -> (
    None
):
    counts, sources = convergence.generate(3_000)
    options = convergence.GroupOptions(max_seq_len=4096)
    data = convergence.under_caps(counts, sources, options)
    rows = convergence.measure(data, dp=8, seeds=[0, 1])
    groups = [row.num_groups for row in rows if row.name != "default"]
    assert groups == sorted(groups, reverse=True)
    least = int(data.counts.seq_len.sum()) / 4096
    for row in rows:
        assert row.num_groups >= least
        assert row.fill == pytest.approx(least / row.num_groups, rel=0.01)
        assert row.loader_order.vit < row.random_order.vit
        # groups that are full to the last tokens leave nothing to do
        assert row.loader_order.llm < max(row.random_order.llm, 0.0005)


def test_samples_over_the_caps_are_left_out_and_counted() -> None:
    counts, sources = convergence.generate(2_000)
    data = convergence.under_caps(
        counts, sources, convergence.GroupOptions(max_seq_len=1500, max_vision=4)
    )
    fits = (counts.seq_len <= 1500) & (counts.num_image_patches <= 4)
    assert data.num_over == int((~fits).sum()) > 0
    assert np.array_equal(data.counts.seq_len, counts.seq_len[fits])
    assert np.array_equal(data.sources, sources[fits])


def test_resolutions_prints_every_setting_with_finite_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--demo-samples", str(DEMO_SAMPLES), "--resample", "400", "--dp", "4"]
    assert resolutions.main(arguments) == 0
    printed = capsys.readouterr().out
    assert_no_nan(printed)
    rows = [
        line
        for line in printed.splitlines()
        if re.search(r"\b(random|shuffled|Isobatch) +\d", line)
    ]
    assert len([line for line in rows if "OmniBal" not in line]) == 3 * 8
    assert all(len(numbers(line)) >= 6 for line in rows if "OmniBal" not in line)


@pytest.mark.parametrize(
    "model", ["internvl_1_5", "internvl_1_5_max4", "internvl_1_5_max1", "qwen2_vl"]
)
def test_a_rule_counts_from_sizes_what_the_packer_counts_from_files(demo: Path, model: str) -> None:
    preset = load_model(model)
    task = CountSettings(model=preset, tokenizer=str(demo_tokenizer_path()))
    records = read_json_records(open_folder(str(demo)), FilePiece("annotations.json"))
    expected = SampleCounter(task).count(records, "demo", str(demo), "").table
    counts, refused = resolutions.count(
        resolutions.read_samples(str(demo), str(demo_tokenizer_path())), preset.vision
    )
    assert len(refused) == 0
    for name in ("num_image_patches", "num_vit_tokens", "num_image_tokens", "num_text_tokens"):
        assert getattr(counts, name).tolist() == expected.column(name).to_pylist(), name


def test_a_sample_with_an_image_that_the_rule_refuses_is_named_and_left_out() -> None:
    samples = resolutions.Samples(
        num_text_tokens=np.array([10, 20, 30]),
        num_images=np.array([1, 0, 2]),
        widths=np.array([56, 56, 2]),
        heights=np.array([56, 56, 900]),
        num_rejected=0,
    )
    setting = resolutions.tables()["Qwen2-VL's rule, native resolution (Table 14)"][0]
    counts, refused = resolutions.count(samples, setting.rule)
    assert refused.tolist() == [2]
    assert counts.num_vit_tokens[:2].tolist() == [16, 0]
    drawn = np.array([0, 1, 2, 2, 0, 1, 0, 1, 0, 1])
    methods, left_out = resolutions.measure(setting, samples, drawn, dp=2, seed=0)
    assert left_out == 2
    assert all(
        np.isfinite([method.avg_batch_size, *astuple(method.dist_ratios)]).all()
        for method in methods
    )


def test_tokens_per_tile_follow_the_tiles_pixels() -> None:
    settings = {
        s.name: s.rule for s in resolutions.resolution_settings(load_model("internvl_1_5").vision)
    }
    tokens = {
        name: (rule.vit_tokens_per_patch, rule.llm_tokens_per_patch)
        for name, rule in settings.items()
    }
    assert tokens == {"224 px": (257, 64), "336 px": (577, 144), "448 px": (1025, 256)}
    assert settings["448 px"] == load_model("internvl_1_5_max4").vision


def test_a_dataset_without_usable_samples_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "annotations.json").write_text('[{"id": "1", "conversations": []}]', "utf-8")
    with pytest.raises(resolutions.DataError, match="none of its 1 records"):
        resolutions.main(["--dataset", str(tmp_path)])


def test_counting_prints_both_limits_and_the_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "SETTLE_SECONDS", 0)
    assert counting.main(["--samples", "600", "--work", str(tmp_path)]) in (
        0,
        1,
    )  # so few say nothing about speed
    printed = capfd.readouterr().out
    assert_no_nan(printed)
    for stage in ("counting", "writing"):
        (row,) = [line for line in printed.splitlines() if line.split()[:1] == [stage]]
        seconds, rate, _, share, _ = numbers(row)
        assert 600 / rate == pytest.approx(seconds, abs=0.06)  # seconds have one decimal place
        assert share > 0
    assert "600 samples packed" in " ".join(printed.split())
    assert list(tmp_path.iterdir()) == []


def test_context_parallel_ranks_wait_least_with_a_size_per_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--demo-samples", "120", "--row-tokens", "1024", "--steps", "3"]
    assert context_parallel.main([*few, "--ranks", "8", "--tokens-per-rank", "512"]) == 0
    printed = capsys.readouterr().out
    assert_no_nan(printed)
    rows = {
        line[:40].split("  ")[0].strip(): [float(part) for part in re.findall(r"([\d.]+)%", line)]
        for line in printed.splitlines()
    }
    images = [
        [float(part) for part in re.findall(r"([\d.]+)%", line)]
        for line in printed.splitlines()
        if line.lstrip().startswith("1,024")
    ]
    assert len(images) == len(context_parallel.SIZES)
    assert all(by_tokens <= by_number for by_tokens, by_number in images)
    assert rows["Isobatch: a size per group, sending 1%"][-1] <= rows["one size: 8"][0]

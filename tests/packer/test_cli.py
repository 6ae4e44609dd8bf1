"""The command as a person meets it: results on stdout, one clear line for a mistake, the promised
exit status.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isobatch.common.config import preset_names
from isobatch.packer.report.terminal import CAPTION
from support.builds.command import run_packer
from support.builds.packed import digests
from support.builds.raw_data import good_records, options, record, write_dataset, write_image


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *arguments: run_packer(capsys, monkeypatch, *arguments)


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "raw", good_records(tmp_path / "raw", 20))


def build_arguments(dataset, out):
    values = options(dataset, out)
    return [
        "build",
        "--dataset",
        dataset,
        "--model",
        "tiny",
        "--tokenizer",
        values["tokenizer"],
        "--out",
        out,
    ]


def test_help_has_families_in_one_line_and_models_lists_every_preset(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, help_text, _ = run("build", "--help")
    described = " ".join(help_text.partition("--model ")[2].partition("--tokenizer")[0].split())
    assert "preset that `packer models` lists, of eva, gemma, glm," in described
    assert "qwen3_vl" not in described
    status, listed, _ = run("models")
    assert status == 0
    names = [line.split()[0] for line in listed.splitlines()[1:] if line.split()]
    assert set(preset_names("models")) <= set(names)


def test_build_verify_and_report_say_what_they_did(run, dataset, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    out = tmp_path / "out"
    status, printed, _ = run(*build_arguments(dataset, out), "--workers", 1)
    assert status == 0
    assert "20 samples read = 20 packed" in printed
    assert (out / "report.html").exists()
    assert run("verify", out)[0] == 0
    status, printed, _ = run("report", out, "--dp", 2, "--json")
    report = json.loads(printed)
    assert status == 0
    assert (
        report["num_read"],
        report["num_packed"],
        report["num_rejected"],
        report["dp_world_size"],
    ) == (20, 20, 0, 2)
    # what goes to a file or another program is not wrapped
    before = digests(out)
    _, printed, _ = run("report", out, "--dp", 2)
    assert digests(out) == before  # a question changes no file
    assert digests(out).keys() == before.keys()
    _, said, _ = run("report", out, "--dp", 2, "--html", tmp_path / "page.html")
    assert f"details: {tmp_path / 'page.html'}" in said
    assert "2 ranks" in (tmp_path / "page.html").read_text()
    for command in ("report", "inspect"):
        status, said, error = run(command, out, "--html", tmp_path / "page.html" / "deep.html")
        assert (status, said) == (2, "")
        assert "page.html is a file; give a folder" in error
        assert run(command, out, "--html", tmp_path / command / "deep.html")[0] == 0
        assert (tmp_path / command / "deep.html").exists()
    assert {CAPTION} <= set(printed.splitlines())
    assert any(
        line.startswith("how random") and line.endswith(".") for line in printed.splitlines()
    )
    assert any("-" in line.split() for line in printed.splitlines() if "Isobatch" in line)
    assert set(report["methods"]) >= {"random", "length_group", "device_group", "ours"}
    status, printed, _ = run(*build_arguments(dataset, out))
    assert status == 0
    assert "finished build" in printed


def test_build_as_json_is_json_alone(run, dataset, tmp_path):
    status, printed, _ = run(*build_arguments(dataset, tmp_path / "out"), "--json", "--workers", 1)
    assert status == 0
    assert json.loads(printed)["totals"]["num_packed"] == 20


def test_count_writes_the_counts_alone(run, dataset, tmp_path):
    arguments = build_arguments(dataset, tmp_path / "out")
    status, printed, _ = run("count", *arguments[1:], "--workers", 1, "--json")
    assert status == 0
    assert json.loads(printed) == {"num_read": 20, "num_counted": 20, "rejected": {}}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "counts.parquet",
        "rejected.parquet",
    ]
    status, printed, _ = run(
        "group", tmp_path / "out" / "counts.parquet", "--out", tmp_path / "groups", "--json"
    )
    assert status == 0
    assert json.loads(printed)["num_packed"] == 20


def test_a_toml_file_gives_options_and_the_command_line_wins(run, dataset, tmp_path):
    config = tmp_path / "build.toml"
    config.write_text(
        f'dataset = "{dataset}"\nmodel = "tiny"\nseed = 3\nworkers = 1\nshard_mb = 2\n'
    )
    tokenizer = options(dataset, "")["tokenizer"]
    out = tmp_path / "out"
    status, _, _ = run(
        "build", "--config", config, "--tokenizer", tokenizer, "--out", out, "--seed", 5
    )
    assert status == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["seed"], manifest["config"]["shard_mb"]) == (5, 2)


def one_error_line(stderr):
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert "Traceback" not in stderr
    errors = [line for line in lines if "rror:" in line]
    assert len(errors) == 1
    return errors[0]


WRONG_CALLS = [
    ({"--dataset": "nowhere"}, 1, "no dataset 'nowhere'"),
    ({"--model": "gpt9"}, 2, "no model preset 'gpt9'"),
    ({"--tokenizer": "no/such/folder"}, 2, "no/such/folder"),
    ({"--tokenizer": "0"}, 2, "tokenizer 0: no such folder or file, nor a Hub id"),
    ({"--tokenizer": "nan"}, 2, "tokenizer nan: no such folder or file, nor a Hub id"),
    ({"--model": None}, 2, "--model is missing"),
    ({"--format": "zip"}, 2, "zip"),
    ({"--max-seq-len": "many"}, 2, "'--max-seq-len'"),
    ({"--config": "nowhere.toml"}, 2, "nowhere.toml"),
    ({"--max-seq-len": "1"}, 1, "nothing to pack"),
    ({"--data-root": "nowhere"}, 1, "no data root"),
    ({"--seed": "99999999999999999999"}, 2, "seed"),
    ({"--check-images": "maybe"}, 2, "check_images"),
    ({"--out": ""}, 2, "--out is empty"),
    ({"--dataset": " "}, 2, "--dataset is empty"),
    ({"--data-root": ""}, 2, "--data-root is empty"),
    ({"--memory-gib": "nan"}, 2, "gib"),
    ({"--memory-gib": "inf"}, 2, "memory_gib is inf"),
    ({"--memory-gib": "-1"}, 2, "'--memory-gib'"),
    ({"--memory-gib": "0.001", "--model": "internvl_1_5"}, 2, "holds no token of internvl_1_5"),
]
"""Options that change, the exit status, and what the line says."""


def test_a_wrong_call_is_one_clear_line_and_its_exit_status(run, dataset, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    arguments = [str(a) for a in build_arguments(dataset, tmp_path / "out")]
    for change, status, message in WRONG_CALLS:
        given = dict(zip(arguments[1::2], arguments[2::2], strict=True)) | change
        flat = [
            part for name, value in given.items() if value is not None for part in (name, value)
        ]
        found, _, stderr = run("build", *flat, "--workers", 1)
        assert found == status, change
        assert message in one_error_line(stderr), change
        assert ("count " in stderr) == (message == "nothing to pack"), change
        assert not list(Path().iterdir()), change


def test_a_known_dataset_names_a_model_and_all_that_is_missing_at_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    status, _, stderr = run("build", "--dataset", "llava665k")
    assert status == 1
    said = " ".join(stderr.split())
    assert "assumed: --model llava_1_5 --tokenizer llava-hf/llava-1.5-7b-hf" in said
    assert "--out llava665k-packed" in said
    for missing in (
        "annotation file llava_v1_5_mix665k.json",
        "vg/VG_100K_2",
        "- tokenizer llava-hf",
    ):
        assert missing in said
    status, _, stderr = run("build", "--dataset", "datamix1", "--out", "packed")
    assert "assumed: --model Qwen/Qwen2.5-VL-7B-Instruct (give" in " ".join(stderr.split())
    assert "mmc4" in stderr
    assert "- model Qwen/Qwen2.5-VL-7B-Instruct" in stderr
    assert not list(tmp_path.iterdir())


def test_a_build_is_named_after_its_dataset(run, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [str(each) for each in build_arguments(dataset, tmp_path / "out")]
    at = arguments.index("--out")
    status, _, stderr = run(*arguments[:at], *arguments[at + 2 :], "--workers", 1)
    assert status == 0
    name = Path(arguments[arguments.index("--dataset") + 1]).name.partition(".")[0]
    assert f"assumed: --out {name}-packed" in " ".join(stderr.split())
    assert (tmp_path / f"{name}-packed" / "manifest.json").exists()


def test_a_damaged_build_fails_verification_and_names_the_shard(run, dataset, tmp_path):
    out = tmp_path / "out"
    run(*build_arguments(dataset, out), "--workers", 1)
    shard = out / "shards" / "shard-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    status, _, stderr = run("verify", out)
    assert status == 1
    assert "shards/shard-00000.arrow" in one_error_line(stderr)


def test_an_output_that_cannot_be_written_is_one_line(run, dataset, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, _, stderr = run(*build_arguments(dataset, tmp_path / "file" / "out"), "--workers", 1)
    assert status == 1
    assert str(tmp_path / "file") in one_error_line(stderr)


def test_known_datasets_say_what_is_missing_and_where_to_get_it(run, tmp_path):
    tail = [
        "--model",
        "tiny",
        "--tokenizer",
        options(tmp_path, "")["tokenizer"],
        "--out",
        tmp_path / "out",
    ]
    status, _, stderr = run("build", "--dataset", "llava665k", *tail)
    assert status == 1
    assert "incomplete in the current folder (--data-root)" in stderr
    (tmp_path / "data" / "gqa" / "images").mkdir(parents=True)
    status, _, stderr = run(
        "build", "--dataset", "llava665k", "--data-root", tmp_path / "data", *tail
    )
    assert status == 1
    assert "llava_v1_5_mix665k.json" in stderr
    assert "liuhaotian/LLaVA-Instruct-150K" in stderr
    assert "images.cocodataset.org" in stderr
    assert "gqa/images" not in stderr


def test_llava665k_packs_data_of_its_real_layout(run, tmp_path):
    root = tmp_path / "data"
    folders = [
        "coco/train2017",
        "gqa/images",
        "ocr_vqa/images",
        "textvqa/train_images",
        "vg/VG_100K",
        "vg/VG_100K_2",
    ]
    rows = []
    for number, folder in enumerate(folders):
        write_image(root / folder / f"{number}.jpg", 64, 48, number)
        rows.append(record(number, [f"{folder}/{number}.jpg"]))
    rows.append(record("text-only") | {"model": "vicuna"})
    (root / "llava_v1_5_mix665k.json").write_text(json.dumps(rows))
    status, printed, _ = run(
        "build", "--dataset", "llava665k", "--data-root", root, "--model", "llava_1_5",
        "--workers", 1,
        "--tokenizer", options(root, "")["tokenizer"], "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0
    assert "7 samples read = 7 packed" in printed


def test_packing_and_its_help_need_no_torch():
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        " import isobatch.packer.cli, isobatch.balance.grouping.isf"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_demo_needs_nothing_but_the_package(run, tmp_path, demo_data, monkeypatch):
    def draw_again(folder):  # what `place_demo` writes there
        shutil.copytree(demo_data, folder, dirs_exist_ok=True)

    monkeypatch.setattr("isobatch.packer.build.place_demo", draw_again)
    status, printed, _ = run("build", "--dataset", "demo", "--out", tmp_path / "out")
    assert status == 0
    assert "1,000 samples read = 1,000 packed" in printed

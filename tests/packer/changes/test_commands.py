"""The commands that change builds, as a person meets them."""

import json

import pytest

from support.builds.command import run_packer
from support.builds.raw_data import options


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *arguments: run_packer(capsys, monkeypatch, *map(str, arguments))


@pytest.fixture
def new_data(halves):
    values = options(halves / "new", "x")
    names = ("dataset", "tokenizer")
    return [f"--{name}={values[name]}" for name in names] + [f"--data-root={halves}"]


def test_add_remove_and_verify_say_what_they_did(run, arrow_build, new_data, tmp_path):
    status, printed, _ = run("add", arrow_build, *new_data)
    assert status == 0
    assert "90 samples read: 89 added in" in printed
    assert "rejected 1, marker_without_image" in printed
    assert f"{arrow_build} has 238 samples in" in printed
    _, printed, _ = run("add", arrow_build, *new_data)
    assert "has had this data already; nothing to do" in printed
    ids = tmp_path / "ids.txt"
    ids.write_text("id-003\nid-200\nid-999\n")
    status, _, error = run("verify", arrow_build, "--absent", ids)
    assert status == 1
    assert "has 2 samples that must be absent" in error
    _, printed, _ = run("remove", arrow_build, "--ids", ids)
    assert "removed 2 samples, and 0 rejected: 2 groups, 2 shards" in printed
    assert "note: 1 of the ids or sources are of no sample" in printed
    status, printed, _ = run("verify", arrow_build, "--absent", ids)
    assert status == 0
    assert "absent: no sample of these ids is in a table or a shard" in printed
    _, printed, _ = run("remove", arrow_build, "--ids", ids)
    assert f"none of these samples is in {arrow_build}; its sources: first, new" in printed
    _, printed, _ = run("inspect", arrow_build, "--sample", "id-004")
    assert "id-004" in printed
    _, printed, _ = run("report", arrow_build)
    assert "238 samples read = 236 packed + 2 rejected" in printed


def test_their_json_is_json_alone(run, arrow_build, new_data, first_builds, tmp_path):
    _, printed, _ = run("add", arrow_build, *new_data, "--json")
    values = json.loads(printed)
    assert (values["added"]["num_packed"], values["totals"]["num_packed"]) == (89, 238)
    assert values["rejected"] == {"marker_without_image": 1}
    _, printed, _ = run("remove", arrow_build, "--source", "new", "--json")
    assert json.loads(printed)["num_samples"] == 89
    _, printed, _ = run("remove", arrow_build, "--source", "new", "--json")
    assert json.loads(printed)["num_samples"] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["remove", "BUILD"], "give --ids FILE or --source NAME"),
        (["remove", "BUILD", "--ids", "nothing.txt"], "nothing.txt: cannot be read"),
        (["remove", "nowhere", "--source", "x"], "nowhere: no such folder"),
        (["add", "nowhere", "--dataset", "x"], "nowhere: no such folder"),
        (["add", "BUILD", "--dataset", "nothing.json", "--tokenizer", "x"], "x"),
        (["add", "BUILD", "--dataset", "nothing.json"], "--tokenizer is missing"),
        (["merge", "BUILD", "--out", "x"], "two builds or more"),
        (["merge", "BUILD", "nowhere", "--out", "x"], "nowhere: no such folder"),
        (["verify", "BUILD", "--absent", "nothing.txt"], "nothing.txt: cannot be read"),
    ],
)
def test_a_wrong_call_is_one_clear_line(run, arrow_build, arguments, problem):
    words = [str(arrow_build) if word == "BUILD" else word for word in arguments]
    status, _, error = run(*words)
    assert status != 0
    assert problem in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1

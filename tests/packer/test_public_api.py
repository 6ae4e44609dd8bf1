"""The names that `packer` exports: users write them, so they change only on purpose."""

import subprocess
import sys
from functools import partial

import pytest

from isobatch import packer
from isobatch.common.command_line import run_module
from isobatch.packer import cli

NAMES = [
    "BuildConfig",
    "BuildSummary",
    "Builder",
    "GroupView",
    "Grouping",
    "Report",
    "StageProgress",
    "Verification",
    "demo_tokenizer_path",
    "group_counts",
    "group_files",
    "inspect_group",
    "make_report",
    "read_lengths",
    "verify_build",
    "write_demo",
    "write_group_html",
    "write_html",
]


def test_exported_names():
    assert packer.__all__ == NAMES
    assert all(hasattr(packer, name) for name in NAMES)


def test_unknown_names_are_attribute_errors():
    assert not hasattr(packer, "NoSuchName")


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("import packer", ["numpy", "pyarrow", "polars"]),
        ("import isobatch", ["torch", "numba", "numpy", "pyarrow", "polars"]),
        ("import isobatch.packer.cli", ["polars", "torch"]),
    ],
)
def test_heavy_libraries_are_loaded_only_when_needed(program, heavy):
    program = f"{program}; import sys; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("call", ["--help", "--version", "no-such-command"])
def test_help_the_version_and_wrong_calls_load_no_command(call):
    heavy = ["numba", "numpy", "pyarrow", "polars", "torch", "isobatch.packer.cli"]
    program = (
        f"import atexit, sys; sys.argv = ['packer', {call!r}];"
        f" atexit.register(lambda: print([name for name in {heavy} if name in sys.modules]));"
        " from isobatch.packer.__main__ import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.stdout.splitlines()[-1] == "[]"


def test_help_is_that_of_the_commands(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["packer", "--help"])
    printed = []
    for call in (cli.main, partial(run_module, "isobatch.packer.cli")):
        call()
        printed.append(capsys.readouterr().out)
    assert "build" in printed[0]
    assert printed[0] == printed[1]


def test_a_build_from_python_needs_a_config_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "isobatch.packer.build.place_demo", partial(packer.write_demo, num_samples=60)
    )
    config = packer.BuildConfig(dataset="demo", out=str(tmp_path / "out"), limit=50, workers=1)
    summary = packer.Builder(config).build()
    assert summary.totals["num_packed"] == 50
    assert packer.make_report(summary.out, dp=2).num_packed == 50
    assert packer.verify_build(summary.out, packer.StageProgress(), workers=1).problems == []
    assert capsys.readouterr() == ("", "")

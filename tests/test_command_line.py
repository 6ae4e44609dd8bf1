"""The log for programs and the exit statuses: what docs/reference/command_line.md says."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from isobatch.cli import main as isobatch
from isobatch.common.command_line import EXIT_STATUSES
from isobatch.common.consoles import SafeConsole
from isobatch.engine.cli import main as engine
from isobatch.packer import progress as progress_module
from isobatch.packer.progress import StageProgress
from support import ROOT, child_env
from support.builds.command import run_packer
from support.builds.packed import digests
from support.builds.raw_data import good_records, options, write_dataset
from support.cases import for_each

PAGE = (ROOT / "docs" / "reference" / "command_line.md").read_text("utf-8")
HOSTILE = 'a\x1b[31m\n{"event": "end", "status": 0}[bold]'
CAPS = ["--max-seq-len", 2048, "--max-vision", 60]


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *arguments: run_packer(capsys, monkeypatch, *arguments)


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "raw", good_records(tmp_path / "raw", 20))


def call(command, dataset, out):
    values = {name: options(dataset, out)[name] for name in ("dataset", "model", "tokenizer")}
    return [command, *(f"--{name}={value}" for name, value in values.items()), "--workers=1"]


def events_of(stderr):
    """The log's objects; each line must be one."""
    events = [json.loads(line) for line in stderr.splitlines()]
    known = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert {event["event"] for event in events} <= known
    assert [event["event"] for event in events].count("end") == 1
    assert events[-1]["event"] == "end"
    return events


def named(events, name):
    return [event for event in events if event["event"] == name]


def test_every_long_command_logs_stages_a_result_and_its_end(run, dataset, tmp_path):
    names = ("out", "other", "counts", "merged")
    out, other, counts, merged = (tmp_path / name for name in names)
    new = write_dataset(tmp_path / "new", good_records(tmp_path / "new", 30)[20:])
    apart = write_dataset(tmp_path / "apart", good_records(tmp_path / "apart", 50)[30:])
    ids = tmp_path / "ids.txt"
    ids.write_text("s3\n")
    calls = [
        [*call("build", dataset, out), f"--out={out}", *CAPS],
        [*call("count", dataset, counts), f"--out={counts}"],
        ["group", counts / "counts.parquet", "--out", tmp_path / "groups"],
        [*call("add", new, out), out],
        ["verify", out],
        ["report", out, other],
        ["merge", out, other, "--out", merged],
        ["remove", out, "--ids", ids],
    ]
    assert run(*call("build", apart, other), f"--out={other}", *CAPS)[0] == 0
    for arguments in calls:
        status, printed, said = run(*arguments, "--log", "json")
        events = events_of(said)
        assert status == events[-1]["status"] == 0, said
        begun, ended = ([e["stage"] for e in named(events, f"stage{x}")] for x in ("", "_end"))
        assert begun == ended, arguments[0]
        assert begun or arguments[0] == "report", arguments[0]
        assert printed, "standard output is for people as before"
        (result,) = named(events, "result")
        assert result["result"], arguments[0]


def test_the_result_is_that_of_json_and_nothing_else_changes(run, dataset, tmp_path):
    places = [tmp_path / name for name in ("plain", "logged")]
    run(*call("build", dataset, places[0]), f"--out={places[0]}")
    _, printed, said = run(
        *call("build", dataset, places[1]), f"--out={places[1]}", "--json", "--log", "json"
    )
    (result,) = named(events_of(said), "result")
    assert result["result"] == json.loads(printed)
    plain, logged = map(digests, places)
    assert plain.keys() == logged.keys()
    assert plain["groups.parquet"] == logged["groups.parquet"]


WRONG = [
    (["verify", "nowhere"], 1, "no such folder"),
    (["verify", "nowhere", "--wrong"], 2, "No such option"),
    (["count", "--dataset"], 2, "unexpected extra argument"),
    (["count", "--dataset", "demo", "--model", "tny"], 2, "did you mean tiny"),
    (["verify", HOSTILE], 1, "no such folder"),
]


@for_each(("arguments", "status", "words"), WRONG)
def test_what_is_wrong_is_an_event_before_the_end(arguments, status, words, run):
    ended, printed, said = run(*arguments, "--log", "json")
    events = events_of(said)
    assert [event["event"] for event in events[-2:]] == ["error", "end"]
    assert words in events[-2]["text"]
    assert (ended, events[-1]["status"], printed) == (status, status, "")


def test_an_unknown_kind_of_log_is_refused(run, tmp_path):
    status, _, said = run("verify", tmp_path, "--log", "xml")
    assert (status, said.strip()) == (2, "error: --log: give text or json")


def test_progress_is_told_with_what_is_done_and_left(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "EVENT_S", 0.0)
    console = SafeConsole(stderr=True)
    console.is_log = True
    with StageProgress(console).stage("count", 10) as stage:
        for _ in range(4):
            stage.count(3)
            stage.advance(2.5)
    console.print(f"[bold]note:[/] {HOSTILE}", markup=False)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = named(lines, "progress")
    assert [event["done"] for event in told][::2] == [3, 6, 9, 12]
    assert [event["completed"] for event in told][1::2] == [2.5, 5.0, 7.5, 10.0]
    assert all(event["total"] == 10 and event["unit"] == "samples" for event in told)
    assert all({"seconds", "seconds_left"} <= set(event) for event in told)
    assert lines[-1] == {"event": "note", "text": f"[bold]note:[/] {HOSTILE}"}


def test_an_interrupted_command_logs_that_it_was_stopped(dataset, tmp_path):
    script = (
        "import os, signal, sys; from isobatch.packer import build\n"
        "build.count_dataset = lambda *a, **k: os.kill(os.getpid(), signal.{name})\n"
        "from isobatch.packer.partitions import partition\n"
        "partition.count_dataset = build.count_dataset\n"
        "from isobatch.packer.cli import main; main()"
    )
    for name, status in (("SIGINT", 130), ("SIGTERM", 143)):
        arguments = [*call("build", dataset, tmp_path), f"--out={tmp_path / name}", "--log=json"]
        ran = subprocess.run(
            [sys.executable, "-c", script.replace("{name}", name), *map(str, arguments)],
            capture_output=True,
            text=True,
            env=child_env(),
            timeout=120,
            check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        events = events_of(ran.stderr)
        assert (ran.returncode, events[-1]["status"]) == (status, status)
        assert "run the same command again" in named(events, "error")[0]["text"]


def test_the_page_and_every_help_have_the_exit_statuses(capsys, monkeypatch):
    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert {int(status): meaning for status, meaning in table.items()} == EXIT_STATUSES
    monkeypatch.setenv("COLUMNS", "200")
    for program, main in (("isobatch", isobatch), ("engine", engine), ("packer", None)):
        if main is None:
            _, text, _ = run_packer(capsys, monkeypatch, "--help")
        else:
            monkeypatch.setattr(sys, "argv", [program, "--help"])
            main()
            text = capsys.readouterr().out
        words = " ".join(text.split())
        for status, meaning in EXIT_STATUSES.items():
            assert f"{status} {meaning}" in words, program


def test_a_log_is_a_log_on_a_terminal_too(dataset, tmp_path):
    master, slave = os.openpty()
    arguments = [*call("build", dataset, tmp_path), f"--out={tmp_path / 'out'}", "--log=json"]
    with subprocess.Popen(
        [sys.executable, "-m", "isobatch.packer", *map(str, arguments)],
        stderr=slave,
        stdout=subprocess.DEVNULL,
        env=child_env(),
    ) as process:
        os.close(slave)
        said = b""
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            said += part
    os.close(master)
    assert process.returncode == 0
    assert named(events_of(said.decode().replace("\r\n", "\n")), "stage")

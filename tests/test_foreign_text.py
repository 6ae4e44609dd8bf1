"""Foreign text never steers a terminal, looks like a line of ours, or becomes a page's markup."""

import json
import sys
import unicodedata

import pytest
from rich.text import Text

from isobatch.common.consoles import SafeConsole
from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.cli import main as engine
from isobatch.loaders.online.loader import BalancedLoader
from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.builds.command import run_packer
from support.builds.raw_data import record, write_dataset, write_image

HOSTILE = "a\x1b[31m\x07\x9b2J\nerror: b\r\u202e\u2066[bold]c[/bold][/x]<b>&:smile:"
"""ESC, BEL, CSI in one character, a line, a return, marks of direction, markup of rich and HTML."""
PLAIN = ("[bold]c[", "<b>&:smile:")


def require_safe(said, mentions=True):
    """All but line breaks is printable, and no line is foreign."""
    hidden = [c for c in said if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"]
    assert not hidden, said
    assert not any(line.lstrip().startswith("error: b") for line in said.splitlines()), said
    if mentions:
        joined = "".join(said.split())
        assert r"a\x1b[31m\x07\x9b2J\n" in joined, said
        assert all(text in joined for text in PLAIN), said


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *arguments: run_packer(capsys, monkeypatch, *arguments)


@pytest.fixture
def hostile(tmp_path):
    """A dataset of samples, keys, images and a source with such names, and where it is."""
    folder = tmp_path / HOSTILE.replace("/", "-")
    rows = [record(number, [f"{HOSTILE.replace('/', '-')}.png"]) for number in range(4)]
    write_image(folder / rows[0]["image"], 40, 30, 0)
    for row in rows:
        row |= {"id": f"{HOSTILE}{row['id']}", HOSTILE: HOSTILE}
    rows.append(record(9, [f"{HOSTILE}not there.png"], text="What?"))
    rows[-1]["id"] = HOSTILE
    return write_dataset(folder, rows)


def arguments(dataset, out):
    options = {"dataset": dataset, "out": out, "model": "tiny", "workers": 1, "max-rejected": 0.5}
    options |= {"tokenizer": demo_tokenizer_path()}
    return ["build", *(f"--{name}={value}" for name, value in options.items())]


def test_a_build_shows_foreign_names_as_they_are_written(run, hostile, tmp_path):
    out = tmp_path / f"out {HOSTILE.replace('/', '-')}"
    config = ["--keep-columns", HOSTILE]
    for more in ([], config):
        status, said, errors = run(*arguments(hostile, out), *more, *(["--overwrite"] * bool(more)))
        assert status == 0, errors
        require_safe(said)
        require_safe(errors, mentions=False)
    for command in (["report"], ["verify"], ["inspect"], ["inspect", "--sample", HOSTILE + "s0"]):
        status, said, errors = run(command[0], out, *command[1:])
        assert status == 0, errors
        require_safe(said + errors, mentions=command[0] == "inspect")
    page = tmp_path / "page.html"
    assert run("inspect", out, "--html", page)[0] == 0
    for path in (page, out / "report.html"):
        text = path.read_text("utf-8")
        require_safe(text.replace("\n", " "), mentions=False)
        assert "<b>&:" not in text, path
    assert "&lt;b&gt;&amp;:smile:" in page.read_text("utf-8")
    next(iter((out / "shards").iterdir())).unlink()
    status, said, errors = run("verify", out)
    assert status == 1
    require_safe(said + errors, mentions=False)


@pytest.mark.parametrize(
    "command",
    [
        ["build", "--dataset", HOSTILE, "--out", "out"],
        ["build", "--dataset", "demo", "--out", "out", "--model", HOSTILE],
        ["build", "--dataset", "demo", "--out", "out", "--model", "tiny", "--tokenizer", HOSTILE],
        ["build", "--dataset", "demo", "--out", "out", "--grouping", HOSTILE],
        ["build", "--dataset", "demo", "--out", "out", "--config", HOSTILE],
        ["build", "--dataset", "demo", "--out", "out", "--seed", HOSTILE],
        ["build", f"--{HOSTILE}"],
        [HOSTILE],
        ["report", HOSTILE],
        ["verify", HOSTILE],
        ["verify", f"s3://{HOSTILE}"],
        ["inspect", HOSTILE],
        ["group", HOSTILE],
    ],
    ids=lambda command: " ".join("x" if HOSTILE in word else word for word in command),
)
def test_an_error_of_a_foreign_name_is_one_line(run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, said = run(*command)
    assert status in (1, 2)
    require_safe(said, mentions=False)
    assert len(said.splitlines()) == 1, said
    assert said.startswith("error: ")


def test_what_a_template_says_is_one_line(run, hostile, tmp_path):
    template = "{{ raise_exception(" + json.dumps(HOSTILE) + ") }}"
    status, said, errors = run(*arguments(hostile, tmp_path / "out"), "--chat-template", template)
    assert status in (1, 2)
    require_safe(said + errors)


def test_a_config_with_foreign_keys_and_values_is_refused_in_one_line(run, tmp_path):
    for number, text in enumerate((f"{json.dumps(HOSTILE)} = 1", f"model = {json.dumps(HOSTILE)}")):
        path = tmp_path / f"{number}.toml"
        path.write_text(text.replace("\\u009b", "\\u009B"), "utf-8")
        status, _, said = run("build", "--dataset", "demo", "--out", "x", "--config", path)
        assert status == 2, said
        require_safe(said, mentions=False)
        assert len(said.splitlines()) == 1


def test_the_engine_too(capsys, monkeypatch):
    for words in (["simulate", HOSTILE], ["plan", "--model", HOSTILE], ["plan", HOSTILE]):
        monkeypatch.setattr(sys, "argv", ["engine", *words])
        with pytest.raises(SystemExit):
            engine()
        said = capsys.readouterr().err
        require_safe(said, mentions=False)
        assert len(said.splitlines()) == 1, said


def test_errors_of_a_loader_are_safe_to_log(hostile, tmp_path):
    with pytest.raises((ConfigError, DataError)) as refused:
        BalancedLoader(str(hostile) + HOSTILE, model="tiny", tokenizer=str(demo_tokenizer_path()))
    require_safe(str(refused.value), mentions=False)
    loader = BalancedLoader(
        *(str(hostile),),
        **{"model": "tiny", "tokenizer": str(demo_tokenizer_path())},
        **{"dp_rank": 0, "dp_world_size": 1, "max_rejected": 0.0},
    )
    with pytest.raises(DataError) as refused:
        next(iter(loader))
    loader.close()
    require_safe(str(refused.value))


def test_a_console_shows_escapes_and_keeps_its_own_colours(capsys):
    console = SafeConsole(force_terminal=True, color_system="standard", width=200)
    console.print("[bold]b[/]", Text("\x1b]0;title\x9b"), ":smile:", highlight=False)
    said = capsys.readouterr().out
    assert r"\x1b]0;title\x9b :smile:" in said
    assert said.count("\x1b") == 2

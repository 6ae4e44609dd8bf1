"""Blocks of code in pages, and the commands in them as a shell reads them."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?!figures)[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHELL = """
record() { builtin printf '%s\\0' "$@" $'\\n' >> "$RECORD"; }
command_not_found_handle() { record "$@"; [ "$1" != sleep ]; }
source() { record source "$@"; }
PATH=/nowhere
"""
"""Makes a shell write its commands down instead of running them; `while sleep` ends."""


@dataclass(frozen=True)
class Block:
    """Code between fences."""

    page: str
    """Path from the repository's folder."""
    line: int
    mark: str
    """What the comment above it says: `file: NAME`, `program: NAME`, ..., or nothing."""
    language: str
    code: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"


def all_pages() -> list[Path]:
    """README, CONTRIBUTING and docs."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text("utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(
            name,
            text.count("\n", 0, found.start("code")),
            found["mark"] or "",
            found["language"],
            found["code"],
        )
        for found in BLOCK.finditer(text)
    ]


def commands_of(code: str, folder: Path, environment: dict[str, str]) -> list[list[str]]:
    """The commands that a shell would run, as lists of words; variables of `environment` are set,
    and those that the code exports are added to it.
    """
    record = folder / "commands"
    record.unlink(missing_ok=True)
    ends = folder / "environment"
    # programs of an environment that the page makes are found without its folder
    code = code.replace(".venv/bin/", "")
    script = f"{SHELL}\n{code}\nwait\ndeclare -px > {ends}"
    bash = ["/bin/bash", "-c", script]
    variables = {**environment, "RECORD": str(record)}
    done = subprocess.run(
        bash, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"
    for name, value in re.findall(r'^declare -x (\w+)="(.*)"$', ends.read_text(), re.MULTILINE):
        if name not in {"RECORD", "OLDPWD", "PWD", "SHLVL", "PATH"}:
            environment[name] = value
    words = record.read_text().split("\0") if record.exists() else []
    commands: list[list[str]] = [[]]
    for word in words[:-1]:
        if word == "\n":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands[:-1]

"""Lists every measured figure in README and docs with the command that makes it.

    python scripts/list_figures.py [--quiet] [PAGE ...]

A line for each table, listing and paragraph with figures. Exit status 1 if one has no command, or
a command names a script, a heading or an option that does not exist. Figures are numbers with a
unit of time, memory or speed, percentages and ratios, and tables with columns of numbers.

A command covers the section that it is in, where it is

- in code within the text, and runs a script: `python benchmarks/order.py --speed`;
- at the beginning of a listing: a line `$ packer report packed/`;
- or in a comment:  <!-- figures: packer report packed/ -->

Directly below a heading, a comment or a line that begins with "Made by" covers all of its
subsections as well; directly above a table or in a paragraph, a comment covers only that. Figures
that are quoted need no command: link the heading under docs/results that they are from, in the same
table or paragraph. In place of a command a comment may have such a heading, or the reason why
nothing measured the figures:

    <!-- figures: docs/results/packing.md#caps -->
    <!-- figures: given, limits that the formats set -->

Commands are separated by semicolons.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"(#+) (.*)")
COMMENT = re.compile(r"<!-- figures: (.*?) -->", flags=re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*\)")
QUOTED = re.compile(r"\]\(([^)\s]*results/\w+\.md#[^)\s]+)\)")
SCRIPT = re.compile(r"python (?:benchmarks|scripts|examples)/\w+\.py\b")
NUMBER = r"(?<![\w.,-])(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
UNIT = (
    r"(?:%|x\b(?!\s*\d)|times\b|[mun]?s\b|seconds?\b|minutes?\b|hours?\b|[KMGT]i?B\b"
    r"|[KMGT]?FLOP|\w+/s\b|(?:CPU|GPU) (?:s|seconds|hours|days)\b)"
)
MEASURED = re.compile(rf"{NUMBER}\s?{UNIT}")
PLAIN = re.compile(r"[+-]?(?:\d{3,}|\d[\d,]*[.,]\d+|\.\d+)(?: ± [\d.]+)?")
"""A cell that is a number; numbers of one or two digits may be anything."""
GIVEN = "given"


@dataclass(kw_only=True)
class Block:
    """Lines between blank ones: a table, a listing, or a paragraph."""

    line: int
    """Of the page, from 1."""
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its lines, with comments."""
        return "\n".join(self.lines)

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        if self.lines[0].startswith("```"):
            return "listing"
        return "table" if any(line.startswith("|") for line in self.lines) else "text"

    @property
    def own_sources(self) -> list[str]:
        """What a comment in it says that its figures are from."""
        return [part for found in COMMENT.findall(self.text) for part in split_sources(found)]

    @property
    def commands(self) -> list[str]:
        """Commands in it that cover its section."""
        if self.kind == "listing":
            return [line.removeprefix("$ ") for line in self.lines if line.startswith("$ ")]
        found = (" ".join(code.split()) for code in CODE.findall(self.text))
        return [code for code in found if SCRIPT.match(code)]

    @property
    def figures(self) -> list[str]:
        """The measured numbers in it, as they are written."""
        if self.kind == "listing":
            return [line for line in self.lines if not line.startswith(("```", "$"))] * bool(
                self.commands
            )
        if self.kind == "table":
            rows = [line for line in self.lines if line.startswith("|")][2:]
            return [cell for row in rows for cell in cells(row) if is_measured(cell)]
        return [" ".join(found.group().split()) for found in MEASURED.finditer(prose(self.text))]


@dataclass(kw_only=True)
class Section:
    """A heading and what is below it, up to the next one."""

    page: Path
    title: str
    parent: Section | None
    level: int
    blocks: list[Block] = field(default_factory=list)

    @property
    def inherited(self) -> list[str]:
        """Sources that cover its subsections as well."""
        own: list[str] = []
        if self.blocks:
            first = self.blocks[0]
            if is_only_comment(first):
                own = first.own_sources
            elif first.text.startswith("Made by"):
                own = first.commands
        return own or (self.parent.inherited if self.parent else [])

    @property
    def sources(self) -> list[str]:
        """Commands and other sources of the figures in it."""
        own = [command for block in self.blocks for command in block.commands]
        own += [
            part for block in self.blocks if is_only_comment(block) for part in block.own_sources
        ]
        return list(dict.fromkeys(own)) or self.inherited


def main() -> int:
    """Print all figures; -> 1 if one has no command or a command is wrong."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", type=Path, nargs="*", help="default: README.md and docs")
    parser.add_argument("--quiet", action="store_true", help="only what is wrong")
    args = parser.parse_args()
    wrong: list[str] = []
    for page in [path.resolve() for path in args.pages] or all_pages():
        for place, block, sources in covered(page):
            if not args.quiet:
                print(f"{place}: {describe(block)}\n    {'; '.join(sources) or '-'}")
        wrong += faults(page)
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    return 1 if wrong else 0


def all_pages() -> list[Path]:
    """README and docs; the changelog tells what was."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def faults(page: Path) -> list[str]:
    """One line for each block of figures without a source, and for each source that is wrong."""
    found = []
    for place, block, sources in covered(page):
        if not sources:
            found.append(
                f"{place}: {describe(block)}: no command makes these figures; name it in the "
                "section, or write <!-- figures: ... --> above them (--help tells how)"
            )
        found += [f"{place}: {error}" for source in sources if (error := fault_of(source))]
    return list(dict.fromkeys(found))


def covered(page: Path) -> Iterator[tuple[str, Block, list[str]]]:
    """(place, block, sources) of each block with figures."""
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    for section in read_sections(page):
        for block in section.blocks:
            if block.figures:
                own = block.own_sources + quoted(page, block)
                yield f"{name}:{block.line}", block, own or section.sources


def quoted(page: Path, block: Block) -> list[str]:
    """Headings of results that a block links to."""
    links = dict.fromkeys(QUOTED.findall(block.text))
    return [os.path.relpath(page.parent / link, ROOT) for link in links]


def describe(block: Block) -> str:
    """What a block is and its first figures."""
    first = [figure.strip() for figure in block.figures[:3]]
    more = len(block.figures) - len(first)
    return f"{block.kind}: {', '.join(first)}" + (f" and {more} more" if more else "")


def read_sections(page: Path) -> list[Section]:
    """The sections of a Markdown page; the first one is what comes before any heading."""
    current = Section(page=page, title="", parent=None, level=0)
    sections, is_code, is_open = [current], False, False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        heading = None if is_code else HEADING.fullmatch(line)
        if heading:
            level, parent = len(heading[1]), current
            while parent.level >= level and parent.parent:
                parent = parent.parent
            current = Section(page=page, title=heading[2], parent=parent, level=level)
            sections.append(current)
        is_fence = line.startswith("```")
        if heading or (not line.strip() and not is_code):
            is_open = False
            continue
        if not is_open or (is_fence and not is_code):
            current.blocks.append(Block(line=number))
        current.blocks[-1].lines.append(line)
        is_code ^= is_fence
        is_open = not is_fence or is_code
    return sections


def is_only_comment(block: Block) -> bool:
    """Whether a block is a comment about figures and nothing else."""
    return bool(block.own_sources) and not COMMENT.sub("", block.text).strip()


def cells(row: str) -> list[str]:
    """The cells of a table's row, without emphasis and code."""
    return [cell.strip() for cell in prose(row).replace("*", "").strip("|").split("|")]


def is_measured(cell: str) -> bool:
    """Whether a cell of a table is a number, or has one with a unit in it."""
    return bool(PLAIN.fullmatch(cell) or MEASURED.search(cell))


def prose(text: str) -> str:
    """Text without comments, code, and where links lead."""
    return LINK.sub(r"\1", CODE.sub("", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)))


def split_sources(text: str) -> list[str]:
    """What a comment names: sources separated by semicolons; a reason is one, whatever is in it."""
    text = " ".join(text.split())
    return [text] if text.startswith(GIVEN) else [part.strip() for part in text.split(";")]


@cache
def fault_of(source: str) -> str | None:
    """What is wrong with a source of figures, if anything is."""
    if re.match(rf"{GIVEN}\b", source):
        return None if re.match(rf"{GIVEN}, \w+", source) else f"{source!r} has no reason"
    if "#" in source and source.partition("#")[0].endswith(".md"):
        return fault_of_heading(*source.split("#", 1))
    try:
        words = shlex.split(source)
    except ValueError as error:
        return f"{source!r}: {error}"
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
        path = ROOT / words[1]
        if not path.is_file():
            return f"{words[1]} does not exist ({source})"
        known = options_of_script(path)
    else:
        known = options_of_command(*words[: 2 if words[:1] == ["packer"] else 4])
        if known is None:
            return f"is no command of the project: {source}"
    unknown = sorted(options - known)
    return f"has no option {', '.join(unknown)}: {source}" if unknown else None


def fault_of_heading(name: str, anchor: str) -> str | None:
    """What is wrong with figures quoted from a heading, if anything is."""
    page = ROOT / name
    if not page.is_file():
        return f"{name} does not exist"
    for section in read_sections(page):
        if re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-") == anchor:
            return None if section.sources else f"{name}#{anchor} has no command"
    return f"{name} has no heading #{anchor}"


def options_of_script(path: Path) -> set[str]:
    """What begins with -- in a script's source and in that of the local modules it imports."""
    found, waiting, seen = {"--help"}, [path], set()
    while waiting:
        seen.add(current := waiting.pop())
        for node in ast.walk(ast.parse(current.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if node.value.startswith("--") else set()
            for module in imported(node):
                local = (path.parent / module.replace(".", "/")).with_suffix(".py")
                if local.is_file() and local not in seen:
                    waiting.append(local)
    return found


def imported(node: ast.AST) -> Sequence[str]:
    """Modules that a statement imports, or may."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@cache
def options_of_command(*words: str) -> set[str] | None:
    """Options in the help of `packer NAME` or `python -m engine NAME`; None if there is none."""
    if words[0] == "packer":
        words = ("python", "-m", *words)
    if words[:2] != ("python", "-m") or words[2:3] not in (("packer",), ("engine",)):
        return None
    done = subprocess.run(
        [sys.executable, *words[1:], "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return None if done.returncode else set(re.findall(r"--[a-z][\w-]*", done.stdout))


if __name__ == "__main__":
    sys.exit(main())

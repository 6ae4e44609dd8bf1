"""Writes docs/reference/file_tree.md: every file of the packages, with one phrase each.

    python scripts/list_files.py [--check]

The phrases are the first lines of the modules' docstrings. With `--check` nothing is written, and
the exit status is 1 if the page is not what it would be.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "file_tree.md"
PACKAGES = ("isobatch", "packer", "loaders", "engine")
HEAD = """# Every file

Made by `python scripts/list_files.py` from the first lines of the modules' docstrings. `_name.py`
serves exactly one other file.
"""
COLUMN = 30
"""Width of the names, indentation included."""


def main() -> int:
    """Write or check the page."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    text = make_page()
    if args.check:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/list_files.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def make_page() -> str:
    """The page as Markdown: a tree per package."""
    parts = [HEAD]
    for package in PACKAGES:
        lines = "\n".join(tree_lines(ROOT / package, 0))
        parts.append(f"```\n{lines}\n```\n")
    return "\n".join(parts)


def tree_lines(folder: Path, depth: int) -> Iterator[str]:
    """A line for the folder, for its files, then those of its folders."""
    indent = "  " * depth
    yield entry(f"{indent}{folder.name}/", first_line(folder / "__init__.py"))
    modules = sorted(folder.glob("*.py"), key=lambda path: path.name.lstrip("_"))
    for path in modules:
        if path.name != "__init__.py":
            yield entry(f"{indent}  {path.name}", first_line(path))
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").is_file():
            yield from tree_lines(path, depth + 1)


def entry(name: str, phrase: str) -> str:
    """A name and its phrase, in two columns."""
    return f"{name:<{COLUMN}} {phrase}"


def first_line(path: Path) -> str:
    """First line of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".")


if __name__ == "__main__":
    sys.exit(main())

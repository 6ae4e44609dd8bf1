"""Pages of the site that are made while it is built: a hook of mkdocs (`mkdocs.yml`).

- `reference/python/PACKAGE.md`: the public names of a package, by their docstrings.
- `reference/families/FAMILY.md`: what the tests found of a family of models.
- `changes.md` and `contributing.md`: the files at the top of the repository.
- `examples/NAME.md`: a program that a page links to.

Nothing of them is stored. Links of the other pages to what lies outside of `docs/` lead to them.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from list_families import family_pages

ROOT = Path(__file__).parents[1]
PACKAGES = ("isobatch", "loaders", "packer", "engine")
TOP = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
DOCTEST = re.compile(r"(?:^[ ]*>>>.*\n?(?:^[ ]*\S.*\n?)*)", re.MULTILINE)
FAMILY = re.compile(rf"^\| `({'|'.join(family_pages())})` \|", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
HEADS = {
    "isobatch": "What most programs need: `from isobatch import ...`.",
    "loaders": "Loading: `from isobatch.loaders import ...`, also as `loaders`.",
    "packer": "Packing: `from isobatch.packer import ...`, also as `packer`.",
    "engine": "Pipelines: `from isobatch.engine import ...`, also as `engine`.",
}


class Doctests(griffe.Extension):
    """Shows the examples in docstrings as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around what begins with `>>>`."""
        if obj.docstring:
            fenced = DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
            obj.docstring.value = fenced


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of `docs/`."""
    for name, text in made_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files of the repository lead to the pages that are made of them."""
    if page.file.src_uri == "reference/families.md":
        markdown = FAMILY.sub(r"| [`\1`](families/\1.md) |", markdown)
    return linked(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let links of notebooks lead to pages, as mkdocs does with those of Markdown."""
    if page.file.src_uri.endswith(".ipynb"):
        output = re.sub(r'href="([^":]+)\.md(["#])', r'href="\1.html\2', output)
    return output


def made_pages() -> dict[str, str]:
    """Path below `docs/` -> Markdown."""
    pages = {f"reference/python/{name}.md": text for name, text in python_pages().items()}
    pages |= {f"reference/families/{name}.md": text for name, text in family_pages().items()}
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text("utf-8")
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n```python\n{text}```\n"
    for name, target in TOP.items():
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
        pages[target] = text.replace("](CHANGELOG.md", "](changes.md")
    return pages


def python_pages() -> dict[str, str]:
    """Package -> Markdown with each public name once, where it is first found."""
    pages: dict[str, str] = {}
    seen: dict[str, str] = {}
    for package in PACKAGES:
        text = f"# Python: {package}\n\n{HEADS[package]}\n"
        for name, module in public_names(package).items():
            if name not in seen:
                text += f"\n::: {module}.{name}\n"
            seen.setdefault(name, package)
        elsewhere = [name for name in public_names(package) if seen[name] != package]
        if elsewhere:
            names = ", ".join(f"`{name}`" for name in elsewhere)
            text += f"\n## Also here\n\nDescribed under [isobatch](isobatch.md): {names}.\n"
        pages[package] = text
    return pages


def public_names(package: str) -> dict[str, str]:
    """Public name -> the module that defines it, sorted by name."""
    folder = ROOT / package
    body = ast.parse((folder / "__init__.py").read_text("utf-8")).body
    checked = [statement for node in body if isinstance(node, ast.If) for statement in node.body]
    found: dict[str, str] = {}
    for node in checked:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = node.module or ""
                top = module.removeprefix("isobatch.")
                found[alias.name] = public_names(top)[alias.name] if top in PACKAGES else module
    return dict(sorted(found.items()))


def linked(markdown: str, page: str) -> str:
    """The page with links out of `docs/` led to the pages that are made."""

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[1]))
        made = TOP.get(target)
        if target.startswith("examples/") and target.endswith(".py"):
            made = target.removesuffix(".py") + ".md"
        if made is None:
            return link[0]
        return f"]({posixpath.relpath(made, posixpath.dirname(page))}{link[2] or ''})"

    return LINK.sub(replace, markdown)

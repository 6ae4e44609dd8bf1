"""README and docs: links lead somewhere, made pages are current, prose fits 100 columns."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
NAMED_PAGE = re.compile(r"docs/[\w/]+\.md")


def test_links_lead_to_files_and_headings_that_exist():
    for page in PAGES:
        for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
            if link.startswith("https://"):
                continue
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.relative_to(ROOT)} links to {link}"
            if heading:
                assert heading in headings(target), f"{page.relative_to(ROOT)} links to {link}"


def headings(page):
    """Anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_pages_that_code_names_exist():
    for folder in ("balance", "shards", "packer", "loaders", "engine", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in NAMED_PAGE.findall(path.read_text("utf-8")):
                assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}"


def test_prose_fits_100_columns():
    for page in PAGES:
        is_code = False
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            is_code ^= line.startswith("```")
            # rows of tables cannot be wrapped, and the listing of files holds whole phrases
            if not line.startswith("|") and not (is_code and page.name == "file_tree.md"):
                assert len(line) <= 100, f"{page.relative_to(ROOT)}:{number} is {len(line)} wide"


def test_the_readme_fits_three_screens():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 108


def test_the_listing_of_files_is_current():
    spec = importlib.util.spec_from_file_location("list_files", ROOT / "scripts" / "list_files.py")
    listing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listing)
    assert listing.PAGE.read_text("utf-8") == listing.make_page(), (
        "run python scripts/list_files.py"
    )

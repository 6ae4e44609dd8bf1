"""The site: built without a warning, complete, asks no other host for anything, fits three widths.

The build runs the notebook, and ends with an error if a cell of it fails.
"""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support import ROOT, child_env
from support.browser import find_browser, open_browser

PROGRAM = find_browser()
WIDTHS = (420, 900, 1440)
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
"""Tags whose address a browser fetches by itself -> the attribute."""


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in LOADED and values.get(LOADED[tag]):
            self.loads.append(values[LOADED[tag]])


@pytest.fixture(scope="session")
def site(shared):
    """The built site."""
    return shared("site", build)


def build(folder):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=child_env(NO_MKDOCS_2_WARNING="1", NO_COLOR="1", XDG_CACHE_HOME=str(folder / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING -  " not in said, said


@pytest.fixture(scope="module")
def pages(site):
    """Path in the site -> page."""
    found = {path.relative_to(site): Page(path) for path in site.rglob("*.html")}
    del found[Path("404.html")]  # its addresses begin at a host's root
    return found


def test_every_page_of_docs_is_in_it_and_each_family_has_one(pages):
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.relative_to(ROOT / "docs").with_suffix(".html") in pages
    families = {path.stem for path in pages if path.parent.name == "families"}
    table = (ROOT / "docs" / "reference" / "families.md").read_text("utf-8")
    named = re.findall(r"^\| `(\w+)` \|", table.partition("## Refused")[0], re.MULTILINE)
    assert families == set(named)


def test_links_and_anchors_lead_somewhere(site, pages):
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "data", "mailto"), f"{path}: {link}"
                continue
            target = os.path.normpath(path.parent / unquote(parts.path)) if parts.path else path
            assert (site / target).exists(), f"{path}: {link}"
            if parts.fragment and Path(target) in pages:
                anchors = pages[Path(target)].anchors
                assert unquote(parts.fragment) in anchors, f"{path}: {link}"


def test_no_page_loads_from_another_host(site, pages):
    for path, page in pages.items():
        assert not [name for name in page.loads if urlsplit(name).netloc], path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text("utf-8")), (
            sheet
        )


def test_the_notebook_was_run(site):
    text = (site / "tutorials" / "first_batch.html").read_text("utf-8")
    assert re.search(r"tokens have a label", text)
    assert len(re.findall(r"\d+ samples, \d+ tokens", text)) == 4
    assert "data:image/png;base64" in text


def test_the_reference_has_every_public_name_with_what_it_is(site):
    for package in ("isobatch", "loaders", "packer", "engine"):
        text = (site / "reference" / "python" / f"{package}.html").read_text("utf-8")
        body = (ROOT / package / "__init__.py").read_text("utf-8")
        for name in re.findall(r"import \(?\s*\w+ as (\w+)", body):
            assert re.search(rf'id="[\w.]+\.{name}"|<code>{name}</code>', text), name


@pytest.mark.skipif(PROGRAM is None, reason="no browser: python scripts/get_browser.py")
def test_pages_fit_and_ask_nobody(site, tmp_path):
    names = ("index", "tutorials/pack", "results/packing", "tutorials/first_batch")
    with open_browser(PROGRAM, tmp_path) as page:
        for name in names:
            for width in WIDTHS:
                page.open(site / f"{name}.html", width=width)
                seen = page.measure()
                assert seen["page_width"] <= width, f"{name} at {width}"
                assert all(image["natural"] for image in seen["images"]), name
                asked = page.requests()
                assert all(url.startswith("file:") for url in asked), asked

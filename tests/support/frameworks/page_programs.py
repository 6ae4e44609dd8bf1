"""Programs and files of a page in docs/load/trainers."""

import re

from support import ROOT


def program(page, name):
    """The Python code under the mark `<!-- program: NAME -->` of a page."""
    return re.search(rf"<!-- program: {name} -->\n```python\n(.*?)```", _text(page), re.DOTALL)[1]


def json_block(page):
    """The first JSON of a page."""
    return re.search(r"```json\n(.*?)```", _text(page), re.DOTALL)[1]


def yaml_block(page):
    """The first YAML of a page."""
    return re.search(r"```yaml\n(.*?)```", _text(page), re.DOTALL)[1]


def _text(page):
    return (ROOT / "docs" / "load" / "trainers" / f"{page}.md").read_text("utf-8")

"""Every block of code in README and docs is run by a test, or at least read by the real parser."""

import ast
import importlib
import importlib.util
import json
import sys
import tomllib
from collections import Counter
from functools import cache

import click
import pytest
import typer.main
import yaml

import isobatch
from isobatch.cli import COMMANDS
from isobatch.engine.cli import app as engine_app
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.online.config import PackingConfig
from isobatch.packer.cli import app as packer_app
from support import ROOT
from support.pages.blocks import all_pages, blocks_of, commands_of
from support.pages.runners import (
    BUCKET_FRAGMENTS,
    OTHERS,
    PAGE_COMMANDS,
    PAGE_FILES,
    PAGE_FRAGMENTS,
    PAGE_PROGRAMS,
    RUN_BY_MARK,
    RUN_BY_PAGE,
)

PARSED = {
    "CONTRIBUTING.md": 1,
    "README.md": 1,
    "docs/install.md": 1,
    "docs/load/from_a_bucket.md": 3,
    "docs/load/packed.md": 1,
    "docs/load/trainers/verl.md": 1,
    "docs/load/without_a_build.md": 1,
    "docs/pack.md": 1,
    "docs/results/gpu.md": 1,
    "docs/train.md": 8,
    "docs/tutorials/from_a_bucket.md": 2,
    "docs/tutorials/pipeline.md": 1,
}
"""Page -> blocks that are only parsed: parts of programs, and what needs a GPU, a cluster, an
account or the network."""
APPS = {"packer": packer_app, "engine": engine_app}
FOREIGN = {
    *("aws", "az", "date", "gcloud", "mv", "pip", "python3", "renew", "sleep", "source", "kubectl"),
    *("head", "scontrol", "srun"),
    *("hf", "llamafactory-cli", "swift", "pre-commit"),
}
"""Commands of others."""
BEGINS = {
    **dict.fromkeys((*PAGE_COMMANDS, *PAGE_PROGRAMS), "tests/docs/test_pages.py"),
    **dict.fromkeys(
        (*PAGE_FRAGMENTS, *PAGE_FILES, *BUCKET_FRAGMENTS), "tests/docs/test_fragments.py"
    ),
    **OTHERS,
}


def code_blocks():
    """Blocks in a language; those without are what programs print."""
    return [block for page in all_pages() for block in blocks_of(page) if block.language]


def runner_of(block):
    """The test that runs a block, if one does."""
    if block.page == "README.md" and block.language == "python":
        return "tests/loaders/integrations/test_user_loops.py"
    for mark, runner in RUN_BY_MARK.items():
        if block.mark.startswith(mark):
            return runner
    for (page, begin), runner in BEGINS.items():
        if block.page == page and block.code.startswith(begin):
            return runner
    return None if block.mark else RUN_BY_PAGE.get(block.page)


def test_blocks_that_no_test_runs_are_counted():
    """A new block that is not run must be added here, so that somebody asks why."""
    parsed = Counter(block.page for block in code_blocks() if not runner_of(block))
    assert dict(sorted(parsed.items())) == PARSED


def test_what_runs_blocks_exists_and_names_them():
    for mark, runner in RUN_BY_MARK.items():
        assert mark.partition(": ")[0].split()[0] in (ROOT / runner).read_text("utf-8"), mark
        assert any(block.mark.startswith(mark) for block in code_blocks()), mark
    for page, runner in RUN_BY_PAGE.items():
        name = page.rpartition("/")[2].removesuffix(".md")
        assert name in (ROOT / runner).read_text("utf-8"), page


def test_commands_are_taken_by_the_programs_that_they_name(tmp_path):
    for block in code_blocks():
        if block.language != "bash":
            continue
        commands = commands_of(block.code, tmp_path, {"MODEL": "model", "BUCKET": "s3://bucket"})
        assert commands or block.code.lstrip().startswith(("export", "#")), block.place
        for words in commands:
            check_command(words, block.place)


def check_command(words, place):
    """Let the real parser read a command of ours; what it is given need not be there."""
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") if "-m" in words else 3 :]]
    if words[0] == "isobatch":
        package, name, _ = COMMANDS[words[1]]
        words = ["python", "-m", package, name, *words[2:]]
    if words[0] == "packer":
        words = ["python", "-m", *words]
    if words[0] != "python":
        assert words[0] in FOREIGN, f"{place}: which program is {words[0]}?"
    elif words[1] == "-m" and words[2] in APPS:
        parse(APPS[words[2]], words[3:], place)
    elif (ROOT / words[1]).is_file():
        assert not figures().fault_of(" ".join(words)), place
    else:
        assert words[1] in files_of(place), f"{place}: no block is to be saved as {words[1]}"


def parse(app, words, place):
    """Read the words as the program does; it is not run."""
    group = typer.main.get_command(app)
    assert words[0] in group.commands, f"{place}: no command {words[0]}"
    try:
        group.commands[words[0]].make_context(words[0], words[1:])
    except click.ClickException as error:
        pytest.fail(f"{place}: {' '.join(words)}: {error.format_message()}")


def files_of(place):
    """Names under which a page says to save its blocks."""
    page = ROOT / place.partition(":")[0]
    marks = [block.mark for block in blocks_of(page)]
    return {mark.removeprefix("file: ") for mark in marks if mark.startswith("file: ")}


@cache
def figures():
    """`scripts/list_figures.py`, which knows the options of our scripts."""
    path = ROOT / "scripts" / "list_figures.py"
    spec = importlib.util.spec_from_file_location("list_figures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_python_is_correct_and_uses_names_and_options_that_exist():
    """What it imports of ours is there, and loaders take the keywords that it gives them."""
    keywords = {
        "StreamingLoader": {*LoaderConfig.__annotations__, "config"},
        "BalancedLoader": {*LoaderConfig.__annotations__, *PackingConfig.__annotations__, "model"},
        "StorageOptions": set(isobatch.StorageOptions.__annotations__),
    }
    for block in code_blocks():
        if block.language != "python":
            continue
        # parts of functions
        tree = ast.parse(block.code, block.place)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
                for alias in node.names:
                    assert has(node.module, alias.name), f"{block.place}: no {alias.name}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                taken = keywords.get(node.func.id)
                wrong = {word.arg for word in node.keywords if word.arg} - (taken or set())
                assert taken is None or not wrong, f"{block.place}: {node.func.id} takes no {wrong}"


def is_ours(module):
    return module.partition(".")[0] in ("isobatch", "loaders", "packer", "engine")


def has(module, name):
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:  # of another trainer, which is not installed here
        return not is_ours(error.name or "isobatch")


def test_settings_are_what_their_formats_allow():
    read = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}
    for block in code_blocks():
        if block.language in read:
            assert read[block.language](block.code), block.place
    assert {block.language for block in code_blocks()} == {"bash", "python", *read}


def test_the_home_page_has_the_program_of_the_readme():
    """Which is run, word for word."""
    (home,) = (block for block in code_blocks() if block.mark == "as in README.md")
    programs = [block.code for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    assert programs == [home.code]


def test_nobody_is_told_to_install_it_from_an_index():
    """It is on none yet."""
    for page in all_pages():
        for words in ("pip install isobatch", "pip install 'isobatch", 'pip install "isobatch'):
            assert words not in page.read_text("utf-8"), page

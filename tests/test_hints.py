"""Hints in errors, warnings and help name options that exist."""

import ast
import re

from typer.main import get_command

from isobatch.cli import app as isobatch_app
from isobatch.engine.cli import app as engine_app
from isobatch.engine.train.cli import make_app
from isobatch.packer.cli import app as packer_app
from support import ROOT

PACKAGES = ("isobatch", "packer", "loaders", "engine")
OF_OTHERS = {
    "attn_implementation",
    "dataloader_num_workers",
    "dataset_config",
    "drop_last",
    "gradient_accumulation_steps",
    "multiprocessing_context",
    "num_workers",
    "cp_size",
    "packing_format",
    # of SQLite's addresses
    "immutable",
    # of HTML and SVG
    "charset",
    "class",
    "lang",
}
"""Keywords of torch, transformers, Accelerate and other trainers in hints; no options of ours."""
NO_OPTION = {"--thumbnail", "--repo-type", "--local-dir"}
"""A property of a style sheet, and options of the program `hf`."""
SETTINGS_OF_TRAINERS = ROOT / "engine" / "planning" / "trainers" / "settings.py"
"""Options of other trainers, which their own parsers read in tests of plans."""


def trees():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))


def texts(tree):
    """Texts that a program may say: all but those that stand alone, as docstrings do."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in alone:
            yield node.lineno, node.value


def command_options(command):
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for sub in getattr(command, "commands", {}).values():
        names |= command_options(sub)
    return names


def test_options_of_commands_are_there():
    apps = map(get_command, (isobatch_app, packer_app, engine_app, make_app()))
    known = set().union(*map(command_options, apps)) | {"--help", "--version"} | NO_OPTION
    unknown = [
        f"{path}:{line}: {option}"
        for path, tree in trees()
        if ROOT / path != SETTINGS_OF_TRAINERS
        for line, text in texts(tree)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
        if option not in known
    ]
    assert not unknown


def test_keywords_are_those_of_some_function_or_config():
    modules = list(trees())
    known = set(OF_OTHERS)
    for _, tree in modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
    unknown = [
        f"{path}:{line}: {keyword}="
        for path, tree in modules
        for line, text in texts(tree)
        for keyword in re.findall(r"(?<![\w.-])([a-z_]{3,})=(?!=)", text)
        if keyword not in known
    ]
    assert not unknown

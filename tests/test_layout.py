"""The tree explains itself: names, sizes and first lines of all modules, by rule."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter

from support import ROOT

PACKAGES = ("isobatch", "packer", "loaders", "engine")
CODE = (*PACKAGES, "tests", "benchmarks", "examples", "scripts")
MOST_LINES = 75_000
"""Of the product. Shorten before you raise it, and say in the commit what the lines are for."""
MOST_COLUMNS, MOST_FIRST_LINE, MOST_SIBLINGS = 100, 80, 12
PRAGMA = re.compile(r"  # (noqa|type: ignore).*")
SINGLE_IMPORTERS = 0.2
"""Share of modules that may have one importer only, but for those marked by `_`."""


def files(*roots):
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


@cache
def trees():
    """Module name -> (path, syntax tree) of the product."""
    found = {}
    for path in files(*PACKAGES):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        name = name if name.startswith("isobatch") else f"isobatch.{name}"
        found[name] = path, ast.parse(path.read_text("utf-8"))
    return found


def named(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def test_the_product_is_no_longer_than_promised():
    lines = sum(len(path.read_text("utf-8").splitlines()) for path, _ in trees().values())
    assert lines <= MOST_LINES


def test_no_imports_go_in_a_circle():
    """Nor those for types alone, or within functions."""
    TopologicalSorter({name: imports_of(tree) for name, (_, tree) in trees().items()}).prepare()


def test_no_line_is_too_wide():
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files(*CODE)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(PRAGMA.sub("", line)) > MOST_COLUMNS
    ]
    assert not wide


def test_every_module_says_in_its_first_line_what_it_is():
    for path, tree in trees().values():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert first, path
        assert first.endswith((".", ":")), f"{path}: an entry of one line, not {first!r}"
        assert len(first) <= MOST_FIRST_LINE, f"{path}: {first!r}"
        assert "TODO" not in first, path


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path, tree in trees().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: named(paths) for name, paths in places.items() if len(paths) > 1} == {}


def test_a_module_that_serves_one_other_is_marked():
    importers = defaultdict(set)
    for name, (_, tree) in trees().items():
        for imported in imports_of(tree):
            importers[imported].add(name)
    modules = [name for name, (path, _) in trees().items() if not path.name.startswith("__")]
    single = [
        name
        for name in modules
        if len(importers[name] - {name}) == 1 and not name.rpartition(".")[2].startswith("_")
    ]
    assert len(single) < SINGLE_IMPORTERS * len(modules), single


def imports_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # of a package's names, those that are modules are meant, else the package
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & trees().keys()
            yield from inner or {node.module}


def test_no_folder_has_more_than_a_dozen_modules():
    folders = defaultdict(list)
    for path in files(*PACKAGES, "tests"):
        if not path.name.startswith("__"):
            folders[path.parent].append(path.name)
    crowded = {str(key.relative_to(ROOT)): len(names) for key, names in folders.items()}
    assert {key: count for key, count in crowded.items() if count > MOST_SIBLINGS} == {}

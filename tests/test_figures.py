"""Every measured figure in README and docs names the command that makes it, and commands exist."""

import importlib.util
import sys

import pytest

from support import ROOT
from support.cases import for_each


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location(
        "list_figures", ROOT / "scripts" / "list_figures.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def faults(figures, tmp_path):
    def of(*lines):
        page = tmp_path / "page.md"
        page.write_text("\n".join(lines), "utf-8")
        return figures.faults(page)

    return of


MEASURED = [
    "It takes 3.5 s on one core.",
    "Ranks wait 20 % of the time.",
    "Packing is 2.5x as fast.",
    "Peak memory is 1,938 MB.",
    "| a | b |\n|---|--:|\n| x | 0.237 |",
    "| a | b |\n|---|--:|\n| x | 2,186 |",
]
COMMAND = "`python benchmarks/order.py --speed`"


def test_every_figure_of_readme_and_docs_has_a_command_that_exists(figures):
    found = [fault for page in figures.all_pages() for fault in figures.faults(page)]
    assert not found, "\n".join(found)


def test_a_figure_without_a_command_is_told_with_its_line(faults):
    for text in MEASURED:
        (fault,) = faults("# Page", "", text)
        assert "page.md:3: " in fault
        assert "no command makes these figures" in fault
        assert not faults("# Page", "", text, "", f"{COMMAND} prints it.")


def test_numbers_that_are_no_measurements_need_no_command(faults):
    assert not faults(
        "# Version 0.2.76 of 2026",
        "",
        "A tile of 14 x 14 pixels is 1,025 tokens; `--memory-gib 0.06` is an option, .999 a value.",
        "",
        "| exit status | meaning |",
        "|--:|---|",
        "| 2 | the call is wrong |",
        "",
        "```",
        "sleep 10 s",
        "```",
    )


def test_a_command_covers_its_section_only(faults):
    one, other = ["## One", "", COMMAND, "", "It takes 3 s."], ["## Two", "", "It takes 4 s."]
    (fault,) = faults("# Page", "", COMMAND, "", *one, "", *other)
    assert "page.md:13: text: 4 s" in fault


def test_a_comment_or_made_by_below_a_heading_covers_what_is_below_it(faults):
    text = ["## Part", "", "It takes 4 s."]
    for first in (f"Made by {COMMAND}.", "<!-- figures: python benchmarks/order.py -->"):
        assert not faults("# Page", "", first, "", *text)


def test_a_comment_above_a_table_covers_only_the_table(faults):
    comment = "<!-- figures: given, sizes of the\n     format -->"
    assert not faults("# Page", "", comment, MEASURED[-1])
    assert len(faults("# Page", "", comment, MEASURED[-1], "", MEASURED[0])) == 1


def test_a_link_to_results_covers_the_figures_quoted_next_to_it(figures):
    readme = ROOT / "README.md"
    (sources,) = {tuple(sources) for _, block, sources in figures.covered(readme)}
    assert "docs/results/packing.md#balance" in sources


def test_what_a_listing_shows_needs_its_command_in_it(faults):
    assert not faults("# Page", "", "```", "$ packer report packed --dp 8", "it took 3 s", "```")
    (fault,) = faults("# Page", "", "```", "$ packer guess packed", "it took 3 s", "```")
    assert "is no command of the project" in fault


@for_each(
    ("source", "error"),
    [
        ("python benchmarks/nothing.py", "benchmarks/nothing.py does not exist"),
        ("python benchmarks/order.py --sped", "has no option --sped"),
        ("python benchmarks/order.py; packer report --no-such", "has no option --no-such"),
        ("python -m engine guess", "is no command of the project"),
        ("measured by hand", "is no command of the project"),
        ("docs/no-such.md#results", "docs/no-such.md does not exist"),
        ("docs/results/packing.md#nothing", "has no heading #nothing"),
        ("docs/design.md#vocabulary", "docs/design.md#vocabulary has no command"),
        ("given", "has no reason"),
    ],
)
def test_a_source_that_does_not_exist_is_told(faults, source, error):
    (fault,) = faults("# Page", "", f"<!-- figures: {source} -->", "It takes 3 s.")
    assert error in fault


def test_the_list_has_each_figure_and_its_command(figures, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["list_figures.py"])
    assert figures.main() == 0
    listed = capsys.readouterr().out
    assert "docs/results/packing.md" in listed
    assert "    python benchmarks/caps.py ai2d.json chartqa.json\n" in listed

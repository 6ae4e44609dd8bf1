"""Writes docs/reference/families.md: which models are exact, use a processor, or are refused.

    python scripts/list_families.py [--check]

The numbers are those that the tests recorded in tests/data/family_results.json:

    export ISOBATCH_RECORD_FAMILIES=1 ISOBATCH_TEST_DRAWS=500
    python -m pytest tests/packer/test_model_folder.py  # and the others that call `record`

The site has a page of each family too, made when it is built (`family_pages`). With `--check`
nothing is written, and the exit status is 1 if the page is not what it would be.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from isobatch.models.image_rules import VISION_RULES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "families.md"
RESULTS = ROOT / "tests" / "data" / "family_results.json"
HEAD = """# Families of models

Made by `python scripts/list_families.py` from what the tests found with transformers {version}. A
family is the `model_type` of a `config.json` ([presets](presets.md#a-folder-or-a-hub-id)).

## Exact: rules of our own

Numbers of random cases, all of which agreed with transformers: *sizes* of images, counted as the
family's processor does; *samples* of up to four images and three answers, whose ids and labels
(so the places of images too) are those of its processor and chat template; *packs*, whose loss and
gradients are those of each sample alone within 1e-5 (tiny random models, float32); and *layers*,
packs of the same in the engine's layers, and *ranks*, in a pipeline of two ranks.

| family | rule | sizes | samples | packs | layers | ranks |
|---|---|--:|--:|--:|--:|--:|
"""
AFTER = """
{notes}

{pixels}

## Through their processor

Rule [`processor`](presets.md#other-families-rule-processor): *sizes* as above, of random images;
*samples*, whose ids and pixels are its processor's; *packs* as above, with `model_inputs`. Others
that transformers has may work: each is tried before anything is packed.

| family | sizes | samples | packs |
|---|--:|--:|--:|
"""
REFUSED = """
## Refused, with one line

| family | why |
|---|---|
| `mllama`, `idefics` | cross attention: images take no tokens of the sequence |
"""
NOTES = {
    "glm4v_moe": "`glm4v_moe` and `glm46v` pack as `glm4v` does",
    "paligemma": "`paligemma` has no chat template to compare samples by",
    "minicpmv4_6": "`minicpmv4_6`'s processor does not count; its samples are compared",
}
"""Why a family lacks a number."""

FAMILY = """# Family {name}

{what}

| compared with transformers {version} | random cases, all equal |
|---|--:|
{rows}

```bash
packer build --dataset data.json --data-root images/ \\
    --model path/to/folder --out packed/
```

`path/to/folder` is a folder of a model whose `config.json` has `"model_type": "{name}"`, or its Hub
id. Without a build it is `BalancedLoader(dataset, model="path/to/folder")`.

{engine}

All families, and what each row of the table compares: [families of models](../families.md).
What `model_inputs` makes for each: [models](../../load/models.md#families).
"""
"""A page of one family."""
ROWS = {
    "sizes": "sizes of images, counted",
    "samples": "samples of up to four images and three answers: ids, labels, places of images",
    "packs": "packs: loss and gradients of each sample alone",
    "layers": "packs in the engine's layers",
    "ranks": "packs in a pipeline of two ranks",
}


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
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/list_families.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def results() -> dict[str, Any]:
    """What the tests recorded: kind -> family -> number."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def make_page() -> str:
    """The page as Markdown."""
    found = results()
    families = sorted(set(found["sizes"]) | set(found["samples"]))
    text = HEAD.format(version=found["transformers"])
    for name in families:
        numbers = [found[kind].get(name) for kind in ("sizes", "samples", "packs")]
        numbers += [found[kind].get(name) for kind in ("layers", "ranks")]
        text += _row(
            f"`{name}`", f"`{found['rule'][name]}`" if name in found["rule"] else "", *numbers
        )
    notes = f"{'; '.join(NOTES.values())}. The engine takes the families with *ranks*."
    text += AFTER.format(notes=fill(notes, 100), pixels=fill(_pixels(found["pixels"]), 100))
    for name in sorted(found["processor_sizes"]):
        kinds = ("processor_sizes", "processor_samples", "processor_packs")
        text += _row(f"`{name}`", *(found[kind].get(name) for kind in kinds))
    text += REFUSED
    for name, why in sorted(found["refused"].items()):
        text += _row(f"`{name}`", why)
    return text


def _pixels(found: dict[str, int]) -> str:
    """How many images were compared; the least, so that it holds for all."""
    numbers = f"{min(found.values()):,} random images of each of {', '.join(sorted(found))}"
    return f"Exact pixels (`exact_resize`) are the image processors' for {numbers}."


def _row(*cells: str | int | None) -> str:
    texts = [
        "-" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in cells
    ]
    return f"| {' | '.join(texts)} |\n"


def family_pages() -> dict[str, str]:
    """Family -> its own page as Markdown, for the site."""
    found = results()
    pages = {}
    for name in sorted(set(found["sizes"]) | set(found["samples"])):
        rule = found["rule"][name]
        first = (VISION_RULES[rule].__doc__ or "").partition("\n")[0]
        sentence = re.sub(
            r"^[A-Z][\w.-]*( \d)?: ", "", first
        )  # the family that the rule is named by
        what = f"Exact, by a rule of our own, `{rule}`. {sentence[0].upper()}{sentence[1:]}"
        pages[name] = _family_page(name, what, {kind: found[kind].get(name) for kind in ROWS})
    for name in sorted(found["processor_sizes"]):
        what = "Through the model's own processor of transformers (`pip install transformers`)."
        numbers = {kind: found.get(f"processor_{kind}", {}).get(name) for kind in ROWS}
        pages[name] = _family_page(name, what, numbers)
    return pages


def _family_page(name: str, what: str, numbers: dict[str, int | None]) -> str:
    rows = "".join(_row(ROWS[kind], number) for kind, number in numbers.items() if number)
    engine = (
        "`python -m engine train` takes this family as a pipeline too."
        if numbers["ranks"]
        else "`python -m engine train` does not take this family."
    )
    version = results()["transformers"]
    return FAMILY.format(name=name, what=what, version=version, rows=rows.rstrip(), engine=engine)


if __name__ == "__main__":
    sys.exit(main())

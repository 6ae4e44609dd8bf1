"""How many random cases of each family agreed with transformers: docs/reference/families.md.

`ISOBATCH_RECORD_FAMILIES=1 ISOBATCH_TEST_DRAWS=500 pytest ...` keeps what the tests found.
"""

import json
import os

import transformers

from support import TESTS

RESULTS = TESTS / "data" / "family_results.json"


def record(kind: str, name: str, value: int | str) -> None:
    """Keep what was found of a family, if that is asked for: it changes a file of the repository.

    One test run at a time.
    """
    if "ISOBATCH_RECORD_FAMILIES" not in os.environ:
        return
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found["transformers"] = transformers.__version__
    found.setdefault(kind, {})[name] = value
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")

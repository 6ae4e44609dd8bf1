"""Many cases in one test: `for_each` runs it on all of them and names the one that fails."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from support import TESTS

RESULTS = TESTS / "data" / "family_results.json"


def for_each(
    names: str | tuple[str, ...], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Any]:
    """Run the test on all cases, one after another; a failure says which case it was.

    Takes its arguments as `pytest.mark.parametrize` does. Use that where fixtures must be fresh.
    """
    arguments = [names] if isinstance(names, str) else list(names)
    rows = [(case,) if isinstance(names, str) else case for case in cases]
    if not rows:
        raise ValueError(f"no cases of {arguments}")

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for row in rows:
                chosen = dict(zip(arguments, row, strict=True))
                try:
                    test(**chosen, **fixtures)
                except BaseException as error:
                    error.add_note(", ".join(f"{name}={chosen[name]!r:.200}" for name in arguments))
                    raise

        signature = inspect.signature(test)
        left = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def draws(few: int) -> range:
    """Seeds of random cases: so few, or as many as `ISOBATCH_TEST_DRAWS` asks for."""
    return range(int(os.environ.get("ISOBATCH_TEST_DRAWS", few)))


def record(kind: str, name: str, value: int | str) -> None:
    """Keep what was found of a family, if that is asked for (`ISOBATCH_RECORD_FAMILIES`).

    For docs/reference/families.md (`scripts/list_families.py`). One test run at a time.
    """
    if "ISOBATCH_RECORD_FAMILIES" not in os.environ:
        return
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found["transformers"] = version("transformers")
    found.setdefault(kind, {})[name] = value
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")

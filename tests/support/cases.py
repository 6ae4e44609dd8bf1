"""Many cases in one test: `for_each` runs it on all of them and names the one that fails."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


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

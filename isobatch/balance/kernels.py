"""How numba compiles our functions: `kernel`, `free_kernel` and `inner`.

Machine code goes to numba's cache: NUMBA_CACHE_DIR, next to the source, or the user's cache folder,
whichever can be written. Where none can, or it is full, kernels are compiled in every process.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import numba


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function, with the options of `numba.njit`, and cache it if there is a place."""
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written
        return numba.njit(**options)(function)
    cache = compiled._cache
    save = cache.save_overload

    @wraps(save)
    def save_if_possible(*args: Any) -> None:
        with suppress(OSError):  # the folder is full, or cannot be written any more
            save(*args)

    cache.save_overload = save_if_possible
    return compiled


free_kernel = partial(kernel, nogil=True)
"""A kernel that lets other threads run."""

_WITHOUT_DOOR: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Any = numba.njit(**_WITHOUT_DOOR)
"""A function that only kernels call: it is cached with them, and no door for Python is compiled."""
inlined: Any = numba.njit(**_WITHOUT_DOOR, forceinline=True)
"""The same for innermost loops, where a call would be a third of the time."""


@inner
def copy_into(target, values):  # type: ignore[no-untyped-def]
    """For kernels: `target[:] = values` takes numba a second to compile."""
    for at in range(len(values)):
        target[at] = values[at]


@inner
def fill(target, value):  # type: ignore[no-untyped-def]
    """For kernels, as `copy_into`: `target[:] = value`."""
    for at in range(len(target)):
        target[at] = value


def load_compiler() -> None:
    """Load what the first kernel of a process needs, which takes .2 s, unless it is there."""
    numba.core.registry.cpu_target.typing_context.refresh()
    numba.core.registry.cpu_target.target_context.refresh()


def has_cache(kernels: Iterable[Any]) -> bool:
    """Whether there is a place for the machine code of all."""
    return all(compiled.stats.cache_path is not None for compiled in kernels)


def are_compiled(kernels: Iterable[Any]) -> bool:
    """Whether all have machine code, in this process or in the cache."""
    return all(
        compiled.signatures
        or (compiled.stats.cache_path and compiled._cache._cache_file._load_index())
        for compiled in kernels
    )

"""One result made ahead of its use, in a thread: `Background`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Background(Generic[Made]):
    """Calls a function of a number ahead of time; `get` waits for it, and raises what it raised.

    The interpreter waits for the thread at exit, so nothing long should be made here. A forked
    process has no thread of its parent's, so it makes its own result.
    """

    def __init__(self, make: Callable[[int], Made]) -> None:
        self._make = make
        self._started: _Call[Made] | None = None

    def start(self, number: int) -> None:
        """Begin to make the result for `number`, unless that is under way."""
        if self._started is None or not self._started.serves(number):
            self._started = _Call(self._make, number)
            self._started.thread.start()

    def get(self, number: int) -> Made:
        """The result for `number`: the one begun, or one made now in the caller's thread."""
        started, self._started = self._started, None
        if started is None or not started.serves(number):
            return self._make(number)
        started.thread.join()
        if started.error is not None:
            raise started.error
        return started.made[0]


class _Call(Generic[Made]):
    def __init__(self, make: Callable[[int], Made], number: int) -> None:
        self._make, self._number, self._pid = make, number, os.getpid()
        self.made: list[Made] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"isobatch-epoch-{number}")

    def serves(self, number: int) -> bool:
        return number == self._number and os.getpid() == self._pid

    def _run(self) -> None:
        try:
            self.made.append(self._make(self._number))
        except BaseException as error:
            self.error = error

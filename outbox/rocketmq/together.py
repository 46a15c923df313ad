"""Calls that go together: the first thread runs them for all that wait meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class _Waiting(Generic[T, R]):
    """A call that waits. `results`: its result as the only item, once it is there."""

    item: T
    results: Sequence[R] = ()


class Together(Generic[T, R]):
    """Runs a function for the items of many calls at once; any thread may call."""

    def __init__(self, run: Callable[[Sequence[T]], Sequence[R]]) -> None:
        """`run`: returns one result for each item, in order; one run at a time."""
        self._run = run
        self._turn, self._waiting = threading.Lock(), deque[_Waiting[T, R]]()

    def call(self, item: T) -> R:
        """Return the result for an item. What a run raises is raised by one call; the others run anew."""
        call = _Waiting[T, R](item)
        self._waiting.append(call)
        with self._turn:
            if not call.results:
                # Calls that come meanwhile stay. This call is not among them if the run of another call has failed.
                some = list(dict.fromkeys([*(self._waiting.popleft() for _ in range(len(self._waiting))), call]))
                for each, result in zip(some, self._run([each.item for each in some]), strict=True):
                    each.results = (result,)
        return call.results[0]

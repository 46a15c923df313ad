"""Hooks for a forked child, where objects have to begin anew: a fork copies locks in any state, and no threads."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

#: What to call, by a number: a function; or a method, as a weak reference to its object, and the function of its class.
_calls: dict[int, tuple[Callable[[], object], Callable[..., None]]] = {}


def in_child(call: Callable[[], None]) -> None:
    """Call a function at once in every child that is forked from now on; a method, only while its object lives."""
    if not inspect.ismethod(call):
        _calls[id(call)] = (lambda: True, lambda _: call())
        return
    reference = weakref.ref(call.__self__, partial(_forget, _calls))
    _calls[id(reference)] = (reference, call.__func__)


def _forget(calls: dict[int, Any], reference: object, id: Callable[[object], int] = id) -> None:
    # When an interpreter ends, a module's names are gone before the last objects are. Arguments stay.
    calls.pop(id(reference), None)


def _after_fork() -> None:
    for reference, call in list(_calls.values()):
        found = reference()
        if found is not None:
            with suppress(Exception):
                call(found)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""Hooks for a forked child, where objects have to begin anew: a fork copies locks in any state, and no threads."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

#: References to the functions to call; those to methods end with their objects.
_calls: set[Callable[[], Callable[[], None] | None]] = set()


def in_child(call: Callable[[], None]) -> None:
    """Call this at once in every child that is forked from now on; a method, only as long as its object lives."""
    _calls.add(weakref.WeakMethod(call, _calls.discard) if inspect.ismethod(call) else lambda: call)


def _after_fork() -> None:
    for reference in list(_calls):
        call = reference()
        if call is not None:
            with suppress(Exception):
                call()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

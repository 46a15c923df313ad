"""The garbage collector of a process of the library's own."""

from __future__ import annotations

import atexit
import gc

#: The modules of a command are about so many objects, and no garbage.
_OF_MODULES = 100_000


def begin_command() -> None:
    """Collect rarely while a command loads modules, and not at the end of the process, which frees all memory anyhow.

    Otherwise collections take a third of the time of a short command.
    """
    gc.set_threshold(_OF_MODULES, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)


def collect_rarely(objects: int) -> None:
    """Exclude all present objects from garbage collections, and collect only after so many more are alive.

    Reference counting frees messages when their batch is settled. Collections in between look through thousands of
    messages, find nothing, and take a fifth of a relay's time. Reference cycles, as of exceptions, are still collected.
    A relay or a consumer in another process leaves the collector alone: the collector belongs to the application.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(objects, *gc.get_threshold()[1:])

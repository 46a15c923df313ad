"""The garbage collector of a process that does nothing but relay."""

from __future__ import annotations

import gc

#: More than the batches hold that are under way: as long as messages come and go, nothing is looked through.
_NEW_OBJECTS = 100_000


def collect_rarely() -> None:
    """Leave out of collections what is loaded by now, and collect only when many new objects stay.

    Messages come by the thousand and go when their batch is settled, without any collection; those that would look
    through them meanwhile take a fifth of the relay's time. What really is garbage in circles, a traceback of the
    sender's say, is collected still. Only for a process of our own: an application's collector is the application's.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])

"""Python's garbage collector in the process of `outbox relay`."""

from __future__ import annotations

import gc

#: The batches under way hold fewer objects than this, so that messages alone never start a collection.
_NEW_OBJECTS = 100_000


def collect_rarely() -> None:
    """Exclude all present objects from collections, and collect only after 100 000 more have been made and not freed.

    Reference counting frees messages when their batch is settled. Collections in between look through thousands of
    messages, find nothing, and take a fifth of the relay's time. Reference cycles, such as those of a sender's
    exceptions, are still collected. An embedded relay does not call this: the collector belongs to the application.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])

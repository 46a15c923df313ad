"""The slots: shares of the key space. Each partition of a subscription owns some of them."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

#: The number of slots, unless the tables are made with another.
SLOTS = 256


def slot_of(key: str | None, slots: int) -> int:
    """Return the slot that `key` hashes to, by the first 8 bytes of its BLAKE2b; random for None."""
    return random.randrange(slots) if key is None else _slot_of_key(key, slots)


# Cached, because the messages of one transaction often have the same key.
@lru_cache(maxsize=1024)
def _slot_of_key(key: str, slots: int) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode()).digest()[:8]) % slots

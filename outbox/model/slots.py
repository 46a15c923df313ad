"""The slots: shares of the key space. Each partition of a subscription owns some of them."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

#: The number of slots, unless the tables are made with another.
SLOTS = 256


def slot_of(key: str | None, slots: int) -> int:
    """Return the slot that `key` hashes to, by the first 4 bytes of its SHA-256; random for None."""
    return random.randrange(slots) if key is None else _slot_of_key(key, slots)


# SHA-256, because PostgreSQL and every language have it, and write the same slots.
# Cached, because the messages of one transaction often have the same key.
@lru_cache(maxsize=1024)
def _slot_of_key(key: str, slots: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % slots

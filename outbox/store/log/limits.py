"""The limits of a read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a read returns: rows, and bytes of bodies (twice as many while large bodies are fetched)."""

    rows: int = 1000
    bytes: int = 8 * 1024 * 1024

    @property
    def inline(self) -> int:
        """The size up to which a body comes with the row: `rows` + 1 such bodies cannot exceed `bytes`."""
        return self.bytes // (self.rows + 1)


LIMITS = Limits()

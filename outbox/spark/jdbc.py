"""Predicates for Spark's JDBC reader. Without them its partitions would show the log at different moments."""

from __future__ import annotations

from outbox.errors import OptionError
from outbox.model.position import EARLIEST, Position, Window
from outbox.spark.offset import Mark
from outbox.store.log import extraction


def jdbc_predicates(since: str | Position | None, until: str | Position, n: int, *, halves: bool = False) -> list[str]:
    """Return `n` conditions for `spark.read.jdbc(url, "outbox_message", predicates=…)` on PostgreSQL.

    Each message that was committed after `since` (None: from the beginning) and not after `until` fulfils exactly one
    of them. So every partition may be read in a transaction of its own. Set `fetchsize`, else the driver loads all rows
    at once.

    Args:
        since: a position; see `outbox.spark.position`.
        until: a position that was captured on the primary before the read.
        n: how many partitions.
        halves: also the half messages of transactions.

    Raises:
        OptionError: `n` is less than 1.
    """
    if n < 1:
        raise OptionError(f"n: must be at least 1, not {n}")
    base = EARLIEST if since is None else _position(since)
    return extraction.predicates(Window(base, _position(until)), n, halves=halves)


def _position(given: str | Position) -> Position:
    return given if isinstance(given, Position) else Mark.parse(given).position

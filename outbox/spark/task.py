"""A task: rows that one executor reads, and how. It is pickled, so it holds no connection and no secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outbox.model.position import Window
from outbox.spark.place import Place
from outbox.store.log.extraction import Extraction
from outbox.store.log.stamp import Server

Fetch = Literal["auto", "adbc", "psycopg", "sqlite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How rows are fetched.

    `batch_bytes`: about how large a record batch is. `prefetch`: how many of them are read ahead. `retries`: how often
    in a row a connection may break without a new row.
    """

    fetch: Fetch = "auto"
    batch_bytes: int = 4 * 1024 * 1024
    prefetch: int = 0
    retries: int = 5


USUAL = Manner()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows to read in one go, in the order of their key.

    `server`: the one that the rows are of; another one draws the same numbers for other rows. `whole`: the window none
    of whose rows may be purged until the task is done; None: nothing is checked. `replayed`: how far a standby has to
    have replayed its primary's log before it shows the rows.
    """

    place: Place
    server: Server
    extraction: Extraction
    manner: Manner = USUAL
    whole: Window | None = None
    replayed: str | None = None

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
    """The way in which rows are fetched.

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
    """Rows that one executor reads, in the order of their key.

    `server`: the server of the rows; another one has the same numbers for other rows. `whole`: no row of this window
    may be purged until the task is done; None: nothing is checked. `replayed`: a standby must have replayed its
    primary's log up to here before the task reads its rows.
    """

    place: Place
    server: Server
    extraction: Extraction
    manner: Manner = USUAL
    whole: Window | None = None
    replayed: str | None = None

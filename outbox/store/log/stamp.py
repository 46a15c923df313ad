"""Stamps: positions that may leave the database, because no crash of the server can make them wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.errors import DatabaseError
from outbox.model.position import Position

if TYPE_CHECKING:
    # Capturing a position needs psycopg. Spark's tasks only carry one, and may run where psycopg is not installed.
    from outbox.store.database import Channel
    from outbox.store.dialects.dialect import WriteAheadLog

#: Seconds to wait until the server's log is on disk, and seconds after which the server is asked to write it.
_PATIENCE, _BY_ITSELF = 30.0, 0.25
#: How many times a position is captured, if the server is restarted each time.
_TRIES = 5
_PURGED = "SELECT purged FROM {meta}"
_SERVER = "SELECT i.system_identifier, i.database_oid, m.installation FROM ({identity}) AS i, {meta} AS m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server, database and log of a position; on another server the same numbers mean other rows.

    `system` and `timeline` are PostgreSQL's system identifier and timeline, `database` is the oid of the database;
    SQLite has none. `installation` was drawn with the tables of the outbox.
    """

    dialect: str
    system: str | None = None
    database: int | None = None
    timeline: str | None = None
    installation: str | None = None

    def unlike(self, before: Server) -> str:
        """Return the differences to an earlier server in words: `timeline 00000001 then, 00000002 now`."""
        named = {
            "kind of database": (before.dialect, self.dialect),
            "system identifier": (before.system, self.system),
            "oid of the database": (before.database, self.database),
            "timeline": (before.timeline, self.timeline),
            "installation of the outbox": (before.installation, self.installation),
        }
        return ", ".join(f"{name} {then} then, {now} now" for name, (then, now) in named.items() if then != now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A position and the server of the position."""

    position: Position
    server: Server


def stamp(channel: Channel, *, pause: Callable[[float], object] = time.sleep) -> Stamp:
    """Capture the position of now on the primary, and return the position once a crash cannot undo it.

    Ids that were drawn and not written to disk are drawn again after a crash, and the new rows would count as old.

    Raises:
        StandbyError: the server is a standby.
        DatabaseError: the server did not write its log to disk within 30 s, or was restarted again and again.
    """
    from outbox.store.log.log import Log

    log = Log()
    for _ in range(_TRIES):
        captured = log.now(channel)
        timeline, _ = written(channel, pause=pause)
        # A pooler may hide that the server has crashed in between, with what it had not written.
        if log.now(channel).incarnation == captured.incarnation:
            return Stamp(position=captured.position, server=_server(channel, timeline))
    raise DatabaseError(
        f"the server was restarted, or its statistics were reset, {_TRIES} times while its position was captured; if a"
        " pooler stands before several servers, connect to the primary itself"
    )


def server_of(channel: Channel) -> Server:
    """Return the server; the channel must lead to a primary."""
    wal = channel.database.dialect.home.wal
    return _server(channel, channel.rows(wal.end)[0][0] if wal else None)


def written(channel: Channel, *, pause: Callable[[float], object] = time.sleep) -> tuple[str | None, str | None]:
    """Wait until all changes so far are on disk; return the timeline, and the end of the server's log at the call.

    A database without such a log returns at once, with None twice.
    """
    wal = channel.database.dialect.home.wal
    if wal is None:
        return None, None
    timeline, lsn = channel.rows(wal.end)[0]
    _wait(channel, wal, lsn, pause)
    return timeline, lsn


def purged(channel: Channel) -> Position | None:
    """Return the position of all that purge has ever deleted; None: nothing."""
    from outbox.store.identity import first_row

    (text,) = first_row(channel, _PURGED)
    return None if text is None else Position.parse(text)


def _server(channel: Channel, timeline: str | None) -> Server:
    from outbox.store.identity import first_row

    dialect = channel.database.dialect
    system, oid, installation = first_row(channel, _SERVER)
    return Server(dialect=dialect.name, system=system, database=oid, timeline=timeline, installation=installation)


def _wait(channel: Channel, wal: WriteAheadLog, lsn: str, pause: Callable[[float], object]) -> None:
    waited, nap, asked = 0.0, 0.001, False
    while not channel.rows(wal.flushed, lsn=lsn)[0][0]:
        if waited > _PATIENCE:
            raise DatabaseError(f"the server did not write its log up to {lsn} to disk within {_PATIENCE:.0f} s")
        if waited > _BY_ITSELF and not asked:
            # The log of an open transaction may stay in memory for hours, until some transaction commits.
            channel.rows(wal.flush)
            asked = True
        pause(nap)
        waited, nap = waited + nap, min(2 * nap, 0.05)

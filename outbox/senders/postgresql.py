"""Another PostgreSQL, by psycopg: URL `postgresql://user:password@host:port/database?schema=shop&as=name&timeout=5`.

A message becomes a message of the outbox there, with the same id and fields, and relays there send it on. In the same
transaction its id is inserted into the inbox there, under the name of the option `as` (by default `outbox`). What is
in the inbox already is not written again, so a message that is sent twice is there once. The inbox remembers it for
7 days.

`created_at` is carried: it says when the message was written here. The tables there are made by `outbox db upgrade`,
and need the version of this library. `sslmode`, `sslrootcert`, `sslcert` and `sslkey` are those of libpq.

One call is one transaction, in one round trip where libpq has pipelines (version 14). It is `Done` when its COMMIT is
confirmed. If a single row is at fault, the call is halved until that row is alone: then it is rejected, or waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import timedelta
from math import ceil
from typing import Any
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.event_loop import BackgroundLoop
from outbox.runtime.text import one_line
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.foreign_log import BEGIN, COMMIT, LIMITS, ForeignLog, NotReadyError, Row, row_of
from outbox.senders.key_order import EARLIER
from outbox.senders.port import destination_of

_FORM = "postgresql://user:password@host:port/database"
_PORT = 5432
_TLS = ("sslmode", "sslrootcert", "sslcert", "sslkey")
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_CONSUMER = "outbox"
_LONGEST_CONSUMER = 255
#: What `outbox db upgrade --schema` takes, too.
_LONGEST_SCHEMA = 63

#: The most that one transaction holds; one larger body still goes alone.
_MOST_ROWS = 5_000
_MOST_BYTES = 16 * 1024 * 1024

#: The server gives up before we do, so that it can say why, and leaves nothing behind that still works for us.
_SERVERS_SHARE = 0.8
_LOCKS_SHARE = 0.7

_KEEPALIVE_SECONDS = 30

#: Messages of one transaction, each with its place in the call.
_Part = list[tuple[int, Row]]


class PostgresSender:
    """A sender that writes messages into the outbox of another database, each of them once.

    `send` may be called in any thread, also in several at once, and returns within `timeout` whatever the server does.
    The first call makes a connection. When something fails that is not one row's fault, the next call makes a new one.
    """

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.destination = destination_of(url)
        address = Address.of(url, form=_FORM, options=("schema", "as", "timeout", *_TLS))
        target = _Target(address)
        self._seconds = address.timeout(timeout)
        self.deadline = timedelta(seconds=self._seconds)
        self._loop = BackgroundLoop("outbox-postgresql", make=lambda: _Link(target), farewell=_Link.close)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Write the messages; return one verdict per message, in their order."""
        if not messages:
            return []
        # The loop itself keeps this earlier deadline; the rest is for a machine that is too busy to notice it in time.
        inside = self._seconds * 0.9
        try:
            return self._loop.run(lambda link: link.deliver(messages, inside), timeout=self._seconds)
        except TimeoutError:
            text = f"PostgreSQL: no answer within {self._seconds:g} s"
            return [Unavailable(text, everything=True)] * len(messages)

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._loop.stop()


class _Target:
    """The other database: how to connect to it, and the tables in it.

    Raises:
        SenderError: the URL does not say that, or says it wrongly.
    """

    def __init__(self, address: Address) -> None:
        if len(address.path) != 1:
            address.refuse(f"write one database behind the host, as in {_FORM}")
        if _has_nul(address):
            address.refuse("no part of it may hold %00")
        schema = address.options.get("schema")
        if schema is not None and not _is_plain(schema):
            address.refuse("schema must be of letters, digits and _")
        consumer = address.options.get("as", _CONSUMER)
        if not (consumer.isprintable() and 1 <= len(consumer) <= _LONGEST_CONSUMER):
            address.refuse(f"as must be 1 to {_LONGEST_CONSUMER} printable characters")
        if address.options.get("sslmode", "prefer") not in _SSL_MODES:
            address.refuse(f"sslmode must be one of {', '.join(_SSL_MODES)}")
        self.shown = address.shown
        self.log = ForeignLog(schema=schema, consumer=consumer)
        self._address = address
        self._host, self._port = address.only_host(_PORT)

    def conninfo(self, seconds: float) -> str:
        """Return the connection string of libpq, for a connection that has so many seconds to be made."""
        options = self._address.options
        return make_conninfo(
            host=self._host,
            port=self._port,
            dbname=self._address.path[0],
            user=self._address.user or None,
            password=self._address.password,
            application_name="outbox",
            client_encoding="UTF8",
            # The caller has a timer of its own; this replaces a shorter one of the environment.
            connect_timeout=max(2, ceil(seconds)),
            # Networks in between forget a connection on which nothing is said for minutes.
            keepalives_idle=_KEEPALIVE_SECONDS,
            sslmode=options.get("sslmode"),
            sslrootcert=options.get("sslrootcert"),
            sslcert=options.get("sslcert"),
            sslkey=options.get("sslkey"),
        )


def _has_nul(address: Address) -> bool:
    """Return whether a part holds what libpq takes for its end."""
    return "\0" in "".join((*address.path, address.user or "", address.password or "", *address.options.values()))


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isidentifier() and len(name) <= _LONGEST_SCHEMA


class _Link:
    """At most one connection, made when it is needed; calls take turns on it. Used in one event loop."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._turn = asyncio.Lock()
        self._connection: _Connection | None = None
        self._is_closed = False
        self._log = ConnectionLog(logging.getLogger(__name__), "PostgreSQL")

    async def deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        """Write a call's messages; what was not confirmed after `seconds` is `Unavailable`."""
        deadline = asyncio.get_running_loop().time() + seconds
        call = _Call(messages)
        try:
            async with self._taking_turn(deadline):
                connection = await self._connected(deadline)
                await connection.carry(call, deadline)
        except Exception as error:  # any program may listen at that port, and answer anything
            late = asyncio.get_running_loop().time() >= deadline
            reason = f"no answer within {seconds:g} s" if late else _text(error)
            call.give_up(self._lost(reason))
        return call.verdicts()

    async def close(self) -> None:
        """End the call that is under way and those that wait, and close the connection."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.cut()
        async with self._turn:
            await self._drop()

    @asynccontextmanager
    async def _taking_turn(self, deadline: float) -> AsyncIterator[None]:
        """Wait for other calls. A connection on which the block fails is never used again."""
        async with asyncio.timeout_at(deadline):
            await self._turn.acquire()
        try:
            yield
        except BaseException:
            await self._drop()
            raise
        finally:
            self._turn.release()

    async def _connected(self, deadline: float) -> _Connection:
        """Return the connection, or a new one in place of one that was lost since the last call."""
        if self._is_closed:
            raise ConnectionError
        if self._connection is not None and not self._connection.is_alive():
            await self._drop()
        if self._connection is None:
            self._connection = _Connection(self._target)
            await self._connection.open(deadline)
            self._log.connected(self._target.shown)
        return self._connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _lost(self, reason: str) -> str:
        """Log the reason, and return the text for verdicts."""
        if self._is_closed:
            return "PostgreSQL: the sender was closed"
        return self._log.lost(f"{self._target.shown}: {reason}")


class _Connection:
    """One connection. Once something fails that is not one row's fault, it is closed."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._driver: _Driver | None = None
        self._slots = 0
        self._connecting: asyncio.Timeout | None = None

    async def open(self, deadline: float) -> None:
        """Connect, and look if the tables there are as they have to be.

        Raises:
            NotReadyError: they are not.
        """
        seconds = deadline - asyncio.get_running_loop().time()
        async with asyncio.timeout_at(deadline) as self._connecting:
            # Statements that are prepared in one session are not there in the next one that a pooler gives us.
            self._driver = await _Driver.connect(
                self._target.conninfo(seconds), autocommit=True, prepare_threshold=None
            )
        await self._look(deadline)

    async def carry(self, call: _Call, deadline: float) -> None:
        """Write the messages of a call, in one transaction unless they are too many, or a row is at fault."""
        parts = deque(call.parts(self._slots))
        while parts:
            part = call.without_waiting(parts.popleft())
            if not part:
                continue
            try:
                await self._store([row for _, row in part], deadline)
            except psycopg.Error as error:
                verdict = _verdict_on_a_row(error)
                if verdict is None:
                    raise
                # Tables that were upgraded meanwhile may want something else of every row.
                await self._look(deadline)
                if len(part) == 1:
                    call.settle(part, verdict)
                else:
                    middle = len(part) // 2
                    parts.extendleft((part[middle:], part[:middle]))
            else:
                call.settle(part, DONE)

    def is_alive(self) -> bool:
        """Return whether the server has said nothing since the last call; what it says by itself is a farewell."""
        try:
            with self._socket() as peer:
                peer.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, psycopg.Error):
            return False
        return False

    def cut(self) -> None:
        """Make whatever waits for the server fail at once.

        psycopg's own way to interrupt a statement asks the server to cancel it, and waits for that.
        """
        if self._driver is not None:
            with suppress(OSError, psycopg.Error), self._socket() as peer:
                peer.shutdown(socket.SHUT_RDWR)
        elif self._connecting is not None:
            with suppress(RuntimeError):  # it has ended just now
                self._connecting.reschedule(0)

    async def close(self) -> None:
        """Close the socket."""
        if self._driver is not None:
            with suppress(psycopg.Error):
                await self._driver.close()

    async def _look(self, deadline: float) -> None:
        """Compare the tables there with what this version needs."""
        assert self._driver is not None
        log = self._target.log
        with self._cut_at(deadline):
            try:
                found = await (await self._driver.execute(log.look)).fetchone()
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
                raise log.missing() from None
        self._slots = log.checked_slots(found)

    def _socket(self) -> socket.socket:
        """Return a second handle on the socket, to be closed by the caller."""
        assert self._driver is not None
        peer = socket.socket(fileno=os.dup(self._driver.fileno()))
        peer.setblocking(False)
        return peer

    async def _store(self, rows: Sequence[Row], deadline: float) -> None:
        """Write rows in one transaction; when this returns, they are committed."""
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise TimeoutError
        limits = {
            "statement": f"{ceil(1000 * left * _SERVERS_SHARE)}",
            "lock": f"{ceil(1000 * left * _LOCKS_SHARE)}",
        }
        log = self._target.log
        with self._cut_at(deadline):
            committed = await self._transact(
                (BEGIN, None), (LIMITS, limits), (log.store, log.parameters(rows)), (COMMIT, None)
            )
        if committed != "COMMIT":
            raise psycopg.OperationalError(f"the server has answered COMMIT with {committed}")

    async def _transact(self, *commands: tuple[bytes, Mapping[str, Any] | None]) -> str | None:
        """Execute commands in one round trip, and return what the server says of the last one.

        Raises:
            psycopg.Error: the first error. The transaction is rolled back then.
        """
        assert self._driver is not None
        errors: list[psycopg.Error] = []
        # An error is kept until the end of the pipeline, because the driver logs what it would replace there.
        with _kept(errors):
            async with _one_round_trip(self._driver):
                with _kept(errors):
                    for command, parameters in commands:
                        cursor = await self._driver.execute(command, parameters)
        if errors:
            with suppress(psycopg.Error):
                await self._driver.rollback()
            raise errors[0]
        return cursor.statusmessage

    @contextmanager
    def _cut_at(self, deadline: float) -> Iterator[None]:
        timer = asyncio.get_running_loop().call_at(deadline, self.cut)
        try:
            yield
        finally:
            timer.cancel()


class _Driver(psycopg.AsyncConnection[TupleRow]):
    """psycopg's connection, which may be left open when its process ends."""

    def __del__(self, *_: object) -> None:
        # The driver would warn. The socket is closed with `pgconn`, in the process that has opened it.
        pass


class _Call:
    """One call of `send`: its messages, and the verdicts on them."""

    __slots__ = ("_messages", "_refused", "_verdicts")

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._verdicts: list[Verdict | None] = [None] * len(messages)
        #: By key, the place of its first message that is not `Done`.
        self._refused: dict[str, int] = {}

    def parts(self, slots: int) -> Iterator[_Part]:
        """Yield the messages in parts for one transaction each, and refuse those that no outbox can hold.

        An id is in a part once: the second message with the same id finds that of the first in the inbox.
        """
        part: _Part = []
        ids: set[UUID] = set()
        size = 0
        for place, message in enumerate(self._messages):
            try:
                row = row_of(message, slots)
            except InvalidMessageError as unfit:
                self._settle(place, Reject(str(unfit)))
                continue
            size += len(row.body)
            if part and (len(part) == _MOST_ROWS or size > _MOST_BYTES or row.message_id in ids):
                yield part
                part, ids, size = [], set(), len(row.body)
            part.append((place, row))
            ids.add(row.message_id)
        if part:
            yield part

    def without_waiting(self, part: _Part) -> _Part:
        """Return a part without the messages that stand behind one of their key that was refused."""
        if not self._refused:
            return part
        return [(place, row) for place, row in part if row.key is None or self._refused.get(row.key, place) >= place]

    def settle(self, part: _Part, verdict: Verdict) -> None:
        """Store the verdict on the messages of a part."""
        for place, _ in part:
            self._settle(place, verdict)

    def give_up(self, error: str) -> None:
        """Settle what has no verdict yet, because the destination is away."""
        verdict = Unavailable(error, everything=True)
        for place, found in enumerate(self._verdicts):
            if found is None:
                self._settle(place, verdict)

    def verdicts(self) -> list[Verdict]:
        """Return one verdict per message. What stands behind one of its key that was refused waits for that."""
        found: list[Verdict] = []
        for place, (message, verdict) in enumerate(zip(self._messages, self._verdicts, strict=True)):
            waits = message.key is not None and self._refused.get(message.key, place) < place
            # One that no outbox can hold is refused again when its turn comes.
            found.append(EARLIER if verdict is None or (waits and isinstance(verdict, Reject)) else verdict)
        return found

    def _settle(self, place: int, verdict: Verdict) -> None:
        self._verdicts[place] = verdict
        key = self._messages[place].key
        if verdict is not DONE and key is not None:
            self._refused[key] = min(place, self._refused.get(key, place))


def _one_round_trip(driver: _Driver) -> AbstractAsyncContextManager[Any]:
    """Send the commands of the block together; one by one where libpq is older than version 14."""
    return driver.pipeline() if psycopg.AsyncPipeline.is_supported() else nullcontext()


@contextmanager
def _kept(errors: list[psycopg.Error]) -> Iterator[None]:
    """Append the error of the block to a list."""
    try:
        yield
    except psycopg.Error as error:
        errors.append(error)


def _verdict_on_a_row(error: psycopg.Error) -> Verdict | None:
    """Return the verdict on the row that is alone in its transaction; None if no row is at fault.

    A value that the column cannot hold stays so, and a CHECK is there to refuse. Another constraint, or what a trigger
    raises, may look at other rows: that may pass.
    """
    text = f"PostgreSQL: {_text(error)}"
    if isinstance(error, psycopg.DataError | psycopg.errors.CheckViolation):
        return Reject(text)
    if isinstance(error, psycopg.IntegrityError | psycopg.errors.RaiseException):
        return Unavailable(text)
    return None


def _text(error: Exception) -> str:
    """Return what the server, the driver or the system said, without the values of a row."""
    if isinstance(error, NotReadyError):
        return str(error)
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return one_line(f"{error.diag.message_primary} ({error.sqlstate})")
    # libpq's own texts have several lines, and name host and port again before they come to the reason.
    first = str(error).strip().partition("\n")[0]
    return one_line(first.rpartition("failed: ")[2]) or type(error).__name__

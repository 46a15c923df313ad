"""Another PostgreSQL, by psycopg: URL `postgresql://user:password@host:port/database?schema=shop&as=name&timeout=5`.

A message becomes a message of the outbox there, with the same id and fields, and relays there send it on. The same
transaction inserts the id into the inbox there, under the name of the option `as` (by default `outbox`). An id that
the inbox has already is not written again, so a message that is sent twice is there once. The inbox remembers an id
for 7 days.

`created_at` is carried: the time when the message was written here. The tables there are made by `outbox db upgrade`,
and need the version of this library. `sslmode`, `sslrootcert`, `sslcert` and `sslkey` are those of libpq.

One call is one transaction, in one round trip where libpq has pipelines (version 14). It is `Done` when its COMMIT is
confirmed. If a single row is at fault, the call is halved until that row is alone: then it is rejected, or waits.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from math import ceil
from typing import Any
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from outbox.errors import InvalidMessageError
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.text import one_line
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.foreign_log import BEGIN, COMMIT, LIMITS, ForeignLog, Row, row_of
from outbox.senders.key_order import EARLIER, Chains
from outbox.senders.remote import Call, Connection, RemoteSender

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

#: Messages of one transaction, each with its place in the call; or one message that no outbox can hold.
_Part = list[tuple[int, Row | Reject]]


class PostgresSender(RemoteSender):
    """A sender that writes messages into the outbox of another database, each of them once."""

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        address = Address.of(url, form=_FORM, options=("schema", "as", "timeout", *_TLS))
        target = _Target(address)
        super().__init__(
            "PostgreSQL",
            url,
            (address.shown,),
            lambda server, log: _Connection(server, log, target),
            seconds=address.timeout(timeout),
            chains=partial(Chains, order="never"),
        )


class _Target:
    """The other database: the connection string, and the tables.

    Raises:
        SenderError: the URL is incomplete, or wrong.
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
        self.log = ForeignLog(schema=schema, consumer=consumer)
        self._address = address
        self._host, self._port = address.only_host(_PORT)

    def conninfo(self, seconds: float) -> str:
        """Return the connection string of libpq, for a connection made within so many seconds."""
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
    """Return whether a part holds the character that ends a text for libpq."""
    return "\0" in "".join((*address.path, address.user or "", address.password or "", *address.options.values()))


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isidentifier() and len(name) <= _LONGEST_SCHEMA


class _Connection(Connection):
    """One connection, on which calls take turns."""

    def __init__(self, server: str, log: ConnectionLog, target: _Target) -> None:
        super().__init__(server, log)
        self._target = target
        self._turn = asyncio.Lock()
        self._driver: _Driver | None = None
        self._slots = 0

    @property
    def is_lost(self) -> bool:
        return self.is_closed or not (self._turn.locked() or self._is_silent())

    async def open(self, deadline: float) -> None:
        """Connect, and compare the tables there; raise `NotReadyError` if the tables do not fit."""
        seconds = deadline - asyncio.get_running_loop().time()
        async with asyncio.timeout_at(deadline):
            # Statements that are prepared in one session are not there in the next one that a pooler gives us.
            self._driver = await _Driver.connect(
                self._target.conninfo(seconds), autocommit=True, prepare_threshold=None
            )
        await self._look(deadline)
        self.log.connected(self.server)

    async def carry(self, call: Call) -> None:
        """Write the messages of a call, in one transaction unless there are too many, or a row is at fault."""
        async with asyncio.timeout_at(call.deadline):
            await self._turn.acquire()
        try:
            if self.is_closed:
                raise ConnectionError("the connection was lost")
            await self._write(call)
        finally:
            self._turn.release()

    async def close(self) -> None:
        self.is_closed = True
        self._cut()
        if self._driver is not None:
            with suppress(psycopg.Error):
                await self._driver.close()

    def words(self, error: Exception) -> str:
        """Return the words of the server, the driver or the system, without the values of a row."""
        return _words(error)

    def _is_silent(self) -> bool:
        """Return whether the server has been silent since the last call. Unasked, servers only announce the end."""
        try:
            with self._socket() as peer:
                peer.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, psycopg.Error):
            return False
        return False

    def _cut(self) -> None:
        """Make everything that waits for the server fail at once.

        psycopg's own way to interrupt a statement asks the server to cancel it, and waits for that.
        """
        if self._driver is not None:
            with suppress(OSError, psycopg.Error), self._socket() as peer:
                peer.shutdown(socket.SHUT_RDWR)

    def _socket(self) -> socket.socket:
        """Return a second handle on the socket, to be closed by the caller."""
        assert self._driver is not None
        peer = socket.socket(fileno=os.dup(self._driver.fileno()))
        peer.setblocking(False)
        return peer

    @contextmanager
    def _cut_at(self, deadline: float) -> Iterator[None]:
        timer = asyncio.get_running_loop().call_at(deadline, self._cut)
        try:
            yield
        finally:
            timer.cancel()

    async def _look(self, deadline: float) -> None:
        """Compare the tables there with the needs of this version."""
        assert self._driver is not None
        log = self._target.log
        with self._cut_at(deadline):
            try:
                found = await (await self._driver.execute(log.look)).fetchone()
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
                raise log.missing() from None
        self._slots = log.checked_slots(found)

    async def _write(self, call: Call) -> None:
        parts = deque(_parts(call, self._slots))
        stopped: set[str | None] = set()
        while parts:
            part = parts.popleft()
            if stopped:
                for index in [index for index, _ in part if call.messages[index].key in stopped]:
                    call.chains.settle(index, EARLIER)
                part = [(index, row) for index, row in part if call.messages[index].key not in stopped]
            if not part:
                continue
            verdict = await self._verdict_on(part, call.deadline)
            if verdict is None:
                middle = len(part) // 2
                parts.extendleft((part[middle:], part[:middle]))
                continue
            for index, _ in part:
                call.chains.settle(index, verdict)
                if verdict is not DONE:
                    stopped |= {call.messages[index].key} - {None}

    async def _verdict_on(self, part: _Part, deadline: float) -> Verdict | None:
        """Write a part; return the verdict on the messages. None: one of several rows is at fault."""
        first = part[0][1]
        if isinstance(first, Reject):
            return first
        try:
            await self._store([row for _, row in part], deadline)  # type: ignore[misc]  # one that is refused is alone
        except psycopg.Error as error:
            verdict = _verdict_on_a_row(error)
            if verdict is None:
                raise
            # Tables that were upgraded meanwhile may want something else of every row.
            await self._look(deadline)
            return verdict if len(part) == 1 else None
        return DONE

    async def _store(self, rows: Sequence[Row], deadline: float) -> None:
        """Write and commit rows in one transaction."""
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
        """Execute commands in one round trip; return the status of the last, or roll back and raise the first error."""
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


class _Driver(psycopg.AsyncConnection[TupleRow]):
    """psycopg's connection, which may be left open when its process ends."""

    def __del__(self, *_: object) -> None:
        # The driver would warn. The socket is closed with `pgconn`, in the process that has opened it.
        pass


def _parts(call: Call, slots: int) -> Iterator[_Part]:
    """Yield the messages in parts for one transaction each; a message that no outbox can hold is alone, refused.

    An id is in a part once: the second message with the same id finds the first one in the inbox.
    """
    part: _Part = []
    ids: set[UUID] = set()
    size = 0
    while (index := call.chains.take()) is not None:
        try:
            row = row_of(call.messages[index], slots)
        except InvalidMessageError as unfit:
            if part:
                yield part
            yield [(index, Reject(str(unfit)))]
            part, ids, size = [], set(), 0
            continue
        size += len(row.body)
        if part and (len(part) == _MOST_ROWS or size > _MOST_BYTES or row.message_id in ids):
            yield part
            part, ids, size = [], set(), len(row.body)
        part.append((index, row))
        ids.add(row.message_id)
    if part:
        yield part


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
    """Return the verdict on a row alone in a transaction; None if no row is at fault.

    A value too large for a column, or against a CHECK, is refused for ever. Another constraint or a trigger may look at
    other rows, so that the refusal may pass.
    """
    text = f"PostgreSQL: {_words(error)}"
    if isinstance(error, psycopg.DataError | psycopg.errors.CheckViolation):
        return Reject(text)
    if isinstance(error, psycopg.IntegrityError | psycopg.errors.RaiseException):
        return Unavailable(text)
    return None


def _words(error: Exception) -> str:
    """Return the words of the server, the driver or the system, without the values of a row."""
    if not isinstance(error, psycopg.Error):
        return reason_of(error)
    if error.diag.message_primary:
        return one_line(f"{error.diag.message_primary} ({error.sqlstate})")
    # libpq's own texts have several lines, and name host and port again before they come to the reason.
    first = str(error).strip().partition("\n")[0]
    return one_line(first.rpartition("failed: ")[2]) or type(error).__name__

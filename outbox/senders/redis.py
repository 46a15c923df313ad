"""Redis or Valkey Streams, by redis-py: URL `redis://user:password@host:6379/0/prefix?timeout=5`; `rediss://` with TLS.

A topic is a stream. A number in the path is the database; a prefix stands before each topic, with a colon. A message is
`Done` when the server has answered its XADD. How durable it is then is a matter of the server's `appendfsync`; with
`wait=1` it also has to be on one replica.

Several messages of a key are appended in one transaction of the server, so none of them passes one that is refused. A
user who has no right to MULTI and EXEC sends the messages of a key one after the other, each after the answer to the
one before.

The fields of an entry have the names of `outbox.senders.headers`, and the body is in `Outbox-Body`. `read_message`
turns them back into a `Message`. A Redis from 8.6 on drops a second copy by its id; no entry is ever trimmed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple, cast

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.text import one_line
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.headers import read_headers, wire_headers
from outbox.senders.key_order import Chains, Order, send_again
from outbox.senders.port import destination_of

try:
    import hiredis
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.connection import DefaultParser
    from redis.exceptions import ExecAbortError, NoPermissionError, RedisError, ResponseError
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtraError("Redis needs an extra: pip install 'outbox-log[redis]'") from error

BODY = "Outbox-Body"

# Its own types know tuples of one element only.
_pack = cast("Callable[[tuple[str | bytes | int, ...]], bytes]", hiredis.pack_command)
_MULTI, _EXEC = _pack(("MULTI",)), _pack(("EXEC",))
#: The answer to XADD when the entry is stored.
_ENTRY_ID = re.compile(rb"[0-9]+-[0-9]+")

_MOST_UNDER_WAY = 1_000
_MOST_BYTES_UNDER_WAY = 8 * 1024 * 1024
_MOST_SHOWN = 200
#: The first version that drops a second copy.
_IDEMPOTENT = (8, 6)

#: The moment at which the call of this thread is over.
_end: ContextVar[float] = ContextVar("outbox_redis_end", default=float("inf"))


class RedisSender:
    """A sender that appends messages to streams, and the messages of a key in their order.

    `send` may be called in any thread, also in several at once, and returns before the deadline.
    """

    #: While one call waits for the server, another packs its commands.
    concurrency = 2

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.destination = destination_of(url)
        address = Address.of(url, form="redis://host:6379/0 or rediss://host:6379/0", options=("timeout", "wait", "ca"))
        host, port = address.only_host(6379)
        self._where = f"{address.scheme}://{host}:{port}"
        self._seconds = address.timeout(timeout)
        self.deadline = timedelta(seconds=self._seconds)
        self._replicas = _replicas_of(address)
        database, self._prefix = _database_and_prefix_of(address)
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": address.ca("rediss")}
        self._client = Redis(
            host=host,
            port=port,
            db=database,
            username=address.user or None,
            password=address.password,
            # A round of commands may begin until half of the time is over, and takes at most the other half.
            socket_timeout=self._seconds / 2,
            socket_connect_timeout=self._seconds / 4,
            # The relay tries again. A second try in here would hide that a message may be stored twice.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **(tls if address.scheme == "rediss" else {}),
        )
        # The client itself has no such argument.
        self._client.connection_pool.connection_kwargs["parser_class"] = _Parser
        self._log = ConnectionLog(logging.getLogger(__name__), "Redis")
        #: What was found out about the server; None: nothing yet, or the connection was lost since.
        self._server: _Server | None = None

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        now = time.monotonic()
        _end.set(now + self._seconds * 0.9)
        until = now + self._seconds / 2
        chains = _chains(messages, order="none")
        try:
            return self._deliver(messages, chains, until)
        except _AbortedError:
            verdicts = chains.verdicts()
            return send_again(messages, verdicts, lambda left: self._deliver(left, _chains(left), until))

    def _deliver(self, messages: Sequence[Message], chains: Chains, until: float) -> list[Verdict]:
        while chains.left:
            if time.monotonic() > until:
                chains.give_up(self._log.lost(f"{self._where}: not sent within {self._seconds / 2:g} s"))
                break
            try:
                self._append(messages, chains)
            except (RedisError, OSError) as error:
                self._server = None
                chains.give_up(self._log.lost(f"{self._where}: {reason_of(error)}"))
        return chains.verdicts()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _append(self, messages: Sequence[Message], chains: Chains) -> None:
        """Append the messages that may be sent now, in one round trip.

        Raises:
            _AbortedError: nothing was appended, because a message of a key with several messages cannot be.
            _UnexpectedAnswerError: nobody knows which messages were appended.
        """
        server = self._server or self._ask()  # another thread may forget it meanwhile
        if chains.overlap and not server.has_transactions:
            raise _AbortedError
        commands: list[bytes] = []
        appended: list[int] = []
        while (index := chains.take()) is not None:
            message = messages[index]
            try:
                if len(message.body) > server.largest:
                    raise ValueError(_too_large(message, server.largest))
                commands.append(_pack(self._command(message, server)))
                appended.append(index)
            except (InvalidMessageError, ValueError) as unfit:
                if chains.overlap:
                    raise _AbortedError from unfit
                chains.settle(index, Reject(f"Redis cannot carry it: {unfit}"))
        if not appended:
            return
        answers, short = self._appended(commands, atomic=chains.overlap)
        verdicts = [
            self._refused(answer, messages[index]) if isinstance(answer, Exception) else short or DONE
            for index, answer in zip(appended, answers, strict=True)
        ]
        for index, verdict in zip(appended, verdicts, strict=True):
            chains.settle(index, verdict)
        away = [verdict.error for verdict in verdicts if isinstance(verdict, Unavailable) and verdict.everything]
        if away:
            self._leave()
        if away and chains.overlap:
            # The next round might be taken, and with it messages of the same keys.
            chains.give_up(away[0])

    def _ask(self) -> _Server:
        server = self._server = _Server.ask(self._client, has_transactions=self._has_transactions())
        without = "" if server.has_transactions else ", without MULTI: the messages of a key wait for each other"
        self._log.connected(self._where + without)
        return server

    def _leave(self) -> None:
        """Close the connections that no call uses. Behind the address there may be another server by now, a primary."""
        self._server = None
        self._client.connection_pool.disconnect(inuse_connections=False)

    def _has_transactions(self) -> bool:
        """Return whether this user may begin and end a transaction."""
        try:
            with self._connection() as connection:
                _check_transaction(_answers(connection, [_MULTI, _EXEC]), 0)
        except _UnexpectedAnswerError:
            return False
        return True

    def _appended(self, commands: list[bytes], *, atomic: bool) -> tuple[list[Any], Verdict | None]:
        """Return the answers to commands, and the verdict when too few replicas have the entries.

        Each answer is the id of an entry, or the server's error. `atomic`: all commands are carried out, or none; only
        a stream of a wrong type refuses single commands.
        """
        wait = [wait_command(self._replicas, self._seconds)] if self._replicas else []
        with self._connection() as connection:
            answers = _answers(connection, [_MULTI, *commands, _EXEC, *wait] if atomic else commands + wait)
            short = self._short_of_replicas(answers.pop()) if self._replicas else None
            appended = _check_transaction(answers, len(commands)) if atomic else answers
            _check_appended(appended or ())
        if appended is None:
            raise _AbortedError
        return appended, short

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lend a connection. After a failure the connection is closed: late answers would count for other commands."""
        connection: Any = self._client.connection_pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._client.connection_pool.release(connection)

    def _command(self, message: Message, server: _Server) -> tuple[str | bytes, ...]:
        """Return the command that appends a message; raise if Redis cannot carry the message."""
        stream = f"{self._prefix}{message.topic}".encode()
        once = ("IDMP", "outbox", message.id_text) if server.is_idempotent else ()
        fields = chain.from_iterable(wire_headers(message).items())
        return ("XADD", stream, *once, "*", *fields, BODY, message.body)

    def _refused(self, answer: Exception, message: Message) -> Verdict:
        """Return the verdict for an error of the server."""
        text = str(answer)
        # All other errors are about the server, as one about its memory or about its role is.
        about_the_stream = isinstance(answer, NoPermissionError) or text.startswith("WRONGTYPE")
        return Unavailable(f"Redis on stream {self._prefix + message.topic!r}: {text}", everything=not about_the_stream)

    def _short_of_replicas(self, answer: Any) -> Verdict | None:
        if isinstance(answer, int) and answer >= self._replicas:
            return None
        if isinstance(answer, Exception):
            return Unavailable(f"Redis: WAIT, which the option wait needs, is refused: {answer}", everything=True)
        return Unavailable(f"Redis: {answer} of {self._replicas} replicas have it", everything=True)


def read_message(stream: bytes | str, fields: Mapping[Any, Any], *, prefix: str = "") -> Message:
    """Return the message of an entry that a consumer has read, without its place in the log.

    Args:
        stream: the name of the stream.
        fields: the fields of the entry, as XREAD returns them to a client without `decode_responses`.
        prefix: the part of the stream's name before the topic, without the colon.

    Raises:
        KeyError: there is no `Outbox-Id`, so no outbox has written the entry.
    """
    texts = {_text(name): value for name, value in fields.items()}
    body = texts.pop(BODY, b"")
    topic = _text(stream).removeprefix(f"{prefix}:" if prefix else "")
    return read_headers(topic, body, {name: _text(value) for name, value in texts.items()})


def wait_command(replicas: int, seconds: float) -> bytes:
    """Return the packed command that waits for replicas, in a call of so many seconds."""
    # 0 ms would be for ever.
    return _pack(("WAIT", replicas, max(1, int(seconds * 250))))


class _AbortedError(Exception):
    """Raised when a transaction was not carried out."""


class _UnexpectedAnswerError(RedisError):
    """Raised when an answer does not tell whether commands were carried out."""


def _chains(messages: Sequence[Message], *, order: Order = "each") -> Chains:
    return Chains(messages, most=_MOST_UNDER_WAY, most_bytes=_MOST_BYTES_UNDER_WAY, order=order)


class _Server(NamedTuple):
    """The abilities of a server, as far as the user may ask. `has_transactions`: the user may run MULTI and EXEC."""

    is_idempotent: bool
    largest: int
    has_transactions: bool

    @classmethod
    def ask(cls, client: Redis, *, has_transactions: bool) -> _Server:
        """Ask for the version and for the largest value; an answer that is refused counts as the usual server."""
        questions = client.pipeline(transaction=False)
        questions.info("server")
        questions.config_get("proto-max-bulk-len")
        about, limits = questions.execute(raise_on_error=False)
        known = about if isinstance(about, dict) else {}
        limit = limits.get("proto-max-bulk-len") if isinstance(limits, dict) else None
        version = tuple(int(part) for part in str(known.get("redis_version", "")).split(".")[:2] if part.isdecimal())
        return cls(
            is_idempotent="valkey_version" not in known and version >= _IDEMPOTENT,
            largest=int(limit or 512 * 1024 * 1024),
            has_transactions=has_transactions,
        )


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]  # the stubs say that it is a variable
    """Reads answers until the end of the call. The client's own timeout begins anew with each piece."""

    def on_connect(self, connection: Any, **options: Any) -> None:
        super().on_connect(connection, **options)
        self._patience: float = connection.socket_timeout

    def read_from_socket(self, *_: Any, **options: Any) -> Any:
        return super().read_from_socket(timeout=max(0.0, min(self._patience, _end.get() - time.monotonic())))


def _answers(connection: Any, commands: list[bytes]) -> list[Any]:
    """Send packed commands at once; return the answer to each, or the server's error instead.

    A pipeline of the client does the same, and takes as long for a message as all the rest of this module.
    """
    connection.send_packed_command([b"".join(commands)])
    return [_answer(connection) for _ in commands]


def _check_transaction(answers: list[Any], number: int) -> list[Any] | None:
    """Return the answers to the commands of a transaction; None if no command was carried out.

    `answers`: to MULTI, to each of the `number` commands, and to EXEC.

    Raises:
        _UnexpectedAnswerError: there was no transaction; the commands may have been carried out one by one.
    """
    begun, *queued, ended = answers
    if begun != b"OK":
        raise _UnexpectedAnswerError(f"MULTI is answered with {_shown(begun)}; let the user run MULTI and EXEC")
    for answer in queued:
        if answer != b"QUEUED" and not isinstance(answer, ResponseError):
            raise _UnexpectedAnswerError(f"a command behind MULTI is answered with {_shown(answer)}")
    if isinstance(ended, ExecAbortError) and number:
        return None
    if not isinstance(ended, list) or len(ended) != number:
        raise _UnexpectedAnswerError(f"EXEC is answered with {_shown(ended)}; let the user run MULTI and EXEC")
    return ended


def _check_appended(answers: Sequence[Any]) -> None:
    """Raise _UnexpectedAnswerError if an answer to XADD is neither the id of an entry nor an error."""
    for answer in answers:
        if not (isinstance(answer, bytes) and _ENTRY_ID.fullmatch(answer)) and not isinstance(answer, ResponseError):
            raise _UnexpectedAnswerError(f"XADD is answered with {_shown(answer)}, not with the id of an entry")


def _shown(answer: Any) -> str:
    return one_line(str(answer) if isinstance(answer, Exception) else repr(answer), _MOST_SHOWN)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _database_and_prefix_of(address: Address) -> tuple[int, str]:
    """Return the number of the database, and the prefix of each topic, with a colon."""
    path = list(address.path)
    database = int(path.pop(0)) if path and path[0].isdecimal() else 0
    return database, "".join(f"{name}:" for name in path)


def _replicas_of(address: Address) -> int:
    text = address.options.get("wait", "0")
    if not text.isdecimal():
        address.refuse("wait must be a number of replicas")
    return int(text)


def _too_large(message: Message, largest: int) -> str:
    return f"{len(message.body)} bytes are more than the server's proto-max-bulk-len of {largest}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value

"""Redis or Valkey Streams, by redis-py: URL `redis://user:password@host:6379/0/prefix?timeout=5`; `rediss://` with TLS.

A cluster: `redis+cluster://host:6379,host2:6379/prefix`. A master that sentinels know:
`redis+sentinel://host:26379,host2:26379/mymaster/0/prefix`.

A topic is a stream. A number in the path is the database; a prefix stands before each topic, with a colon. A message is
`Done` when the server has answered its XADD. The server's `appendfsync` decides how durable an entry is; with `wait=1`
a replica also has to have the entry.

Several messages of a key are appended in one transaction of the server, so no message passes a refused message. In a
cluster a transaction is of one stream, so that a node carries out the whole transaction or nothing. A user who has no
right to MULTI and EXEC sends the messages of a key one after the other, each after the previous answer.

The fields of an entry have the names of `outbox.senders.headers`, and the body is in `Outbox-Body`. `read_message`
turns them back into a `Message`. A Redis from 8.6 on drops a second copy by its id; no entry is ever trimmed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.headers import read_headers, wire_headers
from outbox.senders.key_order import Chains, Order, send_again
from outbox.senders.port import Doubt, Stored, destination_of
from outbox.senders.tls import TLS_OPTIONS

try:
    from redis.exceptions import AskError, MovedError, NoPermissionError, RedisError, ResponseError

    from outbox.senders.redis_server import (
        ASKING,
        EXEC,
        MULTI,
        REFUSED,
        Abilities,
        Connecting,
        Server,
        UnexpectedAnswerError,
        answers_of,
        check_transaction,
        end_of_call,
        pack,
        send,
        shown,
    )
    from outbox.senders.redis_topology import topology_of
except ImportError as error:
    raise MissingExtraError("Redis needs an extra: pip install 'outbox-log[redis]'") from error

BODY = "Outbox-Body"

#: The answer to XADD when the entry is stored.
_ENTRY_ID = re.compile(rb"[0-9]+-[0-9]+")

_MOST_UNDER_WAY = 1_000
#: About so many messages are in a transaction, if a call has more: while a server carries out a transaction, the next
#: one is packed. In a cluster there is a transaction for each stream.
_IN_TRANSACTION = 400
_MOST_BYTES_UNDER_WAY = 8 * 1024 * 1024
#: So often messages follow a stream in one round. Two nodes that send them to each other have not heard the news yet.
_MOST_REDIRECTS = 5

_OPTIONS = ("timeout", "wait", *TLS_OPTIONS)
#: By what stands behind the + of the scheme: an example of the URL, and the options.
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "": ("redis://host:6379/0 or rediss://host:6379/0", _OPTIONS),
    "cluster": ("redis+cluster://host:6379,host2:6379", _OPTIONS),
    "sentinel": (
        "redis+sentinel://host:26379,host2:26379/mymaster/0",
        (*_OPTIONS, "sentinel-user", "sentinel-password"),
    ),
}


class RedisSender:
    """A sender that appends messages to streams, and the messages of a key in their order.

    `send` may be called in any thread, also in several at once, and returns before the deadline.
    """

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.destination = destination_of(url)
        scheme, _, kind = self.destination.partition(":")[0].partition("+")
        form, options = _KINDS[kind]
        address = Address.of(url, form=form, options=options)
        self._where = f"{address.scheme}://{','.join(address.hosts)}"
        self._seconds = address.timeout(timeout)
        self.deadline = timedelta(seconds=self._seconds)
        self._replicas = _replicas_of(address)
        names = list(address.path)
        master = _master_of(address, names) if kind == "sentinel" else ""
        database, self._prefix = _database_and_prefix_of(names)
        if kind == "cluster" and database:
            address.refuse("a cluster has no other database than 0")
        connecting = Connecting(
            scheme=scheme,
            user=address.user,
            password=address.password,
            seconds=self._seconds,
            database=database,
            tls=address.tls(f"rediss+{kind}".removesuffix("+")),
        )
        self._topology = topology_of(address, kind, connecting, master=master)
        self._log = ConnectionLog(logging.getLogger(__name__), "Redis")
        self._is_closed = False

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        now = time.monotonic()
        end_of_call.set(now + self._seconds * 0.9)
        until = now + self._seconds / 2
        chains = _chains(messages, order="none")
        try:
            return self._deliver(messages, chains, until)
        except _AbortedError:
            verdicts = chains.verdicts()
            return send_again(messages, verdicts, lambda left: self._deliver(left, _chains(left), until))
        finally:
            if self._is_closed:
                self._topology.close()  # the call may have opened connections since

    def doubts(self, _topics: Mapping[str, Stored]) -> list[Doubt]:
        """Return the doubts about one server; of a cluster, about one node. See `Sender`."""
        end_of_call.set(time.monotonic() + self._seconds)
        return self._topology.server_of(f"{self._prefix}doctor").doubts()

    def close(self) -> None:
        """Close the connections; those in use at the end of their calls."""
        self._is_closed = True
        self._topology.close()

    def _deliver(self, messages: Sequence[Message], chains: Chains, until: float) -> list[Verdict]:
        while chains.left:
            if time.monotonic() > until:
                chains.give_up(self._log.lost(f"{self._where}: not sent within {self._seconds / 2:g} s"))
                break
            try:
                self._append(_Round(messages, chains), until)
            except OSError as error:  # no server is found
                chains.give_up(self._log.lost(reason_of(error)))
        return chains.verdicts()

    def _append(self, now: _Round, until: float) -> None:
        """Append the messages that may be sent now: in one round trip, or more if streams are at other servers.

        Raises:
            ConnectionError: no server is found.
            _AbortedError: some messages were not appended, because a message of a key with several messages cannot be.
        """
        parts = self._parts(now)
        for _ in range(_MOST_REDIRECTS + 1):
            to_servers: dict[Server, list[_Part]] = {}
            for part in parts:
                to_servers.setdefault(part.server, []).append(part)
            ready = {server: its for server, its in to_servers.items() if self._pack(server, its, now)}
            self._exchange(ready, atomic=now.chains.overlap)
            parts = [moved for part in parts if (moved := self._settle(part, now)) is not None]
            if not parts or time.monotonic() > until:
                break
        for part in parts:
            now.away = Unavailable(f"Redis on stream {part.stream!r}: the nodes send it to each other")
            now.chains.settle_all(part.indexes, now.away)
        if now.away is not None and (now.away.everything or now.chains.overlap):
            # The next round might be taken, and with it messages of the same keys.
            now.chains.give_up(now.away.error, everything=now.away.everything)
        elif now.is_aborted and now.chains.overlap and now.chains.left:
            raise _AbortedError

    def _parts(self, now: _Round) -> list[_Part]:
        """Return the messages that may be sent now, by the servers of their streams.

        All messages of a key and a stream are in one part, which is a transaction if a key has several messages.
        """
        indexes, in_cluster = now.chains.take_all(), self._topology.is_cluster
        number = 1 + len(indexes) // _IN_TRANSACTION if now.chains.overlap else 1
        if number == 1 and not in_cluster:
            return [_Part(self._topology.server_of(""), "", indexes)]
        parts: dict[str | int, _Part] = {}
        for index in indexes:
            message = now.messages[index]
            stream = self._stream_of(message) if in_cluster else ""
            place = stream if in_cluster else hash(message.key) % number
            part = parts.get(place)
            if part is None:
                part = parts[place] = _Part(self._topology.server_of(stream), stream)
            part.indexes.append(index)
        return list(parts.values())

    def _pack(self, server: Server, parts: Sequence[_Part], now: _Round) -> bool:
        """Give a server's parts their commands; return False if the server does not answer.

        Raises:
            _AbortedError: messages of a key cannot be sent together.
        """
        try:
            abilities = server.abilities or server.ask()  # another thread may forget it meanwhile
        except (RedisError, OSError) as error:
            _fail(parts, error)
            return False
        without = "" if abilities.has_transactions else ", without MULTI: the messages of a key wait for each other"
        self._log.connected(self._where + without)
        if now.chains.overlap and not abilities.has_transactions:
            raise _AbortedError
        for part in parts:
            part.commands = self._packed(part, abilities, now)
        return True

    def _packed(self, part: _Part, abilities: Abilities, now: _Round) -> Iterator[bytes]:
        """Yield the commands of a part, and leave only the messages in the part that Redis can carry.

        A transaction ends with the first other message, and the server is made to refuse the transaction.
        """
        fit: list[int] = []
        for index in part.indexes:
            message = now.messages[index]
            try:
                if len(message.body) > abilities.largest:
                    raise ValueError(_too_large(message, abilities.largest))
                command = pack(self._command(message, abilities))
            except (InvalidMessageError, ValueError) as unfit:
                if not now.chains.overlap:
                    now.chains.settle(index, Reject(f"Redis cannot carry it: {unfit}"))
                    continue
                command = REFUSED
            fit.append(index)
            yield command
            if command is REFUSED:
                break
        part.indexes = fit

    def _exchange(self, to_servers: Mapping[Server, Sequence[_Part]], *, atomic: bool) -> None:
        """Send to all servers, and then read the answers, so that a server that hangs holds up no other server.

        `atomic`: all commands of a part are carried out, or none; only a stream of a wrong type refuses some.
        """
        wait = [wait_command(self._replicas, self._seconds)] if self._replicas else []
        connections: dict[Server, Any] = {}
        with ExitStack() as lent:
            for server, parts in to_servers.items():
                try:
                    connection = lent.enter_context(server.connection())
                    if send(connection, chain.from_iterable(part.wire(atomic=atomic) for part in parts)):
                        send(connection, wait)
                        connections[server] = connection
                except (RedisError, OSError) as error:
                    _fail(parts, error)
            for server, connection in connections.items():
                parts = to_servers[server]
                try:
                    for part in parts:
                        part.read(connection, atomic=atomic)
                    short = self._short_of_replicas(answers_of(connection, 1)[0]) if wait else None
                    for part in parts:
                        part.short = short
                except (RedisError, OSError) as error:
                    connection.disconnect()  # late answers would count for other commands
                    _fail(parts, error)

    def _settle(self, part: _Part, now: _Round) -> _Part | None:
        """Settle the messages of a part; return the part that has to follow its stream to another server."""
        in_cluster = self._topology.is_cluster
        if part.answers is None:
            now.is_aborted = True
            return None
        lost: str | None = None
        if part.error is not None:
            lost = self._log.lost(f"{part.server.where}: {reason_of(part.error)}")
            now.away = Unavailable(lost, everything=not in_cluster)
            now.chains.settle_all(part.indexes, now.away)
        if part.is_stored:
            now.chains.settle_all(part.indexes, DONE)
            return None
        redirect: AskError | None = None
        following: list[int] = []
        for index, answer in zip(part.indexes, part.answers, strict=False):
            if not isinstance(answer, Exception) and part.short is None:
                now.chains.settle(index, DONE)
            elif isinstance(answer, AskError) and in_cluster:
                redirect = answer
                following.append(index)
            elif isinstance(answer, Exception) and _is_about_the_stream(answer):
                now.is_aborted = True
                now.chains.settle(index, Unavailable(self._refusal(answer, now.messages[index])))
            else:
                # All other errors are about the server, as one about its memory or about its role is.
                lost = part.short or self._refusal(answer, now.messages[index])
                now.away = Unavailable(lost, everything=not in_cluster)
                now.chains.settle(index, now.away)
        if lost is not None:
            self._topology.lose(part.server)
        if redirect is None:
            return None
        server = self._topology.follow(redirect, part.stream, part.server)
        return _Part(server, part.stream, following, is_asking=not isinstance(redirect, MovedError))

    def _stream_of(self, message: Message) -> str:
        return self._prefix + message.topic

    def _command(self, message: Message, server: Abilities) -> tuple[str | bytes, ...]:
        """Return the command that appends a message; raise if Redis cannot carry the message."""
        once = ("IDMP", "outbox", message.id_text) if server.is_idempotent else ()
        fields = chain.from_iterable(wire_headers(message).items())
        return ("XADD", self._stream_of(message), *once, "*", *fields, BODY, message.body)

    def _refusal(self, answer: Any, message: Message) -> str:
        """Return an error of the server in words for people."""
        fix = "; the server is a node of a cluster: write redis+cluster://" if isinstance(answer, AskError) else ""
        return f"Redis on stream {self._stream_of(message)!r}: {answer}{fix}"

    def _short_of_replicas(self, answer: Any) -> str | None:
        """Return what lacks, if too few replicas have the messages."""
        if isinstance(answer, int) and answer >= self._replicas:
            return None
        if isinstance(answer, Exception):
            return f"Redis: WAIT, which the option wait needs, is refused: {answer}"
        return f"Redis: {answer} of {self._replicas} replicas have it"


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
    return pack(("WAIT", replicas, max(1, int(seconds * 250))))


class _AbortedError(Exception):
    """Raised when a transaction was not carried out."""


@dataclass(slots=True)
class _Round:
    """The messages of a call that are sent next.

    `away`: why a server takes nothing. `is_aborted`: some messages cannot be sent together with others of their key.
    """

    messages: Sequence[Message]
    chains: Chains
    away: Unavailable | None = None
    is_aborted: bool = False


@dataclass(slots=True)
class _Part:
    """Messages for one server, in a cluster of one stream. `is_asking`: the stream is on its way to the server."""

    server: Server
    stream: str
    indexes: list[int] = field(default_factory=list)
    is_asking: bool = False
    commands: Iterable[bytes] = ()
    #: To each command; None if nothing was carried out, because one command of the transaction is refused.
    answers: Sequence[Any] | None = ()
    #: The text for the verdicts, if too few replicas have the messages.
    short: str | None = None
    #: Why nobody knows what was carried out.
    error: Exception | None = None

    @property
    def is_stored(self) -> bool:
        """True when the server has all messages, and enough replicas have them."""
        known = self.error is None and self.short is None
        return known and all(isinstance(answer, bytes) for answer in self.answers or ())

    def wire(self, *, atomic: bool) -> Iterable[bytes]:
        """Return all that is sent, packed."""
        if atomic:
            return chain([ASKING] if self.is_asking else [], [MULTI], self.commands, [EXEC])
        return chain.from_iterable((ASKING, each) for each in self.commands) if self.is_asking else self.commands

    def read(self, connection: Any, *, atomic: bool) -> None:
        """Read all answers; raise if the answers do not tell which commands were carried out."""
        number = len(self.indexes)
        expected = number + 2 + self.is_asking if atomic else number * (1 + self.is_asking)
        answers = answers_of(connection, expected)
        if self.is_asking:
            step = len(answers) if atomic else 2
            for answer in answers[::step]:
                if answer != b"OK":
                    raise UnexpectedAnswerError(f"ASKING is answered with {shown(answer)}; let the user run ASKING")
            del answers[::step]
        if not atomic:
            self.answers = answers
        elif (carried_out := check_transaction(answers, number)) is not None:
            self.answers = carried_out
        else:
            redirects = [answer for answer in answers if isinstance(answer, AskError)]
            self.answers = redirects[-1:] * number or None
        _check_appended(self.answers or ())


def _fail(parts: Sequence[_Part], error: Exception) -> None:
    for part in parts:
        part.error, part.answers = error, ()


def _chains(messages: Sequence[Message], *, order: Order = "each") -> Chains:
    return Chains(messages, most=_MOST_UNDER_WAY, most_bytes=_MOST_BYTES_UNDER_WAY, order=order)


def _is_about_the_stream(answer: Exception) -> bool:
    return isinstance(answer, (NoPermissionError, AskError)) or str(answer).startswith("WRONGTYPE")


def _check_appended(answers: Sequence[Any]) -> None:
    """Raise `UnexpectedAnswerError` if an answer to XADD is neither the id of an entry nor an error."""
    for answer in answers:
        if not (isinstance(answer, bytes) and _ENTRY_ID.fullmatch(answer)) and not isinstance(answer, ResponseError):
            raise UnexpectedAnswerError(f"XADD is answered with {shown(answer)}, not with the id of an entry")


def _master_of(address: Address, names: list[str]) -> str:
    """Take the name of the master out of the names of the path."""
    if not names:
        address.refuse("write the name of the master behind the hosts, as in /mymaster")
    return names.pop(0)


def _database_and_prefix_of(names: list[str]) -> tuple[int, str]:
    """Return the number of the database, and the prefix of each topic, with a colon, of the names of the path."""
    database = int(names.pop(0)) if names and names[0].isdecimal() else 0
    return database, "".join(f"{name}:" for name in names)


def _replicas_of(address: Address) -> int:
    text = address.options.get("wait", "0")
    if not text.isdecimal():
        address.refuse("wait must be a number of replicas")
    return int(text)


def _too_large(message: Message, largest: int) -> str:
    return f"{len(message.body)} bytes are more than the server's proto-max-bulk-len of {largest}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value

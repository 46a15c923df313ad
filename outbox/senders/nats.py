"""NATS JetStream, by nats-py: URL `nats://user:password@host:port,host2:port/prefix?timeout=5`.

A topic is a subject; a prefix in the path stands before it, with a dot. `tls://` instead of `nats://` refuses a
server without TLS. A single name before the @ is a token. A message is `Done` when a stream has acknowledged it.

A consumer finds the id in `Nats-Msg-Id`, by which a stream drops a second copy within its `duplicate_window`. The
other fields have the names of `outbox.senders.headers`, and `read_message` makes a `Message` of them.

A stream drops by the id alone, whatever the subject: do not let one stream take two subjects that the same message is
sent to. A dropped copy is `Done` only if the stream's message has the same subject. The sender asks for that message
on `$JS.API.STREAM.MSG.GET.<stream>`, which a user with restricted permissions needs, too. Otherwise the copy waits
until the window is over and the stream takes it.

NATS cannot carry a header of servers and clients (`Nats-…`, `Status`), or more than the server's `max_payload` and the
stream's limit. The verdict is `Reject`. A topic with an empty part (`a..b`, `.a`, `a.`) waits for another name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import Reject, Unavailable, Verdict
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.headers import Reserved, read_headers, wire_headers
from outbox.senders.jetstream import Dropped, doubts_of, streams_of, verdict_of
from outbox.senders.new_topics import too_narrow
from outbox.senders.port import Doubt, Stored
from outbox.senders.remote import MOST_BYTES_UNDER_WAY, Call, Connection, RemoteSender
from outbox.senders.tls import TLS_OPTIONS, Tls

try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error, SecureConnWantedError

    from outbox.senders.nats_login import LOGIN_OPTIONS, Login
except ImportError as error:
    raise MissingExtraError("NATS needs an extra: pip install 'outbox-log[nats]'") from error

MESSAGE_ID = "Nats-Msg-Id"
#: Servers obey these headers (`Nats-Rollup` empties a stream); clients recognise a server's answer by `Status`.
RESERVED = Reserved("NATS", prefixes=("nats-",), names=("status",))

#: More bytes than the headers of a message can take; only with a body this close to the limit they are counted.
_HEADERS_AT_MOST = 64 * 1024

_OPTIONS = ("timeout", *LOGIN_OPTIONS, *TLS_OPTIONS)
_PREFIX = re.compile(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)*")
_SUBJECT = re.compile(r"[A-Za-z0-9_%|-]+(\.[A-Za-z0-9_%|-]+)*")
_FORBIDDEN = re.compile(r'permissions violation for publish to "([^"]*)"', re.IGNORECASE)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a warning of asyncio about each TLS connection that a server closes."""
    return record.threadName != "outbox-nats" or "eof_received() has no effect" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_is_news)


class NatsSender(RemoteSender):
    """A sender that stores messages in JetStream; at most one message of a key is unacknowledged."""

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        address = Address.of(url, form="nats://host:port or tls://host:port", options=_OPTIONS)
        prefix, login, tls = _prefix_of(address), Login(address), address.tls("tls")
        super().__init__(
            "NATS",
            url,
            address.servers,
            lambda server, log: _Connection(server, log, prefix, login, tls),
            seconds=address.timeout(timeout),
        )

    def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Return the doubts about what takes these topics; see `Sender`."""
        return self._doubts(topics)


def read_message(received: Msg, *, prefix: str = "") -> Message:
    """Return the message that a consumer received from a stream, without its place in the log.

    Raises:
        KeyError: there is no `Nats-Msg-Id`, so no outbox has written the message.
    """
    topic = received.subject.removeprefix(f"{prefix}." if prefix else "")
    return read_headers(topic, received.data, received.headers or {}, id_name=MESSAGE_ID)


def _prefix_of(address: Address) -> str:
    """Return the prefix of each topic, with its dot."""
    prefix = "/".join(address.path)
    if prefix and not _PREFIX.fullmatch(prefix):
        address.refuse("the path is a prefix of subjects, of letters, digits, - and _")
    return f"{prefix.replace('/', '.')}." if prefix else ""


class _Connection(Connection):
    """One connection to one server."""

    def __init__(self, server: str, log: ConnectionLog, prefix: str, login: Login, tls: Tls | None) -> None:
        super().__init__(server, log)
        self._login = login
        self._tls = tls
        self._prefix = prefix
        self._client = _Client(self._lose)
        self._exchanges: dict[str, _Exchange] = {}
        self._numbers = count()
        self._inbox = ""
        #: What the server or the driver said last; that belongs to no message, but explains a failure.
        self._trouble = ""

    async def open(self, deadline: float) -> None:
        async with asyncio.timeout_at(deadline):
            await self._client.connect(
                [self.server],
                name="outbox",
                tls=self._tls.context() if self._tls else None,
                **self._login.arguments(),
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=10,
                pending_size=8 * MOST_BYTES_UNDER_WAY,
                error_cb=self._complain,
            )
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(f"{self._inbox}.*.*", cb=self._answered)
        self.log.connected(self.server)

    async def carry(self, call: Call) -> None:
        number = str(next(self._numbers))
        exchange = self._exchanges[number] = _Exchange(call, self._prefix, f"{self._inbox}.{number}.")
        try:
            async with asyncio.timeout_at(call.deadline):
                await self._pump(exchange)
                if not self.is_closed:
                    await exchange.over.wait()
        finally:
            del self._exchanges[number]
        if call.chains.left:
            raise ConnectionError("the connection was lost")

    async def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Ask JetStream for the streams of these topics, which needs rights on `$JS.API.STREAM.NAMES` and `.INFO.*`."""
        names = set[str]()
        for topic in topics:
            asked = json.dumps({"subject": f"{self._prefix}{topic}"}).encode()
            names.update(streams_of((await self._client.request("$JS.API.STREAM.NAMES", asked)).data))
        answers = [await self._client.request(f"$JS.API.STREAM.INFO.{name}") for name in sorted(names)]
        return [doubt for answer in answers for doubt in doubts_of(answer.data)]

    async def close(self) -> None:
        self._lose()
        # An error of the driver on a dead socket must not prevent the next connection.
        with suppress(Exception):
            async with asyncio.timeout(1):
                await self._client.close()

    def words(self, error: Exception) -> str:
        # While the driver still writes its login, it only says that a connection is lost which the server has refused.
        reader = getattr(self._client._transport, "_io_reader", None)
        refusal = reader.exception() if isinstance(reader, asyncio.StreamReader) else None
        if isinstance(refusal, ssl.SSLError):
            return reason_of(refusal)
        reason = reason_of(error)
        trouble = self._trouble if self._trouble != reason else ""
        return ": ".join(filter(None, (reason, trouble, self._login.hint)))

    async def _pump(self, exchange: _Exchange) -> None:
        """Publish the messages that may be published now."""
        while not self.is_closed and (index := exchange.call.chains.take()) is not None:
            message = exchange.call.messages[index]
            try:
                headers = wire_headers(message, id_name=MESSAGE_ID, reserved=RESERVED)
                refusal = _refusal(message, headers, self._client.max_payload)
                if refusal is None:
                    reply = f"{exchange.reply}{index}"
                    await self._client.publish(exchange.subject(index), message.body, reply, headers)
            except InvalidMessageError as error:
                refusal = Reject(str(error))
            except (OSError, Error, ValueError) as error:
                # Either there is no connection any more, or the driver refuses this message.
                self._not_sent(error)
                refusal = Reject(f"NATS cannot carry it: {reason_of(error)}")
            if refusal is not None and not self.is_closed:
                exchange.settle(index, refusal)

    async def _answered(self, answer: Msg) -> None:
        number, _, index = answer.subject[len(self._inbox) + 1 :].partition(".")
        exchange = self._exchanges.get(number)
        if exchange is None:
            return
        place = int(index)
        dropped = exchange.dropped.get(place)
        if dropped is None:
            verdict = verdict_of(answer.data, answer.headers, exchange.subject(place))
        else:
            verdict = dropped.verdict(answer.data, exchange.call.messages[place])
        if isinstance(verdict, Dropped):
            await self._ask(exchange, place, verdict)
        else:
            exchange.settle(place, verdict)
        await self._pump(exchange)

    async def _ask(self, exchange: _Exchange, index: int, dropped: Dropped) -> None:
        """Ask a stream for the first copy; the answer settles the message."""
        exchange.dropped[index] = dropped
        question = dropped.question(home=self._client.domain)
        try:
            await self._client.publish(question, b'{"seq": %d}' % dropped.seq, f"{exchange.reply}{index}")
        except (OSError, Error, ValueError) as error:
            self._not_sent(error)
            exchange.settle(index, dropped.doubtful(reason_of(error)))

    def _not_sent(self, error: Exception) -> None:
        """Check, after the driver could not send, if there is still a connection; else the connection is lost."""
        if not self._client.is_connected:
            self._trouble = self._trouble or reason_of(error)
            self._lose()

    async def _complain(self, error: Exception) -> None:
        """Note what the server or the driver reports, perhaps of a subject."""
        self._trouble = reason_of(error)
        forbidden = _FORBIDDEN.search(str(error))
        if forbidden is not None:
            for exchange in list(self._exchanges.values()):
                await self._forbid(exchange, forbidden[1].lower())

    async def _forbid(self, exchange: _Exchange, subject: str) -> None:
        """Settle messages to a forbidden subject, in the driver's lower case: no answer will come."""
        for index in exchange.call.chains.under_way():
            dropped = exchange.dropped.get(index)
            asked = exchange.subject(index) if dropped is None else dropped.question(home=self._client.domain)
            if asked.lower() == subject:
                text = f"the user may not publish to {asked!r}"
                exchange.settle(index, Unavailable(f"NATS: {text}") if dropped is None else dropped.doubtful(text))
        await self._pump(exchange)

    def _lose(self) -> None:
        self.is_closed = True
        for exchange in self._exchanges.values():
            exchange.over.set()


class _Exchange:
    """A call on its connection: the subject of the answers, and the copies that were dropped.

    `dropped`: by index, the copies for which a stream is asked about the first copy.
    """

    __slots__ = ("_prefix", "call", "dropped", "over", "reply")

    def __init__(self, call: Call, prefix: str, reply: str) -> None:
        self.call = call
        self.reply = reply
        self.dropped: dict[int, Dropped] = {}
        self.over = asyncio.Event()
        self._prefix = prefix

    def subject(self, index: int) -> str:
        return self._prefix + self.call.messages[index].topic

    def settle(self, index: int, verdict: Verdict) -> None:
        self.call.chains.settle(index, verdict)
        if not self.call.chains.left:
            self.over.set()


class _Client(Client):
    """nats-py's client, closed at once, and never logged in without TLS where TLS was asked for."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        super().__init__()
        self._on_close = on_close

    @property
    def domain(self) -> str | None:
        """The domain of the server's own JetStream."""
        return self._server_info.get("domain")

    async def _close(self, *arguments: Any, **options: Any) -> None:
        # Every connection that is lost ends here. The driver's own way would first write what is left, which hangs
        # on a dead peer and sends late copies to a living one.
        self._pending.clear()
        self._pending_data_size = 0
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        self._on_close()
        await super()._close(*arguments, **options)

    def _connect_command(self) -> bytes:
        # Checked right before credentials are sent, because the driver itself would send them to a server without TLS.
        server = self._current_server
        if server is not None and server.uri.scheme == "tls" and not self._server_info.get("tls_required"):
            raise SecureConnWantedError
        return super()._connect_command()


def _refusal(message: Message, headers: dict[str, str], max_payload: int) -> Verdict | None:
    """Return the verdict on a message that NATS cannot carry; None for others."""
    topic = message.topic
    if not _SUBJECT.fullmatch(topic):
        rule = "what stands between dots has to be letters, digits, - and _, and not empty"
        fitting = ".".join(part for part in topic.split(".") if part) or "dots"
        return too_narrow(topic, f"NATS has no subject {topic!r}: {rule}", fitting)
    if len(message.body) > max_payload - _HEADERS_AT_MOST:
        size = len(message.body) + _size(headers)
        if size > max_payload:
            return Reject(f"{size} bytes with headers are more than the server's max_payload of {max_payload}")
    return None


def _size(headers: dict[str, str]) -> int:
    """Return the bytes that headers take on the wire: a first line, `name: value` lines and an empty one."""
    return len("NATS/1.0\r\n\r\n") + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())

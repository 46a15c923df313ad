"""NATS JetStream, by nats-py: URL `nats://user:password@host:port,host2:port/prefix?timeout=5`.

A topic is a subject; a prefix in the path stands before it, with a dot. `tls://` instead of `nats://` refuses a
server without TLS. A single name before the @ is a token. A message is `Done` when a stream has acknowledged it.

A consumer finds the id in `Nats-Msg-Id`, by which a stream drops a second copy within its `duplicate_window`. The
other fields have the names of `outbox.senders.headers`, and `read_message` turns them back into a `Message`.

A stream drops by the id alone, whatever the subject: do not let one stream take two subjects that the same message is
sent to. So a copy that was dropped is `Done` only if the stream's message is of the same subject. The sender asks for
it on `$JS.API.STREAM.MSG.GET.<stream>`; a user with restricted permissions needs that subject, too. Otherwise the copy
waits until the window is over and the stream takes it.

What NATS cannot carry is answered with `Reject`: a topic with an empty part (`a..b`, `.a`, `a.`), or a header that
servers or clients take for their own (`Nats-…`, `Status`). So is a message above the server's `max_payload` or its
stream's limit.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import Reject, Unavailable, Verdict
from outbox.runtime.event_loop import BackgroundLoop
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.headers import Reserved, read_headers, wire_headers
from outbox.senders.jetstream import Dropped, verdict_of
from outbox.senders.key_order import Chains
from outbox.senders.port import destination_of

try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error, SecureConnWantedError
except ImportError as error:
    raise MissingExtraError("NATS needs an extra: pip install 'outbox-log[nats]'") from error

MESSAGE_ID = "Nats-Msg-Id"
#: Servers obey these headers (`Nats-Rollup` empties a stream); clients recognise a server's answer by `Status`.
RESERVED = Reserved("NATS", prefixes=("nats-",), names=("status",))

#: The most that may wait for an acknowledgement at once; a server refuses from 10 000 messages of a stream on.
_MAX_UNDER_WAY = 512
_MAX_BYTES_UNDER_WAY = 8 * 1024 * 1024
#: More bytes than the headers of a message can take; only with a body this close to the limit they are counted.
_HEADERS_AT_MOST = 64 * 1024

_PREFIX = re.compile(r"[A-Za-z0-9_-]+([./][A-Za-z0-9_-]+)*")
_SUBJECT = re.compile(r"[A-Za-z0-9_%|-]+(\.[A-Za-z0-9_%|-]+)*")
_FORBIDDEN = re.compile(r'permissions violation for publish to "([^"]*)"', re.IGNORECASE)


class NatsSender:
    """A sender that stores messages in JetStream; at most one message of a key is unacknowledged.

    `send` may be called in any thread, also in several at once, and returns within `timeout` whatever the server does.
    The first call makes a connection. When it fails, or a call runs out of time, the next call makes a new one.
    """

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.destination = destination_of(url)
        address = Address.of(url, form="nats://host:port or tls://host:port", options=("timeout",))
        prefix = _prefix_of(address)
        self._seconds = address.timeout(timeout)
        self.deadline = timedelta(seconds=self._seconds)
        self._loop = BackgroundLoop("outbox-nats", make=lambda: _Link(address, prefix), farewell=_Link.close)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        if not messages:
            return []
        # The loop itself keeps this earlier deadline; the rest is for a machine that is too busy to notice it in time.
        inside = self._seconds * 0.9
        try:
            return self._loop.run(lambda link: link.deliver(messages, inside), timeout=self._seconds)
        except TimeoutError:
            reason = f"no answer within {self._seconds:g} s"
        except CancelledError:  # by another thread: it has closed the sender, or its own call ran out of time
            reason = "the sender was closed"
        return [Unavailable(f"NATS: {reason}", everything=True)] * len(messages)

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._loop.stop()


def read_message(received: Msg, *, prefix: str = "") -> Message:
    """Return the message that a consumer received from a stream, without its place in the log.

    Raises:
        KeyError: it has no `Nats-Msg-Id`, so it was not written by an outbox.
    """
    topic = received.subject.removeprefix(f"{prefix}." if prefix else "")
    return read_headers(topic, received.data, received.headers or {}, id_name=MESSAGE_ID)


def _prefix_of(address: Address) -> str:
    """Return what stands before each topic, with its dot."""
    prefix = "/".join(address.path)
    if prefix and not _PREFIX.fullmatch(prefix):
        address.refuse("the path is a prefix of subjects, of letters, digits, - and _")
    return f"{prefix.replace('/', '.')}." if prefix else ""


class _Link:
    """At most one connection to the servers of an address, made when it is needed. Used in one event loop."""

    def __init__(self, address: Address, prefix: str) -> None:
        self._address = address
        self._prefix = prefix
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._log = ConnectionLog(logging.getLogger(__name__), "NATS")

    async def deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        """Send a call's messages; what was not acknowledged after `seconds` is `Unavailable`."""
        deadline = asyncio.get_running_loop().time() + seconds
        call = _Call(messages, self._prefix)
        try:
            async with asyncio.timeout_at(deadline), self._connecting:
                connection = await self._connected(deadline)
        except OSError as error:
            return [Unavailable(self._log.lost(_text(error)), everything=True)] * len(messages)
        if not await connection.carry(call, deadline):
            call.give_up(self._log.lost(f"no answer within {seconds:g} s{connection.trouble}"))
            await connection.close()
        elif connection.is_lost:
            self._log.lost(f"the connection was lost{connection.trouble}")
        return call.chains.verdicts()

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self, deadline: float) -> _Connection:
        """Return the connection, else a new one to the first server that answers; they are asked in random order."""
        if self._connection is not None and not self._connection.is_lost:
            return self._connection
        servers = random.sample(self._address.hosts, len(self._address.hosts))
        errors = []
        for asked, host in enumerate(servers):
            server = f"{self._address.scheme}://{host}"
            # Some time must be left for the servers that come later, and for the messages.
            share = (deadline - asyncio.get_running_loop().time()) / (len(servers) - asked + 1)
            connection = _Connection(self._address)
            try:
                await connection.open(server, share)
            except Exception as error:  # any program may listen at that port, and answer anything
                errors.append(f"{server}{connection.trouble or f': {_text(error)}'}")
                await connection.close()
            else:
                self._log.connected(server)
                self._connection = connection
                return connection
        raise ConnectionError("; ".join(errors))


class _Connection:
    """One connection to one server. Once it fails or does not answer, it is closed and never used again."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = _Client(self._lose)
        self._calls: dict[str, _Call] = {}
        self._numbers = count()
        self._inbox = ""
        self.is_lost = False
        self.trouble = ""

    async def open(self, server: str, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await self._client.connect(
                [server],
                name="outbox",
                # A single name before the @ is a token.
                user=None if self._address.password is None else self._address.user,
                password=self._address.password,
                token=self._address.user if self._address.password is None else None,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=10,
                pending_size=8 * _MAX_BYTES_UNDER_WAY,
                error_cb=self._complain,
            )
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(f"{self._inbox}.*.*", cb=self._answered)

    async def carry(self, call: _Call, deadline: float) -> bool:
        """Send the messages of a call; return whether all have a verdict before the deadline."""
        number = str(next(self._numbers))
        call.reply = f"{self._inbox}.{number}."
        self._calls[number] = call
        try:
            await self._pump(call)
            async with asyncio.timeout_at(deadline):
                await call.is_settled.wait()
        except TimeoutError:
            return False
        finally:
            del self._calls[number]
        return True

    async def close(self) -> None:
        """Close the socket; whatever is under way is given up."""
        self._lose()
        # An error of the driver on a dead socket must not prevent the next connection.
        with suppress(Exception):
            async with asyncio.timeout(1):
                await self._client.close()

    async def _pump(self, call: _Call) -> None:
        """Publish what may be published now."""
        while (index := call.chains.take()) is not None:
            message = call.messages[index]
            try:
                headers = wire_headers(message, id_name=MESSAGE_ID, reserved=RESERVED)
                refusal = _refusal(message, headers, self._client.max_payload)
                if refusal is None:
                    await self._client.publish(call.subject(index), message.body, f"{call.reply}{index}", headers)
            except InvalidMessageError as error:
                refusal = str(error)
            except (OSError, Error, ValueError) as error:
                # Either there is no connection any more, or the driver refuses this message.
                self._not_sent(error)
                refusal = f"NATS cannot carry it: {_text(error)}"
            if refusal is not None:
                call.settle(index, Reject(refusal))

    async def _answered(self, answer: Msg) -> None:
        number, _, index = answer.subject[len(self._inbox) + 1 :].partition(".")
        call = self._calls.get(number)
        if call is None:
            return
        place = int(index)
        dropped = call.dropped.get(place)
        if dropped is None:
            verdict = verdict_of(answer.data, answer.headers, call.subject(place))
        else:
            verdict = dropped.verdict(answer.data, call.messages[place])
        if isinstance(verdict, Dropped):
            await self._ask(call, place, verdict)
        else:
            call.settle(place, verdict)
        await self._pump(call)

    async def _ask(self, call: _Call, index: int, dropped: Dropped) -> None:
        """Ask a stream for the copy that it has; the answer settles the message."""
        call.dropped[index] = dropped
        question = dropped.question(home=self._client.domain)
        try:
            await self._client.publish(question, b'{"seq": %d}' % dropped.seq, f"{call.reply}{index}")
        except (OSError, Error, ValueError) as error:
            self._not_sent(error)
            call.settle(index, dropped.doubtful(_text(error)))

    def _not_sent(self, error: Exception) -> None:
        """Check, after the driver could not send something, if there is still a connection; if not, it is lost."""
        if not self._client.is_connected:
            self.trouble = self.trouble or f": {_text(error)}"
            self._lose()

    async def _complain(self, error: Exception) -> None:
        """Note what the server, or the driver, reports; it belongs to no message, but perhaps to a subject."""
        self.trouble = f": {_text(error)}"
        forbidden = _FORBIDDEN.search(str(error))
        if forbidden is not None:
            for call in list(self._calls.values()):
                await self._forbid(call, forbidden[1].lower())

    async def _forbid(self, call: _Call, subject: str) -> None:
        """Settle what is under way to a forbidden subject, told in lower case by the driver: no answer will come."""
        for index in call.chains.under_way():
            dropped = call.dropped.get(index)
            asked = call.subject(index) if dropped is None else dropped.question(home=self._client.domain)
            if asked.lower() == subject:
                text = f"the user may not publish to {asked!r}"
                call.settle(index, Unavailable(f"NATS: {text}") if dropped is None else dropped.doubtful(text))
        await self._pump(call)

    def _lose(self) -> None:
        self.is_lost = True
        for call in self._calls.values():
            call.give_up(f"NATS: the connection was lost{self.trouble}")


class _Call:
    """One call of `send`: its messages, the subject of their answers, and their verdicts."""

    __slots__ = ("_prefix", "chains", "dropped", "is_settled", "messages", "reply")

    def __init__(self, messages: Sequence[Message], prefix: str) -> None:
        self.messages = messages
        self.chains = Chains(messages, most=_MAX_UNDER_WAY, most_bytes=_MAX_BYTES_UNDER_WAY)
        self.reply = ""
        #: By index, the copies that were dropped, and for which the stream is asked which message it has.
        self.dropped: dict[int, Dropped] = {}
        self.is_settled = asyncio.Event()
        self._prefix = prefix

    def subject(self, index: int) -> str:
        return self._prefix + self.messages[index].topic

    def settle(self, index: int, verdict: Verdict) -> None:
        self.chains.settle(index, verdict)
        if not self.chains.left:
            self.is_settled.set()

    def give_up(self, error: str) -> None:
        self.chains.give_up(error)
        self.is_settled.set()


class _Client(Client):
    """nats-py's client, but it closes at once, and refuses a server without TLS where TLS was asked for."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        super().__init__()
        self._on_close = on_close

    @property
    def domain(self) -> str | None:
        """The domain of the JetStream that the server itself belongs to."""
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


def _refusal(message: Message, headers: dict[str, str], max_payload: int) -> str | None:
    """Return the reason why NATS cannot carry a message; None if it can."""
    if not _SUBJECT.fullmatch(message.topic):
        return (
            f"NATS has no subject {message.topic!r}: what stands between dots has to be letters, digits, - and _, and"
            " not empty; send it under another topic, and discard this one"
        )
    if len(message.body) > max_payload - _HEADERS_AT_MOST:
        size = len(message.body) + _size(headers)
        if size > max_payload:
            return f"{size} bytes with headers are more than the server's max_payload of {max_payload}"
    return None


def _size(headers: dict[str, str]) -> int:
    """Return the bytes that headers take on the wire: a first line, `name: value` lines and an empty one."""
    return len("NATS/1.0\r\n\r\n") + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())


def _text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        # The event loop's own text names the address again, and the number of the error.
        return os.strerror(error.errno or 0).lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__

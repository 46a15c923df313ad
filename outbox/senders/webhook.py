"""Webhooks, by httpx2: URL `https://user:password@host/path?secret-file=/path&format=cloudevents&timeout=5&most=32`.

Each message is one POST to that URL, in one of the formats of `outbox.senders.webhook_format`, and signed by
`outbox.senders.webhook_signature`. It is `Done` when a complete answer with a status from 200 to 299 has come.
`outbox.senders.webhook_answer` says what other statuses mean. `outbox.senders.webhook_reading` is for endpoints.

The options secret-file, format, source, timeout, most (the requests under way at once), per-connection (the requests
that one connection carries), ca and proxy are ours. The rest of the query belongs to the endpoint. What stands before
the @ is sent as HTTP basic authentication.

Redirects are not followed, cookies not kept, and proxies of the environment not used, so that messages and credentials
go nowhere but to that URL.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing, suppress
from datetime import timedelta
from pathlib import Path

from outbox.errors import InvalidMessageError, MissingExtraError, SenderError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.event_loop import BackgroundLoop
from outbox.runtime.text import one_line
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.key_order import EARLIER, Chains
from outbox.senders.port import destination_of
from outbox.senders.urls import redacted
from outbox.senders.webhook_answer import Answer, Pause
from outbox.senders.webhook_format import header_bytes
from outbox.senders.webhook_signature import ID, SIGNATURE, TIMESTAMP, Secrets, signature_of
from outbox.senders.webhook_url import Target

try:
    from httpx2 import (
        URL,
        AsyncHTTPTransport,
        ConnectError,
        Headers,
        InvalidURL,
        Limits,
        LocalProtocolError,
        ProxyError,
        Request,
        Response,
    )

    from outbox.senders.webhook_connections import Connection, connection_of, watch
except ImportError as error:
    raise MissingExtraError("webhooks need an extra: pip install 'outbox-log[http]'") from error

_MAX_BYTES_UNDER_WAY = 8 * 1024 * 1024
#: So much of an answer is read; more would only delay the next message.
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_SHOWN = 200
#: Requests begin in this share of a call's time. The rest is for the answers, so that a slow endpoint gets no message
#: twice because time ran out.
_SHARE_TO_BEGIN = 0.75
#: Seconds after which an idle connection is closed. Many servers wait longer, so that they seldom close it first.
_IDLE_SECONDS = 5.0

Post = Callable[[int, Message], Awaitable[Verdict]]


class WebhookSender:
    """A sender that posts messages to a URL; at most one message of a key is unacknowledged.

    `send` may be called in any thread, also in several at once, and returns within `timeout` whatever the server does.
    The first call makes connections. One that fails, or runs out of time, is not used again.
    """

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.destination = destination_of(url)
        target = Target.of(url, timeout=timeout)
        try:
            URL(target.url)
        except InvalidURL:
            raise SenderError(f"{target.shown} is not a URL") from None  # the cause may quote secrets
        self._shown = target.shown
        #: Each message becomes an event here, so it must not be one already.
        self.sends_events = target.sends_events
        self._seconds = target.seconds
        self.deadline = timedelta(seconds=self._seconds)
        # It outlives the connections: an endpoint that wants no requests wants none over another connection either.
        pause = Pause()
        self._loop = BackgroundLoop("outbox-webhook", make=lambda: _Link(target, pause), farewell=_Link.close)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        if not messages:
            return []
        # The loop itself keeps this earlier deadline; the rest is for a machine that is too busy to notice it in time.
        inside = self._seconds * 0.9
        try:
            return self._loop.run(lambda link: link.deliver(messages, inside), timeout=self._seconds)
        except (TimeoutError, CancelledError):  # CancelledError: another thread has closed the sender
            text = f"Webhook: {self._shown}: no answer within {self._seconds:g} s"
            return [Unavailable(text, everything=True)] * len(messages)

    def close(self) -> None:
        """Close the connections and end their thread."""
        self._loop.stop()


class _Link:
    """The connections to an endpoint, in one pool, made when it is needed. Used in one event loop."""

    def __init__(self, target: Target, pause: Pause) -> None:
        self._target = target
        self._url = URL(target.url)
        self._headers = _headers_of(target)
        self._pause = pause
        self._secrets = Secrets(target.secret_file)
        #: The connections. No client of the driver is used: it would log a line for each request.
        self._transport: AsyncHTTPTransport | None = None
        #: The transport is to be replaced as soon as no call uses it.
        self._is_stale = False
        self._calls: set[_Call] = set()
        self._log = ConnectionLog(logging.getLogger(__name__), "Webhook")
        self._surplus = (
            f"{target.shown}: an answer came that no request had asked for, so the answers of its connection prove"
            " nothing; mend the endpoint or its proxy, or use each connection once, with the option per-connection=1"
        )

    async def deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        """Send a call's messages; what was not answered after `seconds` is `Unavailable`."""
        try:
            keys = self._secrets.keys()
            self._transport = self._transport or self._open_transport()
        except ValueError as error:
            # Never unsigned where a signature is wanted: the endpoint would refuse it, or worse, take it.
            return [self._away(str(error))] * len(messages)
        call = _Call(messages, most=self._target.most, seconds=seconds)
        self._calls.add(call)
        try:
            in_time = await call.run(lambda index, message: self._post(call, index, message, keys))
            await call.look_at_connections()
        finally:
            self._calls.remove(call)
        if call.is_stopped:
            call.give_up(Unavailable(f"Webhook: {self._target.shown}: the sender was closed", everything=True))
        elif not in_time:
            text = self._log.lost(f"{self._target.shown}: no answer within {seconds:g} s")
            call.give_up(Unavailable(text, everything=not call.has_accepted))
            # Other connections may be as dead as those that were waited for.
            self._is_stale = True
        if self._is_stale and not self._calls:
            await self._drop_transport()
        return call.verdicts(doubtful=Unavailable(f"Webhook: {self._surplus}"))

    async def close(self) -> None:
        """End the calls that wait, and close all connections."""
        for call in self._calls:
            call.stop()
        if self._calls:
            await asyncio.wait([call.task for call in self._calls])
        await self._drop_transport()

    async def _post(self, call: _Call, index: int, message: Message, keys: Sequence[bytes]) -> Verdict:
        """Send one message of a call; return the verdict that its answer means."""
        if (why := self._pause.why) is not None:
            return Unavailable(why, everything=True)
        try:
            content = self._target.format(message)
            headers = header_bytes({**content.headers, **_signed(content.headers[ID], content.body, keys)})
        except (InvalidMessageError, UnicodeError) as error:
            return Reject(str(error) if isinstance(error, InvalidMessageError) else f"HTTP cannot carry it: {error}")
        try:
            answer, connection = await self._ask(headers, content.body)
            call.note(index, connection)
            return self._judged(answer)
        except LocalProtocolError as error:
            return Reject(f"HTTP cannot carry it: {self._fit_to_show(str(error))}")
        except Exception as error:  # any program may listen at that port, and answer anything
            return self._failed(error)

    async def _ask(self, headers: list[tuple[bytes, bytes]], content: bytes) -> tuple[Answer, Connection]:
        """Send a request; return its answer when all of it is here, or as much as is read of a long one.

        The connection over which it came is returned with it.
        """
        assert self._transport is not None  # dropped only when no call is under way
        merged = Headers(self._headers)
        merged.update(headers)
        request = Request("POST", self._url, headers=merged, content=content)
        async with aclosing(await self._transport.handle_async_request(request)) as response:
            body = await _beginning(response)
            location = response.headers.get("Location", "")
            answer = Answer(
                status=response.status_code,
                text=self._fit_to_show(body.decode(errors="replace")),
                location=self._fit_to_show(redacted(location)) if "://" in location else "",
                retry_after=response.headers.get("Retry-After"),
            )
            return answer, connection_of(response.extensions)

    def _judged(self, answer: Answer) -> Verdict:
        """Return the verdict that an answer means; begin the pause that it asks for."""
        verdict = answer.verdict()
        if verdict is DONE:
            self._log.connected(self._target.shown)
            return DONE
        if isinstance(verdict, Unavailable) and verdict.everything:
            verdict = self._away(verdict.error)
            if (seconds := answer.pause()) > 0:
                self._pause.begin(seconds, verdict.error)
        return verdict

    def _failed(self, error: Exception) -> Unavailable:
        """Return the verdict on a message that got no answer, or none that can be read."""
        reason = self._fit_to_show(_reason(error))
        if isinstance(error, (ConnectError, ProxyError)):
            # The next pool reads the file of certificates again.
            self._is_stale = True
            return self._away(reason)
        # Perhaps only this message ends the server that gets it, so that others are tried.
        return Unavailable(self._log.lost(f"{self._target.shown}: {reason}"))

    def _away(self, reason: str) -> Unavailable:
        """Log that the endpoint takes nothing; return the verdict that says so."""
        return Unavailable(self._log.lost(f"{self._target.shown}: {reason}"), everything=True)

    def _fit_to_show(self, text: str) -> str:
        return one_line(self._target.without_secrets(text), _MAX_SHOWN)

    def _open_transport(self) -> AsyncHTTPTransport:
        """Return connections to the endpoint; each is made when it is needed. The driver itself limits no time.

        Raises:
            ValueError: the file of certificates cannot be read. The text says where.
        """
        target, most = self._target, self._target.most
        transport = AsyncHTTPTransport(
            verify=_trust(target),
            trust_env=False,
            limits=Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=_IDLE_SECONDS),
            proxy=target.proxy,
        )
        # The pool takes everything else that it needs, but no network.
        watch(transport._pool, requests=target.per_connection, log=self._log, surplus=self._surplus)
        return transport

    async def _drop_transport(self) -> None:
        transport, self._transport, self._is_stale = self._transport, None, False
        if transport is not None:
            # An error of the driver on a dead socket must not prevent the next connection.
            with suppress(Exception):
                async with asyncio.timeout(self._target.seconds * 0.05):
                    await transport.aclose()


class _Call:
    """One call of `send`: its messages, the time that it has, and the verdicts. Made in the task that runs it."""

    def __init__(self, messages: Sequence[Message], *, most: int, seconds: float) -> None:
        self._messages = messages
        self._chains = Chains(messages, most=most, most_bytes=_MAX_BYTES_UNDER_WAY)
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._begin_until = now + seconds * _SHARE_TO_BEGIN
        self._limit = asyncio.timeout_at(now + seconds)
        #: The messages that each connection has answered.
        self._answered: dict[Connection, list[int]] = {}
        #: The verdict on what is not sent any more, because it would get the same one.
        self._rest: Unavailable | None = None
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_stopped = False
        self.has_accepted = False

    async def run(self, post: Post) -> bool:
        """Post the messages, as many at once as may be; return False if time ran out, or the call was stopped."""
        try:
            async with self._limit, asyncio.TaskGroup() as group:
                self._offer(group, post)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """End the call at once."""
        self.is_stopped = True
        with suppress(RuntimeError):  # its time is over already
            self._limit.reschedule(self._loop.time())

    def give_up(self, verdict: Unavailable) -> None:
        """Settle what is under way, for which no answer is waited for any more."""
        for index in self._chains.under_way():
            self._chains.settle(index, verdict)
        if verdict.everything:
            self._rest = self._rest or verdict

    def note(self, index: int, connection: Connection) -> None:
        """Note over which connection the answer to a message came."""
        self._answered.setdefault(connection, []).append(index)

    async def look_at_connections(self) -> None:
        """Look whether more answers have come than there were requests."""
        for connection in self._answered:
            await connection.look()

    def verdicts(self, *, doubtful: Unavailable) -> list[Verdict]:
        """Return one verdict per message. Nothing is under way any more.

        `doubtful`: the verdict on messages whose connection had an answer too many.
        """
        verdicts = self._settled()
        doubted = {i for connection, answered in self._answered.items() if connection.has_surplus for i in answered}
        if doubted:
            keys: set[str | None] = set()
            for index, message in enumerate(self._messages):
                if index in doubted:
                    verdicts[index] = doubtful
                    keys |= {message.key} - {None}
                elif message.key in keys:
                    verdicts[index] = EARLIER
        return verdicts

    def _settled(self) -> list[Verdict]:
        rest = self._rest or Unavailable("not sent, because the time of the call was over")
        while (index := self._chains.take()) is not None:
            self._chains.settle(index, rest)
        return self._chains.verdicts()

    def _offer(self, group: asyncio.TaskGroup, post: Post) -> None:
        """Begin the requests that may begin now."""
        while (index := self._next()) is not None:
            group.create_task(self._settle(index, group, post))

    def _next(self) -> int | None:
        """Return the index of a message that may be sent now; None if there is none."""
        may_begin = self._rest is None and not self.is_stopped and self._loop.time() < self._begin_until
        return self._chains.take() if may_begin else None

    async def _settle(self, first: int, group: asyncio.TaskGroup, post: Post) -> None:
        """Post one message after the other, as long as there is one that may be sent."""
        index: int | None = first
        while index is not None:
            verdict = await post(index, self._messages[index])
            self._chains.settle(index, verdict)
            if isinstance(verdict, Unavailable) and verdict.everything:
                self._rest = verdict
            self.has_accepted = self.has_accepted or verdict is DONE
            # In this task, because it takes the connection that has just become free; the pool tries every idle one.
            index = self._next()
            self._offer(group, post)


def _headers_of(target: Target) -> dict[str, str]:
    """Return the headers of every request."""
    # Told to, the endpoint closes a connection itself, and it is its system that remembers the connection for a while.
    connection = "close" if target.per_connection == 1 else "keep-alive"
    headers = {"User-Agent": "outbox", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": connection}
    if target.authorization is not None:
        headers["Authorization"] = target.authorization
    return headers


def _trust(target: Target) -> ssl.SSLContext | bool:
    """Return the certificates that are trusted; True stands for those of the platform."""
    if target.ca is not None:
        return _trusting(target.ca)
    if any(url.startswith("https:") for url in (target.url, target.proxy or "")):
        return True
    # To read them takes 20 ms, which a plain endpoint that is lost and found again must not cost each time.
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trusting(ca: Path) -> ssl.SSLContext:
    """Return a context that trusts the certificates in a file, and no others."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError:
        raise ValueError(f"ca {ca}: it holds no certificates") from None
    except OSError as error:
        raise ValueError(f"ca {ca}: {(error.strerror or 'cannot be read').lower()}") from None


async def _beginning(response: Response) -> bytes:
    """Return the body of an answer, or the beginning of a long one, whose connection is closed then."""
    body = bytearray()
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) >= _MAX_ANSWER_BYTES:
                break
    return bytes(body)


def _signed(message_id: str, body: bytes, keys: Sequence[bytes]) -> dict[str, str]:
    """Return the headers that say when a request was sent, and by whom."""
    timestamp = str(int(time.time()))
    if not keys:
        return {TIMESTAMP: timestamp}
    signatures = (signature_of(key, message_id, timestamp, body) for key in keys)
    return {TIMESTAMP: timestamp, SIGNATURE: " ".join(signatures)}


def _reason(error: BaseException) -> str:
    """Return why there was no answer: the first cause that says more than the driver does."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # one for each address of the host
            cause = cause.exceptions[0]
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is refused: {cause.verify_message}"
        if isinstance(cause, (ssl.SSLError, socket.gaierror)):
            return str(cause.reason if isinstance(cause, ssl.SSLError) else cause.strerror).lower()
        if isinstance(cause, OSError) and cause.errno in errno.errorcode:
            name = f"{cause.filename}: " if cause.filename else ""
            return name + os.strerror(cause.errno or 0).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__

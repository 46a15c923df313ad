"""Webhooks, by httpcore2: URL `https://user:password@host/path?secret-file=/path&timeout=5&most=32`.

Each message is one POST to the URL, in the form of `outbox.senders.webhook_format`, with a signature of
`outbox.senders.webhook_signature`. A message is `Done` after a complete answer with a status from 200 to 299; for other
statuses see `outbox.senders.webhook_answer`. Endpoints use `outbox.senders.webhook_reading`.

The options of `outbox.senders.webhook_url` are ours: secret-file, timeout, most (the requests under way at once),
per-connection (the requests that one connection carries), proxy, those of OAuth (see `outbox.senders.webhook_oauth`),
and the files of TLS. The rest of the query belongs to the endpoint. Credentials before the @ are sent as HTTP basic
authentication.

Redirects are not followed, cookies not kept, and proxies of the environment not used, so that messages and credentials
go nowhere but to the URL.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.secret import redacted, without
from outbox.runtime.text import one_line
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.key_order import Chains
from outbox.senders.remote import MOST_BYTES_UNDER_WAY, Call, Connection, RemoteSender
from outbox.senders.tls import Tls
from outbox.senders.webhook_answer import Answer, Pause
from outbox.senders.webhook_format import header_bytes, wire_headers_of
from outbox.senders.webhook_oauth import Tokens
from outbox.senders.webhook_signature import ID, SIGNATURE, TIMESTAMP, Secrets, signature_of
from outbox.senders.webhook_url import Target

try:
    from httpcore2 import (
        URL,
        AsyncConnectionPool,
        ConnectError,
        LocalProtocolError,
        Proxy,
        ProxyError,
        Request,
        Response,
        default_ssl_context,
    )

    from outbox.senders.webhook_connections import Network, Stream
except ImportError as error:
    raise MissingExtraError("webhooks need an extra: pip install 'outbox-log[http]'") from error

#: So much of an answer is read; more would only delay the next message.
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_SHOWN = 200
#: Requests begin in this share of a call's time. The rest is for the answers, so that a slow endpoint gets no message
#: twice because time ran out.
_SHARE_TO_BEGIN = 0.75
#: A token is waited for in this share of a call's time.
_SHARE_FOR_TOKEN = 0.5
#: Seconds after which an idle connection is closed. Many servers wait longer, so that they seldom close it first.
_IDLE_SECONDS = 5.0
_SURPLUS = (
    "an answer came without a request, so the answers of the connection prove nothing; mend the endpoint or the proxy,"
    " or use each connection once, with the option per-connection=1"
)

Headers = list[tuple[bytes, bytes]]
Post = Callable[[Message], Awaitable[tuple[Verdict, Stream | None]]]


class WebhookSender(RemoteSender):
    """A sender that posts messages to a URL; at most one message of a key is unacknowledged."""

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        target = Target.of(url, timeout=timeout)
        # It outlives the connections: an endpoint that wants no requests wants none over another connection either.
        pause = Pause()
        tokens = None if target.oauth is None else Tokens(target.oauth)
        super().__init__(
            "Webhook",
            url,
            (target.shown,),
            lambda server, log: _Pool(server, log, target, pause, tokens),
            seconds=target.seconds,
            chains=partial(Chains, most=target.most, most_bytes=MOST_BYTES_UNDER_WAY),
        )


class _Pool(Connection):
    """The connections to an endpoint, each made when needed."""

    def __init__(self, server: str, log: ConnectionLog, target: Target, pause: Pause, tokens: Tokens | None) -> None:
        super().__init__(server, log)
        self._tokens = tokens
        self._asking_for_token = asyncio.Lock()
        #: The last failure of a request for a token.
        self._no_token: _NoTokenError | None = None
        self._target = target
        self._url = URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
        self._headers = _headers_of(target)
        self._pause = pause
        self._secrets = Secrets(target.secret_file)
        self._pool: AsyncConnectionPool
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stale = self._is_left = False

    @property
    def is_lost(self) -> bool:
        return self.is_closed or self._is_stale

    async def open(self, deadline: float) -> None:
        """Make the pool, without a time limit of its own; raise if the file of certificates cannot be read."""
        target = self._target
        self._pool = AsyncConnectionPool(
            ssl_context=_trust(target),
            proxy=None if target.proxy is None else Proxy(target.proxy.url, target.proxy.auth),
            max_connections=target.most,
            max_keepalive_connections=target.most,
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=Network(target.per_connection, lambda: self.log.lost(f"{self.server}: {_SURPLUS}")),
        )

    async def carry(self, call: Call) -> None:
        try:
            keys = self._secrets.keys()
        except ValueError as error:
            # Never unsigned where a signature is wanted: the endpoint would refuse it, or worse, take it.
            raise ConnectionError(str(error)) from None
        posting = _Posting(call, partial(self._post, keys))
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await posting.run()
        except TimeoutError:
            text = self.log.lost(f"{self.server}: no answer within {call.seconds:g} s")
            posting.give_up(Unavailable(text, everything=not posting.has_accepted))
            # Other connections may be as dead as those that were waited for.
            self._is_stale = True
        except asyncio.CancelledError:
            if not self._is_left:
                raise
            posting.give_up(Unavailable("Webhook: the sender was closed", everything=True))
        finally:
            self._tasks.remove(task)
        if doubted := await posting.doubted():
            call.chains.take_back(doubted, Unavailable(f"Webhook: {self.server}: {_SURPLUS}"))

    async def close(self) -> None:
        self.is_closed = True
        # An error of the driver on a dead socket must not prevent the next connection.
        with suppress(Exception):
            async with asyncio.timeout(self._target.seconds * 0.05):
                await self._pool.aclose()

    async def leave(self) -> None:
        self._is_left = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.close()

    def words(self, error: Exception) -> str:
        reason = reason_of(error)
        # The driver has a name for a lost connection, and no more.
        return self._fit_to_show("the connection broke" if reason == type(error).__name__ else reason)

    async def _post(self, keys: Sequence[bytes], message: Message) -> tuple[Verdict, Stream | None]:
        """Send one message; return the verdict, and the connection of the answer."""
        if (why := self._pause.why) is not None:
            return Unavailable(why, everything=True), None
        try:
            fields = wire_headers_of(message)
            headers = header_bytes({**fields, **_signed(fields[ID], message.body, keys)})
        except (InvalidMessageError, UnicodeError) as unfit:
            text = str(unfit) if isinstance(unfit, InvalidMessageError) else f"HTTP cannot carry it: {unfit}"
            return Reject(text), None
        try:
            answer, stream = await self._ask(headers, message.body)
            return self._judged(answer), stream
        except _NoTokenError as error:
            return self._away(str(error)), None
        except LocalProtocolError as unfit:
            return Reject(f"HTTP cannot carry it: {self.words(unfit)}"), None
        except Exception as error:  # any program may listen at that port, and answer anything
            return self._failed(error), None

    async def _ask(self, headers: Headers, content: bytes) -> tuple[Answer, Stream | None]:
        """Send a message; return the whole answer, or the beginning of a long answer.

        With OAuth, a token that is refused is renewed, once.
        """
        if self._tokens is None:
            return await self._answer(headers, content)
        token = await self._token(self._tokens)
        answer, stream = await self._answer([*headers, _bearer(token)], content)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self._tokens.drop(token)
            token = await self._token(self._tokens)
            answer, stream = await self._answer([*headers, _bearer(token)], content)
        return answer, stream

    async def _answer(self, headers: Headers, content: bytes) -> tuple[Answer, Stream | None]:
        response, body, stream = await self._request(self._url, [*self._headers, *headers], content)
        location = _header(response, b"location") or ""
        answer = Answer(
            status=response.status,
            text=self._fit_to_show(body.decode(errors="replace")),
            location=self._fit_to_show(redacted(location)) if "://" in location else "",
            retry_after=_header(response, b"retry-after"),
        )
        return answer, stream

    async def _request(self, url: URL, headers: Headers, content: bytes) -> tuple[Response, bytes, Stream | None]:
        """Send a request; return the answer, the body or its beginning, and the connection."""
        headers = [*headers, (b"Content-Length", b"%d" % len(content))]
        request = Request("POST", url, headers=headers, content=content)
        async with aclosing(await self._pool.handle_async_request(request)) as response:
            body, is_whole = await _beginning(response)
            stream = response.extensions["network_stream"]
            if not isinstance(stream, Stream):
                stream = None  # the endpoint wants another protocol
            elif is_whole:
                stream.answered()
            return response, body, stream

    async def _token(self, tokens: Tokens) -> str:
        """Return the token for a request now; raise `_NoTokenError` if the token endpoint gives no token."""
        before = self._no_token
        async with self._asking_for_token:
            if (token := tokens.token) is not None:
                return token
            if self._no_token is not None and self._no_token is not before:
                # Another request has asked meanwhile. Many wrong logins at once may lock the client out.
                raise self._no_token
            try:
                headers, content = tokens.request()
                async with asyncio.timeout(self._target.seconds * _SHARE_FOR_TOKEN):
                    url = URL(tokens.grant.url)
                    given = header_bytes({"Host": _netloc_of(url), "User-Agent": "outbox", **headers})
                    response, body, _ = await self._request(url, given, content)
                return tokens.take(response.status, body)
            except Exception as error:  # any program may listen at that port, and answer anything
                self._is_stale = self._is_stale or isinstance(error, (ConnectError, ProxyError))
                why = "no answer" if isinstance(error, TimeoutError) else str(error)
                reason = why if isinstance(error, (TimeoutError, ValueError)) else reason_of(error)
                text = f"the token endpoint {tokens.grant.shown}: {reason}"
                self._no_token = _NoTokenError(self._fit_to_show(text))
                raise self._no_token from None

    def _judged(self, answer: Answer) -> Verdict:
        """Return the verdict of an answer; begin the pause of the answer."""
        verdict = answer.verdict()
        if verdict is DONE:
            self.log.connected(self.server)
            return DONE
        if isinstance(verdict, Unavailable) and verdict.everything:
            verdict = self._away(verdict.error)
            if (seconds := answer.pause()) > 0:
                self._pause.begin(seconds, verdict.error)
        return verdict

    def _failed(self, error: Exception) -> Unavailable:
        """Return the verdict on a message without a readable answer."""
        # With TLS 1.3 an endpoint refuses the client's certificate only when the request is under way.
        if isinstance(error, (ConnectError, ProxyError, ssl.SSLError)):
            # The next pool reads the files of certificates again.
            self._is_stale = True
            return self._away(self.words(error))
        # Perhaps only this message ends the server that gets it, so that others are tried.
        return Unavailable(self.log.lost(f"{self.server}: {self.words(error)}"))

    def _away(self, reason: str) -> Unavailable:
        """Log that the endpoint takes nothing; return the verdict."""
        return Unavailable(self.log.lost(f"{self.server}: {reason}"), everything=True)

    def _fit_to_show(self, text: str) -> str:
        hidden = self._target.hidden if self._tokens is None else (*self._target.hidden, *self._tokens.hidden)
        return one_line(without(text, hidden), _MAX_SHOWN)


class _NoTokenError(Exception):
    """Raised when there is no token for a request. The text says why."""


class _Posting:
    """The requests of one call."""

    def __init__(self, call: Call, post: Post) -> None:
        self._call = call
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._begin_until = self._loop.time() + call.seconds * _SHARE_TO_BEGIN
        #: The messages that each connection has answered.
        self._answered: dict[Stream, list[int]] = {}
        #: The verdict on what is not sent any more, because it would get the same one.
        self._rest: Unavailable | None = None
        self.has_accepted = False

    async def run(self) -> None:
        """Post the messages, as many at once as may be; raise `TimeoutError` if an answer is missing."""
        async with asyncio.timeout_at(self._call.deadline), asyncio.TaskGroup() as group:
            self._offer(group)
        self._give_up_rest()

    def give_up(self, verdict: Unavailable) -> None:
        """Settle messages under way; also the unsent ones if this verdict, or an earlier one, concerns everything."""
        for index in self._call.chains.under_way():
            self._call.chains.settle(index, verdict)
        if verdict.everything:
            self._rest = self._rest or verdict
        self._give_up_rest()

    def _give_up_rest(self) -> None:
        if self._rest is not None:
            self._call.chains.give_up(self._rest.error)

    async def doubted(self) -> set[int]:
        """Return the messages of connections with more answers than requests."""
        for stream in self._answered:
            await stream.look()
        return {index for stream, answered in self._answered.items() if stream.has_surplus for index in answered}

    def _offer(self, group: asyncio.TaskGroup) -> None:
        """Begin the requests that may begin now."""
        while (index := self._next()) is not None:
            group.create_task(self._settle(index, group))

    def _next(self) -> int | None:
        """Return the index of a message to send now, if there is any."""
        may_begin = self._rest is None and self._loop.time() < self._begin_until
        return self._call.chains.take() if may_begin else None

    async def _settle(self, first: int, group: asyncio.TaskGroup) -> None:
        """Post one message after the other, until none may be sent."""
        index: int | None = first
        while index is not None:
            verdict, stream = await self._post(self._call.messages[index])
            if stream is not None:
                self._answered.setdefault(stream, []).append(index)
            self._call.chains.settle(index, verdict)
            if isinstance(verdict, Unavailable) and verdict.everything:
                self._rest = verdict
            self.has_accepted = self.has_accepted or verdict is DONE
            # In this task, because it takes the connection that has just become free; the pool tries every idle one.
            index = self._next()
            self._offer(group)


def _headers_of(target: Target) -> Headers:
    """Return the headers of every request."""
    # Told to, the endpoint closes a connection itself, and it is its system that remembers the connection for a while.
    connection = "close" if target.per_connection == 1 else "keep-alive"
    headers = {
        "Host": target.netloc,
        "User-Agent": "outbox",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": connection,
    }
    if target.authorization is not None:
        headers["Authorization"] = target.authorization
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _trust(target: Target) -> ssl.SSLContext:
    """Return the context of the options `ca`, `cert` and `key`; without options a context that trusts the system's."""
    if target.tls is not None and target.tls != Tls():
        return target.tls.context()
    others = (target.proxy and target.proxy.url, target.oauth and target.oauth.url)
    if target.scheme == "https" or any(url and url.startswith("https:") for url in others):
        return default_ssl_context()
    # To read them takes 20 ms, which a plain endpoint that is lost and found again must not cost each time.
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def _beginning(response: Response) -> tuple[bytes, bool]:
    """Return the body of an answer, or the beginning of a long body, and whether the body is whole."""
    body = bytearray()
    async with aclosing(response.aiter_stream()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) >= _MAX_ANSWER_BYTES:
                return bytes(body), False
    return bytes(body), True


def _header(response: Response, wanted: bytes) -> str | None:
    found = [value for name, value in response.headers if name.lower() == wanted]
    return found[0].decode("latin-1") if found else None


def _bearer(token: str) -> tuple[bytes, bytes]:
    return b"Authorization", f"Bearer {token}".encode()


def _netloc_of(url: URL) -> str:
    host = url.host.decode()
    host = f"[{host}]" if ":" in host else host
    return host if url.port is None else f"{host}:{url.port}"


def _signed(message_id: str, body: bytes, keys: Sequence[bytes]) -> dict[str, str]:
    """Return the headers for the time of a request and for its signatures."""
    timestamp = str(int(time.time()))
    if not keys:
        return {TIMESTAMP: timestamp}
    signatures = (signature_of(key, message_id, timestamp, body) for key in keys)
    return {TIMESTAMP: timestamp, SIGNATURE: " ".join(signatures)}

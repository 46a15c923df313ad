"""The gRPC side of a front: a server in an event loop, with handlers for the calls."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from outbox.errors import OptionError
from outbox.model.verdict import describe
from outbox.rocketmq.front.authentication import Authentication
from outbox.rocketmq.front.calls import Call, Handlers, Streaming, Unary
from outbox.rocketmq.front.limits import Limits
from outbox.rocketmq.front.protocol import RPCS, SERVICE, Rpc, Wire
from outbox.rocketmq.front.routing import Place
from outbox.rocketmq.front.security import Port
from outbox.rocketmq.front.settings import UnknownSettingsError
from outbox.rocketmq.front.statuses import Code, RefusedError, internal, line_of, status
from outbox.rocketmq.front.telemetry import Telemetry
from outbox.rocketmq.front.tls import Certificate, Pair
from outbox.rocketmq.front.unfinished import Unfinished
from outbox.runtime.clock import clock
from outbox.runtime.stop import Stop
from outbox.runtime.throttled_log import ThrottledLog
from outbox.telemetry.activity_log import activity_logger
from outbox.telemetry.events import Called, Teller

logger = logging.getLogger("outbox")

_TELEMETRY = RPCS["Telemetry"]
#: Seconds for calls under way after a stop, and for a stream to take a command.
_DRAIN_SECONDS, _WRITE_SECONDS = 8.0, 2.0
BEAT_SECONDS = 5.0
_LARGE_AT_ONCE = 4


class Server:
    """Serves the calls of the protocol until a stop."""

    def __init__(
        self,
        ports: Sequence[Port],
        handlers: Handlers,
        telemetry: Telemetry,
        *,
        authentication: Authentication | None = None,
        limits: Limits | None = None,
        teller: Teller | None = None,
        for_clients: Callable[[str], str] = str,
    ) -> None:
        """`authentication`: of each call; None: every client may call. `teller`: tells of calls.

        `for_clients`: returns the text of an error without what clients must not know.
        """
        self._ports = ports
        self._tls = any(port.certificate is not None for port in ports)
        self._telemetry = telemetry
        self._authentication = authentication
        self._limits = limits or Limits()
        self._teller, self._for_clients = teller, for_clients
        self._beside, self._end = handlers.beside, handlers.end
        self._methods = {
            **{name: self._unary(RPCS[name], handler) for name, handler in handlers.unary.items()},
            **{name: self._streaming(RPCS[name], handler) for name, handler in handlers.streaming.items()},
            _TELEMETRY.name: grpc.stream_stream_rpc_method_handler(
                self._talk, None, _TELEMETRY.response.SerializeToString
            ),
        }
        #: Commands with long lists are heard a few at a time.
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._log = ThrottledLog(logger)
        #: The tasks of open streams, which a stop ends.
        self._talks: set[asyncio.Task[Any]] = set()
        self._unfinished = Unfinished(self._limits.unfinished_bytes)
        #: The turns of calls to be read, by the connection; forgotten after the last call.
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        self._ending = False

    def serve(self, outer: Stop, *, bound: Callable[[Sequence[Place]], None], beat: Callable[[], None]) -> None:
        """Serve until a stop is asked; then end streams, and finish the calls under way.

        `bound`: told the places, one for each port. `beat`: called every `BEAT_SECONDS`.

        Raises:
            OptionError: another process has the port, or the host is not of this machine.
        """
        asyncio.run(self._serve(outer, bound, beat))

    async def _serve(self, outer: Stop, bound: Callable[[Sequence[Place]], None], beat: Callable[[], None]) -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stopped.set)

        stop = Stop(outer, wake=wake)
        server = grpc.aio.server(options=self._limits.options())
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._methods),))
        places = [_opened(server, port) for port in self._ports]
        self._ending = False
        await server.start()
        bound(places)
        for port, place in zip(self._ports, places, strict=True):
            # Shown without --verbose, as the place is what clients need.
            activity_logger.info(
                "front: listens at %s, %s TLS, %s credentials",
                place,
                "without" if port.certificate is None else "with",
                "without" if self._authentication is None else "with",
            )
        looks = self._unfinished.run({place.port for place in places})
        beside = [asyncio.create_task(self._beside()), asyncio.create_task(looks)]
        try:
            while not stop.asked:
                beat()
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await stopped.wait()
        finally:
            self._ending = True
            for task in beside:
                task.cancel()
            self._end()
            ended = asyncio.ensure_future(server.stop(_DRAIN_SECONDS))
            for talk in self._talks:
                talk.cancel()
            await ended

    # Calls

    # For gRPC each request is a stream: so it is the front that reads, after a look at who calls, and not for ever.

    def _unary(self, rpc: Rpc, handler: Unary) -> grpc.RpcMethodHandler:
        async def answer(_requests: object, context: Any) -> Wire:
            with self._told(rpc) as told:
                try:
                    call, request = await self._read(rpc, context)
                    response = await handler(call, request)
                except grpc.aio.BaseError:
                    raise
                except Exception as error:
                    response = rpc.response(status=self._refusal(rpc, error))
                told.answered(response.status)
                return response

        return grpc.stream_unary_rpc_method_handler(answer, None, rpc.response.SerializeToString)

    def _streaming(self, rpc: Rpc, handler: Streaming) -> grpc.RpcMethodHandler:
        async def answer(_requests: object, context: Any) -> None:
            with self._told(rpc) as told:

                async def send(response: Wire) -> None:
                    await self._write(context, response)
                    if response.HasField("message"):
                        told.messages += 1
                    elif response.HasField("status"):
                        told.answered(response.status)

                refusal = None
                try:
                    try:
                        call, request = await self._read(rpc, context)
                        await handler(call, request, send)
                    except grpc.aio.BaseError:
                        raise
                    except Exception as error:
                        refusal = self._refusal(rpc, error)
                    if refusal is not None:
                        await send(rpc.response(status=refusal))
                except _NotTakenError as left:
                    # gRPC ends no call while a response waits, and without an end the client would wait for ever.
                    await left.writing
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the client has taken no response for long")

        return grpc.stream_stream_rpc_method_handler(answer, None, rpc.response.SerializeToString)

    async def _write(self, context: Any, response: Wire) -> None:
        """Write a response; leave the call if its client takes none, as if the client had given it up."""
        writing = asyncio.ensure_future(context.write(response))
        # A client that gives the call up is no error.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(self._limits.take_within.total_seconds()):
                await asyncio.shield(writing)
        except TimeoutError:
            raise _NotTakenError(writing) from None

    @contextmanager
    def _told(self, rpc: Rpc) -> Iterator[_Told]:
        """Tell of a call at the end of the block."""
        told, began = _Told(), clock()
        try:
            yield told
        finally:
            if self._teller is not None:
                self._teller.tell(Called, rpc=rpc.name, code=told.code, messages=told.messages, seconds=clock() - began)

    async def _read(self, rpc: Rpc, context: Any) -> tuple[Call, Wire]:
        """Return the call with its request.

        Raises:
            RefusedError: the client may not make the call, or the request cannot be read.
            BaseError: the request does not come.
        """
        caller = self._call(context)
        # Before the request: a stranger's takes no memory.
        self._admitted(caller)
        peer, raw = context.peer(), grpc.aio.EOF
        self._unfinished.began(peer)
        turn = self._turns.setdefault(peer, asyncio.Semaphore(self._limits.reads))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.read_within.total_seconds()) as limit:
                with self._unfinished.reading(peer, limit):
                    async with turn:
                        raw = await context.read()
        if raw is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        self._unfinished.finished(peer, len(raw))
        request = self._parsed(rpc, raw)
        return self._admitted(caller, request), request

    def _parsed(self, rpc: Rpc, raw: bytes) -> Wire:
        """Return a request.

        Raises:
            RefusedError: the bytes are none, or too many.
        """
        if len(raw) > (most := self._limits.most_bytes(rpc.name)):
            raise RefusedError(Code.PAYLOAD_TOO_LARGE, f"the request has {len(raw)} bytes, max is {most}")
        try:
            return rpc.request.FromString(raw)
        except Exception as error:
            raise RefusedError(Code.BAD_REQUEST, "the request cannot be read") from error

    def _refusal(self, rpc: Rpc, error: Exception) -> Wire:
        """Return the status for an error; log an error that is none of the client's."""
        if not isinstance(error, RefusedError):
            text = line_of(error)
            self._log.warning("front: %s failed: %s", rpc.name, text)
            error = internal(self._for_clients(text))
        return status(error.code, error.text)

    def _call(self, context: Any) -> Call:
        """Return the caller.

        Raises:
            RefusedError: the metadata have no id of a client.
        """
        metadata = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        client = metadata.get("x-mq-client-id", "")
        if not client.strip():
            raise RefusedError(Code.CLIENT_ID_REQUIRED, "client id cannot be empty")
        # The look costs some microseconds.
        tls = self._tls and context.auth_context().get("transport_security_type") == [b"ssl"]
        return Call(client, metadata, context.time_remaining(), tls, context.peer())

    def _admitted(self, call: Call, request: Wire | None = None) -> Call:
        """Return a call, if its client may make it."""
        return call if self._authentication is None else self._authentication.admit(call, request)

    # Streams

    async def _talk(self, _commands: object, context: Any) -> None:
        """Hear a client's stream until the client closes its half: a client's `close` waits for our end."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._talks.add(task)
        try:
            with self._told(_TELEMETRY) as told:
                await self._answer(context, told)
        except asyncio.CancelledError:
            if not self._ending:
                raise
        finally:
            self._talks.discard(task)

    async def _answer(self, context: Any, told: _Told) -> None:
        try:
            await self._hear(self._call(context), context, _OpenStream(context))
            end = status()
        except RefusedError as error:
            if error.code == Code.TOO_MANY_REQUESTS:
                # Most clients do not tell their program, and go on without being asked about transactions.
                self._log.warning("front: a client is refused: %s", error.text)
            end = status(error.code, error.text)
        except UnknownSettingsError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        told.answered(end)
        # Not before: while an error is handled it holds the request, and the client may take nothing.
        if end.code != Code.OK:
            await context.write(_TELEMETRY.response(status=end))

    async def _hear(self, call: Call, context: Any, stream: _OpenStream) -> None:
        clients, client, peer = self._telemetry.clients, self._admitted(call).client, context.peer()
        clients.opened(client, stream)
        self._unfinished.began(peer)
        try:
            async with asyncio.timeout(None) as limit:
                with self._unfinished.reading(peer, limit):
                    while (raw := await context.read()) is not grpc.aio.EOF:
                        size, answer = len(raw), await self._heard(call, raw)
                        del raw
                        self._unfinished.finished(peer, size)
                        if answer is not None:
                            await stream.send(answer)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the front has too many unfinished requests")
        finally:
            stream.is_open = False
            clients.closed(client, stream)

    async def _heard(self, call: Call, raw: bytes) -> Wire | None:
        """Return the answer to a command; None: it needs none."""
        # A command is several times as large when it has been read, and then it waits for the database.
        async with self._large if len(raw) > self._limits.call_bytes else nullcontext():
            command = self._parsed(_TELEMETRY, raw)
            # Again for each command: the access key may be gone meanwhile.
            return await self._telemetry.hear(self._admitted(call, command), command)


class _NotTakenError(asyncio.CancelledError):
    """A client has taken no response in time; for a handler that is as if the client had given the call up."""

    def __init__(self, writing: asyncio.Future[None]) -> None:
        super().__init__()
        self.writing = writing


@dataclass(slots=True)
class _Told:
    """What is told of a call: the name of the answer's code, and the messages handed out."""

    code: str = ""
    messages: int = 0

    def answered(self, status: Wire) -> None:
        """Note the status of the answer."""
        self.code = Code(status.code).name


class _OpenStream:
    """A stream to a client, for a single command at a time."""

    def __init__(self, context: Any) -> None:
        self.is_open = True
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._one = asyncio.Lock()

    async def send(self, command: Wire) -> None:
        """Write a command, in the stream's own event loop."""
        async with self._one:
            await self._context.write(command)

    def write(self, command: Wire) -> bool:
        """Do as `Stream.write`."""
        sending = asyncio.run_coroutine_threadsafe(self.send(command), self._loop)
        try:
            sending.result(_WRITE_SECONDS)
        except (Exception, CancelledError):
            # The client does not read, or is gone: another client is asked.
            sending.cancel()
            return False
        return self.is_open


def _opened(server: grpc.aio.Server, port: Port) -> Place:
    """Return the place at which the server listens by a port."""
    try:
        if port.certificate is None:
            number = server.add_insecure_port(str(port.listen))
        else:
            number = server.add_secure_port(str(port.listen), _credentials(port.certificate))
    except RuntimeError as error:
        raise OptionError(f"a front cannot listen at {port.listen}: {_reason(port.listen, error)}") from error
    return Place(port.listen.host, number)


def _reason(place: Place, error: Exception) -> str:
    """Return why a place cannot be listened at; gRPC does not say."""
    try:
        # Without the options of gRPC, which also listens beside a socket that is about to close.
        socket.create_server((place.host, place.port), family=_family(place)).close()
    except OSError as refused:
        if refused.errno == errno.EADDRINUSE:
            return "another process listens there; give --listen another port"
        return refused.strerror or describe(refused)
    return describe(error)


def _family(place: Place) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in place.host else socket.AF_INET


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return the server's side of TLS, which looks for a renewed certificate at each connection."""
    used = [certificate.pair()]

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        pair = certificate.pair()
        if pair is used[0]:
            return None
        used[0] = pair
        return _configuration(pair)

    return grpc.dynamic_ssl_server_credentials(_configuration(used[0]), renewed)


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)])

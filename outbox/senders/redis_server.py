"""One Redis server: connections that keep to the time of a call, and packed commands with their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, signature
from itertools import islice
from typing import Any, ClassVar, NamedTuple, cast

import hiredis
from redis import Redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.backoff import NoBackoff
from redis.connection import Connection, DefaultParser, SSLConnection
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    ExecAbortError,
    MasterDownError,
    MovedError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from outbox.runtime.text import one_line
from outbox.senders.port import Doubt
from outbox.senders.tls import Tls

# Its own types know tuples of one element only.
pack = cast("Callable[[tuple[str | bytes | int, ...]], bytes]", hiredis.pack_command)
MULTI, EXEC, ASKING = pack(("MULTI",)), pack(("EXEC",)), pack(("ASKING",))
#: A command without its arguments: a server refuses it, and with it the transaction around it.
REFUSED = pack(("XADD",))

_MOST_SHOWN = 200
#: The first version that drops a second copy.
_IDEMPOTENT = (8, 6)
#: So many commands are sent together.
_AT_ONCE = 128
#: Sockets take no time-out of 0 for one.
_LEAST_SECONDS = 0.001

#: The moment at which the call of this thread is over.
end_of_call: ContextVar[float] = ContextVar("outbox_redis_end", default=float("inf"))


class UnexpectedAnswerError(RedisError):
    """Raised when an answer does not tell whether commands were carried out."""


class Abilities(NamedTuple):
    """The abilities of a server, as far as the user may ask. `has_transactions`: the user may run MULTI and EXEC.

    `is_alone`: the server has said that it is in no cluster.
    """

    is_idempotent: bool
    largest: int
    has_transactions: bool
    is_alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """The means to connect to each server of an address."""

    scheme: str
    user: str | None
    password: str | None = field(repr=False)
    seconds: float
    database: int
    tls: Tls | None


class Server:
    """A server, with a pool of connections. `where`: for texts."""

    def __init__(self, host: str, port: int, connecting: Connecting) -> None:
        self.where = f"{connecting.scheme}://{host}:{port}"
        self.host, self.port = host, port
        #: The abilities of the server; None: not asked yet, or the connection was lost since.
        self.abilities: Abilities | None = None
        files = connecting.tls or Tls()
        self.client = Redis(
            host=host,
            port=port,
            db=connecting.database,
            username=connecting.user or None,
            password=connecting.password,
            # A round of commands may begin until half of the time is over, and takes at most the other half.
            socket_timeout=connecting.seconds / 2,
            socket_connect_timeout=connecting.seconds / 4,
            # The relay tries again. A second try in here would hide that a message may be stored twice.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            ssl=connecting.tls is not None,
            ssl_check_hostname=True,  # the default since 6.0
            ssl_ca_certs=files.ca,
            ssl_certfile=files.cert,
            ssl_keyfile=files.key,
        )
        # The client itself has no such arguments.
        pool = self.client.connection_pool
        pool.connection_class = _PlainConnection if connecting.tls is None else _SafeConnection
        pool.connection_kwargs["parser_class"] = _Parser
        # Before 5.3 the pool wants the name of a command; later versions warn about such a name.
        wants_name = signature(pool.get_connection).parameters["command_name"].default is Parameter.empty
        self._lend = partial(pool.get_connection, "XADD") if wants_name else pool.get_connection
        #: Rises with each `leave`: a connection lent before is closed when it comes back.
        self._generation = 0

    def ask(self) -> Abilities:
        """Ask for the version and for the largest value; an answer that is refused counts as the usual server."""
        has_transactions = self._has_transactions()
        questions = self.client.pipeline(transaction=False)
        questions.info("server")
        questions.config_get("proto-max-bulk-len")
        about, limits = questions.execute(raise_on_error=False)
        known = about if isinstance(about, dict) else {}
        limit = limits.get("proto-max-bulk-len") if isinstance(limits, dict) else None
        version = tuple(int(part) for part in str(known.get("redis_version", "")).split(".")[:2] if part.isdecimal())
        self.abilities = Abilities(
            is_idempotent="valkey_version" not in known and version >= _IDEMPOTENT,
            largest=int(limit or 512 * 1024 * 1024),
            has_transactions=has_transactions,
            is_alone=known.get("redis_mode", known.get("server_mode")) == "standalone",
        )
        return self.abilities

    def doubts(self) -> list[Doubt]:
        """Return the settings under which the server drops what it has accepted, as far as the user may read them."""
        found: dict[str, Any] = {**self.client.info("memory"), **self.client.info("persistence")}
        with suppress(RedisError):  # hosted servers have no CONFIG
            found.update(cast("dict[str, Any]", self.client.config_get("appendfsync")))
        doubts = []
        policy, flush = str(found.get("maxmemory_policy")), found.get("appendfsync")
        if policy.startswith("allkeys") and found.get("maxmemory"):
            problem = f"maxmemory-policy {policy} evicts streams with their messages and groups when memory is full"
            doubts.append(Doubt(self.where, problem, "run there: CONFIG SET maxmemory-policy noeviction"))
        if not found.get("aof_enabled"):
            problem = "appendonly is off: a crash loses all messages since the last snapshot"
            doubts.append(Doubt(self.where, problem, "run there: CONFIG SET appendonly yes"))
        elif flush in ("no", "everysec"):
            problem = f"appendfsync {flush}: a crash of the machine loses the messages of the last seconds"
            doubts.append(Doubt(self.where, problem, "run there: CONFIG SET appendfsync always; or wait for replicas"))
        return doubts

    def leave(self) -> None:
        """Close the connections; those in use at the end of their calls.

        Behind the address there may be another server by now, a primary.
        """
        self.abilities = None
        self._generation += 1
        # The client cannot read or write while another thread closes the connection; TypeErrors come out then.
        self.client.connection_pool.disconnect(inuse_connections=False)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Lend a connection. After a failure the connection is closed: late answers would count for other commands."""
        generation = self._generation
        connection: Any = self._lend()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            if generation != self._generation:
                connection.disconnect()
            self.client.connection_pool.release(connection)

    def _has_transactions(self) -> bool:
        """Return whether this user may begin and end a transaction."""
        try:
            with self.connection() as connection:
                send(connection, [MULTI, EXEC])
                check_transaction(answers_of(connection, 2), 0)
        except UnexpectedAnswerError:
            return False
        return True


def send(connection: Any, commands: Iterable[bytes]) -> int:
    """Send packed commands before the call is over, the first ones while others are still packed; return their number.

    A pipeline of the client waits for the last command, and takes as long for a message as the whole sender.
    """
    packed, number = iter(commands), 0
    while some := list(islice(packed, _AT_ONCE)):
        # The client's own timeout begins anew with each server of a cluster, and is set again with the next answer.
        connection._sock.settimeout(_left(connection.socket_timeout))
        connection.send_packed_command([b"".join(some)])
        number += len(some)
    return number


def answers_of(connection: Any, number: int) -> list[Any]:
    """Return the next answers of a connection; in place of an answer, there may be the server's error."""
    answers: list[Any] = []
    while len(answers) < number:
        answers.append(_answer(connection))
        # The client takes as long for an answer that has arrived as the server for a message.
        answers += connection._parser.arrived(number - len(answers))
    return answers


def check_transaction(answers: list[Any], number: int) -> list[Any] | None:
    """Return the answers to the commands of a transaction; None if no command was carried out.

    `answers`: to MULTI, to each of the `number` commands, and to EXEC.

    Raises:
        UnexpectedAnswerError: there was no transaction; the commands may have been carried out one by one.
    """
    begun, *queued, ended = answers
    if begun != b"OK":
        raise UnexpectedAnswerError(f"MULTI is answered with {shown(begun)}; let the user run MULTI and EXEC")
    if queued.count(b"QUEUED") < number:
        for answer in queued:
            if answer != b"QUEUED" and not isinstance(answer, ResponseError):
                raise UnexpectedAnswerError(f"a command behind MULTI is answered with {shown(answer)}")
    # A cluster may take the stream away between the commands and EXEC.
    if isinstance(ended, (ExecAbortError, AskError, ClusterDownError)) and number:
        return None
    if not isinstance(ended, list) or len(ended) != number:
        raise UnexpectedAnswerError(f"EXEC is answered with {shown(ended)}; let the user run MULTI and EXEC")
    return ended


def shown(answer: Any) -> str:
    """Return an answer for people."""
    return one_line(str(answer) if isinstance(answer, Exception) else repr(answer), _MOST_SHOWN)


def _left(patience: float) -> float:
    """Return the seconds until the end of the call, at most `patience`."""
    return max(_LEAST_SECONDS, min(patience, end_of_call.get() - time.monotonic()))


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


class _InTime:
    """Connects before the call is over, TLS included. The driver's own time-outs begin anew with each step."""

    def _connect(self) -> Any:
        connection: Any = self
        patience = connection.socket_connect_timeout, connection.socket_timeout
        connection.socket_connect_timeout, connection.socket_timeout = map(_left, patience)
        try:
            return super()._connect()  # type: ignore[misc]  # the driver's
        finally:
            connection.socket_connect_timeout, connection.socket_timeout = patience


class _PlainConnection(_InTime, Connection):
    pass


class _SafeConnection(_InTime, SSLConnection):
    pass


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]  # the stubs say that it is a variable
    """Reads answers until the end of the call. The client's own timeout begins anew with each piece."""

    # The client's first versions know the errors of clusters elsewhere only.
    EXCEPTION_CLASSES: ClassVar = {
        **DefaultParser.EXCEPTION_CLASSES,
        "ASK": AskError,
        "CLUSTERDOWN": ClusterDownError,
        "CROSSSLOT": ClusterCrossSlotError,
        "MASTERDOWN": MasterDownError,
        "MOVED": MovedError,
        "TRYAGAIN": TryAgainError,
    }

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        try:
            error: Exception = super().parse_error(response)
        except ValueError:  # MOVED or ASK without an address
            return ResponseError(response)
        return error

    def on_connect(self, connection: Any, **options: Any) -> None:
        super().on_connect(connection, **options)
        self._patience: float = connection.socket_timeout

    def arrived(self, most: int) -> Iterator[Any]:
        """Return the answers that have arrived, at most so many."""
        return islice(iter(self._reader.gets, NOT_ENOUGH_DATA), most)

    def read_from_socket(self, timeout: Any = None, **options: Any) -> Any:
        # With 0 the pool looks whether a connection that it lends has something to say.
        if timeout != 0:
            timeout = max(0.0, min(self._patience, end_of_call.get() - time.monotonic()))
        return super().read_from_socket(timeout=timeout, **options)

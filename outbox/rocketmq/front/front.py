"""The front: a server for RocketMQ's clients over one outbox, as a work with a life cycle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import get_args

from outbox.errors import OptionError
from outbox.relay.life_cycle import LifeCycle
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.default_producer import Writes
from outbox.rocketmq.front.calls import Handlers, Threads
from outbox.rocketmq.front.clients import MOST_CLIENTS, Clients
from outbox.rocketmq.front.desks import Desks
from outbox.rocketmq.front.receiving import Receiving
from outbox.rocketmq.front.routing import Place, Routes, TopicType
from outbox.rocketmq.front.security import Security
from outbox.rocketmq.front.sending import Sending
from outbox.rocketmq.front.server import BEAT_SECONDS, Server
from outbox.rocketmq.front.statuses import RefusedError
from outbox.rocketmq.front.telemetry import Telemetry
from outbox.rocketmq.front.transactions import Transactions
from outbox.rocketmq.front.validation import checked_group, checked_topic
from outbox.rocketmq.service import CheckedGroup, CheckService
from outbox.runtime.clock import clock
from outbox.telemetry.events import Beat
from outbox.worker.settings import Until
from outbox.writing.bare import BareOutbox

#: Seconds after a stop within which all ends; the server has most of them.
_END_SECONDS = 9.5


class Front(LifeCycle):
    """Serves the official clients of RocketMQ 5 from an outbox: `Front(outbox, topics={"orders": "NORMAL"}).run()`.

    Any number of fronts may serve one outbox, each with the same topics: all that a client tells is stored there.

    Args:
        outbox: the outbox of the messages.
        listen: the place to listen at, HOST:PORT; port 0: any free port.
        advertise: the place that clients are told to connect to, such as a load balancer; None: `listen`.
        topics: the topics with their types, as each topic of RocketMQ 5 has a type.
        fifo_groups: consumer groups that take the messages of a message group in order.
        policy: when producers are asked about open transactions, and how often; the same for all fronts.
        max_clients: the most clients of this front; a further one is refused until one of them has gone.
        security: credentials of clients, and TLS; None: every client may call, without TLS.

    Raises:
        TypeError: the outbox is none.
        ValueError: a place or a topic is none, or a file of `security` cannot be used.
    """

    _what = "front"

    def __init__(
        self,
        outbox: Writes,
        *,
        topics: Mapping[str, TopicType],
        fifo_groups: Collection[str] = (),
        listen: str = "127.0.0.1:8081",
        advertise: str | None = None,
        policy: CheckPolicy | None = None,
        max_clients: int = MOST_CLIENTS,
        security: Security | None = None,
    ) -> None:
        if not isinstance(outbox, BareOutbox):
            raise TypeError(f"outbox is an Outbox, not {type(outbox).__name__}: pass Outbox(engine)")
        super().__init__(outbox, f"front:{listen}", None)
        security = security or Security()
        self._ports = security.ports(listen, advertise)
        self._topics = checked_topics(topics)
        self._policy = policy or CheckPolicy()
        self._authentication = security.authentication()
        self._writes = outbox
        self._max_clients = max_clients
        self._fifo_groups = frozenset(map(_checked_group, fifo_groups))
        #: The places at which the front listens, one for each port.
        self._places: Sequence[Place] = ()

    @property
    def listening(self) -> Place | None:
        """The place at which the front listens; None while it does not."""
        return self._places[0] if self._places else None

    @property
    def listening_tls(self) -> Place | None:
        """The place at which the front listens with TLS; None while it does not, or without TLS."""
        return self._places[-1] if self._places and self._ports[-1].certificate is not None else None

    @cached_property
    def _worker(self) -> _Serving:
        return _Serving(self)

    def close(self) -> None:
        """Do nothing: a run closes all connections at the end."""

    def serve(self) -> None:
        """Serve until a stop is asked, and ask about open transactions meanwhile."""
        threads = Threads()
        clients, routes = Clients(self._max_clients), Routes(self._topics, self._told)
        telemetry = Telemetry(clients, self._topics, self._fifo_groups)
        desks = Desks(self.outbox, self._fifo_groups)
        receiving = Receiving(desks.of, desks.hints, routes, threads, clients.alive, self._fifo_groups)
        transactions = Transactions(self.outbox, clients, self._policy.transaction_timeout, threads)
        sending = Sending(self._writes, self._topics, transactions, threads)
        checks = Supervisor(self._checks(transactions))
        ending = _Ending()

        def end() -> None:
            ending.begin()
            checks.stop()
            receiving.end()

        handlers = Handlers(
            unary={
                "QueryRoute": routes.query,
                "Heartbeat": telemetry.heartbeat,
                "NotifyClientTermination": telemetry.terminated,
                "SendMessage": sending.send,
                "EndTransaction": transactions.end,
                "RecallMessage": sending.recall,
                **receiving.unary,
            },
            streaming={"ReceiveMessage": receiving.receive},
            beside=receiving.renewals.run,
            end=end,
        )
        try:
            checks.start()
            server = Server(self._ports, handlers, telemetry, authentication=self._authentication)
            server.serve(self._stop, bound=self._bound, beat=self._beat)
        finally:
            self._places = ()
            checks.stop()
            checks.join(ending.left)
            threads.close(ending.left)
            transactions.close()
            desks.close(ending.left)

    def _checks(self, transactions: Transactions) -> list[CheckService]:
        """Return the work that asks about open transactions, if a topic has any."""
        groups = [
            CheckedGroup(name=topic, policy=self._policy, question=transactions.ask)
            for topic, type_ in self._topics.items()
            if type_ == "TRANSACTION"
        ]
        return [CheckService(transactions.broker, groups)] if groups else []

    def _told(self, tls: bool) -> Place:  # noqa: FBT001 - passed as a function of the one argument
        """Return the place for clients, with TLS or without."""
        number = -1 if tls else 0
        port = self._ports[number]
        return port.advertised or (self._places[number] if self._places else port.listen)

    def _beat(self) -> None:
        """Tell that the front serves, for health checks."""
        self.outbox.listeners.tell(Beat(database=self.outbox.database, seconds=3 * BEAT_SECONDS))

    def _bound(self, places: Sequence[Place]) -> None:
        self._places = places


class _Ending:
    """The end of a front. What hangs is left behind, when no time is left."""

    def __init__(self) -> None:
        self._until: float | None = None

    def begin(self) -> None:
        """Count from now on."""
        self._until = clock() + _END_SECONDS

    @property
    def left(self) -> float:
        """The seconds that are left."""
        if self._until is None:  # an error has ended the front
            self.begin()
        return max(0.0, (self._until or 0.0) - clock())


class _Serving:
    """The work of a front, for its life cycle."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def work(self, until: Until) -> None:
        """Serve until a stop is asked."""
        if until != "stopped":
            raise OptionError("a front works until it is stopped: call run() or start()")
        self._front.serve()

    def hint(self) -> None:
        """Do nothing: a front looks for no messages."""


def _checked_group(name: str) -> str:
    try:
        return checked_group(name)
    except RefusedError as error:
        raise ValueError(error.text) from error


def checked_topics(topics: Mapping[str, TopicType]) -> dict[str, TopicType]:
    """Return topics with their types.

    Raises:
        ValueError: a name or a type is none.
    """
    for name, type_ in topics.items():
        try:
            checked_topic(name)
        except RefusedError as error:
            raise ValueError(error.text) from error
        if type_ not in get_args(TopicType):
            raise ValueError(f"the type of topic {name} is one of {', '.join(get_args(TopicType))}, not {type_!r:.80}")
    return dict(topics)

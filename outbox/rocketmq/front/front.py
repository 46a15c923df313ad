"""The front: a server for RocketMQ's clients over one outbox, as a work with a life cycle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from outbox.errors import MQClientError, OptionError
from outbox.relay.life_cycle import LifeCycle
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.default_producer import Writes
from outbox.rocketmq.front.calls import Handlers, Threads, regularly
from outbox.rocketmq.front.catalog import READ_SECONDS, Catalog
from outbox.rocketmq.front.clients import ClientPolicy, Clients
from outbox.rocketmq.front.declaring import Declarations, require_group, require_topic
from outbox.rocketmq.front.group_subscriptions import GroupSubscriptions
from outbox.rocketmq.front.hands import RENEW_SECONDS, Hands
from outbox.rocketmq.front.limits import MORE_CONNECTIONS, Limits
from outbox.rocketmq.front.receiving import Receiving
from outbox.rocketmq.front.registry import EXCHANGE_SECONDS, Registry
from outbox.rocketmq.front.routing import Place, Routes, TopicType
from outbox.rocketmq.front.security import Security
from outbox.rocketmq.front.sending import AT_ONCE, Sending
from outbox.rocketmq.front.server import BEAT_SECONDS, Server
from outbox.rocketmq.front.telemetry import Telemetry
from outbox.rocketmq.front.transactions import Transactions
from outbox.rocketmq.popping import opening
from outbox.rocketmq.service import CheckedGroup, CheckService
from outbox.runtime.clock import clock
from outbox.runtime.stop import Stop
from outbox.store.database import Channel
from outbox.telemetry.events import Attended, Beat, Teller
from outbox.worker.settings import Until
from outbox.writing.bare import BareOutbox

#: For topics, groups and clients.
_ROW_CONNECTIONS = 1
#: Seconds between two looks whether the thread that was started is still there.
_LOOK_SECONDS = 0.1
#: Without a topic of transactions nothing is to be done until there is one.
_REST_SECONDS = 3600.0
#: Seconds after a stop within which all ends; the server has most of them.
_END_SECONDS = 9.5


class Front(LifeCycle):
    """Serves the official clients of RocketMQ 5 from an outbox: `Front(outbox, topics={"orders": "NORMAL"}).run()`.

    Any number of fronts may serve one outbox: topics, groups, and all that a client tells are stored there.

    Args:
        outbox: the outbox of the messages.
        listen: the place to listen at, HOST:PORT; port 0: any free port.
        advertise: the place that clients are told to connect to, such as a load balancer; None: `listen`.
        topics: topics with their types, as each topic of RocketMQ 5 has a type; added to those that are there.
        fifo_groups: consumer groups that take the messages of a message group in order; added likewise.
        policy: when producers are asked about open transactions, and how often; the same for all fronts.
        clients: how many there may be, and what they may do.
        security: credentials of clients, and TLS; None: every client may call, without TLS.

    Raises:
        TypeError: the outbox is none.
        ValueError: a place, a topic or a group is none, or a file of `security` cannot be used.
        MQClientError: from a run, a topic or a group is there with other properties.
    """

    _what = "front"

    def __init__(
        self,
        outbox: Writes,
        *,
        topics: Mapping[str, TopicType] | None = None,
        fifo_groups: Collection[str] = (),
        listen: str = "127.0.0.1:8081",
        advertise: str | None = None,
        policy: CheckPolicy | None = None,
        clients: ClientPolicy | None = None,
        security: Security | None = None,
    ) -> None:
        if not isinstance(outbox, BareOutbox):
            raise TypeError(f"outbox is an Outbox, not {type(outbox).__name__}: pass Outbox(engine)")
        super().__init__(outbox, f"front:{listen}", None)
        security = security or Security()
        self._ports = security.ports(listen, advertise)
        self._topics = dict(topics or {})
        self._policy = policy or CheckPolicy()
        self._authentication = security.authentication()
        self._teller = Teller(outbox.listeners, {"database": outbox.database})
        self._writes = outbox
        self._clients = clients or ClientPolicy()
        self._fifo_groups = frozenset(fifo_groups)
        try:
            for name, type_ in self._topics.items():
                require_topic(name, type_)
            for name in self._fifo_groups:
                require_group(name)
        except MQClientError as error:
            raise ValueError(str(error)) from error
        #: The places at which the front listens, one for each port.
        self._places: Sequence[Place] = ()
        #: Set while the front listens, and from the end of a try on; with the mistake that no other try would mend.
        self._settled = threading.Event()
        self._mistake: OptionError | MQClientError | None = None

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

    def start(self) -> None:
        """Do as `LifeCycle.start`, and return when the front listens, or cannot yet because of its database.

        Raises:
            OptionError: another process has the port, or the host is not of this machine.
            MQClientError: a topic or a group is there with other properties.
            SubscriptionError: at work in another way, or not ended yet after a stop.
        """
        if self._supervisor is None or not self._supervisor.alive:
            self._settled.clear()
            self._mistake = None
        super().start()
        while not self._settled.wait(_LOOK_SECONDS) and self._supervisor is not None and self._supervisor.alive:
            pass
        if (mistake := self._mistake) is not None:
            self.stop()
            self.join()
            raise mistake

    def work(self, until: Until, stop: Stop) -> None:
        """Do as `LifeCycle.work`, and tell `start` about the end of a try."""
        try:
            super().work(until, stop)
        except (OptionError, MQClientError) as error:
            self._mistake = error
            raise
        finally:
            self._settled.set()

    def serve(self) -> None:
        """Serve until a stop is asked, and ask about open transactions meanwhile."""
        threads, senders = Threads(), Threads(AT_ONCE)
        rows = Connections(opening(self.outbox), _ROW_CONNECTIONS)
        catalog = Catalog(rows, threads, self._clients)
        rows.call(self._declare)
        catalog.read()
        clients, routes = Clients(self._clients.most), Routes(catalog.topics, self._told)
        registry = Registry(clients, catalog.topics, rows, threads)
        telemetry = Telemetry(clients, catalog.topics, catalog.groups, catalog.look)
        subscriptions = GroupSubscriptions(self.outbox)
        receiving = Receiving(subscriptions.of, subscriptions.hints, routes, threads, registry.alive, catalog.fifo)
        transactions = Transactions(self.outbox, clients, self._policy.transaction_timeout, threads)
        sending = Sending(self._writes, catalog.topics, transactions, threads, senders)
        checks = _Checks(transactions, catalog.topics, self._policy)
        catalog.on_topics, catalog.on_groups = checks.changed, receiving.changed
        asking, ending = Supervisor([checks]), _Ending()

        async def beside() -> None:
            await asyncio.gather(
                regularly(RENEW_SECONDS, receiving.hands.renew, "messages were not renewed"),
                regularly(READ_SECONDS, catalog.read_again, "topics and groups were not read"),
                regularly(EXCHANGE_SECONDS, registry.exchange, "clients were not noted"),
            )

        def end() -> None:
            ending.begin()
            asking.stop()
            receiving.end()

        handlers = Handlers(
            unary={
                "QueryRoute": catalog.before(routes.query),
                "Heartbeat": telemetry.heartbeat,
                "NotifyClientTermination": telemetry.terminated,
                "SendMessage": catalog.before(sending.send),
                "EndTransaction": transactions.end,
                "RecallMessage": sending.recall,
                **{name: catalog.before(handler) for name, handler in receiving.unary.items()},
            },
            streaming={"ReceiveMessage": catalog.before(receiving.receive)},
            beside=beside,
            end=end,
        )
        try:
            asking.start()
            server = Server(
                self._ports,
                handlers,
                telemetry,
                authentication=self._authentication,
                limits=Limits(connections=self._clients.most + MORE_CONNECTIONS),
                teller=self._teller,
                for_clients=self.outbox.database.commands.without_place,
            )
            server.serve(self._stop, bound=self._bound, beat=lambda: self._beat(clients, receiving.hands))
        finally:
            self._places = ()
            self._teller.tell(Attended, clients=None, streams=None, renewals=receiving.hands.number())
            asking.stop()
            asking.join(ending.left)
            threads.close(ending.left)
            senders.close(ending.left)
            transactions.close()
            subscriptions.close(ending.left)
            rows.close()

    def _declare(self, channel: Channel) -> None:
        """Add the topics and groups of the application to those that are there."""
        declarations = Declarations(channel)
        for name, type_ in self._topics.items():
            declarations.add_topic(name, type_)
        for name in self._fifo_groups:
            declarations.add_group(name, ordered=True)

    def _told(self, tls: bool) -> Place:  # noqa: FBT001 - passed as a function of the one argument
        """Return the place for clients, with TLS or without."""
        number = -1 if tls else 0
        port = self._ports[number]
        return port.advertised or (self._places[number] if self._places else port.listen)

    def _beat(self, clients: Clients, hands: Hands) -> None:
        """Tell that the front serves, for health checks and metrics."""
        self._teller.tell(Beat, seconds=3 * BEAT_SECONDS)
        known, streams = clients.counts()
        self._teller.tell(Attended, clients=known, streams=streams, renewals=hands.number())

    def _bound(self, places: Sequence[Place]) -> None:
        self._places = places
        self._mistake = None
        self._settled.set()


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


class _Checks:
    """A work for a supervisor: one check service, which begins anew when the topics are others."""

    name = "front:checks"
    stopping = False

    def __init__(self, transactions: Transactions, topics: Mapping[str, TopicType], policy: CheckPolicy) -> None:
        self._transactions, self._topics, self._policy = transactions, topics, policy
        self._checked: list[str] = []
        self._round = Stop()

    def changed(self) -> None:
        """Begin anew if the topics of transactions are others. May be called from any thread."""
        if self._of_transactions() != self._checked:
            self._round.ask()

    def work(self, until: Until, stop: Stop) -> None:
        """Ask until a stop is asked."""
        with self._round.within(stop):
            while not stop.asked:
                self._round.withdraw()
                self._checked = self._of_transactions()
                groups = [
                    CheckedGroup(name=topic, policy=self._policy, question=self._transactions.ask)
                    for topic in self._checked
                ]
                if groups:
                    CheckService(self._transactions.broker, groups).work(until, self._round)
                else:
                    self._round.rest(_REST_SECONDS)

    def close(self) -> None:
        """Do nothing: each service closes its connections at the end."""

    def _of_transactions(self) -> list[str]:
        return sorted(name for name, type_ in [*self._topics.items()] if type_ == "TRANSACTION")

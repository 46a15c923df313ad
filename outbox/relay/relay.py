"""The relay: the worker whose handler is a sender."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Unpack, cast

from outbox.errors import SubscriptionError
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, OnDead, Start, compensation_of, require_own_name
from outbox.model.topics import chosen_topics
from outbox.relay.routes import Route, RouteOptions, opened, planned
from outbox.relay.supervisor import Supervisor
from outbox.runtime.fork import in_child
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.senders.opening import Destination, SenderOptions, open_sender
from outbox.store.label import label_of
from outbox.worker.job import Job
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings, Until
from outbox.worker.shared import caller_of
from outbox.worker.worker import Worker
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")


class RelayOptions(SenderOptions, total=False):
    """The rarer options of a `Relay`."""

    partitions: int | None


class Relay:
    """Sends the messages of an outbox to one destination.

    Writers may send messages of the subscription directly. Then the relay also sends the messages left behind by
    writers, from when the subscription `<name>:compensation` exists.

    Args:
        outbox: the relay reads the log there.
        sender: a `Sender`, a function of one message, or the URL of a destination.
        name: the subscription, with one selection and one destination.
        topics: names and patterns; None: all. In a pattern such as `orders.*` the `*` stands for any characters.
            `!orders.*` is an exception, and alone means all other topics.
        start: where a new subscription begins: "earliest", "latest" or a moment.
        on_dead: "block": a dead letter holds back the rest of its key; "continue": it does not. None: as stored.
        retry: how often a message is tried, and the pauses in between.
        settings: pace and limits of the worker.
        declared: by `routes`, in place of name, topics and on_dead.
        options: `partitions`, how many relays may share a new subscription. `deadline`, of one call of the sender;
            without a value the sender's own, or 5 s. `rename`, `prefix` and `envelope`, the topics and the form of sent
            messages; see `open_sender`. Direct sends keep topic and form, unless the writer's sender was opened with
            another form.

    Raises:
        SubscriptionError: the name belongs to a compensation, or no message can have one of the topics.
        SenderError: the URL is malformed; or messages cannot be sent under the topics, or in the envelope.
        TypeError: the deadline, or the sender's, is no timedelta above 0.
    """

    def __init__(
        self,
        outbox: BareOutbox,
        sender: Destination,
        *,
        name: str = "relay",
        topics: Iterable[str] | None = None,
        start: Start = "earliest",
        on_dead: OnDead | None = None,
        retry: RetryPolicy | None = None,
        settings: Settings | None = None,
        declared: Declaration | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        if not isinstance(outbox, BareOutbox):
            raise TypeError(f"Relay takes an Outbox, not {type(outbox).__name__}: Relay(Outbox(engine), …)")
        self._outbox = outbox
        partitions = options.pop("partitions", None)
        self._sender = open_sender(sender, **cast("SenderOptions", options))
        destination = self._sender.destination
        if declared is None:
            declared = Declaration(
                name=name,
                destination=destination,
                topics=chosen_topics(topics),
                on_dead=on_dead,
                partitions=partitions,
            )
        require_own_name(declared.name)
        self._name = declared.name
        left_behind = Declaration(name=compensation_of(self._name), destination=destination, kind="compensation")
        policy = HandlerPolicy(retry=retry or RetryPolicy(), deadline=self._sender.deadline)
        self._stop = Stop()
        send, caller = self._sender.send, caller_of(sender, self._sender)
        jobs = [
            Job(declared=declared, handler=send, caller=caller, policy=policy, start=start),
            # Writers create the compensation, at a position before their first row.
            Job(declared=left_behind, handler=send, caller=caller, policy=policy, start=None),
        ]
        self._worker = Worker(
            outbox.database, jobs, settings, stop=self._stop, hung=outbox.hung_calls, listeners=outbox.listeners
        )
        self._supervisor: Supervisor | None = None
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin as a relay that is not at work; also in a fork, because the parent's threads do not run there."""
        self._at_work = threading.Lock()

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self._name

    @property
    def label(self) -> str:
        """The database of the messages: host, name and schema, for people to read."""
        return label_of(self._outbox.database.engine.url, self._outbox.database.schema)

    @property
    def stopping(self) -> bool:
        """True from when a stop is asked until the relay has stopped."""
        return self._stop.asked

    def run(self, *, signals: bool = True) -> None:
        """Send until stopped. In the main thread SIGTERM and SIGINT drain and return; a second one ends at once.

        Raises:
            SubscriptionError: the relay is at work already; also from `until_empty` and `once`.
            HungHandlerError: calls of the sender never come back; the process should be started again.
        """
        with self._alone():
            try:
                with stopping_on_signals(self.stop) if signals else nullcontext():
                    self._work("stopped")
            finally:
                self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Mark the relay as at work; raise if it is, because two runs at once would take the lease from each other."""
        if not self._at_work.acquire(blocking=False):
            raise SubscriptionError(
                "this relay is at work already; stop it and join it first, or make another Relay, which waits for it"
            )
        try:
            yield
        finally:
            self._at_work.release()

    def until_empty(self) -> None:
        """Send all messages committed before now, and all parked messages that are due; then return.

        Also wait until writers may no longer send messages themselves.
        """
        with self._alone():
            self._work("empty")

    def once(self) -> None:
        """Send a batch, if there is one, and a batch of messages left behind by writers."""
        with self._alone():
            self._work("once")

    def work(self, until: Until, stop: Stop) -> None:
        """Do as `run`, `until_empty` or `once`, until `stop` is asked, too; the sender stays open."""
        with self._alone(), self._stop.within(stop):
            self._work(until, stop)

    def _work(self, until: Until, outer: Stop | None = None) -> None:
        listener = self._outbox.notifier.listen(self._worker.hint) if until == "stopped" else None
        try:
            self._worker.work(until)
        finally:
            del listener
            if outer is not None and self._stop.asked:
                # It may be that an error has ended the work just now: it is not to be tried again.
                outer.ask()
            self._stop.withdraw()

    def close(self) -> None:
        """Close the sender, after `until_empty` or `once`; `run` closes it as well. A shared sender stays open."""
        self._sender.close()

    def stop(self) -> None:
        """Ask `run` to finish the work under way and return."""
        self._stop.ask()
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.stop()

    def start(self) -> None:
        """Run in a thread of this process, unless the thread runs already.

        An error is logged, and the relay tries again after a pause, until `stop`.

        Raises:
            SubscriptionError: the relay is at work in another way, or has not ended yet after a stop.
        """
        alive = self._supervisor is not None and self._supervisor.alive
        if alive and not self.stopping:
            return
        if alive or self._at_work.locked():
            raise SubscriptionError("this relay is at work still; stop it and join it before it is started again")
        # A stop that was asked after the previous run had ended is forgotten, because there was nothing to stop.
        self._stop.withdraw()
        self._supervisor = supervisor = Supervisor([self])
        supervisor.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread of `start` to end."""
        if self._supervisor is not None:
            self._supervisor.join(timeout)


def routes(
    outbox: BareOutbox,
    table: Mapping[str, Destination | Route],
    *,
    name: str = "relay",
    start: Start = "earliest",
    retry: RetryPolicy | None = None,
    settings: Settings | None = None,
    **shared: Unpack[RouteOptions],
) -> list[Relay]:
    """Return a relay for each route: `Relays(routes(outbox, {"orders.*": "kafka://…", "*": "nats://…"})).run()`.

    A message takes the first matching route. The subscription of the last route, `*`, is `name`; of `orders.*`,
    `<name>:orders.*`.

    Args:
        outbox: the relays read the log there.
        table: destinations, or `Route` objects, by topic or pattern. The order counts.
        name: of the subscription of the route `*`.
        start, retry, settings: of each relay, as `Relay` has them.
        shared: fields of a `Route`, for routes without them.

    Raises:
        SubscriptionError: the last route is not `*`, or a route would never get a message.
    """
    given = {pattern: to if isinstance(to, Route) else Route(to=to) for pattern, to in table.items()}
    return [
        Relay(outbox, sender, declared=declared, start=start, retry=retry, settings=settings)
        for sender, declared in opened(planned(given, name, **shared))
    ]

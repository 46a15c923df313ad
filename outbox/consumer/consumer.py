"""The consumer: the worker whose handler is a listener of the application."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, Unpack

from outbox.consumer.inbox import Home, Inbox, checked_consumer
from outbox.consumer.listener import Dispatch, Listener
from outbox.consumer.options import ConsumerOptions, Options
from outbox.errors import SubscriptionError
from outbox.model.filter.sql92 import chosen_filter
from outbox.model.filter.tags import chosen_tags
from outbox.model.subscription import AT, Declaration, Kind, Start, require_ordering, require_own_name
from outbox.model.topics import Topics, chosen_topics
from outbox.relay.life_cycle import LifeCycle
from outbox.runtime.keywords import require_known
from outbox.telemetry.processing import processed
from outbox.worker.calls import Caller
from outbox.worker.job import Job, with_followers
from outbox.worker.policy import HandlerPolicy
from outbox.worker.worker import Worker
from outbox.writing.bare import BareOutbox

F = TypeVar("F", bound=Callable[..., Any])

#: The time after its deadline in which the loop cancels a coroutine, before the worker goes on without an answer.
_TO_CANCEL = timedelta(seconds=1)


class Consumer(LifeCycle):
    """Calls functions of an application with the messages of an outbox; `Outbox.consumer` makes consumers.

    Consumers of one name are a group: each message is handled by one of them. `on` adds the functions. A function gets
    a message and returns None when the message is handled; anything raised counts as a failure, and the message comes
    again. A verdict says more: `Retry("…", after=timedelta(…))`, `Reject("…")` for a dead letter at once,
    `Unavailable("…")` to count nothing. `message.attempt` is 1 at the first delivery.

    A key is handled strictly in order: messages behind a failed message of the key wait. Messages come at least once;
    with `inbox` the effects in the database come once.

    Args:
        outbox: the consumer reads the log there.
        name: of the group, which has a position of its own in the log.
        topics: names and patterns, as for a `Relay`; None: those of the functions.
        tags: an expression such as "TagA || TagB"; None: all.
        filter: a condition in SQL92 on headers, TAGS, KEYS and TOPIC, such as "price > 100"; None: all.
        ordered: False: each message is handled on its own, also with a key. None: as stored, else True.
        options: `start`, where a new group begins: "earliest", "latest" or a moment. `partitions`, how many processes
            may share a new group. `concurrency`, calls under way at once in this process, for different keys; functions
            that block run in threads, coroutines in one event loop. `batch_size`: functions get lists of at most so
            many messages, and return None, a verdict for all or a list of verdicts. `inbox`: functions get
            `(session, message)`; the inbox row is written in the same transaction. `deadline`, of a call, 30 s: a
            coroutine is cancelled, a thread is left behind and keeps its keys. `retry`, RocketMQ's 16 levels, after
            which a message is a dead letter. `suspend`: "queue": after a failure the partition waits, not only the key.
            `on_dead`: "block": a dead letter holds back the rest of its key; "continue": it does not. `compact`: of
            messages that wait, only the newest of a key. `broadcast`: each `instance` (the host's name unless given)
            gets every message, from "latest" on unless `start` says otherwise; an instance that was away for 7 days is
            forgotten. `settings`, pace and limits of the worker.

    Raises:
        TypeError, ValueError: an option is wrong; raised before any SQL. The text names the option.
        SubscriptionError: no message can have one of the topics.
        FilterError: tags or filter cannot be read; the error shows the place.
    """

    _what = "consumer"

    def __init__(
        self,
        outbox: BareOutbox,
        name: str,
        *,
        topics: Iterable[str] | None = None,
        tags: str | None = None,
        filter: str | None = None,
        ordered: bool | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        if not (isinstance(outbox, BareOutbox) and isinstance(outbox, Home)):
            raise TypeError(f"Consumer takes an Outbox, not {type(outbox).__name__}: Outbox(engine).consumer(…)")
        known = ("topics", "tags", "filter", "ordered", *ConsumerOptions.__annotations__)
        require_known(f"consumer {name!r:.60}", options, known)
        chosen = Options(**options)
        require_ordering(ordered, chosen.compact)
        checked_consumer(name)
        require_own_name(name)
        if AT in name:
            raise ValueError(f"consumer {name!r} must have no {AT}, after which the instance of a broadcast stands")
        if ordered is False and chosen.suspend == "queue":
            raise ValueError("suspend='queue' is for consumers that keep order; leave out suspend, or ordered=False")
        if chosen.broadcast:
            name = checked_consumer(f"{name}{AT}{chosen.instance or socket.gethostname()}")
        super().__init__(outbox, name, chosen.settings)
        self._home: Home = outbox
        self._options = chosen
        self._topics = chosen_topics(topics)
        self._all_topics = topics is None
        self._tags, self._filter = chosen_tags(tags), chosen_filter(filter)
        self._ordered = ordered
        self._policy = HandlerPolicy(retry=chosen.retry, deadline=chosen.deadline)
        self._listeners: list[Listener] = []
        self._dispatch: Dispatch | None = None

    @property
    def deadline(self) -> timedelta:
        """The longest time of one call."""
        return self._options.deadline

    @property
    def declared(self) -> Declaration:
        """The subscription of this consumer, as `outbox status` shows it.

        Raises:
            SubscriptionError: the consumer has no function, or the topics of its functions make no list.
        """
        options = self._options
        kind: Kind = "broadcast" if options.broadcast else "consumer"
        return Declaration(
            name=self.name,
            destination=None,
            kind=kind,
            topics=self._topics_of_all(),
            tags=self._tags,
            filter=self._filter,
            on_dead=options.on_dead,
            partitions=options.partitions,
            ordered=self._ordered,
            compact=options.compact,
        )

    @property
    def start_at(self) -> Start:
        """Where a new subscription begins."""
        return self._options.start or ("latest" if self._options.broadcast else "earliest")

    def on(self, *topics: str) -> Callable[[F], F]:
        """Have a function called with messages of these topics, names or patterns; none: all topics of the consumer.

        Of several functions the first that fits is called. Some may be written with async.
        """
        if topics and not isinstance(topics[0], str):
            raise TypeError("on takes topics, and then the function: write @consumer.on('orders')")
        taken = Topics.of(chosen_topics(topics or None))

        def listen(function: F) -> F:
            self._require_not_begun()
            given = "message" if self._options.batch_size is None else "messages"
            listener = Listener.of(taken, function, *(("session",) if self._options.inbox else ()), given)
            if self._options.inbox:
                # Nothing is opened; an outbox on the other kind of engine raises.
                (self._home.abegin if listener.awaited else self._home.begin)("requires_new")
                handle = Inbox(self._home, self.name).idempotent(listener.judged)
            else:
                handle = processed(function, self.name, awaited=listener.awaited)
            listener = replace(listener, function=handle)
            self._listeners.append(listener)
            return function

        return listen

    def configure(self, *, partitions: int | None = None, concurrency: int | None = None) -> None:
        """Replace options, before the consumer begins; None: as given before."""
        self._require_not_begun()
        given: dict[str, Any] = {"partitions": partitions, "concurrency": concurrency}
        self._options = replace(self._options, **{name: value for name, value in given.items() if value is not None})

    def close(self) -> None:
        """End the event loop of coroutines."""
        if self._dispatch is not None:
            self._dispatch.close()

    @cached_property
    def _worker(self) -> Worker:
        options, awaited = self._options, any(each.awaited for each in self._listeners)
        declared = self.declared
        self._dispatch = Dispatch(
            self.name,
            self._listeners,
            seconds=options.deadline.total_seconds(),
            batches=options.batch_size is not None,
        )
        policy = replace(
            self._policy,
            deadline=options.deadline + (_TO_CANCEL if awaited else timedelta(0)),
            portion=options.batch_size or 1,
            suspend=options.suspend == "queue",
        )
        job = Job(
            declared=declared,
            handler=self._dispatch.handle,
            caller=Caller(options.concurrency),
            policy=policy,
            start=self.start_at,
        )
        return Worker.of(self.outbox, with_followers(job), self.settings, stop=self._stop)

    def _require_not_begun(self) -> None:
        if self._dispatch is not None:
            raise SubscriptionError(f"consumer {self.name} has begun; add functions and options before")

    def _topics_of_all(self) -> tuple[str, ...] | None:
        if not self._listeners:
            raise SubscriptionError(
                f"consumer {self.name} has no function: write @consumer.on('orders') above one, before it begins"
            )
        if not self._all_topics:
            return self._topics
        found = [each.topics for each in self._listeners]
        if any(each.everything for each in found):
            return None
        if len(found) > 1 and any(each.exceptions for each in found):
            raise SubscriptionError(
                f"consumer {self.name}: functions with exceptions such as '!orders.*' make no list of topics; give"
                " topics=[…] to the consumer, or put a function for these topics before the others"
            )
        return found[0].chosen() if len(found) == 1 else chosen_topics(part for each in found for part in each.included)

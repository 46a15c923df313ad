"""The relay: the worker whose handler is a sender."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Unpack, cast

from outbox.model.filter.sql92 import chosen_filter
from outbox.model.filter.tags import chosen_tags
from outbox.model.limits import require_window
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, OnDead, Start, require_own_name, require_start
from outbox.model.topics import chosen_topics
from outbox.relay.life_cycle import LifeCycle
from outbox.relay.routes import Route, RouteOptions, opened, planned
from outbox.senders.opening import Destination, SenderOptions, open_sender
from outbox.worker.job import Job, with_followers
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from outbox.worker.shared import caller_of
from outbox.worker.worker import Worker
from outbox.writing.bare import BareOutbox


class RelayOptions(SenderOptions, total=False):
    """The rarer options of a `Relay`."""

    tags: str | None
    filter: str | None
    partitions: int | None
    compact: bool | None
    keep: timedelta | None


class Relay(LifeCycle):
    """Sends the messages of an outbox to one destination.

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
        options: `tags`, an expression such as "TagA || TagB", and `filter`, a condition in SQL92 such as "price > 100";
            None: all. Topics, tags and filter have to be true. `partitions`, how many relays may share a new
            subscription. `compact`: of a key's messages that are read together only the newest is sent; None: as
            stored, else all. `keep`: messages of the log that are older are deleted, once every subscription has passed
            them; None: none. `deadline`, of one call of the sender; without a value the sender's own, or 5 s. `rename`,
            `prefix` and `envelope`, the topics and the form of sent messages; see `open_sender`.

    Raises:
        SubscriptionError: the name belongs to a backfill, or no message can have one of the topics.
        FilterError: tags or filter cannot be read; the error shows the place.
        SenderError: the URL is malformed; or messages cannot be sent under the topics, or in the envelope.
        TypeError: the deadline, or the sender's, is no timedelta above 0; or `retry` is no RetryPolicy.
    """

    _what = "relay"

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
        partitions, compact = options.pop("partitions", None), options.pop("compact", None)
        tags, filter = options.pop("tags", None), options.pop("filter", None)
        self._keep = options.pop("keep", None)
        if self._keep is not None:
            require_window("keep", self._keep)
        self._sender = open_sender(sender, **cast("SenderOptions", options))
        self._caller = caller_of(sender, self._sender)
        destination = self._sender.destination
        if declared is None:
            declared = Declaration(
                name=name,
                destination=destination,
                topics=chosen_topics(topics),
                tags=chosen_tags(tags),
                filter=chosen_filter(filter),
                on_dead=on_dead,
                partitions=partitions,
                compact=compact,
            )
        require_own_name(declared.name)
        require_start(start)
        super().__init__(outbox, declared.name, settings)
        self._declared, self._start = declared, start
        self._policy = HandlerPolicy(retry=retry or RetryPolicy(), deadline=self._sender.deadline)

    @cached_property
    def _worker(self) -> Worker:
        send, caller, policy = self._sender.send, self._caller, self._policy
        job = Job(
            declared=self._declared, handler=send, caller=caller, policy=policy, start=self._start, keep=self._keep
        )
        return Worker.of(self.outbox, with_followers(job), self.settings, stop=self._stop)

    def close(self) -> None:
        """Close the sender, after `until_empty` or `once`; `run` closes it as well. A shared sender stays open."""
        self._sender.close()


def routes(
    outbox: BareOutbox,
    table: Mapping[str, Destination | Route],
    *,
    name: str = "relay",
    start: Start = "earliest",
    retry: RetryPolicy | None = None,
    settings: Settings | None = None,
    keep: timedelta | None = None,
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
        keep: as `Relay` has it; the relay of the route `*` deletes.
        shared: fields of a `Route`, for routes without them.

    Raises:
        SubscriptionError: the last route is not `*`, or a route would never get a message.
    """
    given = {pattern: to if isinstance(to, Route) else Route(to=to) for pattern, to in table.items()}
    return [
        Relay(
            outbox,
            sender,
            declared=declared,
            start=start,
            retry=retry,
            settings=settings,
            keep=keep if declared.split_from is None else None,
        )
        for sender, declared in opened(planned(given, name, **shared))
    ]

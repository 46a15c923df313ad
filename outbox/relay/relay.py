"""The relay: the worker whose handler is a sender."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack, cast

from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, OnDead, Start, compensation_of, require_own_name
from outbox.model.topics import chosen_topics
from outbox.relay.life_cycle import LifeCycle, Source
from outbox.senders.opening import Destination, SenderOptions, open_sender
from outbox.worker.job import Job
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from outbox.worker.shared import caller_of


class RelayOptions(SenderOptions, total=False):
    """The rarer options of a `Relay`."""

    partitions: int | None


class Relay(LifeCycle):
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

    _what = "relay"

    def __init__(
        self,
        outbox: Source,
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
        if not hasattr(outbox, "database"):
            raise TypeError(f"Relay takes an Outbox, not {type(outbox).__name__}: Relay(Outbox(engine), …)")
        partitions = options.pop("partitions", None)
        self._sender = open_sender(sender, **cast("SenderOptions", options))
        self._caller = caller_of(sender, self._sender)
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
        super().__init__(outbox, declared.name, settings)
        self._declared, self._start = declared, start
        self._policy = HandlerPolicy(retry=retry or RetryPolicy(), deadline=self._sender.deadline)

    def _jobs(self) -> Sequence[Job]:
        send, caller, policy = self._sender.send, self._caller, self._policy
        left_behind = Declaration(
            name=compensation_of(self.name), destination=self._sender.destination, kind="compensation"
        )
        return [
            Job(declared=self._declared, handler=send, caller=caller, policy=policy, start=self._start),
            # Writers create the compensation, at a position before their first row.
            Job(declared=left_behind, handler=send, caller=caller, policy=policy, start=None),
        ]

    def close(self) -> None:
        """Close the sender, after `until_empty` or `once`; `run` closes it as well. A shared sender stays open."""
        self._sender.close()

"""The delivery of direct sends: reads committed messages back, sends, and acknowledges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial

from outbox.errors import OutboxError, SubscriptionError
from outbox.model.filter.sql92 import Filter
from outbox.model.message import LogRef, Message
from outbox.model.subscription import Declaration, Selection, compensation_of
from outbox.model.topics import Topics
from outbox.model.verdict import Done, Unavailable
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.named import named
from outbox.runtime.process import unique_name
from outbox.senders.opening import Destination, OpenedSender, open_sender
from outbox.store.database import Channel, Database
from outbox.store.log.append import Direct
from outbox.store.log.log import Limits, Log
from outbox.store.operations.ensure import ensure_outbox
from outbox.store.subscriptions.acks import Acks
from outbox.store.subscriptions.refusals import require_destination_of
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.telemetry.events import EVERYWHERE, Listeners, SentDirectly, Teller
from outbox.worker.batch_size import next_size
from outbox.worker.calls import Call, verdicts_of
from outbox.worker.shared import SharedSender

logger = logging.getLogger("outbox")

#: For at least so long after their commit, the compensation leaves a writer's messages alone.
GRACE_SECONDS = 10.0
#: For at least so long after their commit, the writer may begin to send them.
RIGHT_SECONDS = 4.0
#: Messages that are read at once.
MOST_AT_ONCE = 1_000
#: So many seconds are allowed for writing an ack.
FLUSH_SECONDS = 1.0
#: So long one call should take: its messages are acknowledged together, long before the compensation begins.
_CALL_SECONDS = 0.5
#: Messages in a call: so few that they are acknowledged in time even if the destination suddenly is ten times slower.
_MOST_IN_A_CALL = 128
_REFRESH_SECONDS = 30.0
_RETRY_SECONDS = 1.0


class DirectDelivery:
    """Works for a subscription, on a connection of its own, in a thread."""

    def __init__(
        self, database: Database, destination: Destination, name: str, listeners: Listeners = EVERYWHERE
    ) -> None:
        self._database = database
        self._destination = destination
        self._name = name
        self._log = Log(Limits(), Selection(only=name))
        self._writer = unique_name()
        self._teller = Teller(listeners, {"database": database, "subscription": name})
        self._channel: Channel | None = None
        self._sender: SharedSender | None = None
        #: Calls past their deadline: what they have sent is acknowledged when they come back.
        self._left_behind: list[Call] = []
        self._refresh_at = 0.0
        self._size = 1
        self._last_told: str | None = None
        #: For so many seconds after a commit a call may begin; it and its ack then end before the compensation begins.
        self.right = 0.0
        #: True when the destination was unavailable at the last delivery.
        self.away = False
        #: True when the compensation is known to exist, and the database answers.
        self.usable = False

    @property
    def hangs(self) -> bool:
        """True while a call is past its deadline: until then the relay sends."""
        return bool(self._left_behind)

    @property
    def refresh_in(self) -> float:
        """Seconds until the next `refresh`."""
        return max(0.0, self._refresh_at - clock())

    def refresh(self) -> Direct | None:
        """Make sure that the compensation exists; return the selection of the subscription, or raise."""
        sender, channel = self._open_sender(), self._open_channel()
        ensure_outbox(channel)
        subscriptions = Subscriptions(channel)
        require_destination_of(subscriptions.find(self._name), sender.destination, self._database.commands)
        self.right = self._declare(subscriptions, sender)
        # Read again, because a split may have been before the compensation; there is none after it.
        own = subscriptions.find(self._name)
        self._refresh_at = clock() + _REFRESH_SECONDS
        self.usable = True
        self._last_told = None
        if own is None:
            return Direct(self._name)
        return Direct(
            self._name, Topics.of(own.topics), own.tags, None if own.filter is None else Filter.of(own.filter)
        )

    def _declare(self, subscriptions: Subscriptions, sender: OpenedSender) -> float:
        """Make sure that the compensation exists; return for how many seconds after a commit a call may begin.

        Rows are marked for direct sends afterwards, so that the compensation begins before all of them.
        """
        name, destination, deadline = compensation_of(self._name), sender.destination, sender.deadline.total_seconds()
        grace = timedelta(seconds=max(GRACE_SECONDS, deadline + FLUSH_SECONDS + RIGHT_SECONDS))
        exists = subscriptions.find(name) is not None
        declared = Declaration(name=name, destination=destination, kind="compensation", grace=None if exists else grace)
        stored = subscriptions.declare(declared, "latest").grace.total_seconds()
        right = stored - deadline - FLUSH_SECONDS
        if right < RIGHT_SECONDS / 4:
            longer = ("subscriptions", "alter", name, "--grace", f"{grace.total_seconds():g}s")
            raise SubscriptionError(
                f"{name} sends what it finds {stored:g} s after a commit, and one call to {destination} may take"
                f" {deadline:g} s; give the destination a shorter deadline, or stop the relay and run:"
                f" {self._database.commands.line(*longer)}"
            )
        return right

    def deliver(self, claims: dict[LogRef, float], wake: Callable[[], None]) -> Iterator[Call]:
        """Send messages by their refs, each before the moment of its claim.

        Yields each call of the sender while under way; `wake` is called when a call comes back.

        The messages are read back from the database, because only a read shows committed rows: SQLite gives the id of a
        rolled-back row away again. The claim of a sent message, or a late one, is removed. The remaining claims belong
        to rows that were rolled back to a savepoint, or the database failed before their turn.
        """
        self.away = False
        refs = sorted(claims)
        while refs and not self.away:
            wanted = refs[:MOST_AT_ONCE]
            page = self._log.at(self._open_channel(), [id for id, _ in wanted])
            if not page.complete and page.reached is not None:
                wanted = [ref for ref in wanted if ref[0] <= (page.reached or 0)]
            refs = refs[len(wanted) :]
            found = [message for message in page.messages if _ref(message) in claims]
            while found and not self.away:
                part, found = found[: self._size], found[self._size :]
                yield from self._send(part, {m.id or 0: claims.pop(_ref(m)) for m in part}, wake)
        if self.away:
            claims.clear()

    def look(self, call: Call) -> float:
        """Return when to look again at a call, as `Caller.look` does."""
        return self._open_sender().caller.look(call)

    def acknowledge_late(self) -> None:
        """Acknowledge the messages of late calls that have come back."""
        for call in [each for each in self._left_behind if each.finished]:
            self._acknowledge(call)
            self._left_behind.remove(call)

    def reset(self, error: Exception) -> None:
        """Close the connection after an error; nothing is sent until a `refresh` has succeeded."""
        self.usable = False
        self._tell(_describe(error))
        # An error that a person has to mend takes longer.
        self._refresh_at = clock() + (_REFRESH_SECONDS if isinstance(error, OutboxError) else _RETRY_SECONDS)
        self._disconnect()

    def close(self) -> None:
        """Close the connection and the sender."""
        self._disconnect()
        if self._sender is not None:
            self._sender.caller.close()
            if not isinstance(self._destination, SharedSender):
                with suppress(Exception):
                    self._sender.release()

    def _send(self, messages: list[Message], until: dict[int, float], wake: Callable[[], None]) -> Iterator[Call]:
        """Send messages in one call that ends before the compensation begins, and acknowledge the stored ones.

        Messages whose time ends before the turn are left to the compensation.
        """
        sender = self._open_sender()
        while messages := [each for each in messages if clock() < until[each.id or 0]]:
            crash_point("direct.before_send")
            first, deadline = min(until[each.id or 0] for each in messages), sender.deadline.total_seconds()
            call = Call(messages, until=first, deadline=deadline, wake=wake)
            sender.caller.begin(call, partial(verdicts_of, sender.send))
            while not call.over:
                yield call
            if not call.late:
                break
        else:
            return
        crash_point("direct.after_send")
        if not call.finished:
            self.away = True
            self._left_behind.append(call)
            self._tell(f"a call did not come back within {call.deadline:g} s")
            return
        self._size = next_size(self._size, len(messages), call.seconds, allowed=_CALL_SECONDS, most=_MOST_IN_A_CALL)
        self._acknowledge(call)
        crash_point("direct.after_ack")

    def _acknowledge(self, call: Call) -> None:
        """Acknowledge the stored messages of a call. The compensation sends the rest, and counts the attempts."""
        if call.error is not None:
            self._tell(_describe(call.error))
        self.away = call.verdicts is None or any(isinstance(verdict, Unavailable) for verdict in call.verdicts)
        sent = [message for message, verdict in call.answers if isinstance(verdict, Done)]
        if not sent:
            return
        done = [message.id or 0 for message in sent]
        try:
            Acks(self._open_channel(), self._name).insert(self._writer, done)
        except Exception:
            # Tried again on a new connection: a message without an ack is sent again. A second ack does no harm.
            self._disconnect()
            Acks(self._open_channel(), self._name).insert(self._writer, done)
        self._teller.tell(SentDirectly, messages=sent)

    def _tell(self, why: str) -> None:
        """Log why direct sends do not work, once for each reason."""
        if why != self._last_told:
            self._last_told = why
            about = named("direct_sends_fail", subscription=self._name, error=why)
            logger.warning("direct sends of %s go by the relay meanwhile: %s", self._name, why, extra=about)

    def _open_sender(self) -> SharedSender:
        if self._sender is None:
            sender = open_sender(self._destination)
            self._sender = sender if isinstance(sender, SharedSender) else SharedSender(sender)
        return self._sender

    def _open_channel(self) -> Channel:
        if self._channel is None:
            self._channel = self._database.open()
        return self._channel

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _ref(message: Message) -> LogRef:
    return message.id or 0, message.message_id


def _describe(error: BaseException) -> str:
    """Return the text of our own errors, which say what to do; else the type: a driver's text may hold secrets."""
    return str(error) if isinstance(error, OutboxError) else type(error).__name__

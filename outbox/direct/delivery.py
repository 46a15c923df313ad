"""The delivery of direct sends: reads committed messages back, hands them to the sender, and acknowledges them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from shlex import quote

from outbox.errors import OutboxError, SubscriptionError
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Selection, compensation_of
from outbox.model.topics import Topics
from outbox.model.verdict import Done, Unavailable
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.process import unique_name
from outbox.senders.opening import Destination, OpenedSender, open_sender
from outbox.store.database import Channel, Database
from outbox.store.log.append import Direct, LogRef
from outbox.store.log.limits import Limits
from outbox.store.log.log import Log
from outbox.store.operations.ensure import ensure_outbox
from outbox.store.subscriptions.acks import Acks
from outbox.store.subscriptions.refusals import require_destination_of
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.batch_size import next_size
from outbox.worker.calls import Alarm, Call, Caller
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


@dataclass(frozen=True, slots=True)
class _Claim:
    """The right of a writer to send messages itself, up to the moment `until`, by `clock`."""

    until: float


class DirectDelivery:
    """Works for one subscription, on a connection of its own, in one thread."""

    def __init__(self, database: Database, destination: Destination, name: str) -> None:
        self._database = database
        self._destination = destination
        self._name = name
        self._log = Log(Limits(), Selection(only=name))
        self._writer = unique_name()
        self._channel: Channel | None = None
        self._sender: OpenedSender | None = None
        self._caller: Caller | None = None
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
    def wants_refresh(self) -> bool:
        """True when it is time for the next `refresh`."""
        return self.refresh_in <= 0

    @property
    def hangs(self) -> bool:
        """True while a call is past its deadline: until it comes back the relay sends."""
        return bool(self._left_behind)

    @property
    def refresh_in(self) -> float:
        """Seconds until the next `refresh`."""
        return max(0.0, self._refresh_at - clock())

    def refresh(self) -> Direct | None:
        """Make sure that the compensation exists; return what the subscription selects.

        Raises:
            SubscriptionError: it sends to another destination, or its compensation's grace is too short for a call.
            OutboxError: another error that only a person can mend.
        """
        if self._sender is None:
            self._sender = sender = open_sender(self._destination)
            others = sender.caller if isinstance(sender, SharedSender) else None
            self._caller = Caller(sender.send, concurrency=sender.concurrency, beside=others)
        channel = self._open_channel()
        ensure_outbox(channel)
        subscriptions = Subscriptions(channel)
        require_destination_of(subscriptions.find(self._name), self._sender.destination)
        self.right = self._declare(subscriptions, self._sender)
        # Read again, because a split may have been before the compensation; there is none after it.
        own = subscriptions.find(self._name)
        self._refresh_at = clock() + _REFRESH_SECONDS
        self.usable = True
        self._last_told = None
        return Direct(self._name, Topics.of(None if own is None else own.topics))

    def _declare(self, subscriptions: Subscriptions, sender: OpenedSender) -> float:
        """Make sure that the compensation exists; return for how many seconds after a commit a call may begin.

        Rows are marked for direct sends only afterwards, so that the position of the compensation is before all of
        them.
        """
        name, destination, deadline = compensation_of(self._name), sender.destination, sender.deadline.total_seconds()
        grace = timedelta(seconds=max(GRACE_SECONDS, deadline + FLUSH_SECONDS + RIGHT_SECONDS))
        exists = subscriptions.find(name) is not None
        declared = Declaration(name=name, destination=destination, kind="compensation", grace=None if exists else grace)
        stored = subscriptions.declare(declared, "latest").grace.total_seconds()
        right = stored - deadline - FLUSH_SECONDS
        if right < RIGHT_SECONDS / 4:
            raise SubscriptionError(
                f"{name} sends what it finds {stored:g} s after a commit, and one call to {destination} may take"
                f" {deadline:g} s; give the destination a shorter deadline, or stop the relay and run: outbox"
                f" subscriptions alter {quote(name)} --grace {grace.total_seconds():g}s"
            )
        return right

    def deliver(self, claims: dict[LogRef, float], alarm: Alarm) -> Iterator[Call]:
        """Send the messages with these refs, each before the moment until which its claim holds.

        Yields each call of the sender, to go on when it is over; `alarm` is set when it comes back.

        The messages are read back from the database, because only that shows what was committed: SQLite gives the id of
        a rolled-back row away again. The claim of a message that was sent, or came too late, is removed. The claims
        that are left belong to rows that were rolled back to a savepoint, or the database failed before their turn.
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
                yield from self._send(part, {m.id or 0: claims.pop(_ref(m)) for m in part}, alarm)
        if self.away:
            claims.clear()

    def look(self, call: Call) -> float:
        """Return when to look again at this call, as `Caller.look` does."""
        assert self._caller is not None
        return self._caller.look(call)

    def acknowledge_late(self) -> None:
        """Acknowledge what calls have sent that came back after their deadline."""
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
        if self._sender is not None and self._caller is not None:
            self._caller.close()
            with suppress(Exception):
                self._sender.close()

    def _send(self, messages: list[Message], until: dict[int, float], alarm: Alarm) -> Iterator[Call]:
        """Send messages in one call that ends before the compensation begins, and acknowledge what was stored.

        When others have the turn for long, the messages whose time is over meanwhile are left to the compensation.
        """
        while messages := [each for each in messages if clock() < until[each.id or 0]]:
            call = yield from self._ask(messages, min(until[each.id or 0] for each in messages), alarm)
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

    def _ask(self, messages: list[Message], until: float, alarm: Alarm) -> Generator[Call, None, Call]:
        assert self._sender is not None
        assert self._caller is not None
        crash_point("direct.before_send")
        call = Call(messages, _Claim(until), deadline=self._sender.deadline.total_seconds(), wake=alarm)
        self._caller.begin(call)
        while not call.over:
            yield call
        return call

    def _acknowledge(self, call: Call) -> None:
        """Acknowledge what a call has sent. The compensation sends the rest, and counts its attempts."""
        if call.error is not None:
            self._tell(_describe(call.error))
        self.away = call.verdicts is None or any(isinstance(verdict, Unavailable) for verdict in call.verdicts)
        done = [message.id or 0 for message, verdict in call.answers if isinstance(verdict, Done)]
        if done:
            self._insert_acks(done)

    def _insert_acks(self, ids: list[int]) -> None:
        try:
            Acks(self._open_channel(), self._name).insert(self._writer, ids)
        except Exception:
            # Tried again on a new connection: a message without an ack is sent again. A second ack does no harm.
            self._disconnect()
            Acks(self._open_channel(), self._name).insert(self._writer, ids)

    def _tell(self, why: str) -> None:
        """Log why direct sends do not work, once for each reason."""
        if why != self._last_told:
            self._last_told = why
            logger.warning("direct sends of %s go by the relay meanwhile: %s", self._name, why)

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
    """Return the text of our own errors, which say what to do; else the type, as a driver's text may hold anything."""
    return str(error) if isinstance(error, OutboxError) else type(error).__name__

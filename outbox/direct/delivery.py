"""The delivery of direct sends: reads committed messages back, hands them to the sender, and acknowledges them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from shlex import quote

from outbox.errors import OutboxError, SubscriptionError
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Selection, compensation_of
from outbox.model.topics import Topics
from outbox.model.verdict import Done, Unavailable, Verdict
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.process import unique_name
from outbox.senders.opening import Destination, OpenedSender, open_sender
from outbox.senders.serialized import SerializedSender
from outbox.store.database import Channel, Database
from outbox.store.log.append import Direct, LogRef
from outbox.store.log.limits import Limits
from outbox.store.log.log import Log
from outbox.store.operations.ensure import ensure_outbox
from outbox.store.subscriptions.acks import Acks
from outbox.store.subscriptions.refusals import require_destination_of
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.batch_size import next_size

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
    """Works for one subscription, on a connection of its own, in one thread."""

    def __init__(self, database: Database, destination: Destination, name: str) -> None:
        self._database = database
        self._destination = destination
        self._name = name
        self._log = Log(Limits(), Selection(only=name))
        self._writer = unique_name()
        self._channel: Channel | None = None
        self._sender: OpenedSender | None = None
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
            self._sender = open_sender(self._destination)
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

    def deliver(self, claims: dict[LogRef, float]) -> None:
        """Send the messages with these refs, each before the moment until which its claim holds.

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
            if found:
                self._send(found, claims)
        if self.away:
            claims.clear()

    def reset(self, error: Exception) -> None:
        """Close the connection after an error; nothing is sent until a `refresh` has succeeded."""
        self.usable = False
        self._tell(error)
        # An error that a person has to mend takes longer.
        self._refresh_at = clock() + (_REFRESH_SECONDS if isinstance(error, OutboxError) else _RETRY_SECONDS)
        self._disconnect()

    def close(self) -> None:
        """Close the connection and the sender."""
        self._disconnect()
        if self._sender is not None:
            with suppress(Exception):
                self._sender.close()

    def _send(self, messages: list[Message], claims: dict[LogRef, float]) -> None:
        """Send the messages whose claims still hold, in calls that end before the compensation begins."""
        while messages and not self.away:
            part, messages = messages[: self._size], messages[self._size :]
            self._send_at_once(part, claims)

    def _send_at_once(self, messages: list[Message], claims: dict[LogRef, float]) -> None:
        with self._turn() as sender:
            now = clock()
            ours = [message for message, until in ((m, claims.pop(_ref(m))) for m in messages) if now < until]
            verdicts = self._ask(sender, ours) if ours else []
            if ours:
                took = clock() - now
                self._size = next_size(self._size, len(ours), took, allowed=_CALL_SECONDS, most=_MOST_IN_A_CALL)
        done = [m.id or 0 for m, verdict in zip(ours, verdicts, strict=True) if isinstance(verdict, Done)]
        if done:
            self._acknowledge(done)
        crash_point("direct.after_ack")

    def _turn(self) -> AbstractContextManager[OpenedSender]:
        assert self._sender is not None
        return self._sender.hold() if isinstance(self._sender, SerializedSender) else nullcontext(self._sender)

    def _ask(self, sender: OpenedSender, messages: list[Message]) -> Sequence[Verdict]:
        """Return the verdicts of the destination. The compensation sends what is not done, and counts its attempts."""
        crash_point("direct.before_send")
        try:
            verdicts = sender.send(messages)
        except BaseException as error:  # SystemExit would end this thread, which sends for the whole process
            self._tell(error)
            verdicts = [Unavailable(_describe(error))] * len(messages)
        crash_point("direct.after_send")
        self.away = any(isinstance(verdict, Unavailable) for verdict in verdicts)
        return verdicts

    def _acknowledge(self, ids: list[int]) -> None:
        try:
            Acks(self._open_channel(), self._name).insert(self._writer, ids)
        except Exception:
            # Tried again on a new connection: a message without an ack is sent again. A second ack does no harm.
            self._disconnect()
            Acks(self._open_channel(), self._name).insert(self._writer, ids)

    def _tell(self, error: BaseException) -> None:
        """Log why direct sends do not work, once for each error."""
        described = _describe(error)
        if described != self._last_told:
            self._last_told = described
            logger.warning("direct sends of %s go by the relay meanwhile: %s", self._name, described)

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

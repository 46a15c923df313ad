"""The work of `outbox relay`: it says where it begins, sends, and gives up when nothing moves for too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from outbox.cli.connection import open_channel_of, open_database, open_outbox
from outbox.cli.failures import UNFINISHED
from outbox.cli.options import Target, me
from outbox.cli.output import age, say
from outbox.model.message import Message
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, compensation_of
from outbox.model.topics import chosen_topics
from outbox.model.verdict import Done, Unavailable, Verdict, describe
from outbox.outbox import Outbox
from outbox.relay.relay import Relay
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.senders.envelopes import EnvelopeName
from outbox.senders.opening import OpenedSender, open_sender
from outbox.store.database import Channel, Database
from outbox.store.log.limits import Limits
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.notices import RefusalNotice
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings

_AGAIN_SECONDS = 0.5
_RENEW_EVERY = Settings().renew_every


class Counted(OpenedSender):
    """A sender that counts what was stored, and remembers when the destination last answered."""

    def __init__(self, sender: OpenedSender) -> None:
        super().__init__(sender, sender.destination)
        self.sent = 0
        #: The last error of the destination about a message that it did not accept.
        self.refusal: str | None = None
        self.answered_at = time.monotonic()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages by the sender; count those that were stored, and note when the destination answered."""
        try:
            verdicts = super().send(messages)
        except Exception as error:
            self.refusal = describe(error)
            raise
        self.refusal = next((each.error for each in verdicts if isinstance(each, Unavailable)), self.refusal)
        self.sent += sum(isinstance(verdict, Done) for verdict in verdicts)
        if not all(isinstance(verdict, Unavailable) for verdict in verdicts):
            self.answered_at = time.monotonic()
        return verdicts


class Relaying:
    """A relay from the command line. Among several, what it says begins with its `label`."""

    def __init__(
        self,
        target: Target,
        to: str,
        *,
        label: str | None = None,
        name: str,
        topics: tuple[str, ...] | None,
        start: str | datetime,
        on_dead: Any,
        batch_size: int,
        batch_bytes: int,
        lease: timedelta,
        deadline: timedelta | None,
        attempts: int,
        split_from: str | None = None,
        beside: Iterable[Declaration] = (),
        rename: Mapping[str, str] | None = None,
        prefix: str | None = None,
        envelope: EnvelopeName = "raw",
    ) -> None:
        self._target = target
        self._about = "" if label is None else f"{label}: "
        self._name = name
        self._topics = chosen_topics(topics)
        self._split_from = split_from
        self._beside = tuple(beside)
        self._start: Any = start
        self._sender = Counted(open_sender(to, rename=rename, prefix=prefix, envelope=envelope, deadline=deadline))
        #: The time limit of one call of the sender.
        self.deadline = self._sender.deadline
        self._relay: Relay | None = None
        self._stop = stop = Stop()
        #: Puts this relay within a stop of others.
        self.within = stop.within
        self._spoke = False
        self._refusal_notice = RefusalNotice(name)
        self._options: dict[str, Any] = {
            "name": name,
            "topics": self._topics,
            "start": start,
            "on_dead": on_dead,
            "retry": RetryPolicy(attempts=attempts),
            "split_from": split_from,
            "settings": Settings(
                limits=Limits(rows=batch_size, bytes=batch_bytes),
                lease=lease,
                # However long the lease is, a command that asks for it does not wait for long.
                renew_every=min(lease * 0.3, _RENEW_EVERY),
            ),
        }

    @property
    def stopping(self) -> bool:
        """True after a stop was asked."""
        return self._stop.asked

    @property
    def silent(self) -> float:
        """Seconds since the destination answered, or since the beginning."""
        return time.monotonic() - self._sender.answered_at

    def run(self) -> int:
        """Send until stopped; return the exit code."""
        with open_database(self._target.url, self._target.schema) as database, database.explained():
            self._relay_of(self._announced(database)).run()
        self.say_what_was_sent()
        return 0

    def work(self) -> None:
        """Send until stopped, among other relays. It goes on when calls of the sender hang; the sender stays open."""
        with open_database(self._target.url, self._target.schema) as database, database.explained():
            self._relay_of(self._announced(database)).work("stopped", self._stop)

    def say_what_was_sent(self) -> None:
        """Say that the relay has stopped, and how many messages it has sent."""
        say(f"{self._about}{self._name}: stopped; {self._sender.sent} sent")

    def end_by_itself(self, *, once: bool, patience: timedelta) -> int:
        """Send one batch, or all there is; return exit code 0, or 4 if it gave up because nothing moved."""
        with open_outbox(self._target.url, self._target.schema) as channel:
            self._announce(channel)
            relay = self._relay_of(channel.database)
            nothing_moved = partial(self._nothing_moved, channel)
            try:
                with stopping_on_signals(self.stop):
                    work = relay.once if once else partial(self._until_accepted, relay, nothing_moved, patience)
                    finished = self._patiently(work, patience)
            finally:
                self._sender.close()
            parked = self._left_parked(channel)
            if not finished:
                say(f"Error: {self._about}{self._why_nothing_moved(channel, patience)}{parked}")
                return UNFINISHED
            if nothing_moved() and not self._stop.asked:
                say(f"Error: {self._about}{self._sender.destination} accepted nothing{self._refusal}{parked}")
                return UNFINISHED
            say(f"{self._about}{self._name}: {self._sender.sent} sent{parked}")
        return 0

    def _until_accepted(self, relay: Relay, nothing_moved: Callable[[], bool], patience: timedelta) -> None:
        """Send all there is. While messages wait and none is accepted, try again for `patience`, or until a stop."""
        until = time.monotonic() + patience.total_seconds()
        relay.until_empty()
        while nothing_moved() and not self._stop.asked and time.monotonic() < until:
            self._stop.rest(_AGAIN_SECONDS)
            relay.until_empty()

    def _nothing_moved(self, channel: Channel) -> bool:
        """Return whether messages wait for the destination and it has accepted none at all; then it may be away."""
        if self._sender.sent:
            return False
        names = (self._name, compensation_of(self._name))
        return any(Parked(channel, each).waiting(1) for each in names)

    @property
    def _refusal(self) -> str:
        return "" if self._sender.refusal is None else f" ({self._sender.refusal})"

    def stop(self) -> None:
        """Let what is under way finish, then end. It may be called before the work begins, and by a signal handler."""
        self._stop.ask()
        if self._relay is not None:
            self._relay.stop()

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()

    def _announced(self, database: Database) -> Database:
        """Say where the relay begins, on a connection that is closed before the work starts; return the outbox."""
        with open_channel_of(database) as channel:
            self._announce(channel)
            return channel.database

    def _relay_of(self, database: Database) -> Relay:
        outbox = Outbox(database.engine, schema=database.schema, slots=database.slots)
        self._relay = Relay(outbox, self._sender, **self._options)
        if self._stop.asked:
            self._relay.stop()
        return self._relay

    def _patiently(self, work: Callable[[], None], patience: timedelta) -> bool:
        """Do the work; stop it and return False if the destination does not answer for too long, or the lease never
        comes.
        """
        finished, gave_up = threading.Event(), threading.Event()
        self._sender.answered_at = time.monotonic()

        def watch() -> None:
            while not finished.wait(0.1):
                if self.silent > patience.total_seconds():
                    gave_up.set()
                    self.stop()
                    return

        threading.Thread(target=watch, name="outbox-patience", daemon=True).start()
        try:
            work()
        finally:
            finished.set()
        return not gave_up.is_set()

    def _announce(self, channel: Channel) -> None:
        """Say once what is sent where, and from when on."""
        if not self._spoke:
            on_dead = self._options["on_dead"]
            declared = Declaration(
                name=self._name,
                destination=self._sender.destination,
                topics=self._topics,
                on_dead=on_dead,
                split_from=self._split_from,
                beside=self._beside,
            )
            with self._refusal_notice.noted(channel, me()):
                Subscriptions(channel).check(declared)
            topics = "all topics" if self._topics is None else ", ".join(self._topics)
            where = f"{topics} to {self._sender.destination}, {self._beginning(channel)}"
            say(f"{self._about}{self._name}: {where}")
            self._spoke = True

    def _beginning(self, channel: Channel) -> str:
        known = Subscriptions(channel).find(self._name)
        if known is None:
            return f"a new subscription that begins at {self._start}"
        settled = ProgressLog(channel).newest(known.partition(0))
        if known.destination is None:
            ignored = "" if self._start == "earliest" else f"; --from {self._start} is for a name that is not there yet"
            return f"from the earliest message on{ignored}"
        since = "" if settled is None else f" {age(max(0.0, time.time() - settled.settled_at.timestamp()))} ago"
        return f"going on where it was{since}"

    def _why_nothing_moved(self, channel: Channel, patience: timedelta) -> str:
        known = Subscriptions(channel).find(self._name)
        holder = Leases(channel).look(known.partition(0)) if known else None
        waited = f"gave up after {age(patience.total_seconds())}"
        if holder is not None and holder.live:
            return f"{waited}: worker {holder.owner} holds the lease of {self._name}"
        silence = f"in which {self._sender.destination} accepted nothing{self._refusal}"
        return f"{waited} {silence}; {self._sender.sent} sent before"

    def _left_parked(self, channel: Channel) -> str:
        """Return in words what is parked, because the end of a run need not be the end of the work."""
        from outbox.store.operations.parked_status import parked_counts

        counts = parked_counts(channel, self._name)
        left = [f"{count} {state}" for state, count in counts.items() if count.number]
        return f"; parked: {', '.join(left)}" if left else ""

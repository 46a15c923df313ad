"""The work of `outbox relay`: relays that say where they begin, send, and give up when nothing moves for too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import click

from outbox.cli.connection import checked_label, open_channel_of, open_database, open_outbox
from outbox.cli.failures import UNFINISHED, report_failure
from outbox.cli.options import Target, me
from outbox.cli.output import age, say
from outbox.errors import DatabaseError
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, Start, compensation_of
from outbox.model.verdict import Done, Unavailable
from outbox.outbox import Outbox
from outbox.relay.relay import Relay
from outbox.relay.routes import Plan, opened
from outbox.relay.supervisor import AGAIN, Supervisor
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.runtime.text import labelled
from outbox.senders.opening import OpenedSender
from outbox.store.database import Channel, Database
from outbox.store.label import told_apart
from outbox.store.operations.parked_status import parked_counts
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.notices import RefusalNotice
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.telemetry.events import Event, HandedOver
from outbox.worker.settings import Settings, Until

_AGAIN_SECONDS = 0.5
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the relays of a command work.

    `start`: where a new subscription begins. `retry`: how often a message is tried. `patience`: a relay that ends by
    itself gives up after so long without an answer of its destination.
    """

    start: Start
    retry: RetryPolicy
    settings: Settings
    patience: timedelta


class Counted:
    """Listens to a relay: counts what was stored, and remembers when the destination last answered."""

    def __init__(self) -> None:
        self.sent = 0
        #: The last error of the destination about a message that it did not accept.
        self.refusal: str | None = None
        self.answered_at = time.monotonic()

    @property
    def silent(self) -> timedelta:
        """The time since the destination answered, or since the beginning."""
        return timedelta(seconds=time.monotonic() - self.answered_at)

    def told(self, event: Event) -> None:
        """Count what a call has stored, and note whether the destination answered it."""
        if not isinstance(event, HandedOver):
            return
        if event.verdicts is None:
            self.refusal = event.error
            return
        self.refusal = next((each.error for each in event.verdicts if isinstance(each, Unavailable)), self.refusal)
        self.sent += sum(isinstance(verdict, Done) for verdict in event.verdicts)
        if not all(isinstance(verdict, Unavailable) for verdict in event.verdicts):
            self.answered_at = time.monotonic()


class Relaying:
    """A relay from the command line, which opens its database by itself, as often as needed."""

    def __init__(self, target: Target, label: str, sender: OpenedSender, declared: Declaration, pace: Pace) -> None:
        """`label`: begins what it says, where it is one of several; else an empty text."""
        self.name = declared.name
        self.label = label
        self.deadline = sender.deadline
        #: The exit code, when it has ended by itself.
        self.code = 0
        self._target = target
        self._sender = sender
        self._counted = Counted()
        self._declared = declared
        self._pace = pace
        self._stop = Stop()
        self._spoke = self._sends = self._gave_up = False
        self._refusal_notice = RefusalNotice(declared.name)

    @property
    def stopping(self) -> bool:
        """True after it gave up, or should have: not if the database does not answer, because it waits for that."""
        return self._stop.asked or self._counted.silent > self._pace.patience

    def work(self, until: Until, stop: Stop) -> None:
        """Open the database, say where it begins, and send until stopped, or what is there; `code` says how it went.

        One of several says what went wrong, and goes on if it is to send until stopped.
        """
        with self._stop.within(stop):
            try:
                self._work(until)
            except click.ClickException as error:
                if not self.label:
                    raise
                if until == "stopped":
                    raise DatabaseError(error.message) from None
                say(f"Error: {self._labelled(error.message)}")
                self.code = error.exit_code
            except Exception as error:
                code = report_failure(error, self._labelled) if self.label and until != "stopped" else None
                if code is None:
                    raise
                self.code = code

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()

    def say_what_was_sent(self) -> None:
        """Say that the relay has stopped, and how many messages it has sent."""
        say(self._labelled(f"{self.name}: stopped; {self._counted.sent} sent"))

    def give_up_if_silent(self) -> None:
        """Stop if the destination does not answer for too long, or the lease never comes."""
        if self._sends and self._counted.silent > self._pace.patience:
            self._gave_up = True
            self._stop.ask()

    def _work(self, until: Until) -> None:
        if until == "stopped":
            with open_database(self._target.url, self._target.schema) as database, database.explained():
                with open_channel_of(database) as channel:
                    self._announce(channel)
                self._relay_of(database).work(until, self._stop)
            return
        with open_outbox(self._target.url, self._target.schema) as channel:
            self._announce(channel)
            self._send_what_is_there(until, channel)

    def _relay_of(self, database: Database) -> Relay:
        outbox = Outbox(database.engine, schema=database.schema, slots=database.slots)
        outbox.listen(self._counted.told)
        pace = self._pace
        return Relay(
            outbox, self._sender, declared=self._declared, start=pace.start, retry=pace.retry, settings=pace.settings
        )

    def _send_what_is_there(self, until: Until, channel: Channel) -> None:
        """Send one batch, or all there is.

        While messages wait and none is accepted, try again until patience is over, or until a stop.
        """
        relay = self._relay_of(channel.database)
        enough = time.monotonic() + self._pace.patience.total_seconds()
        self._counted.answered_at = time.monotonic()
        self._sends = True
        try:
            relay.work(until, self._stop)
            while until == "empty" and time.monotonic() < enough and self._nothing_moved(channel):
                if not self._stop.rest(_AGAIN_SECONDS):
                    break
                relay.work(until, self._stop)
        finally:
            self._sends = False
            self.close()
        self._say_how_it_ended(channel)

    def _say_how_it_ended(self, channel: Channel) -> None:
        parked = self._left_parked(channel)
        if self._gave_up:
            why = self._why_nothing_moved(channel)
        elif self._nothing_moved(channel) and not self._stop.asked:
            why = f"{self._sender.destination} accepted nothing{self._refusal}"
        else:
            say(self._labelled(f"{self.name}: {self._counted.sent} sent{parked}"))
            return
        say(f"Error: {self._labelled(f'{why}{parked}')}")
        self.code = UNFINISHED

    def _nothing_moved(self, channel: Channel) -> bool:
        """Return whether messages wait for the destination and it has accepted none at all; then it may be away."""
        if self._counted.sent:
            return False
        names = (self.name, compensation_of(self.name))
        return any(Parked(channel, each).waiting(1) for each in names)

    def _announce(self, channel: Channel) -> None:
        """Say once what is sent where, and from when on."""
        if not self._spoke:
            with self._refusal_notice.noted(channel, me()):
                Subscriptions(channel).check(self._declared)
            topics = "all topics" if self._declared.topics is None else ", ".join(self._declared.topics)
            where = f"{topics} to {self._sender.destination}, {self._beginning(channel)}"
            say(self._labelled(f"{self.name}: {where}"))
            self._spoke = True

    def _beginning(self, channel: Channel) -> str:
        known, start = Subscriptions(channel).find(self.name), self._pace.start
        if known is None:
            return f"a new subscription that begins at {start}"
        settled = ProgressLog(channel).newest(known.partition(0))
        if known.destination is None:
            ignored = "" if start == "earliest" else f"; --from {start} is for a name that is not there yet"
            return f"from the earliest message on{ignored}"
        since = "" if settled is None else f" {age(max(0.0, time.time() - settled.settled_at.timestamp()))} ago"
        return f"going on where it was{since}"

    def _why_nothing_moved(self, channel: Channel) -> str:
        known = Subscriptions(channel).find(self.name)
        holders = Leases(channel).look_all(known.all_partitions()) if known else {}
        waited = f"gave up after {age(self._pace.patience.total_seconds())}"
        if live := [each for each in holders.values() if each.live]:
            return f"{waited}: worker {live[0].owner} holds the lease of {self.name}"
        silence = f"in which {self._sender.destination} accepted nothing{self._refusal}"
        return f"{waited} {silence}; {self._counted.sent} sent before"

    @property
    def _refusal(self) -> str:
        return "" if self._counted.refusal is None else f" ({self._counted.refusal})"

    def _left_parked(self, channel: Channel) -> str:
        """Return in words what is parked, because the end of a run need not be the end of the work."""
        counts = parked_counts(channel, self.name)
        left = [f"{count} {state}" for state, count in counts.items() if count.number]
        return f"; parked: {', '.join(left)}" if left else ""

    def _labelled(self, text: str) -> str:
        return labelled(self.label, self.name, text) if self.label else text


def relay_until(until: Until, targets: Sequence[Target], plan: Plan, pace: Pace) -> int:
    """Run a relay for each route of each database; return the exit code: 4 if one gave up, or had to be left behind.

    One alone ends with the error that it meets. One of several is tried again, and delays no other.
    """
    relayings = _relayings(targets, plan, pace)
    supervisor = _supervisor_of(relayings, pace.settings.lease)
    if until == "stopped":
        supervisor.run()
        for each in relayings:
            each.say_what_was_sent()
    else:
        with stopping_on_signals(supervisor.stop):
            supervisor.start(until)
            while not supervisor.ended(_LOOK_SECONDS):
                for each in relayings:
                    each.give_up_if_silent()
        supervisor.raise_errors()
    codes = [each.code for each in relayings]
    return UNFINISHED if supervisor.unfinished or UNFINISHED in codes else max(codes)


def _supervisor_of(relayings: Sequence[Relaying], lease: timedelta) -> Supervisor:
    # The time that a healthy relay may need: for the call under way, and for a renewal of its lease.
    drain = max(each.deadline for each in relayings) + lease
    labels = [each.label for each in relayings]
    return Supervisor(relayings, labels=labels, drain=drain, pause=AGAIN if len(relayings) > 1 else None)


def _relayings(targets: Sequence[Target], plan: Plan, pace: Pace) -> list[Relaying]:
    """Return a relay for each route of each database; mistakes in the options raise before anything is opened."""
    labels = told_apart([checked_label(target.url, target.schema) for target in targets])
    if len(set(targets)) < len(targets):
        twice = next(label for target, label in zip(targets, labels, strict=True) if targets.count(target) > 1)
        raise click.UsageError(f"{twice} is given twice")
    found = []
    for target, label in zip(targets, labels, strict=True):
        for sender, declared in opened(plan):
            # One of several routes is called by its name, one of several databases by that.
            parts = [label] if len(targets) > 1 else []
            parts += [declared.name] if len(plan) > 1 else []
            found.append(Relaying(target, " ".join(parts), sender, declared, pace))
    return found

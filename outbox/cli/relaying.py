"""The work of `outbox relay`: relays tell their begin, send, and give up when nothing moves for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import click

from outbox.admin.admin import Admin
from outbox.admin.results import Look
from outbox.cli.connection import checked_label, open_channel_of, open_database
from outbox.cli.failures import UNFINISHED, report_failure
from outbox.cli.options import Target
from outbox.cli.output import age, fail, say
from outbox.cli.probes import Probes, run_probed
from outbox.cli.statuses import selected
from outbox.errors import DatabaseError
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, Start
from outbox.model.verdict import Done, Unavailable
from outbox.relay.relay import Relay
from outbox.relay.routes import Plan, opened
from outbox.relay.supervisor import AGAIN, Supervisor
from outbox.runtime.process import user_and_host
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
from outbox.writing.bare import BareOutbox

_AGAIN_SECONDS = 0.5
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the relays of a command work.

    `start`: where a new subscription begins. `retry`: how often a message is tried. `patience`: a relay that ends when
    the log is empty gives up after so long without an answer of its destination. `keep`: the relay of all topics, or of
    the last route, deletes messages that are older.
    """

    start: Start
    retry: RetryPolicy
    settings: Settings
    patience: timedelta
    keep: timedelta | None = None

    @property
    def until(self) -> Until:
        """The end of the work: when the log is empty, or never."""
        return "stopped" if self.patience == timedelta.max else "empty"


class Relaying:
    """A relay of the command line; opens the database as often as needed.

    Attributes:
        label: the beginning of output lines, if there are several relays; else empty.
        deadline: the time limit of a call of the sender.
        sent: the number of messages that the destination has accepted.
        code: the exit code, after the end.
    """

    def __init__(self, target: Target, label: str, sender: OpenedSender, declared: Declaration, pace: Pace) -> None:
        self.name = declared.name
        self.label = label
        self.deadline = sender.deadline
        self.sent = self.code = 0
        self._target = target
        self._sender = sender
        self._declared = declared
        self._pace = pace
        self._stop = Stop()
        self._spoke = self._sends = self._gave_up = False
        self._refusal_notice = RefusalNotice(declared.name)
        #: The last error of the destination about a message that was not accepted, in brackets.
        self._refusal = ""
        self._answered_at = time.monotonic()

    @property
    def stopping(self) -> bool:
        """True after the relay gave up, or should have; a database without an answer is not given up."""
        return self._stop.asked or self._silent

    @property
    def _silent(self) -> bool:
        return time.monotonic() - self._answered_at > self._pace.patience.total_seconds()

    def work(self, until: Until, stop: Stop) -> None:
        """Open the database, tell the begin, and send; `code` is the exit code.

        Among several relays a relay tells its error, and is tried again if the work has no end.
        """
        with self._stop.within(stop):
            try:
                self._work(until)
            except click.ClickException as error:
                if not self.label:
                    raise
                if until == "stopped":
                    raise DatabaseError(error.message) from None
                self._say(error.message, error.exit_code)
            except Exception as error:
                code = None
                if self.label and until != "stopped":
                    code = report_failure(error, self._labelled, self._target.commands)
                if code is None:
                    raise
                self.code = code

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()

    def say_what_was_sent(self) -> None:
        """Tell the end, and how many messages were sent."""
        self._say(f"{self.name}: stopped; {self.sent} sent")

    def give_up_if_silent(self) -> None:
        """Stop if the destination does not answer for too long, or the lease never comes."""
        if self._sends and self._silent:
            self._gave_up = True
            self._stop.ask()

    def _work(self, until: Until) -> None:
        if until == "stopped":
            with self._opened() as database, database.explained():
                with open_channel_of(database) as channel:
                    self._announce(channel)
                self._relay_of(database).work(until, self._stop)
            return
        with self._target.open_outbox() as channel:
            self._announce(channel)
            self._send_what_is_there(channel)

    def _opened(self) -> AbstractContextManager[Database]:
        return open_database(self._target.url, self._target.commands)

    def _relay_of(self, database: Database) -> Relay:
        outbox = BareOutbox(database)
        outbox.listeners.listen(self._told)
        pace = self._pace
        return Relay(
            outbox,
            self._sender,
            declared=self._declared,
            start=pace.start,
            retry=pace.retry,
            settings=pace.settings,
            keep=pace.keep if self._declared.split_from is None else None,
        )

    def _told(self, event: Event) -> None:
        """Count the accepted messages of a call, and note whether the destination answered."""
        if not isinstance(event, HandedOver):
            return
        verdicts = event.verdicts or ()
        refused = next((each.error for each in verdicts if isinstance(each, Unavailable)), event.error)
        self._refusal = f" ({refused})" if refused else self._refusal
        self.sent += sum(isinstance(verdict, Done) for verdict in verdicts)
        if not all(isinstance(verdict, Unavailable) for verdict in verdicts):
            self._answered_at = time.monotonic()

    def _send_what_is_there(self, channel: Channel) -> None:
        """Send until the log is empty. While messages wait and none is accepted, try again until patience is over."""
        relay = self._relay_of(channel.database)
        self._answered_at = time.monotonic()
        enough = self._answered_at + self._pace.patience.total_seconds()
        self._sends = True
        try:
            relay.work("empty", self._stop)
            while time.monotonic() < enough and self._nothing_moved(channel) and self._stop.rest(_AGAIN_SECONDS):
                relay.work("empty", self._stop)
        finally:
            self._sends = False
            self.close()
        # The end of a run need not be the end of the work.
        left = [f"{count} {state}" for state, count in parked_counts(channel, self.name).items() if count.number]
        parked = f"; parked: {', '.join(left)}" if left else ""
        if self._gave_up:
            self._say(f"{self._why_nothing_moved(channel)}{parked}", UNFINISHED)
        elif self._nothing_moved(channel) and not self._stop.asked:
            self._say(f"{self._sender.destination} accepted nothing{self._refusal}{parked}", UNFINISHED)
        else:
            self._say(f"{self.name}: {self.sent} sent{parked}")

    def _nothing_moved(self, channel: Channel) -> bool:
        """Return whether messages wait and the destination, which may be away, has accepted none at all."""
        return not self.sent and bool(Parked(channel, self.name).waiting(1))

    def _why_nothing_moved(self, channel: Channel) -> str:
        known = Subscriptions(channel).find(self.name)
        holders = Leases(channel).look_all(known.all_partitions()) if known else {}
        waited = f"gave up after {age(self._pace.patience.total_seconds())}"
        if live := [each for each in holders.values() if each.live]:
            return f"{waited}: worker {live[0].owner} holds the lease of {self.name}"
        silence = f"in which {self._sender.destination} accepted nothing{self._refusal}"
        return f"{waited} {silence}; {self.sent} sent before"

    def _announce(self, channel: Channel) -> None:
        """Tell once the topics, the destination and the begin."""
        if not self._spoke:
            with self._refusal_notice.noted(channel, user_and_host()):
                Subscriptions(channel).check(self._declared)
            begin = beginning(channel, self.name, self._pace.start)
            self._say(f"{self.name}: {selected(self._declared)} to {self._sender.destination}, {begin}")
            self._spoke = True

    def _say(self, text: str, code: int = 0) -> None:
        self.code = code
        (fail if code else say)(self._labelled(text))

    def _labelled(self, text: str) -> str:
        return labelled(self.label, self.name, text) if self.label else text


def beginning(channel: Channel, name: str, start: Start) -> str:
    """Return in words where a worker of a subscription begins."""
    known = Subscriptions(channel).find(name)
    if known is None:
        return f"a new subscription that begins at {start}"
    settled = ProgressLog(channel).newest(known.partition(0))
    if known.kind == "relay" and known.destination is None:
        ignored = "" if start == "earliest" else f"; --from {start} is for a name that is not there yet"
        return f"from the earliest message on{ignored}"
    since = "" if settled is None else f" {age(max(0.0, time.time() - settled.settled_at.timestamp()))} ago"
    return f"going on where it was{since}"


def run_relays(targets: Sequence[Target], plan: Plan, pace: Pace, probes: Probes) -> int:
    """Run a relay for each route of each database; return the exit code: 4 if a relay gave up or was given up.

    A single relay ends with its error. Of several relays each is tried again, and delays no other.
    """
    relayings = relayings_of(targets, plan, pace)
    supervisor = supervisor_of(relayings, pace)
    healthy = True
    if pace.until == "stopped":
        healthy = run_probed(supervisor, probes, looks_at(targets))
        for each in relayings:
            each.say_what_was_sent()
    else:
        with stopping_on_signals(supervisor.stop):
            for _ in supervisor.running(pace.until, _LOOK_SECONDS):
                for each in relayings:
                    each.give_up_if_silent()
    codes = [each.code for each in relayings]
    return UNFINISHED if supervisor.unfinished or not healthy or UNFINISHED in codes else max(codes)


def looks_at(targets: Iterable[Target]) -> dict[str, Callable[[], Look]]:
    """Return how to look at each database, by its label."""
    return {checked_label(each.url, each.schema): partial(_look_at, each) for each in targets}


def _look_at(target: Target) -> Look:
    with target.open_outbox() as channel:
        return Admin(channel).look()


def supervisor_of(relayings: Sequence[Relaying], pace: Pace) -> Supervisor:
    """Return a supervisor of relays. A stop leaves time for a call under way and a renewal of the lease."""
    drain = max(each.deadline for each in relayings) + pace.settings.lease
    labels = [each.label for each in relayings]
    return Supervisor(relayings, labels=labels, drain=drain, pause=AGAIN if len(relayings) > 1 else None)


def relayings_of(targets: Sequence[Target], plan: Plan, pace: Pace) -> list[Relaying]:
    """Return a relay for each route of each database; mistakes in the options raise before anything is opened."""
    labels = told_apart([checked_label(target.url, target.schema) for target in targets])
    if len(set(targets)) < len(targets):
        twice = next(label for target, label in zip(targets, labels, strict=True) if targets.count(target) > 1)
        raise click.UsageError(f"{twice} is given twice")
    found = []
    for target, label in zip(targets, labels, strict=True):
        for sender, declared in opened(plan):
            # One of several databases is named by its label, one of several routes by its subscription.
            parts = [label] if len(targets) > 1 else []
            parts += [declared.name] if len(plan) > 1 else []
            found.append(Relaying(target, " ".join(parts), sender, declared, pace))
    return found

"""Diagnosis of a log and of its subscriptions: findings with since when, evidence and the next command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from outbox.admin.results import Finding, Thresholds
from outbox.model.command import Commands
from outbox.model.filter.tags import tag_expression
from outbox.model.log_status import LogStatus
from outbox.model.parking import State
from outbox.model.subscription import Subscription, base_of, place_of
from outbox.runtime.text import age, counted, without_server
from outbox.store.operations.parked_status import Count, Trouble
from outbox.store.operations.status import SubscriptionStatus
from outbox.store.subscriptions.holds import Hold
from outbox.store.subscriptions.notices import Refused

#: A subscription that nobody runs, and messages that fail, cause a finding after so many seconds; less is a restart.
_IDLE_SECONDS = 60.0
#: A log with messages of this age is to be purged, at the latest in the second night.
_UNPURGED, _NIGHTS = timedelta(days=7), timedelta(days=2)
#: Dead letters have a common cause if there are so many, and one error has such a share.
_MANY, _COMMON_SHARE = 10, 0.8
_WAITS = ("waits", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of a look at a database, at a moment of the database's clock.

    `refused`: workers that cannot begin. `unread`: the messages, if no subscription reads the log. `commands`: about
    this outbox.
    """

    now: datetime
    standings: Sequence[SubscriptionStatus]
    refused: Sequence[Refused]
    unread: Count
    log: LogStatus
    commands: Commands


def findings_of(facts: Facts, thresholds: Thresholds) -> list[Finding]:
    """Return the findings about the log, about workers that cannot begin, and about all subscriptions."""
    return list(_Diagnosis(facts, thresholds).findings())


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    """Reasons from facts to findings."""

    facts: Facts
    limits: Thresholds

    def findings(self) -> Iterator[Finding]:
        if self.facts.unread.number:
            yield Finding(
                kind="unread",
                subscription=None,
                what=f"no subscription reads this log, and {counted(self.facts.unread, 'message', _WAITS)}",
                advice="to send them, run",
                next_command=self._command("relay", "--to", "URL"),
            )
        yield from self._of_log(self.facts.log)
        known = {each.subscription.name for each in self.facts.standings}
        yield from (self._of_refused(each) for each in self.facts.refused if each.name not in known)
        for standing in self.facts.standings:
            yield from self._of_subscription(standing)

    def _of_log(self, log: LogStatus) -> Iterator[Finding]:
        """Yield that nothing purges a log with old messages, and for whom a purge keeps more than its retention."""
        if log.oldest is None:
            return
        oldest = self.facts.now - log.oldest
        megabytes = "less than 1 MB" if log.bytes < 1e6 else f"{log.bytes / 1e6:.0f} MB"
        size = f"about {counted(log.rows, 'message')} with {megabytes}"
        since = f"the oldest from {age(oldest.total_seconds())} ago"
        if oldest > _UNPURGED and (log.purged_at is None or self.facts.now - log.purged_at > _NIGHTS):
            yield Finding(
                kind="unpurged",
                subscription=None,
                what=f"nothing purges the log: {size}, {since}",
                since=log.purged_at,
                seconds=None if log.purged_at is None else self._seconds(log.purged_at),
                advice="to delete old messages, run relays with --keep 7d, or every night",
                next_command=self._command("purge", "--older-than", "7d"),
            )
            return
        for name, rows in log.held_back.items():
            yield Finding(
                kind="held_back",
                subscription=name,
                what=f"about {counted(rows, 'message')} older than {age(log.keep_seconds or 0.0)}"
                f" {'is' if rows == 1 else 'are'} kept for this subscription",
                evidence=f"{size} in the log, {since}",
                advice="let its worker catch up, or drop the subscription; to see all, run",
                next_command=self._command("subscriptions", "list"),
            )

    def _of_subscription(self, standing: SubscriptionStatus) -> Iterator[Finding]:
        told = [
            *self._of_workers(standing),
            *self._of_unsent(standing, "waiting"),
            *self._of_unsent(standing, "retry"),
            *self._of_dead(standing),
        ]
        has_cause = any(each.kind in ("waiting", "failing", "dead", "given_up") for each in told)
        told += self._of_blocked(standing) if has_cause else ()
        told += self._of_nobody(standing)
        yield from told
        # Messages that wait for a known reason exceed no limit besides.
        is_known = has_cause or any(each.key is not None for each in standing.subscription.pauses)
        if is_known and standing.is_held:
            return
        if all(each.kind in ("dead", "given_up", "blocked") for each in told):
            yield from self._of_limits(standing)

    def _seconds(self, moment: datetime) -> float:
        return max(0.0, (self.facts.now - moment).total_seconds())

    def _of_refused(self, refused: Refused) -> Finding:
        """Return that a worker cannot begin. The notice has alternatives between which a person chooses."""
        return Finding(
            kind="refused",
            subscription=refused.name,
            what="a worker cannot begin",
            since=refused.since,
            seconds=self._seconds(refused.since),
            evidence=refused.notice,
            advice="to see what is stored, run",
            next_command=self._command("subscriptions", "list"),
        )

    def _is_refused(self, name: str) -> bool:
        """Return whether a worker of a subscription, or of a route below it, cannot begin."""
        known = [each.subscription for each in self.facts.standings]
        return any(name in (each.name, base_of(each.name, known)) for each in self.facts.refused)

    def _of_workers(self, standing: SubscriptionStatus) -> Iterator[Finding]:
        """Yield the reasons of workers for not working."""
        name, holder = standing.subscription.name, standing.holder
        yield from (self._of_refused(each) for each in self.facts.refused if each.name == name)
        if holder is not None and holder.notice is not None and not standing.subscription.is_paused:
            yield Finding(
                kind="stuck",
                subscription=name,
                what="the worker does not get on",
                since=holder.noticed_at,
                seconds=None if holder.noticed_at is None else self._seconds(holder.noticed_at),
                evidence=holder.notice,
                advice="to see whether the worker goes on, run",
                next_command=self._command("status", "--watch"),
            )

    def _of_unsent(self, standing: SubscriptionStatus, state: Literal["waiting", "retry"]) -> Iterator[Finding]:
        """Yield that messages wait for their destination, or fail and are tried again."""
        troubles = [each for each in standing.troubles if each.state == state]
        if not troubles or standing.subscription.is_paused:
            return
        subscription, since = standing.subscription, min(each.since for each in troubles)
        is_check, number = subscription.kind == "check", standing.parked[state]
        place = "an answer" if is_check else place_of(subscription, "their destination")
        if state == "retry" and (is_check or self._seconds(since) < _IDLE_SECONDS):
            return
        waits = f"{counted(number, 'message', _WAITS)} for {place}"
        yield Finding(
            kind="waiting" if state == "waiting" else "failing",
            subscription=subscription.name,
            what=waits
            if state == "waiting"
            else counted(number, "message", ("failed and is", "failed and are")) + " tried again",
            since=since,
            seconds=self._seconds(since),
            evidence=_errors(troubles, place),
            advice=None if is_check else "to see them, run",
            next_command=None if is_check else self._list_of(subscription.name, state),
        )

    def _of_dead(self, standing: SubscriptionStatus) -> Iterator[Finding]:
        """Yield that there are dead letters; of each transaction the first half message alone is dead."""
        troubles = [each for each in standing.troubles if each.state == "dead"]
        number, subscription = standing.parked["dead"], standing.subscription
        if not troubles or number.number <= self.limits.of(subscription.name).max_dead:
            return
        since, is_check = min(each.since for each in troubles), subscription.kind == "check"
        common = len(troubles) == 1 or _share(troubles[0], troubles) >= _COMMON_SHARE
        yield Finding(
            kind="given_up" if is_check else "dead",
            subscription=subscription.name,
            what=counted(number, "transaction", ("was given up", "were given up"))
            if is_check
            else counted(number, "dead letter"),
            since=since,
            seconds=self._seconds(since),
            evidence=_errors(troubles),
            advice="do not replay yet, mend the common cause first; to look, run"
            if common and number.number >= _MANY and not is_check
            else "to decide, run",
            next_command=self._command("half", "list", "--given-up", *_group_option(subscription))
            if is_check
            else self._list_of(subscription.name, "dead"),
        )

    def _of_blocked(self, standing: SubscriptionStatus) -> Iterator[Finding]:
        """Yield how many more messages a trouble holds back; the trouble counts the first of each key."""
        blocked, name = standing.parked["blocked"], standing.subscription.name
        if standing.subscription.kind != "check" and blocked.number:
            yield Finding(
                kind="blocked",
                subscription=name,
                what=f"{counted(blocked, 'message', ('is', 'are'))} blocked behind an earlier message of the same key",
                advice="to see the earlier messages, run",
                next_command=self._list_of(name, "blocked"),
            )

    def _of_limits(self, standing: SubscriptionStatus) -> Iterator[Finding]:
        """Yield the limits that a healthy subscription exceeds: more messages come than are handled."""
        # An extract reads when a person starts it, and has a limit of its own; a person has slowed a paused one down.
        if standing.hold is not None or standing.subscription.pause is not None:
            return
        exceeded, limits = list[str](), self.limits.of(standing.subscription.name)
        if standing.behind > limits.max_lag:
            oldest = age(standing.behind.total_seconds())
            exceeded.append(f"the oldest for {oldest}, which is more than {age(limits.max_lag.total_seconds())}")
        if limits.max_backlog is not None and standing.unsent.number > limits.max_backlog:
            exceeded.append(f"more than {limits.max_backlog} messages")
        if exceeded:
            place = standing.subscription.destination or "their turn"
            yield Finding(
                kind="behind",
                subscription=standing.subscription.name,
                what=f"{counted(standing.unsent, 'message', _WAITS)} for {place}",
                since=self.facts.now - standing.behind,
                seconds=standing.behind.total_seconds(),
                evidence="; ".join(exceeded),
                advice="to see whether the worker catches up, run",
                next_command=self._command("status", "--watch"),
            )

    def _of_nobody(self, standing: SubscriptionStatus) -> Iterator[Finding]:
        """Yield that a subscription has no worker, since when, and how to start a worker."""
        subscription, holder = standing.subscription, standing.holder
        name = subscription.name
        if standing.hold is not None:
            yield from self._of_extract(name, standing.hold, standing.idle or 0.0)
            return
        if standing.is_run or subscription.is_paused:
            return
        if not subscription.is_used:
            first: tuple[str | None, str | None] = None, None
            if not self._is_refused(name) and self._others_are_used(name):
                first = "if no worker is to, run", self._command("subscriptions", "drop", name)
            elif not self._is_refused(name) and subscription.kind == "relay":
                first = "to begin, run", self._command("relay", "--name", name, "--to", "URL")
            yield Finding(
                kind="not_run",
                subscription=name,
                what="no worker has run yet",
                evidence="no message is purged before the first run",
                advice=first[0],
                next_command=first[1],
            )
            return
        seconds, grounds = standing.idle, list[str]()
        if holder is not None and holder.lease_until is not None:
            # A worker that stops gives its lease back; a worker with a lease was killed, or hangs.
            seconds = self._seconds(holder.lease_until)
            grounds.append("the worker ended without giving the lease back")
        elif standing.idle is not None and standing.idle < _IDLE_SECONDS:
            return
        if standing.backlog.number:
            grounds.append(counted(standing.backlog, "message", _WAITS))
        numbers = ", ".join(str(each.number) for each in sorted(standing.unowned, key=lambda each: each.number))
        which = f" for partition {numbers}" if standing.owners else ""
        # A refusal names what to do; the options of before are the old ones.
        has_advice = subscription.follows is not None or self._is_refused(name)
        advice, command = (None, None) if has_advice else self._start(standing)
        yield Finding(
            kind="not_run",
            subscription=name,
            what=f"no worker checks back on group {subscription.tags[0]}"
            if subscription.tags and subscription.kind == "check"
            else f"no worker runs{which}",
            since=None if seconds is None else self.facts.now - timedelta(seconds=seconds),
            seconds=seconds,
            evidence="; ".join([*grounds, "later messages are not purged"]),
            advice=advice,
            next_command=command,
        )

    def _of_extract(self, name: str, hold: Hold, idle: float) -> Iterator[Finding]:
        until = f"{hold.until:%Y-%m-%d %H:%M:%S} UTC"
        if hold.released:
            evidence = f"the hold ended at {until}, and later messages may be purged"
        elif idle >= (hold.until - hold.since).total_seconds() / 2:
            evidence = f"after {until} purge no longer waits"
        else:
            return
        yield Finding(
            kind="released" if hold.released else "held",
            subscription=name,
            what="the extract is released" if hold.released else "the extract makes no progress",
            since=hold.since,
            seconds=self._seconds(hold.since),
            evidence=evidence,
            advice="start the extract again; or, to give the archive up, run",
            next_command=self._command("subscriptions", "drop", name),
        )

    def _others_are_used(self, name: str) -> bool:
        """Return whether another subscription is in use, besides those that follow this one."""
        others = [each.subscription for each in self.facts.standings if each.subscription.name != name]
        return any(each.is_used and each.follows != name for each in others if each.kind != "check")

    def _start(self, standing: SubscriptionStatus) -> tuple[str, str | None]:
        """Return how to start the worker of a subscription; a worker that sends to a function is in an application."""
        subscription = standing.subscription
        if subscription.kind == "check":
            return (
                "start a producer of the group, or a check of the group; for the command of a check, run",
                self._command("half", "list", *_group_option(subscription)),
            )
        if subscription.kind in ("consumer", "broadcast"):
            return "start the application of the consumer, or run", self._command("consume", "MODULE:NAME")
        destination = subscription.destination or ""
        if "://" not in destination and destination != "stdout:":
            return "start the application with the relay", None
        options: tuple[str, ...] = ()
        options += () if subscription.topics is None else ("--topics", ",".join(subscription.topics))
        options += () if subscription.tags is None else ("--tags", tag_expression(subscription.tags))
        options += () if subscription.filter is None else ("--filter", subscription.filter)
        run = self._command("relay", "--name", subscription.name, *options, "--to", destination)
        stored = "" if destination == "stdout:" else " and the options of its URL that are not stored"
        return f"start the relay with the same options as before{stored}", run

    def _list_of(self, name: str, state: State) -> str:
        return self._command("parked", "list", "--name", name, "--state", state)

    def _command(self, *words: str) -> str:
        return self.facts.commands.line(*words)


def _group_option(subscription: Subscription) -> tuple[str, ...]:
    return ("--group", subscription.tags[0]) if subscription.tags else ()


def _share(trouble: Trouble, troubles: Sequence[Trouble]) -> float:
    return trouble.messages.number / max(1, sum(each.messages.number for each in troubles))


def _errors(troubles: Sequence[Trouble], place: str = "") -> str:
    """Return the errors of messages, the most frequent first, each with its share if there are several."""
    said = [without_server(each.error or "no reason given", place) for each in troubles]
    if len(said) == 1:
        return said[0]
    shares = (f"{_share(each, troubles):.0%}".replace("%", " %") for each in troubles)
    return "; ".join(f"{share} have {error}" for share, error in zip(shares, said, strict=True))

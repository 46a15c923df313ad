"""Diagnosis of a log and of its subscriptions: problems, since when, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from shlex import quote

from outbox.cli.output import age, counted, moment
from outbox.model.filter.tags import tag_expression
from outbox.model.subscription import base_of, place_of
from outbox.runtime.text import labelled, without_server
from outbox.store.database import Channel
from outbox.store.operations.half_status import HalfStatus, half_standings
from outbox.store.operations.parked_status import Count, Trouble
from outbox.store.operations.status import SubscriptionStatus, standings, unread
from outbox.store.subscriptions.notices import Refused, refused_workers
from outbox.store.subscriptions.readers import Hold

#: A subscription that nobody runs, and messages that fail, cause a warning after so many seconds; less is a restart.
_IDLE_SECONDS = 60.0
_WAITS = ("waits", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits beyond which a subscription causes a warning; None: there is none."""

    max_lag: timedelta
    max_dead: int
    max_backlog: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The result of a look at a database, at a moment of the database's clock.

    `refused`: workers that cannot begin. `unread`: the messages, if no subscription reads the log.
    """

    now: datetime
    limits: Limits
    standings: list[SubscriptionStatus]
    refused: list[Refused]
    unread: Count | None
    halves: list[HalfStatus]

    @property
    def warnings(self) -> list[str]:
        """The warnings about the log, about workers that cannot begin, and about all subscriptions."""
        found: list[str] = []
        if self.unread is not None and self.unread.number:
            waiting = counted(self.unread, "message", _WAITS)
            found.append(f"no subscription reads this log; {waiting}; to send them, run: outbox relay --to URL")
        known = {each.subscription.name for each in self.standings}
        found += [self._of_refused(each) for each in self.refused if each.name not in known]
        return [*found, *(text for each in self.standings for text in self.warnings_of(each))]

    def warnings_of(self, standing: SubscriptionStatus) -> list[str]:
        """Return the warnings about a subscription."""
        notices, nobody = list(self._of_notices(standing)), self._of_nobody(standing)
        failing = list(self._of_troubles(standing, "waiting", "retry"))
        dead = list(self._of_troubles(standing, "dead"))
        blocked = _of_blocked(standing) if failing or dead else []
        # Messages that wait for a reason that is told exceed no limit besides.
        exceeded = [] if notices or failing or nobody else self._of_limits(standing)
        return [*notices, *failing, *dead, *blocked, *nobody, *exceeded]

    def _since(self, moment: datetime) -> str:
        return age(max(0.0, (self.now - moment).total_seconds()))

    def _of_refused(self, refused: Refused) -> str:
        """Return in words why a worker cannot begin, and what to do."""
        return f"{labelled(refused.name, refused.name, refused.notice)} (since {self._since(refused.since)})"

    def _is_refused(self, name: str) -> bool:
        """Return whether a worker of a subscription, or of a route below it, cannot begin."""
        known = [each.subscription for each in self.standings]
        return any(name in (each.name, base_of(each.name, known)) for each in self.refused)

    def _of_notices(self, standing: SubscriptionStatus) -> Iterator[str]:
        """Yield the reasons that workers give for not working."""
        name, holder = standing.subscription.name, standing.holder
        yield from (self._of_refused(each) for each in self.refused if each.name == name)
        if holder is not None and holder.notice is not None:
            since = "" if holder.noticed_at is None else f" (since {self._since(holder.noticed_at)})"
            yield f"{labelled(name, name, holder.notice)}{since}"

    def _of_troubles(self, standing: SubscriptionStatus, *states: str) -> Iterator[str]:
        """Yield in words the troubles of messages in the given states."""
        for each in standing.troubles:
            if each.state in states and (text := self._of_trouble(each, standing)):
                yield f"{standing.subscription.name}: {text}"

    def _of_trouble(self, trouble: Trouble, standing: SubscriptionStatus) -> str | None:
        """Return a trouble in words; None if no warning is due."""
        since, number = self._since(trouble.since), trouble.messages
        is_check, name = standing.subscription.kind == "check", standing.subscription.name
        if trouble.state == "waiting":
            place = "an answer" if is_check else place_of(standing.subscription, "their")
            why = without_server(trouble.error or "no reason given", place)
            return f"{counted(number, 'message', _WAITS)} for {place} since {since}: {why}"
        if trouble.state == "retry":
            if is_check or (self.now - trouble.since).total_seconds() < _IDLE_SECONDS:
                return None
            failed = counted(number, "message", ("failed and is", "failed and are"))
            return f"{failed} tried again, since {since}: {trouble.error}"
        if number.number <= self.limits.max_dead:
            return None
        if is_check:
            # Of each transaction the first half message alone is dead; the others are blocked behind it.
            given_up = counted(number, "transaction", ("was", "were"))
            group_option = f" --group {quote(standing.subscription.tags[0])}" if standing.subscription.tags else ""
            decide = f"outbox half list --given-up{group_option}"
            return f"{given_up} given up since {since}: {trouble.error}; to decide, run: {decide}"
        decide = f"outbox dead list --name {quote(name)}"
        return f"{counted(number, 'dead letter')} since {since}: {trouble.error}; to decide, run: {decide}"

    def _of_limits(self, standing: SubscriptionStatus) -> list[str]:
        """Return in words which limits a healthy subscription exceeds: more messages come than are handled."""
        # An extract reads when it is started, and has a limit of its own.
        if standing.hold is not None:
            return []
        exceeded, limits = list[str](), self.limits
        if standing.behind > limits.max_lag:
            oldest = age(standing.behind.total_seconds())
            exceeded.append(f"the oldest for {oldest} (--max-lag is {age(limits.max_lag.total_seconds())})")
        if limits.max_backlog is not None and standing.unsent.number > limits.max_backlog:
            exceeded.append(f"more than --max-backlog {limits.max_backlog}")
        if not exceeded:
            return []
        name, place = standing.subscription.name, standing.subscription.destination or "their turn"
        waiting = f"{counted(standing.unsent, 'message', _WAITS)} for {place}, {' and '.join(exceeded)}"
        return [f"{name}: {waiting}; whether it catches up, shows: outbox status --watch"]

    def _of_nobody(self, standing: SubscriptionStatus) -> list[str]:
        """Return in words that a subscription has no worker, since when, and how to start a worker."""
        subscription, holder = standing.subscription, standing.holder
        name = subscription.name
        if standing.hold is not None:
            return _of_extract(name, standing.hold, standing.idle or 0.0)
        if standing.is_run:
            return []
        if not subscription.is_used:
            unneeded = self._others_are_used(name) and not self._is_refused(name)
            advice = f"; if nobody is to, run: outbox subscriptions drop {quote(name)}" if unneeded else ""
            return [f"nobody has run {name} yet; it keeps every message from being purged{advice}"]
        since = "" if standing.idle is None else f", for {age(standing.idle)}"
        if holder is not None and holder.lease_until is not None:
            # A worker that stops gives its lease back; this one was killed, or hangs.
            since = f", for {self._since(holder.lease_until)}: its worker ended without giving the lease back"
        elif standing.idle is not None and standing.idle < _IDLE_SECONDS:
            return []
        unpurged = "messages after its position are not purged"
        if subscription.kind == "check":
            (group,) = subscription.tags or (name,)
            advice = f"outbox half check; for its options: outbox half list --group {quote(group)}"
            return [
                f"nobody checks back on group {group}{since}, and {unpurged}; start a producer of it, or run {advice}"
            ]
        waits = f"{counted(standing.backlog, 'message', _WAITS)} for it, and " if standing.backlog.number else ""
        if standing.owners:
            numbers = ", ".join(str(each.number) for each in sorted(standing.unowned, key=lambda each: each.number))
            name = f"partition {numbers} of {name}"
        # A worker that cannot begin says itself what to do; the options that its relay had are the old ones.
        has_advice = subscription.follows is not None or self._is_refused(name)
        advice = "" if has_advice else f"; {_start(standing)}"
        return [f"nobody runs {name}{since}; {waits}{unpurged}{advice}"]

    def _others_are_used(self, name: str) -> bool:
        """Return whether another subscription is in use, besides those that follow this one."""
        others = [each.subscription for each in self.standings if each.subscription.name != name]
        return any(each.is_used and each.follows != name for each in others if each.kind != "check")


def look_at(channel: Channel, limits: Limits) -> Look:
    """Look at a database."""
    now, found = standings(channel)
    return Look(
        now=now,
        limits=limits,
        standings=found,
        refused=refused_workers(channel),
        unread=unread(channel, found),
        halves=half_standings(channel, now, found),
    )


def _of_blocked(standing: SubscriptionStatus) -> list[str]:
    """Return in words how many more messages a trouble holds back; the trouble counts the first of each key."""
    blocked = standing.parked["blocked"]
    if standing.subscription.kind == "check" or not blocked.number:
        return []
    held = counted(blocked, "message", ("is", "are"))
    return [f"{standing.subscription.name}: {held} blocked behind an earlier one of the same key that is not sent"]


def _of_extract(name: str, hold: Hold, idle: float) -> list[str]:
    since, until = (moment(each) for each in (hold.since, hold.until))
    if hold.released:
        over = f"it made no progress from {since} until {until}, when its hold ended"
        return [f"extract {name} is released: {over}; messages after its position may be purged"]
    if idle < (hold.until - hold.since).total_seconds() / 2:
        return []
    return [f"extract {name} has made no progress since {since}; after {until} purge no longer waits for it"]


def _start(standing: SubscriptionStatus) -> str:
    """Return how to start the worker of a subscription; a worker that sends to a function is in an application."""
    subscription = standing.subscription
    if subscription.kind in ("consumer", "broadcast"):
        return "start the application that runs it, or run outbox consume with its module and name"
    destination = subscription.destination or ""
    if "://" not in destination and destination != "stdout:":
        return "start the application that runs it"
    options = "" if subscription.topics is None else f" --topics {quote(','.join(subscription.topics))}"
    options += "" if subscription.tags is None else f" --tags {quote(tag_expression(subscription.tags))}"
    options += "" if subscription.filter is None else f" --filter {quote(subscription.filter)}"
    run = f"outbox relay --name {quote(subscription.name)}{options} --to {quote(destination)}"
    return f"start its relay with the options that it had: {run}"

"""Diagnosis of a log and of its subscriptions: findings with since when, evidence and the next command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.admin.results import Finding, Kind, Proposal, Thresholds
from outbox.model.command import Commands
from outbox.model.filter.tags import tag_expression
from outbox.model.parking import State, States
from outbox.model.status import Count, LogStatus, Status, TroubleStatus
from outbox.model.subscription import base_of, check_of, place_of
from outbox.runtime.text import age, counted, in_utc, without_server
from outbox.store.subscriptions.decisions import Stalled
from outbox.store.subscriptions.notices import Refused

#: A subscription that nobody runs, and messages that fail, cause a finding after so many seconds; less is a restart.
_IDLE_SECONDS = 60.0
#: So long a worker that gets on leaves no decision open.
STALLED_SECONDS = 60.0
#: A log with messages of this age is to be purged, at the latest in the second night.
_UNPURGED, _NIGHTS = timedelta(days=7), timedelta(days=2)
#: Dead letters have a common cause if there are so many, and one error has such a share.
_MANY, _COMMON_SHARE = 10, 0.8
_WAITS = ("waits", "wait")
#: What a person can decide about a finding, with the arguments beside the subscription. A destination that is away may
#: come back by itself, and messages that fail may need to wait for a new version of the handler.
_DECISIONS: dict[Kind, tuple[tuple[str, dict[str, object]], ...]] = {
    "waiting": (("replay", {"all": True, "state": States.WAITING}), ("pause", {})),
    "failing": (("pause", {}), ("replay", {"all": True, "state": States.RETRY})),
    "dead": (("replay", {"all": True, "state": States.DEAD}), ("discard", {"all": True, "state": States.DEAD})),
    "behind": (("pause", {}),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Reasons from a look at a database to findings.

    `now`: by the database's clock. `refused`: workers that cannot begin. `stalled`: decisions that are open for
    too long. `unread`: the messages, if no subscription
    reads the log. `commands`: about this outbox.
    """

    now: datetime
    statuses: Sequence[Status]
    refused: Sequence[Refused]
    stalled: Sequence[Stalled]
    unread: Count
    log: LogStatus
    commands: Commands
    limits: Thresholds

    def findings(self) -> Iterator[Finding]:
        """Yield the findings about the log, about workers that cannot begin, and about all subscriptions."""
        if self.unread.number:
            yield self._finding(
                kind="unread",
                subscription=None,
                what=f"no subscription reads this log, and {counted(self.unread, 'message', _WAITS)}",
                advice="to send them, run",
                next_command=self._command("relay", "--to", "URL"),
            )
        yield from self._of_log(self.log)
        known = {each.name for each in self.statuses}
        yield from (self._of_refused(each) for each in self.refused if each.name not in known)
        for status in self.statuses:
            yield from self._of_subscription(status)

    def _of_log(self, log: LogStatus) -> Iterator[Finding]:
        """Yield that nothing purges a log with old messages, and for whom a purge keeps more than its retention."""
        if log.oldest is None:
            return
        oldest = self.now - log.oldest
        megabytes = "less than 1 MB" if log.bytes < 1e6 else f"{log.bytes / 1e6:.0f} MB"
        size = f"about {counted(log.rows, 'message')} with {megabytes}"
        since = f"the oldest from {age(oldest.total_seconds())} ago"
        if oldest > _UNPURGED and (log.purged_at is None or self.now - log.purged_at > _NIGHTS):
            yield self._finding(
                kind="unpurged",
                subscription=None,
                what=f"nothing purges the log: {size}, {since}",
                since=log.purged_at,
                advice="to delete old messages, run relays with --keep 7d, or every night",
                next_command=self._command("purge", "--older-than", "7d"),
            )
            return
        for name, rows in log.held_back.items():
            yield self._finding(
                kind="held_back",
                subscription=name,
                what=f"about {counted(rows, 'message')} older than {age(log.keep_seconds or 0.0)}"
                f" {'is' if rows == 1 else 'are'} kept for this subscription",
                evidence=f"{size} in the log, {since}",
                advice="let its worker catch up, or drop the subscription; to see all, run",
                next_command=self._command("subscriptions", "list"),
            )

    def _of_subscription(self, status: Status) -> Iterator[Finding]:
        told = [
            *self._of_workers(status),
            *self._of_unsent(status, States.WAITING),
            *self._of_unsent(status, States.RETRY),
            *self._of_dead(status),
            *self._of_decisions(status),
        ]
        has_cause = any(each.kind in ("waiting", "failing", "dead", "given_up") for each in told)
        told += self._of_behind_head(status) if has_cause else ()
        told += self._of_nobody(status)
        yield from told
        # Messages that wait for a known reason exceed no limit besides.
        is_known = has_cause or any(each.key is not None for each in status.pauses)
        if is_known and status.all_held:
            return
        if all(each.kind in ("dead", "given_up", "behind_head", "undone") for each in told):
            yield from self._of_limits(status)

    def _finding(
        self, *, kind: Kind, subscription: str | None, what: str, since: datetime | None = None, **more: str | None
    ) -> Finding:
        """Return a finding. `more`: evidence, advice and next command."""
        seconds = None if since is None else self._seconds(since)
        is_check = subscription is not None and subscription.startswith(check_of(""))
        decisions = () if is_check else _DECISIONS.get(kind, ())
        return Finding(
            kind=kind,
            subscription=subscription,
            what=what,
            since=since,
            seconds=seconds,
            decisions=tuple(Proposal(verb=verb, arguments={"name": subscription, **how}) for verb, how in decisions),
            **more,
        )

    def _seconds(self, moment: datetime) -> float:
        return max(0.0, (self.now - moment).total_seconds())

    def _of_refused(self, refused: Refused) -> Finding:
        """Return that a worker cannot begin. The notice has alternatives between which a person chooses."""
        return self._finding(
            kind="refused",
            subscription=refused.name,
            what="a worker cannot begin",
            since=refused.since,
            evidence=refused.notice,
            advice="to see what is stored, run",
            next_command=self._command("subscriptions", "list"),
        )

    def _is_refused(self, name: str) -> bool:
        """Return whether a worker of a subscription, or of a route below it, cannot begin."""
        return any(name in (each.name, base_of(each.name, self.statuses)) for each in self.refused)

    def _of_workers(self, status: Status) -> Iterator[Finding]:
        """Yield the reasons of workers for not working."""
        yield from (self._of_refused(each) for each in self.refused if each.name == status.name)
        if status.notice is not None and not status.is_paused:
            yield self._finding(
                kind="stuck",
                subscription=status.name,
                what="the worker does not get on",
                since=status.noticed_at,
                evidence=status.notice,
                advice="to see whether the worker goes on, run",
                next_command=self._command("status", "--watch"),
            )

    def _of_unsent(self, status: Status, state: State) -> Iterator[Finding]:
        """Yield that messages wait for their destination, or fail and are tried again."""
        troubles = [each for each in status.troubles if each.state == state]
        if not troubles or status.is_paused:
            return
        since = min(each.since for each in troubles)
        is_check, number = status.kind == "check", status.count(state)
        if state == States.RETRY and _is_received(status):
            # The turn of the others has only come.
            number = Count.total(Count(each.messages, about=each.messages_is_minimum) for each in troubles)
        place = "an answer" if is_check else place_of(status, "their destination")
        if state == States.RETRY and (is_check or self._seconds(since) < _IDLE_SECONDS):
            return
        waits = f"{counted(number, 'message', _WAITS)} for {place}"
        yield self._finding(
            kind="waiting" if state == States.WAITING else "failing",
            subscription=status.name,
            what=waits
            if state == States.WAITING
            else counted(number, "message", ("failed and is", "failed and are")) + " tried again",
            since=since,
            evidence=_errors(troubles, place),
            advice=None if is_check else "to see them, run",
            next_command=None if is_check else self._list_of(status.name, state),
        )

    def _of_dead(self, status: Status) -> Iterator[Finding]:
        """Yield that there are dead letters; of each transaction the first half message alone is dead."""
        troubles = [each for each in status.troubles if each.state == States.DEAD]
        number = status.count(States.DEAD)
        if not troubles or number.number <= self.limits.of(status.name).max_dead:
            return
        since, is_check = min(each.since for each in troubles), status.kind == "check"
        common = len(troubles) == 1 or _share(troubles[0], troubles) >= _COMMON_SHARE
        yield self._finding(
            kind="given_up" if is_check else "dead",
            subscription=status.name,
            what=counted(number, "transaction", ("was given up", "were given up"))
            if is_check
            else counted(number, "dead letter"),
            since=since,
            evidence=_errors(troubles) + ("" if is_check else self._of_retention()),
            advice="do not replay yet, mend the common cause first; to look, run"
            if common and number.number >= _MANY and not is_check
            else "to decide, run",
            next_command=self._command("half", "list", "--given-up", *_group_option(status))
            if is_check
            else self._list_of(status.name, States.DEAD),
        )

    def _of_retention(self) -> str:
        """Return for how long a purge keeps dead letters, in words; empty: for ever."""
        keep = self.log.keep_dead_seconds
        return "" if keep is None else f"; a purge discards them after {age(keep)}"

    def _of_decisions(self, status: Status) -> Iterator[Finding]:
        """Yield that decisions of people are open for longer than a worker needs."""
        why = "the worker does not come to it" if status.live else "a worker has to do so, and none runs"
        why = "a client that receives has to do so, and none does" if _is_received(status) else why
        for each in self.stalled:
            if each.name == status.name:
                yield self._finding(
                    kind="undone",
                    subscription=each.name,
                    what=f"{counted(each.number, 'decision', ('is', 'are'))} not carried out",
                    since=each.since,
                    evidence=why,
                    advice="to see who decided what, run",
                    next_command=self._command("decisions", "--name", each.name),
                )

    def _of_behind_head(self, status: Status) -> Iterator[Finding]:
        """Yield how many more messages a trouble holds back; the trouble counts the first of each key."""
        behind, name = status.count(States.BEHIND), status.name
        if status.kind != "check" and behind.number:
            yield self._finding(
                kind="behind_head",
                subscription=name,
                what=f"{counted(behind, 'message', ('is', 'are'))} behind an earlier message of the same key",
                advice="to see the earlier messages, run",
                next_command=self._list_of(name, States.BEHIND),
            )

    def _of_limits(self, status: Status) -> Iterator[Finding]:
        """Yield the limits that a healthy subscription exceeds: more messages come than are handled."""
        # An extract reads when a person starts it, and has a limit of its own; a person has slowed a paused one down.
        if status.held_since is not None or status.pause is not None:
            return
        exceeded, limits = list[str](), self.limits.of(status.name)
        lag = 0.0 if status.lag_is_estimate else max(0.0, round(status.lag_seconds - status.grace_seconds, 3))
        if lag > limits.max_lag.total_seconds():
            exceeded.append(f"the oldest for {age(lag)}, which is more than {age(limits.max_lag.total_seconds())}")
        if limits.max_backlog is not None and status.unsent.number > limits.max_backlog:
            exceeded.append(f"more than {limits.max_backlog} messages")
        if exceeded:
            place = status.destination or "their turn"
            yield self._finding(
                kind="behind",
                subscription=status.name,
                what=f"{counted(status.unsent, 'message', _WAITS)} for {place}",
                since=self.now - timedelta(seconds=lag),
                evidence="; ".join(exceeded),
                advice="to see whether the worker catches up, run",
                next_command=self._command("status", "--watch"),
            )

    def _of_nobody(self, status: Status) -> Iterator[Finding]:
        """Yield that a subscription has no worker, since when, and how to start a worker."""
        name = status.name
        if status.held_since is not None and status.held_until is not None:
            yield from self._of_extract(status, status.held_since, status.held_until)
            return
        if status.live or status.is_paused:
            return
        if not status.is_used:
            first: tuple[str | None, str | None] = None, None
            if not self._is_refused(name) and self._others_are_used(name):
                first = "if no worker is to, run", self._command("subscriptions", "drop", name)
            elif not self._is_refused(name) and status.kind == "relay":
                first = "to begin, run", self._command("relay", "--name", name, "--to", "URL")
            yield self._finding(
                kind="not_run",
                subscription=name,
                what="no worker has run yet",
                evidence="no message is purged before the first run",
                advice=first[0],
                next_command=first[1],
            )
            return
        if _is_received(status):
            yield from self._of_no_client(status)
            return
        seconds, grounds = status.idle_seconds, list[str]()
        if status.lease_until is not None:
            # A worker that stops gives its lease back; a worker with a lease was killed, or hangs.
            seconds = self._seconds(status.lease_until)
            grounds.append("the worker ended without giving the lease back")
        elif status.idle_seconds is not None and status.idle_seconds < _IDLE_SECONDS:
            return
        if status.backlog:
            grounds.append(counted(status.unsettled, "message", _WAITS))
        which = f" for partition {', '.join(map(str, status.unowned))}" if status.workers else ""
        # A refusal names what to do; the options of before are the old ones.
        has_advice = status.follows is not None or self._is_refused(name)
        advice, command = (None, None) if has_advice else self._start(status)
        yield self._finding(
            kind="not_run",
            subscription=name,
            what=f"no worker checks back on group {status.tags[0]}"
            if status.tags and status.kind == "check"
            else f"no worker runs{which}",
            since=None if seconds is None else self.now - timedelta(seconds=seconds),
            evidence="; ".join([*grounds, "later messages are not purged"]),
            advice=advice,
            next_command=command,
        )

    def _of_no_client(self, status: Status) -> Iterator[Finding]:
        """Yield that messages wait and no client receives; clients that wait for messages leave no trace."""
        overdue = [self._seconds(each.since) for each in status.troubles if each.state == States.RETRY]
        waiting = [each.lag_seconds for each in status.partitions if each.backlog]
        seconds = min(status.idle_seconds or 0.0, max([*overdue, *waiting], default=0.0))
        if seconds < _IDLE_SECONDS or status.all_held:
            return
        grounds = [counted(status.unsettled, "message", _WAITS)] if status.backlog else []
        yield self._finding(
            kind="not_run",
            subscription=status.name,
            what="no client receives",
            since=self.now - timedelta(seconds=seconds),
            evidence="; ".join([*grounds, "later messages are not purged"]),
            advice="start a client of the group; or, to give the group up, run",
            next_command=self._command("subscriptions", "drop", status.name),
        )

    def _of_extract(self, status: Status, since: datetime, until: datetime) -> Iterator[Finding]:
        if status.released:
            evidence = f"the hold ended at {in_utc(until)}, and later messages may be purged"
        elif (status.idle_seconds or 0.0) >= (until - since).total_seconds() / 2:
            evidence = f"after {in_utc(until)} purge no longer waits"
        else:
            return
        yield self._finding(
            kind="released" if status.released else "held",
            subscription=status.name,
            what="the extract is released" if status.released else "the extract makes no progress",
            since=since,
            evidence=evidence,
            advice="start the extract again; or, to give the archive up, run",
            next_command=self._command("subscriptions", "drop", status.name),
        )

    def _others_are_used(self, name: str) -> bool:
        """Return whether another subscription is in use, besides those that follow this one."""
        others = [each for each in self.statuses if each.name != name]
        return any(each.is_used and each.follows != name for each in others if each.kind != "check")

    def _start(self, status: Status) -> tuple[str, str | None]:
        """Return how to start the worker of a subscription; a worker that sends to a function is in an application."""
        if status.kind == "check":
            return (
                "start a producer of the group, or a check of the group; for the command of a check, run",
                self._command("half", "list", *_group_option(status)),
            )
        if status.kind in ("consumer", "broadcast"):
            return "start the application of the consumer, or run", self._command("consume", "MODULE:NAME")
        destination = status.destination or ""
        if "://" not in destination and destination != "stdout:":
            return "start the application with the relay", None
        options: tuple[str, ...] = ()
        options += () if status.topics is None else ("--topics", ",".join(status.topics))
        options += () if status.tags is None else ("--tags", tag_expression(status.tags))
        options += () if status.filter is None else ("--filter", status.filter)
        run = self._command("relay", "--name", status.name, *options, "--to", destination)
        stored = "" if destination == "stdout:" else " and the options of its URL that are not stored"
        return f"start the relay with the same options as before{stored}", run

    def _list_of(self, name: str, state: State) -> str:
        return self._command("parked", "list", "--name", name, "--state", state)

    def _command(self, *words: str) -> str:
        return self.commands.line(*words)


def _is_received(status: Status) -> bool:
    """Return whether clients receive the messages by receipts, so that no worker is to run."""
    # Only a worker, or a command, has had a lease. A front puts the bar between a group and its topic.
    never_leased = status.lease_seconds is None and status.lease_until is None
    return status.kind == "consumer" and not status.workers and (never_leased or "|" in status.name)


def _group_option(status: Status) -> tuple[str, ...]:
    return ("--group", status.tags[0]) if status.tags else ()


def _share(trouble: TroubleStatus, troubles: Sequence[TroubleStatus]) -> float:
    return trouble.messages / max(1, sum(each.messages for each in troubles))


def _errors(troubles: Sequence[TroubleStatus], place: str = "") -> str:
    """Return the errors of messages, the most frequent first, each with its share if there are several."""
    said = [without_server(each.error or "no reason given", place) for each in troubles]
    if len(said) == 1:
        return said[0]
    shares = (f"{_share(each, troubles):.0%}".replace("%", " %") for each in troubles)
    return "; ".join(f"{share} have {error}" for share, error in zip(shares, said, strict=True))

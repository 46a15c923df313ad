"""The orders and the questions of an operator, as one object: `Outbox.admin`. The command line prints its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from outbox.admin import decisions
from outbox.admin.decisions import Choice, Order
from outbox.admin.diagnosis import Facts, findings_of
from outbox.admin.results import Decision, Finding, Look, ParkedDetail, Status, Thresholds, TransactionsStatus
from outbox.admin.statuses import rounded, status_of
from outbox.store.database import Channel, Database
from outbox.store.operations.half_status import HalfStatus, half_standings
from outbox.store.operations.log_status import log_status
from outbox.store.operations.status import standings, unread
from outbox.store.subscriptions.notices import refused_workers
from outbox.store.subscriptions.parked_messages import ParkedMessage
from outbox.store.subscriptions.subscriptions import Subscriptions

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT = Thresholds()


def awaited(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the awaited form of a blocking method; the method runs in a thread."""

    @wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    call.__doc__ = f"Do as `{method.__name__}`, awaited."
    return call


class Admin:
    """Answers an operator's questions about an outbox, and carries out orders.

    Each call opens a connection, and closes the connection at the end. So calls may overlap. The results are frozen,
    with the fields of `--json`.

    Args:
        where: the database of an outbox; or a connection for all calls, one after the other.
    """

    def __init__(self, where: Database | Channel) -> None:
        self._where = where

    # Looking

    def look(self, thresholds: Thresholds = _DEFAULT) -> Look:
        """Return statuses, findings and transactions at one moment, as `outbox status` shows them."""
        with self._channel() as channel:
            return _look(channel, thresholds)

    def statuses(self, name: str | None = None) -> tuple[Status, ...]:
        """Return the status of each subscription, sorted by name: backlog, lag, parked messages, workers, troubles.

        Args:
            name: of one subscription; of a broadcast consumer all instances are meant. None: all subscriptions.

        Raises:
            SubscriptionError: there is no subscription of this name.
        """
        with self._channel() as channel:
            meant = None if name is None else Subscriptions(channel).get_all(name)
            return tuple(map(status_of, standings(channel, meant)[1]))

    def diagnosis(self, thresholds: Thresholds = _DEFAULT) -> tuple[Finding, ...]:
        """Return the problems, each with its begin, evidence and the next command; empty: all is well."""
        return self.look(thresholds).findings

    def parked(self, *, limit: int = 100, **choice: Unpack[Choice]) -> tuple[ParkedMessage, ...]:
        """Return at most `limit` parked messages, by subscription and in the order of the log.

        Args:
            limit: at most so many.
            choice: see `Choice`; without any all parked messages are meant.

        Raises:
            SubscriptionError: there is no such subscription or state, or a moment has no zone.
        """
        with self._channel() as channel:
            return tuple(decisions.parked(channel, limit, choice))

    def dead_letters(self, *, limit: int = 100, **choice: Unpack[Choice]) -> tuple[ParkedMessage, ...]:
        """Do as `parked`, for dead letters."""
        choice["state"] = "dead"
        return self.parked(limit=limit, **choice)

    def parked_message(self, id: int, *, name: str | None = None) -> ParkedDetail:
        """Return a parked message with its contents. `name`: the subscription, if several have parked the message.

        Raises:
            SubscriptionError: no message is parked under this id, or several subscriptions have parked it.
        """
        with self._channel() as channel:
            return decisions.detail(channel, id, name)

    alook = awaited(look)
    astatuses = awaited(statuses)
    adiagnosis = awaited(diagnosis)
    aparked = awaited(parked)
    adead_letters = awaited(dead_letters)
    aparked_message = awaited(parked_message)

    # Deciding

    def replay(self, *ids: int, reason: str | None = None, **order: Unpack[Order]) -> tuple[Decision, ...]:
        """Have parked messages sent now, with attempts counted from 0; without a state dead letters are meant.

        The live worker carries the request out; without a worker the call does.

        Args:
            ids: of messages; or `all=True` for every message of a choice.
            reason: for the log.
            order: see `Order`.

        Raises:
            SubscriptionError: neither ids nor `all`; an id that is not parked, or that several subscriptions have
                parked; or a state that cannot be replayed. Nothing was done.
        """
        with self._channel() as channel:
            return tuple(decisions.decide(channel, "replay", ids, reason, order))

    def discard(self, *ids: int, reason: str, **order: Unpack[Order]) -> tuple[Decision, ...]:
        """Give parked messages up for good; messages behind them go on. Takes and raises what `replay` does."""
        with self._channel() as channel:
            return tuple(decisions.decide(channel, "discard", ids, reason, order))

    areplay = awaited(replay)
    adiscard = awaited(discard)

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        if isinstance(self._where, Channel):
            yield self._where
            return
        with self._where.explained(), closing(self._where.open()) as channel:
            yield channel


def _look(channel: Channel, thresholds: Thresholds) -> Look:
    now, found = standings(channel)
    facts = Facts(
        now=now,
        standings=found,
        refused=refused_workers(channel),
        unread=unread(channel, found),
        log=log_status(channel, now),
    )
    halves = half_standings(channel, now, found)
    return Look(
        at=now,
        findings=tuple(findings_of(facts, thresholds)),
        subscriptions=tuple(map(status_of, found)),
        transactions=tuple(map(_of_transactions, halves)),
        log=facts.log,
        latencies=_latencies(halves),
    )


def _of_transactions(half: HalfStatus) -> TransactionsStatus:
    counts = {
        "half": half.pending, "given_up": half.given_up, "committed": half.committed, "rolled_back": half.rolled_back,
    }  # fmt: skip
    return TransactionsStatus(
        group=half.group,
        topic=half.topic,
        half=half.pending.number,
        given_up=half.given_up.number,
        committed=half.committed.number,
        rolled_back=half.rolled_back.number,
        estimates=tuple(name for name, count in counts.items() if count.about),
        oldest_seconds=rounded(half.oldest),
        last_verdict_seconds=rounded(half.decided),
    )


def _latencies(halves: Sequence[HalfStatus]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for each in halves:
        if each.latency is not None:
            known = found.setdefault(each.topic, {"count": 0, "sum": 0.0, "max": 0.0})
            known["count"] += each.latency.count
            known["sum"] = round(known["sum"] + each.latency.sum, 3)
            known["max"] = round(max(known["max"], each.latency.max), 3)
    return found

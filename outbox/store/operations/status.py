"""The status of every subscription: backlog, lag, holders. The cost does not grow with the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from typing import Any
from uuid import UUID

from outbox.model.barrier import has_arrived
from outbox.model.lease import Holder, Partition
from outbox.model.limits import HALF_TOPIC
from outbox.model.message import stored_uuid
from outbox.model.position import EARLIEST, Progress
from outbox.model.status import MOST_COUNTED, UNSENT, Count, PartitionStatus, Status, StoredProperties
from outbox.model.subscription import Subscription
from outbox.store.database import Channel, Database
from outbox.store.dialects.dialect import slots_of
from outbox.store.dialects.statements import Row
from outbox.store.half_messages.half import real_topic_of
from outbox.store.log.log import last_id, selected
from outbox.store.operations.parked_status import UNDECIDED, status_of_parked
from outbox.store.subscriptions.holds import hold_of
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

#: An estimate reads at so many places of the log, so many rows at each.
_PLACES, ROWS_A_PLACE = 32, 512


@dataclass(frozen=True, slots=True)
class _Part:
    """The result of a bounded look at unsettled rows: the numbers of all and of selected rows, and extremes."""

    rows: int
    selected: int
    oldest: datetime | None
    youngest_row: datetime | None
    first_id: int | None


#: `{number}` is the column by which a position tells what is settled. The ORDER BY keeps never-analysed tables on the
#: index (number, id); the limit comes before the selection, so that a rare topic costs no more than a common one.
_FRESH = "SELECT {columns} FROM {message} WHERE {number} >= :head ORDER BY {number}, id LIMIT :limit"
#: The rest of a window that is settled in part, by primary key from the last settled id on.
_REST = "SELECT {columns}, {number} AS number FROM {message} WHERE id > :after ORDER BY id LIMIT :limit"
#: A bounded look at rows: how many there are, how many of them are meant, and their extremes. `{since}` is the moment
#: from which on a row could have been sent.
_LOOK = """
    SELECT count(*), count(CASE WHEN {meant} THEN 1 END), min(CASE WHEN {meant} THEN {since} END),
           max(created_at), min(id)
    FROM ({rows}) AS r
"""
_BY_TOPIC = "SELECT {real_topic}, count(*), min(created_at) FROM ({rows}) AS r WHERE {meant} GROUP BY {real_topic}"
#: A delayed message can be sent from when it is due.
_DUE = "CASE WHEN deliver_at > created_at THEN deliver_at ELSE created_at END"
_LEFT = "(number < :target AND NOT {in_target} AND (number >= :head OR {in_base}))"
_SAMPLE = """
    SELECT count(*), count(CASE WHEN {selected} AND {unsettled} THEN 1 END), max(id)
    FROM (SELECT {columns}, {number} AS number FROM {message} WHERE id >= :first AND id < :end
          ORDER BY id LIMIT :limit) AS r
"""
_UNSETTLED = "NOT (number < :head AND NOT {in_base}) AND NOT (id <= :after AND number < :target AND NOT {in_target})"
_PASSED = """
    SELECT count(*) FROM (
        SELECT 1 FROM (SELECT {columns}, {number} AS number FROM {message}) AS r
        WHERE {selected} AND NOT ({unsettled}) LIMIT :limit) AS f
"""
_UNREAD = """
    SELECT id, message_id FROM (SELECT {columns}, message_id, {number} AS number FROM {message}) AS r
    WHERE {selected} AND {unsettled} ORDER BY id LIMIT :most
"""
_LEFT_IN_WINDOW = f"id > :after AND {_LEFT}"
#: Messages of the log, by primary key up to the limit.
_WRITTEN = """
    SELECT count(CASE WHEN topic <> :half THEN 1 END) FROM (SELECT topic FROM {message} ORDER BY id LIMIT :limit) AS r
"""


def statuses(channel: Channel, subscriptions: Sequence[Subscription] | None = None) -> tuple[datetime, list[Status]]:
    """Return the database's clock, and the status of these subscriptions; None: of all, sorted by name."""
    now = channel.now()
    meant = Subscriptions(channel).all() if subscriptions is None else subscriptions
    return now, [_status(channel, each, now) for each in meant]


def properties_of(
    channel: Channel, subscription: Subscription, of: type[StoredProperties] = StoredProperties
) -> dict[str, Any]:
    """Return the fields of `StoredProperties`, and those that the class `of` shares with the stored subscription."""
    hold, stored = hold_of(channel, subscription), {each.name for each in fields(subscription)}
    return {
        **{each.name: getattr(subscription, each.name) for each in fields(of) if each.name in stored},
        "grace_seconds": subscription.grace.total_seconds(),
        "held_since": None if hold is None else hold.since,
        "held_until": None if hold is None else hold.until,
        "released": None if hold is None else hold.released,
    }


def seconds_since(moment: datetime, now: datetime) -> float:
    """Return how many seconds ago a moment was, with milliseconds; 0 for a later one."""
    return round(max(0.0, (now - moment).total_seconds()), 3)


def unread(channel: Channel, found: Sequence[Status]) -> Count:
    """Return the number of messages in a log that no subscription reads, without half messages; 0 if one does."""
    if any(each.kind != "check" for each in found):
        return Count(0)
    return Count.upto(channel.rows(_WRITTEN, half=HALF_TOPIC, limit=MOST_COUNTED + 1)[0][0])


def unread_by_topic(channel: Channel, check: str) -> dict[str, tuple[int, datetime]]:
    """Return the half messages before a check-back that a bounded look sees, as `_Unsettled.by_topic` does.

    A check-back that somebody has dropped meanwhile has none.
    """
    found = Subscriptions(channel).find(check)
    return {} if found is None else _Unsettled(channel, found, found.partition(0)).by_topic()


def passed(channel: Channel, subscription: Subscription) -> Count:
    """Return how many messages of a selection a subscription has settled, or passed over, as far as the log has them.

    The cost grows with the log until enough messages are found.
    """
    parts = (_Unsettled(channel, subscription, each) for each in subscription.all_partitions())
    return Count.total(Count.upto(each.passed()) for each in parts)


def unread_by(
    channel: Channel, subscription: Subscription, *, topic: str | None, key: str | None, ids: Sequence[int] | None
) -> Count:
    """Return how many messages of a choice lie in the log, for a subscription to read. None chooses nothing.

    A message that a worker has under its hands counts, too.
    """
    only = _only(channel.database, topic=topic, key=key, ids=ids)
    unsettled = (_Unsettled(channel, subscription, each, only) for each in subscription.all_partitions())
    return Count.total(each.count() for each in unsettled)


def unread_messages(
    channel: Channel,
    subscription: Subscription,
    most: int,
    *,
    topic: str | None = None,
    key: str | None = None,
    ids: Sequence[int] | None = None,
) -> dict[int, UUID]:
    """Return at most `most` messages of a choice that lie in the log for a subscription to read: their ids.

    The cost grows with the log, if no `ids` are given.
    """
    only, found = _only(channel.database, topic=topic, key=key, ids=ids), dict[int, UUID]()
    for partition in subscription.all_partitions():
        found |= _Unsettled(channel, subscription, partition, only).messages(most - len(found))
    return found


def _only(database: Database, *, topic: str | None, key: str | None, ids: Sequence[int] | None) -> _Only:
    parts: dict[str, dict[str, Any]] = {}
    if topic is not None:
        parts["topic = :of_topic"] = {"of_topic": topic}
    if key is not None:
        parts["key = :of_key"] = {"of_key": key}
    if ids is not None:
        parts[database.among("id", numbers="of_ids")] = {"of_ids": database.bind(ids)}
    bound = {name: value for each in parts.values() for name, value in each.items()}
    return _Only(" AND ".join(parts) or "TRUE", bound)


def places(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the log at which an estimate reads: the first id, and the end of ids."""
    width = max(1, -(-(end - first) // _PLACES))
    return ((start, min(start + width, end)) for start in range(first, end, width))


def _status(channel: Channel, subscription: Subscription, now: datetime) -> Status:
    holders = Leases(channel).look_all(subscription.all_partitions())
    unsettled = [_Unsettled(channel, subscription, each) for each in subscription.all_partitions()]
    partitions = tuple(_of_partition(each, holders.get(each.partition), now) for each in unsettled)
    unowned = [each for each in partitions if each.worker is None and not each.arrived]
    # The partition that shows what is wrong, if one does: the longest without a worker.
    shown = max(unowned, key=lambda each: each.idle_seconds or 0.0, default=partitions[0])
    holder, parked = holders.get(subscription.partition(shown.number)), status_of_parked(channel, subscription)
    backlog = Count.total(each.unsettled for each in partitions)
    found = [(moment, about) for moment, about in (each.oldest() for each in unsettled) if moment is not None]
    # A parked transaction may have a verdict by now. The pending ones are counted by group, in `half_status`.
    if parked.unsent_since is not None and subscription.kind != "check":
        found.append((parked.unsent_since, False))
    oldest, lag_is_estimate = min(found, default=(now, False))
    waiting = Count.total([backlog, *(parked.counts[state] for state in UNSENT)])
    return Status(
        **properties_of(channel, subscription),
        backlog=backlog.number,
        backlog_is_estimate=backlog.about,
        lag_seconds=seconds_since(oldest, now),
        lag_is_estimate=lag_is_estimate,
        idle_seconds=shown.idle_seconds,
        worker=shown.worker,
        partitions=partitions,
        live=not unowned,
        lease_until=shown.lease_until,
        lease_seconds=None if holder is None or holder.length is None else holder.length.total_seconds(),
        notice=None if holder is None else holder.notice,
        noticed_at=None if holder is None else holder.noticed_at,
        parked={state: count.number for state, count in parked.counts.items()},
        parked_is_minimum=tuple(state for state, count in parked.counts.items() if count.about),
        all_held=0 < waiting.number and not backlog.number and not parked.some_free,
        troubles=parked.troubles,
    )


def _of_partition(unsettled: _Unsettled, holder: Holder | None, now: datetime) -> PartitionStatus:
    (oldest, lag_is_estimate), settled, backlog = unsettled.oldest(), unsettled.settled, unsettled.count()
    return PartitionStatus(
        number=unsettled.partition.partition,
        backlog=backlog.number,
        backlog_is_estimate=backlog.about,
        lag_seconds=seconds_since(oldest or now, now),
        lag_is_estimate=lag_is_estimate,
        idle_seconds=None if settled is None else seconds_since(settled.settled_at, now),
        worker=holder.owner if holder is not None and holder.live else None,
        lease_until=None if holder is None else holder.lease_until,
        arrived=unsettled.arrived,
    )


@dataclass(frozen=True, slots=True)
class _Only:
    """A condition on rows, besides the selection, with its parameters."""

    sql: str = "TRUE"
    parameters: dict[str, Any] = field(default_factory=dict)


_ANY = _Only()


class _Unsettled:
    """The rows of the log that a partition has not settled. `only`: those of a choice."""

    def __init__(self, channel: Channel, subscription: Subscription, partition: Partition, only: _Only = _ANY) -> None:
        self._channel = channel
        self._database = database = channel.database
        self.partition = partition
        self.settled = ProgressLog(channel).newest(partition)
        self._progress = Progress(EARLIEST) if self.settled is None else self.settled.progress
        self._ends = subscription.kind == "backfill"
        stop = subscription.stop_at if self._ends else None
        self.arrived = stop is not None and has_arrived(self._progress, stop)
        if stop is not None and self._progress.target is None and not self.arrived:
            # All of the rest lies in one window, whether a worker has opened the window or not.
            self._progress = Progress(self._progress.base, stop, -1)
        slots, selection = slots_of(partition), subscription.selection
        chosen = selected(database.dialect.values, selection, slots)
        is_check = subscription.kind == "check"
        # A look reads only the columns that it needs, because rows are copied for it.
        has_content = is_check or only is not _ANY or (selection.tags, selection.filter) != (None, None)
        more = ", tags, key, headers" if has_content else ""
        self._columns = f"id, topic, created_at, deliver_at{more}{', slot' if slots else ''}"
        self._since = "created_at" if is_check else _DUE
        still_open = channel.database.sql(UNDECIDED) if is_check else "TRUE"
        self._selected = f"{chosen.sql} AND {still_open} AND {only.sql}"
        self._common = {**chosen.parameters, **only.parameters, "limit": MOST_COUNTED + 1}

    @cached_property
    def _parts(self) -> list[_Part]:
        return [self._part(*look) for look in self._looks()]

    def count(self) -> Count:
        """Return how many rows are selected: counted, or estimated if there are many."""
        counted = sum(part.selected for part in self._parts)
        if self._all_seen and counted <= MOST_COUNTED:
            return Count(counted)
        return Count(max(counted, self._estimate()), about=True)

    def oldest(self) -> tuple[datetime | None, bool]:
        """Return the moment from which on the oldest could have been sent, and False; None: there is none.

        If only a part of the rows was looked at, and none was selected, return a moment with only later ones, and True.
        """
        known = [part.oldest for part in self._parts if part.oldest is not None]
        if known or self._all_seen:
            return min(known, default=None), False
        return max((part.youngest_row for part in self._parts if part.youngest_row is not None), default=None), True

    def passed(self) -> int:
        """Return how many selected rows are settled: counted up to the limit."""
        return int(self._rows(_PASSED, self._bounds)[0][0])

    def messages(self, most: int) -> dict[int, UUID]:
        """Return at most `most` selected rows: message ids by log id."""
        rows = self._rows(_UNREAD, {**self._bounds, "most": most})
        return {id: stored_uuid(message_id) for id, message_id in rows}

    @property
    def _all_seen(self) -> bool:
        return all(part.rows <= MOST_COUNTED for part in self._parts)

    def by_topic(self) -> dict[str, tuple[int, datetime]]:
        """Return the half messages that were looked at, by real topic: how many, and when the oldest was written."""
        found: dict[str, tuple[int, datetime]] = {}
        real_topic = real_topic_of(self._database)
        for rows, meant, parameters in self._looks():
            for topic, number, oldest in self._rows(
                _BY_TOPIC, parameters, rows=rows, meant=meant, real_topic=real_topic
            ):
                created = self._database.moment(oldest)
                known, since = found.get(topic, (0, created))
                found[topic] = (known + number, min(since, created))
        return found

    def _looks(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the bounded looks: at rows after the newer end of the progress, and at the rest of its window."""
        end = self._progress.target or self._progress.base
        if not self._ends:
            yield _FRESH, "{selected}", {"head": end.head}
        late = None if self._ends else self._database.dialect.reads.late
        if end.open and late is not None:
            yield late, "{selected}", {"open": list(end.open)}
        if self._progress.target is not None:
            yield _REST, "{selected} AND {left}", self._bounds

    @property
    def _bounds(self) -> dict[str, Any]:
        """The progress as parameters; without a window, those of an empty one."""
        base, target, after = self._progress.base, self._progress.target or EARLIEST, self._progress.after
        bind = self._database.bind
        return {
            "head": base.head,
            "opened": bind(base.open),
            "target": target.head,
            "still": bind(target.open),
            "after": -1 if after is None else after,
        }

    def _part(self, rows: str, meant: str, parameters: dict[str, Any]) -> _Part:
        number, selected, oldest, youngest, first = self._rows(_LOOK, parameters, rows=rows, meant=meant)[0]
        moment = self._database.dialect.clock.read
        return _Part(number, selected, moment(oldest), moment(youngest), first)

    def _estimate(self) -> int:
        """Estimate the number of selected, unsettled rows, from samples of rows and ids at many places of the log."""
        after = self._progress.after
        known = [part.first_id for part in self._parts if part.first_id is not None]
        first = min(known if after in (None, -1) else [*known, after + 1])
        end = last_id(self._channel) + 1
        return round(sum(self._sampled(*place) for place in places(first, end)))

    def _sampled(self, first: int, end: int) -> float:
        span = {"first": first, "end": end, "limit": ROWS_A_PLACE}
        rows, ours, last = self._rows(_SAMPLE, {**self._bounds, **span})[0]
        return float(ours if rows < ROWS_A_PLACE else ours * (end - first) / (last - first + 1))

    def _rows(
        self, statement: str, parameters: dict[str, Any], *, rows: str = "", meant: str = "", **parts: str
    ) -> Sequence[Row]:
        """Run a statement; `rows` and `meant` are parts that contain parts."""
        among = self._database.among
        seen = {"in_base": among("number", numbers="opened"), "in_target": among("number", numbers="still")}
        inner = {
            "columns": self._columns,
            "selected": self._selected,
            "since": self._since,
            "left": _LEFT.format(**seen),
            "unsettled": (_LEFT_IN_WINDOW if self._ends else _UNSETTLED).format(**seen),
        }
        text = self._database.sql(
            statement,
            rows=self._database.sql(rows, **inner),
            meant=self._database.sql(meant, **inner),
            **inner,
            **parts,
        )
        return self._channel.rows(text, **{**self._common, **parameters})

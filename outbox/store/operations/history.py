"""The history of a subscription, told from the settles that are kept anyway: nothing is written for it.

Each step takes its newest settle of each partition. The cost grows with the settles since the beginning, and with the
steps, and not with the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.model.lease import Partition
from outbox.model.limits import require_wait
from outbox.model.parking import STATES
from outbox.model.position import EARLIEST
from outbox.model.status import MOST_COUNTED, History, HistoryStep
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.dialects.dialect import slots_of
from outbox.store.dialects.statements import Row
from outbox.store.log.log import selected
from outbox.store.subscriptions.parked_messages import of_state
from outbox.store.subscriptions.progress import ProgressLog, Settled

MOST_STEPS = 1_000
_SHORTEST = timedelta(seconds=1)
#: The share of selected messages in a step is that of so many rows.
_SAMPLE = 200
#: By primary key, from the first settle of the time on: of each step the last id that was passed.
_STEPS = """
    SELECT step, max(passed_id) FROM (
        SELECT CAST(({seconds}) * 1000 AS {bigint}) / :milliseconds AS step, {passed_id} AS passed_id FROM {progress}
        WHERE subscription = :subscription AND generation = :generation AND partition = :partition
          AND (epoch, n) >= (:epoch, :n)) AS s
    GROUP BY step ORDER BY step
"""
#: The last id that a settle has passed. Of a subscription that begins with the first message it is not stored.
_PASSED_ID = f"CASE WHEN after_id IS NULL AND base = '{EARLIEST}' THEN 0 ELSE coalesce(after_id, {{last}}) END"
_ONE = """
    SELECT {passed_id} FROM {progress}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :epoch AND n = :n
"""
#: Two looks by primary key for each step: at the first message behind the position, and at a sample of the passed ones.
_BESIDE = """
    SELECT s.step, (SELECT m.created_at FROM {message} AS m WHERE m.id > s.last ORDER BY m.id LIMIT 1),
           (SELECT count(*) FROM ({sample}) AS a), (SELECT count(CASE WHEN {chosen} THEN 1 END) FROM ({sample}) AS b)
    FROM {steps} AS s ORDER BY s.step
"""
_SAMPLED = """
    SELECT id, topic, key, tags, headers, slot FROM {message} WHERE id > s.first AND id <= s.last
    ORDER BY id LIMIT :sample
"""
_PARKED = """
    SELECT parked_at FROM {parked} WHERE subscription = :subscription AND {of_state} ORDER BY id LIMIT :limit
"""


def require_steps(since: timedelta, step: timedelta) -> None:
    """Refuse steps that are too short or too many."""
    for name, length in {"since": since, "step": step}.items():
        require_wait(name, length)
        if length < _SHORTEST:
            raise ValueError(f"{name} must be at least {_SHORTEST.seconds} s, not {length}")
    if -(-since // step) > MOST_STEPS:
        raise ValueError(f"step: {since} has more than {MOST_STEPS} steps of {step}; make step longer")


@dataclass(frozen=True, slots=True)
class _Step:
    """A partition during one step: how many messages it passed, and the moment of the first message behind."""

    passed: float | None
    next_at: datetime | None


def history(channel: Channel, subscription: Subscription, since: timedelta, step: timedelta) -> History:
    """Return the steps of a subscription; `since`: how long ago the first begins, by the database's clock."""
    number = -(-since // step)
    begin = channel.now() - number * step
    ends = [begin + (n + 1) * step for n in range(number)]
    partitions = [
        _of_partition(channel, subscription, each, begin, step, number) for each in subscription.all_partitions()
    ]
    parked, minimum = _parked(channel, subscription.name, ends)
    steps = tuple(
        _step(end, step, [each[n] for each in partitions], {state: counts[n] for state, counts in parked.items()})
        for n, end in enumerate(ends)
    )
    return History(
        subscription=subscription.name,
        step_seconds=step.total_seconds(),
        steps=steps,
        parked_is_minimum=minimum,
    )


def _step(end: datetime, length: timedelta, partitions: Sequence[_Step | None], parked: dict[str, int]) -> HistoryStep:
    """Return a step of all partitions; what is not known of each is not known."""
    known = [each for each in partitions if each is not None]
    counts = [each.passed for each in known if each.passed is not None]
    passed = sum(counts) if len(counts) == len(partitions) else None
    behind = [(end - each.next_at).total_seconds() for each in known if each.next_at is not None]
    return HistoryStep(
        at=end,
        passed=None if passed is None else round(passed),
        per_second=None if passed is None else round(passed / length.total_seconds(), 3),
        lag_seconds=round(max(0.0, *behind, 0.0), 3) if len(known) == len(partitions) else None,
        parked=parked,
    )


def _of_partition(
    channel: Channel, subscription: Subscription, partition: Partition, begin: datetime, step: timedelta, number: int
) -> list[_Step | None]:
    """Return each step of a partition; None: no settle before its end is kept."""
    reached = _reached(channel, partition, begin, step, number)
    places = [(n, first, last) for n, (first, last) in enumerate(reached) if last is not None]
    rows = [(n, last if first is None else first, last) for n, first, last in places]
    beside = {row[0]: row[1:] for row in _beside(channel, subscription, partition, rows)} if rows else {}
    found: list[_Step | None] = [None] * number
    for n, first, last in places:
        next_at, sample, chosen = beside[n]
        # Of few rows all were seen. Of many, ids that no row has are counted, too.
        passed = float(chosen)
        if first is not None and sample >= _SAMPLE:
            passed = (last - first) * passed / sample
        found[n] = _Step(None if first is None else passed, channel.database.dialect.clock.read(next_at))
    return found


def _reached(
    channel: Channel, partition: Partition, begin: datetime, step: timedelta, number: int
) -> list[tuple[int | None, int | None]]:
    """Return the last id that was passed before each step, and at its end; None: no settle of before is kept."""
    database, stored = channel.database, ProgressLog(channel)
    newest = stored.newest(partition)
    if newest is None:
        return [(None, None)] * number
    reads = database.dialect.reads
    last_id = "highest_id" if reads.below_head is None else reads.below_head.format(column="base")
    parts, key = {"passed_id": _PASSED_ID.format(last=last_id)}, partition.parameters
    before: Settled | None = newest
    steps = dict[int, int]()
    if newest.settled_at >= begin:
        first, earlier = stored.first(newest, partition, lambda settled: settled.settled_at >= begin)
        # Of a partition that has just begun, nothing was passed before.
        before = first if earlier is None and (first.epoch, first.n) == (0, 0) else earlier
        statement = database.sql(_STEPS, **parts, seconds=database.seconds(since=":begin", until="settled_at"))
        bound = {"begin": database.dialect.clock.bind(begin), "milliseconds": step // timedelta(milliseconds=1)}
        rows = channel.rows(statement, **key, epoch=first.epoch, n=first.n, **bound)
        steps = {int(n): int(id) for n, id in rows if id is not None}
    last: int | None = None
    if before is not None:
        rows = channel.rows(database.sql(_ONE, **parts), **key, epoch=before.epoch, n=before.n)
        last = rows[0][0] if rows else None
    found = list[tuple[int | None, int | None]]()
    for n in range(number):
        ends = [each for each in (last, steps.get(n)) if each is not None]
        found.append((last, max(ends, default=None)))
        last = max(ends, default=None)
    return found


def _beside(
    channel: Channel, subscription: Subscription, partition: Partition, rows: Sequence[tuple[int, int, int]]
) -> Sequence[Row]:
    database, columns = channel.database, {"step": "bigint", "first": "bigint", "last": "bigint"}
    chosen = selected(database.dialect.values, subscription.selection, slots_of(partition))
    parts = {"sample": database.sql(_SAMPLED), "steps": database.records("steps", **columns)}
    statement = database.sql(_BESIDE, chosen=chosen.sql, **parts)
    bound = database.bind_records("steps", rows, **columns)
    return channel.rows(statement, **{**chosen.parameters, **bound, "sample": _SAMPLE})


def _parked(channel: Channel, name: str, ends: Sequence[datetime]) -> tuple[dict[str, list[int]], tuple[str, ...]]:
    """Return how many of the messages that are parked now were parked by the end of each step, by state."""
    counts, minimum = dict[str, list[int]](), list[str]()
    for state in STATES:
        statement = channel.database.sql(_PARKED, of_state=of_state(state))
        rows = channel.rows(statement, subscription=name, state=state, limit=MOST_COUNTED + 1)
        moments = sorted(channel.database.moment(at) for (at,) in rows)
        counts[state] = [bisect_left(moments, end) for end in ends]
        if len(rows) > MOST_COUNTED:
            minimum.append(state)
    return counts, tuple(minimum)

"""The status of the transactions of each producer group, by real topic: pending and decided messages, and latency.

Messages are counted, as RocketMQ does: pending messages from the position of the check-back on, decided ones among the
half messages that the log still holds. The cost does not grow with the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox.model.limits import HALF_TOPIC
from outbox.model.parking import STATES
from outbox.model.status import MOST_COUNTED, Count, Status, TransactionsStatus
from outbox.model.subscription import check_of
from outbox.store.database import Channel
from outbox.store.dialects.statements import Row
from outbox.store.half_messages.half import real_topic_of
from outbox.store.operations.parked_status import UNDECIDED
from outbox.store.operations.status import ROWS_A_PLACE, places, seconds_since, unread_by_topic
from outbox.store.subscriptions.parked_messages import of_state

#: Messages without a verdict that a check-back has parked, by (subscription, state, id): given up, or not. What is
#: behind the head of its transaction counts as given up if the head is dead.
_PARKED = f"""
    SELECT {{real_topic}}, {{given_up}}, count(*), min(created_at)
    FROM (SELECT key, headers, created_at FROM {{parked}} WHERE subscription = :subscription AND {{of_state}}
          ORDER BY subscription, state, id LIMIT :limit) AS r
    WHERE {UNDECIDED} GROUP BY {{real_topic}}, {{given_up}}
"""
#: By the index of heads.
_BEHIND_DEAD = """
    CASE WHEN :state = 'dead' OR :state = 'behind' AND (
        SELECT d.state FROM {parked} AS d
        WHERE d.subscription = :subscription AND d.unit = r.key AND d.unit IS NOT NULL AND d.state IS NOT NULL
    ) = 'dead' THEN 1 ELSE 0 END
"""
#: The newest half messages, by their partial index, and their verdicts. (In a log that was never analysed, all half
#: messages are read.) The outer limit makes the planner look up each verdict once.
_NEWEST = f"""
    SELECT coalesce(tags, ''), {{real_topic}}, op, count(*), min(created_at), max(decided_at),
           sum({{latency}}), max({{latency}})
    FROM (SELECT tags, headers, created_at,
                 (SELECT o.op FROM {{op}} AS o WHERE o.transaction_id = r.key) AS op,
                 (SELECT o.decided_at FROM {{op}} AS o WHERE o.transaction_id = r.key) AS decided_at
          FROM (SELECT key, tags, headers, created_at FROM {{message}} WHERE topic = '{HALF_TOPIC}'
                ORDER BY key DESC LIMIT :limit) AS r
          LIMIT :limit) AS d
    GROUP BY coalesce(tags, ''), {{real_topic}}, op
"""
_ENDS = "SELECT min(id), max(id) FROM {message}"
#: One place of the log, by primary key. Rows that are no half messages are counted too, for the density of the ids.
_SAMPLE = f"""
    SELECT CASE WHEN topic = '{HALF_TOPIC}' THEN coalesce(tags, '') END,
           CASE WHEN topic = '{HALF_TOPIC}' THEN {{real_topic}} END,
           CASE WHEN topic = '{HALF_TOPIC}' THEN (SELECT o.op FROM {{op}} AS o WHERE o.transaction_id = r.key) END,
           count(*), max(id)
    FROM (SELECT id, topic, key, tags, headers FROM {{message}} WHERE id >= :first AND id < :end
          ORDER BY id LIMIT :limit) AS r
    GROUP BY 1, 2, 3
"""
_NONE = Count(0)
#: Seconds from the storing of half messages to their commit, by real topic: `count`, `sum` and `max` of the newest.
Latencies = dict[str, dict[str, float]]


def transactions(
    channel: Channel, now: datetime, found: Sequence[Status]
) -> tuple[tuple[TransactionsStatus, ...], Latencies]:
    """Return the status of half messages, by group and real topic, and their latencies; both are empty without any."""
    tally = _Tally(channel)
    checks = [each for each in found if each.kind == "check"]
    for each in checks:
        tally.add_unread(each)
        tally.add_parked(each)
    tally.add_decided({_group_of(each): each for each in checks})
    return tuple(tally.places[place].status(*place, now) for place in sorted(tally.places)), tally.latencies


@dataclass(slots=True)
class _Place:
    """The half messages of a group with one real topic, as far as they are added up."""

    half: Count = _NONE
    given_up: Count = _NONE
    committed: Count = _NONE
    rolled_back: Count = _NONE
    oldest: datetime | None = None
    last_verdict: datetime | None = None

    def note_half(self, count: Count, oldest: datetime) -> None:
        """Take `count` as the number of pending messages; `oldest`: the creation of the oldest of them."""
        self.half = count
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def status(self, group: str, topic: str, now: datetime) -> TransactionsStatus:
        """Return the sums."""
        counts = {name: getattr(self, name) for name in ("half", "given_up", "committed", "rolled_back")}
        return TransactionsStatus(
            group=group,
            topic=topic,
            **{name: count.number for name, count in counts.items()},
            estimates=tuple(name for name, count in counts.items() if count.about),
            oldest_seconds=None if self.oldest is None else seconds_since(self.oldest, now),
            last_verdict_seconds=None if self.last_verdict is None else seconds_since(self.last_verdict, now),
        )


class _Tally:
    """Adds up the results of several looks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._database = channel.database
        self._real_topic = real_topic_of(channel.database)
        self.places: dict[tuple[str, str], _Place] = defaultdict(_Place)
        self.latencies: Latencies = {}

    def add_unread(self, check: Status) -> None:
        """Add the messages that a check-back has not reached yet, as far as they were looked at."""
        for topic, (number, oldest) in unread_by_topic(self._channel, check.name).items():
            place = self.places[_group_of(check), topic]
            place.note_half(Count.total([place.half, Count(number, check.backlog_is_estimate)]), oldest)

    def add_parked(self, check: Status) -> None:
        """Add the messages that a check-back has parked."""
        given_up = self._database.sql(_BEHIND_DEAD)
        common = {"subscription": check.name, "limit": MOST_COUNTED}
        for state in STATES:
            about, parts = check.count(state).about, {"given_up": given_up, "of_state": of_state(state)}
            statement = self._database.sql(_PARKED, real_topic=self._real_topic, **parts)
            for topic, is_given_up, number, oldest in self._channel.rows(statement, **common, state=state):
                place, count = self.places[_group_of(check), topic], Count(number, about)
                if is_given_up:
                    place.given_up = Count.total([place.given_up, count])
                else:
                    place.note_half(Count.total([place.half, count]), self._database.moment(oldest))

    def add_decided(self, checks: Mapping[str, Status]) -> None:
        """Add messages with a verdict, and pending ones of a group whose check-back is far behind or was dropped."""
        latency = self._database.seconds(since="created_at", until="decided_at")
        statement = self._database.sql(_NEWEST, real_topic=self._real_topic, latency=latency)
        rows = self._channel.rows(statement, limit=MOST_COUNTED + 1)
        cut = sum(row[3] for row in rows) > MOST_COUNTED
        sampled = self._sampled() if cut else {}
        for group, topic, op, number, oldest, decided_at, total, longest in rows:
            place = self.places[group, topic]
            count = Count(max(number, round(sampled.get((group, topic, op), 0))), cut)
            if op is None:
                if group not in checks or checks[group].backlog_is_estimate:
                    # Without those that were given up, but no fewer than were found before.
                    rest = max(count.number - place.given_up.number, place.half.number)
                    place.note_half(Count(rest, cut), self._database.moment(oldest))
                continue
            decided = self._database.moment(decided_at)
            place.last_verdict = decided if place.last_verdict is None else max(place.last_verdict, decided)
            if op == "commit":
                place.committed = count
                self._add_latency(topic, number, max(0.0, total), max(0.0, longest))
            else:
                place.rolled_back = count

    def _add_latency(self, topic: str, number: int, total: float, longest: float) -> None:
        known = self.latencies.setdefault(topic, {"count": 0, "sum": 0.0, "max": 0.0})
        known["count"] += number
        known["sum"] = round(known["sum"] + total, 3)
        known["max"] = round(max(known["max"], longest), 3)

    def _sampled(self) -> dict[tuple[str, str, str | None], float]:
        """Estimate, from samples of the log, how many half messages there are by group, topic and verdict."""
        first, last = self._channel.rows(_ENDS)[0]
        sums: dict[tuple[str, str, str | None], float] = defaultdict(float)
        for span in places(first or 0, (last or 0) + 1):
            for place, number in self._sampled_at(*span):
                sums[place] += number
        return sums

    def _sampled_at(self, first: int, end: int) -> Iterator[tuple[tuple[str, str, str | None], float]]:
        statement = self._database.sql(_SAMPLE, real_topic=self._real_topic)
        rows: list[Row] = self._channel.rows(statement, first=first, end=end, limit=ROWS_A_PLACE)
        number = sum(row[3] for row in rows)
        scale = 1.0 if number < ROWS_A_PLACE else (end - first) / (max(row[4] for row in rows) - first + 1)
        for group, topic, op, count, _ in rows:
            if group is not None:
                yield (group, topic, op), count * scale


def _group_of(check: Status) -> str:
    return check.name.removeprefix(check_of(""))

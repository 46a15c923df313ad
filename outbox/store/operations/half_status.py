"""The status of the transactions of each producer group, by real topic: pending and decided messages, and latency.

Messages are counted, as RocketMQ does: pending messages from the position of the check-back on, decided ones among the
half messages that the log still holds. The cost does not grow with the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from outbox.model.limits import HALF_TOPIC
from outbox.model.parking import STATES
from outbox.model.subscription import check_of
from outbox.store.database import Channel
from outbox.store.dialects.statements import Row
from outbox.store.half_messages.half import real_topic_of
from outbox.store.operations.parked_status import MOST_COUNTED, UNDECIDED, Count
from outbox.store.operations.status import ROWS_A_PLACE, SubscriptionStatus, places

#: Messages without a verdict that a check-back has parked, by (subscription, state, id): given up, or not. A blocked
#: message counts as given up if the first row of its transaction that is not blocked is dead.
_PARKED = f"""
    SELECT {{real_topic}}, {{given_up}}, count(*), min(created_at)
    FROM (SELECT key, headers, created_at FROM {{parked}} WHERE subscription = :subscription AND state = :state
          ORDER BY subscription, state, id LIMIT :limit) AS r
    WHERE {UNDECIDED} GROUP BY {{real_topic}}, {{given_up}}
"""
#: By the partial index of rows that hold others back, in its order, so that the planner uses it also for a table that
#: was never analysed.
_BEHIND_DEAD = """
    CASE WHEN :state = 'dead' OR :state = 'blocked' AND (
        SELECT d.state FROM {parked} AS d
        WHERE d.subscription = :subscription AND d.key = r.key AND d.blocks AND d.state <> 'blocked'
        ORDER BY d.place LIMIT 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The seconds from the storing of a half message to its commit; of the newest messages only."""

    count: int
    sum: float
    max: float


NONE = Count(0)


@dataclass(slots=True, kw_only=True)
class HalfStatus:
    """The status of the half messages of a group with one real topic.

    `pending`: without a verdict, and not given up. `oldest`: the age of the oldest pending message, in seconds.
    `given_up`: a person has to decide. `committed` and `rolled_back`: with a verdict, as far as the log reaches back.
    `decided`: seconds since the newest verdict.
    """

    group: str
    topic: str
    pending: Count = NONE
    oldest: float | None = None
    given_up: Count = NONE
    committed: Count = NONE
    rolled_back: Count = NONE
    decided: float | None = None
    latency: Latency | None = None


def half_standings(channel: Channel, now: datetime, standings: Sequence[SubscriptionStatus]) -> list[HalfStatus]:
    """Return the status of half messages, by group and real topic; an empty list if there are none."""
    tally = _Tally(channel, now)
    checks = [each for each in standings if each.subscription.kind == "check"]
    for each in checks:
        tally.add_unread(each)
        tally.add_parked(each)
    tally.add_decided({_group_of(each): each for each in checks})
    return [tally.found[place] for place in sorted(tally.found)]


@dataclass(slots=True)
class _Tally:
    """Adds up the results of several looks."""

    channel: Channel
    now: datetime
    found: dict[tuple[str, str], HalfStatus] = field(default_factory=dict)

    def add_unread(self, check: SubscriptionStatus) -> None:
        """Add the messages that a check-back has not reached yet, as far as they were looked at."""
        for topic, (number, oldest) in check.unread.items():
            place = self._at(_group_of(check), topic)
            place.pending = Count.total([place.pending, Count(number, check.backlog.about)])
            self._note_oldest(place, oldest)

    def add_parked(self, check: SubscriptionStatus) -> None:
        """Add the messages that a check-back has parked."""
        given_up = self.channel.database.sql(_BEHIND_DEAD)
        statement = self.channel.database.sql(_PARKED, real_topic=self._real_topic, given_up=given_up)
        common = {"subscription": check.subscription.name, "limit": MOST_COUNTED}
        for state in STATES:
            about = check.parked[state].about
            for topic, is_given_up, number, oldest in self.channel.rows(statement, **common, state=state):
                place = self._at(_group_of(check), topic)
                if is_given_up:
                    place.given_up = Count.total([place.given_up, Count(number, about)])
                else:
                    place.pending = Count.total([place.pending, Count(number, about)])
                    self._note_oldest(place, self.channel.database.moment(oldest))

    def add_decided(self, checks: Mapping[str, SubscriptionStatus]) -> None:
        """Add messages with a verdict, and pending ones of a group whose check-back is far behind or was dropped."""
        latency = self.channel.database.seconds(since="created_at", until="decided_at")
        statement = self.channel.database.sql(_NEWEST, real_topic=self._real_topic, latency=latency)
        rows = self.channel.rows(statement, limit=MOST_COUNTED + 1)
        cut = sum(row[3] for row in rows) > MOST_COUNTED
        sampled = self._sampled() if cut else {}
        for group, topic, op, number, oldest, decided_at, total, longest in rows:
            place = self._at(group, topic)
            count = Count(max(number, round(sampled.get((group, topic, op), 0))), cut)
            if op is None:
                if group not in checks or checks[group].backlog.about:
                    self._add_waiting(place, count, self.channel.database.moment(oldest))
                continue
            if op == "commit":
                place.committed = count
                place.latency = Latency(count=number, sum=max(0.0, total), max=max(0.0, longest))
            else:
                place.rolled_back = count
            since = max(0.0, (self.now - self.channel.database.moment(decided_at)).total_seconds())
            place.decided = since if place.decided is None else min(place.decided, since)

    def _add_waiting(self, place: HalfStatus, count: Count, oldest: datetime) -> None:
        """Count messages without a verdict: `count` minus those that were given up, but no fewer than found before."""
        rest = count.number - place.given_up.number
        place.pending = Count(max(rest, place.pending.number), count.about)
        self._note_oldest(place, oldest)

    def _sampled(self) -> dict[tuple[str, str, str | None], float]:
        """Estimate, from samples of the log, how many half messages there are by group, topic and verdict."""
        first, last = self.channel.rows(_ENDS)[0]
        sums: dict[tuple[str, str, str | None], float] = defaultdict(float)
        for span in places(first or 0, (last or 0) + 1):
            for place, number in self._sampled_at(*span):
                sums[place] += number
        return sums

    def _sampled_at(self, first: int, end: int) -> Iterator[tuple[tuple[str, str, str | None], float]]:
        statement = self.channel.database.sql(_SAMPLE, real_topic=self._real_topic)
        rows: list[Row] = self.channel.rows(statement, first=first, end=end, limit=ROWS_A_PLACE)
        number = sum(row[3] for row in rows)
        scale = 1.0 if number < ROWS_A_PLACE else (end - first) / (max(row[4] for row in rows) - first + 1)
        for group, topic, op, count, _ in rows:
            if group is not None:
                yield (group, topic, op), count * scale

    @property
    def _real_topic(self) -> str:
        return real_topic_of(self.channel.database)

    def _at(self, group: str, topic: str) -> HalfStatus:
        return self.found.setdefault((group, topic), HalfStatus(group=group, topic=topic))

    def _note_oldest(self, place: HalfStatus, created_at: datetime) -> None:
        place.oldest = max(place.oldest or 0.0, (self.now - created_at).total_seconds())


def _group_of(check: SubscriptionStatus) -> str:
    return check.subscription.name.removeprefix(check_of(""))

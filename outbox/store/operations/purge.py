"""The purge: deletes rows of the log that every subscription has passed, and that are older than the retention.

A reader outside of the database counts as a subscription as long as the hold lasts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from outbox.errors import SubscriptionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import EARLIEST, Position
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.half_messages.op import IS_UNRESTORED
from outbox.store.log.log import ids_before
from outbox.store.subscriptions.holds import hold_of
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

BATCH = 2_000
#: Gaps of fewer ids than this are not told apart from rows.
_PIECE = 1_000

#: Where a batch ends: at its n-th row by primary key.
_SPAN = "SELECT id FROM {message} WHERE id > :after ORDER BY id LIMIT 1 OFFSET :rows"
_NEWEST = "SELECT {number} FROM {message} WHERE id <= :last ORDER BY id DESC LIMIT 1"
#: Rows that every base sees and that are old enough.
_OLD = """
    id > :after AND id <= :upto AND {number} + 0 < :head AND NOT {open}
    AND created_at < :before
"""
#: Of these, half messages go only when their transaction has a verdict, and nothing left to restore.
IS_DECIDED = f"EXISTS (SELECT 1 FROM {{op}} WHERE transaction_id = key AND NOT {IS_UNRESTORED})"
_GONE = f"{_OLD} AND (topic <> :half OR {IS_DECIDED})"
#: The ends of the ids, and the lowest number, of what is old: a row for each piece of the ids that has any.
_HELD = "SELECT min(id), max(id), min({number}) FROM {message} WHERE {old} GROUP BY id / :piece ORDER BY 1"
#: A verdict is deleted only after its half messages, so that nobody can ask about half messages whose verdict is gone.
_OPS_SPAN = "SELECT transaction_id FROM {op} WHERE transaction_id > :after ORDER BY transaction_id LIMIT 1 OFFSET :rows"
_DELETE_OPS = f"""
    DELETE FROM {{op}} WHERE transaction_id > :after AND (:upto = '' OR transaction_id <= :upto)
      AND decided_at < :before
      AND NOT EXISTS (SELECT 1 FROM {{message}} WHERE topic = '{HALF_TOPIC}' AND key = transaction_id)
"""
#: A withdrawal is deleted only after the message, and after the last parked copy. Purges are rare, so the copies are
#: read without an index.
_DELETE_WITHDRAWALS = """
    DELETE FROM {withdrawal} WHERE at < :before
      AND message_id NOT IN (SELECT message_id FROM {message} WHERE deliver_at IS NOT NULL)
      AND message_id NOT IN (SELECT message_id FROM {parked} WHERE deliver_at IS NOT NULL)
"""
#: `+ 0` keeps the planner from looking for the highest number from the end of the log.
_HIGHEST = "SELECT max({number} + 0) FROM {message} WHERE {gone}"
#: Nothing above the number that was read before: a verdict may have come meanwhile.
_DELETE = "DELETE FROM {message} WHERE {gone} AND {number} + 0 <= :highest"
_COUNT = "SELECT count(*) FROM {message} WHERE {gone}"
#: Locks the row until the end of the transaction, so that only one purge at a time writes what was purged.
_LOCK = "UPDATE {meta} SET purged_id = purged_id"
_PURGED = "SELECT purged, purged_id FROM {meta}"
_RECORD = "UPDATE {meta} SET purged = :purged, purged_id = :id"
_CUTOFF = "SELECT {later}"
_NOTE = "UPDATE {meta} SET purged_at = {now}, keep_ms = :keep"
#: The first row that a position does not see; by the index on the number.
_UNREAD = "SELECT id FROM {message} WHERE {number} >= :head ORDER BY {number}, id LIMIT 1"
_PURGED_ID = "SELECT purged_id FROM {meta}"
_NOTE_DEAD = "UPDATE {meta} SET keep_dead_ms = :keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """The result of a purge: the number of deleted rows, which were written `before` a moment.

    `held_by`: the subscriptions that hold other old rows back. `dead_letters`: so many of them were discarded; `behind`
    them so many messages go on, counted up to 10 000 of a subscription.
    """

    rows: int
    before: datetime
    held_by: tuple[str, ...]
    dead_letters: int = 0
    behind: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Old messages that are kept elsewhere, as in an archive: written `before` a moment, with ids up to `last_id`, and
    seen by `position`.
    """

    before: datetime
    last_id: int
    position: Position


@dataclass(frozen=True, slots=True)
class Held:
    """The old messages in the database: the lowest number, and the ids between which they lie.

    Each run of ids, (first, last), begins and ends with an old message, and has no large gap.
    """

    number: int
    runs: tuple[tuple[int, int], ...]

    def meets(self, first: int, last: int) -> bool:
        """Return whether one of the messages may have an id from `first` to `last`."""
        at = bisect_left(self.runs, first, key=itemgetter(1))
        return at < len(self.runs) and self.runs[at][0] <= last


def purged_id(channel: Channel) -> int:
    """Return the highest id that a purge has ever reached; 0: there was no purge."""
    return int(identity.first_row(channel, _PURGED_ID)[0])


def stored_bases(channel: Channel) -> list[tuple[str, Position]]:
    """Return the stored base of each partition, with the name of its subscription.

    Raises:
        SubscriptionError: there is no subscription.
    """
    progress = ProgressLog(channel)
    found = []
    for each in Subscriptions(channel).all():
        hold = hold_of(channel, each)
        if hold is not None and hold.released:
            continue
        for partition in each.all_partitions():
            settled = progress.newest(partition)
            found.append((each.name, EARLIEST if settled is None else settled.progress.base))
    if not found:
        raise SubscriptionError(
            "there is no subscription, so nobody has read these messages yet; nothing is purged before a first one"
        )
    return found


def first_unread(channel: Channel, position: Position) -> int | None:
    """Return the id of the first message from the head of a position on; None: there is none."""
    return next((id for (id,) in channel.rows(_UNREAD, head=position.head)), None)


def moment_before(channel: Channel, age: timedelta) -> datetime:
    """Return the moment so long ago, by the database's clock."""
    return channel.database.moment(channel.rows(_CUTOFF, seconds=-age.total_seconds())[0][0])


def note_dead(channel: Channel, keep: timedelta | None) -> None:
    """Note how long the last purge has kept dead letters; None: it has kept all."""
    channel.run(_NOTE_DEAD, keep=None if keep is None else keep // timedelta(milliseconds=1))


class Purge:
    """Deletes in small batches, each a short transaction that also records the progress."""

    def __init__(self, channel: Channel, *, batch: int = BATCH) -> None:
        self._channel = channel
        self._database = channel.database
        self._batch = batch
        number = self._database.names["number"]
        seen = {"open": self._database.among(f"{number} + 0", numbers="open")}
        gone = self._database.sql(_GONE, **seen)
        self._held = self._database.sql(_HELD, old=self._database.sql(_OLD, **seen))
        self._highest, self._delete, self._count = (
            self._database.sql(each, gone=gone) for each in (_HIGHEST, _DELETE, _COUNT)
        )

    def run(self, older_than: timedelta, *, kept: Kept | None = None, rehearsal: bool = False) -> Purged:
        """Delete all old rows that nobody needs; with `kept`, only rows that are kept elsewhere. A rehearsal counts."""
        identity.verify(self._channel)
        before = moment_before(self._channel, older_than) if kept is None else kept.before
        self._passed_by_all()
        first, last = ids_before(self._channel, before)
        last = last if kept is None else min(last, kept.last_id)
        count = self._counted if rehearsal else self._deleted
        rows = sum(count(bounds, kept) for bounds in self._spans(first, last, before))
        if not rehearsal:
            deque(self._delete_ops(before, older_than), maxlen=0)
        return Purged(rows=rows, before=before, held_by=self._holding(last))

    def batches(self, keep: timedelta) -> Iterator[int]:
        """Delete as `run` does, with a pause for the caller after each batch, which yields the number of rows.

        Rows from the first row on that some subscription has not passed are left to a later call, so that the cost does
        not grow with the rows that are held back.
        """
        identity.verify(self._channel)
        before, passed = moment_before(self._channel, keep), self._passed_by_all()
        first, last = ids_before(self._channel, before)
        unread = first_unread(self._channel, passed)
        for bounds in self._spans(first, last if unread is None else min(last, unread), before):
            yield self._deleted(bounds)
        yield from self._delete_ops(before, keep)

    def kept(self, older_than: timedelta, position: Position) -> Kept:
        """Return the old messages that `position` sees and every subscription has passed; raise without any."""
        identity.verify(self._channel)
        before, passed = moment_before(self._channel, older_than), self._passed_by_all(position)
        return Kept(before=before, last_id=ids_before(self._channel, before)[1], position=passed)

    def held(self, kept: Kept) -> Held | None:
        """Return where those messages lie in the database that are kept elsewhere; None: nowhere.

        Half messages without a verdict count.
        """
        first, _ = ids_before(self._channel, kept.before)
        seen = {"head": kept.position.head, "open": self._database.bind(kept.position.open), "piece": _PIECE}
        runs: list[tuple[int, int]] = []
        lowest = kept.position.head
        for bounds in self._spans(first, kept.last_id, kept.before):
            for low, high, number in self._channel.rows(self._held, **bounds, **seen):
                lowest = min(lowest, number)
                begins = runs.pop()[0] if runs and low - runs[-1][1] <= _PIECE else low
                runs.append((begins, high))
        return Held(lowest, tuple(runs)) if runs else None

    def _counted(self, bounds: dict[str, Any], kept: Kept | None) -> int:
        passed = self._passed_by_all(*([] if kept is None else [kept.position]))
        return int(self._channel.rows(self._count, **bounds, **self._of(passed))[0][0])

    def _deleted(self, bounds: dict[str, Any], kept: Kept | None = None) -> int:
        """Delete a batch. Positions are read in the transaction, so that a subscription created meanwhile counts."""
        with self._channel.transaction():
            self._channel.run(_LOCK)
            stored, purged_id = identity.first_row(self._channel, _PURGED)
            passed = self._passed_by_all(*([] if kept is None else [kept.position]))
            chosen = {**bounds, **self._of(passed)}
            highest = self._channel.rows(self._highest, **chosen)[0][0]
            if highest is None:
                return 0
            gone = self._channel.run(self._delete, **chosen, highest=highest)
            # What all have passed, up to the highest deleted number. A reader without a subscription compares the
            # position with a window, and would take the newest rows for lost if it saw them.
            purged = Position.of(highest + 1, passed.open)
            purged = purged if stored is None else purged.union(Position.parse(stored))
            self._channel.run(_RECORD, purged=str(purged), id=max(purged_id, bounds["upto"]))
        return gone

    def _delete_ops(self, before: datetime, keep: timedelta) -> Iterator[int]:
        """Delete old verdicts whose half messages are gone, a batch at a time; then note that there was a purge."""
        after: str | None = ""
        while after is not None:
            found = self._channel.rows(_OPS_SPAN, after=after, rows=self._batch)
            upto = found[0][0] if found else None
            bounds = {"after": after, "upto": upto or "", "before": self._database.dialect.clock.bind(before)}
            yield self._channel.run(_DELETE_OPS, **bounds)
            after = upto
        yield self._channel.run(_DELETE_WITHDRAWALS, before=self._database.dialect.clock.bind(before))
        self._channel.run(_NOTE, keep=keep // timedelta(milliseconds=1))

    def _of(self, passed: Position) -> dict[str, Any]:
        return {"head": passed.head, "open": self._database.bind(passed.open), "half": HALF_TOPIC}

    def _passed_by_all(self, *others: Position) -> Position:
        """Return what the stored bases of all subscriptions see; a partly settled window is not passed."""
        bases = [*(base for _, base in stored_bases(self._channel)), *others]
        return Position.of(min(base.head for base in bases), (n for base in bases for n in base.open))

    def _spans(self, first: int, last: int, before: datetime) -> Iterator[dict[str, Any]]:
        """Yield the parameters of one batch after the other: spans of ids, (after, upto], that hold one each."""
        after = first - 1
        while after < last:
            found = self._channel.rows(_SPAN, after=after, rows=self._batch - 1)
            upto = min(found[0][0], last) if found else last
            yield {"after": after, "upto": upto, "before": self._database.dialect.clock.bind(before)}
            after = upto

    def _holding(self, last: int) -> tuple[str, ...]:
        """Return the subscriptions that have not passed the newest old row, if the row is still there."""
        numbers = self._channel.rows(_NEWEST, last=last)
        return tuple(
            sorted({name for name, base in stored_bases(self._channel) for (n,) in numbers if not base.sees(n)})
        )

"""The rules that are statements in the library, each of them once. `test_rules` runs each beside its statement."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeVar

from outbox.model.lease import Holder
from outbox.model.parking import Parking
from outbox.model.position import EARLIEST, Progress

Verdict = TypeVar("Verdict", bound=str)

# Leases


class LeaseRow(NamedTuple):
    """A row of `outbox_lease`. `until`: by the clock of the database; None: the lease was given back."""

    owner: str | int | None = None
    epoch: int = 0
    renewals: int = 0
    until: int | None = None


def acquired(row: LeaseRow, owner: str | int, until: int, claim: Holder | None) -> LeaseRow | None:
    """Return the row after `owner` took the lease, or None where it may not.

    `claim`: the holder whose lease a watch has seen stand still for its whole length.
    """
    claimed = claim is not None and (row.epoch, row.renewals) == (claim.epoch, claim.renewals)
    return LeaseRow(owner, row.epoch + 1, 0, until) if row.until is None or row.owner == owner or claimed else None


def renewed(row: LeaseRow, epoch: int, until: int) -> LeaseRow | None:
    """Return the row after a renewal, or None where the lease was taken under another epoch, or given back."""
    ours = row.epoch == epoch and row.owner is not None
    return row._replace(until=until, renewals=row.renewals + 1) if ours else None


def given_back(row: LeaseRow, epoch: int) -> LeaseRow:
    """Return the row after somebody gave the lease back that had it under an epoch."""
    return row._replace(owner=None, until=None) if row.epoch == epoch else row


def held(row: LeaseRow, epoch: int, *, same_server: bool) -> bool:
    """Return whether a transaction that holds the lease under an epoch may write.

    Nobody writes after the lease was given back. `same_server`: whether the server has the incarnation from which the
    transaction's messages were read.
    """
    return row.epoch == epoch and row.owner is not None and same_server


def free(row: LeaseRow, epoch: int) -> bool:
    """Return whether a pop may write that has found the lease free under an epoch."""
    return row.epoch == epoch and row.until is None


# Progress


class ProgressRow(NamedTuple):
    """A row of `outbox_progress`: the `n`-th of an epoch."""

    epoch: int = 0
    n: int = 0
    progress: Progress = Progress(EARLIEST)


def settled(lease: LeaseRow, rows: Collection[ProgressRow], new: ProgressRow, *, same_server: bool) -> set[ProgressRow]:
    """Return the rows after a settle; the same where it writes nothing."""
    return {*rows, new} if held(lease, new.epoch, same_server=same_server) else {*rows}


def newest(rows: Iterable[ProgressRow]) -> ProgressRow:
    """Return the row that counts."""
    return max(rows, key=lambda row: (row.epoch, row.n))


# Verdicts on a transaction


def decided(op: Verdict | None, verdict: Verdict) -> tuple[Verdict, bool]:
    """Return the op that stands after a statement wrote a verdict, and whether the statement wrote it."""
    return (verdict, True) if op is None else (op, False)


def takes_half(op: str | None) -> bool:
    """Return whether the statement that sends to a transaction inserts its half message: no op stands."""
    return op is None


# Dedup keys and the inbox


class DedupRow(NamedTuple):
    """A row of `outbox_dedup`."""

    message_id: int
    expires_at: int


def claimed(row: DedupRow | None, message_id: int, now: int, window: int) -> DedupRow:
    """Return the row of a dedup key after a claim: that of the first message, until it has expired."""
    return DedupRow(message_id, now + window) if row is None or row.expires_at <= now else row


Handled = frozenset[tuple[str, int]]


def noted(inbox: Handled, consumer: str, message_id: int) -> tuple[Handled, bool]:
    """Return the inbox after a consumer noted a message, and whether this was the first time."""
    return inbox | {(consumer, message_id)}, (consumer, message_id) not in inbox


# Parked messages


class ParkedRow(NamedTuple):
    """A row of `outbox_parked`. `state`: only the head of a unit has one. Moments are numbers."""

    id: int
    key: str | None
    state: str | None
    unit: str | None = None
    place: int = 0
    attempts: int = 0
    due_at: int | None = None
    expires_at: int | None = None


class LogRow(NamedTuple):
    """A message of the log, as far as parking looks at it."""

    id: int
    key: str | None
    deliver_at: int | None = None
    expires_at: int | None = None


Parked = frozenset[ParkedRow]


def parked(rows: Parked, messages: Iterable[LogRow], parking: Parking, now: int) -> Parked:
    """Return the parked rows after messages of the log were parked. A message that is parked already stays as it is.

    Messages that hold their key stand at the end of its unit, in the order of the log.
    """
    known, new = {row.id for row in rows}, list[ParkedRow]()
    places: dict[str | None, int] = {}
    for each in sorted(messages):
        places[each.key] = places.get(each.key, _last(rows, each.key)) + 1
        due = each.deliver_at if parking.state == "delayed" else _due(parking, now)
        unit = each.key if parking.holds else None
        row = ParkedRow(each.id, each.key, _state(parking), unit, places[each.key], parking.attempts, due)
        new += [row._replace(expires_at=each.expires_at)] if each.id not in known else []
    return rows.union(new)


def changed(rows: Parked, ids: Collection[int], parking: Parking, now: int) -> Parked:
    """Return the rows after some got another state; what stands for itself goes on to do so."""
    return frozenset(
        row._replace(
            state=_state(parking),
            unit=row.unit if parking.holds else None,
            attempts=parking.attempts,
            due_at=_due(parking, now),
        )
        if row.id in ids
        else row
        for row in rows
    )


def _state(parking: Parking) -> str | None:
    return None if parking.state == "behind" else parking.state


def _due(parking: Parking, now: int) -> int | None:
    return None if parking.delay is None else now + int(parking.delay.total_seconds())


def _last(rows: Parked, key: str | None) -> int:
    return max((row.place for row in rows if row.unit == key is not None), default=0)


def advanced(rows: Parked, keys: Collection[str], now: int) -> Parked:
    """Return the rows after the first of each of these keys became a head, if what stood before it is gone.

    One that was handed out with the head before it keeps its time.
    """
    firsts = {min(places) for key in keys if (places := [(row.place, row.id) for row in rows if row.unit == key])}
    return frozenset(
        (row._replace(attempts=0, due_at=now) if row.due_at is None else row)._replace(state="retry")
        if row.unit in keys and (row.place, row.id) in firsts and row.state is None
        else row
        for row in rows
    )


def removed(rows: Parked, ids: Collection[int]) -> Parked:
    """Return the rows without those that are done."""
    return frozenset(row for row in rows if row.id not in ids)


def replayed(rows: Parked, ids: Collection[int], now: int) -> Parked:
    """Return the rows after some are due because a person wants them sent.

    Their attempts begin again, and they do not expire any more. What stands for itself joins the end of its key's unit.
    """
    rows = frozenset(
        row._replace(expires_at=None, attempts=0, due_at=None) if row.id in ids and row.state is None else row
        for row in rows
    )
    asked = {row for row in rows if row.id in ids and row.state is not None}
    due = rows.difference(asked).union(
        row._replace(
            state="delayed" if row.unit is None and row.key else "retry",
            attempts=0,
            due_at=now,
            expires_at=None,
        )
        for row in asked
    )
    return _joined(due, [row for row in _fallen(due, now) if row.id in ids])


def _fallen(rows: Parked, now: int) -> list[ParkedRow]:
    """Return the delayed rows of keys that are due, in the order in which they fell due."""
    due = [row for row in rows if row.state == "delayed" and row.key and row.due_at is not None and row.due_at <= now]
    return sorted(due, key=lambda row: (row.due_at, row.id))


def _joined(rows: Parked, due: Iterable[ParkedRow]) -> Parked:
    """Return the rows after some, in this order, joined the end of their keys' units."""
    places: dict[str | None, int] = {}
    after: dict[int, ParkedRow] = {}
    for row in due:
        places[row.key] = places.get(row.key, _last(rows, row.key)) + 1
        after[row.id] = row._replace(state=None, unit=row.key, due_at=None, place=places[row.key])
    return frozenset(after.get(row.id, row) for row in rows)


def keys_held(rows: Parked) -> set[str]:
    """Return the keys that are held."""
    return {row.unit for row in rows if row.unit is not None}


def expired(row: ParkedRow, now: int) -> bool:
    """Return whether a row that is ready has expired."""
    return row.expires_at is not None and row.expires_at <= now


def heads(rows: Parked, now: int) -> list[ParkedRow]:
    """Return the heads that are due, those first that have been due for longest."""
    due = [row for row in rows if row.due_at is not None and row.due_at <= now and row.state not in (None, "dead")]
    due = [row for row in due if row.state != "delayed" or row.key is None]
    return sorted(due, key=lambda row: (row.due_at, row.id))


def run_of(rows: Parked, head: ParkedRow) -> list[ParkedRow]:
    """Return a head, and what is tried with it: what stands behind it, unless it has failed before."""
    if head.unit is None or head.state != "retry" or head.attempts:
        return [head]
    return sorted((row for row in rows if row.unit == head.unit), key=lambda row: row.place)


def ready(rows: Parked, now: int, limit: int) -> list[ParkedRow]:
    """Return the rows whose turn has come, at most `limit`; with fewer heads also of what stands behind these."""
    due = heads(rows, now)[:limit]
    begin = [row for row in due if row.unit is not None and row.state == "retry" and not row.attempts]
    length = 1 + (limit - len(due)) // len(begin) if begin else 1
    return [row for head in due for row in run_of(rows, head)[:length]]


def fallen_due(rows: Parked, now: int, limit: int) -> tuple[Parked, set[str]]:
    """Return the rows after delayed ones joined the end of their key's unit, and their keys.

    Among each other they stand in the order in which they fell due.
    """
    due = _fallen(rows, now)[:limit]
    keys = {row.key for row in due if row.key is not None}
    return advanced(_joined(rows, due), keys, now), keys

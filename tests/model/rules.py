"""The rules that are statements in the library, each of them once. `test_rules` runs each beside its statement."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeVar

from outbox.model.lease import Holder
from outbox.model.parking import Parking, State
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

#: The number of places between two neighbours of the log.
BETWEEN = 1 << 20


class ParkedRow(NamedTuple):
    """A row of `outbox_parked`. Moments are numbers; `due_at` None: due when its turn comes."""

    id: int
    key: str | None
    state: State
    blocks: bool = False
    place: int = 0
    attempts: int = 0
    due_at: int | None = None
    request: str | None = None
    expires_at: int | None = None


class LogRow(NamedTuple):
    """A message of the log, as far as parking looks at it."""

    id: int
    key: str | None
    deliver_at: int | None = None
    expires_at: int | None = None


Parked = frozenset[ParkedRow]


def parked(rows: Parked, messages: Iterable[LogRow], parking: Parking, now: int) -> Parked:
    """Return the parked rows after messages of the log were parked. A message that is parked already stays as it is."""
    known = {row.id for row in rows}
    new = (
        ParkedRow(
            each.id,
            each.key,
            parking.state,
            parking.blocks and each.key is not None,
            each.id * BETWEEN,
            parking.attempts,
            each.deliver_at if parking.state == "delayed" else _due(parking, now),
            expires_at=each.expires_at,
        )
        for each in messages
        if each.id not in known
    )
    return rows.union(new)


def changed(rows: Parked, ids: Collection[int], parking: Parking, now: int) -> Parked:
    """Return the rows after some got another state."""
    return frozenset(
        row._replace(
            state=parking.state,
            blocks=parking.blocks and row.key is not None,
            attempts=parking.attempts,
            due_at=_due(parking, now),
        )
        if row.id in ids
        else row
        for row in rows
    )


def _due(parking: Parking, now: int) -> int | None:
    return None if parking.delay is None else now + int(parking.delay.total_seconds())


def removed(rows: Parked, ids: Collection[int]) -> Parked:
    """Return the rows without those that are done."""
    return frozenset(row for row in rows if row.id not in ids)


def discarded(rows: Parked, ids: Collection[int]) -> Parked:
    """Return the rows without those whose discard a person has requested."""
    return frozenset(row for row in rows if not (row.id in ids and row.request == "discard"))


def replayed(rows: Parked, ids: Collection[int], now: int) -> Parked:
    """Return the rows after those are due whose replay a person has requested.

    Their attempts begin again, and they do not expire any more.
    """
    return frozenset(
        row._replace(state="retry", attempts=0, due_at=now, blocks=row.key is not None, request=None, expires_at=None)
        if row.id in ids and row.request == "replay"
        else row
        for row in rows
    )


def keys_held(rows: Parked) -> set[str]:
    """Return the keys that a row blocks which is not blocked itself."""
    return {row.key for row in rows if row.key is not None and row.blocks and row.state != "blocked"}


def held_among(rows: Parked, keys: Collection[str]) -> set[str]:
    """Return which of these keys are held back."""
    return {row.key for row in rows if row.key is not None and row.blocks and row.key in keys}


def _unready(rows: Parked, row: ParkedRow, now: int, behind: int = -1) -> bool:
    """Return whether an earlier row of the key waits for something, or has a place up to `behind`."""
    return any(
        each.place <= behind
        or (each.state != "blocked" and (each.state == "dead" or (each.due_at is not None and each.due_at > now)))
        for each in rows
        if each.key == row.key is not None and each.blocks and (each.place, each.id) < (row.place, row.id)
    )


def _behind_blocked(rows: Parked, row: ParkedRow) -> bool:
    """Return whether an earlier row of the key is blocked."""
    return any(
        each.key == row.key is not None
        and each.blocks
        and each.state == "blocked"
        and (each.place, each.id) < (row.place, row.id)
        for each in rows
    )


def released_keys(rows: Parked, now: int) -> set[str]:
    """Return the keys with blocked rows that nothing holds back."""
    return {row.key for row in rows if row.state == "blocked" and row.key is not None and not _unready(rows, row, now)}


def expired(row: ParkedRow, now: int) -> bool:
    """Return whether a row that is ready has expired."""
    return row.expires_at is not None and row.expires_at <= now


def ready(rows: Parked, released: Collection[str], now: int, limit: int, behind: int = -1) -> list[ParkedRow]:
    """Return the rows whose turn has come, at most `limit`. `released`: keys whose blocked rows may be tried.

    `behind`: no row up to this place is tried.
    """
    found = [
        row
        for row in rows
        if row.place > behind
        and (
            (row.key is None or row.key in released or not _behind_blocked(rows, row))
            if row.state in ("waiting", "retry") and row.due_at is not None and row.due_at <= now
            else row.state == "blocked" and (row.key is None or row.key in released)
        )
        and not _unready(rows, row, now, behind)
    ]
    return sorted(found, key=lambda row: (row.place, row.id))[:limit]


def fallen_due(rows: Parked, now: int, limit: int) -> tuple[Parked, list[str | None]]:
    """Return the rows after delayed ones took a place in their key's order, and their keys.

    The place is behind all rows of the key that are held back, and before what comes later; among each other in the
    order in which they fell due.
    """
    due = [row for row in rows if row.state == "delayed" and row.due_at is not None and row.due_at <= now]
    due = sorted(due, key=lambda row: (row.due_at, row.id))[:limit]
    after: dict[int, ParkedRow] = {}
    for key in {row.key for row in due}:
        same = [row for row in due if row.key == key]
        blocking = [row.place for row in rows if key is not None and row.key == key and row.blocks]
        base = max(blocking) if blocking else min(row.place for row in same) - 1
        for nth, row in enumerate(same, 1):
            moved = row._replace(state="blocked", blocks=key is not None, due_at=None, place=base + nth)
            after[row.id] = moved
    return frozenset(after.get(row.id, row) for row in rows), [row.key for row in due]

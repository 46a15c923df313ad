"""Broken twins of the world of a relay: each breaks one rule, and the explorer has to find out what that costs."""

from __future__ import annotations

from dataclasses import replace

from outbox.errors import PositionError
from outbox.model.lease import Holder
from outbox.model.position import EARLIEST, Position, Progress, Window
from outbox.store.database import Channel
from outbox.store.log.log import Extent, Log, Page
from tests.model.reading import passed, read
from tests.model.relaying import PageByPage, Relaying, State, Worker
from tests.model.rules import ProgressRow
from tests.model.server import Row, Server

_FOR_EVER = Position(1_000_000)
Batch = tuple[tuple[Row, ...], Progress]


class HighestId(Relaying):
    """Reads the ids above the highest one that was read."""

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Return the rows above it."""
        rows = tuple(row for row in server.rows if row.id > (progress.after or 0))[: self.rows]
        return (rows, Progress(EARLIEST, _FOR_EVER, rows[-1].id)) if rows else None


class BelowOldest(Relaying):
    """Reads below the oldest transaction that is under way."""

    rows = 9

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Return what was committed below it, by id."""
        now = server.position()
        floor = Position(min((*now.open, now.head)))
        rows = tuple(row for row in server.rows if floor.sees(row.xid) and not passed(progress, row))
        return (rows, Progress(floor)) if rows else None


class _WithoutLate(Log):
    def page(self, channel: Channel, window: Window, extent: Extent, after: int, upto: int) -> Page:
        return super().page(channel, window, replace(extent, late=None), after, upto)


class ForgetsLate(PageByPage):
    """Reads the pages of a window without the rows that were committed late."""

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Read on in that way."""
        return read(server, progress, self.rows, _WithoutLate)


class ByTransaction(Relaying):
    """Sends in the order of the transaction ids."""

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Return the batch in that order."""
        found = super().read(server, progress)
        return found and (tuple(sorted(found[0], key=lambda row: row.xid)), found[1])


class OnStandby(Relaying):
    """Captures its positions on a standby, whose snapshots list no transaction that is under way."""

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Read on from such a position."""
        return super().read(server._replace(open=()), progress)


class NoEpoch(Relaying):
    """Settles without a look at the epoch: the row that was written last counts."""

    def may_settle(self, state: State, worker: Worker) -> bool:
        """Look at the server alone."""
        return state.server.incarnation == worker.incarnation

    def newest(self, stored: ProgressRow, settled: ProgressRow) -> ProgressRow:
        """Take the last one."""
        return settled


class NoLeaseCheck(Relaying):
    """Begins a call without a look at what is left of the lease."""

    def may_call(self, state: State, number: int) -> bool:
        """Call."""
        return True


class KeepsBase(Relaying):
    """Keeps its position in memory over a lost connection, and does not ask whether the server was restarted."""

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Read on; a server that is behind the position may catch up."""
        try:
            return super().read(server, progress)
        except PositionError:
            return None

    def dropped(self, worker: Worker) -> Worker:
        """Keep the base of what it would read next."""
        return Worker(progress=worker.end or worker.progress)

    def begins_at(self, state: State, worker: Worker) -> Progress:
        """Go on from memory, if there is any."""
        return worker.progress if worker.progress != Progress(EARLIEST) else state.stored.progress


class ReadsUncommitted(Relaying):
    """Reads what transactions under way have written, as one that sends from memory does."""

    def read(self, server: Server, progress: Progress) -> Batch | None:
        """Read all rows."""
        rows = tuple(sorted((*server.rows, *(row for each in server.open for row in each.rows))))
        return super().read(server._replace(rows=rows, open=()), progress)


class CommandRobs(Relaying):
    """A command that takes the lease without a look at whether its holder is well."""

    def claim(self, state: State) -> Holder | None:
        """Claim it from anybody."""
        lease = state.lease
        return Holder(str(lease.owner), lease.epoch, lease.renewals, None, live=False)

    def wanted(self, state: State) -> bool:
        """Ask nobody."""
        return False

"""Writers, a server, workers and a destination: the world of one subscription, with every fault that it survives."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, NamedTuple, TypeVar

from outbox.model.lease import Holder
from outbox.model.position import EARLIEST, Progress
from tests.model import rules
from tests.model.explorer import Moves, apart
from tests.model.reading import passed, read
from tests.model.rules import LeaseRow, ProgressRow
from tests.model.server import Row, Server


class Writer(NamedTuple):
    """The keys of the transactions that are left, and the transaction that is under way; 0: none."""

    left: tuple[str, ...]
    xid: int = 0


#: The state of any world that has a server and writers.
World = TypeVar("World", bound=Any)

#: A lease that is good until then, and one whose holder has not renewed it for its whole length, which all others saw.
GOOD, OVER = 1, 0
#: The owner of a lease that a command has.
COMMAND = -1


class Worker(NamedTuple):
    """What a worker keeps in memory. `epoch` 0: it has no lease.

    `batch`: read and not handed over. `sent`: handed over and not settled; `end`: the progress when that is settled.
    """

    epoch: int = 0
    incarnation: int = 0
    progress: Progress = Progress(EARLIEST)
    batch: tuple[Row, ...] = ()
    sent: int = 0
    end: Progress | None = None


class Arrived(NamedTuple):
    """What the destination got of a key: the last message, and the newest one of all."""

    last: int = 0
    newest: int = 0


class Faults(NamedTuple):
    """How many of each may still happen, and how many have happened."""

    crashes: int = 0
    #: A connection that is lost, also while a commit is under way.
    losses: int = 0
    #: A worker that is frozen, or cannot renew, for longer than its lease.
    lapses: int = 0
    #: A server that is gone, in whose place a standby goes on that had not got everything; once at most.
    failovers: int = 0
    happened: int = 0
    failed_over: bool = False


class Standby(NamedTuple):
    """What a standby has got of the server."""

    server: Server
    lease: LeaseRow
    stored: ProgressRow


#: A command that changes what belongs to the lease: it asks for the lease, has it, has given it back.
Command = Literal["none", "ready", "asks", "has it", "done"]


class State(NamedTuple):
    """Everything."""

    server: Server
    writers: tuple[Writer, ...]
    lease: LeaseRow
    stored: ProgressRow
    workers: tuple[Worker, ...]
    arrived: tuple[tuple[str, Arrived], ...]
    faults: Faults
    standby: Standby | None = None
    command: Command = "none"
    broken: str | None = None


class Relaying:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    #: The most rows of a read, and of all that is handed over before a settle.
    rows = 2

    def __init__(
        self, writers: tuple[tuple[str, ...], ...], *, workers: int = 2, faults: Faults, command: bool = False
    ) -> None:
        """`writers`: the key of each of their transactions. `command`: a command wants the lease once."""
        self._writers = tuple(Writer(keys) for keys in writers)
        self._workers = workers
        self._faults = faults
        self._command: Command = "ready" if command else "none"

    def start(self) -> State:
        """Return the state in which nothing has happened."""
        keys = sorted({key for writer in self._writers for key in writer.left})
        return State(
            Server(),
            self._writers,
            LeaseRow(),
            ProgressRow(),
            (Worker(),) * self._workers,
            tuple((key, Arrived()) for key in keys),
            self._faults,
            command=self._command,
        )

    def moves(self, state: State) -> Moves[State]:
        """Return every step of a writer, of a worker, and of fate."""
        for number in apart(state.writers):
            yield from write(state, number, state.writers[number])
        for number in apart([(worker, state.lease.owner == each) for each, worker in enumerate(state.workers)]):
            yield from self._work(state, number, state.workers[number])
        yield from self._order(state)
        renews = state.lease.owner == COMMAND or any(each.epoch == state.lease.epoch for each in state.workers)
        if state.lease.until == GOOD and not renews:
            yield "nobody renews the lease", state._replace(lease=state.lease._replace(until=OVER))
        if state.faults.crashes:
            yield "the server crashes and recovers", _crashed(state)
        if state.faults.failovers:
            standby = Standby(state.server._replace(incarnation=0), state.lease, state.stored)
            if state.standby != standby:
                yield "the standby has got everything", state._replace(standby=standby)
            if state.standby is not None:
                yield "the server is gone, and the standby goes on", _failed_over(state, state.standby)

    def wrong(self, state: State) -> str | None:
        """Return what the destination, or the stored progress, shows to be wrong."""
        if state.broken is not None:
            return state.broken
        arrived = dict(state.arrived)
        for row in state.server.rows:
            if passed(state.stored.progress, row) and arrived[row.key].newest < row.nth:
                return f"lost: message {row.nth} of {row.key} is settled and was never sent"
        return None

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        for key, arrived in state.arrived:
            number = sum(row.key == key for row in state.server.rows)
            if arrived != (number, number):
                return f"{key} ends with message {arrived.last} (the newest was {arrived.newest}) of {number}"
        return None

    # The rules, which twins break

    def read(self, server: Server, progress: Progress) -> tuple[tuple[Row, ...], Progress] | None:
        """Read on."""
        return read(server, progress, self.rows)

    def may_call(self, state: State, number: int) -> bool:
        """Return whether a worker may begin a call: its lease is good by its own clock."""
        return state.lease == LeaseRow(number, state.workers[number].epoch, 0, GOOD)

    def may_settle(self, state: State, worker: Worker) -> bool:
        """Return whether the statement that settles finds the lease row under this epoch, on this server."""
        return rules.held(state.lease, worker.epoch, same_server=state.server.incarnation == worker.incarnation)

    def newest(self, stored: ProgressRow, settled: ProgressRow) -> ProgressRow:
        """Return which of two progress rows counts. That of a later settle of the same epoch has the higher number."""
        return rules.newest((stored, settled))._replace(n=0)

    def claim(self, state: State) -> Holder | None:
        """Return the holder whose lease may be claimed, because all have seen it stand still for its whole length."""
        lease = state.lease
        owner = str(lease.owner)
        return Holder(owner, lease.epoch, lease.renewals, None, live=False) if lease.until == OVER else None

    def wanted(self, state: State) -> bool:
        """Return whether a command asks for the lease. Its holder then gives it back, and no other worker takes it."""
        return state.command == "asks"

    def begins_at(self, state: State, worker: Worker) -> Progress:
        """Return from where a worker goes on that has taken the lease."""
        return state.stored.progress

    def goes_on(self, state: State, worker: Worker) -> bool:
        """Return whether what a worker has in memory is good on this server."""
        return worker.incarnation == state.server.incarnation

    # The steps of a worker

    def _work(self, state: State, number: int, worker: Worker) -> Moves[State]:
        name = f"worker {number + 1}"
        if not worker.epoch:
            taken = rules.acquired(state.lease, number, GOOD, self.claim(state))
            if taken is not None and not self.wanted(state):
                yield f"{name} takes the lease", self._taken(state, number, worker, taken)
            return
        yield from self._hold(state, number, worker, name)
        if worker.batch:
            yield from self._hand_over(state, number, worker, name)
            return
        if worker.sent:
            yield from self._settle(state, number, worker, name)
        elif self.wanted(state):
            back = state._replace(lease=rules.given_back(state.lease, worker.epoch))
            yield f"{name} gives the lease back", _with(back, number, self.dropped(worker))
            return
        if not worker.sent or (worker.sent < self.rows and worker.end is not None and worker.end.target is None):
            yield from self._read(state, number, worker, name)

    def _hold(self, state: State, number: int, worker: Worker, name: str) -> Moves[State]:
        """Lose the connection, or the lease, or renew it."""
        if state.faults.losses:
            lost = _fault(state, losses=state.faults.losses - 1)
            yield f"{name} loses its connection", _with(lost, number, self.dropped(worker))
        if state.faults.lapses and state.lease == LeaseRow(number, worker.epoch, 0, GOOD):
            lapsed = _fault(state, lapses=state.faults.lapses - 1)
            yield f"the lease of {name} runs out", lapsed._replace(lease=state.lease._replace(until=OVER))
        if state.lease == LeaseRow(number, worker.epoch, 0, OVER):
            renewed = rules.renewed(state.lease, worker.epoch, GOOD)
            assert renewed is not None
            yield f"{name} renews its lease", state._replace(lease=renewed._replace(renewals=0))

    def _taken(self, state: State, number: int, worker: Worker, lease: LeaseRow) -> State:
        server = state.server.write()
        taken = Worker(lease.epoch, state.server.incarnation, self.begins_at(state, worker))
        return _with(state._replace(lease=lease, server=server), number, taken)

    def _order(self, state: State) -> Moves[State]:
        """Have a command ask for the lease, take it, and give it back."""
        match state.command:
            case "ready":
                yield "a command asks for the lease", state._replace(command="asks")
            case "asks":
                lease = rules.acquired(state.lease, COMMAND, GOOD, self.claim(state))
                if lease is not None:
                    taken = state._replace(lease=lease, server=state.server.write(), command="has it")
                    yield "the command takes the lease", taken
            case "has it":
                back = rules.given_back(state.lease, state.lease.epoch)
                yield "the command gives the lease back", state._replace(lease=back, command="done")

    def dropped(self, worker: Worker) -> Worker:
        """Return what a worker still knows that has lost its connection or its lease."""
        return Worker()

    def _read(self, state: State, number: int, worker: Worker, name: str) -> Moves[State]:
        if not self.goes_on(state, worker):
            yield f"{name} finds that the server was restarted", _with(state, number, self.dropped(worker))
            return
        found = self.read(state.server, worker.end or worker.progress)
        if found is None:
            return
        batch, end = found
        step = f"{name} reads {said(batch)}"
        if not batch:
            # A page without rows of ours is settled with the next one that has some.
            yield step, _with(state, number, worker._replace(end=end))
        elif worker.sent + len(batch) <= self.rows:
            yield step, _with(state, number, worker._replace(batch=batch, end=end))

    def _hand_over(self, state: State, number: int, worker: Worker, name: str) -> Moves[State]:
        if not self.may_call(state, number):
            yield f"{name} has too little left of its lease", _with(state, number, self.dropped(worker))
            return
        arrived, broken = delivered(state, worker.batch)
        after = state._replace(arrived=arrived, broken=broken)
        sent = worker._replace(batch=(), sent=worker.sent + len(worker.batch))
        yield f"{name} sends {said(worker.batch)}", _with(after, number, sent)

    def _settle(self, state: State, number: int, worker: Worker, name: str) -> Moves[State]:
        assert worker.end is not None
        if not self.may_settle(state, worker):
            yield (
                f"{name} cannot settle: the lease or the server is another",
                _with(state, number, self.dropped(worker)),
            )
            return
        settled = self.newest(state.stored, ProgressRow(worker.epoch, 1, worker.end))
        after = state._replace(stored=settled, server=state.server.write(), broken=_goes_back(state, settled))
        yield f"{name} settles", _with(after, number, worker._replace(sent=0, end=None, progress=worker.end))
        if state.faults.losses:
            lost = _fault(after, losses=state.faults.losses - 1)
            yield f"{name} settles, and loses the answer", _with(lost, number, self.dropped(worker))


class PageByPage(Relaying):
    """Reads row by row, so that also a few rows are a window of several pages."""

    rows = 1


def write(state: World, number: int, writer: Writer) -> Moves[World]:
    """Return the steps of a writer of any world that has a server and writers."""
    server, name = state.server, f"writer {number + 1}"
    if not writer.left:
        return
    key, *left = writer.left
    if not writer.xid:
        begun = Writer(writer.left, server.next_xid)
        yield f"{name} begins transaction {begun.xid}", _written(state, number, begun, server.begin())
    elif not server.transaction(writer.xid).rows:
        if not server.locked(key):
            inserted = server.insert(writer.xid, key)
            yield f"{name} locks {key} and inserts message {server.next_id}", _written(state, number, writer, inserted)
    else:
        done = Writer(tuple(left))
        yield f"{name} commits transaction {writer.xid}", _written(state, number, done, server.commit(writer.xid))
        yield f"{name} rolls transaction {writer.xid} back", _written(state, number, done, server.roll_back(writer.xid))


def _written(state: World, number: int, writer: Writer, server: Server) -> World:
    changed: World = state._replace(
        server=server, writers=(*state.writers[:number], writer, *state.writers[number + 1 :])
    )
    return changed


def _with(state: State, number: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:number], worker, *state.workers[number + 1 :]))


def _fault(state: State, **left: Any) -> State:
    return state._replace(faults=state.faults._replace(**left, happened=state.faults.happened + 1))


def _crashed(state: State) -> State:
    """Transactions under way are gone; their writers do not try again."""
    writers = tuple(Writer(writer.left[1:]) if writer.xid else writer for writer in state.writers)
    after = _fault(state, crashes=state.faults.crashes - 1)
    return after._replace(server=state.server.crash(), writers=writers)


def _failed_over(state: State, standby: Standby) -> State:
    """Have a standby go on with what it has got; of what it has not got nothing is left, also not in the promises."""
    crashed = _crashed(state._replace(server=standby.server))
    incarnation = state.server.incarnation + 1
    server = crashed.server._replace(incarnation=incarnation)
    number = Counter(row.key for row in server.rows)
    arrived = tuple((key, Arrived(*(min(nth, number[key]) for nth in each))) for key, each in state.arrived)
    faults = state.faults._replace(failovers=0, happened=state.faults.happened + 1, failed_over=True)
    return crashed._replace(
        server=server, lease=standby.lease, stored=standby.stored, arrived=arrived, faults=faults, standby=None
    )


def delivered(state: Any, batch: tuple[Row, ...]) -> tuple[tuple[tuple[str, Arrived], ...], str | None]:
    """Return what a destination has that gets a batch, and what of it must not be."""
    arrived, broken = dict(state.arrived), state.broken
    for row in batch:
        if row not in state.server.rows:
            if not state.faults.failed_over:
                broken = broken or f"phantom: message {row.nth} of {row.key} was never committed"
            continue
        last, newest = arrived[row.key]
        if row.nth > last + 1:
            broken = broken or f"order: message {row.nth} of {row.key} came right after message {last}"
        if row.nth <= newest and not state.faults.happened:
            broken = broken or f"repeated without a failure: message {row.nth} of {row.key}"
        arrived[row.key] = Arrived(row.nth, max(row.nth, newest))
    return tuple(arrived.items()), broken


def _goes_back(state: State, settled: ProgressRow) -> str | None:
    for row in state.server.rows:
        if passed(state.stored.progress, row) and not passed(settled.progress, row):
            return f"the stored progress goes back behind message {row.nth} of {row.key}"
    return state.broken


def said(batch: tuple[Row, ...]) -> str:
    """Return messages as a trace names them."""
    return ", ".join(f"{row.key}{row.nth}" for row in batch) or "a page without messages"

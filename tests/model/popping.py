"""Pops: calls that hand out the messages of a group, each in one transaction, and a worker that takes the lease.

A message in somebody's hands is parked until its time is over. Which pop may write, and who reads what, says the
library. A pop hands out what there is of a key together; the next of the key come after the receipts of all of these.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outbox.model.position import EARLIEST, Progress
from tests.model import rules
from tests.model.explorer import Moves, apart
from tests.model.reading import read
from tests.model.relaying import GOOD, Writer, said, write
from tests.model.rules import LeaseRow, ProgressRow
from tests.model.server import Row, Server

#: The worker, as the owner of the lease; and nobody, as who has the lock.
WORKER, NOBODY = 9, -1


class Copy(NamedTuple):
    """A parked message. `times`: so often it was handed out; `out`: its time is not over."""

    row: Row
    times: int = 0
    out: bool = False


class Call(NamedTuple):
    """One that pops. `epoch`: of the lease, as it was free. `hands`: messages, with the number of their handing-out."""

    step: Literal["idle", "looked", "read"] = "idle"
    epoch: int = 0
    again: tuple[Row, ...] = ()
    batch: tuple[Row, ...] = ()
    end: Progress = Progress(EARLIEST)
    hands: tuple[tuple[Row, int], ...] = ()


class Worker(NamedTuple):
    """One that has the lease for a turn. `turns`: so many are left."""

    turns: int
    epoch: int = 0
    progress: Progress = Progress(EARLIEST)
    batch: tuple[Row, ...] = ()
    end: Progress | None = None


class State(NamedTuple):
    """Everything. `done`: of each key the messages that are done.

    `deaths`, `late`: so many calls may still die, and so many times be over while a message is in somebody's hands.
    """

    server: Server
    writers: tuple[Writer, ...]
    lease: LeaseRow
    stored: ProgressRow
    parked: tuple[Copy, ...]
    calls: tuple[Call, ...]
    worker: Worker
    done: tuple[tuple[str, tuple[int, ...]], ...]
    deaths: int
    late: int
    lock: int = NOBODY
    broken: str | None = None


class Popping:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    rows = 2

    def __init__(
        self, writers: tuple[tuple[str, ...], ...], *, calls: int = 2, turns: int = 0, deaths: int = 0, late: int = 0
    ) -> None:
        """`writers`: the key of each of their transactions. `turns`: so often a worker takes the lease."""
        self._writers = tuple(Writer(keys) for keys in writers)
        self._calls, self._turns, self._deaths, self._late = calls, turns, deaths, late

    def start(self) -> State:
        """Return the state in which nothing has happened."""
        keys = sorted({key for writer in self._writers for key in writer.left})
        return State(
            Server(), self._writers, LeaseRow(), ProgressRow(), (), (Call(),) * self._calls, Worker(self._turns),
            tuple((key, ()) for key in keys), self._deaths, self._late,
        )  # fmt: skip

    def moves(self, state: State) -> Moves[State]:
        """Return every step of a writer, of a call, of the worker, and of time."""
        for number in apart(state.writers):
            yield from write(state, number, state.writers[number])
        for number in apart([(call, state.lock == each) for each, call in enumerate(state.calls)]):
            yield from self._call(state, number, state.calls[number], f"call {number + 1}")
        yield from self._work(state, state.worker)
        yield from _time(state)

    def wrong(self, state: State) -> str | None:
        """Return what was handed out and must not be."""
        return state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        for key, done in state.done:
            number = sum(row.key == key for row in state.server.rows)
            if len(done) != number:
                return f"lost: of {key} are done {done} of {number}"
        return None

    # The rules, which twins break

    def may_begin(self, state: State) -> bool:
        """Return whether no other pop has the lock."""
        return state.lock == NOBODY

    def may_look(self, state: State) -> bool:
        """Return whether a pop goes on that finds the lease so."""
        return state.lease.until is None

    def may_write(self, state: State, call: Call) -> bool:
        """Return whether the statement that writes finds the lease free, under the epoch of the look."""
        return rules.free(state.lease, call.epoch)

    def held(self, state: State) -> set[str]:
        """Return the keys of which no message of the log is handed out."""
        return {each.row.key for each in state.parked}

    def due(self, state: State) -> tuple[Row, ...]:
        """Return what is handed out again, and what stands behind it: of keys of which nothing is in other hands."""
        out = {each.row.key for each in state.parked if each.out}
        return tuple(each.row for each in state.parked if each.row.key not in out)

    # The steps of a call

    def _call(self, state: State, number: int, call: Call, name: str) -> Moves[State]:
        if call.step == "idle" and self.may_begin(state) and self.may_look(state):
            begun = call._replace(step="looked", epoch=state.lease.epoch)
            yield f"{name} begins", _with(state._replace(lock=number), number, begun)
        elif call.step == "looked":
            yield from self._read(state, number, call, name)
        elif call.step == "read":
            yield from self._write(state, number, call, name)
        if call.step != "idle" and state.deaths:
            yield f"{name} dies", _with(_unlocked(state, number)._replace(deaths=state.deaths - 1), number, Call())
        for row, times in call.hands if call.step == "idle" else ():
            yield f"{name} acknowledges {said((row,))}", _acknowledged(state, number, row, times)

    def _read(self, state: State, number: int, call: Call, name: str) -> Moves[State]:
        due = self.due(state)
        if due:
            yield f"{name} finds {said(due)}", _with(state, number, call._replace(step="read", again=due))
            return
        found = read(state.server, state.stored.progress, self.rows)
        if found is None:
            yield f"{name} finds nothing", _with(_unlocked(state, number), number, Call(hands=call.hands))
        else:
            batch, end = found
            after = call._replace(step="read", batch=batch, end=end)
            yield f"{name} reads {said(batch)}", _with(state, number, after)

    def _write(self, state: State, number: int, call: Call, name: str) -> Moves[State]:
        after = _unlocked(state, number)
        if not self.may_write(state, call):
            yield f"{name} takes it back", _with(after, number, Call(hands=call.hands))
            return
        parked = {each.row: each for each in state.parked}
        held, out = self.held(state), list[tuple[Row, int]]()
        for row in call.again:
            if row in parked:
                out.append((row, parked[row].times + 1))
        for row in call.batch:
            parked[row] = Copy(row)
            if row.key not in held:
                out.append((row, 1))
        for row, times in out:
            parked[row] = Copy(row, times, out=True)
        stored = state.stored if call.again else ProgressRow(state.stored.epoch, 0, call.end)
        after = after._replace(parked=tuple(sorted(parked.values())), stored=stored, server=state.server.write())
        given = _given(after, tuple(row for row, _ in out))
        rows = said(tuple(row for row, _ in out))
        yield f"{name} hands out {rows}", _with(given, number, Call(hands=(*call.hands, *out)))
        if state.deaths:
            dead = after._replace(deaths=state.deaths - 1)
            yield f"{name} commits, and dies", _with(dead, number, Call())

    # The steps of a worker

    def _work(self, state: State, worker: Worker) -> Moves[State]:
        if not worker.epoch:
            taken = rules.acquired(state.lease, WORKER, GOOD, None) if worker.turns else None
            if taken is not None:
                has = Worker(worker.turns - 1, taken.epoch, state.stored.progress)
                yield "the worker takes the lease", state._replace(lease=taken, worker=has, server=state.server.write())
            return
        if worker.end is None:
            found = read(state.server, worker.progress, self.rows)
            if found is not None:
                batch, end = found
                begun = worker._replace(batch=batch, end=end)
                free = tuple(row for row in batch if row.key not in {each.row.key for each in state.parked})
                yield f"the worker sends {said(free)}", _given(state._replace(worker=begun), free)
            back = rules.given_back(state.lease, worker.epoch)
            yield "the worker gives the lease back", state._replace(lease=back, worker=Worker(worker.turns))
        elif rules.held(state.lease, worker.epoch, same_server=True):
            yield "the worker settles", self._settled(state, worker, worker.end)

    def _settled(self, state: State, worker: Worker, end: Progress) -> State:
        """Return the state after a settle: what stands behind a message in other hands is parked."""
        keys, done, parked = {each.row.key for each in state.parked}, dict(state.done), list(state.parked)
        for row in worker.batch:
            if row.key in keys:
                parked.append(Copy(row))
            else:
                done[row.key] = (*done[row.key], row.nth)
        return state._replace(
            stored=rules.newest((state.stored, ProgressRow(worker.epoch, 1, end)))._replace(n=0),
            parked=tuple(sorted(parked)),
            done=tuple(done.items()),
            server=state.server.write(),
            worker=worker._replace(progress=end, batch=(), end=None),
        )


def _time(state: State) -> Moves[State]:
    """Let the time of a message be over: of one that nobody has in hands, and a few times of any other."""
    hands = {each for call in state.calls for each in call.hands}
    for place, each in enumerate(state.parked):
        had = (each.row, each.times) in hands
        if each.out and (state.late or not had):
            parked = (*state.parked[:place], each._replace(out=False), *state.parked[place + 1 :])
            late = state.late - had
            yield f"the time of {said((each.row,))} is over", state._replace(parked=parked, late=late)


def _acknowledged(state: State, number: int, row: Row, times: int) -> State:
    """Return the state after a receipt was used, which is worth something until the time is over."""
    call = state.calls[number]
    hands = tuple(each for each in call.hands if each != (row, times))
    after = _with(state, number, call._replace(hands=hands))
    if Copy(row, times, out=True) not in state.parked:
        return after
    parked = tuple(each for each in state.parked if each.row != row)
    done = tuple((key, tuple(sorted({*had, row.nth})) if key == row.key else had) for key, had in state.done)
    return after._replace(parked=parked, done=done, server=state.server.write())


def _given(state: State, rows: tuple[Row, ...]) -> State:
    """Return the state after messages were handed out or sent, with what must not be."""
    done, broken = dict(state.done), state.broken
    hands = {row for call in state.calls for row, times in call.hands if Copy(row, times, out=True) in state.parked}
    for row in rows:
        if row in hands or row.nth in done[row.key]:
            broken = broken or f"twice: message {row.nth} of {row.key} is in other hands, or done"
        if row.key in {each.key for each in hands}:
            broken = broken or f"order: message {row.nth} of {row.key} came while another one is in other hands"
        before = {each.nth for each in rows if each.key == row.key and each.nth < row.nth}
        if not {*range(1, row.nth)} <= before.union(done[row.key]):
            broken = broken or f"order: message {row.nth} of {row.key} came after {sorted(before)} and {done[row.key]}"
    return state._replace(broken=broken)


def _with(state: State, number: int, call: Call) -> State:
    return state._replace(calls=(*state.calls[:number], call, *state.calls[number + 1 :]))


def _unlocked(state: State, number: int) -> State:
    return state._replace(lock=NOBODY) if state.lock == number else state


# Broken twins


class NoLock(Popping):
    """Pops beside another pop of the partition."""

    def may_begin(self, state: State) -> bool:
        """Begin."""
        return True


class BesideWorker(Popping):
    """Pops whoever has the lease."""

    def may_look(self, state: State) -> bool:
        """Go on."""
        return True

    def may_write(self, state: State, call: Call) -> bool:
        """Write."""
        return True


class LooksOnce(Popping):
    """Writes without another look at the lease, which was free at the beginning."""

    def may_write(self, state: State, call: Call) -> bool:
        """Write."""
        return True


class HandsOutBehind(Popping):
    """Hands out a message whose key is in other hands."""

    def held(self, state: State) -> set[str]:
        """Hold no key."""
        return set()


class HandsOutTheRest(Popping):
    """Looks at the time of a message, and not at what was handed out together with it."""

    def due(self, state: State) -> tuple[Row, ...]:
        """Return what is due, whatever is in other hands."""
        return tuple(each.row for each in state.parked if not each.out)

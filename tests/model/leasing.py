"""A lease and its clocks: each process has its own, that of the database may step, and answers take their time.

A process may work until its deadline by its own clock; so no two of them may be before their deadlines at one time.
What one sees of a lease, and when it may be claimed, says the library. Time goes in steps; all lengths are such steps.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from outbox.model.lease import Holder, Sight
from tests.model import rules
from tests.model.explorer import Moves
from tests.model.rules import LeaseRow

_SOME_MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


class Asked(NamedTuple):
    """A statement on its way. `renews`: an epoch, which it is to renew; 0: it is to take the lease.

    `at`: when it was sent. `answer`: the epoch that the process has now; None: not carried out yet; 0: refused.
    """

    at: int
    renews: int = 0
    claim: Holder | None = None
    answer: int | None = None


class Process(NamedTuple):
    """One that takes the lease for `length` steps. `epoch` 0: it has none. `until`: its deadline by its own clock."""

    length: int
    epoch: int = 0
    until: int = 0
    sight: Sight | None = None
    claim: Holder | None = None
    asked: Asked | None = None


class State(NamedTuple):
    """Everything. `ahead`: so far the clock of the database is ahead. `length`: what the holder has written.

    `leaps`: so often that clock may still step. `asks`: so many statements may still be sent.
    """

    processes: tuple[Process, ...]
    row: LeaseRow = LeaseRow()
    length: int = 0
    now: int = 0
    ahead: int = 0
    leaps: int = 0
    asks: int = 0


class Leasing:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, *lengths: int, end: int, leaps: int = 0, asks: int = 4) -> None:
        """`lengths`: those of the processes. `end`: so many steps time goes. `leaps`: so often the clock of the
        database steps. `asks`: so many statements are sent that take or renew the lease.
        """
        self._first = State(tuple(map(Process, lengths)), leaps=leaps, asks=asks)
        self._end = end

    def start(self) -> State:
        """Return the state in which nobody has the lease."""
        return self._first

    def moves(self, state: State) -> Moves[State]:
        """Return every step of time, of the clock, and of a process."""
        if state.now < self._end:
            yield f"it is {state.now + 1}", state._replace(now=state.now + 1)
        if state.leaps:
            for by in (-100, 100):
                leap = state._replace(ahead=state.ahead + by, leaps=state.leaps - 1)
                yield f"the clock of the database steps by {by}", leap
        for number, process in enumerate(state.processes):
            if process.asked is not None:
                yield from self._answer(state, number, process, process.asked)
            elif process.epoch:
                yield from self._hold(state, number, process)
            else:
                yield from self._want(state, number, process)

    def wrong(self, state: State) -> str | None:
        """Return whether two may work at the same time."""
        working = [name(number) for number, each in enumerate(state.processes) if each.epoch and state.now < each.until]
        return f"two at once: {' and '.join(working)} may work" if len(working) > 1 else None

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when time is over: somebody has taken the lease some time."""
        return None if state.row.epoch else "stuck: nobody has ever taken the lease"

    # The rules, which twins break

    def claims(self, state: State, process: Process, sight: Sight) -> bool:
        """Return whether a process may claim the lease that it sees."""
        return sight.stood_still(state.now, timedelta(seconds=process.length))

    def taken(self, state: State, owner: str, until: int, claim: Holder | None) -> LeaseRow | None:
        """Return the row after the statement that takes the lease."""
        return rules.acquired(state.row, owner, until, claim)

    def given_back(self, row: LeaseRow, epoch: int) -> LeaseRow:
        """Return the row after the statement that gives the lease back."""
        return rules.given_back(row, epoch)

    def deadline(self, state: State, process: Process, asked: Asked) -> int:
        """Return until when a process may work that has an answer: it counts from before the statement was sent."""
        return asked.at + process.length

    # The steps

    def _want(self, state: State, number: int, process: Process) -> Moves[State]:
        said, holder = name(number), _holder(state)
        sight = Sight.of(holder, state.now, process.sight)
        claim = holder if self.claims(state, process, sight) else None
        if (sight, claim) != (process.sight, process.claim):
            yield f"{said} looks at the lease", _with(state, number, process._replace(sight=sight, claim=claim))
        if (
            state.asks
            and process.sight is not None
            and (process.claim is not None or process.sight.holder.lease_until is None)
        ):
            asks = process._replace(asked=Asked(state.now, claim=process.claim), sight=None, claim=None)
            yield f"{said} asks for the lease", _with(state, number, asks)._replace(asks=state.asks - 1)

    def _hold(self, state: State, number: int, process: Process) -> Moves[State]:
        said = name(number)
        if state.now < process.until and state.asks:
            renews = process._replace(asked=Asked(state.now, process.epoch))
            yield f"{said} asks to renew", _with(state, number, renews)._replace(asks=state.asks - 1)
        elif state.now >= process.until:
            # It has come to its deadline, or was frozen until long after it.
            yield f"{said} gives up", _with(state, number, Process(process.length))
        back = state._replace(row=self.given_back(state.row, process.epoch))
        yield f"{said} gives the lease back", _with(back, number, Process(process.length))

    def _answer(self, state: State, number: int, process: Process, asked: Asked) -> Moves[State]:
        said = name(number)
        if asked.answer is None:
            until = state.now + state.ahead + process.length
            if asked.renews:
                row = rules.renewed(state.row, asked.renews, until)
                epoch = asked.renews
            else:
                row = self.taken(state, said, until, asked.claim)
                epoch = 0 if row is None else row.epoch
            done = process._replace(asked=asked._replace(answer=0 if row is None else epoch))
            after = _with(state, number, done)
            if row is not None:
                after = after._replace(row=row, length=process.length)
            yield f"the database does what {said} asked", after
        elif asked.answer:
            until = self.deadline(state, process, asked)
            holds = Process(process.length, asked.answer, until)
            yield f"{said} has the lease until {until}", _with(state, number, holds)
        else:
            yield f"{said} does not have the lease", _with(state, number, Process(process.length))


def name(number: int) -> str:
    """Return the name of a process."""
    return f"process {number + 1}"


def _holder(state: State) -> Holder:
    """Return the lease as the library shows it."""
    row = state.row
    # Whether there is a moment is all that one looks at; which one it is, is shown by `live`.
    until = None if row.until is None else _SOME_MOMENT
    live = row.until is not None and row.until > state.now + state.ahead
    length = timedelta(seconds=state.length) if state.length else None
    return Holder(None if row.owner is None else str(row.owner), row.epoch, row.renewals, until, live, length)


def _with(state: State, number: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:number], process, *state.processes[number + 1 :]))


# Broken twins


class OwnLength(Leasing):
    """Claims a lease that stood still for the length of the one who wants it."""

    def claims(self, state: State, process: Process, sight: Sight) -> bool:
        """Wait for its own length."""
        return state.now - sight.since > process.length


class WallClock(Leasing):
    """Claims a lease that has expired by the clock of the database."""

    def claims(self, state: State, process: Process, sight: Sight) -> bool:
        """Believe that clock."""
        return not _holder(state).live


class LooksOnce(Leasing):
    """Takes the lease that stood still when somebody looked, whoever has renewed it since."""

    def taken(self, state: State, owner: str, until: int, claim: Holder | None) -> LeaseRow | None:
        """Take it as it is by now."""
        return rules.acquired(state.row, owner, until, claim and _holder(state))


class FromTheAnswer(Leasing):
    """Counts its deadline from the moment at which the answer came."""

    def deadline(self, state: State, process: Process, asked: Asked) -> int:
        """Count from now."""
        return state.now + process.length


class GivesBackAny(Leasing):
    """Gives the lease back, whoever has it by then."""

    def given_back(self, row: LeaseRow, epoch: int) -> LeaseRow:
        """Ask for no epoch."""
        return rules.given_back(row, row.epoch)

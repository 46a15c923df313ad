"""Calls that do not come back in time: what they have is held, and their answers may count when they come late.

Two processes take turns with one partition and one key. Which answers count, and which messages are held, say the
library's own hung calls and known outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from outbox.model.lease import Holder, Lease, Partition
from outbox.model.verdict import DONE, Verdict
from outbox.worker.hung import HungCalls
from tests.model import rules
from tests.model.explorer import Moves, apart
from tests.model.relaying import GOOD, OVER, Arrived
from tests.model.rules import LeaseRow

PARTITION = Partition("relay")


class Message(NamedTuple):
    """A message of the key."""

    id: int
    message_id: UUID
    key: str = "a"
    attempt: int = 1


class Left(NamedTuple):
    """A call that was left behind. `arrived`: so many of its messages. `void`: its answer does not count.

    `over`: it has come back; `answered`: with verdicts.
    """

    ids: tuple[int, ...]
    arrived: int = 0
    void: bool = False
    over: bool = False
    answered: bool = False


class Process(NamedTuple):
    """`lease`: that of its last worker; `works`: it has not lost it, as far as it knows.

    `known`: messages with an outcome that is not settled, over all its leases. `done`: what its worker has done and not
    settled.
    """

    lease: Lease | None = None
    works: bool = False
    calls: tuple[Left, ...] = ()
    known: frozenset[int] = frozenset()
    done: tuple[int, ...] = ()


class Troubles(NamedTuple):
    """How many of each may still happen. `happened`: something has."""

    hangs: int = 0
    lapses: int = 0
    losses: int = 0
    happened: bool = False


class State(NamedTuple):
    """Everything. `settled`: so many messages of the log."""

    lease: LeaseRow
    settled: int
    processes: tuple[Process, ...]
    arrived: Arrived
    troubles: Troubles
    broken: str | None = None


class Call:
    """A call as `HungCalls` sees it."""

    def __init__(self, messages: Sequence[Message], left: Left) -> None:
        self.messages, self.finished = messages, left.over
        self.answers: list[tuple[Message, Verdict]] = [(each, DONE) for each in messages] if left.answered else []


class Answering:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, messages: int, *, processes: int = 2, late: bool = False, troubles: Troubles) -> None:
        """`late`: the messages of a call that hangs may arrive late; else they arrive at once, and only its answer
        comes late. Where a message may arrive after others took over, no order can be kept.
        """
        self._log = tuple(Message(id, UUID(int=id)) for id in range(1, messages + 1))
        self._processes, self._late, self._troubles = processes, late, troubles

    def start(self) -> State:
        """Return the state in which all messages are committed, and nothing is sent."""
        return State(LeaseRow(), 0, (Process(),) * self._processes, Arrived(), self._troubles)

    def moves(self, state: State) -> Moves[State]:
        """Return every step of a process, of its calls, and of fate."""
        for number in apart([(each, state.lease.owner == name(at)) for at, each in enumerate(state.processes)]):
            process = state.processes[number]
            yield from self._work(state, number, process)
            for at, call in enumerate(process.calls):
                if not call.over:
                    yield from self._call(state, number, at, call)
        if state.lease.until == GOOD and not any(self._has_lease(state, each) for each in state.processes):
            yield "nobody renews the lease", state._replace(lease=state.lease._replace(until=OVER))

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        if state.settled > state.arrived.newest:
            return f"lost: message {state.settled} is settled and was never sent"
        return state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        number = len(self._log)
        if state.arrived != (number, number):
            return f"order: the key ends with message {state.arrived.last} (the newest was {state.arrived.newest})"
        return None if state.settled == number else "stuck: not everything is settled"

    # The rules, which twins break

    def taken(self, hung: HungCalls, lease: Lease) -> None:
        """Note that a process took the lease."""
        hung.taken(lease)

    def held(self, hung: HungCalls) -> set[str | None]:
        """Return the keys that are not to be sent, because calls with their messages hang."""
        return hung.keys

    # The steps

    def _has_lease(self, state: State, process: Process) -> bool:
        return process.works and process.lease is not None and process.lease.epoch == state.lease.epoch

    def _work(self, state: State, number: int, process: Process) -> Moves[State]:
        said = f"process {number + 1}"
        if not process.works:
            lease = rules.acquired(state.lease, name(number), GOOD, _claim(state.lease))
            if lease is not None:
                hung, calls = self._hung(process)
                mine = Lease(PARTITION, lease.epoch, name(number))
                self.taken(hung, mine)
                after = self._remember(process, hung, calls)._replace(lease=mine, works=True, done=())
                yield f"{said} takes the lease", _with(state._replace(lease=lease), number, after)
            return
        yield from self._lose(state, number, process, said)
        if process.done:
            if rules.held(state.lease, _epoch(process), same_server=True):
                settled = state._replace(settled=process.done[-1])
                yield f"{said} settles", _with(settled, number, process._replace(done=()))
            else:
                yield f"{said} cannot settle", _with(state, number, self._dropped(state, process))
            return
        yield from self._handle(state, number, process, said)

    def _lose(self, state: State, number: int, process: Process, said: str) -> Moves[State]:
        troubles = state.troubles
        if troubles.losses:
            lost = state._replace(troubles=troubles._replace(losses=troubles.losses - 1, happened=True))
            yield f"{said} loses its connection", _with(lost, number, self._dropped(state, process))
        if troubles.lapses and self._has_lease(state, process) and state.lease.until == GOOD:
            lapsed = state._replace(troubles=troubles._replace(lapses=troubles.lapses - 1, happened=True))
            yield f"the lease of {said} runs out", lapsed._replace(lease=state.lease._replace(until=OVER))
        if self._has_lease(state, process) and state.lease.until == OVER:
            yield f"{said} renews its lease", state._replace(lease=state.lease._replace(until=GOOD))
        if not process.done and not self._has_lease(state, process):
            yield f"{said} finds that its lease is lost", _with(state, number, self._dropped(state, process))

    def _dropped(self, state: State, process: Process) -> Process:
        """Return a process without its worker; what was done and is not settled stays known."""
        hung, calls = self._hung(process)
        hung.note(process.lease, _messages([self._log[id - 1] for id in process.done]), [])
        return self._remember(process, hung, calls)._replace(works=False, done=())

    def _handle(self, state: State, number: int, process: Process, said: str) -> Moves[State]:
        pending = self._log[state.settled : state.settled + 2]
        if not pending:
            return
        hung, calls = self._hung(process)
        _take_finished(hung)
        known = hung.known.among(_messages(pending), parked=False)
        done = next((at for at, each in enumerate(pending) if (each.id, each.message_id) not in known), len(pending))
        if done:
            hung.known.take(_messages(pending[:done]), parked=False)
            after = self._remember(process, hung, calls, used=True)._replace(done=_numbers(pending[:done]))
            yield f"{said} knows that {_ids(pending[:done])} is done", _with(state, number, after)
            return
        if self.held(hung) & {"a"}:
            return
        if not (self._has_lease(state, process) and state.lease.until == GOOD):
            yield f"{said} has too little left of its lease", _with(state, number, self._dropped(state, process))
            return
        for number_sent in range(1, len(pending) + 1):
            yield from self._send(state, number, process, pending[:number_sent], said)

    def _send(
        self, state: State, number: int, process: Process, messages: tuple[Message, ...], said: str
    ) -> Moves[State]:
        hung, calls = self._hung(process)
        _take_finished(hung)
        hung.known.hand_over(_messages(messages))
        after = self._remember(process, hung, calls, used=True)
        sent = _arrive(state, messages)
        yield f"{said} sends {_ids(messages)}", _with(sent, number, after._replace(done=_numbers(messages)))
        if state.troubles.hangs:
            troubles = state.troubles._replace(hangs=state.troubles.hangs - 1, happened=True)
            left = Left(_numbers(messages), 0 if self._late else len(messages))
            hangs = (state if self._late else sent)._replace(troubles=troubles)
            left_behind = after._replace(calls=(*after.calls, left))
            yield f"{said} sends {_ids(messages)}, and the call hangs", _with(hangs, number, left_behind)

    def _call(self, state: State, number: int, at: int, call: Left) -> Moves[State]:
        said = f"the call of process {number + 1} with {', '.join(map(str, call.ids))}"
        if call.arrived < len(call.ids):
            came = _arrive(state, [self._log[call.ids[call.arrived] - 1]])
            yield (
                f"message {call.ids[call.arrived]} of {said} arrives",
                self._came(came, number, at, call._replace(arrived=call.arrived + 1)),
            )
            failed = call._replace(over=True)
        else:
            answered = call._replace(over=True, answered=True)
            yield f"{said} comes back, done", self._came(state, number, at, answered)
            failed = call._replace(over=True)
        yield f"{said} comes back with an error", self._came(state, number, at, failed)

    def _came(self, state: State, number: int, at: int, call: Left) -> State:
        process = state.processes[number]
        return _with(state, number, process._replace(calls=(*process.calls[:at], call, *process.calls[at + 1 :])))

    # The library's memory, as a value

    def _hung(self, process: Process) -> tuple[HungCalls, list[Call]]:
        """Return the hung calls of a process, and each of them."""
        hung, calls = HungCalls(), list[Call]()
        if process.lease is not None:
            hung.taken(process.lease)
        hung.known.note(_messages([self._log[id - 1] for id in process.known]))
        for left in process.calls:
            messages = [self._log[id - 1] for id in left.ids]
            calls.append(Call(messages, left))
            hung.add(_call(calls[-1]), None if left.void else process.lease)
        return hung, calls

    def _remember(self, process: Process, hung: HungCalls, calls: list[Call], *, used: bool = False) -> Process:
        """Return the process with what its hung calls are by now. `used`: the answers of those that have come back."""
        known = frozenset(id for id, _ in hung.known.among(_messages(self._log), parked=False) if id is not None)
        for call in calls:
            call.finished = True
        counts = [each.call for each in hung.take_finished()]
        return process._replace(
            known=known,
            calls=tuple(
                left._replace(void=_call(call) not in counts)
                for left, call in zip(process.calls, calls, strict=True)
                if not (used and left.over)
            ),
        )


def _take_finished(hung: HungCalls) -> None:
    """Note what calls have answered that came back late, as a worker does before it sends anything."""
    for each in hung.take_finished():
        hung.known.note(_messages([message for message, _ in _answers(each.call)]))


def name(number: int) -> str:
    """Return the name under which a process takes leases."""
    return f"process {number + 1}"


def _claim(lease: LeaseRow) -> Holder | None:
    return Holder(str(lease.owner), lease.epoch, lease.renewals, None, live=False) if lease.until == OVER else None


def _epoch(process: Process) -> int:
    return 0 if process.lease is None else process.lease.epoch


def _messages(messages: Sequence[Message]) -> Any:
    """Return messages as the library's memory takes them, which looks at their ids, keys and attempts."""
    return messages


def _call(call: Call) -> Any:
    """Return a call as `HungCalls` takes it, which looks at its messages and at whether it is finished."""
    return call


def _answers(call: Any) -> Sequence[tuple[Message, Verdict]]:
    answers: Sequence[tuple[Message, Verdict]] = call.answers
    return answers


def _numbers(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(message.id for message in messages)


def _ids(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.id) for message in messages)


def _with(state: State, number: int, process: Process) -> State:
    return state._replace(processes=(*state.processes[:number], process, *state.processes[number + 1 :]))


def _arrive(state: State, messages: Sequence[Message]) -> State:
    last, newest = state.arrived
    broken = state.broken
    for message in messages:
        if message.id > last + 1:
            broken = broken or f"order: message {message.id} came right after message {last}"
        if message.id <= newest and not state.troubles.happened:
            broken = broken or f"repeated without a failure: message {message.id}"
        last, newest = message.id, max(newest, message.id)
    return state._replace(arrived=Arrived(last, newest), broken=broken)


# Broken twins


class CountsLateAnswers(Answering):
    """Uses a late answer whoever has had the lease since the call."""

    def taken(self, hung: HungCalls, lease: Lease) -> None:
        """Note nothing."""


class SendsBesideHungCalls(Answering):
    """Holds no keys of calls that hang."""

    def held(self, hung: HungCalls) -> set[str | None]:
        """Hold nothing."""
        return set()

"""Calls that do not come back in time: what they have is parked and held, and late answers may count.

Two processes take turns with one partition and one key. Which answers count, and which keys are held, say the library's
own hung calls and known outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch
from uuid import UUID

from outbox.model.lease import Holder, Lease, Partition
from outbox.model.verdict import DONE, Verdict
from outbox.worker.hung import HungCalls
from outbox.worker.policy import HandlerPolicy
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
    """A call that was left behind. `arrived`: so many of its messages. `counts`: what its answer does when it comes
    back: it settles parked rows, what was accepted is known, or nothing.

    `over`: it has come back; `answered`: with verdicts.
    """

    ids: tuple[int, ...]
    arrived: int = 0
    counts: Literal["now", "known", "never"] = "now"
    over: bool = False
    answered: bool = False


class Process(NamedTuple):
    """`lease`: that of its last worker; `works`: it has not lost it, as far as it knows.

    `known`: messages that were accepted and not settled, over all its leases. `done`, `parks`: what its worker has
    done, and is about to park, with the next settle.
    """

    lease: Lease | None = None
    works: bool = False
    calls: tuple[Left, ...] = ()
    known: frozenset[int] = frozenset()
    done: tuple[int, ...] = ()
    parks: tuple[int, ...] = ()


class Troubles(NamedTuple):
    """How many of each may still happen. `happened`: something has."""

    hangs: int = 0
    lapses: int = 0
    losses: int = 0
    happened: bool = False


class State(NamedTuple):
    """Everything. `settled`: so many messages of the log; `parked`: those of them that wait."""

    lease: LeaseRow
    settled: int
    parked: tuple[int, ...]
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
        return State(LeaseRow(), 0, (), (Process(),) * self._processes, Arrived(), self._troubles)

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
        lost = set(range(state.arrived.newest + 1, state.settled + 1)).difference(state.parked)
        return f"lost: message {min(lost)} is settled and was never sent" if lost else state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        number = len(self._log)
        if state.arrived != (number, number):
            return f"order: the key ends with message {state.arrived.last} (the newest was {state.arrived.newest})"
        return None if (state.settled, state.parked) == (number, ()) else "stuck: not everything is settled"

    # The rules, which twins break

    def taken(self, hung: HungCalls, lease: Lease) -> None:
        """Note that a process took the lease."""
        hung.taken(lease)

    def held(self, hung: HungCalls) -> set[str | None]:
        """Return the keys that are not to be sent, because calls with their messages hang."""
        return set(hung.held(ordered=True).keys)

    def parks(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return which messages are parked with a call that hangs: its own, and what is behind them in the batch."""
        return _numbers(messages)

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
        if process.done or process.parks:
            settled = _settled(state, process.done, process.parks)
            yield self._if_held(state, number, process, said, settled, process._replace(done=(), parks=()))
            return
        hung, calls = self._hung(process)
        late = hung.come_back(process.lease, HandlerPolicy())  # type: ignore[arg-type]  # it works, so it has one
        process = self._remember(process, hung, calls)
        if late:
            settled = _settled(state, [message.id or 0 for call in late for message, _ in call.answers])
            for call in late:
                hung.settled(call)
            yield self._if_held(state, number, process, said, settled, self._remember(process, hung, calls))
            return
        called = bool(self.held(hung) & {"a"})
        rows = tuple(self._log[id - 1] for id in state.parked[:2])
        pending = self._log[state.settled : state.settled + 2]
        if rows and not called:
            yield from self._hand_over(state, number, process, rows, said)
        if pending and (called or rows):
            parked = _with(state, number, process._replace(parks=_numbers(pending)))
            yield f"{said} reads {_ids(pending)}, which is behind", parked
        elif pending:
            yield from self._hand_over(state, number, process, pending, said)

    def _if_held(
        self, state: State, number: int, process: Process, said: str, settled: State, after: Process
    ) -> tuple[str, State]:
        """Return what comes of a settle: nothing of it, if somebody else has the lease."""
        if rules.held(state.lease, _epoch(process), same_server=True):
            return f"{said} settles", _with(settled, number, after)
        return f"{said} cannot settle", _with(state, number, self._dropped(state, process))

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
        if not (process.done or process.parks) and not self._has_lease(state, process):
            yield f"{said} finds that its lease is lost", _with(state, number, self._dropped(state, process))

    def _dropped(self, state: State, process: Process) -> Process:
        """Return a process without its worker; what was done and is not settled stays known."""
        hung, calls = self._hung(process)
        if process.lease is not None:
            hung.note(process.lease, _messages([self._log[id - 1] for id in process.done]))
        return self._remember(process, hung, calls)._replace(works=False, done=(), parks=())

    def _hand_over(
        self, state: State, number: int, process: Process, messages: tuple[Message, ...], said: str
    ) -> Moves[State]:
        """Hand messages over, those of the log or parked ones, unless they are known to be done."""
        hung, _ = self._hung(process)
        known: Any = hung.known.among(_messages(messages), ordered=True)[0]
        if known:
            done = process._replace(done=_numbers(known))
            yield f"{said} knows that {_ids(known)} is done", _with(state, number, done)
            return
        if not (self._has_lease(state, process) and state.lease.until == GOOD):
            yield f"{said} has too little left of its lease", _with(state, number, self._dropped(state, process))
            return
        for number_sent in range(1, len(messages) + 1):
            yield from self._send(state, number, process, messages, number_sent, said)

    def _send(
        self, state: State, number: int, process: Process, batch: tuple[Message, ...], most: int, said: str
    ) -> Moves[State]:
        hung, calls = self._hung(process)
        messages = batch[:most]
        hung.known.hand_over(_messages(messages), ordered=True)
        after = self._remember(process, hung, calls)
        sent = _arrive(state, messages)
        yield f"{said} sends {_ids(messages)}", _with(sent, number, after._replace(done=_numbers(messages)))
        if state.troubles.hangs:
            troubles = state.troubles._replace(hangs=state.troubles.hangs - 1, happened=True)
            left = Left(_numbers(messages), 0 if self._late else len(messages))
            hangs = (state if self._late else sent)._replace(troubles=troubles)
            left_behind = after._replace(calls=(*after.calls, left), parks=self.parks(batch))
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
        hung = HungCalls()
        calls = [Call([self._log[id - 1] for id in left.ids], left) for left in process.calls]
        if process.lease is not None:
            earlier = replace(process.lease, epoch=process.lease.epoch - 1)
            for lease, counts in ((earlier, "known"), (process.lease, "now")):
                hung.taken(lease)
                for left, call in zip(process.calls, calls, strict=True):
                    if left.counts == counts:
                        hung.add(_call(call), lease)
        for left, call in zip(process.calls, calls, strict=True):
            if left.counts == "never":
                hung.add(_call(call))
        hung.known.note(_messages([self._log[id - 1] for id in process.known]))
        return hung, calls

    def _remember(self, process: Process, hung: HungCalls, calls: list[Call]) -> Process:
        """Return the process with what its hung calls are by now."""
        known = frozenset(id or 0 for id in hung.known.ids(_messages(self._log)))
        left = list[Left]()
        for each, call in zip(process.calls, calls, strict=True):
            if _call(call) in hung._calls:
                lease = hung._calls[_call(call)]
                left.append(
                    each._replace(counts="never" if lease is None else "now" if lease == hung._lease else "known")
                )
        return process._replace(known=known, calls=tuple(left))


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


def _numbers(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(message.id for message in messages)


def _ids(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.id) for message in messages)


def _settled(state: State, done: Sequence[int], parks: Sequence[int] = ()) -> State:
    """Return what is settled with these: they are done, or parked."""
    parked = tuple(sorted({*state.parked, *parks}.difference(done)))
    return state._replace(settled=max(state.settled, *done, *parks, 0), parked=parked)


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
        """Take it as if nobody had had it in between."""
        with patch.object(Lease, "follows", lambda *_: True):
            hung.taken(lease)


class SendsBesideHungCalls(Answering):
    """Holds no keys of calls that hang."""

    def held(self, hung: HungCalls) -> set[str | None]:
        """Hold nothing."""
        return set()


class PassesWhatHangs(Answering):
    """Parks nothing with a call that hangs, and lets the position pass."""

    def parks(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Park only what is behind."""
        return _numbers(messages[1:])

"""Direct sends: the writer sends a message itself right after its commit, and a compensation sends what is left behind.

The writer has a right to send for a while, and says with an ack what it has sent. The compensation begins after its
grace, and skips what has an ack. Time goes in steps; a call takes one at most, and so does the ack, unless they hang.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.model import rules
from tests.model.explorer import Moves
from tests.model.rules import AckRow

#: From the commit to when the compensation begins, and how long a call and an ack may take.
GRACE, CALL, ACK = 4, 1, 1


class Sending(NamedTuple):
    """A message in the hands of its writer. `since`: when its call began, or came back."""

    at: Literal["queued", "called", "sent", "acked", "left"] = "queued"
    since: int = 0


class State(NamedTuple):
    """Everything; all messages are committed at the moment 0. `acks`: what the writers have noted.

    `passed`: the messages that the compensation is done with; `looked`: what it is about to send, having read the acks.
    """

    writers: tuple[Sending, ...]
    now: int = 0
    acks: frozenset[AckRow] = frozenset()
    passed: bool = False
    looked: frozenset[int] | None = None
    arrived: tuple[int, ...] = ()
    faults: int = 0
    happened: bool = False


class Directing:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, messages: int, *, faults: int = 0) -> None:
        """`faults`: so often a writer dies, or its call or its ack hangs."""
        self._first = State((Sending(),) * messages, arrived=(0,) * messages, faults=faults)

    def start(self) -> State:
        """Return the state in which all messages are committed."""
        return self._first

    def moves(self, state: State) -> Moves[State]:
        """Return every step of a writer, of the compensation, and of time."""
        if state.now <= GRACE + CALL + ACK:
            in_time = all(state.now < each.since + _ALLOWED[each.at] for each in state.writers if each.at in _ALLOWED)
            later = state._replace(now=state.now + 1)
            if in_time:
                yield f"it is {later.now}", later
            elif state.faults:
                yield f"it is {later.now}, and a writer hangs", _fault(later)
        for number, writer in enumerate(state.writers):
            yield from self._send(state, number, writer)
        if self.begins(state) and not state.passed:
            yield from self._compensate(state)

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        twice = [number for number, times in enumerate(state.arrived, 1) if times > 1]
        return f"repeated without a failure: message {twice[0]}" if twice and not state.happened else None

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        missing = [number for number, times in enumerate(state.arrived, 1) if not times]
        return f"lost: message {missing[0]} was never sent" if missing else None

    # The rules, which twins break

    def may_send(self, state: State) -> bool:
        """Return whether a writer may begin a call: it and its ack end before the compensation begins."""
        return state.now + CALL + ACK < GRACE

    def begins(self, state: State) -> bool:
        """Return whether the messages are so old that the compensation handles them."""
        return state.now >= GRACE

    def sent(self, state: State) -> set[int]:
        """Return which messages have acks."""
        ids = range(1, len(state.writers) + 1)
        return rules.sent_by_writers(state.acks, dict.fromkeys(ids, 0), ids)

    # The steps

    def _send(self, state: State, number: int, writer: Sending) -> Moves[State]:
        said = f"the writer of message {number + 1}"
        match writer.at:
            case "queued" if self.may_send(state):
                yield f"{said} begins to send it", _with(state, number, Sending("called", state.now))
            case "queued":
                yield f"{said} leaves it", _with(state, number, Sending("left"))
            case "called":
                yield f"{said} has sent it", _arrive(_with(state, number, Sending("sent", state.now)), {number + 1})
                yield f"{said} could not send it", _with(state, number, Sending("left"))
            case "sent":
                ack = AckRow(frozenset({number + 1}), 1)
                acked = _with(state, number, Sending("acked"))
                yield f"{said} notes that it is sent", acked._replace(acks=state.acks | {ack})
        if state.faults and writer.at in ("queued", "called", "sent"):
            yield f"{said} dies", _fault(_with(state, number, Sending("left")))

    def _compensate(self, state: State) -> Moves[State]:
        ids = set(range(1, len(state.writers) + 1))
        if state.looked is None:
            left = frozenset(ids - self.sent(state))
            said = ", ".join(map(str, sorted(left))) or "nothing"
            yield f"the compensation finds {said} left behind", state._replace(looked=left)
        else:
            done = _arrive(state, state.looked)._replace(looked=None, passed=True)
            yield "the compensation sends it, and settles", done
            if state.faults:
                again = _arrive(state, state.looked)._replace(looked=None)
                yield "the compensation sends it, and dies", _fault(again)


_ALLOWED = {"called": CALL, "sent": ACK}


def _with(state: State, number: int, writer: Sending) -> State:
    return state._replace(writers=(*state.writers[:number], writer, *state.writers[number + 1 :]))


def _fault(state: State) -> State:
    return state._replace(faults=state.faults - 1, happened=True)


def _arrive(state: State, ids: frozenset[int] | set[int]) -> State:
    return state._replace(arrived=tuple(times + (id in ids) for id, times in enumerate(state.arrived, 1)))


# Broken twins


class SendsLate(Directing):
    """Sends as long as it likes."""

    def may_send(self, state: State) -> bool:
        """Send."""
        return True


class NoGrace(Directing):
    """A compensation that begins at once."""

    def begins(self, state: State) -> bool:
        """Begin."""
        return True


class IgnoresAcks(Directing):
    """A compensation that sends everything."""

    def sent(self, state: State) -> set[int]:
        """Find nothing."""
        return set()

"""A transaction of half messages: those who send to it, and those who decide it, each on a connection of its own.

A step is a statement or a commit. The op is a row whose key only one can write; whoever meets a row that is not
committed waits for its end. Sends share a lock, and a verdict has it alone: it is granted as soon as nobody shares it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.model.explorer import Moves

Verdict = Literal["commit", "rollback"]
#: `word`: `commit()` or `rollback()`. `join`: a business transaction. `fence`: a checker that rolls back.
Kind = Literal["word", "join", "fence"]


class Sender(NamedTuple):
    """A message on its way: `begun`, `locked`, `inserted` and not committed, then `stored` or `refused`."""

    at: Literal["begun", "locked", "inserted", "stored", "refused"] = "begun"


class Decider(NamedTuple):
    """One who decides. `written`: its op is there and not committed. `waiting`: for those who share the lock.

    `left`: committed by a statement that nobody sees, so that nothing is restored yet. `done`: its verdict stands.
    `undone`: it was rolled back, or another verdict stands.
    """

    kind: Kind
    verdict: Verdict
    at: Literal["begun", "written", "waiting", "locked", "restored", "left", "done", "undone"] = "begun"
    #: What it has restored, and not committed.
    restored: frozenset[int] = frozenset()


class State(NamedTuple):
    """Everything. `halves` and `log`: the committed messages, by the number of their sender."""

    senders: tuple[Sender, ...]
    deciders: tuple[Decider, ...]
    op: Verdict | None = None
    halves: frozenset[int] = frozenset()
    log: frozenset[int] = frozenset()
    broken: str | None = None


class Deciding:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, senders: int, deciders: tuple[Decider, ...]) -> None:
        self._first = State((Sender(),) * senders, deciders)

    def start(self) -> State:
        """Return the state in which the transaction has no message and no verdict."""
        return self._first

    def moves(self, state: State) -> Moves[State]:
        """Return every step of a sender and of a decider."""
        for number, sender in enumerate(state.senders):
            yield from self._send(state, number, sender)
        for number, decider in enumerate(state.deciders):
            yield from self._decide(state, number, decider)

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        if state.op == "rollback" and state.log:
            return "phantom: a message of a transaction that is rolled back is in the log"
        return state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        for decider in state.deciders:
            if decider.at not in ("done", "undone"):
                return f"stuck: a {decider.kind} waits for ever"
        for number, sender in enumerate(state.senders):
            if sender.at not in ("stored", "refused"):
                return "stuck: a send waits for ever"
            if sender.at == "stored" and state.op == "commit" and number not in state.log:
                return f"lost: message {number + 1} was stored, its transaction is committed, and it is not in the log"
        return None if state.op else "no verdict at rest"

    # The rules, which twins break

    def shares(self, state: State) -> bool:
        """Return whether a send holds the lock."""
        return any(sender.at in ("locked", "inserted") for sender in state.senders)

    def may_share(self, state: State) -> bool:
        """Return whether a send gets the lock: nobody has it alone, or waits to have it."""
        return all(decider.at not in ("waiting", "locked", "restored") for decider in state.deciders)

    def may_write(self, state: State, decider: Decider) -> bool:
        """Return whether the row of the op can be written: nobody has written one and not ended."""
        return all(other.at not in ("written", "waiting", "locked", "restored") for other in state.deciders)

    def writes(self, state: State, decider: Decider) -> bool:
        """Return whether a statement that writes the op finds none."""
        return state.op is None

    def first_step(self, decider: Decider) -> Literal["written", "waiting"]:
        """Return what the first statement does: that of a business transaction, which may take long, locks nothing."""
        return "written" if decider.kind == "join" else "waiting"

    def seen(self, state: State, decider: Decider) -> frozenset[int]:
        """Return the half messages that the statement sees which restores: all that are committed when it begins."""
        return state.halves

    # The steps

    def _send(self, state: State, number: int, sender: Sender) -> Moves[State]:
        name = f"send {number + 1}"
        match sender.at:
            case "begun" if self.may_share(state):
                yield f"{name} shares the lock", self._sent(state, number, "locked")
            case "locked" if state.op is None:
                yield f"{name} inserts", self._sent(state, number, "inserted")
            case "locked":
                yield f"{name} is refused", self._sent(state, number, "refused")
            case "inserted":
                committed = state._replace(halves=state.halves | {number})
                yield f"{name} commits", self._sent(committed, number, "stored")

    def _sent(self, state: State, number: int, at: str) -> State:
        senders = (*state.senders[:number], Sender(at), *state.senders[number + 1 :])  # type: ignore[arg-type]
        return self._granted(state._replace(senders=senders))

    def _granted(self, state: State) -> State:
        """Grant the lock to one who waits for it, as soon as nobody shares it."""
        if self.shares(state):
            return state
        deciders = tuple(
            each._replace(at="locked", restored=self.seen(state, each)) if each.at == "waiting" else each
            for each in state.deciders
        )
        return state._replace(deciders=deciders)

    def _decide(self, state: State, number: int, decider: Decider) -> Moves[State]:
        name = f"{decider.kind} {decider.verdict}"
        match decider.at:
            case "begun" if self.may_write(state, decider):
                if self.writes(state, decider):
                    yield f"{name} writes its op", self._at(state, number, self.first_step(decider))
                else:
                    yield f"{name} finds that {state.op} stands", self._at(state, number, "undone")
            case "written":
                yield f"{name} asks for the lock, to restore", self._at(state, number, "waiting")
                yield f"{name} is rolled back", self._at(state, number, "undone")
                left = self._at(state, number, "left")._replace(op=decider.verdict)
                yield f"{name} commits, and no hook sees it", left
            case "left":
                # What is missing is restored in a transaction of its own.
                yield f"{name} asks for the lock, to restore what is missing", self._at(state, number, "waiting")
            case "locked" if decider.verdict == "rollback":
                yield f"{name} commits", self._ended(state, number, decider, frozenset())
            case "locked":
                restored = decider._replace(at="restored", restored=self.seen(state, decider) - state.log)
                yield f"{name} restores {len(restored.restored)}", self._with(state, number, restored)
            case "restored":
                yield f"{name} commits", self._ended(state, number, decider, decider.restored)

    def _ended(self, state: State, number: int, decider: Decider, restored: frozenset[int]) -> State:
        broken = state.broken
        if state.op not in (None, decider.verdict):
            broken = f"two verdicts: {decider.verdict} after {state.op}"
        ended = self._at(state, number, "done")
        return ended._replace(op=decider.verdict, log=state.log | restored, broken=broken)

    def _at(self, state: State, number: int, at: str) -> State:
        return self._with(state, number, state.deciders[number]._replace(at=at))  # type: ignore[arg-type]

    def _with(self, state: State, number: int, decider: Decider) -> State:
        deciders = (*state.deciders[:number], decider, *state.deciders[number + 1 :])
        return self._granted(state._replace(deciders=deciders))


# Broken twins


class NoLock(Deciding):
    """Sends and verdicts do not wait for each other."""

    def shares(self, state: State) -> bool:
        """Nobody does."""
        return False

    def may_share(self, state: State) -> bool:
        """Go on."""
        return True


class OneStatement(Deciding):
    """Takes the lock in the statement that restores, which sees what was committed before the wait."""

    def _at(self, state: State, number: int, at: str) -> State:
        decider = state.deciders[number]._replace(at=at)  # type: ignore[arg-type]
        return self._with(state, number, decider._replace(restored=state.halves) if at == "waiting" else decider)

    def _granted(self, state: State) -> State:
        if self.shares(state):
            return state
        deciders = tuple(each._replace(at="locked") if each.at == "waiting" else each for each in state.deciders)
        return state._replace(deciders=deciders)

    def seen(self, state: State, decider: Decider) -> frozenset[int]:
        """Return what was there when the statement began."""
        return decider.restored


class LastVerdictStands(Deciding):
    """Writes over the op that stands."""

    def writes(self, state: State, decider: Decider) -> bool:
        """Write."""
        return True


class FenceLooks(Deciding):
    """A checker that looks for an op and rolls back where it sees none; it waits for no row that is not committed."""

    def may_write(self, state: State, decider: Decider) -> bool:
        """Go on."""
        return decider.kind == "fence" or super().may_write(state, decider)

"""The check-back of a transaction: one whose producer gave no verdict gets one, by the way in which it was begun.

`join`: the op is the first statement of the business transaction. `record`: a record in another database takes the
place of the op there, and the word follows. `listener`: the word follows the business transaction,
and the application is asked what became of it. The producer may die at any step.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.model import rules
from tests.model.explorer import Moves

Way = Literal["join", "record", "listener"]
Verdict = Literal["commit", "rollback"]
ROLLBACK: Verdict = "rollback"


class State(NamedTuple):
    """Everything. `op` and `record`: what is committed. `writes`: the business transaction has written its own.

    `log`: whether the messages were delivered. `immune`: the checker does not ask yet. `answer`: what the checker has
    found out.
    """

    business: Literal["none", "open", "committed", "undone"] = "none"
    writes: bool = False
    alive: bool = True
    op: Verdict | None = None
    record: Verdict | None = None
    log: bool = False
    immune: bool = True
    answer: Verdict | None = None
    broken: str | None = None


class Checking:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, way: Way) -> None:
        self._way = way

    def start(self) -> State:
        """Return the state in which the half message is stored, and nothing else has happened."""
        return State()

    def moves(self, state: State) -> Moves[State]:
        """Return every step of the producer, of the checker and of time."""
        if state.alive:
            yield from self._produce(state)
            died = state._replace(alive=False, writes=False)
            if state.business in ("none", "open"):
                died = died._replace(business="undone")
            yield "the producer dies", died
        if state.immune:
            yield "the immunity is over", state._replace(immune=False)
        if not state.immune and state.op is None:
            yield from self._check(state)

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        if state.log and state.business != "committed":
            return f"phantom: delivered, and the business transaction is {state.business}"
        if state.op == "rollback" and state.business == "committed":
            return "lost: rolled back, and the business transaction is committed"
        return state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        if state.op is None:
            return "stuck: no verdict"
        committed = state.business == "committed"
        return None if state.log == committed else f"lost: the business transaction is {state.business}"

    # The rules, which twins break

    def fences(self, state: State) -> Verdict | None:
        """Return what a checker finds that writes a rollback where a business transaction would write; None: it waits.

        It meets the row of a transaction that is under way, and then asks again later.
        """
        if state.writes:
            return None
        stands: Verdict | None = state.record if self._way == "record" else state.op
        return rules.decided(stands, ROLLBACK)[0]

    def fenced(self, state: State, found: Verdict) -> State:
        """Write the fence."""
        return state._replace(record=found, answer=found) if self._way == "record" else state._replace(answer=found)

    def asks(self, state: State) -> Verdict | None:
        """Return what the application says of its transaction; None: unknown, as long as it is under way."""
        answers: dict[str, Verdict | None] = {"committed": "commit", "undone": "rollback"}
        return answers.get(state.business)

    # The steps

    def _produce(self, state: State) -> Moves[State]:
        match state.business, self._way:
            case "none", "join":
                if rules.decided(state.op, "commit")[1]:
                    yield "the business transaction begins with its op", state._replace(business="open", writes=True)
                else:
                    yield "the business transaction finds the fence", state._replace(business="undone")
            case "none", _:
                yield "the business transaction begins", state._replace(business="open")
            case "open", "listener":
                yield "the business transaction commits", state._replace(business="committed")
                yield "the business transaction rolls back", state._replace(business="undone")
            case "open", _:
                yield from self._end(state)
            case "committed", "record" | "listener":
                yield "the producer gives its word", self._decided(state, "commit")
            case "undone", _ if state.op is None:
                yield "the producer gives its word", self._decided(state, "rollback")

    def _end(self, state: State) -> Moves[State]:
        yield "the business transaction rolls back", state._replace(business="undone", writes=False)
        if not state.writes:
            if rules.decided(state.record, "commit")[1]:
                yield "the business transaction writes its record", state._replace(writes=True)
            else:
                yield "the business transaction finds the fence", state._replace(business="undone")
        elif self._way == "record":
            done = state._replace(business="committed", writes=False, record="commit")
            yield "the business transaction commits", done
        else:
            done = state._replace(business="committed", writes=False)
            yield "the business transaction commits", self._decided(done, "commit")

    def _check(self, state: State) -> Moves[State]:
        if state.answer is not None:
            yield f"the checker writes {state.answer}", self._decided(state, state.answer)
            yield "the checker dies, and begins again", state._replace(answer=None)
            return
        if self._way == "listener":
            answer = self.asks(state)
            if answer is not None:
                yield f"the application says {answer}", state._replace(answer=answer)
            return
        if self._way == "record" and state.record is not None:
            yield f"the checker reads the record {state.record}", state._replace(answer=state.record)
            return
        found = self.fences(state)
        if found is not None and self._way == "record":
            yield "the checker fences in the business database", self.fenced(state, found)
        elif found is not None:
            # The fence is the op itself.
            yield "the checker fences", self._decided(state, found)

    def _decided(self, state: State, verdict: Verdict) -> State:
        op, first = rules.decided(state.op, verdict)
        log = state.log or (first and op == "commit")
        broken = state.broken or (None if op == verdict else f"two verdicts: {verdict} after {op}")
        return state._replace(op=op, log=log, answer=None, broken=broken)


# Broken twins


class AbsentIsRollback(Checking):
    """An application that takes a transaction it does not see for one that was rolled back."""

    def asks(self, state: State) -> Verdict | None:
        """Look at what is committed."""
        return "commit" if state.business == "committed" else "rollback"


class FencesWithoutRecord(Checking):
    """Rolls back where it sees no record, and leaves none."""

    def fences(self, state: State) -> Verdict | None:
        """Look at what is committed."""
        return rules.decided(state.record, ROLLBACK)[0]

    def fenced(self, state: State, found: Verdict) -> State:
        """Write nothing."""
        return state._replace(answer=found)

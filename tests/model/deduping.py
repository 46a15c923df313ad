"""Messages that are written once, by a dedup key, and messages that are handled once, by their id and their consumer.

A statement that meets a row which is not committed waits for the end of its transaction. An answer to a COMMIT may be
lost, whether it has happened or not; and what may not have happened is tried again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.model import rules
from tests.model.explorer import Moves, apart
from tests.model.rules import DedupRow, Handled

#: For how long a dedup key counts; the clock moves by one.
WINDOW = 1


class Writer(NamedTuple):
    """One who writes a message under the dedup key. `claims`: what its transaction has written there, uncommitted.

    `message`: what its transaction writes; 0: a repetition. `told`: the id that its `send` has returned.
    """

    at: Literal["begun", "looked", "claimed", "done"] = "begun"
    claims: DedupRow | None = None
    message: int = 0
    told: int = 0
    tries: int = 1


class Written(NamedTuple):
    """Everything. `drawn`: so many message ids; `log`: those of the committed messages; `told`: what `send` returned,
    of transactions that were committed.
    """

    writers: tuple[Writer, ...]
    key: DedupRow | None = None
    drawn: int = 0
    log: frozenset[int] = frozenset()
    told: frozenset[int] = frozenset()
    now: int = 0
    clock: int = 0


class Deduping:
    """The world of writers. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, writers: int, *, tries: int = 2, clock: int = 0) -> None:
        """`tries`: how often one tries whose answer is lost. `clock`: so often the time passes that a key counts."""
        self._first = Written((Writer(tries=tries),) * writers, clock=clock)

    def start(self) -> Written:
        """Return the state in which nothing is written."""
        return self._first

    def moves(self, state: Written) -> Moves[Written]:
        """Return every step of a writer, and of time."""
        for number in apart(state.writers):
            yield from self._write(state, number, state.writers[number])
        if state.clock and state.key is not None and state.key.expires_at > state.now:
            yield "the key expires", state._replace(clock=state.clock - 1, now=state.now + WINDOW)

    def wrong(self, state: Written) -> str | None:
        """Return which promise is broken."""
        most = 1 + self._first.clock - state.clock
        if len(state.log) > most:
            return f"written twice: messages {sorted(state.log)} within one window"
        return "lost: a send returned the id of a message that is not there" if state.told - state.log else None

    def wrong_at_rest(self, state: Written) -> str | None:
        """Return what is missing when nothing can happen any more."""
        if any(writer.at != "done" for writer in state.writers):
            return "stuck: a writer waits for ever"
        return None

    # The rules, which twins break

    def claims(self, state: Written, number: int, message: int) -> DedupRow | None:
        """Return the row after a claim; None: it has to wait for another transaction."""
        if any(writer.claims is not None for other, writer in enumerate(state.writers) if other != number):
            return None
        return rules.claimed(state.key, message, state.now, WINDOW)

    # The steps

    def _write(self, state: Written, number: int, writer: Writer) -> Moves[Written]:
        name = f"writer {number + 1}"
        if writer.at == "begun":
            message = state.drawn + 1
            row = self.claims(state, number, message)
            if row is None:
                return
            drawn = state._replace(drawn=message)
            if row.message_id == message:
                claimed = writer._replace(at="claimed", claims=row, message=message, told=message)
                yield f"{name} claims the key for message {message}", _with(drawn, number, claimed)
            else:
                repeats = writer._replace(at="claimed", message=0, told=row.message_id)
                yield f"{name} is told message {row.message_id}", _with(drawn, number, repeats)
            return
        if writer.at == "claimed":
            done = _with(self._committed(state, writer), number, Writer("done"))
            undone = writer._replace(at="begun", claims=None, message=0, told=0, tries=writer.tries - 1)
            yield f"{name} commits", done
            yield f"{name} rolls back", _with(state, number, Writer("done"))
            if writer.tries > 1:
                lost = self._committed(state, writer)
                yield f"{name} commits, loses the answer, and tries again", _with(lost, number, undone)
                yield f"{name} loses its connection, and tries again", _with(state, number, undone)

    def _committed(self, state: Written, writer: Writer) -> Written:
        told = state.told | {writer.told}
        if writer.claims is None:
            return state._replace(told=told)
        return state._replace(key=writer.claims, log=state.log | {writer.message}, told=told)


def _with(state: Written, number: int, writer: Writer) -> Written:
    return state._replace(writers=(*state.writers[:number], writer, *state.writers[number + 1 :]))


class Handler(NamedTuple):
    """A delivery of a message to a consumer, which handles it in a transaction of its own.

    `first`: whether the inbox did not know it.
    """

    consumer: str
    message: int
    at: Literal["delivered", "noted", "done"] = "delivered"
    first: bool = False


class Consumed(NamedTuple):
    """Everything. `effects`: how often each consumer's work on a message was committed."""

    handlers: tuple[Handler, ...]
    inbox: Handled = frozenset()
    effects: tuple[tuple[tuple[str, int], int], ...] = ()
    crashes: int = 0


class Consuming:
    """The world of consumers. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, consumers: tuple[str, ...], *, messages: int = 1, deliveries: int = 2, crashes: int = 1) -> None:
        """`deliveries`: how often each message comes to each consumer, at the same time. One that fails comes again."""
        numbers = range(1, messages + 1)
        self._wanted = {(consumer, message): 1 for consumer in consumers for message in numbers}
        handlers = tuple(Handler(*each) for each in self._wanted for _ in range(deliveries))
        self._first = Consumed(handlers, crashes=crashes)

    def start(self) -> Consumed:
        """Return the state in which everything is delivered and nothing handled."""
        return self._first

    def moves(self, state: Consumed) -> Moves[Consumed]:
        """Return every step of a handler."""
        for number in apart(state.handlers):
            handler = state.handlers[number]
            said = f"{handler.consumer} with message {handler.message}"
            if handler.at == "delivered" and self.may_note(state, handler):
                inbox, first = self.noted(state.inbox, handler)
                noted = handler._replace(at="noted", first=first)
                after = _handled(state, number, noted)
                known = "for the first time" if first else "again"
                yield f"{said} notes it {known}", self.notes(after, inbox)
            if handler.at == "noted":
                inbox, _ = self.noted(state.inbox, handler)
                after = _handled(state, number, handler._replace(at="done"))
                effects = dict(state.effects)
                if handler.first:
                    key = (handler.consumer, handler.message)
                    effects[key] = effects.get(key, 0) + 1
                yield f"{said} commits", after._replace(inbox=inbox, effects=tuple(sorted(effects.items())))
                if state.crashes:
                    again = handler._replace(at="delivered", first=False)
                    yield f"{said} crashes", _handled(state, number, again)._replace(crashes=state.crashes - 1)

    def wrong(self, state: Consumed) -> str | None:
        """Return which promise is broken."""
        twice = [key for key, times in state.effects if times > 1]
        return f"handled twice: message {twice[0][1]} by {twice[0][0]}" if twice else None

    def wrong_at_rest(self, state: Consumed) -> str | None:
        """Return what is missing when nothing can happen any more."""
        if any(handler.at != "done" for handler in state.handlers):
            return "stuck: a handler waits for ever"
        missing = sorted(set(self._wanted) - {key for key, _ in state.effects})
        return f"lost: {missing[0][0]} has not handled message {missing[0][1]}" if missing else None

    # The rules, which twins break

    def noted(self, inbox: Handled, handler: Handler) -> tuple[Handled, bool]:
        """Return the inbox after a note, and whether this was the first one."""
        return rules.noted(inbox, handler.consumer, handler.message)

    def may_note(self, state: Consumed, handler: Handler) -> bool:
        """Return whether a note meets no row of a transaction that is under way."""
        return all(not (other.at == "noted" and other.first and self._same(other, handler)) for other in state.handlers)

    def notes(self, state: Consumed, inbox: Handled) -> Consumed:
        """Write the note: it counts when the transaction of the work commits."""
        return state

    def _same(self, one: Handler, other: Handler) -> bool:
        return (one.consumer, one.message) == (other.consumer, other.message)


def _handled(state: Consumed, number: int, handler: Handler) -> Consumed:
    return state._replace(handlers=(*state.handlers[:number], handler, *state.handlers[number + 1 :]))


# Broken twins


class LooksThenWrites(Deduping):
    """Looks for the key, and writes where it sees none; waits for nobody."""

    def claims(self, state: Written, number: int, message: int) -> DedupRow | None:
        """Look at what is committed."""
        return rules.claimed(state.key, message, state.now, WINDOW)


class ByIdAlone(Consuming):
    """Notes messages by their id, whoever the consumer is."""

    def noted(self, inbox: Handled, handler: Handler) -> tuple[Handled, bool]:
        """Note it for everybody."""
        return rules.noted(inbox, "everybody", handler.message)


class NotesBefore(Consuming):
    """Notes a message in a transaction of its own, before the work."""

    def notes(self, state: Consumed, inbox: Handled) -> Consumed:
        """Commit the note."""
        return state._replace(inbox=inbox)

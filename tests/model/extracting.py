"""An extract: it reads window after window, and keeps its position outside of the database, beside what it has read.

So the position has to be good for ever: a server that crashes must not give numbers out again that the position counts
as settled. Positions and windows are the library's own.
"""

from __future__ import annotations

from typing import NamedTuple

from outbox.model.position import EARLIEST, Position, Window
from tests.model.explorer import Moves, apart
from tests.model.relaying import Writer, write
from tests.model.server import Row, Server


class State(NamedTuple):
    """Everything. `offset`: up to where the extract has read. `captured`: where its next window ends, as it hopes.

    `got`: the messages that it has read, each the `nth` of its key.
    """

    server: Server
    writers: tuple[Writer, ...]
    offset: Position = EARLIEST
    captured: Position | None = None
    got: frozenset[tuple[str, int]] = frozenset()
    crashes: int = 0
    broken: str | None = None


class Extracting:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    def __init__(self, writers: tuple[tuple[str, ...], ...], *, crashes: int = 0) -> None:
        """`writers`: the key of each of their transactions."""
        self._first = State(Server(), tuple(Writer(keys) for keys in writers), crashes=crashes)

    def start(self) -> State:
        """Return the state in which nothing has happened."""
        return self._first

    def moves(self, state: State) -> Moves[State]:
        """Return every step of a writer, of the extract, and of the server."""
        for number in apart(state.writers):
            yield from write(state, number, state.writers[number])
        if state.captured is None:
            position = self.capture(state.server)
            if position != state.offset and position.head >= state.offset.head:
                yield f"the extract captures {position}", state._replace(captured=position)
        else:
            if not self.flushed(state.server, state.captured):
                yield "the server flushes its log", state._replace(server=state.server.flush())
            else:
                yield from self._read(state, Window(state.offset, state.captured))
        if state.crashes:
            writers = tuple(Writer(writer.left[1:]) if writer.xid else writer for writer in state.writers)
            yield (
                "the server crashes and recovers",
                state._replace(server=state.server.crash(), writers=writers, captured=None, crashes=state.crashes - 1),
            )

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        return state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        missing = {(row.key, row.nth) for row in state.server.rows} - state.got
        return f"lost: the extract misses message {min(missing)[1]} of {min(missing)[0]}" if missing else None

    # The rules, which twins break

    def capture(self, server: Server) -> Position:
        """Return the position of now."""
        return server.position()

    def flushed(self, server: Server, position: Position) -> bool:
        """Return whether no crash can make the server give out a number that the position has seen."""
        return server.flushed[0] >= position.head

    # The steps

    def _read(self, state: State, window: Window) -> Moves[State]:
        rows = [row for row in state.server.rows if window.holds(row.xid)]
        got = frozenset((row.key, row.nth) for row in rows)
        twice = sorted(got & state.got)
        broken = f"extracted twice: message {twice[0][1]} of {twice[0][0]}" if twice else state.broken
        yield (
            f"the extract reads {_said(rows)}",
            state._replace(offset=window.target, captured=None, got=state.got | got, broken=broken),
        )


def _said(rows: list[Row]) -> str:
    return ", ".join(f"{row.key}{row.nth}" for row in rows) or "a window without messages"


# Broken twins


class NotFlushed(Extracting):
    """Keeps a position at once, whatever a crash may still forget."""

    def flushed(self, server: Server, position: Position) -> bool:
        """Wait for nothing."""
        return True


class ExtractsOnStandby(Extracting):
    """Captures its positions on a standby, whose snapshots list no transaction that is under way."""

    def capture(self, server: Server) -> Position:
        """Return such a position."""
        return server._replace(open=()).position()

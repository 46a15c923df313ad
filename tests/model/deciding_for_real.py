"""A walk through the model of a transaction, on a real PostgreSQL: the library's own statements, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg
from sqlalchemy import Engine

from outbox.model.message import Message
from outbox.store.database import Database
from outbox.store.dialects.postgresql import drivers
from outbox.store.dialects.statements import Row, Script
from outbox.store.half_messages.half import Half, Halves
from outbox.store.half_messages.op import Ops
from tests.model.deciding import Decider, Sender, State

GROUP = "shop"
#: What a step may take that waits for nobody.
_SECONDS = 60


class Actor:
    """A script on a connection and a thread of its own."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url)
        self._execute = drivers.executor(self._connection)
        self._thread = ThreadPoolExecutor(1)
        self._script: Script[Any] | None = None
        self._waits: Future[Sequence[Row]] | None = None
        #: What the script has returned.
        self.result: Any = None

    def begin(self, script: Script[Any]) -> None:
        """Begin a script, and its first statement."""
        self._script, self.result = script, None
        self._go_on(None)

    def _go_on(self, rows: Sequence[Row] | None) -> None:
        assert self._script is not None
        try:
            statement = next(self._script) if rows is None else self._script.send(rows)
        except StopIteration as end:
            self._script, self.result = None, end.value
        else:
            self._waits = self._thread.submit(self._execute, statement)

    def step(self) -> None:
        """Wait for the statement under way, and begin the next one."""
        assert self._waits is not None
        rows, self._waits = self._waits.result(_SECONDS), None
        self._go_on(rows)

    def finish(self) -> Any:
        """Perform what is left of the script, and return its result."""
        while self._script is not None:
            self.step()
        return self.result

    @property
    def waits(self) -> bool:
        """Whether a statement is under way."""
        return self._waits is not None and not self._waits.done()

    def arrive(self) -> None:
        """Wait until the statement under way is over, without a next one."""
        assert self._waits is not None
        self._waits.result(_SECONDS)

    def commit(self) -> None:
        """Commit."""
        self._connection.commit()

    def roll_back(self) -> None:
        """Roll back."""
        self._connection.rollback()

    def close(self) -> None:
        """End the thread and the connection."""
        self._connection.cancel()
        self._thread.shutdown()
        self._connection.close()


class Replay:
    """A transaction with one half message more than that of the model, because without any nothing can be decided."""

    def __init__(self, engine: Engine, transaction: str, start: State, stack: ExitStack) -> None:
        database = Database(engine)
        self._halves, self._ops = Halves(database), Ops(database)
        self._transaction = transaction
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._senders, self._deciders = (
            [stack.enter_context(closing(Actor(url))) for _ in actors] for actors in (start.senders, start.deciders)
        )
        first = stack.enter_context(closing(Actor(url)))
        first.begin(self._send("first"))
        first.finish()
        first.commit()

    def step(self, before: State, after: State) -> None:
        """Do what leads from one state to the other; the one who acts first, then those who were waiting."""
        for number, (was, sender) in enumerate(zip(before.senders, after.senders, strict=True)):
            if was != sender:
                self._sends(self._senders[number], number, sender)
        for number, (one, decider) in enumerate(zip(before.deciders, after.deciders, strict=True)):
            if one.at != decider.at:
                self._decides(self._deciders[number], one, decider)
            if decider.at == "waiting":
                assert self._deciders[number].waits, f"the {decider.kind} does not wait for those who send"

    def _send(self, body: str) -> Script[int | None]:
        half = Half(transaction=self._transaction, group=GROUP, way="listener")
        return self._halves.append(half, Message("orders", body), 0, "{}")

    def _sends(self, actor: Actor, number: int, sender: Sender) -> None:
        match sender.at:
            case "locked":
                actor.begin(self._send(str(number)))
                actor.arrive()
            case "inserted" | "refused":
                stored = actor.finish()
                assert (stored is None) == (sender.at == "refused"), f"send {number + 1} is not {sender.at}"
                if stored is None:
                    actor.commit()
            case "stored":
                actor.commit()

    def _decides(self, actor: Actor, before: Decider, decider: Decider) -> None:
        if before.at in ("begun", "written", "left") and decider.at != "undone":
            self._begins(actor, before, decider)
        elif before.at == "begun":
            self._first(actor, decider)
            assert actor.finish().first is False
            actor.commit()
        elif decider.at == "undone":
            actor.roll_back()
        elif decider.at == "locked":
            actor.arrive()
        elif decider.at == "restored":
            restored = actor.finish()
            number = len(restored if isinstance(restored, frozenset) else restored.restored)
            # The message that the model does not have is restored by the first one who restores.
            assert number in (len(decider.restored), len(decider.restored) + 1)
        elif decider.at == "done":
            actor.finish()
            actor.commit()

    def _begins(self, actor: Actor, before: Decider, decider: Decider) -> None:
        if decider.at == "left":
            actor.commit()
            return
        if before.at == "begun":
            self._first(actor, decider)
        else:
            actor.begin(self._ops.restore(self._transaction))
        if decider.at == "written":
            assert actor.finish().first
        elif decider.at == "locked":
            actor.arrive()

    def _first(self, actor: Actor, decider: Decider) -> None:
        match decider.kind, decider.verdict:
            case "join", _:
                actor.begin(self._ops.join(self._transaction, by="test"))
            case _, "commit":
                actor.begin(self._ops.commit(self._transaction, by="test"))
            case _:
                actor.begin(self._ops.roll_back(self._transaction, by="test"))

"""Whose fault it is: a destination that goes away, or a message that crashes its handler. The handler is the library's.

The handler says no more than that a call failed. An outage must make no dead letter, and a message that always fails
must not stop the others. A state is what has been decided so far; the handler is stepped from the beginning for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from datetime import timedelta
from itertools import count
from typing import Literal, NamedTuple

from tenacity.wait import wait_fixed

from outbox.model.message import Message
from outbox.model.retry import RetryPolicy
from outbox.model.verdict import DONE, Unavailable
from outbox.worker.blame import Blame
from outbox.worker.calls import Call
from outbox.worker.policy import BEHIND, HandlerPolicy
from outbox.worker.refusals import Refusals
from tests.model import rules
from tests.model.explorer import Moves
from tests.model.handling import Handled, Handler, Item
from tests.model.rules import LogRow, Parked

#: A call of the handler takes no time here, and waits for nothing.
_SECONDS = timedelta(hours=1)
_POLICY = HandlerPolicy(retry=RetryPolicy(attempts=2, wait=wait_fixed(0)), deadline=_SECONDS)
_TOPIC = Item(0, None).topic
#: After so many calls nobody believes any more that it ends.
_ENDLESS = 30


class State(NamedTuple):
    """What has been decided, what may be decided next, and what came of it."""

    decided: tuple[str, ...]
    next: tuple[str, ...]
    arrived: tuple[int, ...]
    dead: frozenset[int]
    counted: frozenset[int]
    #: Messages behind a head that is not there.
    forgotten: frozenset[int]
    broken: str | None


class Blaming:
    """The world. A subclass that breaks one of its rules is a broken twin."""

    #: The most messages of a batch.
    rows = 3

    def __init__(
        self,
        *keys: str,
        poison: int | None = None,
        away: int = 0,
        says: Literal["nothing", "unavailable"] = "nothing",
    ) -> None:
        """`keys`: those of the messages. `poison`: this one crashes its handler. `away`: so many calls an outage may
        last, which begins at any time; `says`: whether the handler then raises, or says that nothing is accepted.
        """
        self.log = tuple(Item(id, key) for id, key in enumerate(keys, 1))
        self.poison, self.away, self.says = poison, away, says

    def start(self) -> State:
        """Return the state in which nothing is decided."""
        return self._play(())

    def moves(self, state: State) -> Moves[State]:
        """Return what may be decided next."""
        for choice in state.next:
            yield choice, self._play((*state.decided, choice))

    def wrong(self, state: State) -> str | None:
        """Return which promise is broken."""
        innocent = state.dead - {self.poison}
        if innocent:
            return f"dead: message {min(innocent)} has done nothing"
        innocent = state.counted - {self.poison}
        return f"an attempt of message {min(innocent)} was counted" if innocent else state.broken

    def wrong_at_rest(self, state: State) -> str | None:
        """Return what is missing when nothing can happen any more."""
        missing = {item.id for item in self.log} - set(state.arrived) - self.behind_poison
        if missing:
            return f"lost: at rest message {min(missing)} has not arrived"
        if state.forgotten:
            return f"lost: at rest message {min(state.forgotten)} waits for nothing"
        # To blame it the library has to see another message accepted after each of its failures.
        counted = self.away or self.poison in {None, *state.dead}
        return None if counted else "stuck: what always fails never becomes a dead letter"

    @property
    def behind_poison(self) -> set[int]:
        """The message that crashes its handler, and what waits behind it."""
        bad = next((item.key for item in self.log if item.id == self.poison), None)
        return {item.id for item in self.log if self.poison and item.key == bad and item.id >= self.poison}

    def blame(self) -> Blame | None:
        """Return what remembers which messages failed alone; None: the library's own. Twins have another one."""
        return None

    def advanced(self, rows: Parked, keys: Collection[str], now: int) -> Parked:
        """Return the rows after the first of each of these keys became a head; twins make none."""
        return rules.advanced(rows, keys, now)

    def due_again(self, now: int) -> int:
        """Return since when a message is due that was tried now; twins have another moment."""
        return now

    def refusals(self) -> Refusals:
        """Return what remembers what was tried in vain, where each pause is over at once; twins have another one."""
        return Refusals(count(0, 1000).__next__)

    def _play(self, decided: tuple[str, ...]) -> State:
        play = _Play(self)
        script = play.script()
        options = next(script, ())
        for choice in decided:
            try:
                options = script.send(choice)
            except StopIteration:
                options = ()
        return State(
            decided,
            options,
            tuple(play.arrived),
            frozenset(play.dead),
            frozenset(play.counted),
            frozenset(play.forgotten),
            play.broken,
        )


Choice = Generator[tuple[str, ...], str, None]


class _Play:
    """One way through a world, which asks at each point what is decided."""

    def __init__(self, world: Blaming) -> None:
        self._world = world
        self._handler = Handler(_POLICY, world.blame())
        self._refusals = world.refusals()
        self._passed = 0
        self._parked: Parked = frozenset()
        self._outage: Literal["to come", "now", "over"] = "to come" if world.away else "over"
        self._away, self._calls = world.away, 0
        self._waited = False
        #: The looks at what is parked, which stand for a clock.
        self._now = 0
        #: The messages of the last call.
        self._last: set[int | None] = set()
        self.arrived: list[int] = []
        self.broken: str | None = None

    @property
    def dead(self) -> set[int]:
        """The messages that are dead letters."""
        return {row.id for row in self._parked if row.state == "dead"}

    @property
    def counted(self) -> set[int]:
        """The messages of which attempts were counted."""
        return {row.id for row in self._parked if row.attempts}

    @property
    def forgotten(self) -> set[int]:
        """The messages behind a head that is not there."""
        held = {row.unit for row in self._parked if row.state is not None}
        return {row.id for row in self._parked if row.state is None and row.unit not in held}

    @property
    def _tried(self) -> set[int]:
        """What always fails, if it was tried last, and what waits behind it."""
        return self._world.behind_poison if self._world.poison in self._last else set()

    def script(self) -> Choice:
        """Handle what there is, until there is nothing."""
        while not self._at_rest() and self._calls < _ENDLESS:
            if ready := self._look():
                # What failed is tried again after a while; once that is longer than a batch of the log takes.
                later = self._passed < len(self._world.log) and not self._waited
                tries = f"the worker tries again what is parked: {', '.join(str(item.id) for item in ready)}"
                choice = yield (tries, "nothing that is parked is due yet") if later else (tries,)
                if choice == tries:
                    yield from self._handle_parked(ready)
                else:
                    self._waited = True
            if self._passed < len(self._world.log):
                yield from self._handle_log()
        if self._calls >= _ENDLESS:
            self.broken = self.broken or "stuck: the worker tries without an end"

    def _at_rest(self) -> bool:
        """Return whether nothing may be tried, or only what always fails, was tried last, and what waits behind it."""
        ready = {item.id for item in self._ready(len(self._world.log))}
        return self._passed == len(self._world.log) and ready <= self._tried

    def _look(self) -> list[Item]:
        """Return the next batch of what is parked, as the worker looks for it."""
        self._now += 1
        if _TOPIC in self._refusals.paused():
            return []
        ready = self._ready(self._world.rows)
        return ready[:1] if _TOPIC in self._refusals.probed() else ready

    def _ready(self, most: int) -> list[Item]:
        rows = rules.ready(self._parked, self._now, most)
        return [Item(row.id, row.key, row.attempts + 1) for row in rows]

    def _handle_log(self) -> Choice:
        batch = self._world.log[self._passed : self._passed + self._world.rows]
        held = rules.keys_held(self._parked)
        free = [item for item in batch if item.key not in held]
        more = self._passed + len(batch) < len(self._world.log)
        handled = yield from self._perform(free, parked=False, others=lambda: more or bool(self._ready(1)))
        parkings = [(item, BEHIND) for item in batch if item.key in held] + handled.parked
        for item, parking in sorted(parkings, key=lambda each: each[0].id):
            self._parked = rules.parked(self._parked, [LogRow(item.id, item.key)], parking, self._now)
        self._passed += len(batch)

    def _handle_parked(self, items: list[Item]) -> Choice:
        handled = yield from self._perform(items, parked=True, others=lambda: False)
        self._refusals.note(handled.refused, [_TOPIC] if handled.done else [])
        for item, parking in handled.parked:
            if parking is not BEHIND:
                now = self._world.due_again(self._now) if parking.state == "waiting" else self._now
                self._parked = rules.changed(self._parked, [item.id], parking, now)
        keys = {item.key for item in items if item.key is not None}
        self._parked = self._world.advanced(rules.removed(self._parked, self.arrived), keys, self._now)

    def _perform(
        self, items: list[Item], *, parked: bool, others: Callable[[], bool]
    ) -> Generator[tuple[str, ...], str, Handled]:
        """Handle a batch; return what came of it."""
        steps = self._handler.steps(items, parked=parked, others=others)
        while self._calls < _ENDLESS:
            try:
                call = next(steps)
            except StopIteration as end:
                handled: Handled = end.value
                return handled
            yield from self._answer(call)
        steps.close()
        return Handled([], [], {})

    def _answer(self, call: Call) -> Choice:
        """Decide what comes of a call."""
        self._calls += 1
        ids = [message.id or 0 for message in call.messages]
        self._last = set(ids)
        said = ", ".join(map(str, ids))
        here, away = f"a call with {said}: the destination is there", f"a call with {said}: the destination is away"
        options = {"to come": (here, away), "now": (away, here) if self._away else (here,), "over": (here,)}
        choice = yield options[self._outage]
        if choice == away:
            self._outage, self._away = "now", self._away - 1
            if self._world.says == "unavailable":
                call.verdicts = [Unavailable("away")] * len(ids)
            else:
                call.error = ConnectionError("away")
        else:
            self._outage = "over" if self._outage == "now" else self._outage
            if self._world.poison in ids:
                call.error = ValueError("no such customer")
            else:
                call.verdicts = [DONE] * len(ids)
                self._arrive(ids)
        call.finished = True

    def _arrive(self, ids: list[int]) -> None:
        keys = {item.id: item.key for item in self._world.log}
        for id in ids:
            after = [other for other in self.arrived if keys[other] == keys[id] and other >= id]
            if after:
                self.broken = self.broken or f"order: message {id} came after message {after[0]}"
            self.arrived.append(id)


# Broken twins


class _Everyone(Blame):
    """Blames every message that fails alone."""

    def failed_alone(self, message: Message) -> bool:
        """Note that it counts."""
        super().failed_alone(message)
        return True


class _Nobody(Blame):
    """Blames no message."""

    def failed_alone(self, message: Message) -> bool:
        """Note that it does not count."""
        super().failed_alone(message)
        return False


class BlamesEveryFailure(Blaming):
    """Counts each failure of a message that was alone in its call."""

    def blame(self) -> Blame:
        """Blame everyone."""
        return _Everyone()


class NeverAdvances(Blaming):
    """Makes no head of what stood behind a message that is done."""

    def advanced(self, rows: Parked, keys: Collection[str], now: int) -> Parked:
        """Leave the rows as they are."""
        return rows


class TriesTheFirst(Blaming):
    """Tries the message again that was tried in vain, before others that are due."""

    def due_again(self, now: int) -> int:
        """Return the beginning."""
        return 0


class BlamesNobody(Blaming):
    """Takes each failure for one of the destination."""

    def blame(self) -> Blame:
        """Blame nobody."""
        return _Nobody()

"""Decisions of people on messages that no worker has read yet: carried out when the reader meets the message.

A worker learns of decisions when it takes the lease, and at each look. What it has handed over before is not stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from outbox.model.parking import Parking
from tests.model import rules
from tests.model.explorer import Moves
from tests.model.handling import Item
from tests.model.holding import Holding, Memory, State, Unsettled

#: As `Deciding` parks what a person has given up, until the same transaction discards it.
GIVEN_UP = Parking(state="dead", holds=False)


class Directing(Holding):
    """The world. People discard messages before any worker has read them, and dead letters."""

    def moves(self, state: State) -> Moves[State]:
        """Return every step of writers, of the worker, of people, and of time."""
        for row in self._log[state.passed : state.committed]:
            if row.id not in dict(state.decided) and row.id not in state.discarded:
                decided = state.decided | {(row.id, "discard")}
                yield f"a person discards message {row.id}, which is unread", state._replace(decided=decided)
        for step, after in super().moves(state):
            if state.memory is None and after.memory is not None:
                yield step, self._learns(after, after.memory)
            else:
                yield step, after

    # The rules, which twins break

    def is_open(self, state: State, id: int) -> bool:
        """Return whether a decision stays open, because its message has still to be read."""
        return id > state.passed

    def stamped(self, state: State, given_up: Collection[int]) -> State:
        """Return the state in which a batch is read whose messages of decisions are `given_up`."""
        return state

    # The steps of a worker

    def _learns(self, state: State, memory: Memory) -> State:
        known = frozenset(id for id, _ in state.decided if self.is_open(state, id))
        return state._replace(memory=memory._replace(given_up=known))

    def _decisions(self, state: State, memory: Memory) -> Moves[State]:
        unread = frozenset(each for each in state.decided if self.is_open(state, each[0]))
        if state.decided - unread:
            for step, after in super()._decisions(state._replace(decided=state.decided - unread), memory):
                assert after.memory is not None
                yield step, self._learns(after._replace(decided=unread), after.memory)
        elif {id for id, _ in unread} != memory.given_up:
            yield "the worker learns what people decided", self._learns(state, memory)

    def _hand_over(
        self,
        state: State,
        memory: Memory,
        items: Sequence[Any],
        *,
        upto: int | None,
        parkings: Sequence[tuple[Any, Parking]],
    ) -> Moves[State]:
        if upto is not None:
            parkings = [*parkings, *((item, GIVEN_UP) for item in items if item.id in memory.given_up)]
            items = [item for item in items if item.id not in memory.given_up]
            state = self.stamped(state, {item.id for item, _ in parkings} & memory.given_up)
        yield from super()._hand_over(state, memory, items, upto=upto, parkings=parkings)

    def _settled(self, state: State, memory: Memory, unsettled: Unsettled) -> State:
        after = super()._settled(state, memory, unsettled)
        if after.memory is not None:
            after = after._replace(memory=after.memory._replace(given_up=memory.given_up))
        met = {item.id for item, _ in unsettled.parkings} & memory.given_up & dict(after.decided).keys()
        if unsettled.upto is None or not met or after.memory is None:
            return after
        of_keys = {row.key for row in after.parked if row.id in met and row.key is not None}
        rows = self.advanced(rules.removed(after.parked, met), of_keys)
        keys = self._keys(rows, after.memory)
        keys.reconsider(of_keys)
        decided = frozenset(each for each in after.decided if each[0] not in met)
        after = after._replace(parked=rows, decided=decided, discarded=after.discarded | met)
        return self._learns(after, keys.memory())

    def _arrives(self, state: State, item: Item, passes: Collection[int]) -> State:
        after = super()._arrives(state, item, passes)
        gone = item.id in state.discarded and item.id not in state.arrived
        return after._replace(broken=after.broken or f"sent: message {item.id} after its discard") if gone else after


class ClosesAtOnce(Directing):
    """A look that closes each decision whose message is not parked."""

    def is_open(self, state: State, id: int) -> bool:
        """Look at parked messages alone."""
        return False


class StampsTooEarly(Directing):
    """The stamp is in a transaction before the one that settles the batch."""

    def stamped(self, state: State, given_up: Collection[int]) -> State:
        """Stamp when the batch is read."""
        decided = frozenset(each for each in state.decided if each[0] not in given_up)
        return state._replace(decided=decided, discarded=state.discarded.union(given_up))

"""Visits every state of a small world once, breadth first, and tells the shortest way to one that breaks a promise."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

State = TypeVar("State", bound=Hashable)

#: A step that something in the world may make: what happens, in words, and the state after it.
Moves = Iterable[tuple[str, State]]


class World(Protocol[State]):
    """A world: the state that it begins in, the steps that are possible in a state, and what is wrong with one."""

    def start(self) -> State:
        """Return the first state."""

    def moves(self, state: State) -> Moves[State]:
        """Return every step that is possible."""

    def wrong(self, state: State) -> str | None:
        """Return which promise the state breaks, or None."""

    def wrong_at_rest(self, state: State) -> str | None:
        """Return which promise a state breaks in which nothing is possible any more, or None."""


@dataclass(frozen=True)
class Explored:
    """What came of it. `wrong` and `trace`: the promise that was broken, and the steps to it; None and empty if none.

    `whole`: every state was visited.
    """

    states: int
    steps: int
    whole: bool
    wrong: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        extent = "all" if self.whole else "the first"
        head = f"{extent} {self.states} states, {self.steps} steps: {self.wrong or 'nothing is wrong'}"
        return "\n".join([head, *(f"  {number}. {step}" for number, step in enumerate(self.trace, 1))])


def explore(world: World[State], *, most: int = 10_000_000) -> Explored:
    """Visit states until all were visited, one breaks a promise, or `most` were visited."""
    with _without_collection():
        return _explore(world, most)


def apart(actors: Sequence[Hashable]) -> Iterator[int]:
    """Yield the numbers of actors of which no earlier one is in the same state.

    Actors that follow the same rules and are in the same state can change places, and the world stays as it is. So
    whatever a later one of them may do, the first one may do, and comes to the same state but for the names.
    """
    seen: set[Hashable] = set()
    for number, actor in enumerate(actors):
        if actor not in seen:
            seen.add(actor)
            yield number


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold the garbage collector back: it would walk through all states again and again, and finds no circle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _explore(world: World[State], most: int) -> Explored:
    first = world.start()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    ahead = deque([first])
    steps = 0
    while ahead:
        state = ahead.popleft()
        at_rest = True
        for step, after in world.moves(state):
            steps += 1
            at_rest = False
            if after not in came_from:
                came_from[after] = (state, step)
                ahead.append(after)
        wrong = world.wrong(state) or (world.wrong_at_rest(state) if at_rest else None)
        if wrong is not None:
            return Explored(len(came_from), steps, whole=False, wrong=wrong, trace=_way(came_from.get, state))
        if len(came_from) >= most:
            return Explored(len(came_from), steps, whole=False)
    return Explored(len(came_from), steps, whole=True)


def _way(came_from: Callable[[State], tuple[State, str] | None], state: State) -> tuple[str, ...]:
    found: list[str] = []
    while (before := came_from(state)) is not None:
        state, step = before
        found.append(step)
    return tuple(reversed(found))

"""Every interleaving of writers, workers and faults over one log; and broken twins, each with the way to its fault."""

import random
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from sqlalchemy import Engine

from tests.model import twins
from tests.model.explorer import explore
from tests.model.relaying import Faults, Relaying
from tests.model.relaying_for_real import RelayReplay


class Scene(NamedTuple):
    """A small world: the keys that each writer commits, one after the other, the workers, and the faults."""

    writers: tuple[tuple[str, ...], ...]
    workers: int
    faults: Faults

    def of(self, world: type[Relaying]) -> Relaying:
        """Set the scene in a world."""
        return world(self.writers, workers=self.workers, faults=self.faults)


#: Two writers of a key, of which one is late.
LATE = Scene((("a",), ("a",)), 1, Faults())
#: Two keys.
APART = Scene((("a",), ("b",)), 1, Faults())
#: Another transaction is open while two take turns.
BESIDE = Scene((("a",), ("a",), ("b",)), 1, Faults())
#: A lease that runs out.
TAKEN_OVER = Scene((("a",), ("a",)), 2, Faults(lapses=1))
#: A server that forgets the ids of what was rolled back.
FORGETFUL = Scene((("a",), ("b", "b", "b")), 1, Faults(crashes=1))
#: Everything at once.
STORM = Scene((("a",), ("a",)), 2, Faults(crashes=1, losses=1, lapses=1))


@pytest.mark.parametrize("scene", [BESIDE, STORM], ids=["an open transaction beside", "storm"])
def test_nothing_is_lost_reordered_or_repeated_in_any_interleaving(scene: Scene) -> None:
    """Nor does a stored position go back. Each state is visited once."""
    explored = explore(scene.of(Relaying))

    assert explored.wrong is None, explored
    assert explored.whole
    print(explored)


@pytest.mark.full
@pytest.mark.parametrize(
    ("scene", "states"),
    [
        (Scene((("a",), ("a",), ("b",)), 2, Faults(lapses=1)), 1_000_000),
        (Scene((("a",), ("b", "b", "b")), 1, Faults(crashes=1)), 500_000),
        (Scene((("a", "a"), ("a",)), 2, Faults(crashes=1, losses=1, lapses=1)), 3_000_000),
    ],
    ids=["three writers", "ids given out again", "two transactions of a writer"],
)
def test_a_larger_world_is_as_right(scene: Scene, states: int) -> None:
    """All of its states, or as many as there is time for."""
    explored = explore(scene.of(Relaying), most=3_000_000)

    assert explored.wrong is None, explored
    assert explored.states >= states
    print(explored)


@pytest.mark.parametrize(
    ("twin", "scene", "broken"),
    [
        (twins.HighestId, APART, "lost"),
        (twins.BelowOldest, BESIDE, "order"),
        (twins.ByTransaction, LATE, "order"),
        (twins.OnStandby, APART, "lost"),
        (twins.NoEpoch, TAKEN_OVER, "the stored progress goes back"),
        (twins.NoLeaseCheck, TAKEN_OVER, "a ends with message 1 (the newest was 2) of 2"),
        (twins.KeepsBase, FORGETFUL, "b ends with message 0"),
    ],
)
def test_a_broken_twin_is_refuted(twin: type[Relaying], scene: Scene, broken: str) -> None:
    """In a scene in which the library is right; the trace says how."""
    explored = explore(scene.of(twin))

    print(explored)
    assert explored.wrong is not None
    assert explored.wrong.startswith(broken)
    assert explored.trace


@pytest.mark.parametrize("scene", [LATE, APART, TAKEN_OVER], ids=["late", "apart", "taken over"])
def test_the_library_is_right_where_its_twins_are_not(scene: Scene) -> None:
    """So that a twin is refuted for what it breaks, and not for the scene."""
    explored = explore(scene.of(Relaying))

    assert (explored.wrong, explored.whole) == (None, True), explored


def test_the_library_does_on_a_real_server_what_the_model_says(pg_engine: Engine, full: bool) -> None:
    """Random walks, each to its end: which messages a read brings, who gets the lease, and whose settle is refused."""
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    scene = Scene((("a", "b"), ("a",), ("b",)), 2, Faults(losses=2, lapses=2))
    for number in range(200 if full else 20):
        walk(pg_engine, scene.of(Relaying), chance, f"seed {seed}, walk {number}")


def walk(engine: Engine, world: Relaying, chance: random.Random, said: str) -> None:
    """Walk from the beginning until nothing is possible, and compare each step."""
    state, steps = world.start(), list[str]()
    with ExitStack() as stack:
        replay = RelayReplay(engine, state, stack)
        while possible := list(world.moves(state)):
            step, after = chance.choice(possible)
            steps.append(step)
            try:
                replay.step(step, state, after)
            except Exception as error:
                raise AssertionError(f"{said}: {steps}") from error
            state = after

"""The world of a relay on a real server: the same walks, with the library's own leases, reads and settles."""

import random
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine

from tests.model.relaying import Faults, Relaying
from tests.model.relaying_for_real import RelayReplay


@pytest.mark.storm
def test_the_library_does_on_a_real_server_what_the_model_says(pg_engine: Engine, full: bool) -> None:
    """Random walks, each to its end: which messages a read brings, who gets the lease, and whose settle is refused."""
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    world = Relaying((("a", "b"), ("a",), ("b",)), workers=2, faults=Faults(losses=2, lapses=2))
    for number in range(200 if full else 20):
        walk(pg_engine, world, chance, f"seed {seed}, walk {number}")


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

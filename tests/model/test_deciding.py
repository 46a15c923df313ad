"""The world of a transaction of half messages on a real database: the same walks, with the library's own statements."""

import random
import uuid
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, text

from tests.model.deciding import Deciding, State
from tests.model.deciding_for_real import Replay
from tests.model.worlds import COMMIT, FENCE, JOIN, ROLLBACK

ALL = (JOIN, COMMIT, ROLLBACK, FENCE)


@pytest.mark.storm
def test_the_statements_do_what_the_model_says(pg_engine: Engine, full: bool) -> None:
    """Random walks, each to its end: who waits and who is refused, what is restored, and which verdict stands."""
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    for number in range(300 if full else 30):
        walk(pg_engine, chance, f"seed {seed}, walk {number}")


def walk(engine: Engine, chance: random.Random, said: str) -> None:
    """Walk from the beginning until nothing is possible, and compare."""
    world, transaction = Deciding(2, tuple(chance.sample(ALL, 3))), str(uuid.uuid4())
    state, steps = world.start(), list[str]()
    with ExitStack() as stack:
        replay = Replay(engine, transaction, state, stack)
        while possible := list(world.moves(state)):
            step, after = chance.choice(possible)
            steps.append(step)
            try:
                replay.step(state, after)
            except Exception as error:
                raise AssertionError(f"{said}: {steps}") from error
            state = after

    assert outcome(engine, transaction) == expected(state), f"{said}: {steps}"


def outcome(engine: Engine, transaction: str) -> tuple[str, list[str]]:
    """Return the verdict that stands, and the bodies that are in the log."""
    with engine.begin() as connection:
        ops = connection.execute(text("SELECT op FROM outbox_op WHERE transaction_id = :id"), {"id": transaction})
        bodies = connection.execute(text("DELETE FROM outbox_message WHERE topic = 'orders' RETURNING body")).scalars()
        return ops.scalar_one(), sorted(bytes(body).decode() for body in bodies)


def expected(state: State) -> tuple[str, list[str]]:
    """Return the same of the model; one message was sent before all others."""
    assert state.op is not None
    return state.op, sorted([*map(str, state.log), *(["first"] if state.op == "commit" else [])])

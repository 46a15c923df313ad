"""Every interleaving of those who send to a transaction and those who decide it; the same walks on a real database."""

import random
import uuid
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, text

from tests.model.deciding import Decider, Deciding, FenceLooks, LastVerdictStands, NoLock, OneStatement, State
from tests.model.deciding_for_real import Replay
from tests.model.explorer import explore

JOIN, COMMIT = Decider("join", "commit"), Decider("word", "commit")
ROLLBACK, FENCE = Decider("word", "rollback"), Decider("fence", "rollback")
ALL = (JOIN, COMMIT, ROLLBACK, FENCE)


def test_a_message_is_delivered_or_refused_and_one_verdict_stands(full: bool) -> None:
    """Nobody waits for ever, and nothing of a transaction that is rolled back gets out."""
    explored = explore(Deciding(5 if full else 4, ALL))

    print(explored)
    assert (explored.wrong, explored.whole) == (None, True), explored


@pytest.mark.parametrize(
    ("twin", "broken"),
    [
        (NoLock, "lost"),
        (OneStatement, "lost"),
        (LastVerdictStands, "two verdicts: rollback after commit"),
        (FenceLooks, "two verdicts: rollback after commit"),
    ],
)
def test_a_broken_twin_is_refuted(twin: type[Deciding], broken: str) -> None:
    """The trace says how."""
    explored = explore(twin(1, (JOIN, FENCE)))

    print(explored)
    assert explored.wrong is not None
    assert explored.wrong.startswith(broken)


def test_the_library_is_right_where_its_twins_are_not() -> None:
    explored = explore(Deciding(1, (JOIN, FENCE)))

    assert (explored.wrong, explored.whole) == (None, True), explored


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

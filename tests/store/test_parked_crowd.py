"""When very many messages are parked, a look costs what their heads cost, and every key keeps its order."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox
from outbox.model.lease import Partition
from outbox.model.parking import Held, Parking, State
from outbox.model.position import EARLIEST
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.parked_messages import ParkedFilter, ParkedMessages
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.decisions import OpenDecisions
from tests.rocketmq.test_plans import pages

FEW, MANY = 2, 1_000_000
#: Of a measurement on SQLite, in tens.
MOST_STEPS = 10_000_000
#: Of a key, what stands behind its head becomes so many, with the next ids.
MULTIPLY = """
    INSERT INTO outbox_parked (subscription, id, message_id, topic, key, slot, headers, body, content_type, created_at,
                               unit, place, attempts, parked_at)
    SELECT subscription, id * 1000000 + n, {random_id}, topic, key, slot, headers, body, content_type, created_at, unit,
           place + n, 0, parked_at
    FROM outbox_parked, {numbers} WHERE state IS NULL
"""
DIALECTS = {
    "postgresql": {"random_id": "gen_random_uuid()", "numbers": "generate_series(1, CAST(:rows AS bigint)) AS n"},
    "sqlite": {
        "random_id": "lower(hex(randomblob(16)))",
        "numbers": "(WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < :rows)"
        " SELECT n FROM counted)",
    },
}
#: A state, with for how many seconds it has been due, and how many tries have failed.
Head = tuple[State, int | None, int]
BEHIND: Head = ("behind", None, 0)


def parking(state: State, due: int | None, tries: int) -> Parking:
    """What one message is parked as."""
    delay = None if due is None else -timedelta(seconds=due)
    error = "no" if tries else None
    return Parking(state=state, holds=state != "delayed", attempts=tries, error=error, delay=delay)


def park(
    engine: Engine, channel: Channel, keys: Sequence[str | None], heads: Sequence[Head]
) -> tuple[Parked, list[int]]:
    """Park one message for each key, in the order of the log."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", b"x", key=key) for key in keys])
    ids = [message.id or 0 for message in Log().read_on(channel, EARLIEST).messages]
    parked = Parked(channel, "relay")
    with channel.transaction():
        parked.park((id, parking(*head)) for id, head in zip(ids, heads, strict=True))
    return parked, ids


def ready(parked: Parked, rows: int, **more: Any) -> list[int]:
    """The log ids of what may be tried now."""
    return [each.message.id or 0 for each in parked.ready([], rows, MANY, **more)]


def drained(parked: Parked, channel: Channel) -> list[tuple[int, str | None]]:
    """Everything that is ever ready, in the order in which it comes, when each is done at once."""
    order = []
    while found := [(each.message.id or 0, each.message.key) for each in parked.ready([], FEW, MANY)]:
        order += found
        with channel.transaction():
            parked.remove([id for id, _ in found])
            parked.advance({key for _, key in found if key is not None})
    return order


def by_key(order: Sequence[tuple[int, str | None]]) -> dict[str | None, list[int]]:
    """Of each key its messages in the order in which they came; those without a key in any."""
    found = defaultdict(list)
    for id, key in order:
        found[key].append(id)
    return {key: sorted(ids) if key is None else ids for key, ids in found.items()}


def some(seed: int) -> tuple[list[str | None], list[Head]]:
    """Keys of thirty messages; the first of each key is its head, which may wait for a later time."""
    dice, held = random.Random(seed), set[str | None]()
    keys, heads = [dice.choice([None, "a", "b", "c", "d"]) for _ in range(30)], list[Head]()
    for key in keys:
        head: Head = ("retry", dice.choice([-3600, *range(1, 40)]), dice.choice([0, 1]))
        heads.append(BEHIND if key in held else head)
        held |= {key} - {None}
    return keys, heads


def expected(keys: Sequence[str | None], heads: Sequence[Head], ids: Sequence[int]) -> dict[str | None, list[int]]:
    """Everything except the keys whose head is not due, and what is not due itself."""
    later = {key for key, head in zip(keys, heads, strict=True) if key is not None and (head[1] or 0) < 0}
    return by_key(
        [(id, key) for id, key, head in zip(ids, keys, heads, strict=True) if key not in later and (head[1] or 0) >= 0]
    )


@pytest.mark.parametrize("seed", range(8))
def test_every_key_keeps_its_order_and_nothing_is_left_behind(engine, channel, seed):
    keys, heads = some(seed)
    parked, ids = park(engine, channel, keys, heads)

    order = drained(parked, channel)

    assert by_key(order) == expected(keys, heads, ids)


@pytest.mark.parametrize("seed", range(4))
def test_partitions_share_a_crowd(engine, channel, seed):
    keys, heads = some(seed)
    everything, ids = park(engine, channel, keys, heads)
    relay = Subscriptions(channel).get("relay")
    partitions = replace(relay, partitions=3).all_partitions()

    order = [each for partition in partitions for each in drained(Parked(channel, "relay", partition), channel)]

    assert by_key(order) == expected(keys, heads, ids)
    assert ready(everything, FEW) == []


def test_those_come_first_that_have_been_due_for_longest(engine, channel):
    parked, ids = park(engine, channel, list("abcdef"), [("retry", n, 0) for n in (10, 60, 20, 50, 30, 40)])

    assert [id for id, _ in drained(parked, channel)] == [ids[n] for n in (1, 3, 5, 4, 2, 0)]


@pytest.mark.parametrize(("failed", "comes"), [(0, [0, 1, 2]), (1, [0])])
def test_what_stands_behind_a_head_comes_with_it_unless_the_head_has_failed(engine, channel, failed, comes):
    parked, ids = park(engine, channel, ["a"] * 4, [("retry", 1, failed), *[BEHIND] * 3])

    assert ready(parked, 3) == [ids[n] for n in comes]


def test_the_rows_that_heads_leave_are_shared_among_what_stands_behind(engine, channel):
    """Each key has an equal part, whichever fell due first; one that failed has none."""
    heads: list[Head] = [("retry", 3, 0), ("retry", 2, 0), ("retry", 1, 1)]
    parked, ids = park(engine, channel, [*"abc", *"abc" * 5], [*heads, *[BEHIND] * 15])

    found = [[id - ids[0] for id in ready(parked, rows)] for rows in (2, 3, 5, 8)]

    assert found == [[0, 1], [0, 1, 2], [0, 3, 1, 4, 2], [0, 3, 6, 1, 4, 7, 2]]


def test_a_crowd_that_may_not_be_tried_makes_no_batch_smaller(engine, channel):
    """They have been due for longest; the others come as if these were not there."""
    parked, ids = park(engine, channel, [*map(str, range(30))], [("retry", 100 - n, 1) for n in range(30)])
    held = Held(ids=ids[:10], keys=[str(n) for n in range(10, 20)])

    assert ready(parked, 10, held=held) == ids[20:]


def test_of_a_suspended_queue_only_messages_that_failed_are_ready(engine, channel):
    heads: list[Head] = [("waiting", 60, 0), ("retry", 2, 1), ("waiting", 50, 0), ("retry", 1, 1), ("waiting", 40, 0)]
    parked, ids = park(engine, channel, list("abcde"), heads)

    assert ready(parked, FEW, retries=True) == [ids[1], ids[3]]


def test_a_replay_of_what_has_joined_its_key_meanwhile_is_carried_out(engine, channel):
    """It was delayed when a person asked; else each look would find the decision again."""
    parked, ids = park(engine, channel, ["a", "a"], [("dead", None, 3), ("delayed", None, 0)])
    channel.run("UPDATE outbox_parked SET due_at = parked_at WHERE state = 'delayed'")
    decisions = OpenDecisions(channel, parked, Partition("relay"), blocks=True)
    with channel.transaction():
        ParkedMessages(channel, "relay").decide(ParkedFilter(states=("delayed",)), "replay", "somebody", None)
        FallingDue(channel, "relay").join(ids)
        parked.advance(["a"])

    with channel.transaction():
        (carried_out,) = decisions.carry_out(decisions.open())

    assert ([*carried_out.messages], decisions.open()) == (ids[1:], [])
    assert channel.rows("SELECT state, unit, place FROM outbox_parked ORDER BY id") == [
        ("dead", "a", 1),
        (None, "a", 2),
    ]


@pytest.fixture(params=["pg_engine", "sqlite_engine"])
def measured(request) -> Iterator[tuple[Engine, Channel, Callable[[], int]]]:
    """A database with a connection of ours, and how much was read by it so far: pages, or steps of SQLite's machine."""
    engine: Engine = request.getfixturevalue(request.param)
    with closing(Outbox(engine).database.open()) as channel:
        if engine.dialect.name == "postgresql":
            yield engine, channel, lambda: pages(channel)
            return
        steps = [0]

        def step() -> bool:
            """Count steps, and end what would take minutes."""
            steps[0] += 1
            return steps[0] > MOST_STEPS

        driver: Any = channel._driver_channel
        driver._driver.set_progress_handler(step, 10)
        yield engine, channel, lambda: steps[0]


#: What a worker asks in a look, and what it writes when a head is done.
LOOKS: dict[str, Callable[[Parked], object]] = {
    "ready": lambda parked: parked.ready([], 20, MANY),
    "probed": lambda parked: parked.ready(["refused"], 20, MANY, probed=["t"]),
    "keys": lambda parked: parked.keys(100),
    "held among": lambda parked: parked.held_among([f"k{n}" for n in range(20)]),
    "some retry": lambda parked: parked.some_retry(),
    "waiting": lambda parked: parked.waiting(100),
    "decisions": lambda parked: Decisions(parked._channel, "relay").open(),
    "still parked": lambda parked: parked.still([*range(100)]),
    "due": lambda parked: FallingDue(parked._channel, "relay").due(100),
    "join": lambda parked: FallingDue(parked._channel, "relay").join(range(100)),
    "next due": lambda parked: parked.next_due(),
    "advance": lambda parked: parked.advance([f"k{n}" for n in range(20)]),
    "change": lambda parked: parked.change([(1, Parking(state="retry", holds=True, delay=timedelta(0)))]),
    "remove": lambda parked: parked.remove([99]),
}


@pytest.mark.parametrize("failed", [0, 1], ids=["new heads", "heads that failed"])
def test_a_look_costs_what_the_heads_cost_however_many_messages_stand_behind(measured, failed):
    """A hundred thousand behind ten heads, and ten behind ten."""
    engine, channel, read = measured
    head: Head = ("retry", 1, failed)
    keys, heads = [f"k{n}" for n in range(10)], [head] * 10
    parked, _ = park(engine, channel, keys * 2, [*heads, *[BEHIND] * 10])

    def costs() -> dict[str, int]:
        found = {}
        for name, look in LOOKS.items():
            look(parked)
            before = read()
            look(parked)
            found[name] = read() - before
        return found

    few = costs()
    dialect = DIALECTS[engine.dialect.name]
    channel.run(channel.database.sql(MULTIPLY, **dialect), rows=10_000)
    many = costs()

    # A page or some steps more, where there was next to nothing to read.
    assert {name: (few[name], cost) for name, cost in many.items() if cost > 3 * few[name] + 10} == {}

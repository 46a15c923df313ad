"""When very many parked messages are due at once, few of them are looked at, and every key keeps its order."""

import random
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest

from outbox import Message, Outbox
from outbox.model.parking import Parking
from outbox.model.position import EARLIEST
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions import parked as parked_messages
from outbox.store.subscriptions.parked import EVERYWHERE, Parked
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.rocketmq.test_plans import pages

FEW, MANY = 2, 10_000
#: The only parked message becomes so many, with the next ids.
MULTIPLY = """
    INSERT INTO outbox_parked (subscription, id, message_id, topic, key, slot, headers, body, content_type, created_at,
                               state, blocks, place, attempts, due_at, parked_at)
    SELECT subscription, id + n, gen_random_uuid(), topic, key, slot, headers, body, content_type, created_at, state,
           blocks, place + n * CAST(1048576 AS bigint), attempts, due_at, parked_at
    FROM outbox_parked, generate_series(1, :rows - 1) AS n
"""
RETRY, BLOCKED = "retry", "blocked"


@pytest.fixture(params=[0, MANY], ids=["crowded", "not crowded"])
def crowd(request, monkeypatch):
    """More than so many are a crowd."""
    monkeypatch.setattr(parked_messages, "CROWD", request.param)
    return request.param


def park(engine, channel, keys, states):
    """Park one message for each key, each with its state, and for how many seconds it has been due."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", b"x", key=key) for key in keys])
    ids = [message.id or 0 for message in Log().read_on(channel, EARLIEST).messages]
    parked = Parked(channel, "relay")
    with channel.transaction():
        for id, (state, due) in zip(ids, states, strict=True):
            delay = None if due is None else -timedelta(seconds=due)
            parked.park({Parking(state=state, blocks=True, delay=delay): [id]})
    return parked, ids


def ready(parked, channel, rows):
    released = parked.released_keys()
    return [(each.message.id, each.message.key) for each in parked.ready(released, {}, rows, 1_000_000)[0]]


def drained(parked, channel):
    """Everything that is ever ready, in the order in which it comes, when each is done at once."""
    order = []
    while found := ready(parked, channel, FEW):
        order += found
        with channel.transaction():
            parked.remove([id for id, _ in found])
    return order


def by_key(order):
    found = defaultdict(list)
    for id, key in order:
        found[key].append(id)
    return dict(found)


def some(seed):
    """Keys and states of thirty messages; some wait for a later time, and what stands behind them waits, too."""
    dice = random.Random(seed)
    keys = [dice.choice([None, "a", "b", "c", "d"]) for _ in range(30)]
    states = [
        (BLOCKED, None) if key is not None and dice.random() < 0.3 else (RETRY, dice.choice([-3600, *range(1, 40)]))
        for key in keys
    ]
    return keys, states


def expected(keys, states, ids):
    """Of each key, in order, what stands before the first that is not due; of messages without one all that are due."""
    found, held = defaultdict(list), set()
    for id, key, (state, due) in zip(ids, keys, states, strict=True):
        if state == RETRY and due < 0:
            held |= {key} - {None}
        elif key not in held:
            found[key].append(id)
    return dict(found)


@pytest.mark.parametrize("seed", range(8))
def test_every_key_keeps_its_order_and_nothing_is_left_behind(engine, channel, crowd, seed):
    keys, states = some(seed)
    parked, ids = park(engine, channel, keys, states)

    order = drained(parked, channel)

    assert {key: sorted(ids) if key is None else ids for key, ids in by_key(order).items()} == expected(
        keys, states, ids
    )


@pytest.mark.parametrize("seed", range(4))
def test_partitions_share_a_crowd(engine, channel, crowd, seed):
    keys, states = some(seed)
    everything, ids = park(engine, channel, keys, states)
    relay = Subscriptions(channel).get("relay")
    partitions = replace(relay, partitions=3).all_partitions()

    order = [each for partition in partitions for each in drained(Parked(channel, "relay", partition), channel)]

    assert {key: sorted(ids) if key is None else ids for key, ids in by_key(order).items()} == expected(
        keys, states, ids
    )
    assert ready(everything, channel, FEW) == []


def test_the_first_of_a_key_comes_first_also_when_the_others_have_been_due_for_longer(engine, channel, crowd):
    parked, ids = park(engine, channel, ["a"] * 4, [(RETRY, 1), (RETRY, 40), (RETRY, 30), (RETRY, 20)])

    order = drained(parked, channel)

    assert [id for id, _ in order] == ids


def test_in_a_crowd_those_come_first_that_have_been_due_for_longest(engine, channel, monkeypatch):
    monkeypatch.setattr(parked_messages, "CROWD", 4)
    parked, ids = park(engine, channel, list("abcdef"), [(RETRY, n) for n in (10, 60, 20, 50, 30, 40)])

    order = [id for id, _ in drained(parked, channel)]

    # The last four are no crowd any more: they come in the order of the log.
    assert order == [ids[1], ids[3], ids[0], ids[2], ids[4], ids[5]]


@pytest.mark.parametrize("state", ["blocked", RETRY])
def test_of_a_key_with_very_many_messages_each_is_looked_at_once(pg_engine, state):
    """Nothing stops them, and a topic is refused, of which they are not."""
    rows, refused = 3_000, {"others": EVERYWHERE}
    with closing(Outbox(pg_engine).database.open()) as channel:
        parked, ids = park(pg_engine, channel, ["k"], [("dead", None)])
        channel.run("UPDATE outbox_parked SET state = :state, due_at = created_at", state=state)
        channel.run(MULTIPLY, rows=rows)
        parked.ready(["k"], refused, 100, 1_000_000)
        before = pages(channel)
        found, more = parked.ready(["k"], refused, 100, 1_000_000)
        looked_at = pages(channel) - before

    assert ([each.message.id for each in found], more) == ([*range(ids[0], ids[0] + 100)], True)
    # Each with its place in an index, and what is returned once more.
    assert looked_at <= 2 * rows, looked_at


def test_of_a_key_that_is_stopped_no_message_is_read_after_the_first_page(engine, channel, crowd, monkeypatch):
    """All of them were replayed, and the first is a dead letter again."""
    states = [("dead", None), *((RETRY, due) for due in range(1, 100))]
    parked, _ = park(engine, channel, ["k"] * len(states), states)
    read, real = list[int](), Channel.rows

    def counting(self, statement, /, **parameters):
        found = real(self, statement, **parameters)
        read.append(len(found))
        return found

    monkeypatch.setattr(Channel, "rows", counting)
    found = parked.ready([], {}, FEW, 1_000_000)

    assert found == ([], False)
    # A page and its key's place, of what was ready at the horizon too; and whether there is a crowd, and the horizon.
    assert sum(read) <= 2 * (FEW + 1) + 2, read


def test_in_a_crowd_a_batch_is_not_small_because_others_have_been_due_for_longer_and_are_stopped(
    engine, channel, crowd
):
    stopped, others = [("dead", None), *[(RETRY, 60)] * 9], [(RETRY, due) for due in range(1, 21)]
    parked, ids = park(engine, channel, [*["k"] * 10, *[None] * 20], [*stopped, *others])

    found, more = parked.ready([], {}, 10, 1_000_000)

    assert ({each.message.id for each in found} <= set(ids[10:]), len(found), more) == (True, 10, True)


def test_of_a_suspended_queue_only_messages_that_failed_are_ready(engine, channel, crowd):
    states = [("waiting", 60), (RETRY, 1), ("waiting", 50), (RETRY, 2), ("waiting", 40)]
    parked, ids = park(engine, channel, list("abcde"), states)

    found = [each.message.id for each in parked.ready([], {}, FEW, 1_000_000, retries=True)[0]]

    assert found == [ids[1], ids[3]]


def test_a_refused_topic_of_which_nothing_was_tried_yet_leaves_a_crowd_as_it_is(engine, channel, monkeypatch):
    """Else each look would sort the whole crowd by place."""
    monkeypatch.setattr(parked_messages, "CROWD", 4)
    parked, ids = park(engine, channel, list("abcdef"), [(RETRY, n) for n in (10, 60, 20, 50, 30, 40)])

    found, more = parked.ready(set(), {"other": 0}, FEW, 1_000_000)

    assert ([each.message.id for each in found], more) == ([ids[1], ids[3]], True)


def test_a_batch_of_a_crowd_that_is_not_full_says_that_there_may_be_more(engine, channel, monkeypatch):
    """Two of those due for longest are stopped by a message that is not due."""
    monkeypatch.setattr(parked_messages, "CROWD", 4)
    parked, ids = park(engine, channel, list("sssabcde"), [(RETRY, n) for n in (-3600, 60, 55, 50, 40, 30, 20, 10)])

    found, more = parked.ready(set(), {}, 4, 1_000_000)

    assert ([each.message.id for each in found], more) == (ids[3:6], True)

"""A command asks a worker for its lease: it gets it between two calls, or is told why not; and the worker goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, Retry, SubscriptionError, Unavailable
from outbox.admin import borrowing, commands
from outbox.model.lease import Partition
from outbox.model.subscription import Subscription
from outbox.model.verdict import DONE
from outbox.store.subscriptions import leases
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.partition import PartitionWorker
from outbox.worker.waiting import Wait
from tests.support import programs
from tests.support.command_line import outbox as command_line
from tests.support.destination import Destination, expected, fill, relay_to, running
from tests.support.leases import step_clock
from tests.support.parked import states
from tests.support.waiting import eventually

PARTITION = Partition("relay")
SECOND = timedelta(seconds=1)


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox of which nothing was sent yet."""
    return Outbox(engine)


def alter(outbox: Outbox, *, wait: timedelta = borrowing.WAIT, **changes: Any) -> Subscription:
    """As `outbox subscriptions alter relay`."""
    with closing(outbox.database.open()) as channel:
        stored = Subscriptions(channel).get("relay")
        return commands.alter(channel, replace(stored, **changes), before=stored, wait=wait)


def stored(outbox: Outbox) -> tuple[str | None, str | None]:
    """Destination and policy, as they are stored."""
    with closing(outbox.database.open()) as channel:
        found = Subscriptions(channel).get("relay")
        return found.destination, found.on_dead


def in_order(destination: Destination, count: int) -> bool:
    """Whether everything that `fill` wrote has arrived once, each key in its order."""
    return all(destination.of_key(f"k{key}") == expected(key, count) for key in range(20))


class Slow(Destination):
    """A healthy one that takes a moment for each call."""

    def send(self, messages: Any) -> Any:
        """Accept them, later."""
        time.sleep(0.05)
        return super().send(messages)


def test_a_change_that_leaves_its_worker_right_costs_it_nothing(outbox):
    """The same relay goes on, under the new policy and in a new epoch; each message arrives once."""
    destination = Slow()
    fill(outbox, 2_000)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: destination.calls > 2)
        alter(outbox, on_dead="continue")
        fill(outbox, 1_000, first=2_000)
        assert eventually(lambda: len(destination.messages) >= 3_000)

    assert stored(outbox) == ("test", "continue")
    assert in_order(destination, 3_000)
    assert len(destination.messages) == 3_000


def test_a_worker_that_waits_for_its_destination_gives_the_lease_back(outbox):
    """So a subscription can leave a destination that is away for good."""
    away = Destination(lambda _message: Unavailable("away", everything=True))
    fill(outbox, 100)
    with running(relay_to(away, outbox)):
        assert eventually(lambda: away.calls > 2)
        alter(outbox, destination="elsewhere")

    elsewhere = Destination()
    elsewhere.destination = "elsewhere"
    relay_to(elsewhere, outbox).until_empty()
    assert in_order(elsewhere, 100)


@pytest.mark.storm
def test_while_a_call_hangs_the_lease_is_kept_and_the_command_says_so(outbox):
    """What hangs may still arrive at the old destination, so nothing of its keys may go to another one before."""
    destination, held = Destination(), threading.Event()
    destination.hanging = lambda _messages: not held.is_set()
    fill(outbox, 100)
    with running(relay_to(destination, outbox, deadline=SECOND)):
        assert eventually(lambda: destination.calls)
        with pytest.raises(borrowing.LeaseHeldError) as refused:
            alter(outbox, destination="elsewhere", wait=5 * SECOND)
        held.set()
        assert eventually(lambda: len(destination.messages) >= 100)

    assert "holds the lease of relay until" in str(refused.value)
    assert "has not given it back within 5 s" in str(refused.value)
    assert "a call of its handler takes longer or hangs" in str(refused.value)
    assert stored(outbox)[0] == "test"
    assert in_order(destination, 100)


def test_a_worker_that_knows_of_no_bids_is_waited_for_and_left_alone(outbox, channel):
    """As one of an earlier version, which renews its lease whatever anybody wants."""
    relay_to(Destination(), outbox).until_empty()
    lease = Leases(channel).acquire(PARTITION, "w0rker", timedelta(minutes=5))
    assert lease is not None

    with pytest.raises(borrowing.LeaseHeldError, match=r"worker w0rker holds .* not given it back within 1 s"):
        alter(outbox, on_dead="continue", wait=SECOND)

    assert Leases(channel).renew(lease, SECOND)
    holder = Leases(channel).look(PARTITION)
    assert holder is not None
    assert (holder.owner, holder.wanted) == ("w0rker", False)


def test_a_command_that_loses_its_connection_gives_the_lease_back_at_once(outbox, channel):
    """And not when the lease that it took has run out, for which all messages would wait."""
    relay_to(Destination(), outbox).until_empty()
    stored, its = Subscriptions(channel).get("relay"), outbox.database.open()

    with pytest.raises(RuntimeError, match="lost"), borrowing.borrowed(its, [stored]):
        held = Leases(channel).look(PARTITION)
        its.close()
        raise RuntimeError("lost")

    after = Leases(channel).look(PARTITION)
    assert held is not None
    assert after is not None
    assert (held.live, after.owner) == (True, None)


def test_without_a_wait_nobody_is_asked(outbox, channel):
    relay_to(Destination(), outbox).until_empty()
    assert Leases(channel).acquire(PARTITION, "w0rker", timedelta(minutes=5))

    with pytest.raises(borrowing.LeaseHeldError, match=r"holds the lease of relay until [0-9:]+ UTC; stop it first$"):
        alter(outbox, on_dead="continue", wait=timedelta(0))


@pytest.mark.storm
def test_the_lease_of_a_worker_that_died_is_taken_when_it_has_expired(outbox, channel):
    relay_to(Destination(), outbox).until_empty()
    assert Leases(channel).acquire(PARTITION, "dead", 2 * SECOND)

    assert alter(outbox, on_dead="continue").on_dead == "continue"


@pytest.mark.storm
@pytest.mark.parametrize("wait", [timedelta(0), SECOND], ids=["not asked", "asked"])
def test_a_step_of_the_clock_takes_no_lease_from_a_worker_that_is_well(engine, outbox, channel, wait):
    """For the database it has expired, until its worker renews it; the command sees that, and is refused."""
    relay_to(Destination(), outbox).until_empty()
    lease = Leases(channel).acquire(PARTITION, "w0rker", timedelta(minutes=5))
    assert lease is not None
    step_clock(engine, timedelta(hours=1))
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(alter, outbox, on_dead="continue", wait=wait)
        time.sleep(2)
        renewed = Leases(channel).renew(lease, timedelta(minutes=5))
        with pytest.raises(borrowing.LeaseHeldError, match="worker w0rker holds the lease of relay"):
            order.result(60)

    assert (renewed, stored(outbox)) == (True, ("test", "block"))


def test_a_command_says_that_it_watches_the_lease_of_a_worker_that_died(engine, outbox, channel):
    """Without a wait, too, because nobody has to be asked."""
    relay_to(Destination(), outbox).until_empty()
    assert Leases(channel).acquire(PARTITION, "dead", SECOND)
    step_clock(engine, timedelta(hours=1))

    dropped = command_line(engine, "subscriptions", "drop", "relay", "--yes")

    assert (dropped.code, Subscriptions(channel).find("relay")) == (0, None)
    assert (
        "relay: the lease of worker dead has run out and was not given back; it is taken when nobody has" in dropped.err
    )


def test_two_commands_at_once_undo_nothing_of_each_other(outbox):
    destination = Slow()
    fill(outbox, 1_000)
    with running(relay_to(destination, outbox)), ThreadPoolExecutor(2) as pool:
        assert eventually(lambda: destination.calls)
        orders = [pool.submit(alter, outbox, **change) for change in ({"on_dead": "continue"}, {"topics": ("topic0",)})]
        for order in orders:
            order.result(60)
    with closing(outbox.database.open()) as channel:
        found = Subscriptions(channel).get("relay")

    assert (found.on_dead, found.topics, found.destination) == ("continue", ("topic0",), "test")


@pytest.mark.storm
def test_a_wish_whose_command_died_ends_by_itself(outbox, channel, monkeypatch):
    monkeypatch.setattr(leases, "BID_SECONDS", 1.0)
    destination = Destination()

    def asked_and_given() -> bool:
        Leases(channel).ask(PARTITION, "command")
        return not holds(channel)

    with running(relay_to(destination, outbox)):
        fill(outbox, 20)
        assert eventually(lambda: len(destination.messages) == 20)
        assert eventually(asked_and_given)
        fill(outbox, 20, first=20)
        assert eventually(lambda: len(destination.messages) == 40)

    assert in_order(destination, 40)


def holds(channel: Any) -> bool:
    """Whether somebody has the lease now."""
    holder = Leases(channel).look(PARTITION)
    return holder is not None and holder.live


def test_a_wish_from_before_the_clock_stepped_back_does_not_count(engine, outbox, channel):
    """Nobody would renew it, and the workers would wait for an hour."""
    relay_to(Destination(), outbox).until_empty()
    Leases(channel).ask(PARTITION, "command")
    before = Leases(channel).look(PARTITION)
    step_clock(engine, timedelta(hours=-1))
    after = Leases(channel).look(PARTITION)

    assert before is not None
    assert after is not None
    assert (before.wanted, after.wanted) == (True, False)


def test_what_a_command_wanted_is_not_wanted_after_it(outbox, channel):
    relay_to(Destination(), outbox).until_empty()
    lease = Leases(channel).acquire(PARTITION, "w0rker", timedelta(minutes=5))
    assert lease is not None
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(alter, outbox, on_dead="continue")
        assert eventually(lambda: wanted(channel))
        Leases(channel).release(lease)
        order.result(60)

    assert not wanted(channel)
    assert Leases(channel).acquire(PARTITION, "next", SECOND)


def wanted(channel: Any) -> bool:
    """Whether a command asks for the lease."""
    holder = Leases(channel).look(PARTITION)
    return holder is not None and holder.wanted


def test_a_worker_that_stands_by_takes_no_lease_that_is_wanted(outbox, channel):
    """It would have to give it back at once; the command gets it first."""
    destination = Destination()
    relay_to(destination, outbox).until_empty()
    fill(outbox, 20)
    Leases(channel).ask(PARTITION, "command")
    with running(relay_to(destination, outbox)):
        time.sleep(1)
        early = list(destination.messages)
        Leases(channel).take_back(PARTITION, "command")
        assert eventually(lambda: len(destination.messages) == 20)

    assert early == []


def held(engine: Engine) -> list[str]:
    """The owners of all leases."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT owner FROM outbox_lease WHERE lease_until IS NOT NULL")).scalars())


KILLED = """
import os, signal, sys
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from outbox import Outbox, create_engine
from outbox.admin import borrowing, commands
from outbox.runtime import failpoints
from outbox.store.subscriptions.subscriptions import Subscriptions

def reached(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

borrowing.LENGTH = timedelta(seconds=2)
failpoints.arm(reached)
with closing(Outbox(create_engine(sys.argv[1])).database.open()) as channel:
    stored = Subscriptions(channel).get("relay")
    commands.alter(channel, replace(stored, on_dead="continue"))
"""


@pytest.mark.storm
@pytest.mark.parametrize(
    ("engine", "point", "policy"),
    [
        ("postgresql", "command.after_ask", "block"),
        ("postgresql", "command.before_alter", "block"),
        ("postgresql", "command.after_alter", "continue"),
        ("sqlite", "command.before_alter", "block"),
    ],
    indirect=["engine"],
)
def test_a_command_that_is_killed_leaves_a_worker_that_goes_on(engine, outbox, point, policy):
    """Its bid and its lease expire; what it changed is stored or not, and each message arrives once."""
    destination = Slow()
    fill(outbox, 500)
    url = engine.url.render_as_string(hide_password=False)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: destination.calls)
        killed = programs.run(["-c", KILLED, url, point])
        fill(outbox, 500, first=500)
        assert eventually(lambda: len(destination.messages) >= 1_000)

    assert (killed.returncode, stored(outbox)) == (-9, ("test", policy))
    assert len(destination.messages) == 1_000
    assert in_order(destination, 1_000)


def test_who_works_until_nothing_is_left_does_so_although_a_command_wants_the_lease_meanwhile(
    engine, outbox, monkeypatch
):
    """It is asked for right before a parked message is tried: that is left, and tried under the next lease."""
    destination = Destination(lambda _message: Retry("not yet", timedelta(0)))
    relay = relay_to(destination, outbox)
    fill(outbox, 1)
    relay.once()
    destination.answer = lambda _message: DONE
    step, steps = PartitionWorker.step, 0

    def asked(self: PartitionWorker, *, postpone: bool) -> Generator[Wait, None, int]:
        nonlocal steps
        steps += 1
        if steps == 1:
            handler: Any = self._batch_handler
            handler._stop.ask()
        return (yield from step(self, postpone=postpone))

    monkeypatch.setattr(PartitionWorker, "step", asked)
    parked = states(engine)
    relay.until_empty()

    assert (parked, steps > 1, destination.bodies, states(engine)) == ({"retry": 1}, True, [b"0"], {})


def test_the_command_line_asks_for_as_long_as_it_is_told(engine, outbox, channel):
    relay_to(Destination(), outbox).until_empty()
    assert Leases(channel).acquire(PARTITION, "w0rker", timedelta(minutes=5))

    ended = command_line(engine, "subscriptions", "alter", "relay", "--on-dead", "continue", "--wait", "500ms")

    assert (ended.code, "has not given it back within 0.5 s" in ended.err) == (2, True)


def test_a_worker_of_the_old_destination_ends_and_says_where_it_goes_now(outbox):
    destination = Destination()
    relay = relay_to(destination, outbox)
    errors: list[Exception] = []

    def run() -> None:
        try:
            relay.run(signals=False)
        except SubscriptionError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    fill(outbox, 20)
    assert eventually(lambda: len(destination.messages) == 20)
    alter(outbox, destination="elsewhere")
    thread.join(60)

    assert "relay' has destination elsewhere, this worker asks for test" in str(errors)

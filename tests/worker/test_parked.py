"""What was parked takes its turn: in the order of its key, for every message of a topic, and at little cost."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text, update

from outbox import Message, Outbox, Reject, Relay, Retry, Unavailable, Verdict
from outbox.errors import LeaseLostError
from outbox.model.parking import Parking
from outbox.model.subscription import Declaration
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits, Log
from outbox.store.operations.check import tables_of
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker import upkeep
from outbox.worker.policy import BEHIND, EXPIRED
from outbox.worker.settings import Settings
from outbox.worker.settle import ParkedChanges, Settlement, Unsettled
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import LONG_LEASE, Destination, expected, failing, fill, relay_to
from tests.support.leases import end_lease, step_clock
from tests.support.parked import by_id, decide, states
from tests.support.waiting import eventually

SMALL = Settings(
    limits=Limits(rows=10),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=LONG_LEASE,
    renew_every=timedelta(milliseconds=500),
)


#: Errors are brought up to date with each probe.


def parked(engine: Engine) -> list[tuple[int, str, int]]:
    """Id, state and attempts of what is parked."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, coalesce(state, 'behind'), attempts FROM outbox_parked ORDER BY id"))
        return [(row[0], row[1], row[2]) for row in rows]


def errors(outbox: Outbox) -> list[tuple[str, str | None]]:
    """Topic and error of what waits."""
    return [(each.topic, each.error) for each in outbox.admin.parked(state="waiting")]


def make_due(engine: Engine, *ids: int) -> None:
    """The time of these delayed messages has come."""
    with engine.begin() as connection:
        for id in ids:
            connection.execute(
                text("UPDATE outbox_parked SET due_at = created_at WHERE id = :id AND state = 'delayed'"), {"id": id}
            )


def without(topic: str) -> Destination:
    """A destination that misses one topic."""
    return Destination(lambda message: Unavailable("no stream") if message.topic == topic else DONE)


def stop(relay: Relay) -> None:
    relay.stop()
    relay.join(60)


def after(relay: Relay, engine: Engine) -> dict[str, int]:
    """What is parked after the relay has handled what there is."""
    relay.until_empty()
    return states(engine)


@pytest.fixture
def renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of waiting messages are brought up to date at each look."""
    monkeypatch.setattr(upkeep, "RENEW_ERRORS", 0.0)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 20 messages may wait."""
    monkeypatch.setattr("outbox.worker.partition.MAX_WAITING", 20)


@pytest.mark.storm
@pytest.mark.parametrize("keyed", [True, False])
def test_the_room_for_waiting_messages_is_shared_by_all_batches(engine, little_room, keyed):
    """Each batch holds five messages of the missing topic; the fifth batch finds no room, and the partition pauses."""
    outbox, destination = Outbox(engine), without("missing")
    with outbox.begin() as session:
        outbox.send_all(
            session,
            [Message("missing" if n % 2 else "there", str(n), key=f"k{n}" if keyed else None) for n in range(100)],
        )
    relay = relay_to(destination, outbox, settings=SMALL)

    relay.start()
    assert eventually(lambda: states(engine).get("waiting", 0) >= 20)
    calls = destination.calls
    assert eventually(lambda: destination.calls >= calls + 5)
    during = states(engine)
    destination.answer = lambda _message: DONE
    drained = eventually(lambda: len(destination.messages) == 100)
    stop(relay)

    assert during == {"waiting": 20}
    assert drained
    assert states(engine) == {}


@pytest.mark.storm
def test_a_message_that_is_never_accepted_does_not_hold_up_what_is_parked_behind_it(engine):
    """Its destination says that it takes nothing at all, whenever it gets this message."""
    failed: set[bytes] = set()

    def answer(message: Message) -> Verdict:
        if message.body == b"blocked by a firewall":
            return Unavailable("403", everything=True)
        if message.body == b"fails once" and message.body not in failed:
            failed.add(message.body)
            return Retry("not yet")
        return DONE

    outbox, destination = Outbox(engine), Destination(answer)
    fill(outbox, 5)
    relay = relay_to(destination, outbox)
    relay.start()
    assert eventually(lambda: len(destination.messages) == 5)
    with outbox.begin() as session:
        outbox.send(session, "t", b"blocked by a firewall", key="p")
        outbox.send(session, "t", b"others")
    assert eventually(lambda: states(engine) == {"waiting": 1})

    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", body, key="k") for body in (b"fails once", b"stands behind it")])
    arrived = eventually(lambda: destination.of_key("k") == [b"fails once", b"stands behind it"])
    stop(relay)

    assert arrived
    assert states(engine) == {"waiting": 1}


def test_delayed_messages_that_fall_due_one_after_the_other_stand_before_what_comes_later(engine):
    """Their key is held all the time. Later messages come behind both, not between them."""
    outbox, destination = Outbox(engine), Destination(failing({b"bad"}, Reject("never")))
    with outbox.begin() as session:
        outbox.send(session, "t", b"first delayed", key="k", delay=timedelta(hours=1))
        outbox.send(session, "t", b"second delayed", key="k", delay=timedelta(hours=1))
        outbox.send(session, "t", b"bad", key="k")
        outbox.send(session, "t", b"behind", key="k")
    relay_to(destination, outbox).until_empty()
    for id in (1, 2):
        make_due(engine, id)
        relay_to(destination, outbox).until_empty()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", body, key="k") for body in ("later", "last")])
    relay_to(destination, outbox).until_empty()

    destination.answer = lambda _message: DONE
    decide(engine, "replay")
    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"bad", b"behind", b"first delayed", b"second delayed", b"later", b"last"]


@pytest.mark.every_database
def test_delayed_messages_of_a_key_come_in_the_order_in_which_they_fall_due(engine):
    """Also when the worker finds both due at once, because it was away."""
    outbox, destination = Outbox(engine), Destination()
    with outbox.begin() as session:
        outbox.send(session, "t", b"later", key="k", delay=timedelta(hours=2))
        outbox.send(session, "t", b"sooner", key="k", delay=timedelta(hours=1))
    relay_to(destination, outbox).until_empty()
    step_clock(engine, timedelta(hours=3), "outbox_parked.due_at")

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"sooner", b"later"]


@pytest.mark.timed("counts the looks of some seconds")
def test_a_missing_topic_is_probed_at_leisure(engine, monkeypatch):
    """While it is missing the worker does not ask the database for its messages all the time."""
    looks = 0
    ready = Parked.ready

    def counted(*arguments, **options):
        nonlocal looks
        looks += 1
        return ready(*arguments, **options)

    monkeypatch.setattr(Parked, "ready", counted)
    outbox, destination = Outbox(engine), without("missing")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("missing" if n % 2 else "there", str(n)) for n in range(20)])
    relay = relay_to(destination, outbox)

    relay.start()
    eventually(lambda: states(engine).get("waiting") == 10)
    time.sleep(1)
    looks, began = 0, time.monotonic()
    time.sleep(3)
    looked, seconds = looks, time.monotonic() - began
    stop(relay)

    assert looked <= 5 * seconds


@pytest.mark.usefixtures("renewed_at_once")
def test_what_waits_tells_why_it_is_not_accepted_now(engine):
    """A person has mended the first reason, and now there is another one."""
    outbox, destination = Outbox(engine), without("missing")
    destination.answer = lambda message: Unavailable("bad password") if message.topic == "missing" else DONE
    with outbox.begin() as session:
        outbox.send_all(session, [Message("missing" if n % 2 else "there", str(n)) for n in range(6)])
    relay = relay_to(destination, outbox)

    relay.start()
    before = eventually(lambda: errors(outbox) == [("missing", "bad password")] * 3)
    destination.answer = without("missing").answer
    after = eventually(lambda: errors(outbox) == [("missing", "no stream")] * 3)
    stop(relay)
    (status,) = outbox.admin.statuses()

    assert (before, after) == (True, True)
    assert [(each.state, each.messages, each.error) for each in status.troubles] == [("waiting", 3, "no stream")]


def test_a_worker_begins_with_the_error_of_now(engine, monkeypatch):
    """A portion does not hold all messages."""
    monkeypatch.setattr("outbox.worker.parked._MOST_RENEWED", 2)
    outbox, destination = Outbox(engine), without("missing")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("missing" if n % 2 else "there", str(n)) for n in range(6)])
    relay_to(destination, outbox).until_empty()
    destination.answer = lambda message: Unavailable("bad password") if message.topic == "missing" else DONE
    relay = relay_to(destination, outbox)

    relay.start()
    begun = eventually(lambda: errors(outbox) == [("missing", "bad password")] * 3, 30)
    stop(relay)

    assert begun


@pytest.mark.storm
@pytest.mark.usefixtures("renewed_at_once")
def test_what_waits_for_a_call_that_hangs_tells_so_while_others_of_its_topic_are_refused(engine):
    """The next message of the key waits for the call, and an attempt is counted for the message of the call."""
    outbox, destination = Outbox(engine), without("missing")
    released = False
    destination.hanging = lambda messages: not released and any(message.body == b"hangs" for message in messages)
    relay = relay_to(overdue_when_hanging(destination), outbox)
    try:
        with outbox.begin() as session:
            outbox.send_all(session, [Message("missing", body, key="k") for body in (b"hangs", b"behind")])
        relay.start()
        hung = eventually(lambda: states(engine) in ({"waiting": 1, "behind": 1}, {"retry": 1, "behind": 1}), 20)
        with outbox.begin() as session:
            outbox.send_all(session, [Message("missing", b"refused"), Message("there", b"1")])
        refused = eventually(lambda: ("missing", "no stream") in errors(outbox), 20)
        calls = destination.calls
        probed = eventually(lambda: destination.calls >= calls + 2, 20)
        found = {each.id: each.error for each in outbox.admin.parked(state="waiting")}
        behind = {each.id: each.head for each in outbox.admin.parked(state="behind")}
    finally:
        released = True
        stop(relay)

    assert (hung, refused, probed) == (True, True, True)
    assert (found[3], behind) == ("no stream", {2: 1})


def test_only_what_waits_in_the_topic_gets_its_new_error_by_portions(engine, channel):
    outbox, parked = Outbox(engine), Parked(channel, "relay")
    with outbox.begin() as session:
        outbox.send_all(session, [Message(topic, b"") for topic in ("a", "a", "b", "a")])
    waiting = Parking(state="waiting", holds=False, error="bad password", delay=timedelta(0))
    with channel.transaction():
        parked.park(by_id({waiting: [1, 2, 3], replace(waiting, state="dead"): [4]}))
        renewed = [parked.renew_error("a", "no stream", limit=1)]

    found = [[each.error for each in outbox.admin.parked()]]
    renewed += [parked.renew_error("a", "no stream", limit=5) for _ in range(2)]
    found += [[each.error for each in outbox.admin.parked()]]

    assert renewed == [1, 1, 0]
    assert found == [["no stream", *["bad password"] * 3], [*["no stream"] * 2, *["bad password"] * 2]]


@pytest.mark.timed("counts the calls of some seconds")
def test_a_delayed_message_for_a_missing_topic_is_probed_at_leisure(engine):
    outbox, destination = Outbox(engine), without("missing")
    with outbox.begin() as session:
        outbox.send(session, "missing", b"1", delay=timedelta(seconds=0.2))
        outbox.send(session, "missing", b"2", key="k", delay=timedelta(seconds=0.2))
        outbox.send(session, "there", b"3")
        outbox.send(session, "missing", b"4")
    relay = relay_to(destination, outbox)

    began = time.monotonic()
    relay.start()
    eventually(lambda: destination.calls > 0)
    time.sleep(3)
    calls, seconds = destination.calls, time.monotonic() - began
    destination.answer = lambda _message: DONE
    arrived = eventually(lambda: len(destination.messages) == 4)
    stop(relay)

    assert calls <= 7 * seconds
    assert arrived
    assert states(engine) == {}


def test_a_blocked_message_of_a_missing_topic_holds_its_key_when_its_turn_comes(engine):
    """The head of the key is done; the next is of a missing topic, and what stands behind it waits with it."""
    outbox, destination = Outbox(engine), Destination(failing({b"head"}, Reject("never")))
    with outbox.begin() as session:
        for topic, body in [("there", b"head"), ("missing", b"middle"), ("there", b"tail")]:
            outbox.send(session, topic, body, key="k")
    relay_to(destination, outbox).until_empty()
    destination.answer = without("missing").answer
    decide(engine, "replay")
    relay = relay_to(destination, outbox)

    relay.start()
    eventually(lambda: len(destination.messages) == 1)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("there", f"traffic {n}") for n in range(50)])
    assert eventually(lambda: len(destination.messages) == 51)
    calls = destination.calls
    assert eventually(lambda: destination.calls >= calls + 1)
    during = destination.of_key("k")
    destination.answer = lambda _message: DONE
    eventually(lambda: len(destination.messages) == 53)
    stop(relay)

    assert during == [b"head"]
    assert destination.of_key("k") == [b"head", b"middle", b"tail"]


def test_a_message_that_raises_does_not_hold_up_what_is_due_beside_it(engine):
    """All is parked, nothing else flows, and the first of it raises: the others of its topic arrive."""
    outbox, destination = Outbox(engine), Destination(lambda _message: Retry("not yet", timedelta(seconds=0.2)))
    fill(outbox, 10, keys=10)
    relay_to(destination, outbox).until_empty()
    destination.answer = failing({b"0"}, ValueError("cannot take this"))
    relay = relay_to(destination, outbox)

    relay.start()
    flowed = eventually(lambda: len(destination.messages) == 9)
    stop(relay)

    assert flowed
    assert sorted(map(int, destination.bodies)) == list(range(1, 10))


def test_a_message_that_hangs_ends_as_a_dead_letter(engine):
    """Others are accepted meanwhile. A process that is started again counts on from what is stored."""
    outbox, destination = Outbox(engine), Destination()
    released = False
    destination.hanging = lambda messages: not released and any(message.body == b"0" for message in messages)
    fill(outbox, 20, keys=4)
    attempts = []
    try:
        for attempt in range(1, 4):
            # Other objects, as a process has that was started again; the one before left its calls behind.
            relay = relay_to(overdue_when_hanging(destination, deadlines=1), Outbox(engine))
            relay.start()

            def counted(attempt: int = attempt) -> bool:
                with outbox.begin() as session:
                    outbox.send(session, "other", b"fresh")
                return (1, "dead" if attempt == 3 else "retry", attempt) in parked(engine)

            attempts.append(eventually(counted, 90))
            stop(relay)
            end_lease(engine)
        found = parked(engine)
        seen = {key: destination.of_key(f"k{key}") for key in range(4)}
    finally:
        released = True

    assert attempts == [True] * 3
    assert found == [(1, "dead", 3), *((id, "behind", 0) for id in (5, 9, 13, 17))]
    assert seen == {0: [], **{key: [str(n).encode() for n in range(key, 20, 4)] for key in (1, 2, 3)}}


@pytest.mark.every_database
def test_a_replayed_message_comes_before_later_ones_of_its_key(engine):
    """It held nothing back while it was dead. Now it does, also while there are more replays than go out at once."""
    outbox, destination = Outbox(engine), Destination(lambda _message: Reject("never"))
    fill(outbox, 15, keys=15)
    relay_to(destination, outbox, settings=SMALL, on_dead="continue").until_empty()
    destination.answer = lambda _message: DONE
    fill(outbox, 5, keys=15, first=25)
    decide(engine, "replay")

    relay_to(destination, outbox, settings=SMALL).until_empty()

    keys = range(10, 15)
    assert [destination.of_key(f"k{key}") for key in keys] == [expected(key, 30, 15) for key in keys]


def test_a_message_that_is_replayed_waits_for_those_of_its_key_that_are_held(engine, channel):
    """It expired while they waited behind a message that is tried again; a worker takes over before that is due."""
    outbox, parked = Outbox(engine), Parked(channel, "relay")
    with outbox.begin() as session:
        ids = outbox.send_all(session, [Message("orders", b"", key="a") for _ in range(3)])
    first, second, third = range(1, 1 + len(ids))
    retried = Parking(state="retry", holds=True, attempts=1, delay=timedelta(0))
    with channel.transaction():
        parked.park(by_id({retried: [first], BEHIND: [second], EXPIRED: [third]}))
    with channel.transaction():
        parked.replay([third])
        FallingDue(channel, "relay").join([third])
        parked.advance({"a"})

    found: list[list[int | None]] = []
    for done in ([first], [second, third]):
        found.append([each.message.id for each in parked.ready((), 10, 1_000)])
        with channel.transaction():
            parked.remove(done)
            parked.advance({"a"})

    assert found == [[first], [second, third]]


@pytest.mark.parametrize(("first", "last"), [("discard", "replay"), ("replay", "discard")])
def test_the_last_decision_counts(engine, monkeypatch, first, last):
    """Also one that is written between a worker's look at the decisions and its hand on them."""
    outbox, destination = Outbox(engine), Destination(lambda _message: Reject("never"))
    fill(outbox, 2, keys=2)
    relay_to(destination, outbox).until_empty()
    destination.answer = lambda _message: DONE
    look, changes = Decisions.open, iter([last])

    def outdated(decisions: Decisions) -> list[int]:
        found = look(decisions)
        for verb in changes:
            decide(engine, verb)
        return found

    decide(engine, first)
    monkeypatch.setattr(Decisions, "open", outdated)
    relay_to(destination, outbox).until_empty()

    assert destination.bodies == ([b"0", b"1"] if last == "replay" else [])
    assert states(engine) == {}


@pytest.mark.parametrize("settle", ["settle", "settle_parked"], ids=["of the log", "of a parked row"])
def test_a_replayed_message_is_sent_although_the_answer_to_the_settle_of_its_failure_was_lost(
    engine, monkeypatch, settle
):
    """The same process reads it again, with what it knows from before."""
    verdicts: list[Verdict] = [Reject("never")]
    if settle == "settle_parked":
        verdicts.insert(0, Retry("not yet", counts=False))
    outbox, destination = Outbox(engine), Destination(lambda _message: verdicts.pop(0) if verdicts else DONE)
    real, lost = getattr(Settlement, settle), list[None]()

    def losing(settlement: Settlement, *arguments: Any) -> None:
        real(settlement, *arguments)
        if not lost and arguments[1]:
            lost.append(None)
            raise LeaseLostError("the answer is lost")

    monkeypatch.setattr(Settlement, settle, losing)
    fill(outbox, 1)
    relay = relay_to(destination, outbox)
    assert eventually(lambda: after(relay, engine) == {"dead": 1})
    calls = destination.calls
    decide(engine, "replay")
    relay.until_empty()

    assert (len(lost), calls, destination.calls) == (1, 1 if settle == "settle" else 2, calls + 1)
    assert (destination.bodies, states(engine)) == ([b"0"], {})


def test_a_key_that_has_its_turn_keeps_it_when_messages_come(engine):
    """More stands behind its head than goes out at once; what comes meanwhile stands behind that, and follows."""
    outbox, destination = Outbox(engine), Destination(failing({b"0"}, Reject("never")))
    fill(outbox, 30, keys=1)
    relay_to(destination, outbox, settings=SMALL).until_empty()
    fill(outbox, 15, keys=1, first=30)
    decide(engine, "discard")

    relay_to(destination, outbox, settings=SMALL).until_empty()

    assert destination.bodies == expected(0, 45, 1)[1:]
    assert states(engine) == {}


def test_more_messages_fall_due_at_once_than_are_placed_at_once(engine):
    """Portion by portion in the order in which they are due, which is not that of the log, also among others' keys."""
    outbox, destination = Outbox(engine), Destination()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", str(n), key=f"k{n % 2}", delay=timedelta(hours=1)) for n in range(35)])
    relay_to(destination, outbox, settings=SMALL).until_empty()
    table = tables_of(outbox.database).parked
    with engine.begin() as connection:
        for n in range(35):
            due_at = datetime(2026, 1, 1, tzinfo=UTC) - timedelta(seconds=n)
            connection.execute(update(table).where(table.c.id == n + 1).values(due_at=due_at))

    relay_to(destination, outbox, settings=SMALL).until_empty()

    due = [str(n).encode() for n in reversed(range(35))]
    assert [destination.of_key(f"k{key}") for key in (0, 1)] == [due[::2], due[1::2]]


def held_behind_a_dead_letter(engine: Engine, count: int, *beside: Message) -> tuple[Outbox, Destination]:
    """A key's messages wait behind a dead letter, and others of the topic for another try. Then the dead one goes."""
    outbox = Outbox(engine)
    destination = Destination(
        lambda message: Reject("never") if message.body == b"head" else Retry("not yet", timedelta(seconds=0.2))
    )
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", body, key="k") for body in ("head", *map(str, range(count)))])
        outbox.send_all(session, beside)
    relay_to(destination, outbox).until_empty()
    assert states(engine) == {"dead": 1, "behind": count, "retry": len(beside)}
    decide(engine, "discard")
    return outbox, destination


NEVER: dict[str, Verdict | Exception] = {
    "raises": ValueError("cannot take this"),
    "speaks of everything": Unavailable("403", everything=True),
    "speaks of the topic": Unavailable("no stream"),
}


@pytest.mark.smoke("the pauses of a refused topic grow to seconds")
@pytest.mark.parametrize("never", NEVER.values(), ids=NEVER)
def test_a_key_with_more_than_a_batch_hides_no_other(engine, never):
    """Its first message is never accepted, and nothing else flows."""
    outbox, destination = held_behind_a_dead_letter(engine, 25, Message("t", "other", key="o"), Message("t", "none"))
    destination.answer = failing({b"0"}, never)
    relay = relay_to(destination, outbox, settings=SMALL)

    relay.start()
    arrived = eventually(lambda: set(destination.bodies) == {b"other", b"none"}, 20)
    destination.answer = lambda _message: DONE
    drained = eventually(lambda: states(engine) == {}, 20)
    stop(relay)

    assert arrived
    assert drained
    assert destination.of_key("k") == [str(n).encode() for n in range(25)]


@pytest.mark.every_database
def test_heads_that_die_alone_make_room_for_the_next_of_their_keys_in_one_settle(engine, channel):
    """However many keys there are, and in whatever order the database changes the rows."""
    outbox, parked, keys = Outbox(engine), Parked(channel, "relay"), range(40)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"", key=f"k{n}") for n in keys for _ in range(2)])
    heads, seconds = [2 * n + 1 for n in keys], [2 * n + 2 for n in keys]
    retry, dead = Parking(state="retry", holds=True, delay=timedelta(0)), Parking(state="dead", holds=False)
    with channel.transaction():
        parked.park(by_id({retry: heads, BEHIND: seconds}))
    with engine.begin() as connection:
        connection.execute(text("ANALYZE"))

    with channel.transaction():
        parked.change(by_id({dead: heads, retry: seconds}))

    assert states(engine) == {"dead": 40, "retry": 40}


@pytest.mark.every_database
def test_a_second_head_of_a_held_key_stands_behind_the_first(engine, channel):
    outbox, parked = Outbox(engine), Parked(channel, "relay")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"", key="k") for _ in range(2)])
    dead = Parking(state="dead", holds=True)

    for id in (1, 2):
        with channel.transaction():
            parked.park([(id, dead)])

    assert states(engine) == {"dead": 1, "behind": 1}


@pytest.mark.every_database
def test_changes_that_were_made_in_vain_are_rehearsed_beside_another_head(engine, channel):
    """The key has got a head by another worker meanwhile, and settling works again."""
    outbox, subscriptions = Outbox(engine), Subscriptions(channel)
    subscriptions.declare(Declaration(name="relay", destination="test"), "earliest")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"", key="k") for _ in range(2)])
    lease = Leases(channel).acquire(subscriptions.get("relay").all_partitions()[0], "test", timedelta(minutes=1))
    newest = None if lease is None else ProgressLog(channel).newest(lease.partition)
    assert lease is not None
    assert newest is not None
    head, unsettled = Parking(state="dead", holds=True), Unsettled()
    with channel.transaction():
        Parked(channel, "relay").park([(2, head)])
    unsettled.changes = ParkedChanges(parked=[(1, head)], changed=[(2, head)], keys={"k"})

    Settlement(channel, lease, Log().now(channel).incarnation, unsettled).rehearse(newest.progress)

    assert states(engine) == {"dead": 1}

"""One message that always fails: its key waits or goes on, as the policy says, and nobody else notices."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Message, Outbox, Retry
from outbox.model.verdict import DONE
from outbox.worker import upkeep
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import BAD, Destination, expected, failing, fill, relay_to
from tests.support.parked import attempts, decide, states
from tests.support.waiting import eventually

COUNT, KEYS, POISON = 400, 20, 105
BEHIND = len([n for n in range(POISON + 1, COUNT) if n % KEYS == POISON % KEYS])


def others(destination: Destination) -> dict[int, list[bytes]]:
    return {key: destination.of_key(f"k{key}") for key in range(KEYS) if key != POISON % KEYS}


OTHERS = {key: expected(key, COUNT, KEYS) for key in range(KEYS) if key != POISON % KEYS}


@pytest.mark.storm
@pytest.mark.parametrize("form", list(BAD))
@pytest.mark.parametrize("on_dead", ["block", "continue"])
def test_a_poison_message_concerns_its_own_key_only(engine, form, on_dead):
    """What raises counts only while others are accepted, so there are others all the time."""
    outbox, destination = Outbox(engine), Destination(failing({str(POISON).encode()}, BAD[form]))
    fill(outbox, COUNT, keys=KEYS)
    relay = relay_to(destination, outbox, on_dead=on_dead)

    def dead_beside_traffic() -> bool:
        with outbox.begin() as session:
            outbox.send(session, "other", b"fresh")
        return "dead" in states(engine)

    relay.start()
    assert eventually(dead_beside_traffic)
    reached = COUNT - 1 - (BEHIND if on_dead == "block" else 0)
    eventually(lambda: len([m for m in destination.messages if m.key is not None]) >= reached)
    relay.stop()
    relay.join(60)

    own = expected(POISON % KEYS, COUNT, KEYS)
    before = own[: own.index(str(POISON).encode())]
    after = own[len(before) + 1 :]
    held = {"behind": BEHIND} if on_dead == "block" else {}
    assert others(destination) == OTHERS
    assert destination.of_key(f"k{POISON % KEYS}") == (before if on_dead == "block" else before + after)
    assert states(engine) == {"dead": 1, **held}
    with engine.connect() as connection:
        attempts = connection.execute(text("SELECT attempts FROM outbox_parked WHERE state = 'dead'")).scalar_one()
    assert attempts == (1 if form == "rejects" else 3)


@pytest.mark.storm
def test_a_message_that_hangs_the_sender_keeps_what_its_call_has_and_no_more(pg_engine):
    """An embedded relay goes on beside the call, and what the call has comes once, when it comes back."""
    outbox, destination = Outbox(pg_engine), Destination()
    released = False
    poison = str(POISON).encode()
    destination.hanging = lambda messages: not released and any(m.body == poison for m in messages)
    fill(outbox, COUNT, keys=KEYS)
    relay = relay_to(overdue_when_hanging(destination), outbox)

    relay.start()
    assert eventually(lambda: states(pg_engine).get("waiting", 0) > 0)
    with outbox.begin() as session:
        outbox.send(session, "other", b"of another key", key="another")
    beside = eventually(lambda: b"of another key" in destination.bodies)
    before = len(destination.messages)
    released = True
    drained = eventually(lambda: len(destination.messages) >= COUNT + 1)
    relay.stop()
    relay.join(60)

    assert (beside, drained) == (True, True)
    assert 0 < before < COUNT
    assert {key: destination.of_key(f"k{key}") for key in range(KEYS)} == {
        key: expected(key, COUNT, KEYS) for key in range(KEYS)
    }


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_a_decision_lets_the_key_go_on_in_order(engine, verb):
    outbox, destination = Outbox(engine), Destination(failing({b"105"}, BAD["rejects"]))
    fill(outbox, COUNT, keys=KEYS)
    relay = relay_to(destination, outbox)

    relay.start()
    held = eventually(lambda: states(engine) == {"dead": 1, "behind": BEHIND})
    destination.answer = lambda _message: DONE
    decide(engine, verb)
    whole = COUNT if verb == "replay" else COUNT - 1
    drained = eventually(lambda: len(destination.messages) >= whole)
    emptied = eventually(lambda: states(engine) == {})
    fill(outbox, KEYS, keys=KEYS, first=COUNT)
    eventually(lambda: len(destination.messages) >= whole + KEYS)
    relay.stop()
    relay.join(60)

    own = [body for body in expected(POISON % KEYS, COUNT + KEYS, KEYS) if verb == "replay" or body != b"105"]
    assert (held, drained, emptied) == (True, True, True)
    assert destination.of_key("k5") == own


def test_of_a_message_that_fails_while_nothing_else_comes_only_a_retry_counts(engine):
    """What raises may be the destination's fault."""
    outbox, destination = Outbox(engine), Destination(failing({b"1"}, BAD["raises"]))
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    relay = relay_to(destination, outbox)

    relay.start()
    tried = eventually(lambda: destination.calls >= 2)
    counted = attempts(engine)
    destination.answer = lambda _message: Retry("later", timedelta(hours=1))
    parked = eventually(lambda: states(engine) == {"retry": 1})
    relay.stop()
    relay.join(60)

    assert (tried, counted, parked, attempts(engine)) == (True, 0, True, 1)


@pytest.mark.storm
def test_a_hot_key_catches_up_with_its_own_arrivals(pg_engine, full):
    """What stands behind a dead letter drains in batches, in order, while more of the key keeps coming."""
    count = 20_000 if full else 3_000
    outbox, destination = Outbox(pg_engine), Destination(failing({b"0"}, BAD["rejects"]))
    fill(outbox, count, keys=1)
    relay = relay_to(destination, outbox)

    relay.start()
    held = eventually(lambda: states(pg_engine) == {"dead": 1, "behind": count - 1})
    destination.answer = lambda _message: DONE
    decide(pg_engine, "discard")
    for extra in range(50):
        with outbox.begin() as session:
            outbox.send(session, "topic0", str(count + extra), key="k0")
    drained = eventually(lambda: len(destination.messages) >= count + 49)
    relay.stop()
    relay.join(60)

    assert (held, drained) == (True, True)
    assert destination.bodies == [str(n).encode() for n in range(1, count + 50)]


@pytest.mark.storm
def test_parked_messages_outlive_their_worker(engine):
    """Another worker knows what is held back, and by what."""
    outbox, destination = Outbox(engine), Destination(failing({b"0"}, BAD["rejects"]))
    fill(outbox, 40, keys=2)
    relay_to(destination, outbox).until_empty()
    fill(outbox, 4, keys=2, first=40)
    destination.answer = lambda _message: DONE

    relay_to(destination, outbox).until_empty()

    assert destination.of_key("k0") == []
    assert destination.of_key("k1") == expected(1, 44, 2)
    assert states(engine) == {"dead": 1, "behind": 21}


@pytest.mark.storm
def test_more_keys_than_memory_holds_are_looked_up(engine, monkeypatch):
    monkeypatch.setattr(upkeep, "MOST_KEYS", 5)
    poison = {str(n).encode() for n in range(10)}
    outbox, destination = Outbox(engine), Destination(failing(poison, BAD["rejects"]))
    fill(outbox, 60, keys=20)
    relay_to(destination, outbox).until_empty()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("topic0", b"late", key="k3"), Message("topic0", b"free", key="k13")])

    relay_to(destination, outbox).until_empty()

    assert destination.of_key("k3") == []
    assert destination.of_key("k13") == [*expected(13, 60, 20), b"free"]

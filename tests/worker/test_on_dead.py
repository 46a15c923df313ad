"""Whether a dead letter holds back its key is for people to say, and to say otherwise later."""

from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text

from outbox import LeaseLostError, Message, Outbox, Reject
from outbox.admin import commands
from outbox.model.subscription import OnDead
from outbox.model.verdict import DONE
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.destination import Destination, failing, relay_to
from tests.support.parked import decide, states
from tests.worker.test_parked import SMALL


def alter(engine: Engine, on_dead: OnDead) -> None:
    """As `outbox subscriptions alter relay --on-dead`."""
    database = Outbox(engine).database
    with closing(database.open()) as channel:
        stored = Subscriptions(channel).get("relay")
        commands.alter(channel, replace(stored, on_dead=on_dead))


def stored_policy(engine: Engine) -> str | None:
    with engine.connect() as connection:
        policy: str | None = connection.execute(text("SELECT on_dead FROM outbox_subscription")).scalar_one()
        return policy


def send(outbox: Outbox, key: str, *bodies: str) -> None:
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", body, key=key) for body in bodies])


def numbered(first: int, last: int) -> list[str]:
    return [str(n) for n in range(first, last)]


def encoded(*bodies: str) -> list[bytes]:
    return [body.encode() for body in bodies]


def test_what_a_dead_letter_holds_back_goes_out_in_order_when_it_no_longer_does(engine):
    """More than a relay takes at once, with another message among it that dies, and before what comes later."""
    outbox, destination = Outbox(engine), Destination(failing({b"bad", b"bad too"}, Reject("never")))
    send(outbox, "a", "bad", *numbered(0, 15), "bad too", *numbered(15, 35))
    send(outbox, "b", "bad", *numbered(0, 15))
    relay_to(destination, outbox, settings=SMALL).until_empty()
    held = states(engine)

    alter(engine, "continue")
    send(outbox, "b", *numbered(15, 30))
    send(outbox, "a", *numbered(35, 50))
    relay_to(destination, outbox, settings=SMALL).until_empty()

    assert held == {"dead": 2, "behind": 51}
    assert destination.of_key("a") == encoded(*numbered(0, 50))
    assert destination.of_key("b") == encoded(*numbered(0, 30))
    assert states(engine) == {"dead": 3}


def test_dead_letters_from_before_hold_nothing_back_when_others_are_to_again(engine):
    """Messages of their keys have passed them. The next ones do, and a replay joins what it finds of its key."""
    outbox, destination = Outbox(engine), Destination(failing({b"bad", b"bad too"}, Reject("never")))
    send(outbox, "a", "bad", "1")
    relay_to(destination, outbox).until_empty()
    alter(engine, "continue")
    relay_to(destination, outbox).until_empty()
    alter(engine, "block")
    send(outbox, "a", "2", "bad too", "3")
    relay_to(destination, outbox).until_empty()
    before = destination.bodies

    destination.answer = lambda _message: DONE
    decide(engine, "replay")
    relay_to(destination, outbox).until_empty()

    assert before == [b"1", b"2"]
    assert destination.bodies == [b"1", b"2", b"bad too", b"3", b"bad"]


def test_the_policy_and_what_it_frees_are_stored_together(engine, monkeypatch):
    outbox, destination = Outbox(engine), Destination(failing({b"bad"}, Reject("never")))
    send(outbox, "a", "bad", "1")
    relay_to(destination, outbox).until_empty()

    def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Parked, "let_go", fail)
    with pytest.raises(ZeroDivisionError):
        alter(engine, "continue")

    assert stored_policy(engine) == "block"


def test_nothing_is_altered_when_a_worker_has_taken_the_lease(engine, monkeypatch):
    """It works by the former policy, and knows which keys are held back."""
    changing = Subscriptions.changing

    def overtaken(self):
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_lease SET epoch = epoch + 1"))
        return changing(self)

    outbox, destination = Outbox(engine), Destination(failing({b"bad"}, Reject("never")))
    send(outbox, "a", "bad", "1")
    relay_to(destination, outbox).until_empty()
    monkeypatch.setattr(Subscriptions, "changing", overtaken)

    with pytest.raises(LeaseLostError):
        alter(engine, "continue")

    with engine.connect() as connection:
        blocking = connection.execute(text("SELECT count(*) FROM outbox_parked WHERE unit IS NOT NULL")).scalar_one()
    assert (stored_policy(engine), blocking) == ("block", 2)

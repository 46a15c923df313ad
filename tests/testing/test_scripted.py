"""A destination that does as it is told: the handling of every trouble can be tested without one."""

import threading
from datetime import timedelta

import pytest

from outbox import Done, Message, Outbox, Reject, Relay, Retry, RetryPolicy, Unavailable, Verdict
from outbox.testing.draining import drain
from outbox.testing.scripted import ScriptedSender
from tests.support.readers import send
from tests.support.waiting import eventually


def orders(*keys: str | None) -> list[Message]:
    return [Message("orders", str(n), key=key) for n, key in enumerate(keys)]


def texts(messages: list[Message]) -> list[str]:
    return [message.body.decode() for message in messages]


def test_without_a_script_everything_is_done():
    sender = ScriptedSender()
    messages = orders(None, "a")

    assert sender.send(messages) == [Done(), Done()]
    assert (sender.calls, sender.given, sender.stored) == ([messages], messages, messages)


def test_a_script_has_one_step_for_each_call():
    sender = ScriptedSender(
        Unavailable("starting"), ConnectionError("reset"), [Done(), Reject("bad")], None, Retry("later"),
        destination="elsewhere",
    )  # fmt: skip
    messages = orders("a", "b")
    outcomes: list[object] = []
    for _ in range(6):
        try:
            outcomes.append(sender.send(messages))
        except ConnectionError as error:
            outcomes.append(str(error))

    assert outcomes == [
        [Unavailable("starting")] * 2,
        "reset",
        [Done(), Reject("bad")],
        [Done(), Done()],
        [Retry("later")] * 2,
        [Done(), Done()],
    ]
    assert (texts(sender.stored), len(sender.calls)) == (["0", "0", "1", "0", "1"], 6)


def test_rules_speak_of_messages():
    """The first that has an answer left."""
    sender = ScriptedSender()
    sender.on(topic="mails").always(Reject("no mail today"))
    sender.on(key="a").answer(Retry("1"), Retry("2"))
    sender.on(where=lambda message: message.body == b"x").answer(Retry("x")).always(Unavailable("x"))
    messages = [Message("orders", "0", key="a"), Message("mails", "1"), Message("orders", "x"), Message("orders", "3")]

    verdicts = [sender.send(messages) for _ in range(3)]

    mail = Reject("no mail today")
    assert verdicts == [
        [Retry("1"), mail, Retry("x"), Done()],
        [Retry("2"), mail, Unavailable("x"), Done()],
        [Done(), mail, Unavailable("x"), Done()],
    ]


def test_behind_a_failure_of_its_key_nothing_is_done():
    """As a sender has promised; whoever is not asked uses up no answer."""
    sender = ScriptedSender()
    sender.on(key="a").answer(Done(), Retry("2"), Retry("3"))
    messages = orders("a", "b", "a", "a", None)

    first, second = sender.send(messages), sender.send(messages[2:])

    earlier = Unavailable("an earlier message of its key was not stored")
    assert first == [Done(), Done(), Retry("2"), earlier, Done()]
    assert second == [Retry("3"), earlier, Done()]


def test_a_rule_may_raise():
    sender = ScriptedSender()
    sender.on(key="b").answer(ConnectionError("reset"))

    with pytest.raises(ConnectionError, match="reset"):
        sender.send(orders("a", "b"))

    assert sender.stored == []


@pytest.mark.parametrize("by_rule", [False, True])
def test_a_call_hangs_until_an_event_is_set(by_rule):
    event = threading.Event()
    sender = ScriptedSender() if by_rule else ScriptedSender(event)
    if by_rule:
        sender.on(topic="orders").answer(event)
    outcome: list[Verdict] = []
    call = threading.Thread(target=lambda: outcome.extend(sender.send(orders("a"))))
    call.start()

    assert eventually(lambda: sender.calls)
    call.join(0.1)
    assert (call.is_alive(), sender.stored) == (True, [])
    event.set()
    call.join(60)
    assert (outcome, texts(sender.stored)) == ([Done()], ["0"])
    assert len(sender.calls) == 1


def test_a_relay_is_led_through_trouble(sqlite_engine):
    """An outage, a failure and a rejection: what must come of each is in one list."""
    outbox = Outbox(sqlite_engine)
    sender = ScriptedSender(ConnectionError("gone"))
    soon = timedelta(milliseconds=10)
    sender.on(where=lambda message: message.body == b"1").answer(Retry("busy", soon), Retry("busy", soon))
    sender.on(where=lambda message: message.body == b"2").always(Reject("bad"))
    send(outbox, "0", "1", "2", "3")
    relay = Relay(outbox, sender, retry=RetryPolicy(attempts=5))

    def everything_is_stored() -> bool:
        relay.until_empty()
        return len(sender.stored) == 3

    assert eventually(everything_is_stored)

    assert sorted(texts(sender.stored)) == ["0", "1", "3"]
    assert [m.attempt for m in sender.stored if m.body == b"1"] == [3]


def test_closing_is_counted():
    sender = ScriptedSender()
    sender.close()
    sender.close()

    assert sender.closed == 2


# Drained


def test_a_drain_delivers_what_is_committed(engine):
    outbox = Outbox(engine)
    send(outbox, "1", "2")
    with outbox.begin() as session:
        outbox.send(session, "orders", "gone")
        session.rollback()

    delivered = [texts(drain(outbox)), texts(drain(outbox))]
    send(outbox, "3")
    delivered += [texts(drain(outbox)), texts(drain(outbox, name="another"))]

    assert delivered == [["1", "2"], [], ["3"], ["1", "2", "3"]]


def test_a_drain_ends_at_a_sender_or_a_function(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    sender = ScriptedSender()
    sender.on(where=lambda message: message.body == b"2").always(Retry("busy"))
    handled: list[Message] = []
    send(outbox, "1", "2", "3")

    assert texts(drain(outbox, sender, name="a")) == texts(sender.stored) == ["1", "3"]
    assert texts(drain(outbox, handled.append, name="b")) == texts(handled) == ["1", "2", "3"]
    assert sender.closed == 0
    assert drain(outbox, name="c", topics=["mails"]) == []


def test_a_drain_to_a_url_closes_its_sender(sqlite_engine, tmp_path):
    outbox = Outbox(sqlite_engine)
    send(outbox, "1", "2")

    assert texts(drain(outbox, f"file:{tmp_path / 'out.jsonl'}")) == ["1", "2"]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2

"""`outbox subscriptions pause` and `resume`, and what `outbox status` shows meanwhile."""

import re

import pytest
from sqlalchemy import text

from outbox import Outbox, Relay
from tests.support.command_line import outbox
from tests.support.destination import Destination


@pytest.fixture
def idle(pg_engine):
    """A relay that was killed two days ago, with a message that waits since then."""
    sender = Outbox(pg_engine)
    Relay(sender, Destination()).until_empty()
    with sender.begin() as session:
        sender.send(session, "orders", b"1", key="k1")
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET settled_at = now() - interval '2 days'"))
        connection.execute(text("UPDATE outbox_message SET created_at = now() - interval '2 days'"))
    return pg_engine


def test_a_paused_subscription_is_shown_as_paused_and_is_no_alarm(idle):
    before = outbox(idle, "status", "--check")
    told = outbox(idle, "subscriptions", "pause", "relay", "--reason", "the broker moves")
    paused = outbox(idle, "status", "--check")
    (status,) = outbox(idle, "status", "--json").json["subscriptions"]
    outbox(idle, "subscriptions", "resume", "relay")
    after = outbox(idle, "status", "--check")

    assert (before.code, paused.code, after.code) == (1, 0, 1)
    assert re.fullmatch(r"relay: paused by \S+@\S+ \(the broker moves\)\n", told.err)
    assert re.fullmatch(
        r"relay: paused by \S+ \(the broker moves\) since [^;]+; to go on, run: outbox subscriptions resume relay\n",
        paused.err,
    )
    assert paused.out.splitlines()[1].split() == ["relay", "1", "2", "d", *["0"] * 6, "paused"]
    assert (status["backlog"], status["lag_seconds"] > 100_000, status["pauses"][0]["reason"]) == (
        1,
        True,
        "the broker moves",
    )


def test_a_key_and_a_rate_are_told(pg_engine):
    key = outbox(pg_engine, "subscriptions", "pause", "relay", "--key", "customer 7", "--json").json
    rate = outbox(pg_engine, "subscriptions", "pause", "relay", "--rate", "30/m", "--json").json
    shown = outbox(pg_engine, "status").err.splitlines()
    wrong = outbox(pg_engine, "subscriptions", "pause", "relay", "--rate", "fast")
    rest = outbox(pg_engine, "subscriptions", "resume", "relay")
    again = outbox(pg_engine, "subscriptions", "resume", "relay")
    last = outbox(pg_engine, "subscriptions", "resume", "relay", "--key", "customer 7")

    assert [(each["key"], each["rate"]) for each in key["pauses"]] == [("customer 7", None)]
    assert [(each["key"], each["rate"]) for each in rate["pauses"]] == [("customer 7", None), (None, 0.5)]
    assert [line.split(" by ")[0] for line in shown[:2]] == [
        "relay: paused for key 'customer 7'",
        "relay: slowed down to a message every 2 s",
    ]
    assert shown[0].endswith("; to go on, run: outbox subscriptions resume relay --key 'customer 7'")
    assert (wrong.code, "write 500/s, 30/m or 10/h" in wrong.err) == (2, True)
    assert rest.err.startswith("relay: resumed; still paused for key 'customer 7' by ")
    assert last.err == "relay: resumed\n"
    assert (again.code, "relay is not paused; to see all pauses, run: outbox status" in again.err) == (2, True)


def test_the_lists_show_the_pause_that_holds_a_key_back(idle):
    outbox(idle, "subscriptions", "pause", "relay", "--key", "k1", "--reason", "wrong prices")
    Relay(Outbox(idle), Destination()).until_empty()
    shown = [outbox(idle, *each) for each in (("parked", "list"), ("subscriptions", "list"), ("status",))]

    pause = "relay: paused for key 'k1' by <who> (wrong prices) since <moment> UTC; to go on, run: "
    pause += "outbox subscriptions resume relay --key k1"
    lines = [re.sub(r"(?<=since )[^;]+(?= UTC;)", "<moment>", each.err.splitlines()[0]) for each in shown]
    told = [re.sub(r"(?<=by )\S+", "<who>", each) for each in lines]
    assert (told, shown[0].out.splitlines()[1].split()[2:5]) == ([pause] * 3, ["retry", "orders", "k1"])

"""What people decided is kept: who, what, why and when, in the transaction that decides."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Finding, Message, Outbox, Reject, SubscriptionError
from outbox.admin.split import split
from outbox.store.database import Channel
from outbox.store.operations.restore import accept
from outbox.store.subscriptions.decisions import Decisions
from tests.support.command_line import outbox as run
from tests.support.destination import Destination, relay_to
from tests.support.parked import decide

NAME = "relay"
AGO = {"postgresql": "now() - interval '2 minutes'", "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-2 minutes')"}
TO = "nats://h:4222"


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    outbox = Outbox(engine)
    outbox.admin.create(NAME, destination=TO)
    return outbox


def kept(outbox: Outbox) -> list[tuple[Any, ...]]:
    """All decisions, the first first: person, verb, subscription, choice, reason, count; and that each is done."""
    found = outbox.admin.decisions()
    assert all(each.done_at is not None for each in found)
    return [(each.by, each.verb, each.subscription, each.choice, each.reason, each.count) for each in reversed(found)]


def test_each_order_about_a_subscription_is_a_decision(outbox):
    admin = outbox.admin
    admin.pause(NAME, key="order-7", by="ann", reason="checked")
    admin.resume(NAME, key="order-7", by="ann")
    admin.pause(NAME, rate=5.0, by="ann")
    admin.resume(NAME, by="ann")
    admin.alter(NAME, on_dead="continue", grace=timedelta(seconds=1), by="ben")
    admin.alter(NAME, partitions=2, by="ben")
    admin.split(NAME, ["mail"], destination="nats://other:4222", as_name="mail", by="ben")
    admin.backfill(NAME, ["orders"], by="ben")
    admin.reset(NAME, "latest", by="eve")
    admin.drop(NAME, by="eve")

    assert kept(outbox) == [
        ("ann", "pause", NAME, {"key": "order-7"}, "checked", None),
        ("ann", "resume", NAME, {"key": "order-7"}, None, None),
        ("ann", "pause", NAME, {"rate": 5.0}, None, None),
        ("ann", "resume", NAME, {}, None, None),
        ("ben", "alter", NAME, {"on_dead": "continue", "grace": 1.0}, None, None),
        ("ben", "partitions", NAME, {"partitions": 2}, None, None),
        ("ben", "split", NAME, {"topics": ["mail"], "as": "mail", "destination": "nats://other:4222"}, None, 0),
        ("ben", "backfill", NAME, {"topics": ["orders"], "start": "earliest"}, None, None),
        ("eve", "reset", NAME, {"start": "latest"}, None, 0),
        ("eve", "drop", NAME, {"dropped": [NAME, f"{NAME}:backfill"]}, None, None),
    ]


def test_purge_erase_and_restore_are_decisions_and_rehearsals_are_none(outbox, channel):
    """Of an erase, not whose messages: the decision is kept longer."""
    for rehearsal in (True, False):
        outbox.admin.purge(timedelta(days=7), by="ann", rehearsal=rehearsal)
        outbox.admin.erase(keys=["order-7"], by="ann", rehearsal=rehearsal)
    accept(channel, by="ann")

    assert kept(outbox) == [
        ("ann", "purge", None, {"older_than": 604800.0}, None, None),
        ("ann", "erase", None, {"keys": 1, "messages": 0}, None, None),
        ("ann", "restore", None, {"accept": True}, None, None),
    ]


def test_an_order_that_is_refused_is_no_decision(outbox):
    with pytest.raises(SubscriptionError):
        outbox.admin.resume(NAME)
    with pytest.raises(SubscriptionError):
        split_all(outbox)

    assert kept(outbox) == []


def split_all(outbox: Outbox) -> None:
    """Nothing would be left."""
    channel = outbox.database.open()
    try:
        split(channel, NAME, ["*"], destination=TO)
    finally:
        channel.close()


def test_decisions_are_chosen_by_subscription_and_time(outbox):
    outbox.admin.pause(NAME, by="ann")
    outbox.admin.purge(timedelta(days=7), by="ann")
    (first,) = outbox.admin.decisions(subscription=NAME)

    found = outbox.admin.decisions
    assert [each.verb for each in found(since=first.at)] == ["purge", "pause"]
    assert found(since=first.at + timedelta(days=1)) == ()
    assert [each.verb for each in found(limit=1)] == ["purge"]
    with pytest.raises(SubscriptionError, match="has no time zone"):
        found(since=datetime(2026, 1, 1))  # noqa: DTZ001 - it is what is refused


def test_decisions_come_page_by_page(engine, outbox):
    for _ in range(3):
        outbox.admin.pause(NAME, by="ann")

    pages = [[each.id for each in outbox.admin.decisions(limit=2, after=after)] for after in (None, 2, 1)]
    typed = [each["id"] for each in run(engine, "decisions", "--after", "3", "--json").json["decisions"]]

    assert (pages, typed) == ([[3, 2], [1], []], [2, 1])


def test_a_decision_that_nobody_carries_out_is_a_finding_after_a_minute(engine, outbox):
    """One on messages that no worker has read waits for a worker that meets them."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", b"bad"), Message("t", b"unread")])
    relay_to(Destination(lambda _message: Reject("no")), outbox, name="other").until_empty()
    decide(engine, "replay", "bad")
    with closing(outbox.database.open()) as channel, channel.transaction():
        unread = {2: outbox.admin.parked()[1].message_id}
        Decisions(channel, "other").write("discard", [2], by="ann", reason="x", unread=unread)

    def found() -> list[Finding]:
        return [each for each in outbox.admin.diagnosis() if each.kind == "undone"]

    early = found()
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_decision SET at = {AGO[engine.dialect.name]}"))
    (late,) = found()

    assert (early, late.subscription, late.what) == ([], "other", "1 decision is not carried out")
    assert late.evidence == "a worker has to do so, and none runs"
    assert (late.seconds or 0) > 60


def test_an_erase_clears_keys_and_reasons_of_decisions_on_the_messages(outbox, channel):
    """Decisions on the messages of others keep their texts."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", b"", key=key) for key in ("ann", "ben", "cho")])
    relay_to(Destination(lambda _message: Reject("no")), outbox, name="other").until_empty()
    outbox.admin.discard(all=True, key="ann", name="other", reason="she asked", by="x")
    outbox.admin.discard(2, name="other", reason="as ann did", by="x")
    outbox.admin.discard(3, name="other", reason="an annex", by="x")
    outbox.admin.pause(NAME, key="ann", reason="asked", by="x")

    outbox.admin.erase(keys=["ann"], by="y")

    found = [(verb, choice.get("key"), reason) for _, verb, _, choice, reason, _ in kept(outbox)]
    assert found == [
        ("discard", None, None),
        ("discard", None, None),
        ("discard", None, "an annex"),
        ("pause", None, None),
        ("erase", None, None),
    ]


def test_the_command_lists_decisions(engine: Engine, outbox: Outbox, channel: Channel):
    run(engine, "subscriptions", "pause", NAME, "--rate", "5/s", "--by", "ann", "--reason", "slowly")
    run(engine, "purge", "--older-than", "7d", "--by", "ben")

    listed, some = run(engine, "decisions"), run(engine, "decisions", "--name", NAME, "--json")

    words = [line.split() for line in listed.out.splitlines()[1:]]
    assert [(each[0], each[3], each[4]) for each in words] == [("2", "ben", "purge"), ("1", "ann", "pause")]
    assert [(each["verb"], each["by"], each["choice"], each["reason"]) for each in some.json["decisions"]] == [
        ("pause", "ann", {"rate": 5.0}, "slowly")
    ]


def test_who_reads_a_body_is_kept_in_the_transaction_that_reads_it(outbox):
    with outbox.begin() as session:
        outbox.send(session, "orders", b"secret")
    relay_to(Destination(lambda _message: Reject("no")), outbox, name="other").until_empty()

    read = [outbox.admin.read_body(1, by="ann"), outbox.admin.read_body(1, name="other", by="ben")]
    with pytest.raises(SubscriptionError, match="no message 7 is in the log"):
        outbox.admin.read_body(7, by="ann")

    assert [each.body for each in read] == [b"secret", b"secret"]
    assert kept(outbox) == [
        ("ann", "read", None, {"message": 1}, None, 1),
        ("ben", "read", "other", {"message": 1}, None, 1),
    ]

"""Subscriptions by the Python API: made, altered, split, paused, reset and dropped, as the command line does."""

import asyncio
import secrets
import string
from datetime import datetime, timedelta

import pytest

from outbox import Outbox, Reject, Relay, SubscriptionError
from outbox.model.limits import MAX_KEY_BYTES
from tests.support.command_line import outbox as run

TO = "nats://h:4222"


def test_a_subscription_is_made_before_its_worker_and_found_again(engine):
    admin = Outbox(engine).admin

    made = admin.create("audit", destination=TO, topics=["orders.*"], on_dead="continue", partitions=2)

    assert (made.name, made.topics, made.on_dead, made.workers) == ("audit", ("orders.*",), "continue", (None, None))
    assert admin.create("audit", destination=TO, topics=["orders.*"], on_dead="continue") == made
    with pytest.raises(SubscriptionError, match="has topics"):
        admin.create("audit", destination=TO)


def test_the_list_is_what_the_command_prints(engine):
    admin = Outbox(engine).admin
    admin.create("audit", destination=TO)

    printed = run(engine, "subscriptions", "list", "--json").json["subscriptions"]

    assert [each["name"] for each in printed] == [each.name for each in admin.subscriptions()] == ["audit", "relay"]


def test_properties_are_altered_one_by_one(engine):
    admin = Outbox(engine).admin
    admin.create("audit", destination=TO, tags="placed")

    altered = admin.alter("audit", topics=["mail"], grace=timedelta(seconds=1))
    divided = asyncio.run(admin.aalter("audit", partitions=4))

    assert (altered.topics, altered.tags, altered.grace_seconds) == (("mail",), ("placed",), 1.0)
    assert (divided.partitions, divided.topics) == (4, ("mail",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "give one property or several"),
        ({"partitions": 2, "topics": ["a"]}, "partitions is a change of its own"),
        ({"destination": "reddist://h"}, "there is no sender for reddist: URLs"),
        ({"on_dead": "stop"}, "on_dead must be 'block' or 'continue', not 'stop'"),
        ({"grace": timedelta(days=-1)}, "grace must be a timedelta from 0 to 36525 days, not datetime.timedelta"),
        ({"grace": timedelta.max}, "grace must be a timedelta from 0 to 36525 days"),
        ({"compact": "no"}, "compact must be True or False, not 'no'"),
        ({"to": TO}, "alter has no option to; there are wait, by, topics, tags, filter, destination"),
    ],
)
def test_a_change_that_is_not_clear_is_refused(engine, change, said):
    admin = Outbox(engine).admin
    admin.create("audit", destination=TO)

    with pytest.raises(Exception, match=said):
        admin.alter("audit", **change)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"on_dead": "stop"}, "on_dead must be 'block' or 'continue', not 'stop'"),
        ({"on_death": "block"}, "create has no option on_death; there are start, topics"),
        ({"start": "now"}, "start must be 'earliest', 'latest' or a moment, not 'now'"),
        ({"ordered": "no"}, "ordered must be True or False, not 'no'"),
    ],
)
def test_a_subscription_with_a_wrong_property_is_not_made(engine, wrong, said):
    admin = Outbox(engine).admin

    with pytest.raises((TypeError, ValueError), match=said):
        admin.create("audit", destination=TO, **wrong)

    assert [each.name for each in admin.subscriptions()] == ["relay"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "name: must be 1 to 1000 bytes of text that can be printed, not ''"),
        ("a\0", r"that can be printed, not 'a\\x00'"),
        ("a\ud800", r"that can be printed, not 'a\\ud800'"),
        (501 * "é", "1 to 1000 bytes"),
        ("--yes", "name: --yes begins as an option of the command line does; use another name"),
        ("check:shop", "check:shop is the check-back of a producer group; use another name"),
    ],
    ids=["none", "zero", "surrogate", "long", "option", "check"],
)
def test_a_name_that_no_relay_can_have_is_refused(engine, name, said):
    outbox = Outbox(engine)

    for make in (
        lambda: outbox.admin.create(name, destination=TO),
        lambda: Relay(outbox, print, name=name),
    ):
        with pytest.raises(SubscriptionError, match=said):
            make()

    assert [each.name for each in outbox.admin.subscriptions()] == ["relay"]


def test_the_longest_name_can_be_stored_in_every_table(engine):
    # By chance, because the server compresses repetitions.
    name, key = ("".join(secrets.choice(string.ascii_letters) for _ in range(most)) for most in (1000, MAX_KEY_BYTES))
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "t", b"1", key=key)
    relay = Relay(outbox, lambda _message: Reject("never"), name=name)
    relay.until_empty()

    assert [each.state for each in outbox.admin.parked(name=name)] == ["dead"]


@pytest.mark.parametrize(
    ("start", "said"),
    [("now", "not 'now'"), (datetime.fromisoformat("2026-01-31"), "must have a time zone")],
    ids=str,
)
def test_a_start_that_is_none_is_refused_also_in_a_rehearsal(sqlite_engine, start, said):
    outbox = Outbox(sqlite_engine)

    for rehearsal in (False, True):
        with pytest.raises(ValueError, match=said):
            outbox.admin.reset("relay", start, rehearsal=rehearsal)
    with pytest.raises(ValueError, match=said):
        outbox.admin.backfill("relay", ["a"], start=start)
    with pytest.raises(ValueError, match=said):
        Relay(outbox, print, start=start)


def test_a_relay_knows_the_policies_for_dead_letters(sqlite_engine):
    with pytest.raises(ValueError, match="on_dead must be 'block' or 'continue', not 'stop'"):
        Relay(Outbox(sqlite_engine), print, on_dead="stop")  # type: ignore[arg-type]  # the point


def test_a_split_tells_both_and_a_drop_what_went(engine):
    admin = Outbox(engine).admin
    admin.create("audit", destination=TO, topics=["orders", "mail"])

    done = admin.split("audit", ["mail"], destination="nats://other:4222")
    rehearsed = admin.drop("audit", rehearsal=True)
    dropped = admin.drop("audit")

    assert (done.split.topics, done.made.topics, done.moved) == (("orders",), ("mail",), 0)
    assert (rehearsed, dropped.names) == (dropped, ("audit",))
    assert [each.name for each in admin.subscriptions()] == [done.made.name, "relay"]


def test_a_pause_is_told_with_its_reason_until_it_is_taken_back(engine):
    outbox = Outbox(engine)
    (paused,) = outbox.admin.pause("relay", key="order-7", reason="a test", by="ann")
    (resumed,) = outbox.admin.resume("relay", key="order-7")

    assert [(each.key, each.by, each.reason) for each in paused.pauses] == [("order-7", "ann", "a test")]
    assert resumed.pauses == ()


def test_a_reset_begins_again_and_a_purge_counts_before_it_deletes(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    Relay(outbox, lambda _message: None).until_empty()

    before = outbox.admin.statuses()[0].backlog
    done = outbox.admin.reset("relay", "earliest")
    held = outbox.admin.purge(timedelta(0), rehearsal=True)

    assert (before, outbox.admin.statuses()[0].backlog) == (0, 1)
    assert (done.names, done.parked, held.rows, held.held_by) == (("relay",), {}, 0, ("relay",))


def test_tables_in_order_have_no_defect(engine):
    assert Outbox(engine).admin.check() == ()

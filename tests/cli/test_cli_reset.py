"""Beginning again from the command line: what is asked, refused, told and done."""

from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.model.parking import Parking
from outbox.model.subscription import Declaration, Kind
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import outbox
from tests.support.destination import fill
from tests.support.parked import by_id, decide, states

ONE_DATABASE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)


@pytest.fixture
def sent(engine, channel, shop, tmp_path):
    """A relay that has sent ten messages to a file, after which three were parked."""
    fill(shop, 10)
    assert outbox(engine, "relay", "--to", f"file://{tmp_path / 'sent'}", "--until-empty").code == 0
    with channel.transaction():
        retry = Parking(state="retry", holds=True, attempts=1, delay=timedelta(hours=1))
        Parked(channel, "relay").park(by_id({Parking(state="dead", holds=True): [1, 2], retry: [3]}))
    return tmp_path / "sent"


def generations(channel):
    """The generation of the partitions of each subscription."""
    return {each.name: each.generation for each in Subscriptions(channel).all()}


def test_everything_is_sent_again_and_what_was_parked_is_counted(engine, channel, sent):
    decide(engine, "replay")

    ended = outbox(engine, "subscriptions", "reset", "relay", "--to", "earliest", "--yes")
    again = outbox(engine, "relay", "--to", f"file://{sent}", "--until-empty")

    assert (ended.code, ended.err) == (0, "relay begins again at earliest; 1 retry, 2 dead deleted\n")
    assert (again.code, len(sent.read_text().splitlines()), states(engine)) == (0, 20, {})


@ONE_DATABASE
def test_a_moment_is_told_in_utc(engine, channel, sent):
    ended = outbox(engine, "subscriptions", "reset", "relay", "--to", "2026-01-31T12:00:00+01:00", "--yes")

    assert (ended.code, ended.err.startswith("relay begins again at 2026-01-31 11:00:00 UTC; ")) == (0, True)


@ONE_DATABASE
def test_a_reset_needs_a_yes(engine, channel, sent):
    ended = outbox(engine, "subscriptions", "reset", "relay", "--to", "latest")

    asked = "let relay begin again at latest and delete the parked messages (1 retry, 2 dead)?"
    assert (ended.code, asked in ended.err, generations(channel)) == (2, True, {"relay": 1})


@ONE_DATABASE
def test_a_worker_at_work_is_in_the_way_and_force_is_named(engine, channel, sent):
    assert Leases(channel).acquire(Subscriptions(channel).get("relay").partition(0), "w0rker", timedelta(minutes=5))

    ended = outbox(engine, "subscriptions", "reset", "relay", "--to", "earliest", "--yes")

    assert (ended.code, generations(channel), states(engine)) == (2, {"relay": 1}, {"dead": 2, "retry": 1})
    assert "worker w0rker holds the lease of relay" in ended.err
    assert ended.err.endswith("; stop it first, or give --force: the worker then gives the lease back, and goes on\n")


@ONE_DATABASE
@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("check:g", "check", "asks about transactions"),
        ("archive", "extract", "has the position of its archive"),
    ],
)
def test_other_kinds_are_refused_before_anything_is_asked(engine, channel, name, kind: Kind, why):
    Subscriptions(channel).declare(Declaration(name=name, destination=None, kind=kind))

    ended = outbox(engine, "subscriptions", "reset", name, "--to", "earliest")

    assert (ended.code, f"{name} {why}" in ended.err) == (2, True)


@ONE_DATABASE
def test_a_broadcast_consumer_is_dropped_with_all_its_instances(engine, channel):
    for name in ("news@a", "news@b", "newsletter@a"):
        Subscriptions(channel).declare(Declaration(name=name, destination=None, kind="broadcast"), "latest")

    one = outbox(engine, "subscriptions", "drop", "news@a", "--yes", "--json")
    rest = outbox(engine, "subscriptions", "drop", "news", "--yes", "--json")

    assert (one.json["dropped"], rest.json["dropped"]) == (["news@a"], ["news@b"])
    assert list(generations(channel)) == ["newsletter@a", "relay"]


@ONE_DATABASE
def test_a_backfill_is_told_shown_and_dropped(engine, channel, sent):
    told = outbox(engine, "subscriptions", "backfill", "relay", "--topics", "topic0,mail")
    again = outbox(engine, "subscriptions", "backfill", "relay", "--topics", "mail")
    shown = {each["name"]: each for each in outbox(engine, "status", "--json").json["subscriptions"]}
    dropped = outbox(engine, "subscriptions", "drop", "relay:backfill", "--yes")

    up_to_now = "from earliest up to now; outbox status shows it until its end"
    assert (told.code, told.err) == (0, f"relay:backfill: mail,topic0 to file://{sent}, {up_to_now}\n")
    assert (again.code, "outbox subscriptions drop relay:backfill" in again.err) == (2, True)
    assert (shown["relay:backfill"]["kind"], shown["relay:backfill"]["backlog"]) == ("backfill", 10)
    assert (dropped.code, dropped.err, generations(channel)) == (0, "relay:backfill is dropped\n", {"relay": 1})


@ONE_DATABASE
def test_a_backfill_of_a_consumer_is_told_as_one(engine, channel):
    Subscriptions(channel).declare(Declaration(name="billing", destination=None, kind="consumer"), "latest")

    told = outbox(engine, "subscriptions", "backfill", "billing", "--topics", "orders")

    text = "billing:backfill: orders to (consumer), from earliest up to now; outbox status shows it until its end\n"
    assert (told.code, told.err) == (0, text)


@ONE_DATABASE
def test_a_relay_that_runs_until_its_log_is_empty_handles_a_backfill(engine, channel, sent):
    assert outbox(engine, "subscriptions", "backfill", "relay", "--topics", "topic0", "--from", "earliest").code == 0

    again = outbox(engine, "relay", "--to", f"file://{sent}", "--until-empty")

    assert (again.code, len(sent.read_text().splitlines()), generations(channel)) == (0, 20, {"relay": 1})
    assert again.err.count("relay:backfill has come to its end\n") == 1


@ONE_DATABASE
def test_a_backfill_that_nobody_runs_is_in_the_warnings(engine, channel, sent):
    assert outbox(engine, "subscriptions", "backfill", "relay", "--topics", "topic0").code == 0
    channel.run("UPDATE {progress} SET settled_at = '2020-01-01 00:00:00' WHERE subscription = 'relay:backfill'")

    (found,) = [each for each in Outbox(engine).admin.diagnosis() if each.subscription == "relay:backfill"]

    grounds = "10 messages wait; later messages are not purged"
    assert (found.what, found.evidence, found.next_command) == ("no worker runs", grounds, None)

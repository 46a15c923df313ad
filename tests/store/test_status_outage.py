"""Status in an outage: how long the oldest message has not been sent, what waits, for what, since when and why."""

import os
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Done, Outbox, Reject, Relay, Retry, Thresholds, Unavailable
from outbox.errors import SubscriptionError
from outbox.model.lease import Partition
from outbox.model.limits import HALF_TOPIC
from outbox.model.subscription import Declaration
from outbox.relay.relay import routes
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.store.test_status import status_of
from tests.support.command_line import leading_to, outbox
from tests.support.leases import step_clock
from tests.support.waiting import eventually

LIST = "outbox parked list --name relay --state"


class Destination:
    """Answers by topic; `orders` is accepted while it is well."""

    destination = "nats://h:4222"

    def __init__(self, *, everything: bool = False) -> None:
        self.well, self.everything = False, everything

    def send(self, messages):
        """One answer for each topic."""
        answers = {"bad": Reject("too long"), "shy": Retry("not now", after=timedelta(minutes=5))}
        away = Done() if self.well else Unavailable("connection refused", everything=self.everything)
        return [answers.get(message.topic, Done() if message.topic == "fine" else away) for message in messages]

    def close(self):
        """Nothing is open."""


def send(engine: Engine, *topics: str, **fields) -> None:
    with (sender := Outbox(engine)).begin() as session:
        for topic in topics:
            sender.send(session, topic, b"1", **fields)


#: Long enough to be told without minutes, which may pass on a busy machine.
TEN_HOURS = 36_000


def age_by(engine: Engine, seconds: int, **columns: str) -> None:
    """Make parked messages older, as if the time had passed."""
    later = {
        "postgresql": "{0} - make_interval(secs => :seconds)",
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', {0}, '-' || :seconds || ' seconds')",
    }[engine.dialect.name]
    names = ("created_at", "parked_at", "deliver_at", "due_at")
    sets = ", ".join(f"{name} = {later.format(name)}" for name in names)
    of = {"state": "coalesce(state, 'behind')"}
    chosen = "".join(f" AND {of.get(name, name)} = :{name}" for name in columns)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_parked SET {sets} WHERE TRUE{chosen}"), {"seconds": seconds, **columns})


def told(engine: Engine) -> list[str]:
    """What is wrong, as `outbox status` says it in a shell that knows the database."""
    return [str(each).replace(f" {leading_to(engine)}", "") for each in Outbox(engine).admin.diagnosis()]


def refused(engine: Engine) -> list[tuple[str | None, datetime | None, str | None]]:
    """The subscriptions whose workers cannot begin, since when, and why."""
    return [
        (each.subscription, each.since, each.evidence)
        for each in Outbox(engine).admin.diagnosis()
        if each.kind == "refused"
    ]


def status(engine: Engine):
    return outbox(engine, "status", "--json").json["subscriptions"][0]


def test_what_waits_for_the_destination_is_told_with_since_when_and_why(engine):
    """The position is past all of it: nothing is left in the log."""
    send(engine, "fine", "orders", "orders", "orders")
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, TEN_HOURS)

    found, shown = status(engine), outbox(engine, "status")

    (trouble,) = found["troubles"]
    said = (
        f"relay: 3 messages wait for nats://h:4222 (since 10 h): connection refused; to see them, run: {LIST} waiting"
    )
    assert (found["backlog"], 0 <= found["lag_seconds"] - TEN_HOURS < 1000, found["lag_is_estimate"]) == (
        0,
        True,
        False,
    )
    assert (trouble["state"], trouble["messages"], trouble["error"]) == ("waiting", 3, "connection refused")
    assert told(engine) == [said]
    assert (f"warning: {said}\n" in shown.err, " 10 h" in shown.out) == (True, True)


def test_what_is_behind_them_is_told(engine):
    """The trouble counts the first of each key; the others are not sent either."""
    for key in ("a", "b"):
        send(engine, "orders", "orders", "orders", key=key)
    send(engine, "fine")
    Relay(Outbox(engine), Destination()).until_empty()

    first, second = told(engine)

    assert first.startswith("relay: 2 messages wait for nats://h:4222 (since ")
    behind = "relay: 4 messages are behind an earlier message of the same key"
    assert second == f"{behind}; to see the earlier messages, run: {LIST} behind"


def test_one_message_is_told_as_one(engine):
    send(engine, "fine", "orders")
    Relay(Outbox(engine), Destination()).until_empty()

    assert "relay: 1 message waits for nats://h:4222 (since " in outbox(engine, "status").err


@pytest.mark.parametrize(
    ("topics", "code", "said"),
    [
        (["fine"], 0, None),
        (["fine", "orders"], 1, "1 message waits for nats://h:4222"),
        (
            ["fine", "bad"],
            1,
            f"1 dead letter (since 10 h): too long; to decide, run: {LIST} dead",
        ),
        (["fine", "shy"], 1, "1 message failed and is tried again (since 10 h): not now"),
    ],
)
def test_a_check_ends_with_a_code_that_says_whether_anything_is_wrong(engine, topics, code, said):
    send(engine, *topics)
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, TEN_HOURS)

    checked, looked = outbox(engine, "status", "--check"), outbox(engine, "status")
    as_json = outbox(engine, "status", "--check", "--json")

    assert (checked.code, as_json.code, looked.code) == (code, code, 0)
    assert (said is None or said in checked.err, bool(as_json.json["findings"])) == (True, code == 1)


def test_a_failure_of_a_moment_is_no_warning(engine):
    send(engine, "fine", "shy")
    Relay(Outbox(engine), Destination()).until_empty()

    assert (outbox(engine, "status", "--check").code, status(engine)["parked"]["retry"]) == (0, 1)


@pytest.mark.parametrize(("passed", "overdue"), [(0, False), (7200, True)])
def test_a_delayed_message_is_late_from_when_it_is_due(engine, passed, overdue):
    send(engine, "orders", delay=timedelta(hours=1))
    assert status_of(engine).lag_seconds == 0.0
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, passed)

    lag = status_of(engine).lag_seconds

    assert (3600 <= lag < 3700) if overdue else lag == 0.0


def test_a_delayed_message_in_the_log_is_not_late_before_it_is_due(engine):
    send(engine, "orders", delay=timedelta(hours=1))
    time.sleep(0.2)

    assert (status_of(engine).backlog, status_of(engine).lag_seconds) == (1, 0.0)


def test_what_waits_behind_a_dead_letter_is_unsent(engine):
    send(engine, "bad", "fine", key="k")
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, 300, state="behind")

    assert 300 <= status_of(engine).lag_seconds < 400


def test_what_waits_behind_a_dead_letter_is_not_told_as_behind_besides(engine):
    """No worker could catch up with these messages: they wait for the decision of a person."""
    send(engine, "bad", "fine", key="k")
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, 600, state="behind")

    told, tolerated = (
        {each.kind for each in Outbox(engine).admin.diagnosis(Thresholds(max_dead=most))} - {"not_run"}
        for most in (0, 1)
    )
    assert (told, tolerated) == ({"dead", "behind_head"}, {"behind"})


def test_what_waits_behind_a_paused_key_is_no_finding(engine):
    admin = Outbox(engine).admin
    admin.pause("relay", key="k")
    send(engine, "fine", "fine", key="k")
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, 600)

    found = {each.kind for each in admin.diagnosis()} - {"not_run"}
    assert (found, admin.statuses("relay")[0].lag_seconds > 300) == (set(), True)


@pytest.mark.parametrize(("state", "key"), [("delayed", "other"), ("delayed", None), ("retry", "other")])
def test_beside_a_paused_key_what_nothing_holds_back_is_behind(engine, state, key):
    """What fell due, or is the head of a key, waits for its worker alone, which is slow or stands still."""
    admin = Outbox(engine).admin
    admin.pause("relay", key="k")
    send(engine, "fine", key="k")
    send(engine, "fine", key=key)
    Relay(Outbox(engine), Destination()).until_empty()
    with engine.begin() as connection:
        connection.execute(
            text("""
            INSERT INTO outbox_parked (subscription, id, message_id, topic, key, slot, body, created_at, state, unit,
                                       place, attempts, due_at, parked_at)
            SELECT 'relay', id, message_id, topic, key, slot, body, created_at, :state,
                   CASE WHEN :state = 'retry' THEN key END, 1, 0, created_at, created_at
            FROM outbox_message WHERE key IS NULL OR key <> 'k'
        """),
            {"state": state},
        )
    age_by(engine, 600)

    assert {each.kind for each in admin.diagnosis()} - {"not_run"} == {"behind"}


def test_a_dead_letter_alone_is_not_late(engine):
    """It is not to be sent, until somebody decides so."""
    send(engine, "bad")
    Relay(Outbox(engine), Destination()).until_empty()
    age_by(engine, 300)

    assert status_of(engine).lag_seconds == 0.0


@pytest.mark.storm
def test_a_worker_that_waits_with_messages_in_the_log_says_for_what_and_since_when(engine):
    """While it tries one after the other nothing is parked: only the worker knows."""
    destination = Destination(everything=True)
    send(engine, *["orders"] * 100)
    with Outbox(engine).running(destination):
        assert eventually(lambda: status(engine)["notice"] is not None)
        found, code, said = status(engine), outbox(engine, "status", "--check").code, told(engine)
        destination.well = True
        assert eventually(lambda: status(engine)["notice"] is None)

    text = "waits for nats://h:4222: connection refused"
    assert (found["backlog"], found["notice"], code) == (100, text, 1)
    assert said[0].startswith("relay: the worker does not get on (since ")
    assert said[0].endswith(f"): {text}; to see whether the worker goes on, run: outbox status --watch")


def test_the_first_moment_of_a_trouble_is_kept(engine):
    """A worker says the same again while it lasts."""
    database = Outbox(engine).database
    with closing(database.open()) as channel:
        Leases(channel).note("relay", "away")
        first = status(engine)["noticed_at"]
        time.sleep(0.05)
        Leases(channel).note("relay", "away")
        second = status(engine)["noticed_at"]
        Leases(channel).note("relay", "other")
        third = status(engine)["noticed_at"]

    assert (first == second, second == third) == (True, False)


def test_a_worker_that_was_killed_is_told_as_soon_as_its_lease_is_over(engine):
    """One that stops gives it back, and is started again perhaps."""
    send(engine, "fine")
    Relay(Outbox(engine), Destination()).until_empty()
    assert outbox(engine, "status", "--check").code == 0
    with closing(Outbox(engine).database.open()) as channel:
        assert Leases(channel).acquire(Partition("relay"), "w", timedelta(milliseconds=1))
        time.sleep(0.1)

    said = outbox(engine, "status", "--check")

    assert (said.code, " s): the worker ended without giving the lease back; later messages" in said.err) == (1, True)


def test_a_relay_that_is_gone_is_told_with_what_to_do(engine):
    send(engine, "fine")
    Relay(Outbox(engine), Destination()).until_empty()
    age = {
        "postgresql": "settled_at - interval '10 hours'",
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', settled_at, '-10 hours')",
    }[engine.dialect.name]
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_progress SET settled_at = {age}"))
    send(engine, "fine", "fine")

    said = outbox(engine, "status", "--check")

    waits = "2 messages wait; later messages are not purged"
    before = "the same options as before and the options of its URL that are not stored"
    run = f"start the relay with {before}: outbox relay --name relay --to nats://h:4222"
    assert (said.code, said.err) == (1, f"warning: relay: no worker runs (since 10 h): {waits}; {run}\n")


def write_long_ago(engine: Engine, seconds: int, number: int = 1) -> None:
    """Write messages, as if it had been so long ago."""
    send(engine, *["fine"] * number)
    ago = {
        "postgresql": "created_at - make_interval(secs => :seconds)",
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', created_at, '-' || :seconds || ' seconds')",
    }[engine.dialect.name]
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_message SET created_at = {ago}"), {"seconds": seconds})


@contextmanager
def at_work(engine: Engine) -> Iterator[None]:
    """A worker that has sent something holds the lease, and does not get on."""
    Relay(Outbox(engine), Destination()).until_empty()
    with closing(Outbox(engine).database.open()) as channel:
        assert Leases(channel).acquire(Partition("relay"), "w", timedelta(minutes=10))
        yield


@pytest.mark.parametrize(
    ("seconds", "options", "code"),
    [
        (240, (), 0),
        (360, (), 1),
        (360, ("--max-lag", "10m"), 0),
        (90, ("--max-lag", "1m"), 1),
        (360, ("--max-lag", "relay=10m"), 0),
        (90, ("--max-lag", "1h", "--max-lag", "relay=1m"), 1),
        (240, ("--max-backlog", "0", "--max-backlog", "relay=3", "--max-lag", "relay=1h"), 0),
        (240, ("--max-backlog", "2"), 1),
        (240, ("--max-backlog", "3"), 0),
    ],
)
def test_a_worker_that_is_too_slow_is_told_by_how_far_it_is_behind(engine, seconds, options, code):
    """Nothing fails, so that nothing but the lag and the backlog tells of it."""
    with at_work(engine):
        write_long_ago(engine, seconds, 3)

        said = outbox(engine, "status", "--check", *options)

    begun = "warning: relay: 3 messages wait for nats://h:4222 (since "
    assert (said.code, said.err.startswith(begun), "outbox status --watch" in said.err) == (
        code,
        bool(code),
        bool(code),
    )


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("nobody=1m", "there is no subscription 'nobody'"),
        ("nobody:backfill=1m", "there is no subscription 'nobody'"),
        ("relay=soon", "'soon' is not a duration"),
        ("relay=", "'' is not a duration"),
    ],
)
def test_a_limit_of_a_subscription_that_is_not_there_is_an_error(sqlite_engine, limit, says):
    ended = outbox(sqlite_engine, "status", "--check", "--max-lag", limit)

    assert (ended.code, says in ended.err) == (2, True), ended.err


def test_a_limit_of_a_backfill_stays_when_the_backfill_has_ended(sqlite_engine):
    ended = outbox(sqlite_engine, "status", "--max-lag", "relay:backfill=30d")

    assert ended.code == 0, ended.err


def test_a_lag_is_told_with_its_limit(engine):
    with at_work(engine):
        write_long_ago(engine, TEN_HOURS)

        said = outbox(engine, "status", "--max-backlog", "0").err

    oldest = "the oldest for 10 h, which is more than 5 min; more than 0 messages"
    watch = "to see whether the worker catches up, run: outbox status --watch"
    assert said == f"warning: relay: 1 message waits for nats://h:4222 (since 10 h): {oldest}; {watch}\n"


def test_parked_messages_that_wait_are_behind(engine):
    """The position has passed them, and their failure is of just now."""
    send(engine, "shy")
    Relay(Outbox(engine), Destination()).until_empty()
    with engine.begin() as connection:
        ago = {"postgresql": "created_at - interval '10 hours'", "sqlite": "datetime(created_at, '-10 hours')"}
        connection.execute(text(f"UPDATE outbox_parked SET created_at = {ago[engine.dialect.name]}"))

    late, many = (outbox(engine, "status", "--check", *options) for options in ((), ("--max-backlog", "0")))

    assert (late.code, "the oldest for 10 h" in late.err, "more than 0 messages" in many.err) == (1, True, True)


def test_a_grace_is_not_behind(engine):
    """A subscription that reads ten minutes after the commit is on time after six."""
    with closing(Outbox(engine).database.open()) as channel:
        declared = Declaration(name="late", destination="nats://h:4222", grace=timedelta(minutes=10))
        Subscriptions(channel).declare(declared)
        Leases(channel).acquire(Partition("late"), "w", timedelta(minutes=10))
        with at_work(engine):
            write_long_ago(engine, 360)

            found = Outbox(engine).admin.diagnosis()

    assert [(each.subscription, each.kind) for each in found] == [("relay", "behind")]


@pytest.mark.parametrize(("most", "code"), [("0", 1), ("1", 1), ("2", 0)])
def test_so_many_dead_letters_are_none_of_a_monitors_business(engine, most, code):
    send(engine, "bad", "bad")
    Relay(Outbox(engine), Destination()).until_empty()

    assert outbox(engine, "status", "--check", "--max-dead", most).code == code


def test_a_log_that_nobody_reads_is_told(engine):
    """The reader of half messages reads no others, and these do not count."""
    assert outbox(engine, "subscriptions", "drop", "relay", "--yes").code == 0
    empty = outbox(engine, "status", "--check")
    send(engine, "fine", "fine")
    with Outbox(engine).database.engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_message SET topic = '{HALF_TOPIC}' WHERE id = 2"))
    with closing(Outbox(engine).database.open()) as channel:
        Subscriptions(channel).declare(Declaration(name="check:shop", destination=None, kind="check", tags=("shop",)))

    said = outbox(engine, "status", "--check")

    unread = "warning: no subscription reads this log, and 1 message waits; to send them, run: outbox relay --to URL"
    assert (empty.code, empty.err, said.code, unread in said.err.splitlines()) == (0, "", 1, True)


def declared_in_vain(engine: Engine) -> list[Relay]:
    """The relays of routes that cannot begin, because one subscription has had all topics so far."""
    Relay(Outbox(engine), Destination()).until_empty()
    age = {
        "postgresql": "settled_at - interval '10 hours'",
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', settled_at, '-10 hours')",
    }[engine.dialect.name]
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_progress SET settled_at = {age}"))
    return routes(Outbox(engine), {"a*": Destination(), "*": Destination()})


def test_a_route_that_cannot_begin_is_told_at_once_and_until_it_can(engine):
    """It has no lease yet that a worker could write on; and the options that its relay had are not advised."""
    for relay in declared_in_vain(engine):
        with pytest.raises(SubscriptionError):
            relay.until_empty()

    said = outbox(engine, "status", "--check")

    split = "outbox subscriptions split relay --topics 'a*' --to nats://h:4222 --as 'relay:a*'"
    warnings = said.err.splitlines()
    assert (said.code, split in warnings[0], " (since " in warnings[0]) == (1, True, True)
    because = [line.partition("a worker cannot begin")[2].partition("): ")[2] for line in warnings[:2]]
    assert because[0].startswith("subscription 'relay:a*' is not there yet, and 'relay' has its topics")
    assert because[1].startswith("subscription 'relay' has topics all, this worker asks for !a*")
    assert "the same options as before" not in said.err

    assert outbox(engine, *shlex.split(split)[1:]).code == 0
    for relay in routes(Outbox(engine), {"a*": Destination(), "*": Destination()}):
        relay.until_empty()
    assert outbox(engine, "status", "--check").code == 0


def test_a_notice_of_who_tries_no_more_is_gone_after_a_while(engine):
    """As if the minute had passed: it may be a mistake of a person, beside a relay that works."""
    relay, _ = declared_in_vain(engine)
    with pytest.raises(SubscriptionError):
        relay.until_empty()
    before = refused(engine)
    step_clock(engine, timedelta(minutes=1))

    assert ([name for name, _, _ in before], refused(engine)) == (["relay:a*"], [])


def test_the_first_moment_of_a_refusal_is_kept(engine):
    relay, _ = declared_in_vain(engine)

    def since() -> datetime | None:
        with pytest.raises(SubscriptionError):
            relay.until_empty()
        return refused(engine)[0][1]

    first, second = since(), since()
    assert first == second


def test_a_worker_that_works_does_not_speak_for_one_that_cannot_begin(engine):
    """Of two that have the same name one is the old one; what it withdraws is its own notice."""
    _, relay = declared_in_vain(engine)
    with pytest.raises(SubscriptionError):
        relay.until_empty()
    with closing(Outbox(engine).database.open()) as channel:
        Leases(channel).note("relay", None)

    ((name, _, why),) = refused(engine)

    assert (name, "has topics all, this worker asks for !a*" in (why or "")) == ("relay", True)


def test_the_worker_is_told_by_its_host_and_process(engine):
    """So that one knows where to look."""
    here = f"{socket.gethostname()}:{os.getpid()}"
    with Outbox(engine).running(Destination()):
        assert eventually(lambda: status(engine)["live"])
        shown, whole = outbox(engine, "status").out, status(engine)["worker"]

    assert (shown.split()[-1], whole.startswith(f"{here}:")) == (here, True)

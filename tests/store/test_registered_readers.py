"""A reader outside of the database holds retention back for as long as its hold lasts, and nobody takes its name."""

from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, SubscriptionError
from outbox.admin import commands
from outbox.model.position import Position, Progress, Window
from outbox.store.subscriptions.holds import hold_of
from outbox.store.subscriptions.readers import Readers
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.store.test_purge import WEEK, aged, kept, meta, now, purge
from tests.store.test_status import settle
from tests.support.command_line import outbox as run
from tests.support.destination import relay_to
from tests.support.readers import send

MONTH = timedelta(days=30)


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def register(outbox, position=None, *, name="nightly", window=1, **options) -> None:
    with closing(outbox.database.open()) as channel:
        options = {"archive": "/archive", "hold": MONTH, **options}
        Readers(channel).register(name, **options)
        if position is not None:
            Readers(channel).advance(name, window, position)


def long_ago(outbox, days: int) -> None:
    """Let its progress, and its registration, be from so many days ago."""
    ago = {
        "postgresql": f"{{}} - interval '{days} days'",
        "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', {{}}, '-{days} days')",
    }[outbox.engine.dialect.name]
    with outbox.engine.begin() as connection:
        for table, column in (("progress", "settled_at"), ("subscription", "created_at")):
            connection.execute(text(f"UPDATE outbox_{table} SET {column} = {ago.format(column)}"))


def hold(outbox, name="nightly"):
    with closing(outbox.database.open()) as channel:
        return hold_of(channel, Subscriptions(channel).get(name))


def positions(outbox) -> list[tuple[int, int, str]]:
    with outbox.engine.connect() as connection:
        rows = "SELECT epoch, n, base FROM outbox_progress WHERE subscription = 'nightly' ORDER BY epoch, n"
        return [tuple(row) for row in connection.execute(text(rows))]


def test_what_a_reader_has_not_passed_stays(outbox):
    send(outbox, "1", "2")
    register(outbox, now(outbox))
    send(outbox, "3")
    settle(outbox.engine, Progress(now(outbox)))

    purged = purge(outbox)

    assert (purged.rows, purged.held_by, kept(outbox)) == (2, ("nightly",), [b"3"])


def test_a_reader_that_has_read_nothing_yet_holds_everything(outbox):
    send(outbox, "1")
    register(outbox)
    settle(outbox.engine, Progress(now(outbox)))

    assert (purge(outbox).rows, hold(outbox).released) == (0, False)


@pytest.mark.parametrize("has_read", [True, False])
def test_purge_goes_on_without_a_reader_whose_hold_is_over(outbox, has_read):
    send(outbox, "1")
    position = now(outbox)
    register(outbox, position if has_read else None)
    send(outbox, "2")
    settle(outbox.engine, Progress(now(outbox)))
    long_ago(outbox, 29)
    held = (purge(outbox).rows, hold(outbox).released)
    long_ago(outbox, 2)

    released = (purge(outbox).rows, hold(outbox).released)

    assert (held, released, kept(outbox)) == ((int(has_read), False), (2 - has_read, True), [])
    gap = Window(position, now(outbox)).overlaps(Position.parse(meta(outbox).purged))
    assert gap, "the next extract has to see that rows of its window are gone"


def test_progress_is_what_renews_the_hold(outbox):
    """A run that commits nothing is none: a reader that fails every night would hold retention back for ever."""
    send(outbox, "1")
    first = now(outbox)
    register(outbox, first)
    long_ago(outbox, 31)
    register(outbox, first)
    failed = hold(outbox).released
    register(outbox, now(outbox), window=2)

    assert (failed, hold(outbox).released) == (True, False)


def test_the_hold_that_was_given_last_counts(outbox):
    register(outbox, now(outbox))
    long_ago(outbox, 31)

    register(outbox, hold=timedelta(days=60), topics=("orders",))

    with closing(outbox.database.open()) as channel:
        found = Subscriptions(channel).get("nightly")
    assert (hold(outbox).released, found.hold, found.topics) == (False, timedelta(days=60), ("orders",))


def test_an_archive_that_went_back_takes_its_reader_along(outbox):
    """Restored from a backup, it needs what it had read already."""
    for window, position in ((1, Position(5)), (2, Position(9)), (2, Position(9)), (1, Position(5)), (2, Position(8))):
        register(outbox, position, window=window)

    assert positions(outbox) == [(0, 1, "5:5:"), (0, 2, "9:9:"), (1, 1, "5:5:"), (1, 2, "8:8:")]


def test_no_relay_takes_the_name_of_a_reader(outbox, destination):
    register(outbox)

    with pytest.raises(SubscriptionError, match="subscription of another kind: extract, not relay; use another name"):
        relay_to(destination, outbox, name="nightly").until_empty()


def test_no_reader_takes_the_name_of_a_relay(outbox, destination):
    relay_to(destination, outbox, name="mail").until_empty()

    for name in ("relay", "mail"):
        with pytest.raises(SubscriptionError, match="of another kind: relay, not extract; use another name"):
            register(outbox, name=name)


@pytest.mark.parametrize("name", ["", "relay:backfill", "check:shop"])
def test_names_that_are_made_for_others_are_refused(outbox, name):
    with pytest.raises(SubscriptionError, match="cannot be the name of an extract"):
        register(outbox, name=name)


@pytest.mark.parametrize("hold", [timedelta(0), timedelta(days=3651)])
def test_a_hold_out_of_range_is_refused(outbox, hold):
    with pytest.raises(SubscriptionError, match="hold: must be longer than 0 and at most 3650d"):
        register(outbox, hold=hold)


def test_a_name_belongs_to_one_archive(outbox):
    """Two of them would move each other's position."""
    register(outbox)

    with pytest.raises(SubscriptionError, match=r"registered for the archive /archive, .* subscriptions drop nightly"):
        register(outbox, archive="/other")


def test_only_the_extract_itself_changes_what_it_is(outbox):
    register(outbox)
    with closing(outbox.database.open()) as channel:
        stored = Subscriptions(channel).get("nightly")
        with pytest.raises(SubscriptionError, match=r"outbox extract /archive --register nightly"):
            commands.alter(channel, stored)


def test_a_reader_that_is_dropped_holds_nothing_back(outbox):
    send(outbox, "1")
    register(outbox)
    settle(outbox.engine, Progress(now(outbox)))
    with closing(outbox.database.open()) as channel:
        commands.drop(channel, "nightly")

    assert (purge(outbox).rows, positions(outbox)) == (1, [])


def test_a_reader_alone_lets_old_messages_go_and_a_released_one_does_not(outbox):
    """Nobody has read them then."""
    send(outbox, "1")
    register(outbox, now(outbox))
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).drop("relay")
    aged(outbox, b"1")
    assert purge(outbox, WEEK).rows == 1

    long_ago(outbox, 31)
    with pytest.raises(SubscriptionError, match="no subscription"):
        purge(outbox)


def test_status_and_list_show_since_when_retention_waits(outbox):
    send(outbox, "1")
    register(outbox, Position(0))
    since = f"{hold(outbox).since:%Y-%m-%d %H:%M}"

    table, listed = (run(outbox.engine, *verb).out for verb in (["status"], ["subscriptions", "list"]))
    (found,) = [
        each for each in run(outbox.engine, "status", "--json").json["subscriptions"] if each["name"] == "nightly"
    ]

    assert f"held since {since}" in table
    (row,) = [line.split() for line in listed.splitlines() if line.startswith("nightly")]
    assert row[3:6] == ["archive", "/archive", "-"]
    assert f"held since {since}" in listed
    assert (found["kind"], found["backlog"], found["released"]) == ("extract", 1, False)
    assert [each for each in outbox.admin.diagnosis() if each.subscription == "nightly"] == []
    assert found["held_until"] > found["held_since"]


def test_status_warns_before_a_reader_is_released_and_after_it(outbox):
    register(outbox, now(outbox))
    long_ago(outbox, 20)
    soon = run(outbox.engine, "status")
    long_ago(outbox, 20)
    released = run(outbox.engine, "status")

    assert "warning: nightly: the extract makes no progress (since" in soon.err
    assert "warning: nightly: the extract is released (since" in released.err
    assert "released" in released.out
    (found,) = [
        each
        for each in run(outbox.engine, "subscriptions", "list", "--json").json["subscriptions"]
        if each["name"] == "nightly"
    ]
    assert (found["released"], found["hold_seconds"]) == (True, MONTH.total_seconds())

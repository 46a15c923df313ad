"""What a diagnosis says of a log that nobody purges, and of subscriptions for which a purge keeps old messages."""

from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Outbox, Relay
from outbox.model.status import LogStatus
from outbox.model.subscription import Declaration
from outbox.store.operations.purge import Purge
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.destination import Destination, fill

AGO = {"postgresql": "now() - interval '{days} days'", "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-{days} days')"}
OLD = ("unpurged", "held_back")


@pytest.fixture
def outbox(engine):
    """A log with 30 messages: ten of ten days ago, ten of eight days ago, ten of now."""
    outbox = Outbox(engine)
    fill(outbox, 30)
    age(outbox, "outbox_message SET created_at", 10, "WHERE id <= 10")
    age(outbox, "outbox_message SET created_at", 8, "WHERE id BETWEEN 11 AND 20")
    return outbox


def age(outbox, what, days, where=""):
    ago = AGO[outbox.engine.dialect.name].format(days=days)
    with outbox.engine.begin() as connection:
        connection.execute(text(f"UPDATE {what} = {ago} {where}"))


def purge(outbox) -> None:
    with closing(outbox.database.open()) as channel:
        Purge(channel).run(timedelta(days=7))


def found(outbox) -> list[tuple[str, str | None, str]]:
    """Of the log."""
    return [(each.kind, each.subscription, each.what) for each in outbox.admin.diagnosis() if each.kind in OLD]


def log_of(outbox) -> LogStatus:
    log: LogStatus | None = outbox.admin.look().log
    assert log is not None
    return log


def test_a_log_that_nothing_purges_is_a_finding_until_a_purge_ends(outbox):
    """A purge that deletes nothing counts, too, for two days."""
    Relay(outbox, Destination()).until_empty()
    (before,), log = found(outbox), log_of(outbox)
    with closing(outbox.database.open()) as channel:
        Purge(channel).run(timedelta(days=3650))
    purged, after = log_of(outbox), found(outbox)
    age(outbox, "outbox_meta SET purged_at", 3)
    (again,) = found(outbox)

    assert (log.rows, log.bytes > 0, log.purged_at, log.keep_seconds) == (30, True, None, None)
    assert before[:2] == again[:2] == ("unpurged", None)
    assert log.bytes < 1e6
    assert before[2] == "nothing purges the log: about 30 messages with less than 1 MB, the oldest from 10 d ago"
    assert (purged.purged_at is not None, purged.keep_seconds, after) == (True, 3650 * 86_400.0, [])


def test_a_subscription_that_holds_messages_back_is_named_with_their_number(outbox):
    """The relay has passed everything; the subscription that nobody runs keeps 20 past their retention."""
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).declare(Declaration(name="slow", destination="test:slow"), "earliest")
        Relay(outbox, Destination()).until_empty()
        purge(outbox)
        (held,) = [each for each in outbox.admin.diagnosis() if each.kind == "held_back"]
        with Subscriptions(channel).changing():
            Subscriptions(channel).drop("slow")
        purge(outbox)

    assert (held.subscription, held.what) == ("slow", "about 20 messages older than 7 d are kept for this subscription")
    assert held.evidence == "about 30 messages with less than 1 MB in the log, the oldest from 10 d ago"
    assert (found(outbox), log_of(outbox).rows, dict(log_of(outbox).held_back)) == ([], 10, {})


def test_an_empty_or_a_young_log_is_no_finding(engine):
    outbox = Outbox(engine)
    empty = log_of(outbox)
    fill(outbox, 1)
    age(outbox, "outbox_message SET created_at", 6)

    assert (empty.rows, empty.oldest, found(outbox)) == (0, None, [])


def test_a_single_message_that_is_held_back_is_told_in_the_singular(engine):
    outbox = Outbox(engine)
    fill(outbox, 1)
    age(outbox, "outbox_message SET created_at", 8)
    purge(outbox)

    assert found(outbox) == [("held_back", "relay", "about 1 message older than 7 d is kept for this subscription")]

"""The trace of a message: its way through each subscription, told from positions and parked copies."""

import asyncio
import re
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Done, Outbox, Passage, Reject, Relay, Retry, RetryPolicy, Unavailable, Verdict
from outbox.model.message import uuid7
from outbox.store.subscriptions.decisions import Decisions
from tests.support.command_line import outbox as run
from tests.support.leases import step_clock
from tests.support.parked import states

ANSWERS: dict[str, Verdict] = {
    "dead": Reject("HTTP 422"),
    "retry": Retry("not now", after=timedelta(hours=1)),
    "away": Unavailable("gone"),
}
TO = "nats://h:4222"


class Destination:
    """Answers by topic."""

    destination = TO

    def send(self, messages):
        """One answer for each topic; a key stops at its first failure."""
        failed: dict[str | None, Verdict] = {}
        answers: list[Verdict] = []
        for message in messages:
            answers.append(failed.get(message.key) or ANSWERS.get(message.topic, Done()))
            if message.key is not None and not isinstance(answers[-1], Done):
                failed[message.key] = answers[-1]
        return answers

    def close(self):
        """Nothing is open."""


def written(outbox: Outbox, topic: str = "orders", key: str | None = None, **fields) -> int:
    """The log id of a new message."""
    with outbox.begin() as session:
        id = outbox.send(session, topic, b"1", key=key, **fields)
    return log_id(outbox, id)


def log_id(outbox: Outbox, message_id: UUID) -> int:
    found = outbox.admin.trace(message_id)
    assert found is not None
    return found.id


def drained(outbox: Outbox, name: str = "relay", **properties) -> None:
    Relay(outbox, Destination(), name=name, **properties).until_empty()


def passage(outbox: Outbox, id: int, name: str = "relay") -> Passage:
    trace = outbox.admin.trace(id)
    assert trace is not None
    return next(each for each in trace.subscriptions if each.subscription == name)


def told(outbox: Outbox, id: int, name: str = "relay") -> tuple[str, str]:
    """State and words, with moments as #."""
    found = passage(outbox, id, name)
    words, parked = found.what, found.copy
    moments = [found.passed_at, *(each.at for each in found.decisions)]
    moments += [parked.parked_at, parked.due_at, parked.decided_at, parked.withdrawn_at] if parked is not None else []
    for each in moments:
        words = words if each is None else words.replace(f"{each.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC", "#")
    return found.state, words


def change(engine: Engine, statement: str, **parameters: object) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement), parameters)


def test_a_message_that_its_writer_took_back_says_so_before_and_after_it_is_due(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        id = outbox.send(session, "orders", b"1", delay=timedelta(hours=1))
    drained(outbox)
    with outbox.begin() as session:
        assert outbox.withdraw(session, id)
    parked, listed = told(outbox, log_id(outbox, id)), outbox.admin.parked()
    state = run(engine, "parked", "list").out.splitlines()[1].split()[2]
    step_clock(engine, timedelta(hours=2), "outbox_parked.due_at")
    drained(outbox)

    assert [state for state, _ in (parked, told(outbox, log_id(outbox, id)))] == ["withdrawn", "withdrawn"]
    assert parked[1] == "taken back by its writer #"
    assert ([each.withdrawn_at is None for each in listed], state) == ([False], "withdrawn")
    assert states(engine) == {}


def test_a_message_that_nobody_has_read_is_not_yet_passed(engine):
    outbox = Outbox(engine)
    id = written(outbox, "orders")
    assert told(outbox, id) == ("unread", "not yet: no worker runs")


def test_each_parked_state_is_told_with_its_words(engine):
    outbox = Outbox(engine)
    ids = {
        name: written(outbox, topic, key)
        for name, topic, key in (
            ("dead", "dead", "a"), ("behind", "fine", "a"), ("retry", "retry", "b"), ("waiting", "away", "c"),
            ("passed", "fine", "d"),
        )
    }  # fmt: skip
    ids["delayed"] = written(outbox, "later", delay=timedelta(hours=1))
    drained(outbox)

    assert {name: told(outbox, id) for name, id in ids.items()} == {
        "dead": ("dead", "dead letter after 1 failed attempt, set aside #: HTTP 422"),
        "behind": ("behind", f"behind message {ids['dead']} of its key, set aside #"),
        "retry": ("retry", "waiting for the next try, attempt 1 failed, due #, set aside #: not now"),
        "waiting": ("waiting", "waiting for its destination, due #, set aside #: gone"),
        "passed": ("passed", "passed #"),
        "delayed": ("delayed", "delayed, due #, set aside #"),
    }


def test_a_retry_says_how_many_failures_its_worker_allows_as_long_as_one_is_at_work(engine):
    """The worker writes the number with its lease, and nothing else knows it."""
    outbox = Outbox(engine)
    id = written(outbox, "retry")
    drained(outbox)
    seen = list[list[object]]()

    def look() -> None:
        listed = run(engine, "parked", "list", "--json").json["parked"][0]
        row = run(engine, "parked", "list").out.splitlines()[1]
        shown = run(engine, "log", "show", str(id)).out
        words = "attempt 1 of 4 failed"
        seen.append([told(outbox, id)[1], listed["attempts_in_all"], "1 of 4" in row, words in shown])

    class Looking(Destination):
        def send(self, messages):
            """Look while the lease is held."""
            look()
            return super().send(messages)

    written(outbox, "fine")
    Relay(outbox, Looking(), retry=RetryPolicy(attempts=4)).until_empty()
    look()

    assert seen == [
        ["waiting for the next try, attempt 1 of 4 failed, due #, set aside #: not now", 4, True, True],
        ["waiting for the next try, attempt 1 failed, due #, set aside #: not now", None, False, False],
    ]


def test_a_decision_is_told_with_the_person_before_and_after_it_is_carried_out(engine):
    outbox = Outbox(engine)
    ids = [written(outbox, "dead") for _ in range(3)]
    drained(outbox)
    with closing(outbox.database.open()) as channel, channel.transaction():
        Decisions(channel, "relay").write("replay", [ids[0]], by="eve", reason=None)
    before = told(outbox, ids[0])
    outbox.admin.discard(*ids[1:], by="bob", reason="test data")

    assert [before, told(outbox, ids[2])] == [
        ("dead", "dead letter after 1 failed attempt, set aside #: HTTP 422; replay by eve #, not carried out yet"),
        ("discarded", "discard by bob # (test data)"),
    ]
    assert outbox.admin.trace(int(f"{ids[2]}1")) is None


def test_a_decision_on_an_unread_message_is_told_before_it_is_carried_out(engine):
    outbox = Outbox(engine)
    id = written(outbox)
    outbox.admin.set_aside(id, reason="ends the process", by="ann")
    _, words = told(outbox, id)

    drained(outbox)

    assert "; set aside by ann" in words and words.endswith("(ends the process), not carried out yet")
    assert told(outbox, id)[0] == "dead"


def settles(outbox: Outbox, *rows: tuple[int, int, int]) -> None:
    """Store progress, a second apart: epoch, number in the epoch, and 1 if the newest message is passed."""
    number = outbox.database.names["number"]
    for second, (epoch, n, passes) in enumerate(rows):
        change(
            outbox.database.engine,
            "INSERT INTO outbox_progress (subscription, generation, partition, epoch, n, base, settled_at)"
            f" SELECT 'relay', 1, 0, :epoch, :n, x || ':' || x || ':', {outbox.database.later(str(second))}"
            f" FROM (SELECT max({number}) + :passes AS x FROM outbox_message) AS m",
            epoch=epoch,
            n=n,
            passes=passes,
        )


def stored_moments(outbox: Outbox) -> dict[tuple[int, int], datetime]:
    with outbox.engine.connect() as connection:
        rows = connection.execute(text("SELECT epoch, n, settled_at FROM outbox_progress")).all()
    return {(epoch, n): outbox.database.moment(at) for epoch, n, at in rows}


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([(1, 1, 0), (1, 2, 0), (1, 3, 1), (1, 4, 1)], (1, 3)),
        ([(2, 7, 0), (4, 1, 0), (4, 9, 1), (6, 1, 1), (6, 2, 1)], (4, 9)),
        ([(3, 5, 0), (5, 1, 1)], (5, 1)),
    ],
)
def test_the_first_settle_that_passed_a_message_tells_when(engine, rows, first):
    outbox = Outbox(engine)
    id = written(outbox)
    settles(outbox, *rows)

    assert (told(outbox, id), passage(outbox, id).passed_at) == (("passed", "passed #"), stored_moments(outbox)[first])


def test_a_settle_that_is_no_longer_kept_leaves_a_latest_moment(engine):
    outbox = Outbox(engine)
    id = written(outbox)
    settles(outbox, (4, 8, 1), (4, 9, 1))
    change(engine, "DELETE FROM outbox_progress WHERE epoch = 0")

    found = passage(outbox, id)

    assert (told(outbox, id), found.passed_at_is_latest) == (("passed", "passed before #"), True)
    assert found.passed_at == stored_moments(outbox)[4, 8]


def test_a_transaction_that_commits_late_is_passed_late(pg_engine):
    """Its id is lower than one that was passed, and the position has left it out."""
    outbox = Outbox(pg_engine)
    with Session(pg_engine) as late:
        late_id = outbox.send(late, "orders", b"1")
        early = written(outbox)
        drained(outbox)
        late.commit()
    id = log_id(outbox, late_id)
    found = [told(outbox, each)[0] for each in (early, id)]
    drained(outbox)

    assert (found, id < early, told(outbox, id)[0]) == (["passed", "unread"], True, "passed")


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"topics": ["mail"]}, "not for it, by its topics of now"),
        ({"tags": "urgent"}, "not for it, by its tags of now"),
        ({"filter": "color = 'red'"}, "not for it, by its filter of now"),
    ],
)
def test_a_message_outside_of_the_selection_is_not_for_the_subscription(engine, properties, said):
    outbox = Outbox(engine)
    outbox.admin.create("other", destination=TO, **properties)
    id = written(outbox, tags="calm", headers={"color": "blue"})
    assert told(outbox, id, "other") == ("unselected", said)


def _began_at_latest(outbox: Outbox) -> None:
    outbox.admin.create("other", destination=TO, start="latest")


def _split(outbox: Outbox) -> None:
    outbox.admin.split("relay", ["orders"], destination=TO, as_name="other")


@pytest.mark.parametrize("begin", [_began_at_latest, _split])
def test_a_subscription_that_began_behind_a_message_says_so(engine, begin: Callable[[Outbox], None]):
    outbox = Outbox(engine)
    written(outbox, "mail")
    id = written(outbox)
    drained(outbox)
    begin(outbox)

    assert told(outbox, id, "other") == ("before", "not for it, which began behind the message")
    change(engine, "UPDATE outbox_progress SET epoch = 1 WHERE subscription = 'other'")
    # A day later nobody knows where it began.
    assert told(outbox, id, "other") == (
        "unknown", "unknown: the message is older than the subscription, which may have begun behind it",
    )  # fmt: skip


def test_of_an_earlier_generation_only_the_end_is_known(engine):
    outbox = Outbox(engine)
    id = written(outbox)
    drained(outbox)
    outbox.admin.alter("relay", partitions=2)

    assert told(outbox, id) == ("passed", "passed before #")
    assert passage(outbox, id).passed_at_is_latest


def test_a_reset_that_may_have_skipped_a_message_is_told_with_the_person_while_the_decision_is_kept(engine):
    outbox = Outbox(engine)
    id = written(outbox)
    drained(outbox)
    outbox.admin.reset("relay", "latest", by="eve")
    later = written(outbox)
    drained(outbox)

    known, of_later = told(outbox, id), told(outbox, later)
    change(engine, "DELETE FROM outbox_decision")

    moment = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC|#)"
    assert re.fullmatch(f"passed, or skipped by the reset by eve {moment}, before #", known[1]), known
    assert (known[0], of_later) == ("passed", ("passed", "passed #"))
    assert told(outbox, id) == ("passed", "passed, or skipped by a reset, before #")


def test_a_reset_to_the_beginning_makes_a_message_unread_again(engine):
    outbox = Outbox(engine)
    id = written(outbox)
    drained(outbox)
    outbox.admin.reset("relay", "earliest")

    assert told(outbox, id) == ("unread", "not yet: no worker runs")


def test_a_backfill_handles_what_was_written_before_it_and_nothing_later(engine):
    outbox = Outbox(engine)
    id = written(outbox)
    drained(outbox)
    outbox.admin.backfill("relay", ["orders"])
    later = written(outbox)

    found = told(outbox, id, "relay:backfill"), told(outbox, later, "relay:backfill")

    assert found == (("unread", "not yet: no worker runs"), ("unselected", "not for it, which ends before"))


def test_the_partition_of_the_key_decides(engine):
    """With two partitions, of which one has gone on."""
    outbox = Outbox(engine)
    outbox.admin.create("other", destination=TO, partitions=2)
    ids = {key: written(outbox, key=key) for key in ("a", "b", "c", "d")}
    change(
        engine,
        "INSERT INTO outbox_progress (subscription, generation, partition, epoch, n, base, settled_at)"
        " SELECT 'other', generation, 0, 1, 1, '999999:999999:', settled_at FROM outbox_progress"
        " WHERE subscription = 'other' AND partition = 0",
    )

    with engine.connect() as connection:
        rows = connection.execute(text("SELECT key, slot FROM outbox_message")).all()
    assert {key: told(outbox, id, "other")[0] for key, id in ids.items()} == {
        key: "unread" if slot % 2 else "passed" for key, slot in rows
    }


def test_a_pause_is_told_with_the_person_and_the_reason(engine):
    outbox = Outbox(engine)
    id = written(outbox, key="a")
    outbox.admin.pause("relay", key="a", by="eve", reason="audit")
    outbox.admin.pause("relay", key="b", by="eve")

    assert told(outbox, id) == ("unread", "not yet; paused for key 'a' by eve (audit)")


def test_a_purged_message_was_passed_by_the_subscriptions_of_its_time(engine):
    outbox = Outbox(engine)
    id = written(outbox, "dead")
    outbox.admin.create("early", destination=TO)
    change(engine, "UPDATE outbox_subscription SET created_at = (SELECT created_at FROM outbox_message)")
    change(engine, "UPDATE outbox_message SET created_at = (SELECT max(settled_at) FROM outbox_progress)")
    drained(outbox)
    drained(outbox, "early")
    change(engine, "DELETE FROM outbox_parked WHERE subscription = 'early'")
    outbox.admin.purge(timedelta(0))
    outbox.admin.create("late", destination=TO)

    trace = outbox.admin.trace(id)

    assert trace is not None and not trace.in_log and trace.topic == "dead"
    assert [(each.subscription, each.state, each.what.partition(",")[0]) for each in trace.subscriptions] == [
        ("early", "passed", "passed"),
        ("late", "unknown", "unknown: the message is purged"),
        ("relay", "dead", "dead letter after 1 failed attempt"),
    ]


@pytest.mark.parametrize("seconds", ["0", "86400", "-86400"])
def test_a_message_is_found_by_its_own_id_whatever_the_clock_of_its_writer_said(engine, seconds):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        ids = [outbox.send(session, "orders", b"1") for _ in range(3)]
    change(engine, f"UPDATE outbox_message SET created_at = {outbox.database.later(seconds)}")

    assert [log_id(outbox, each) for each in ids] == [1, 2, 3]


def test_of_an_unknown_message_there_is_no_trace(engine):
    admin = Outbox(engine).admin

    ids = (99, uuid7(), UUID(int=uuid7().int | 2**128 - 2**80), uuid4())
    assert [admin.trace(id) for id in ids] == [None] * 4


def test_the_awaited_form_and_the_command_line_tell_the_same(engine):
    outbox = Outbox(engine)
    id = written(outbox, "dead", key="a")
    drained(outbox)

    found = asyncio.run(outbox.admin.atrace(id))

    assert found == outbox.admin.trace(id)
    assert found is not None
    said = [f"{each.subscription}: {each.what}" for each in found.subscriptions]
    assert [each for each in run(engine, "log", "show", str(id)).out.splitlines() if each.startswith("relay: ")] == said
    (shown,) = run(engine, "log", "show", str(id), "--json").json["subscriptions"]
    assert (shown["state"], shown["what"], shown["copy"]["error"]) == (
        "dead",
        found.subscriptions[0].what,
        "HTTP 422",
    )

"""A purge with a retention of dead letters discards the old ones, as a decision of record."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Done, Message, Outbox, Reject, Retry, Verdict
from tests.support.command_line import outbox as run
from tests.support.destination import Destination, relay_to
from tests.support.parked import decide, decisions

AGO = {"postgresql": "now() - interval '100 days'", "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-100 days')"}
WEEK, QUARTER = timedelta(days=7), timedelta(days=90)


def refused(message: Message) -> Verdict:
    return Reject("HTTP 422") if message.topic == "bad" else Done()


def age(engine: Engine, column: str, body: str) -> None:
    """Parked, or dead, for a hundred days."""
    with engine.begin() as connection:
        statement = f"UPDATE outbox_parked SET {column} = {AGO[engine.dialect.name]} WHERE body = :body"
        connection.execute(text(statement), {"body": body.encode()})


def parked(engine: Engine) -> dict[str, tuple[str, bool]]:
    """The state of each parked message, and whether the moment of its death is known; by body."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT body, coalesce(state, 'behind'), dead_at IS NOT NULL FROM outbox_parked")
        )
        return {bytes(body).decode(): (state, bool(is_known)) for body, state, is_known in rows}


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """A dead letter with a message behind it, one that died yesterday, and one that a person wants sent."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for body, key in (("old", "a"), ("behind", "a"), ("new", "b"), ("wanted", "c")):
            outbox.send(session, "fine" if body == "behind" else "bad", body.encode(), key=key)
    relay_to(Destination(refused), outbox).until_empty()
    for body in ("old", "new", "wanted"):
        age(engine, "parked_at", body)
    for body in ("old", "wanted"):
        age(engine, "dead_at", body)
    decide(engine, "replay", "wanted")
    return outbox


def test_a_purge_discards_what_has_been_dead_for_too_long_and_nobody_has_decided_on(outbox, engine):
    rehearsed = outbox.admin.purge(WEEK, keep_dead=QUARTER, rehearsal=True)
    before = parked(engine)

    purged = outbox.admin.purge(WEEK, keep_dead=QUARTER, by="cron")

    dead = dict.fromkeys(("old", "new", "wanted"), ("dead", True))
    assert (rehearsed.dead_letters, rehearsed.behind) == (purged.dead_letters, purged.behind) == (1, 1)
    assert before == {**dead, "behind": ("behind", False)}
    assert parked(engine) == {"behind": ("retry", False), "new": ("dead", True), "wanted": ("retry", False)}
    reason = "a dead letter for longer than 90 d"
    assert [each for each in decisions(engine) if each[0] == "cron"] == [
        ("cron", "purge", None, None, [], None, True),
        ("cron", "discard", "relay", reason, [1], 1, True),
    ]


def test_a_transaction_that_was_given_up_stays_because_it_needs_a_verdict(outbox, engine):
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_subscription SET kind = 'check'"))
    before = parked(engine)

    outbox.admin.purge(WEEK, keep_dead=QUARTER)

    assert parked(engine) == before


def test_the_command_says_how_many_dead_letters_go_and_the_status_for_how_long_they_are_kept(outbox, engine):
    options = ("purge", "--older-than", "7d", "--keep-dead", "90d")
    rehearsed, purged = run(engine, *options, "--dry-run").err, run(engine, *options).err
    kept = run(engine, "status", "--json").json["log"]["keep_dead_seconds"]
    evidence = [each.evidence for each in outbox.admin.diagnosis() if each.kind == "dead"]
    outbox.admin.purge(WEEK)

    went = "1 dead letter of more than 90 d"
    assert rehearsed.splitlines()[1] == f"{went} would be discarded; 1 message would go on behind these"
    assert f"{went} discarded; 1 message goes on behind these\n" in purged
    log = outbox.admin.look().log
    assert evidence == ["HTTP 422; a purge discards them after 90 d"]
    assert (kept, log is not None and log.keep_dead_seconds) == (QUARTER.total_seconds(), None)


def test_a_message_has_a_moment_of_death_while_it_is_dead_however_it_died(engine):
    """Rejected at once, or at the second try; set aside by a person; or sent again."""
    outbox, later = Outbox(engine), Retry("not now", after=timedelta(hours=1))
    answers: dict[str, list[Verdict]] = {
        "first": [Reject("no")],
        "second": [Retry("not now", after=timedelta(0)), Reject("no")],
        "retry": [later],
        "aside": [later],
        "again": [Reject("no")],
    }
    with outbox.begin() as session:
        ids = {body: outbox.send(session, "t", body.encode(), key=body) for body in answers}
        outbox.send(session, "t", b"behind", key="retry")
    relay_to(Destination(lambda message: answers[message.body.decode()].pop(0)), outbox).until_empty()

    told = outbox.admin.parked_message(ids["first"]).dead_at, outbox.admin.parked_message(ids["retry"]).dead_at
    outbox.admin.set_aside(ids["aside"], reason="by hand")
    outbox.admin.replay(ids["again"])

    assert [each is not None for each in told] == [True, False]
    assert parked(engine) == {
        "first": ("dead", True),
        "second": ("dead", True),
        "retry": ("retry", False),
        "behind": ("behind", False),
        "aside": ("dead", True),
        "again": ("retry", False),
    }

"""Parked messages, chosen by a person: who stands behind whom, and how many a decision lets loose."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from operator import methodcaller as ask
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from outbox import (
    Admin,
    Done,
    Message,
    Outbox,
    ParkedMessage,
    Reject,
    Relay,
    Retry,
    SubscriptionError,
    Thresholds,
    Unavailable,
    Verdict,
)
from outbox.admin import commands
from outbox.admin.borrowing import borrowed
from outbox.model.lease import Holder
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.decisions import MOST
from tests.support.command_line import outbox as run
from tests.support.parked import decide
from tests.support.refusals import refusal
from tests.support.waiting import eventually

ANSWERS: dict[str, Verdict] = {
    "dead": Reject("HTTP 422: no such customer"),
    "retry": Retry("not now", after=timedelta(hours=1)),
    "waiting": Unavailable("no stream"),
}


class Destination:
    """Answers by topic, and keeps what it has accepted."""

    destination = "nats://h:4222"

    def __init__(self) -> None:
        self.got: list[tuple[str, str | None]] = []

    def send(self, messages):
        """One answer for each topic; a key stops at its first failure."""
        failed: dict[str | None, Verdict] = {}
        answers: list[Verdict] = []
        for message in messages:
            answers.append(failed.get(message.key) or ANSWERS.get(message.topic, Done()))
            if message.key is not None and not isinstance(answers[-1], Done):
                failed[message.key] = answers[-1]
        accepted = (each for each, answer in zip(messages, answers, strict=True) if isinstance(answer, Done))
        self.got += [(each.topic, each.key) for each in accepted]
        return answers

    def close(self):
        """Nothing is open."""


@pytest.fixture
def shop(engine) -> Outbox:
    """A message in each state; two behind the dead letter, and one behind the retry."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for topic, key in (("dead", "a"), *[("fine", "a")] * 2, ("retry", "b"), ("fine", "b"), ("waiting", "c")):
            outbox.send(session, topic, b"1", key=key)
        outbox.send(session, "later", b"1", delay=timedelta(hours=1))
    Relay(outbox, Destination()).until_empty()
    return outbox


def states(admin: Admin, **choice) -> list[tuple[str, str | None, int | None]]:
    return [(each.state, each.key, each.head) for each in admin.parked(**choice)]


def test_each_is_shown_with_the_head_of_its_key(shop):
    assert states(shop.admin) == [
        ("dead", "a", None), ("behind", "a", 1), ("behind", "a", 1), ("retry", "b", None), ("behind", "b", 4),
        ("waiting", "c", None), ("delayed", None, None),
    ]  # fmt: skip


def test_they_are_chosen_by_their_properties(shop):
    choices: list[tuple[dict[str, Any], list[int]]] = [
        ({"state": "dead"}, [1]),
        ({"state": ("retry", "delayed")}, [4, 7]),
        ({"key": "a"}, [1, 2, 3]),
        ({"topic": "fine", "key": "b"}, [5]),
        ({"error_like": "http 422"}, [1]),
        ({"error_like": "%"}, []),
        ({"before": datetime(2020, 1, 1, tzinfo=UTC)}, []),
        ({"before": datetime(2100, 1, 1, tzinfo=UTC), "state": "waiting"}, [6]),
        ({"limit": 2}, [1, 2]),
    ]

    found = [(choice, [each.id for each in shop.admin.parked(**choice)]) for choice, _ in choices]

    assert found == choices


#: Orders and questions that are refused, each with how its error begins.
REFUSALS = {
    # What means nothing, or two things.
    ask("parked", state="gone"): (
        "SubscriptionError: state: gone is no state; the states are delayed, waiting, retry, dead, behind"
    ),
    ask("parked", before=datetime(2020, 1, 1)): (  # noqa: DTZ001  # the point
        "SubscriptionError: before: 2020-01-01 00:00:00 has no time zone"
    ),
    ask("parked", name="nope"): "SubscriptionError: there is no subscription 'nope'",
    ask("replay"): "SubscriptionError: replay: give ids, or all=True with a choice; not both",
    ask("replay", 1, all=True): "SubscriptionError: replay: give ids, or all=True with a choice; not both",
    ask("replay", 4): (
        "SubscriptionError: no dead messages of relay: 4; nothing was done; to see its state, run: outbox parked show 4"
    ),
    ask("replay", 2, state="behind"): (
        "SubscriptionError: state: a message behind another one goes on as soon as that one is done"
    ),
    # What is neither true nor false: every text would count as true.
    **{
        question: f"TypeError: {name} must be True or False, not {wrong!r}"
        for wrong in ("no", None)
        for name, question in [
            ("all", ask("replay", all=wrong)),
            ("rehearsal", ask("discard", 1, reason="seen", rehearsal=wrong)),
            ("rehearsal", ask("reset", "relay", "earliest", rehearsal=wrong)),
            ("rehearsal", ask("drop", "relay", rehearsal=wrong)),
            ("rehearsal", ask("purge", timedelta(0), rehearsal=wrong)),
            ("rehearsal", ask("erase", keys=["a"], rehearsal=wrong)),
        ]
    },
    # A number that no column holds.
    ask("parked", limit=-1): "ValueError: limit must be a whole number from 1 on, not -1",
    ask("dead_letters", limit=2**63): "ValueError: limit must be a whole number from 1 to 9223372036854775807",
    ask("newest", limit=-1): "ValueError: limit must be a whole number from 1 on, not -1",
    ask("newest", limit=True): "ValueError: limit must be a whole number from 1 on, not True",
    ask("message", 2**63): "ValueError: id must be a whole number from 1 to 9223372036854775807",
    ask("parked_message", 2**63): "ValueError: id must be a whole number from 1 to 9223372036854775807",
    ask("parked_message", "1"): "ValueError: id must be a whole number from 1 on, not '1'",
    ask("replay", 1, 2**63): "ValueError: id must be a whole number from 1 to 9223372036854775807",
    ask("discard", -1, reason="seen"): "ValueError: id must be a whole number from 1 on, not -1",
    ask("erase", message_ids=[2**63]): "TypeError: message_ids must be UUIDs, not 9223372036854775808; pass",
    # A text that cannot be stored.
    **{
        question: f"InvalidMessageError: {field}: {limit}"
        for wrong, limit in [
            ("a\0", "must be at most 2000 characters without NUL"),
            ("a\ud800", "holds a lone surrogate"),
            (2_001 * "a", "must be at most 2000 characters without NUL"),
        ]
        for field, verb, arguments in [
            ("reason", "pause", ["relay"]),
            ("by", "pause", ["relay"]),
            ("topic", "parked", []),
            ("key", "parked", []),
            ("error_like", "parked", []),
        ]
        for question in (
            ask("discard", **{"all": True, "reason": "seen", field: wrong}),
            ask(verb, *arguments, **{field: wrong}),
        )
    },
    # A name that no choice has. Ignored, the name would let a decision be about more messages.
    **{
        ask(verb, all=True, topics="bad", reason="a slip"): (
            f"TypeError: {verb} has no option topics; there are reason, name, state, topic, key,"
        )
        for verb in ("replay", "discard")
    },
    ask(
        "parked", topics="bad"
    ): "TypeError: parked has no option topics; there are limit, after, name, state, topic, key,",
}


@pytest.mark.smoke("asks each question that is refused, and what it left")
def test_what_is_refused_is_told_why_and_decides_nothing(shop):
    before = decided(shop.admin)

    answers = [(repr(question), refusal(question, shop.admin), decided(shop.admin)) for question in REFUSALS]

    expected = zip(answers, REFUSALS.values(), strict=True)
    assert [answer[:2] for answer, begins in expected if not (answer[1] or "").startswith(begins)] == []
    assert [question for question, _, after in answers if after != before] == []


def decided(admin: Admin) -> tuple[object, ...]:
    """Return what a decision would have changed: parked messages, the log, the pauses of the relay."""
    (relay,) = admin.subscriptions()
    return admin.parked(), [each.id for each in admin.newest()], relay.pauses


def test_a_rehearsal_says_how_many_go_on_behind_and_changes_nothing(shop):
    before = shop.admin.parked()

    (one,) = shop.admin.discard(1, reason="x", rehearsal=True)
    (all_,) = shop.admin.discard(all=True, state=("dead", "retry"), reason="x", rehearsal=True)

    assert [(each.messages, each.behind, each.worker) for each in (one, all_)] == [(1, 2, None), (2, 3, None)]
    assert shop.admin.parked() == before


def test_a_message_behind_two_others_does_not_go_on_when_one_is_gone(engine):
    """The first of the key is tried again, and the delayed message has fallen due behind it."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message(topic, b"1", key="a") for topic in ("retry", "fine")])
    Relay(outbox, Destination()).until_empty()

    (decision,) = outbox.admin.discard(2, state="behind", reason="x", rehearsal=True)

    assert (decision.messages, decision.behind) == (1, 0)


def test_a_discard_of_a_delayed_message_and_of_a_retry_lets_their_keys_go_on(shop):
    """A worker is at work meanwhile, and carries the requests out itself."""
    destination = Destination()
    with shop.running(destination):
        assert eventually(lambda: all(each.live for each in shop.admin.statuses()))
        done = shop.admin.discard(all=True, state=("retry", "delayed"), reason="cancelled")
        assert eventually(lambda: destination.got == [("fine", "b")])

    assert [(each.messages, each.behind, each.worker is None) for each in done] == [(2, 1, False)]
    assert states(shop.admin) == [("dead", "a", None), ("behind", "a", 1), ("behind", "a", 1), ("waiting", "c", None)]


def test_a_replay_of_a_delayed_message_sends_it_now(shop):
    shop.admin.replay(7, state="delayed", reason="sooner")
    destination = Destination()
    Relay(shop, destination).until_empty()

    assert destination.got == [("later", None)]


def test_a_decision_waits_for_another_command_and_is_carried_out(shop, channel):
    stored = Subscriptions(channel).get("relay")
    with ThreadPoolExecutor(1) as pool:
        with borrowed(channel, [stored]):
            order = pool.submit(shop.admin.discard, 1, reason="seen")
            wait([order], timeout=1)
        (done,) = order.result(60)

    assert (done.messages, done.worker, states(shop.admin, state="dead")) == (1, None, [])


def test_a_decision_does_not_wait_for_ever(shop, channel, monkeypatch):
    monkeypatch.setattr(commands, "_PATIENCE", timedelta(0))
    stored = Subscriptions(channel).get("relay")
    with borrowed(channel, [stored]), pytest.raises(SubscriptionError, match="try again when that command has ended"):
        shop.admin.discard(1, reason="seen")

    assert {each.decision for each in shop.admin.parked()} == {None}


@pytest.mark.parametrize(("owner", "is_command"), [("command-0a1b2c3d", True), ("command-relay-7d9f:12:ab", False)])
def test_a_worker_may_run_on_a_host_with_any_name(owner, is_command):
    assert Holder(owner, 1, 0, None, live=True).is_command is is_command


def test_another_change_is_told_of_the_command_that_has_the_lease(shop, channel):
    stored, said = Subscriptions(channel).get("relay"), r"another command \(command-\w+\) holds the lease of relay"
    with borrowed(channel, [stored]), pytest.raises(SubscriptionError, match=said):
        shop.admin.drop("relay")


class Between(logging.Handler):
    """Calls a function when a transaction has carried out decisions, which are logged after each."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call
        self._logged = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the lines about decisions, and call at the first line of each transaction."""
        if record.getMessage().startswith("parked message"):
            if self._logged % MOST == 0:
                self._call()
            self._logged += 1


def test_a_writer_gets_in_between_the_transactions_of_a_large_replay(engine, caplog):
    """One long transaction would hold up the writers of SQLite, and other commands of PostgreSQL."""
    outbox, number = Outbox(engine), 2 * MOST + 1
    with outbox.begin() as session:
        outbox.send_all(session, [Message("dead", b"1") for _ in range(number)])
    Relay(outbox, Destination()).until_empty()
    undone: list[int] = []

    def write() -> None:
        with outbox.begin() as session:
            outbox.send(session, "fine", b"1")
        undone.append(sum(each.decision is not None for each in outbox.admin.parked(limit=number)))

    between, logger = Between(write), logging.getLogger("outbox")
    logger.addHandler(between)
    try:
        with caplog.at_level("INFO", "outbox"):
            (done,) = outbox.admin.replay(all=True)
    finally:
        logger.removeHandler(between)

    assert (done.messages, undone) == (number, [MOST + 1, 1, 0])


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_decision_that_is_rolled_back_is_not_logged(engine, shop, caplog):
    with engine.begin() as connection:
        connection.execute(
            text("""
                CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                    $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
                CREATE CONSTRAINT TRIGGER refuse AFTER DELETE ON outbox_parked DEFERRABLE INITIALLY DEFERRED
                    FOR EACH ROW EXECUTE FUNCTION refuse()
            """)
        )

    with caplog.at_level("INFO", "outbox"), pytest.raises(Exception, match="not today"):
        shop.admin.discard(1, reason="seen")

    assert [each.message for each in caplog.records if "discard" in each.message] == []


def test_the_command_line_has_the_same_filters(shop):
    engine = shop.engine
    listed = run(engine, "parked", "list", "--state", "behind,retry", "--key", "b", "--before", "2100-01-01T00:00:00Z")
    shown = run(engine, "parked", "show", "1", "--json").json
    asked = run(engine, "parked", "discard", "--all", "--reason", "x", "--error-like", "HTTP")

    assert [line.split()[1:5] for line in listed.out.splitlines()[1:]] == [
        ["4", "retry", "retry", "b"], ["5", "behind", "fine", "b"],
    ]  # fmt: skip
    assert (shown["behind"], shown["head"], shown["body"]) == (2, None, "1")
    assert (asked.code, "discard 1 message of relay, with 2 messages behind?" in asked.err) == (2, True)


def sent_again(outbox: Outbox, topic: str = "fine") -> tuple[str, bool]:
    """Send a message with the dedup key of an earlier one; return its body, and whether it was written."""
    with outbox.begin() as session:
        message = Message(topic, b"again", dedup_key="job-1")
        (id,) = outbox.send_all(session, [message])
    return message.text(), id == message.message_id


def test_a_discarded_message_gives_its_dedup_key_back(engine):
    """Else the next message would not be written, and its writer would get the id of the discarded one."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "dead", b"1", dedup_key="job-1")
        outbox.send(session, "dead", b"2", dedup_key="job-2")
    Relay(outbox, Destination()).until_empty()
    before = sent_again(outbox)

    outbox.admin.discard(1, reason="mended")

    assert (before, sent_again(outbox)) == (("again", False), ("again", True))
    with engine.connect() as connection:
        kept = connection.scalars(text("SELECT dedup_key FROM outbox_dedup ORDER BY dedup_key")).all()
    assert kept == ["job-1", "job-2"]


def test_a_discard_beside_a_writer_that_repeats_the_dedup_key_holds_up_no_message(pg_engine):
    """The writer has a lock on the key until its transaction ends, which may be long; only the discard waits."""
    outbox, destination = Outbox(pg_engine), Destination()
    with outbox.begin() as session:
        outbox.send(session, "dead", b"1", dedup_key="job-1")
    Relay(outbox, destination).until_empty()
    decide(pg_engine, "discard")
    with outbox.begin() as session:
        outbox.send(session, "fine", b"2", key="a")

    with outbox.begin() as session:
        outbox.send(session, "fine", b"again", dedup_key="job-1")
        Relay(outbox, destination).until_empty()
        beside = (list(destination.got), states(outbox.admin))
    Relay(outbox, destination).until_empty()

    assert (beside, states(outbox.admin)) == (([("fine", "a")], [("dead", None, None)]), [])
    assert sent_again(outbox) == ("again", True)


def test_an_erased_message_gives_its_dedup_key_back(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "fine", b"1", key="ann", dedup_key="job-1")
        outbox.send(session, "fine", b"2", key="ben", dedup_key="job-2")
    Relay(outbox, Destination()).until_empty()

    outbox.admin.erase(keys=["ann"])

    with engine.connect() as connection:
        kept = connection.scalars(text("SELECT dedup_key FROM outbox_dedup")).all()
    assert (kept, sent_again(outbox)) == (["job-2"], ("again", True))


def test_a_list_comes_page_by_page_over_all_subscriptions(shop):
    shop.admin.create("other", destination="nats://h:4222")
    Relay(shop, Destination(), name="other").until_empty()
    whole = shop.admin.parked()

    pages: list[tuple[ParkedMessage, ...]] = []
    while page := shop.admin.parked(limit=4, after=(pages[-1][-1].subscription, pages[-1][-1].id) if pages else None):
        pages.append(page)

    assert ([each for page in pages for each in page], len(whole), len(pages)) == ([*whole], 14, 4)
    assert run(shop.database.engine, "parked", "list", "--after", "3").code == 2
    behind = run(shop.database.engine, "parked", "list", "--name", "other", "--after", "3", "--json").json["parked"]
    assert [each["id"] for each in behind] == [
        each.id for each in whole if each.subscription == "other" and each.id > 3
    ]


def test_a_choice_is_counted_by_state_and_by_error(shop):
    shop.admin.create("other", destination="nats://h:4222")
    Relay(shop, Destination(), name="other").until_empty()

    found, some = shop.admin.parked_count(), shop.admin.parked_count(name="relay", topic="fine")

    assert (found.messages, dict(found.states), found.messages_is_minimum) == (
        14, {"delayed": 2, "waiting": 2, "retry": 2, "dead": 2, "behind": 6}, False,
    )  # fmt: skip
    assert {(each.state, each.messages, each.error) for each in found.errors} == {
        ("dead", 2, "HTTP 422: no such customer"), ("retry", 2, "not now"), ("waiting", 2, "no stream"),
    }  # fmt: skip
    assert (some.messages, some.states["behind"], some.errors) == (3, 3, ())


def test_a_count_whose_time_is_over_is_a_minimum(shop, monkeypatch):
    monkeypatch.setattr("outbox.store.subscriptions.parked_messages._COUNTED_AT_ONCE", 2)

    found, whole = shop.admin.parked_count(patience=timedelta(0)), shop.admin.parked_count()

    assert (found.messages, found.messages_is_minimum) == (2, True)
    assert (whole.messages, whole.messages_is_minimum) == (7, False)


def test_each_decision_of_a_finding_can_be_called(shop):
    look = shop.admin.look(Thresholds())

    offered = {each.kind: each.decisions for each in look.findings if each.decisions}
    assert {kind: [each.verb for each in decisions] for kind, decisions in offered.items()} == {
        "waiting": ["replay", "pause"], "dead": ["replay", "discard"],
    }  # fmt: skip
    for decisions in offered.values():
        for each in decisions:
            getattr(shop.admin, each.verb)(**each.arguments, reason="tried", by="bot")


def test_errors_that_differ_in_numbers_alone_are_one_choice(engine):
    outbox = Outbox(engine)
    errors = [
        "HTTP 422 of order 17: 100%",
        "HTTP 422 of order 4711: 5%",
        "HTTP 422 of order 17: 100",
        f"E{'x' * 600} 1",
    ]
    with outbox.begin() as session:
        for each in errors:
            outbox.send(session, "orders", each)
    Relay(outbox, Echo()).until_empty()

    counts = [(each.messages, each.error) for each in outbox.admin.parked_count().errors]
    found = [len(outbox.admin.parked(same_error=error)) for _, error in counts]

    assert found == [number for number, _ in counts] == [2, 1, 1]
    (decided,) = outbox.admin.replay(all=True, same_error=errors[1], rehearsal=True)
    assert decided.messages == 2


class Echo:
    """Refuses each message with its own body as the error."""

    destination = "nats://h:4222"

    def send(self, messages):
        """Refuse all."""
        return [Reject(each.text()) for each in messages]

    def close(self):
        """Nothing is open."""


@pytest.mark.parametrize(
    ("state", "attempts", "in_all", "told"),
    [
        ("retry", 3, 10, "3 of 10"), ("waiting", 3, 10, "3 of 10"), ("retry", 3, None, "3"), ("waiting", 0, 10, "0"),
        # No try comes, or the worker has been given another policy since.
        ("dead", 1, 10, "1"), ("retry", 5, 3, "5"),
    ],
)  # fmt: skip
def test_tries_are_told_with_their_end_where_one_is_known(state, attempts, in_all, told):
    message = ParkedMessage(
        subscription="relay", id=1, message_id=UUID(int=1), topic="orders", key=None, state=state, head=None,
        attempts=attempts, error=None, created_at=None, parked_at=None, due_at=None, attempts_in_all=in_all,
    )  # fmt: skip

    assert message.tries == told

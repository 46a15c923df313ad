"""Reconciliation tells of each half message what became of it, and finds what cannot be."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from outbox.model.limits import HALF_TOPIC
from outbox.spark.reports import reconciliation as r

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


@pytest.fixture
def log(spark):
    """Makes a log of rows that `half` and `message` make."""

    def made(*rows):
        return spark.createDataFrame(list(rows), r.MESSAGE_COLUMNS)

    return made


@pytest.fixture
def ops(spark):
    """Makes verdicts of transactions."""

    def made(**verdicts):
        rows = [(transaction, op, "tests", at(1)) for transaction, op in verdicts.items()]
        return spark.createDataFrame(rows, r.OP_COLUMNS)

    return made


@pytest.fixture
def parked(spark):
    """Makes parked half messages of (subscription, transaction, state)."""

    def made(*rows):
        return spark.createDataFrame(list(rows), r.PARKED_COLUMNS)

    return made


def half(id, transaction, *, message=None, topic="orders", group="shop", body=b"1", minute=0):
    headers = {"REAL_TOPIC": topic, "PGROUP": group, "__transactionId__": transaction, "outbox-verdict": "join"}
    return (id, message or f"m{id}", HALF_TOPIC, transaction, group, json.dumps(headers), body, at(minute))


def message(id, transaction, *, message, topic="orders", body=b"1"):
    headers = {"a": "b", "__transactionId__": transaction}
    return (id, message, topic, "key", None, json.dumps(headers), body, at(2))


def found(frame):
    """Of each row: message, state, problem; in the order of the log."""
    rows = frame.orderBy("id", "message_id").collect()
    return [(row.message_id, row.state, row.problem) for row in rows]


@pytest.mark.jvm
def test_each_half_message_is_committed_rolled_back_open_or_parked(log, ops, parked):
    messages = log(
        half(1, "c"), half(2, "c"), half(3, "r"), half(4, "o", minute=3), half(5, "p"), half(6, "p"),
        message(7, "c", message="m1"), message(8, "c", message="m2"),
        (9, "m9", "orders", None, None, None, b"of no transaction", at(3)),
        half(10, "c", message="m1"),  # sent twice, because an answer was lost: one message
    )  # fmt: skip
    parked_rows = parked(("check:shop", "p", "dead"), ("check:shop", "o", "retry"), ("check:other", "o", "dead"))

    reconciled = r.reconcile(messages, ops(c="commit", r="rollback"), parked_rows)

    assert found(reconciled) == [
        ("m1", "committed", None), ("m2", "committed", None), ("m3", "rolled back", None), ("m4", "open", None),
        ("m5", "parked", None), ("m6", "parked", None),
    ]  # fmt: skip
    assert [row.asDict() for row in r.states(reconciled).collect()] == [
        {"producer_group": "shop", "topic": "orders", "committed": 2, "rolled_back": 1, "open": 1, "parked": 2,
         "oldest_open": at(3).replace(tzinfo=None), "contradictions": 0, "unproven": 0},
    ]  # fmt: skip


@pytest.mark.jvm
def test_who_decided_is_said(log, ops, parked):
    (row,) = r.reconcile(log(half(1, "r")), ops(r="rollback"), parked(("x", "x", "x"))).collect()

    assert (row.verdict, row.decided_by, row.decided_at, row.copies) == ("join", "tests", at(1).replace(tzinfo=None), 0)


#: Rows of the log and verdicts, in a transaction of its own each; and the problem that is found.
CASES = {
    "restored nothing": ([half(1, "nothing")], {"nothing": "commit"}, r.NOT_RESTORED),
    "restored another one": (
        [half(2, "another"), message(3, "another", message="m7")], {"another": "commit"}, r.NOT_RESTORED,
    ),
    "of another topic": (
        [half(4, "topic"), message(5, "topic", message="m4", topic="mail")], {"topic": "commit"}, r.NOT_RESTORED,
    ),
    "under a rollback": (
        [half(6, "under"), message(7, "under", message="m6")], {"under": "rollback"}, r.AGAINST_VERDICT,
    ),
    "under a rollback, its half message is gone": (
        [message(8, "gone", message="m8")], {"gone": "rollback"}, r.AGAINST_VERDICT,
    ),
    "without a verdict": ([half(9, "without"), message(10, "without", message="m9")], {}, r.WITHOUT_VERDICT),
    "twice": (
        [half(11, "twice"), message(12, "twice", message="m11"), message(13, "twice", message="m11")],
        {"twice": "commit"}, r.SEVERAL_TIMES,
    ),
    "twice, its half message is gone": (
        [message(14, "again", message="m14"), message(15, "again", message="m14")], {"again": "commit"},
        r.SEVERAL_TIMES,
    ),
    "with another body": (
        [half(16, "body"), message(17, "body", message="m16", body=b"2")], {"body": "commit"}, r.ANOTHER_BODY,
    ),
    # And what may be:
    "its half message was purged": ([message(18, "half", message="m18")], {"half": "commit"}, None),
    "its half message and its verdict were purged": ([message(19, "both", message="m19")], {}, None),
    "was sent twice, and restored once": (
        [half(20, "same", message="m20"), half(21, "same", message="m20"), message(22, "same", message="m20")],
        {"same": "commit"}, None,
    ),
    "a consumer has sent it on with its headers": (
        [half(23, "on"), message(24, "on", message="m23"), message(25, "on", message="m25", topic="mail")],
        {"on": "commit"}, None,
    ),
    "a verdict whose half messages were purged": ([], {"alone": "commit"}, None),
}  # fmt: skip


@pytest.mark.jvm
def test_what_cannot_be_is_found_and_nothing_else(log, ops, parked):
    """In one look, because each look takes a second."""
    rows = [row for case in CASES.values() for row in case[0]]
    verdicts = {transaction: op for case in CASES.values() for transaction, op in case[1].items()}

    reconciled = r.reconcile(log(*rows), ops(**verdicts), parked(("x", "x", "x")))

    problems = {row.transaction_id: row.problem for row in r.contradictions(reconciled).collect()}
    assert problems == {next(iter(verdict), "without"): problem for _, verdict, problem in CASES.values() if problem}


@pytest.mark.jvm
def test_what_was_purged_proves_nothing_by_its_absence(log, ops, parked):
    reconciled = r.reconcile(
        log(half(5, "a"), half(6, "b")), ops(a="commit", b="commit"), parked(("x", "x", "x")), purged_id=5
    )

    assert [(row.id, row.unproven, row.problem) for row in reconciled.orderBy("id").collect()] == [
        (5, True, None), (6, False, r.NOT_RESTORED),
    ]  # fmt: skip


@pytest.mark.jvm
def test_half_messages_of_topics_that_are_not_there_prove_nothing(log, ops, parked):
    """An archive of some topics has the half messages of all."""
    rows, verdicts, nothing = (
        log(half(5, "a", topic="mails"), half(6, "b")),
        ops(a="commit", b="commit"),
        parked(("x", "x", "x")),
    )

    assert found(r.reconcile(rows, verdicts, nothing, topics=("orders",))) == [("m6", "committed", r.NOT_RESTORED)]


@pytest.mark.jvm
def test_a_verdict_after_the_end_of_an_archive_proves_nothing_by_an_absence(log, ops, parked):
    """The verdicts are all of minute 1."""
    at_once, later = (
        r.reconcile(log(half(5, "a")), ops(a="commit"), parked(("x", "x", "x")), decided_before=before)
        for before in (at(1), at(1.01))
    )

    assert [(row.unproven, row.problem) for row in at_once.union(later).collect()] == [
        (True, None), (False, r.NOT_RESTORED),
    ]  # fmt: skip


@pytest.mark.jvm
def test_a_contradiction_of_two_looks_at_different_moments_heals(log, ops, parked):
    """Read the messages before a transaction is committed, and the verdicts after it: the second look sees it whole."""
    nothing = parked(("x", "x", "x"))
    verdicts = ops(late="commit", broken="commit")
    first = r.contradictions(r.reconcile(log(half(1, "late"), half(2, "broken")), verdicts, nothing))
    second = r.reconcile(log(half(1, "late"), half(2, "broken"), message(3, "late", message="m1")), verdicts, nothing)

    assert (len(found(first)), found(r.unless_healed(first, second))) == (2, [("m2", "committed", r.NOT_RESTORED)])


@pytest.mark.jvm
def test_a_contradiction_that_becomes_another_one_stays(log, ops, parked):
    """While the log is read, somebody deletes the verdict by hand."""
    nothing = parked(("x", "x", "x"))
    rows = log(half(1, "a"), message(2, "a", message="m1"))
    first = r.contradictions(r.reconcile(rows, ops(a="rollback"), nothing))
    second = r.reconcile(rows, ops(b="commit"), nothing)

    assert [row.problem for row in first.collect()] == [r.AGAINST_VERDICT]
    assert [row.problem for row in r.unless_healed(first, second).collect()] == [r.WITHOUT_VERDICT]

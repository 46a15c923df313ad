"""Transactions with half messages in `Outbox.admin`: listed, shown, decided on and resumed, as by `outbox half`."""

import asyncio

import pytest

from outbox import Outbox, OutboxError, SubscriptionError
from outbox.errors import VerdictStandsError
from tests.rocketmq.halves import ask, begun


def test_pending_transactions_are_listed_and_shown_with_their_messages(engine):
    ids = [begun(engine, "orders", "mail", group="shop").id, begun(engine, "orders", group="depot").id]
    admin = Outbox(engine).admin

    shown = admin.half_transaction(ids[0])

    assert {each.transaction_id for each in admin.half_transactions()} == set(ids)
    assert [each.transaction_id for each in admin.half_transactions(group="depot", limit=1)] == ids[1:]
    assert (shown.op, [each.topic for each in shown.messages]) == (None, ["orders", "mail"])
    assert shown.transaction is not None and shown.transaction.messages == 2


def test_a_transaction_is_shown_without_bodies_but_with_their_sizes(engine):
    id, admin = begun(engine, "orders", "mail").id, Outbox(engine).admin

    whole, sized = admin.half_transaction(id), admin.half_transaction(id, bodies=False)

    assert [each.body for each in whole.messages] == [b"of orders", b"of mail"]
    assert [each.body for each in sized.messages] == [b"", b""]
    assert sized.body_bytes == whole.body_bytes == (9, 7)
    fields = [
        [(each.message_id, each.topic, each.key, dict(each.headers)) for each in of.messages] for of in (whole, sized)
    ]
    assert fields[0] == fields[1]


def test_a_commit_delivers_and_is_kept_as_a_decision_of_the_person(engine):
    id, admin = begun(engine, "orders", group="shop").id, Outbox(engine).admin

    first, again = admin.half_commit(id, by="eve"), admin.half_commit(id, by="bob")

    assert [(each.op, each.messages, each.is_new, each.decided_by) for each in (first, again)] == [
        ("commit", 1, True, "admin eve"), ("commit", 1, False, "admin eve"),
    ]  # fmt: skip
    assert [each.topic for each in admin.newest()] == ["orders"]
    (decision,) = admin.decisions()
    assert (decision.verb, decision.by, decision.subscription, decision.choice) == (
        "commit", "eve", "check:shop", {"transaction_id": id},
    )  # fmt: skip
    with pytest.raises(VerdictStandsError, match="was committed before by admin eve"):
        admin.half_rollback(id)


def test_a_rollback_drops_the_messages(engine):
    id, admin = begun(engine, "orders").id, Outbox(engine).admin

    verdict = asyncio.run(admin.ahalf_rollback(id, by="eve"))

    assert (verdict.op, verdict.is_new, admin.newest(), admin.half_transactions()) == ("rollback", True, (), ())
    assert admin.half_transaction(id).op == "rollback"


def test_a_transaction_that_was_given_up_is_asked_about_again(engine):
    given_up, admin = begun(engine, group="depot"), Outbox(engine).admin
    ask(engine, group="depot")
    (found,) = admin.half_transactions(given_up=True)

    done = admin.half_resume(given_up.id, by="eve", reason="the service is back")

    assert (found.transaction_id, done.group, done.messages, done.worker) == (given_up.id, "depot", 1, None)
    assert admin.half_transactions(given_up=True) == ()
    with pytest.raises(OutboxError, match="was not given up; its checks go on"):
        admin.half_resume(given_up.id)


def test_what_is_not_there_is_an_error(engine):
    admin = Outbox(engine).admin
    for question in (admin.half_transaction, admin.half_commit, admin.half_rollback, admin.half_resume):
        with pytest.raises(SubscriptionError, match="there is no transaction nope"):
            question("nope")

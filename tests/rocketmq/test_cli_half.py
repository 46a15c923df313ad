"""`outbox half`: pending transactions are listed, shown, decided by hand, and asked about again."""

import getpass
import socket
import threading
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.model.lease import Partition
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq import TransactionResolution, VerdictStandsError
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.service import CheckService
from outbox.store.operations import parked_status
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.rocketmq.halves import ask, begun, producer
from tests.rocketmq.parts import ONE_DATABASE, end
from tests.support.command_line import leading_to, outbox
from tests.support.parked import decisions
from tests.support.readers import delivered
from tests.support.waiting import eventually

#: For what does not depend on the database: one kind is enough.
ESCAPE = "\x1b[2J\x07 no"


def listed(engine, *options):
    """What `half list` shows to programs."""
    return outbox(engine, "half", "list", "--json", *options).json["transactions"]


def ids(transactions):
    return [each["transaction_id"] for each in transactions]


def bodies(engine):
    """What relays would deliver."""
    return [message.body for message in delivered(Outbox(engine).database)]


def op(engine, transaction):
    with engine.connect() as connection:
        statement = text("SELECT op, decided_by FROM outbox_op WHERE transaction_id = :id")
        return connection.execute(statement, {"id": transaction.id}).one_or_none()


def me():
    return f"{getpass.getuser()}@{socket.gethostname()}"


# Listing


def test_a_pending_transaction_is_listed_with_all_that_is_known_of_it(engine):
    transaction = begun(engine, "orders", "mail", "orders", timeout=timedelta(seconds=6))

    (found,) = listed(engine)

    created, due = found.pop("created_at"), found.pop("next_check_at")
    assert (found.pop("age_seconds") >= 0, created < due) == (True, True)
    assert found == {
        "transaction_id": transaction.id, "group": "shop", "topic": "RMQ_SYS_TRANS_HALF_TOPIC",
        "real_topics": ["orders", "mail"], "messages": 3, "verdict": "listener", "checks": 0, "last_answer": None,
        "given_up": False,
    }  # fmt: skip


def test_a_transaction_that_was_asked_about_says_what_was_answered(engine):
    begun(engine, "orders", "orders")

    ask(engine, again=False)

    (found,) = listed(engine)
    assert (found["checks"], found["last_answer"], found["given_up"]) == (1, "UNKNOWN", False)
    assert found["next_check_at"] > found["created_at"]


def test_one_that_was_given_up_is_listed_under_the_topic_that_rocketmq_gives_it(engine):
    begun(engine, "orders", "orders")

    ask(engine)

    (found,) = listed(engine)
    assert {name: found[name] for name in ("topic", "checks", "given_up", "next_check_at", "messages")} == {
        "topic": "TRANS_CHECK_MAX_TIME_TOPIC", "checks": 2, "given_up": True, "next_check_at": None, "messages": 2,
    }  # fmt: skip
    assert outbox(engine, "half", "list").out.startswith("TRANS_CHECK_MAX_TIME_TOPIC:\n")


def test_one_with_a_verdict_is_not_listed(engine):
    """Also where it was given up before, and nobody has cleared that yet."""
    given_up, committed, rolled_back = (begun(engine) for _ in range(3))
    ask(engine)

    given_up.commit()
    committed.commit()
    rolled_back.rollback()

    assert (listed(engine), listed(engine, "--given-up")) == ([], [])


def test_a_part_of_them_is_listed_the_oldest_first(engine):
    old, new = begun(engine), begun(engine)
    ask(engine)
    other, pending = begun(engine, group="depot"), begun(engine)

    found = [ids(listed(engine, *options)) for options in ([], ["--group", "depot"], ["--given-up"], ["--limit", "2"])]
    after = [ids(listed(engine, *options, "--after", old.id)) for options in ([], ["--given-up"])]

    assert after == [[new.id, other.id, pending.id], [new.id]]
    assert found == [
        [old.id, new.id, other.id, pending.id], [other.id], [old.id, new.id], [old.id, new.id],
    ]  # fmt: skip


@ONE_DATABASE
def test_people_see_for_how_long_it_waits_for_its_next_check(engine):
    immune = begun(engine, timeout=timedelta(hours=2))
    due, given_up = begun(engine, group="mill"), begun(engine, group="depot")
    ask(engine, group="depot")

    rows = {line.split()[0]: line for line in outbox(engine, "half", "list").out.splitlines() if line}

    assert ("  in 2 h" in rows[immune.id], "  due" in rows[due.id], "  -  " in rows[given_up.id]) == (True, True, True)


@ONE_DATABASE
def test_that_there_are_more_is_told(engine):
    for _ in range(2):
        begun(engine)

    ended = outbox(engine, "half", "list", "--limit", "1")

    assert "raise --limit above 1" in ended.err


@ONE_DATABASE
def test_groups_that_nobody_checks_back_on_are_told(engine):
    begun(engine)
    begun(engine, group="depot")
    outbox(engine, "subscriptions", "drop", "check:depot", "--yes")

    warnings = outbox(engine, "half", "list").err.splitlines()

    dropped = "the subscription check:depot was dropped: nobody finds the pending transactions of group depot any more"
    check = "outbox half check --group shop --listener MODULE:OBJECT"
    assert warnings == [
        f"warning: {dropped}; decide them by outbox half commit ID, or outbox half rollback ID",
        f"warning: nobody checks back on group shop: start a producer of the group, or run: {check}",
    ]


@ONE_DATABASE
def test_without_any_it_says_so(engine):
    ended = outbox(engine, "half", "list"), outbox(engine, "half", "list", "--given-up"), listed(engine)

    assert (ended[0].err, ended[1].err, ended[2]) == (
        "no transactions are pending\n", "no transactions are given up\n", [],
    )  # fmt: skip


@ONE_DATABASE
def test_nothing_of_a_listener_reaches_the_terminal_unescaped(engine):
    transaction = begun(engine)
    ask(engine, answer=lambda _message: ESCAPE)

    shown = [outbox(engine, "half", "list").out, outbox(engine, "half", "show", transaction.id).out]

    assert [("no state" in each, each.replace("\n", "").isprintable()) for each in shown] == [(True, True)] * 2


@ONE_DATABASE
def test_that_some_were_given_up_is_logged_with_what_to_do(engine, caplog):
    transaction = begun(engine, "orders", "orders")

    ask(engine)

    decide = f"to decide, run: outbox half list --given-up --group shop {leading_to(engine)}"
    said = f"check:shop: 1 more transaction was given up, the first is {transaction.id}: UNKNOWN; {decide}"
    assert said in caplog.messages


@ONE_DATABASE
def test_status_warns_of_transactions_that_were_given_up(engine):
    """Not of their half messages, of which only the first of each is a dead letter."""
    begun(engine, "orders", "orders")
    begun(engine)
    ask(engine)

    (found,) = [each for each in Outbox(engine).admin.diagnosis() if each.kind == "given_up"]

    assert (found.subscription, found.what) == ("check:shop", "2 transactions were given up")
    decide = f"to decide, run: outbox half list --given-up --group shop {leading_to(engine)}"
    assert str(found).endswith(f"): UNKNOWN; {decide}")


@ONE_DATABASE
def test_status_warns_no_more_once_a_person_has_decided(engine):
    """Also before a worker has cleared what it parked."""
    transaction = begun(engine, "orders", "orders")
    ask(engine)

    outbox(engine, "half", "rollback", transaction.id)

    look = Outbox(engine).admin.look()
    (check,) = [each for each in look.subscriptions if each.name == "check:shop"]
    assert (check.parked["dead"], check.troubles) == (0, ())
    assert [each for each in look.findings if each.kind == "given_up"] == []


@ONE_DATABASE
def test_a_count_that_was_cut_says_so(engine, monkeypatch):
    """What a person has decided may fill the part that is counted."""
    monkeypatch.setattr(parked_status, "MOST_COUNTED", 1)
    monkeypatch.setattr("outbox.model.status.MOST_COUNTED", 1)
    transactions = [begun(engine, "orders", "orders") for _ in range(2)]
    ask(engine)
    for transaction in transactions:
        outbox(engine, "half", "rollback", transaction.id)

    with closing(Outbox(engine).database.open()) as channel:
        (check,) = [each for each in Subscriptions(channel).all() if each.name == "check:shop"]
        found = parked_status.status_of_parked(channel, check).counts["dead"]

    assert (found.number, found.about) == (0, True)


# Showing


def test_one_is_shown_with_its_messages_as_they_will_be_delivered(engine):
    transaction = producer(engine).begin_transaction()
    transaction.send("orders", b"\xff", key="k", tags="t", delay=timedelta(minutes=3), headers={"X-Trace": "7"})
    transaction.send("mail", "text")

    shown = outbox(engine, "half", "show", transaction.id, "--json").json

    first, second = shown["contents"]
    assert {name: first[name] for name in ("topic", "key", "tags", "delay_seconds", "headers", "body_base64")} == {
        "topic": "orders", "key": "k", "tags": "t", "delay_seconds": 180.0, "body_base64": "/w==",
        "headers": {"X-Trace": "7", "__transactionId__": transaction.id},
    }  # fmt: skip
    assert (second["topic"], second["body"], shown["op"], shown["messages"]) == ("mail", "text", None, 2)


def test_one_with_a_verdict_is_shown_with_who_decided_and_when(engine):
    transaction = begun(engine)
    transaction.rollback()

    shown = outbox(engine, "half", "show", transaction.id, "--json").json
    told = outbox(engine, "half", "show", transaction.id).out

    assert (shown["op"], shown["decided_by"], shown["decided_at"] >= shown["created_at"]) == (
        "rollback", "producer shop", True,
    )  # fmt: skip
    assert "decided by   producer shop\n" in told


def test_one_whose_half_messages_were_purged_is_shown_by_its_verdict(engine):
    transaction = begun(engine)
    transaction.commit()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message"))

    shown = outbox(engine, "half", "show", transaction.id, "--json").json

    assert {**shown, "decided_at": None} == {
        "version": 1, "more": False,
        "transaction_id": transaction.id, "op": "commit", "decided_by": "producer shop", "decided_at": None,
        "contents": [],
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["show", "commit", "rollback", "resume"])
@ONE_DATABASE
def test_one_that_is_not_there_is_told(engine, verb):
    ended = outbox(engine, "half", verb, "nope")

    assert (ended.code, ended.err) == (
        2, "Error: there is no transaction nope; for the pending ones run: outbox half list\n",
    )  # fmt: skip


# Deciding


@pytest.mark.parametrize("given_up", [False, True])
def test_a_commit_by_hand_delivers(engine, given_up):
    transaction = begun(engine, "orders", "mail")
    if given_up:
        ask(engine)

    ended = outbox(engine, "half", "commit", transaction.id)

    assert (ended.code, ended.err) == (0, f"transaction {transaction.id}: committed; 2 messages to be delivered\n")
    assert (bodies(engine), tuple(op(engine, transaction))) == (
        [b"of orders", b"of mail"], ("commit", f"admin {me()}"),
    )  # fmt: skip


def test_a_rollback_by_hand_drops_and_names_who_decided(engine):
    transaction = begun(engine)

    ended = outbox(engine, "half", "rollback", transaction.id, "--by", "ann")

    assert (ended.code, ended.err) == (0, f"transaction {transaction.id}: rolled back; 1 message dropped\n")
    assert (bodies(engine), tuple(op(engine, transaction))) == ([], ("rollback", "admin ann"))


def test_the_same_verdict_again_changes_nothing(engine):
    transaction = begun(engine)
    transaction.commit()

    ended = outbox(engine, "half", "commit", transaction.id)

    assert (ended.code, ended.err.startswith(f"transaction {transaction.id} was committed by producer shop at ")) == (
        0, True,
    )  # fmt: skip
    assert (bodies(engine), op(engine, transaction).decided_by) == ([b"of orders"], "producer shop")


@ONE_DATABASE
def test_a_verdict_by_hand_is_told_to_programs(engine):
    committed, rolled_back = begun(engine, "orders", "mail"), begun(engine)
    rolled_back.rollback()

    new = outbox(engine, "half", "commit", committed.id, "--by", "ann", "--json")
    old = outbox(engine, "half", "rollback", rolled_back.id, "--json")
    against = outbox(engine, "half", "rollback", committed.id, "--json")

    shown = [{**each.json, "decided_at": None} for each in (new, old)]
    assert shown == [
        {"version": 1, "more": False, "decision": "commit", "transaction_id": committed.id, "messages": 2,
         "is_new": True, "decided_by": "admin ann", "decided_at": None},
        {"version": 1, "more": False, "decision": "rollback", "transaction_id": rolled_back.id, "messages": 1,
         "is_new": False, "decided_by": "producer shop", "decided_at": None},
    ]  # fmt: skip
    assert ([each.code for each in (new, old, against)], new.err, against.out) == ([0, 0, 1], "", "")


def test_the_opposite_verdict_is_refused_with_the_one_that_stands(engine):
    transaction = begun(engine)
    outbox(engine, "half", "rollback", transaction.id)

    ended = outbox(engine, "half", "commit", transaction.id)

    stands = f"transaction {transaction.id} was rolled back before by admin {me()}, and that stands"
    assert (ended.code, ended.err) == (1, f"Error: {stands}; this commit changes nothing\n")
    assert bodies(engine) == []


@pytest.mark.storm
@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_business_transaction_that_is_deciding_is_waited_for_briefly(engine, verb):
    """It has the op's key; on SQLite it has the whole database."""
    transaction = begun(engine, verdict="join")
    with Session(transaction._broker.database.engine) as session:
        transaction.join(session)

        meanwhile = outbox(engine, "half", verb, transaction.id)
        session.commit()

    assert (meanwhile.code, "a business transaction is deciding on transaction" in meanwhile.err) == (1, True)
    assert (bodies(engine), op(engine, transaction).op) == ([b"of orders"], "commit")


def test_a_business_transaction_that_comes_after_a_rollback_by_hand_is_refused(engine):
    transaction = begun(engine, verdict="join")
    outbox(engine, "half", "rollback", transaction.id)

    with pytest.raises(VerdictStandsError, match="was rolled back before"), Session(engine) as session:
        transaction.join(session)


def test_a_relay_elsewhere_is_woken_after_a_commit_by_hand(pg_engine):
    """Before the command ends: its own outbox has a thread for that, which would be too late."""
    transaction = begun(pg_engine)
    with closing(Outbox(pg_engine).database.open()) as relay:
        relay.listen()

        outbox(pg_engine, "half", "commit", transaction.id)

        assert eventually(relay.hinted)


def test_a_verdict_by_hand_on_what_was_given_up_clears_it(engine):
    transaction = begun(engine, "orders", "orders")
    ask(engine)

    outbox(engine, "half", "commit", transaction.id)
    ask(engine)

    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox_parked")).scalar_one() == 0


# Asking again


def test_one_that_is_resumed_is_asked_about_with_all_its_questions_before_it(engine):
    transaction = begun(engine, "orders", "orders")
    ask(engine)

    ended = outbox(engine, "half", "resume", transaction.id)
    (found,) = listed(engine)
    ask(engine, answer=lambda _message: TransactionResolution.COMMIT)

    assert (ended.code, "will be asked about again when somebody checks back on group shop" in ended.err) == (0, True)
    assert (found["given_up"], found["checks"]) == (False, 0)
    assert bodies(engine) == [b"of orders"] * 2


def test_one_that_is_resumed_and_not_known_again_is_given_up_again(engine):
    transaction = begun(engine)
    ask(engine)

    outbox(engine, "half", "resume", transaction.id)
    ask(engine)

    assert [(each["given_up"], each["checks"]) for each in listed(engine)] == [(True, 2)]


def test_a_worker_asks_again_itself(engine):
    """Its lease is live: the command leaves the decision to it."""
    transaction = begun(engine)
    ask(engine)
    with closing(Outbox(engine).database.open()) as channel:
        assert Leases(channel).acquire(Partition("check:shop"), "w0rker", timedelta(minutes=5))

    ended = outbox(engine, "half", "resume", transaction.id, "--by", "ann", "--reason", "mended")

    assert (ended.code, ended.err) == (0, f"transaction {transaction.id}: worker w0rker will ask about it again\n")
    assert [each[:4] for each in decisions(engine)] == [("ann", "replay", "check:shop", "mended")]


@pytest.mark.parametrize("worker", [None, "w0rker"])
@ONE_DATABASE
def test_who_asks_again_is_told_to_programs(engine, worker):
    transaction = begun(engine, "orders", "mail")
    ask(engine)
    if worker is not None:
        with closing(Outbox(engine).database.open()) as channel:
            Leases(channel).acquire(Partition("check:shop"), worker, timedelta(minutes=5))

    ended = outbox(engine, "half", "resume", transaction.id, "--json")

    assert (ended.code, ended.err, ended.json) == (0, "", {
        "version": 1, "more": False, "decision": "resume", "transaction_id": transaction.id, "group": "shop",
        "messages": 2, "carried_out": worker is None, "worker": worker,
    })  # fmt: skip


def test_a_running_check_service_asks_again(engine):
    transaction = begun(engine)
    ask(engine)
    broker = Broker(Outbox(engine), connections=1)
    policy = CheckPolicy(transaction_timeout=timedelta(0), check_interval=timedelta.resolution, check_max=2)
    service = Supervisor([CheckService.of(broker, "shop", policy, lambda _message: TransactionResolution.COMMIT)])
    service.start()
    try:
        assert eventually(lambda: outbox(engine, "status", "--json").json["subscriptions"][0]["live"])

        ended = outbox(engine, "half", "resume", transaction.id)

        assert ended.code == 0
        assert eventually(lambda: op(engine, transaction) is not None)
    finally:
        end(service)
        broker.close()
    assert bodies(engine) == [b"of orders"]


@ONE_DATABASE
def test_one_that_was_not_given_up_need_not_be_resumed(engine):
    pending, committed = begun(engine), begun(engine)
    committed.commit()

    ended = [outbox(engine, "half", "resume", each.id) for each in (pending, committed)]

    assert [each.code for each in ended] == [1, 1]
    assert "was not given up; its checks go on, the next one at " in ended[0].err
    assert "was committed by producer shop at " in ended[1].err


@ONE_DATABASE
def test_a_verdict_by_hand_and_a_check_at_the_same_time_are_one_verdict(engine):
    """Whoever comes second learns which one stands."""
    transactions = [begun(engine) for _ in range(8)]
    asking = threading.Thread(
        target=ask, args=(engine,), kwargs={"answer": lambda _message: TransactionResolution.ROLLBACK}
    )
    asking.start()

    ended = [outbox(engine, "half", "commit", each.id).code for each in transactions]
    asking.join()

    committed = [op(engine, each).op == "commit" for each in transactions]
    assert committed == [code == 0 for code in ended]
    assert len(bodies(engine)) == sum(committed)

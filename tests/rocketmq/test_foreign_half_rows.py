"""Half rows that no producer wrote, as a plain writer may insert them: every look at the outbox goes on."""

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.admin.gauges import Looks
from outbox.model.limits import HALF_TOPIC
from outbox.telemetry.metrics import HALF
from tests.rocketmq.halves import ask, begun
from tests.support.command_line import outbox


@pytest.fixture
def foreign(engine: Engine) -> None:
    """A half message of a producer, beside two that lack what a producer writes: one has a group and a key."""
    begun(engine)
    written = Outbox(engine)
    with written.begin() as session:
        written.send(session, "plain", b"by hand", key="tx-by-hand", tags="shop")
        written.send(session, "plain", b"of nobody")
        session.execute(text("UPDATE outbox_message SET topic = :half WHERE topic = 'plain'"), {"half": HALF_TOPIC})


@pytest.mark.usefixtures("foreign")
def test_status_and_metrics_show_them_without_a_topic(engine: Engine):
    look = Outbox(engine).admin.look()
    samples = list(Looks({"db": lambda: look}).samples())

    assert [(each.group, each.topic, each.half) for each in look.transactions] == [
        ("", "", 1), ("shop", "", 1), ("shop", "orders", 1),
    ]  # fmt: skip
    assert sorted((each.labels, each.value) for each in samples if each.metric is HALF) == [
        (("db", ""), 2), (("db", "orders"), 1),
    ]  # fmt: skip
    assert outbox(engine, "status").code == 0


@pytest.mark.usefixtures("foreign")
def test_one_that_was_given_up_is_shown_without_a_topic(engine: Engine):
    ask(engine)
    look = Outbox(engine).admin.look()

    assert [(each.group, each.topic, each.given_up) for each in look.transactions] == [
        ("", "", 0), ("shop", "", 1), ("shop", "orders", 1),
    ]  # fmt: skip


@pytest.mark.usefixtures("foreign")
def test_one_with_a_key_is_listed(engine: Engine):
    listed = outbox(engine, "half", "list", "--json").json["transactions"]
    shown = outbox(engine, "half", "list")

    assert [(each["real_topics"], each["verdict"]) for each in listed] == [(["orders"], "listener"), ([], "")]
    assert (shown.code, "tx-by-hand" in shown.out) == (0, True)


@pytest.mark.usefixtures("foreign")
def test_one_is_shown_as_it_is_stored(engine: Engine):
    shown = outbox(engine, "half", "show", "tx-by-hand", "--json").json

    assert [(each["topic"], each["body"]) for each in shown["contents"]] == [(HALF_TOPIC, "by hand")]
    assert "by hand" in outbox(engine, "half", "show", "tx-by-hand").out


@pytest.mark.usefixtures("foreign")
def test_one_can_be_rolled_back_and_holds_nothing_to_commit(engine: Engine):
    commit, rollback = (outbox(engine, "half", verdict, "tx-by-hand") for verdict in ("commit", "rollback"))

    why = "no message to deliver: no producer wrote its half rows; run: outbox half rollback tx-by-hand"
    assert (commit.code, commit.err) == (1, f"Error: transaction tx-by-hand has {why}\n")
    assert (rollback.code, rollback.err) == (0, "transaction tx-by-hand: rolled back; 1 message dropped\n")

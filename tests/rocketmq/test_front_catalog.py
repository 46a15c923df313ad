"""Topics, groups and clients that fronts share as rows: a front knows them soon, also those of later."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.errors import MQClientError
from outbox.rocketmq import CheckPolicy
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.front import ClientPolicy, Front
from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.declaring import Declarations
from outbox.rocketmq.front.protocol import RPCS, numbers
from outbox.rocketmq.front.questions import Questions
from outbox.rocketmq.front.registry import Registry
from outbox.rocketmq.front.settings import PRODUCER, answered
from outbox.store.fronts.groups import ConsumerGroup
from outbox.store.fronts.topics import TopicRows
from outbox.store.half_messages.pending import HalfTransactions
from tests.rocketmq.fronts import bodies, called, listening, producing
from tests.rocketmq.test_send_beside_verdict import Beside, stopped_inside
from tests.support.command_line import outbox as typed
from tests.support.guests import owner_and_guest
from tests.support.readers import waiting
from tests.support.waiting import eventually

SOON = CheckPolicy(transaction_timeout=timedelta(milliseconds=200), check_interval=timedelta(milliseconds=200))
PUSH = numbers("ClientType")["PUSH_CONSUMER"]


def request(name: str, topic: str, **fields: Any) -> Any:
    """A call about a topic, by group `billing` where the call has a group."""
    made = RPCS[name].request(**fields)
    place = made.message_queue.topic if hasattr(made, "message_queue") else made.topic
    place.name = topic
    if hasattr(made, "group"):
        made.group.name = "billing"
    return made


def received(front: Front, topic: str) -> Any:
    """The answers to a call of a consumer that does not wait."""
    fields: dict[str, Any] = {
        "batch_size": 1, "long_polling_timeout": {"seconds": 0}, "invisible_duration": {"seconds": 60},
    }  # fmt: skip
    return called(front, "ReceiveMessage", request("ReceiveMessage", topic, **fields))


@pytest.mark.every_database
def test_a_topic_that_is_added_while_a_front_serves_is_known_at_once_and_its_transactions_are_asked_about(
    outbox, official
):
    class Checker(official.TransactionChecker):  # type: ignore[name-defined, misc]
        def check(self, _message: Any) -> Any:
            return official.TransactionResolution.COMMIT

    message = official.Message()
    message.topic, message.body = "late", b"orphan"
    with listening(outbox, topics={}, policy=SOON) as front:
        before = called(front, "QueryRoute", request("QueryRoute", "late")).status.code
        added = typed(outbox.engine, "rocketmq", "topics", "add", "late", "--type", "TRANSACTION")
        with producing(official, front, "late", checker=Checker()) as producer:
            producer.send(message, producer.begin_transaction())

            assert eventually(lambda: bodies(outbox, "late") == [b"orphan"])

    assert (before, added.code) == (40402, 0)


@pytest.mark.every_database
def test_a_name_that_a_front_does_not_know_is_looked_up_by_itself(outbox, monkeypatch):
    """Another client may ask for one unknown name after the other, and there may be thousands of topics."""
    names = ["late", "missing", "a\0b", "x" * 10_000]
    with listening(outbox, topics={}) as front, closing(outbox.database.open()) as channel:
        TopicRows(channel).add("late", "FIFO")
        monkeypatch.delattr(TopicRows, "all")
        codes = [called(front, "QueryRoute", request("QueryRoute", each)).status.code for each in names]

    assert codes == [20000, 40402, 40002, 40002]


def test_a_group_has_the_order_and_the_retries_with_which_it_was_added_before_its_first_receive(outbox):
    with outbox.begin() as session:
        outbox.send(session, "steps", b"1", key="a")
    with listening(outbox) as front:
        called(front, "QueryAssignment", request("QueryAssignment", "steps"))
        typed(outbox.engine, "rocketmq", "groups", "add", "billing", "--fifo", "--retries", "0")
        found = received(front, "steps")[1].message
        change = request(
            "ChangeInvisibleDuration",
            "steps",
            receipt_handle=found.system_properties.receipt_handle,
            invisible_duration={"seconds": 0},
        )
        called(front, "ChangeInvisibleDuration", change)
        again = received(front, "steps")[0].status.code

    assert (found.body, again, [each.state for each in outbox.admin.parked()]) == (b"1", 40401, ["dead"])
    assert {each.name: each.ordered for each in outbox.admin.subscriptions()}["billing|steps"] is True


def test_a_group_whose_positions_are_dropped_begins_anew_at_a_front_that_has_received_for_it(outbox):
    """As at any other front, which has not."""
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    with listening(outbox) as front:
        bodies = [each.message.body for each in received(front, "orders") if each.HasField("message")]
        typed(outbox.engine, "subscriptions", "drop", "billing|orders", "--yes")
        refused = received(front, "orders")[0].status.message
        bodies += [each.message.body for each in received(front, "orders") if each.HasField("message")]

    assert (bodies, "'billing|orders' was dropped" in refused) == ([b"1", b"1"], True)


def test_the_settings_of_a_consumer_are_those_of_its_group():
    asked = RPCS["Telemetry"].request().settings
    asked.client_type = PUSH
    asked.subscription.group.name = "billing"

    found = [answered(asked), answered(asked, ConsumerGroup("billing", ordered=True, attempts=3))]

    assert [(each.subscription.fifo, each.backoff_policy.max_attempts) for each in found] == [(False, 17), (True, 3)]


def test_a_front_that_may_makes_the_topic_that_a_client_asks_for(outbox):
    with listening(outbox, topics={}, clients=ClientPolicy(create_topics=True)) as front:
        codes = [called(front, "QueryRoute", request("QueryRoute", each)).status.code for each in ("new", "a b")]

    listed = typed(outbox.engine, "rocketmq", "topics", "list", "--json")
    assert (codes, listed.json["topics"]) == ([20000, 40002], [{"name": "new", "type": "NORMAL"}])


def test_a_call_about_a_message_that_was_received_makes_no_topic(outbox):
    names = ["AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"]
    with listening(outbox, topics={}, clients=ClientPolicy(create_topics=True)) as front:
        asked = [request(each, "new") for each in names]
        asked[0].entries.add(receipt_handle="garbage")
        answers = [called(front, name, each) for name, each in zip(names, asked, strict=True)]

    listed = typed(outbox.engine, "rocketmq", "topics", "list", "--json")
    assert ["status is abnormal" in each.status.message for each in answers[1:]] == [True, True]
    assert (answers[0].entries[0].status.code, listed.json["topics"]) == (50001, [])


def test_a_missing_topic_is_refused_with_the_remedy_and_logged_once_a_minute(outbox, caplog):
    with listening(outbox) as front:
        texts = [called(front, "QueryRoute", request("QueryRoute", each)).status.message for each in ("new|1", "other")]

    assert [each.partition(" [")[2] for each in texts] == [
        "add it by: outbox rocketmq topics add 'new|1']", "add it by: outbox rocketmq topics add other]",
    ]  # fmt: skip
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "front: a client asks for topic 'new|1', which is not there; add it by: outbox rocketmq topics add NAME"
    ]


def test_a_group_that_was_not_added_is_refused_by_a_front_that_is_strict(outbox, caplog):
    with listening(outbox, clients=ClientPolicy(strict_groups=True)) as front:
        refused = received(front, "orders")[0]
        typed(outbox.engine, "rocketmq", "groups", "add", "billing")
        empty = received(front, "orders")[0]

    assert (refused.status.code, refused.status.message, empty.status.code) == (
        40403,
        "CODE: 26  DESC: subscription group [billing] does not exist [add it by: outbox rocketmq groups add billing]",
        40401,
    )
    assert "front: a client asks for group 'billing', which is not there; add it by: outbox" in caplog.text


def test_a_front_with_a_topic_of_another_type_than_is_there_names_the_fix(outbox):
    typed(outbox.engine, "rocketmq", "topics", "add", "orders", "--type", "FIFO")

    with pytest.raises(
        MQClientError, match=r"topic orders is of type FIFO, not NORMAL; .* rocketmq topics drop .*orders"
    ):
        Front(outbox, topics={"orders": "NORMAL"}, listen="127.0.0.1:0").run(signals=False)


class Stream:
    """A stream that takes each command."""

    def write(self, _command: object) -> bool:
        """Do as a stream to a client."""
        return True


def test_a_front_knows_a_client_that_has_sent_its_settings_to_another_front(outbox):
    """A client whose connection broke may open a stream minutes before it sends settings on it."""
    now, calls = [0.0], list[object]()
    topics = {"paid": "TRANSACTION"}
    first, second = (Clients(clock=lambda: now[0]) for _ in range(2))
    first.opened("producer", Stream())
    first.declared("producer", PRODUCER, frozenset({"paid"}))
    first.declared("consumer", PUSH, frozenset({"paid"}))
    second.opened("producer", Stream())
    second.opened("stranger", Stream())
    threads = Threads()

    class Counting(Connections):
        def call(self, do: Any) -> Any:
            calls.append(do)
            return super().call(do)

    connections = Counting(outbox.database.open, 1)

    async def exchange() -> None:
        for clients in (first, second):
            registry = Registry(clients, topics, connections, threads, clock=lambda: now[0])
            for _ in range(2):
                await registry.exchange()

    known = [Questions(second).ask("paid", None, turn=0), second.beat("consumer")]
    now[0] = 2.0
    asyncio.run(exchange())
    known += [Questions(second).ask("paid", None, turn=0), second.beat("consumer"), second.alive("consumer")]
    threads.close()
    connections.close()

    assert (known, len(calls)) == ([False, False, True, True, True], 2)
    assert (first.due(), second.due(), second.unknown()) == ([], [], [])


def test_a_topic_with_an_open_transaction_stays(outbox):
    with closing(outbox.database.open()) as channel:
        declarations = Declarations(channel)
        declarations.add_topic("paid", "TRANSACTION")
        begin(outbox, "paid")
        assert HalfTransactions(channel).pending(group="paid", limit=1)

        with pytest.raises(MQClientError, match=r"topic paid has open transactions, .* half list --group paid"):
            declarations.drop_topic("paid")

        assert declarations.topics() == {"paid": "TRANSACTION"}


@pytest.mark.every_database
def test_a_half_message_for_a_topic_that_was_just_dropped_is_refused_and_leaves_no_open_transaction(outbox):
    """The front knows of the drop seconds later."""
    with listening(outbox) as front:
        for topic in ("paid", "orders"):
            assert typed(outbox.engine, "rocketmq", "topics", "drop", topic).code == 0
        half = called(front, "SendMessage", sent("paid", "TRANSACTION")).status
        ordinary = called(front, "SendMessage", sent("orders", "NORMAL")).status.code
        with closing(outbox.database.open()) as channel:
            open = HalfTransactions(channel).pending(limit=1)

    types = "the expected type is UNSPECIFIED, but actual type is TRANSACTION"
    remedy = "the topic is not there; add it by: outbox rocketmq topics add paid --type TRANSACTION"
    refused = f"TopicMessageType validate failed, {types} [{remedy}]"
    assert (half.code, half.message.partition(": ")[2], open) == (40014, refused, [])
    assert (ordinary, bodies(outbox, "orders"), bodies(outbox, "paid")) == (20000, [b"1"], [])


def test_a_topic_stays_if_a_half_message_is_stored_that_was_begun_before_the_drop(pg_engine):
    outbox = Outbox(pg_engine)
    with closing(outbox.database.open()) as channel:
        declarations = Declarations(channel)
        declarations.add_topic("paid", "TRANSACTION")
        with stopped_inside(pg_engine, "="):
            half = Beside(lambda: begin(outbox, "paid"))
            assert eventually(lambda: waiting(pg_engine) == 1)
            drop = Beside(lambda: declarations.drop_topic("paid"))
            assert eventually(lambda: waiting(pg_engine) == 2)

        assert (half.end(), "topic paid has open transactions" in str(drop.end())) == (None, True)
        assert declarations.topics() == {"paid": "TRANSACTION"}


def test_a_half_message_that_comes_during_a_drop_waits_and_is_refused(pg_engine, monkeypatch):
    outbox, halves, drop = Outbox(pg_engine), list[Beside](), TopicRows.drop

    def beside_a_half(rows: TopicRows, name: str) -> bool:
        halves.append(Beside(lambda: called(front, "SendMessage", sent(name, "TRANSACTION")).status.code))
        assert eventually(lambda: waiting(pg_engine) == 1)
        return drop(rows, name)

    monkeypatch.setattr(TopicRows, "drop", beside_a_half)
    with listening(outbox) as front, closing(outbox.database.open()) as channel:
        Declarations(channel).drop_topic("paid")
        code = halves[0].end()

        assert (code, HalfTransactions(channel).pending(limit=1)) == (40014, [])


def test_a_client_is_not_told_where_the_database_is_and_the_log_is(outbox, caplog):
    """Here of a front whose transaction timeout is longer than the stored one."""
    begin(outbox, "paid")
    later = CheckPolicy(transaction_timeout=timedelta(hours=1))
    with listening(outbox, policy=later) as front:
        refused = called(front, "SendMessage", sent("paid", "TRANSACTION", mid="02" * 17)).status

    assert (refused.code, " subscriptions alter " in refused.message) == (50001, True)
    assert ("--database" in refused.message, "--database" in caplog.text) == (False, True)


def begin(outbox: Any, topic: str) -> None:
    """Store a half message of a topic, as a front does."""
    with listening(outbox, topics={topic: "TRANSACTION"}) as front:
        assert called(front, "SendMessage", sent(topic, "TRANSACTION")).status.code == 20000


def sent(topic: str, type_: str, mid: str = "01" * 17) -> Any:
    """A request that sends a message of a type."""
    made = RPCS["SendMessage"].request()
    message = made.messages.add(body=b"1")
    message.topic.name = topic
    message.system_properties.message_id = mid
    message.system_properties.message_type = numbers("MessageType")[type_]
    return made


@pytest.fixture
def roles(pg_engine: Engine) -> Iterator[tuple[Engine, Engine]]:
    """The owner's engine, and one of a role without any right."""
    with owner_and_guest(pg_engine) as found:
        yield found


def test_a_front_needs_the_rights_that_the_command_prints_and_no_others(roles, official):
    owner, guest = roles
    role = str(guest.url.username)
    with owner.begin() as connection:
        connection.exec_driver_sql(typed(None, "db", "grants", "--front", role).out)
    lacking = typed(owner, "doctor", "--front", role)
    outbox = Outbox(guest)

    class Checker(official.TransactionChecker):  # type: ignore[name-defined, misc]
        def check(self, _message: Any) -> Any:
            return official.TransactionResolution.COMMIT

    message = official.Message()
    message.topic, message.body = "paid", b"orphan"
    with (
        listening(outbox, policy=SOON, fifo_groups=["billing"]) as front,
        producing(official, front, "paid", checker=Checker()) as producer,
    ):
        producer.send(message, producer.begin_transaction())
        assert eventually(lambda: bodies(Outbox(owner), "paid") == [b"orphan"])
        found = received(front, "paid")[1].message
        handle = found.system_properties.receipt_handle
        ack = request("AckMessage", "paid", entries=[{"message_id": "1", "receipt_handle": handle}])
        done = called(front, "AckMessage", ack).status.code
        assert eventually(lambda: clients_of(owner) == ["PRODUCER"])

    outbox.close()
    assert (lacking.code, found.body, done) == (0, b"orphan", 20000), lacking.out + lacking.err


def clients_of(engine: Engine) -> list[str]:
    """The kinds of the clients in their rows."""
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT kind FROM outbox_client")))

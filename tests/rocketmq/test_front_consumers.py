"""Consumers of RocketMQ's official Python client, and bare calls, at a front."""

import base64
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from outbox import Message, Outbox
from outbox.rocketmq import dead_letters
from outbox.rocketmq.front.protocol import RPCS, numbers
from outbox.runtime import failpoints
from tests.rocketmq.fronts import called, consuming, listening
from tests.support.leases import step_clock
from tests.support.parked import states
from tests.support.waiting import eventually

MINUTE = 60


def send(outbox: Outbox, *messages: Message) -> None:
    """Commit messages."""
    with outbox.begin() as session:
        outbox.send_all(session, list(messages))


def request(name: str, topic: str = "orders", group: str = "billing", **fields: Any) -> Any:
    """A request of a consumer; the time of messages is a minute."""
    made = RPCS[name].request(**fields)
    made.group.name = group
    (made.message_queue.topic if name == "ReceiveMessage" else made.topic).name = topic
    if name == "ReceiveMessage" and not made.HasField("invisible_duration"):
        made.invisible_duration.seconds = MINUTE
    return made


def bodies(messages: Sequence[Any]) -> list[bytes]:
    """The bodies of messages of a client."""
    return sorted(each.body for each in messages)


def of(answer: Any) -> tuple[int, str]:
    """The code and the text of an answer, or of the first of several."""
    found = answer[0].status if isinstance(answer, list) else answer.status
    return found.code, found.message


# The official client


@pytest.mark.every_database
def test_a_message_is_received_as_it_was_sent_and_is_done_when_it_is_acknowledged(engine, outbox, official):
    send(outbox, Message("orders", "1", key="group-7", tags="paid", headers={"KEYS": "a b", "amount": "5"}))
    with listening(outbox) as front, consuming(official, front, {"orders": official.FilterExpression()}) as consumer:
        (message,) = consumer.receive(32, MINUTE)
        before = states(engine)
        consumer.ack(message)
        consumer.ack(message)

        assert consumer.receive(32, MINUTE) == []
    assert (message.body, message.tag, message.keys, message.message_group, message.delivery_attempt) == (
        b"1", "paid", {"a", "b"}, "group-7", 1,
    )  # fmt: skip
    assert message.properties == {"amount": "5", "__SHARDINGKEY": "group-7"}
    assert (len(message.message_id), message.corrupted) == (34, False)
    assert (before, states(engine)) == ({"retry": 1}, {})


def test_a_message_that_is_given_back_comes_again_and_the_old_handle_is_worth_nothing(engine, outbox, official):
    send(outbox, Message("orders", "1"))
    with listening(outbox) as front, consuming(official, front, {"orders": official.FilterExpression()}) as consumer:
        (first,) = consumer.receive(1, MINUTE)
        consumer.change_invisible_duration(first, 0)
        (second,) = consumer.receive(1, MINUTE)
        with pytest.raises(Exception, match="40013"):
            consumer.ack(first)
        consumer.ack(second)

    assert (second.delivery_attempt, states(engine)) == (2, {})


@pytest.mark.parametrize(("kind", "expression", "found"), [
    ("TAG", "a || c", [b"1", b"3"]), ("TAG", " ", []), ("SQL", "n > 1 AND TAGS <> 'c'", [b"2"]),
])  # fmt: skip
def test_a_consumer_gets_what_its_expression_chooses(outbox, official, kind, expression, found):
    send(outbox, *(Message("orders", str(n), tags=tag, headers={"n": str(n)}) for n, tag in enumerate("abc", 1)))
    chosen = official.FilterExpression(expression, numbers("FilterType")[kind])
    with listening(outbox) as front, consuming(official, front, {"orders": chosen}) as consumer:
        assert bodies(consumer.receive(32, MINUTE)) == found


class Listener:
    """What a push consumer calls; messages fail the first time, where a test says so."""

    def __init__(self, client: Any, fails: bytes = b"") -> None:
        self.got = list[tuple[bytes, int]]()
        self._client, self._fails = client, fails

    def consume(self, message: Any) -> Any:
        """Note a message."""
        self.got.append((message.body, message.delivery_attempt))
        fails = message.body == self._fails and message.delivery_attempt == 1
        return self._client.ConsumeResult.FAILURE if fails else self._client.ConsumeResult.SUCCESS


def pushed(client: Any, outbox: Outbox, listener: Any, number: int, **options: Any) -> None:
    """Run a push consumer until it has got so many messages, and all of them are done."""
    kind = type("Made", (client.MessageListener,), {"consume": lambda _self, message: listener.consume(message)})
    with listening(outbox, **options) as front:
        configuration = client.ClientConfiguration(str(front.listening), client.Credentials())
        consumer = client.PushConsumer(configuration, "billing", kind(), {"steps": client.FilterExpression()})
        consumer.startup()
        try:
            assert eventually(lambda: len(listener.got) >= number and not outbox.admin.parked(name="billing|steps"))
        finally:
            consumer.shutdown()


@pytest.mark.storm
def test_a_push_consumer_gets_messages_and_a_failed_one_again(outbox, official):
    send(outbox, *(Message("steps", str(n)) for n in range(5)))
    listener = Listener(official, fails=b"3")

    pushed(official, outbox, listener, 6)

    assert sorted(listener.got) == [(b"0", 1), (b"1", 1), (b"2", 1), (b"3", 1), (b"3", 2), (b"4", 1)]


def test_a_push_consumer_in_order_gets_the_messages_of_a_group_one_after_the_other(outbox, official):
    send(outbox, *(Message("steps", f"{key}{n}", key=key) for n in range(10) for key in "ab"))
    listener = Listener(official)

    pushed(official, outbox, listener, 20, fifo_groups=["billing"])

    assert [[body for body, _ in listener.got if body[:1] == key] for key in (b"a", b"b")] == [
        [b"%s%d" % (key, n) for n in range(10)] for key in (b"a", b"b")
    ]


# Bare calls


def test_what_rocketmq_would_refuse_is_refused_with_its_codes_and_texts(outbox):
    def received(**fields: Any) -> Any:
        return request("ReceiveMessage", **{"batch_size": 1, **fields})

    def filtered(kind: int, expression: str) -> Any:
        return received(filter_expression={"type": kind, "expression": expression})

    small, large = "the invisibleTime is too small. min is 10000", "the invisibleTime is too large. max is 43200000"
    proxy = "org.apache.rocketmq.proxy.common.ProxyException: "
    probes = [
        (received(topic=" "), 40002, "The specified topic is blank"),
        (received(topic="nowhere"), 40402, "CODE: 17  DESC: No topic route info in name server for the topic: nowhere"),
        (received(group=""), 40003, "the specified group is blank"),
        (
            received(group="a b"),
            40003,
            "the specified group[a b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        ),
        (received(invisible_duration={"seconds": 5}), 40011, small),
        (received(invisible_duration={}), 40011, small),
        (received(invisible_duration={"seconds": 46800}), 40011, large),
        (received(invisible_duration={"seconds": 2**62}), 40011, large),
        (received(batch_size=0), 40401, "no new message"),
        (received(batch_size=-1), 50001, "Illegal Capacity: -1"),
        (filtered(1, "||"), 40010, "subString split error"),
        (filtered(1, "t||" * 3000), 40010, "subString split error [a tag expression has at most 8192 characters"),
        (filtered(2, ""), 40010, "Expression can't be null! SQL92"),
        (filtered(2, "a ="), 50001, f"{proxy}parse the consumer's subscription failed"),
    ]
    with listening(outbox) as front:
        found = [(of(called(front, "ReceiveMessage", each)), code, text) for each, code, text in probes]

    assert [code for (code, _), *_ in found] == [code for _, code, _ in found]
    assert [(said[: len(text)], text) for (_, said), _, text in found] == [(text, text) for *_, text in probes]


def test_each_entry_of_an_acknowledgement_has_a_status(engine, outbox):
    send(outbox, *(Message("orders", str(n)) for n in range(3)))
    with listening(outbox) as front:
        answers = called(front, "ReceiveMessage", request("ReceiveMessage", batch_size=3))
        good, late, left = (each.message.system_properties.receipt_handle for each in answers[1:-1])
        step_clock(engine, timedelta(hours=2), "outbox_parked.due_at")
        called(front, "ReceiveMessage", request("ReceiveMessage", batch_size=1))

        def ack(*handles: str, group: str = "billing") -> Any:
            entries = [{"message_id": "m", "receipt_handle": each} for each in handles]
            answer = called(front, "AckMessage", request("AckMessage", group=group, entries=entries))
            return of(answer), [each.status.code for each in answer.entries]

        found = [ack(good), ack(late, "garbage"), ack(left, group="others")]

    assert answers[0].status.code == 20000
    assert answers[-1].HasField("delivery_timestamp")
    assert found == [
        ((40013, "INVALID_RECEIPT_HANDLE"), [40013]),
        ((30000, "MULTIPLE_RESULTS"), [40013, 50001]),
        ((20000, "OK"), [20000]),
    ]


def test_the_handle_stays_when_the_time_of_a_message_is_changed(outbox):
    send(outbox, Message("orders", "1"))
    with listening(outbox) as front:
        (_, first, _) = called(front, "ReceiveMessage", request("ReceiveMessage", batch_size=1))
        handle = first.message.system_properties.receipt_handle

        def change(seconds: int) -> Any:
            asked = request("ChangeInvisibleDuration", receipt_handle=handle, invisible_duration={"seconds": seconds})
            return called(front, "ChangeInvisibleDuration", asked)

        answers = [change(20), change(13 * 3600), change(0), change(20)]

    assert [each.status.code for each in answers] == [20000, 40011, 20000, 40013]
    assert [each.receipt_handle == handle for each in answers] == [True, False, True, False]
    assert answers[3].status.message.endswith("receipt handle is expired")


def test_a_message_that_is_forwarded_is_a_dead_letter_which_holds_nothing(engine, outbox):
    send(outbox, *(Message("steps", str(n), key="a") for n in range(2)))
    with listening(outbox, fifo_groups=["billing"]) as front:

        def receive() -> list[Any]:
            found = called(front, "ReceiveMessage", request("ReceiveMessage", "steps", batch_size=1))
            return [each.message for each in found if each.HasField("message")]

        (first,) = receive()
        asked = request(
            "ForwardMessageToDeadLetterQueue",
            "steps",
            receipt_handle=first.system_properties.receipt_handle,
            delivery_attempt=17,
        )
        answers = [of(called(front, "ForwardMessageToDeadLetterQueue", asked)) for _ in range(2)]
        (second,) = receive()

    assert answers == [(20000, "OK")] * 2
    assert (second.body, [each.body for each in dead_letters(outbox, "%DLQ%billing")]) == (b"1", [b"0"])


@pytest.mark.parametrize(("groups", "id"), [([], -1), (["billing"], 0)])
def test_a_push_consumer_is_assigned_one_queue(outbox, groups, id):
    with listening(outbox, fifo_groups=groups) as front:
        answer = called(front, "QueryAssignment", request("QueryAssignment"))

    (only,) = answer.assignments
    assert (only.message_queue.id, only.message_queue.permission, answer.status.code) == (id, 4, 20000)


# Calls that wait


def test_a_call_that_waits_gets_what_comes_and_one_that_waits_at_a_stop_gets_nothing(outbox):
    waits: dict[str, Any] = {"long_polling_timeout": {"seconds": MINUTE}, "batch_size": 1}
    found, looks = list[Any](), list[str]()
    with listening(outbox) as front:

        def receive() -> None:
            found.append(called(front, "ReceiveMessage", request("ReceiveMessage", **waits), seconds=300))

        def waiting() -> bool:
            return any(each.name == "billing|orders" for each in outbox.admin.subscriptions())

        first = threading.Thread(target=receive)
        first.start()
        assert eventually(waiting)
        send(outbox, Message("orders", "1"))
        first.join()
        second = threading.Thread(target=receive)
        failpoints.arm(lambda point: looks.append(point) if point == "pop.after_commit" else None)
        second.start()
        assert eventually(lambda: len(looks) > 1)
        failpoints.arm(None)
    second.join()

    assert [[of(each)[0], len(each)] for each in found] == [[20000, 3], [40401, 2]]
    assert [each[-1].HasField("delivery_timestamp") for each in found] == [True, True]


def test_a_handle_with_a_time_that_no_clock_has_is_refused_by_itself(outbox):
    handle = base64.urlsafe_b64encode(json.dumps([1, "r", 10**400, "o"]).encode()).decode()
    with listening(outbox) as front:
        answer = called(front, "AckMessage", request("AckMessage", entries=[{"receipt_handle": handle}]))

    assert [each.status.code for each in answer.entries] == [50001]

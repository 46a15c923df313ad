"""What becomes of messages that a front has handed out: calls that end, repeat, acknowledge, or meet a stop."""

import asyncio
import base64
import json
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.declaring import Declarations
from outbox.rocketmq.front.polls import Popped
from outbox.rocketmq.front.protocol import RPCS, SERVICE
from outbox.rocketmq.front.receiving import Receiving
from outbox.rocketmq.front.routing import Place, Routes
from outbox.runtime import failpoints
from outbox.store.log.log import Limits
from outbox.store.subscriptions.receipts import Receipt, Receipts
from tests.rocketmq.fronts import TOPICS, called, listening
from tests.support.leases import step_clock
from tests.support.parked import attempts, states
from tests.support.waiting import eventually

AT_ONCE = {"long_polling_timeout": {"seconds": 0}}
MIB = 1024 * 1024


def send(outbox: Outbox, *messages: bytes | Message) -> None:
    """Commit messages; a body alone is of the topic orders."""
    with outbox.begin() as session:
        outbox.send_all(session, [each if isinstance(each, Message) else Message("orders", each) for each in messages])


def add_group(outbox: Outbox, *, ordered: bool = False, retries: int) -> None:
    """Add the group of the tests."""
    with closing(outbox.database.open()) as channel:
        Declarations(channel).add_group("billing", ordered=ordered, retries=retries)


def spoil(engine: Engine, body: bytes) -> None:
    """Give a message of the log what no front can read."""
    spoilt = {"postgresql": "created_at = 'infinity'", "sqlite": "message_id = 'none'"}[engine.dialect.name]
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_message SET {spoilt} WHERE body = :body"), {"body": body})


def request(name: str, topic: str = "orders", group: str = "billing", **fields: Any) -> Any:
    """A request of a consumer; a receive asks for three messages, each for a minute."""
    receive = {"batch_size": 3, "invisible_duration": {"seconds": 60}} if name == "ReceiveMessage" else {}
    made = RPCS[name].request(**(receive | fields))
    made.group.name = group
    (made.message_queue.topic if name == "ReceiveMessage" else made.topic).name = topic
    return made


def receive(front: Front, **fields: Any) -> list[Any]:
    """The messages of a receive that does not wait, unless the fields say so."""
    answers = called(front, "ReceiveMessage", request("ReceiveMessage", **(AT_ONCE | fields)))
    return [each.message for each in answers if each.HasField("message")]


def received(front: Front) -> list[Any]:
    """The messages of the first receive that gets any."""
    found = list[Any]()

    def ask() -> bool:
        found.extend(receive(front))
        return bool(found)

    assert eventually(ask)
    return found


def seen(messages: Sequence[Any]) -> list[tuple[bytes, int]]:
    """The first bytes of messages, and which delivery each is."""
    return [(each.body[:1], each.system_properties.delivery_attempt) for each in messages]


def handles(messages: Sequence[Any]) -> list[str]:
    """The receipt handles of messages."""
    return [each.system_properties.receipt_handle for each in messages]


def acked(front: Front, *handles: str, **fields: Any) -> Any:
    """The answer to an acknowledgement: code and text, and those of the entries."""
    entries = [{"message_id": "m", "receipt_handle": each} for each in handles]
    answer = called(front, "AckMessage", request("AckMessage", entries=entries, **fields))
    of_entries = [(each.status.code, each.status.message.split(" [")[0]) for each in answer.entries]
    return (answer.status.code, answer.status.message), of_entries


# Calls that end before their answer


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_messages_of_a_push_consumer_that_gave_its_call_up_come_to_the_next_call_at_once_and_uncounted(
    engine, outbox, monkeypatch
):
    """The client takes less than it gets, so the call is not over."""
    monkeypatch.setattr("outbox.rocketmq.partition_pops._LIMITS", Limits(rows=128, bytes=8 * MIB))
    monkeypatch.setattr("outbox.store.subscriptions.pops.MOST_BYTES", 8 * MIB)
    send(outbox, *(b"%d" % n * 2 * MIB for n in range(3)))
    rpc = RPCS["ReceiveMessage"]
    with listening(outbox) as front, grpc.insecure_channel(str(front.listening)) as channel:
        make = channel.unary_stream(f"/{SERVICE}/{rpc.name}", rpc.request.SerializeToString, rpc.response.FromString)
        call = make(request(rpc.name, auto_renew=True), metadata=(("x-mq-client-id", "raw"),))
        first = next(call)
        before = attempts(engine)
        call.cancel()

        found = received(front)

    assert (first.status.code, before, seen(found)) == (20000, 3, [(b"0", 1), (b"1", 1), (b"2", 1)])


# Messages that cannot be read


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_a_message_that_cannot_be_read_counts_as_delivered_and_ends_as_a_dead_letter(engine, outbox, caplog):
    """Other writers may have given it a moment or an id that is none; what is behind is handed out."""
    add_group(outbox, retries=1)
    send(outbox, b"0", b"1")
    spoil(engine, b"0")
    with listening(outbox) as front:
        first = receive(front)
        acked(front, *handles(first))
        counts = [attempts(engine)]
        for _ in range(2):
            step_clock(engine, timedelta(hours=2), "outbox_parked.due_at")
            assert receive(front) == []
            counts.append(attempts(engine))

    assert (seen(first), counts, states(engine)) == ([(b"1", 1)], [1, 2, 2], {"dead": 1})
    assert {each.message.partition(", ")[0] for each in caplog.records if each.message.startswith("front")} == {
        "front: message 1 of topic orders cannot be read and counts as delivered"
    }


def test_what_is_behind_a_message_that_cannot_be_read_waits_for_its_end_if_both_are_of_one_key(engine, outbox):
    add_group(outbox, ordered=True, retries=0)
    send(outbox, *(Message("steps", each, key="k") for each in (b"0", b"1", b"2")), Message("steps", b"3", key="l"))
    spoil(engine, b"1")
    found = list[Any]()
    with listening(outbox) as front:
        for _ in range(3):
            messages = receive(front, topic="steps", batch_size=4)
            acked(front, *handles(messages), topic="steps")
            found.append(seen(messages))
            step_clock(engine, timedelta(hours=2), "outbox_parked.due_at")

    assert (found, states(engine)) == ([[(b"0", 1), (b"3", 1)], [(b"2", 1)], []], {"dead": 1})


# Calls that are repeated


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_a_receive_that_is_repeated_gets_the_same_messages_but_for_those_that_are_done(engine, outbox):
    send(outbox, *(b"%d" % n for n in range(7)))
    with listening(outbox) as front:
        first = receive(front, attempt_id="a")
        acked(front, handles(first)[0])
        same = receive(front, attempt_id="a")
        others = [receive(front, attempt_id=id, **of) for id, of in (("b", {}), ("a", {"group": "others"}))]
        acked(front, *handles(same))
        after = receive(front, attempt_id="a")

    assert [seen(each) for each in (first, same, *others, after)] == [
        [(b"0", 1), (b"1", 1), (b"2", 1)],
        [(b"1", 1), (b"2", 1)],
        [(b"3", 1), (b"4", 1), (b"5", 1)],
        [(b"0", 1), (b"1", 1), (b"2", 1)],
        [(b"6", 1)],
    ]


def test_a_receive_that_still_waits_leaves_what_comes_to_its_repetition_at_once(outbox, monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.polls.POLL_SECONDS", (300.0, 300.0))
    waits: dict[str, Any] = {"long_polling_timeout": {"seconds": 60}, "attempt_id": "a"}
    found, looks, hints = {}, list[str](), list[None]()
    heard = outbox.notifier.listen(lambda: hints.append(None))
    with listening(outbox) as front:

        def ask(name: str) -> threading.Thread:
            before = len(looks)
            thread = threading.Thread(target=lambda: found.update({name: seen(receive(front, **waits))}))
            thread.start()
            assert eventually(lambda: len(looks) > before)
            return thread

        failpoints.arm(lambda point: looks.append(point) if point == "pop.after_commit" else None)
        threads = [ask("first"), ask("second")]
        failpoints.arm(None)
        send(outbox, b"1")
        for each in threads:
            each.join()

    del heard
    # One is for the commit of the message.
    assert (found, len(hints)) == ({"first": [], "second": [(b"1", 1)]}, 2)


# Acknowledgements


def test_all_entries_of_an_acknowledgement_are_one_statement(outbox, monkeypatch):
    send(outbox, b"0", b"1", b"2")
    statements, real = list[int](), Receipts.ack

    def ack(of: Receipts, some: Collection[Receipt]) -> set[int]:
        statements.append(len(some))
        return real(of, some)

    monkeypatch.setattr(Receipts, "ack", ack)
    with listening(outbox) as front:
        answer = acked(front, *handles(receive(front)))

    assert (answer, statements) == (((20000, "OK"), [(20000, "OK")] * 3), [3])


def test_calls_about_strange_messages_are_answered_as_by_rocketmq_and_create_nothing(engine, outbox, monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.receiving.MOST_ENTRIES", 3)
    send(outbox, b"0")
    abnormal = "failed: status is abnormal [there is no topic nowhere]"
    with listening(outbox) as front:
        (handle,) = handles(receive(front))
        answers = {
            "none": acked(front),
            "most": acked(front, *["garbage"] * 3),
            "too many": acked(front, *[handle] * 4),
            "topic": acked(front, handle, "garbage", topic="nowhere"),
            "group": acked(front, handle, group="strangers"),
        }
        for name in ("ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"):
            for fields in ({"topic": "nowhere"}, {"group": "strangers"}):
                answer = called(front, name, request(name, receipt_handle=handle, **fields))
                answers[f"{name} {fields}"] = (answer.status.code, answer.status.message)

    assert answers == {
        "none": ((50001, "ack message result is empty"), []),
        "most": ((50001, "INTERNAL_SERVER_ERROR"), [(50001, "Parse failed, dataList size 1.")] * 3),
        "too many": ((40000, "too many entries, max is 3"), []),
        "topic": (
            (50001, "INTERNAL_SERVER_ERROR"),
            [(50001, "ack failed: status is abnormal"), (50001, "Parse failed, dataList size 1.")],
        ),
        "group": ((20000, "OK"), [(20000, "OK")]),
        "ChangeInvisibleDuration {'topic': 'nowhere'}": (50001, f"changeInvisibleDuration {abnormal}"),
        "ChangeInvisibleDuration {'group': 'strangers'}": (
            40013,
            "org.apache.rocketmq.proxy.common.ProxyException: receipt handle is expired",
        ),
        "ForwardMessageToDeadLetterQueue {'topic': 'nowhere'}": (
            50001,
            f"forwardMessageToDeadLetterQueue {abnormal}",
        ),
        "ForwardMessageToDeadLetterQueue {'group': 'strangers'}": (
            40013,
            "org.apache.rocketmq.proxy.common.ProxyException: receipt handle is expired",
        ),
    }
    groups = [each.name for each in outbox.admin.subscriptions() if "|" in each.name]
    assert (states(engine), groups) == ({"retry": 1}, ["billing|orders"])


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_a_message_is_neither_done_nor_given_back_in_the_name_of_another_group_or_topic(engine, outbox):
    send(outbox, b"0")
    expired = "org.apache.rocketmq.proxy.common.ProxyException: receipt handle is expired"
    with listening(outbox) as front:
        (handle,) = handles(receive(front))
        acked(front, *handles(receive(front, group="others")), group="others")
        receive(front, topic="steps")
        answers = list[Any]()
        for fields in ({"group": "others"}, {"topic": "steps"}):
            answers.append(acked(front, handle, **fields))
            for name in ("ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"):
                answer = called(front, name, request(name, receipt_handle=handle, **fields))
                answers.append((answer.status.code, answer.status.message))
        done = acked(front, handle)

    refused = ((40013, "INVALID_RECEIPT_HANDLE"), [(40013, expired)])
    assert answers == [refused, (40013, expired), (40013, expired)] * 2
    assert (done, states(engine)) == (((20000, "OK"), [(20000, "OK")]), {})


def test_a_handle_of_a_later_front_is_good_which_may_have_more_fields(engine, outbox):
    send(outbox, b"0")
    with listening(outbox) as front:
        (fields,) = [json.loads(base64.urlsafe_b64decode(each)) for each in handles(receive(front))]
        answer = acked(front, base64.urlsafe_b64encode(json.dumps([*fields, "more"]).encode()).decode())

    assert (answer, states(engine)) == (((20000, "OK"), [(20000, "OK")]), {})


class Made:
    """Subscriptions without messages. `made`: each group of one that was made, and each group with a tag to pop by."""

    def __init__(self) -> None:
        self.made, self._threads = list[str](), Threads(2)
        routes = Routes(TOPICS, lambda _tls: Place("127.0.0.1", 1))
        hints: Any = SimpleNamespace(wake=lambda _wake: nullcontext())
        self.receiving = Receiving(self._subscription_of, hints, routes, self._threads, self._alive, ())

    def _subscription_of(self, group: str, _topic: str) -> Any:
        def pops(choice: Any) -> Any:
            self.made.append(f"{group} {choice.tags[0]}")
            return lambda asked: Popped("r", [[] for _ in asked])

        self.made.append(group)
        return SimpleNamespace(ack=lambda _receipts: [], pops=pops, give_back=None)

    async def _alive(self, _clients: Collection[str]) -> Collection[str]:
        return ()

    async def receive(self, group: str, tag: str, *, seconds: int = 0) -> None:
        """Receive nothing, after so many seconds."""

        async def send(_answer: Any) -> None:
            pass

        wait: dict[str, Any] = {"long_polling_timeout": {"seconds": seconds}, "filter_expression": {"expression": tag}}
        await self.receiving.receive(Call("raw", {}), request("ReceiveMessage", group=group, **wait), send)
        for _ in range(9):  # the task that has answered ends
            await asyncio.sleep(0)

    async def waiting(self, group: str, tag: str) -> asyncio.Task[None]:
        """Begin a call that waits for a message."""
        call = asyncio.create_task(self.receive(group, tag, seconds=60))
        while f"{group} {tag}" not in self.made:
            await asyncio.sleep(0)
        return call

    def of(self, story: Callable[["Made"], Awaitable[asyncio.Task[None]]]) -> list[str]:
        """What a story makes."""

        async def tell() -> None:
            (await story(self)).cancel()

        asyncio.run(tell())
        self._threads.close()
        return self.made


def test_of_many_groups_those_are_forgotten_that_nobody_asked_for_longest_unless_a_call_waits(monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.group_calls._MOST_GROUPS", 3)

    async def story(made: Made) -> Any:
        call = await made.waiting("w", "t")
        for group in "abacabw":
            await made.receiving.ack(Call("raw", {}), request("AckMessage", group=group))
        return call

    assert Made().of(story) == ["w", "w t", "a", "b", "c", "b"]


def test_a_group_is_made_although_calls_wait_in_as_many_as_are_kept(monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.group_calls._MOST_GROUPS", 1)

    async def story(made: Made) -> Any:
        call = await made.waiting("w", "t")
        for _ in range(2):
            await made.receive("a", "t")
        return call

    assert Made().of(story) == ["w", "w t", "a", "a t"]


def test_of_many_choices_of_a_group_the_oldest_is_forgotten_unless_a_call_waits(monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.group_calls._MOST_CHOICES", 3)

    async def story(made: Made) -> Any:
        call = await made.waiting("g", "w")
        for tag in "abcbaw":
            await made.receive("g", tag)
        return call

    assert Made().of(story) == ["g", "g w", "g a", "g b", "g c", "g a"]


# A stop


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_a_front_ends_although_a_pop_hangs_which_is_given_back_when_it_commits(engine, outbox, monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.server._DRAIN_SECONDS", 0.1)
    monkeypatch.setattr("outbox.rocketmq.front.front._END_SECONDS", 0.2)
    hangs, may_end, answers = threading.Event(), threading.Event(), list[Any]()

    def hang(point: str) -> None:
        if point == "pop.before_commit":
            failpoints.arm(None)
            hangs.set()
            may_end.wait(60)

    send(outbox, b"1")
    front = Front(outbox, listen="127.0.0.1:0", topics=TOPICS)
    serving = threading.Thread(target=front.run, kwargs={"signals": False})
    serving.start()
    assert eventually(lambda: front.listening)
    failpoints.arm(hang)
    asked = request("ReceiveMessage", long_polling_timeout={"seconds": 60})
    calling = threading.Thread(target=lambda: answers.extend(called(front, "ReceiveMessage", asked)))
    calling.start()
    assert hangs.wait(60)
    front.stop()
    serving.join(60)
    calling.join(60)
    ended, still = not serving.is_alive(), not may_end.is_set()
    may_end.set()
    with listening(outbox) as other:
        found = received(other)

    assert (answers[0].status.code, ended, still, seen(found)) == (40401, True, True, [(b"1", 1)])

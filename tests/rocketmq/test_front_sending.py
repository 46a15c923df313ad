"""Messages, half messages and verdicts of clients, without a server: what is stored, and what is refused with what."""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.event import listen
from sqlalchemy.exc import IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox import Outbox
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.conversion import stored
from outbox.rocketmq.front.protocol import RPCS, numbers
from outbox.rocketmq.front.sending import Sending
from outbox.rocketmq.front.settings import PRODUCER
from outbox.rocketmq.front.statuses import RefusedError
from outbox.rocketmq.front.transactions import Transactions
from outbox.store.fronts.topics import TopicRows
from tests.rocketmq.front_probes import TOPICS, message
from tests.rocketmq.fronts import called, listening
from tests.rocketmq.parts import halves
from tests.rocketmq.test_send_beside_verdict import Beside, stopped_inside
from tests.support.readers import waiting
from tests.support.waiting import eventually

OK = (20000, "OK")
PROXY = "org.apache.rocketmq.proxy.common.ProxyException: "
NOT_FOUND = f"{PROXY}cannot found transaction data"


@dataclass(frozen=True)
class Calls:
    """The calls of producers."""

    sending: Sending
    transactions: Transactions

    @classmethod
    def of(cls, outbox: Outbox) -> "Calls":
        """The calls at a front with the topics of the probes."""
        threads = Threads()
        transactions = Transactions(outbox, Clients(), timedelta(seconds=6), threads)
        return cls(Sending(outbox, TOPICS, transactions, threads, threads), transactions)  # type: ignore[arg-type]

    def send(self, *messages: Any) -> Any:
        """The answer to a call that sends messages."""
        return asyncio.run(self.sending.send(Call("by-hand", {}), RPCS["SendMessage"].request(messages=messages)))

    def end(self, transaction: str, verdict: str = "COMMIT", *, topic: str = "oracle_tx", client: str = "c") -> Any:
        """The code and the text of the answer to a verdict."""
        request = RPCS["EndTransaction"].request(
            topic={"name": topic}, transaction_id=transaction, resolution=numbers("TransactionResolution")[verdict]
        )
        return of(lambda: asyncio.run(self.transactions.end(Call(client, {}), request)))


@pytest.fixture
def calls(outbox: Outbox) -> Iterator[Calls]:
    """The calls of producers of an outbox."""
    made = Calls.of(with_topics(outbox))
    yield made
    made.transactions.close()


def with_topics(outbox: Outbox) -> Outbox:
    """Add the topics of the probes to an outbox."""
    with closing(outbox.database.open()) as channel:
        for name, type_ in TOPICS.items():
            TopicRows(channel).add(name, type_)
    return outbox


def of(call: Callable[[], Any]) -> tuple[int, str]:
    """The code and the text of the answer to a call."""
    try:
        status = call().status
    except RefusedError as error:
        return int(error.code), error.text
    return status.code, status.message


def log(engine: Engine) -> list[bytes]:
    """The bodies of the messages that are delivered, in order."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT body FROM outbox_message WHERE topic LIKE 'oracle%' ORDER BY id"))
        return [bytes(body) for (body,) in rows]


def changed(sent: Any, *, topic: str | None = None, body: bytes | None = None, **system: Any) -> Any:
    """A copy of a message with another part."""
    made = type(sent)()
    made.CopyFrom(sent)
    made.user_properties.update(system.pop("props", {}))
    made.system_properties.keys.extend(system.pop("keys", []))
    if "delivery" in system:
        made.system_properties.delivery_timestamp.seconds += system.pop("delivery")
    for name, value in system.items():
        setattr(made.system_properties, name, value)
    made.topic.name, made.body = topic or sent.topic.name, body or sent.body
    return made


# The same id


@pytest.mark.every_database
def test_a_message_that_is_sent_again_is_stored_once(engine, calls):
    """A client makes the request anew at each try, perhaps after its host has moved, and with another trace."""
    first = message("normal", b"1", tag="t", keys=["a", "b"], props={"p": "v", "traceparent": "1"})
    again = changed(first, born_host="other", trace_context="00-1", queue_id=3, props={"traceparent": "2"})
    again.system_properties.born_timestamp.seconds += 3
    again.system_properties.keys[:] = ["b", "a"]

    answers = [calls.send(first), calls.send(again), calls.send(again, first)]

    id = first.system_properties.message_id
    assert [[entry.message_id for entry in answer.entries] for answer in answers] == [[id], [id], [id]]
    assert log(engine) == [b"1"]


@pytest.mark.every_database
def test_messages_of_one_id_with_other_content_are_all_stored(engine, calls):
    """Clients make ids of machine, process and second, so those of two containers may be equal."""
    first = message("normal", b"1")
    step, late = message("fifo", b"3", message_group="g"), message("delay", b"4", delivery_timestamp=2_000_000_000)
    id = first.system_properties.message_id
    step.system_properties.message_id = late.system_properties.message_id = id
    late.system_properties.delivery_timestamp.GetCurrentTime()
    sent = [
        first, changed(first, body=b"2"), changed(first, topic="oracle_filt"), changed(first, tag="t"),
        changed(first, keys=["k"]), changed(first, props={"p": "v"}), changed(first, body_encoding=2),
        step, changed(step, message_group="h"), late, changed(late, delivery=1),
    ]  # fmt: skip

    for each in sent:
        calls.send(each)

    assert log(engine) == [each.body for each in sent]
    with engine.connect() as connection:
        ids = connection.execute(text("SELECT count(DISTINCT message_id) FROM outbox_message")).scalar_one()
    assert ids == len(sent)


@pytest.mark.every_database
def test_a_half_message_that_is_sent_again_is_stored_once_and_refused_after_a_rollback(engine, calls):
    kept, undone = message("tx", b"kept", "TRANSACTION"), message("tx", b"undone", "TRANSACTION")
    ids = [each.system_properties.message_id for each in (kept, undone)]

    receipts = [calls.send(each).entries[0].transaction_id for each in (kept, kept, undone)]
    stored_halves = halves(engine)
    answers = [calls.end(ids[0]), of(lambda: calls.send(kept)), calls.end(ids[1], "ROLLBACK")]
    code, refused = of(lambda: calls.send(undone))

    assert (receipts, stored_halves) == ([ids[0], *ids], 2)
    assert (answers, code, refused.startswith(NOT_FOUND)) == ([OK] * 3, 50001, True)
    assert log(engine) == [b"kept"]


@pytest.mark.every_database
def test_a_half_message_with_the_id_of_another_one_is_a_transaction_of_its_own(engine, calls):
    first = message("tx", b"first", "TRANSACTION")
    second = changed(first, body=b"second")
    id = first.system_properties.message_id

    receipts = [calls.send(each).entries[0] for each in (first, second, second)]
    other = receipts[1].transaction_id
    before = [calls.end(other), log(engine)]
    calls.end(id, "ROLLBACK")
    third = calls.send(changed(first, body=b"third")).entries[0].transaction_id
    calls.end(third)

    assert [each.message_id for each in receipts] == [id] * 3
    assert [each.transaction_id for each in receipts] == [id, other, other]
    assert len({id, other, third}) == 3
    assert (before, log(engine)) == ([OK, [b"second"]], [b"second", b"third"])


def test_two_half_messages_of_one_id_at_the_same_time_are_two_transactions(pg_engine):
    """The second one waits for the first, because it would not see the first one's row."""
    first = message("tx", b"first", "TRANSACTION")
    second = changed(first, body=b"second")
    calls = Calls.of(with_topics(Outbox(pg_engine)))
    calls.transactions.broker.declare("oracle_tx", timedelta(seconds=6))

    with stopped_inside(pg_engine, "="):
        sends = [Beside(lambda: calls.transactions.prepare(first))]
        assert eventually(lambda: waiting(pg_engine) == 1)
        sends.append(Beside(lambda: calls.transactions.prepare(second)))
        assert eventually(lambda: waiting(pg_engine) == 2)
    ids = [each.end() for each in sends]
    calls.transactions.close()

    assert (ids[0], ids[1] == ids[0], halves(pg_engine)) == (first.system_properties.message_id, False, 2)


def test_a_producer_is_asked_about_a_transaction_by_its_id(outbox):
    """The id of a transaction may be another one than that of its message."""
    asked: list[Any] = []

    class Producer:
        def write(self, command: Any) -> bool:
            asked.append(command.recover_orphaned_transaction_command.transaction_id)
            return True

    clients = Clients()
    clients.opened("raw", Producer())
    clients.declared("raw", PRODUCER, frozenset({"oracle_tx"}))
    transactions = Transactions(outbox, clients, timedelta(seconds=6), Threads())
    half = stored(message("tx", b"1", "TRANSACTION", mid="id", props={"__transactionId__": "other"}))

    transactions.ask(half)

    assert asked == ["other"]


def test_a_limit_of_the_log_that_a_real_server_has_not_is_told_with_the_code_of_the_field():
    calls = Calls.of(Outbox(create_engine("sqlite://")))
    sent = {
        "tag": message("normal", tag="t" * 256),
        "key": message("normal", keys=["a\u2028b"]),
        "properties": message("normal", props={"\u00e4": '"' * 16382}),
    }

    answers = {name: of(partial(calls.send, each)) for name, each in sent.items()}

    must_not = "must not hold control characters or begin or end with white space"
    assert answers == {
        "tag": (40004, "tags: must be at most 255 characters without | and control characters; shorten or clean it"),
        "key": (40005, f"headers['KEYS']: {must_not}; strip or encode the value"),
        "properties": (43101, "headers: must be at most 32768 bytes together; put more into the body"),
    }


def test_messages_of_more_bytes_than_may_wait_are_refused_until_others_are_stored():
    """A message that waits is in memory; one alone is taken, however large it is."""
    large, small = message("normal", b"x" * 1000), message("normal", b"x" * 100)

    class AtGate(Threads):
        gate = asyncio.Event()

        async def run(self, *_function: Any) -> Any:
            await self.gate.wait()
            return [None]

    engine, threads = create_engine("sqlite://"), AtGate()
    sending = Sending(Outbox(engine), TOPICS, None, threads, threads, most_bytes=900)  # type: ignore[arg-type]

    async def sent(each: Any) -> tuple[int, str]:
        try:
            answer = await sending.send(Call("by-hand", {}), RPCS["SendMessage"].request(messages=[each]))
        except RefusedError as error:
            return int(error.code), error.text
        return answer.status.code, answer.status.message

    async def all_sent() -> list[tuple[int, str]]:
        both = [asyncio.create_task(sent(each)) for each in (large, small)]
        await asyncio.sleep(0)
        AtGate.gate.set()
        return [*await asyncio.gather(*both), await sent(small)]

    assert asyncio.run(all_sent()) == [OK, (42900, "too many bytes wait for the database"), OK]


def sent_at_once(calls: Calls, *messages: Any) -> list[int | str]:
    """The codes of the answers to calls of a message each, which come together, or the names of other errors."""

    async def sent(each: Any) -> int | str:
        try:
            answer = await calls.sending.send(Call("by-hand", {}), RPCS["SendMessage"].request(messages=[each]))
        except RefusedError as error:
            return int(error.code)
        except Exception as error:
            return type(error).__name__
        return int(answer.status.code)

    async def all_sent() -> list[int | str]:
        return await asyncio.gather(*map(sent, messages))

    return asyncio.run(all_sent())


@pytest.mark.every_database
def test_calls_that_come_together_are_stored_by_one_transaction(engine, calls):
    calls.send(message("normal", b"first"))
    begun: list[object] = []
    listen(engine, "begin", begun.append)

    answers = sent_at_once(calls, *(message("normal", b"%d" % each) for each in range(3)))

    assert (answers, len(begun)) == ([20000] * 3, 1)
    assert log(engine) == [b"first", b"0", b"1", b"2"]


@pytest.mark.every_database
def test_a_call_that_the_log_refuses_is_refused_alone_and_the_calls_beside_it_are_stored_together(engine, calls):
    too_long = message("normal", b"1", tag="t" * 256)
    calls.send(message("normal", b"first"))
    begun: list[object] = []
    listen(engine, "begin", begun.append)

    answers = sent_at_once(calls, message("normal", b"0"), too_long, message("normal", b"2"))

    assert (answers, len(begun)) == ([20000, 40004, 20000], 1)
    assert log(engine) == [b"first", b"0", b"2"]


@pytest.mark.every_database
def test_a_call_that_the_database_refuses_is_refused_alone_and_the_calls_beside_it_are_stored(
    engine, calls, monkeypatch
):
    append = Sending._append

    def refusing(sending: Sending, messages: Sequence[Any], *more: Any) -> None:
        if any(each.body == b"1" for each in messages):
            raise IntegrityError("INSERT", None, sqlite3.IntegrityError())
        append(sending, messages, *more)

    monkeypatch.setattr(Sending, "_append", refusing)

    answers = sent_at_once(calls, *(message("normal", b"%d" % each) for each in range(3)))

    assert (answers, log(engine)) == ([20000, "IntegrityError", 20000], [b"0", b"2"])


def test_a_message_that_another_transaction_stores_for_long_holds_up_no_other_one(pg_engine, monkeypatch):
    """A front that is frozen has such transactions, and clients send their messages again to another front."""
    monkeypatch.setattr("outbox.rocketmq.front.sending.PATIENCE", "50ms")
    outbox = with_topics(Outbox(pg_engine))
    calls, again = Calls.of(outbox), message("normal", b"again")
    frozen = stored(again)
    frozen.dedup_key = frozen.id_text

    with pg_engine.connect() as connection:
        outbox.send_all(connection, [frozen])
        beside = Beside(lambda: sent_at_once(calls, message("normal", b"1"), again, message("normal", b"2")))
        ended = eventually(lambda: beside.ended)
    answers, later = beside.end(), sent_at_once(calls, again)
    calls.transactions.close()

    assert (ended, answers, later) == (True, [20000, "OperationalError", 20000], [20000])
    assert log(pg_engine) == [b"1", b"2", b"again"]


def test_calls_are_stored_alone_for_a_while_and_the_rest_fails_with_the_error_of_all(calls, monkeypatch):
    """While a whole table is locked, each call alone would wait, and all later ones behind them."""
    tries: list[list[bytes]] = []

    def refusing(_sending: Sending, messages: Sequence[Any], _patience: str) -> None:
        tries.append([each.body for each in messages])
        if len(tries) == 2:
            monkeypatch.setattr("outbox.rocketmq.front.sending.clock", lambda: math.inf)
        raise IntegrityError("INSERT", None, sqlite3.IntegrityError())

    monkeypatch.setattr(Sending, "_append", refusing)

    answers = sent_at_once(calls, *(message("normal", b"%d" % each) for each in range(3)))

    assert (answers, tries) == (["IntegrityError"] * 3, [[b"0", b"1", b"2"], [b"0"]])


def test_calls_that_come_together_while_the_database_is_away_are_not_tried_one_by_one(calls, monkeypatch):
    tries: list[list[bytes]] = []

    def away(_sending: Sending, messages: Sequence[Any], _patience: str) -> None:
        tries.append([each.body for each in messages])
        raise PoolTimeout("no connection")

    monkeypatch.setattr(Sending, "_append", away)

    answers = sent_at_once(calls, message("normal", b"0"), message("normal", b"1"))

    assert (answers, tries) == (["TimeoutError"] * 2, [[b"0", b"1"]])


# Verdicts


def test_what_is_no_id_of_a_transaction_is_refused_before_any_sql():
    """The database of this front cannot be opened."""
    calls = Calls.of(Outbox(create_engine("sqlite://")))
    limit = f"{NOT_FOUND} [a transaction id has at most 1024 bytes, all of which can be printed]"
    empty = (40008, "transaction id cannot be empty")
    ids = {"": empty, " \t": empty, "a\0b": (50001, limit), "a\nb": (50001, limit), "\u00e4" * 513: (50001, limit)}

    answers = {id: calls.end(id) for id in ids}
    unnamed = calls.end("id", topic="")

    assert answers == ids
    assert unnamed == (40002, "The specified topic is blank")


@pytest.mark.every_database
def test_a_verdict_is_stored_with_so_much_of_the_clients_id_as_can_be_shown(engine, calls):
    half = message("tx", b"1", "TRANSACTION")
    calls.send(half)

    answer = calls.end(half.system_properties.message_id, client=f"a\0b{'c' * 100_000}")

    with engine.connect() as connection:
        by = connection.execute(text("SELECT decided_by FROM outbox_op")).scalar_one()
    assert (answer, by) == (OK, f"client a\ufffdb{'c' * 196}…")


# Errors of the database


def test_an_error_of_the_database_is_told_to_the_client_and_logged_without_the_message(outbox, monkeypatch, caplog):
    statement, cause = "INSERT INTO outbox_message", sqlite3.IntegrityError("no more room\nFailing row: s3cret")

    def fails(*_: object) -> None:
        raise IntegrityError(statement, {"body": b"s3cret"}, cause)

    monkeypatch.setattr(Sending, "_append", fails)
    request = RPCS["SendMessage"].request(messages=[message("normal", b"s3cret")])

    with listening(outbox, topics=TOPICS) as front:
        status = called(front, "SendMessage", request).status

    text = "IntegrityError: no more room"
    assert status.message == f"org.apache.rocketmq.proxy.common.ProxyException: {text}"
    assert caplog.messages == [f"front: SendMessage failed: {text}"]

"""With a batch size a function gets lists, and may answer for each message."""

from collections.abc import Sequence
from typing import Any

import pytest

from outbox import Done, Message, Outbox, Reject, Retry
from tests.support.consumers import consumer_of, parked, texts, until_over, write


@pytest.fixture
def outbox(engine) -> Outbox:
    """An outbox on every supported database."""
    return Outbox(engine)


def test_a_list_has_at_most_so_many_messages(outbox):
    write(outbox, *map(str, range(10)))
    consumer, got = consumer_of(outbox, batch_size=4), list[list[str]]()

    @consumer.on("orders")
    def handle(messages: Sequence[Message]) -> None:
        got.append(texts(messages))

    consumer.until_empty()

    assert got == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_a_list_of_one_is_a_list(outbox):
    write(outbox, "1")
    consumer, got = consumer_of(outbox, batch_size=4), list[object]()
    consumer.on("orders")(got.append)

    consumer.until_empty()

    assert [type(each) for each in got] == [list]


WRONG = "handle returned 2 answers for 3 messages; return one for each"
ODD = "handle returned int; let the handler return None, Done(), Retry(…), Reject(…) or Unavailable(…)"
ANSWERS: list[tuple[Any, list[tuple[str, int, str | None]]]] = [
    (None, []),
    (Done(), []),
    (Retry("busy"), [("retry", 1, "busy")] * 3),
    ([None, Retry("busy"), Done()], [("retry", 1, "busy")]),
    ([Reject("bad"), None, Retry("busy", counts=False)], [("dead", 1, "bad"), ("retry", 0, "busy")]),
    ([None, None], [("retry", 1, WRONG)] * 3),
    ([None, 7, None], [("retry", 1, ODD)]),
    (7, [("retry", 1, ODD)] * 3),
    ({Done(), Retry("busy"), Reject("bad")}, [("retry", 1, ODD.replace("int", "set"))] * 3),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_one_answer_is_for_all_and_a_list_for_each(outbox, answer, expected):
    write(outbox, "0", "1", "2")
    consumer = consumer_of(outbox, batch_size=10)

    @consumer.on("orders")
    def handle(messages: Sequence[Message]) -> Any:
        return answer

    consumer.once()

    found = [(state, attempts, (error or "").split("<locals>.")[-1]) for state, attempts, error in parked(outbox)]
    assert found == expected


def test_what_stands_behind_a_failure_of_its_key_is_not_done(outbox, caplog):
    """It comes again after the failed message, whatever was answered about it, and the log says so once."""
    write(outbox, "1", "2", "3", key="k")
    write(outbox, "1", "2", key="another")
    consumer, texts_of_key = consumer_of(outbox, batch_size=10), dict[str, list[str]]()

    @consumer.on("orders")
    def handle(messages: Sequence[Message]) -> list[Retry | None]:
        for message in messages:
            texts_of_key.setdefault(message.key or "", []).append(message.text())
        return [Retry("no") if message.body == b"1" and message.attempt == 1 else None for message in messages]

    until_over(consumer)

    assert texts_of_key == {"k": ["1", "2", "3", "1", "2", "3"], "another": ["1", "2", "1", "2"]}
    assert ["behind a failed one of their key" in line for line in caplog.messages].count(True) == 1


def test_what_stands_behind_a_rejected_message_is_done_where_dead_letters_hold_nothing_back(outbox):
    write(outbox, "1", "2", key="k")
    consumer, got = consumer_of(outbox, batch_size=10, on_dead="continue"), list[list[str]]()

    @consumer.on("orders")
    def handle(messages: Sequence[Message]) -> list[Reject | None]:
        got.append(texts(messages))
        return [Reject("no") if message.body == b"1" else None for message in messages]

    until_over(consumer)

    assert (got, parked(outbox)) == ([["1", "2"]], [("dead", 1, "no")])


def test_an_exception_is_a_failure_of_the_whole_list(outbox):
    write(outbox, "0", "1")
    consumer = consumer_of(outbox, batch_size=10)

    @consumer.on("orders")
    def handle(messages: Sequence[Message]) -> None:
        raise ValueError("no")

    consumer.once()

    assert parked(outbox) == [("retry", 1, "ValueError: no")] * 2


def test_a_function_may_take_the_messages_out_of_its_list(outbox):
    write(outbox, "0", "1", "2")
    consumer, got = consumer_of(outbox, batch_size=2), list[Message]()

    @consumer.on("orders")
    def handle(messages: list[Message]) -> None:
        while messages:
            got.append(messages.pop(0))

    until_over(consumer)

    assert (texts(got), parked(outbox)) == (["0", "1", "2"], [])


def test_what_succeeded_does_not_come_again(outbox):
    write(outbox, "0", "1", "2", "3")
    consumer, got = consumer_of(outbox, batch_size=10), list[list[str]]()

    @consumer.on("orders")
    def handle(messages: Sequence[Message]) -> Any:
        got.append(texts(messages))
        return [Retry("odd") if int(m.body) % 2 and m.attempt == 1 else None for m in messages]

    until_over(consumer)

    assert got == [["0", "1", "2", "3"], ["1", "3"]]


def test_lists_of_several_topics_are_cut_where_the_function_changes(outbox):
    for number, topic in enumerate(("orders", "orders", "mail", "orders")):
        write(outbox, str(number), topic=topic)
    consumer, got = consumer_of(outbox, batch_size=10), list[tuple[str, list[str]]]()
    for name in ("orders", "mail"):
        consumer.on(name)(lambda messages, name=name: got.append((name, texts(messages))))

    consumer.until_empty()

    assert got == [("orders", ["0", "1"]), ("mail", ["2"]), ("orders", ["3"])]


def test_a_key_waits_also_for_a_failure_in_the_list_of_another_function(outbox):
    write(outbox, "1", key="k")
    write(outbox, "2", topic="mail", key="k")
    write(outbox, "3", topic="mail", key="other")
    consumer, got = consumer_of(outbox, batch_size=10), list[str]()

    @consumer.on("orders")
    def orders(messages: Sequence[Message]) -> Any:
        got.extend(f"{m.body.decode()}#{m.attempt}" for m in messages)
        return Retry("not yet") if messages[0].attempt < 2 else None

    @consumer.on("mail")
    def mail(messages: Sequence[Message]) -> None:
        got.extend(texts(messages))

    until_over(consumer)

    assert got == ["1#1", "3", "1#2", "2"]


def test_coroutines_get_lists_as_well(outbox):
    write(outbox, "0", "1", "2")
    consumer, got = consumer_of(outbox, batch_size=2), list[list[str]]()

    @consumer.on("orders")
    async def handle(messages: Sequence[Message]) -> None:
        got.append(texts(messages))

    consumer.until_empty()
    consumer.close()

    assert got == [["0", "1"], ["2"]]

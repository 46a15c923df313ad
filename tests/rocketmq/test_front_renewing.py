"""What clients have in their hands: push consumers keep it while they live, whichever front a call of theirs meets."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.group_subscriptions import GroupSubscriptions
from outbox.rocketmq.front.hands import Batch, Hands, Key
from outbox.rocketmq.front.protocol import RPCS, numbers
from outbox.rocketmq.front.receiving import Receiving
from outbox.rocketmq.front.registry import Registry
from outbox.rocketmq.front.routing import Place, Routes
from outbox.store.subscriptions.receipts import Receipt
from tests.rocketmq.fronts import TOPICS
from tests.support.leases import step_clock

PUSH = numbers("ClientType")["PUSH_CONSUMER"]
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Hand:
    """The clock of a front, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The clock of all fronts."""
    made = Hand()
    monkeypatch.setattr("outbox.rocketmq.front.hands.clock", made)
    return made


# Two fronts behind one place


class Stream:
    """A stream that takes each command."""

    def write(self, _command: object) -> bool:
        """Do as a stream to a client."""
        return True


class Side:
    """A front without its server, which knows clients of its own."""

    def __init__(self, outbox: Outbox, clock: Hand) -> None:
        self.clients, self._threads, self._subscriptions = Clients(clock=clock), Threads(2), GroupSubscriptions(outbox)
        self.registry = Registry(self.clients, TOPICS, self._subscriptions.connections, self._threads, clock=clock)
        routes = Routes(TOPICS, lambda _tls: Place("127.0.0.1", 1))
        self.receiving = Receiving(
            self._subscriptions.of,
            self._subscriptions.hints,
            routes,
            self._threads,
            self.registry.alive,
            fifo_groups=(),
        )

    async def receive(self, client: str = "push") -> str:
        """Receive one message as a push consumer; return the handle."""
        answers = list[Any]()

        async def send(answer: Any) -> None:
            answers.append(answer)

        asked = RPCS["ReceiveMessage"].request(
            batch_size=1, auto_renew=True, group={"name": "billing"}, message_queue={"topic": {"name": "orders"}}
        )
        await self.receiving.receive(Call(client, {}), asked, send)
        return str(answers[1].message.system_properties.receipt_handle)

    async def change(self, handle: str, seconds: int) -> int:
        """Change the time of a message; return the code."""
        asked = RPCS["ChangeInvisibleDuration"].request(
            receipt_handle=handle,
            invisible_duration={"seconds": seconds},
            group={"name": "billing"},
            topic={"name": "orders"},
        )
        return int((await self.receiving.change(Call("push", {}), asked)).status.code)

    async def renewed(self) -> int:
        """Renew; return how many messages were renewed."""
        await self.receiving.hands.renew()
        return self.receiving.hands.number()

    def close(self) -> None:
        """Close the connections."""
        self._threads.close()
        self._subscriptions.close(0)


@contextmanager
def two(outbox: Outbox, clock: Hand) -> Iterator[tuple[Side, Side]]:
    """Two fronts of one outbox, which has a message."""
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    sides = Side(outbox, clock), Side(outbox, clock)
    try:
        yield sides
    finally:
        for each in sides:
            each.close()


def due(engine: Engine) -> str:
    """Until when the message is nobody else's."""
    with engine.connect() as connection:
        return str(connection.execute(text("SELECT due_at FROM outbox_parked")).scalar_one())


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
def test_a_message_is_renewed_until_another_front_gives_it_another_time(engine, outbox, clock):
    """Also after renewals, of which each begins with the time that the one before has written."""

    async def story(mine: Side, others: Side) -> Any:
        mine.clients.opened("push", Stream())
        handle = await mine.receive()
        found, times = list[object](), [due(engine)]
        for clock.now in (20.0, 40.0):
            found.append(await mine.renewed())
            times.append(due(engine))
        found += [times == sorted({*times}), await others.change(handle, 20), due(engine) not in times]
        before, clock.now = due(engine), 60.0
        return [*found, await mine.renewed(), due(engine) == before]

    with two(outbox, clock) as sides:
        assert asyncio.run(story(*sides)) == [1, 1, True, 20000, True, 0, True]


def test_a_front_that_stood_still_leaves_alone_what_others_have_by_then(engine, outbox, clock):
    async def story(mine: Side, others: Side) -> Any:
        mine.clients.opened("push", Stream())
        await mine.receive()
        step_clock(engine, timedelta(minutes=2), "outbox_parked.due_at")
        await others.receive("other")
        before, clock.now = due(engine), 120.0
        return await mine.renewed(), due(engine) == before

    with two(outbox, clock) as sides:
        assert asyncio.run(story(*sides)) == (0, True)


def test_a_message_that_came_again_from_the_same_front_is_renewed_once(engine, outbox, clock):
    async def story(mine: Side, _others: Side) -> int:
        mine.clients.opened("push", Stream())
        await mine.receive()
        step_clock(engine, timedelta(minutes=2), "outbox_parked.due_at")
        await mine.receive()
        clock.now = 20.0
        return await mine.renewed()

    with two(outbox, clock) as sides:
        assert asyncio.run(story(*sides)) == 1


@pytest.mark.parametrize("engine", ["postgresql", "sqlite"], indirect=True)
@pytest.mark.parametrize(("sign", "numbers"), [("stream", [1, 1, 1, 1, 0]), ("heartbeat", [1, 1, 1, 1, 1, 0])])
def test_a_message_is_renewed_while_another_front_has_a_stream_or_heartbeats_of_its_client(
    outbox, clock, sign: str, numbers: list[int]
):
    """The row of a client says nothing by itself, as it is written once in half an hour."""

    async def story(mine: Side, others: Side) -> list[int]:
        stream, clients, found = Stream(), others.clients, list[int]()
        if sign == "stream":
            clients.opened("push", stream)
        clients.declared("push", PUSH, frozenset())
        await others.registry.exchange()
        step_clock(outbox.engine, timedelta(minutes=10), "outbox_client.seen_at")
        await mine.receive()
        for _ in numbers:
            clock.now += 20.0
            if clock.now == 60.0:
                clients.closed("push", stream)
                clients.gone("push") if sign == "stream" else None
            elif clock.now < 60.0:
                clients.beat("push")
            found.append(await mine.renewed())
            for _ in range(2):  # one reads the question, the next one answers
                await others.registry.exchange()
        return found

    with two(outbox, clock) as sides:
        assert asyncio.run(story(*sides)) == numbers


# The batches of one front


class Subscription:
    """A subscription that notes what is renewed and by how much. A receipt in `gone` is worth nothing any more."""

    def __init__(self, *gone: int) -> None:
        self.gone, self.calls = {*gone}, list[dict[int, timedelta]]()
        self.fails = False

    def times(self, receipts: Sequence[Receipt]) -> dict[Receipt, datetime]:
        """Do as a subscription."""
        return dict.fromkeys(receipts, BEGIN)

    def renew(self, times: Mapping[Receipt, tuple[datetime, datetime]], _wait: timedelta) -> list[Receipt]:
        """Do as a subscription."""
        if self.fails:
            raise ConnectionError("away\nfor long")
        self.calls.append({each.id: then - due for each, (due, then) in times.items()})
        return [each for each in times if each.id not in self.gone]


def message(id: int) -> Any:
    """A message of the log."""
    return SimpleNamespace(id=id, key=None, body=b"1", headers={})


def told(story: Callable[[Hands, set[str]], Awaitable[object]]) -> Any:
    """What a story returns of the hands of a front, and of the clients that are there."""
    living, threads = {"a", "b"}, Threads(1)

    async def alive(clients: Collection[str]) -> set[str]:
        return living.intersection(clients)

    async def tell() -> object:
        return await story(Hands(threads, alive), living)

    try:
        return asyncio.run(tell())
    finally:
        threads.close()


async def received(hands: Hands, subscription: Any, client: str, *ids: int) -> Batch:
    """Messages that are on their way to a client."""
    batch = hands.begin(Key(client, "billing", "orders", ""), subscription)
    hands.got(batch, "r", [message(id) for id in ids])
    await hands.learn(batch)
    return batch


def test_messages_are_renewed_while_their_clients_live_and_half_an_hour_at_most(clock):
    subscription = Subscription(3)

    async def story(hands: Hands, living: set[str]) -> None:
        for batch in [await received(hands, subscription, "a", 1, 2, 3), await received(hands, subscription, "b", 4)]:
            hands.hold(batch)
        living.remove("b")
        for clock.now in (20.0, 45.5, 1799.0, 1800.0):
            await hands.renew()

    told(story)

    assert subscription.calls == [
        dict.fromkeys([1, 2, 3, 4], timedelta(seconds=20)),
        dict.fromkeys([1, 2], timedelta(seconds=25.5)),
        dict.fromkeys([1, 2], timedelta(seconds=1753.5)),
    ]


def test_messages_are_not_renewed_before_their_client_has_them_or_after_a_repeated_receive_took_them_over(clock):
    subscription = Subscription()

    async def story(hands: Hands, _living: set[str]) -> list[int]:
        numbers, key = list[int](), Key("a", "billing", "orders", "attempt")
        for held in (False, True):
            batch = hands.begin(key, subscription)  # type: ignore[arg-type]
            hands.got(batch, "r", [message(1)])
            await hands.learn(batch)
            hands.hold(batch) if held else None
            clock.now += 20.0
            await hands.renew()
            numbers.append(hands.number())
        hands.begin(key, subscription)  # type: ignore[arg-type]
        await hands.renew()
        return [*numbers, hands.number()]

    assert told(story) == [0, 1, 0]


def test_messages_that_could_not_be_renewed_are_renewed_the_next_time(clock, caplog):
    subscription = Subscription()

    async def story(hands: Hands, _living: set[str]) -> None:
        hands.hold(await received(hands, subscription, "a", 1))
        for clock.now, subscription.fails in ((20.0, True), (40.0, False)):
            await hands.renew()

    told(story)

    assert subscription.calls == [{1: timedelta(seconds=40)}]
    assert caplog.messages == ["front: messages were not renewed, trying again: ConnectionError: away for long"]


def test_batches_are_forgotten_the_oldest_first_when_they_are_too_many_or_too_large():
    subscription: Any = Subscription()

    async def story() -> Any:
        hands, large = Hands(Threads(1), None, most=3, most_bytes=150), [Message("orders", "x" * 60)]  # type: ignore[arg-type]

        def key(id: str) -> Key:
            return Key("client", "billing", "orders", id)

        for id in "abcd":
            hands.got(hands.begin(key(id), subscription), f"receipt {id}", [Message("orders", "1")])
        few = {id: hands.begin(key(id), subscription).receipt for id in "bcda"}
        for id in "ef":
            hands.got(hands.begin(key(id), subscription), f"receipt {id}", large)
        return few, {id: hands.begin(key(id), subscription).receipt for id in "bef"}

    assert asyncio.run(story()) == (
        {"b": "receipt b", "c": "receipt c", "d": "receipt d", "a": ""},
        {"b": "", "e": "", "f": "receipt f"},
    )

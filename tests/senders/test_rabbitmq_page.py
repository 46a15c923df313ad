"""What `docs/rabbitmq.md` says is so; its names and links are tested with those of the README."""

import asyncio
import re
from contextlib import closing

import aio_pika
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox import create_engine, migrate
from outbox.senders.rabbitmq import RabbitSender
from outbox.senders.rabbitmq_channel import RESERVED
from outbox.testing.sender_contract import a_message, check_all_done
from tests.support.pages import TOP, run
from tests.support.servers.rabbitmq import RabbitServer

PAGE = (TOP / "docs" / "rabbitmq.md").read_text()


@pytest.fixture
def page(tmp_path, monkeypatch):
    """What the page defines, in a folder with nothing in it but what `outbox db upgrade --inbox-only` makes."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade_inbox(create_engine("sqlite:///billing.db"))
    return run(PAGE, "docs/rabbitmq.md")


@pytest.mark.storm
def test_its_consumer_handles_each_message_once(rabbitmq: RabbitServer, page):
    asyncio.run(page["declare"](rabbitmq.url))
    sent = [a_message("orders", {"id": n}, key=f"order-{n}") for n in range(5)]
    with closing(RabbitSender(f"{rabbitmq.url}?exchange=shop")) as sender:
        check_all_done(sender.send(sent), sent)
        check_all_done(sender.send(sent), sent)  # as after a lost answer

    asyncio.run(consume(page, rabbitmq.url))

    with Session(page["engine"]) as session:
        assert session.scalars(select(page["Invoice"].order)).all() == [0, 1, 2, 3, 4]


async def consume(page, url: str) -> None:
    """Run the consumer until everything is acknowledged; then remove what the page declared."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        async with asyncio.timeout(30):
            while await left(channel):
                consumer = asyncio.create_task(page["consume"](url))
                while await left(channel):
                    await asyncio.sleep(0.1)
                # What it has not acknowledged at its end waits again.
                consumer.cancel()
                await asyncio.wait([consumer])
                await asyncio.sleep(0.1)
        await channel.queue_delete("billing")
        await channel.exchange_delete("shop")


async def left(channel: aio_pika.abc.AbstractChannel) -> int:
    """How many messages wait for a consumer."""
    queue = await channel.declare_queue("billing", passive=True)
    return queue.declaration_result.message_count or 0


def test_the_headers_that_it_lists_are_those_that_are_reserved():
    [item] = re.findall(r"^- a header that brokers obey.*?(?=^$)", PAGE, re.MULTILINE | re.DOTALL)
    names = {name.lower() for name in re.findall(r"`([^`]+)`", item)}

    assert names == {*RESERVED.names, *(f"{prefix}…" for prefix in RESERVED.prefixes)}

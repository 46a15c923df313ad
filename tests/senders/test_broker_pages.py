"""What the pages of NATS, Redis, SQS and Kafka say is so; their names and links are tested with those of the README."""

import asyncio
import time
from contextlib import closing, suppress

import pytest
import redis as driver
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox import create_engine, migrate
from outbox.senders.aws import SqsSender
from outbox.senders.kafka import KafkaSender
from outbox.senders.nats import NatsSender
from outbox.senders.redis import RedisSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done
from outbox.testing.servers import NatsServer
from tests.support.nats_streams import make_stream
from tests.support.pages import TOP, run
from tests.support.servers.aws import REGION


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with nothing in it but the table that `outbox db upgrade --inbox-only` makes."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade_inbox(create_engine("sqlite:///billing.db"))


def invoices(page) -> list[int]:
    """What the page's consumer has written, in order."""
    with Session(page["engine"]) as session:
        return list(session.scalars(select(page["Invoice"].order).order_by(page["Invoice"].id)))


def test_the_consumer_of_nats_handles_each_message_once():
    page = run((TOP / "docs" / "nats.md").read_text(), "docs/nats.md")
    sent = [a_message("orders", {"id": n}, key="k") for n in range(5)]
    with NatsServer() as server, closing(NatsSender(f"{server.url}/shop")) as sender:
        make_stream(server.url, "shop.orders")
        check_all_done(sender.send(sent), sent)
        check_all_done(sender.send(sent), sent)  # as after a lost answer

        asyncio.run(consume_all(page, server.url))

    assert invoices(page) == [0, 1, 2, 3, 4]


async def consume_all(page, url: str) -> None:
    """Run the consumer of NATS until it has handled five messages."""
    consumer = asyncio.create_task(page["consume"](url))
    async with asyncio.timeout(30):
        while len(invoices(page)) < 5:
            await asyncio.sleep(0.1)
    consumer.cancel()
    with suppress(asyncio.CancelledError):
        await consumer


def test_the_consumer_of_redis_handles_each_message_once(redis):
    page = run((TOP / "docs" / "redis.md").read_text(), "docs/redis.md")
    client = driver.Redis(port=redis.port, protocol=2)
    client.xgroup_create("shop:orders", "billing", "0", mkstream=True)
    sent = [a_message("orders", {"id": n}, key="k") for n in range(5)]
    with closing(RedisSender(f"{redis.url}/0/shop")) as sender:
        check_all_done(sender.send(sent), sent)
        check_all_done(sender.send(sent), sent)  # as after a lost answer
    client.xreadgroup("billing", "worker-1", {"shop:orders": ">"}, count=2)  # read, and then it died

    page["consume"](client, "worker-1")

    assert invoices(page) == [0, 1, 2, 3, 4]
    assert client.xpending("shop:orders", "billing")["pending"] == 0
    client.delete("shop:orders")


@pytest.mark.storm
def test_the_consumer_of_sqs_handles_each_message_once(aws):
    page = run((TOP / "docs" / "aws.md").read_text(), "docs/aws.md")
    aws.make("shop-orders.fifo", "shop-orders")
    sent = [a_message("orders", {"id": n}, key="k") for n in range(5)]
    for fifo, name in ((1, "shop-orders.fifo"), (0, "shop-orders")):  # the same messages twice, as by a standard queue
        with closing(SqsSender(f"sqs://{REGION}/shop?fifo={fifo}&endpoint={aws.endpoint}")) as sender:
            check_all_done(sender.send(sent), sent)
        while any_left(aws, name):
            page["consume"](aws.sqs, aws.queue_url(name))

    assert invoices(page) == [0, 1, 2, 3, 4]
    aws.remove("shop-orders.fifo", "shop-orders")


def any_left(aws, name: str) -> bool:
    """Whether a queue holds a message."""
    number = "ApproximateNumberOfMessages"
    found = aws.sqs.get_queue_attributes(QueueUrl=aws.queue_url(name), AttributeNames=[number])
    return bool(found["Attributes"][number] != "0")


@pytest.mark.storm
def test_the_consumer_of_kafka_handles_each_message_once(kafka):
    page = run((TOP / "docs" / "kafka.md").read_text(), "docs/kafka.md")
    servers = {"bootstrap.servers": kafka.server.servers}
    admin = AdminClient(servers)
    for future in admin.create_topics([NewTopic("shop.orders", 1, 1)]).values():
        future.result(60)
    sent = [a_message("orders", {"id": n}, key="k") for n in range(5)]
    with closing(KafkaSender(f"{kafka.server.url}/shop")) as sender:
        check_eventually_done(sender, sent)
        check_all_done(sender.send(sent), sent)  # as after a lost answer
    settings = {**servers, "group.id": "billing", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    consumer.subscribe(["shop.orders"])
    until = time.monotonic() + 30

    while len(invoices(page)) < 5 and time.monotonic() < until:
        page["consume"](consumer, 1)
    for _ in range(10):
        page["consume"](consumer, 0.2)

    assert invoices(page) == [0, 1, 2, 3, 4]
    consumer.close()
    for future in admin.delete_topics(["shop.orders"]).values():
        future.result(60)

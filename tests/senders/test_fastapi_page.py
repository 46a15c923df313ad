"""The tutorial from FastAPI to Kafka to a consumer: each order that was answered with 201 gets one invoice."""

import asyncio
import runpy
import time

import httpx
import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox import create_engine, migrate
from tests.support.command_line import outbox
from tests.support.pages import TOP, run
from tests.support.waiting import eventually

ORDERS = [{"customer": "ann", "total": 42}, {"customer": "ben", "total": 4200}, {"customer": "eve", "total": 7}]


async def answers(app) -> list[int]:
    """The status of each order, placed over HTTP at the service of the example."""
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        return [(await client.post("/orders", json=order)).status_code for order in ORDERS]


def is_created(admin: AdminClient) -> bool:
    """Create the topic, unless that of another test is still being deleted."""
    try:
        admin.create_topics([NewTopic("shop.orders", 4, 1)])["shop.orders"].result(60)
    except KafkaException:
        return False
    return True


@pytest.mark.storm
def test_each_order_gets_one_invoice(kafka, pg_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    migrate.upgrade_inbox(create_engine("sqlite:///billing.db"))
    shop = pg_engine.url.render_as_string(hide_password=False)
    admin = AdminClient({"bootstrap.servers": kafka.server.servers})
    assert eventually(lambda: is_created(admin), seconds=60)

    example = runpy.run_path(str(TOP / "examples" / "fastapi_orders.py"))
    assert asyncio.run(answers(example["create_app"](shop))) == [201, 409, 201]
    relay = outbox(pg_engine, "relay", "--to", f"{kafka.server.url}/shop", "--until-empty")
    assert relay.code == 0, relay
    billing = run((TOP / "docs" / "kafka.md").read_text(), "docs/kafka.md")
    settings = {"bootstrap.servers": kafka.server.servers, "group.id": "fastapi", "enable.auto.commit": False}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
    consumer.subscribe(["shop.orders"])

    def invoices() -> list[int]:
        with Session(billing["engine"]) as session:
            return sorted(session.scalars(select(billing["Invoice"].order)))

    until = time.monotonic() + 120
    while len(invoices()) < 2 and time.monotonic() < until:
        billing["consume"](consumer, 1)

    # The order that was refused has drawn an id, and left neither a row nor a message.
    assert invoices() == [1, 3]
    consumer.close()
    billing["engine"].dispose()
    admin.delete_topics(["shop.orders"])["shop.orders"].result(60)
    assert eventually(lambda: "shop.orders" not in admin.list_topics(timeout=10).topics, seconds=60)

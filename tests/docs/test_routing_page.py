"""What the page about routing says is so: its code runs, its file is read, and its event is what arrives."""

import json
from datetime import UTC, datetime
from uuid import UUID

from outbox import Message, Route, migrate
from outbox.cli.config import read
from outbox.cli.routes import pace_of_file, routes_of_file
from outbox.senders.opening import open_sender
from outbox.store.log.log import Limits
from tests.support.destination import Destination
from tests.support.pages import TOP, blocks, run

PAGE = (TOP / "docs" / "routing.md").read_text()


def test_the_code_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    page = run(PAGE, "docs/routing.md")

    assert [relay.name for relay in page["relays"]._works] == ["relay:orders.*", "relay"]
    migrate.upgrade(page["outbox"].engine)
    page["relays"].close()


def test_the_file_is_read(tmp_path, monkeypatch):
    routes, single = blocks(PAGE, "toml")
    file = tmp_path / "outbox.toml"
    monkeypatch.setenv("KAFKA_URL", "kafka://kafka:9092")
    file.write_text(routes)

    found, (retry, limits) = routes_of_file(read(file)), pace_of_file(read(file))
    file.write_text(single)
    alone = routes_of_file(read(file))

    assert (retry.attempts, limits) == (20, Limits(rows=500))
    assert [(pattern, route.to) for pattern, route in found.items()] == [
        ("orders.*", "kafka://kafka:9092"), ("*", "nats://nats:4222"),
    ]  # fmt: skip
    assert found["*"] == Route(to="nats://nats:4222")
    assert alone == {
        "*": Route(to="nats://nats:4222", prefix="shop.", rename={"orders": "placed-orders"}),
    }


def test_the_event_is_what_arrives():
    (shown,) = blocks(PAGE, "json")
    message = Message("orders.placed", {"total": 1}, key="order-7", tags="new")
    message.message_id = UUID(json.loads(shown)["id"])
    message.created_at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    destination = Destination()

    open_sender(destination, prefix="shop.", envelope="cloudevents").send([message])

    assert destination.bodies == [shown.replace("\n", "").encode()]

"""What the page about routing says is so: its code runs, its file is read, and its event is what arrives."""

import json
from datetime import UTC, datetime
from uuid import UUID

from outbox import Message, Route, migrate
from outbox.cli.routes import routes_of_file
from outbox.senders.opening import open_sender
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
    (content,) = blocks(PAGE, "toml")
    file = tmp_path / "outbox.toml"
    file.write_text(content)
    monkeypatch.setenv("KAFKA_URL", "kafka://kafka:9092")

    found = routes_of_file(file)

    assert [(pattern, route.to) for pattern, route in found.items()] == [
        ("orders.*", "kafka://kafka:9092"), ("*", "nats://nats:4222"),
    ]  # fmt: skip
    assert found["*"] == Route(to="nats://nats:4222")


def test_the_event_is_what_arrives():
    (shown,) = blocks(PAGE, "json")
    message = Message("orders.placed", {"total": 1}, key="order-7", tags="new")
    message.message_id = UUID(json.loads(shown)["id"])
    message.created_at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    destination = Destination()

    open_sender(destination, prefix="shop.", envelope="cloudevents").send([message])

    assert destination.bodies == [shown.replace("\n", "").encode()]

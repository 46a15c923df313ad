"""The examples run as their first lines say."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outbox import Done, Message, Outbox, Reject, Relay, Retry, Unavailable, create_engine, migrate
from outbox.cli.demo.service import path_of
from tests.support.examples import EXAMPLES, run, typed

pytestmark = pytest.mark.storm


def test_an_order_is_placed_and_its_message_sent(folder):
    said = run(*typed("orders.py"))

    first, message = said.splitlines()
    assert first == "order 1 is placed"
    assert '"topic":"orders","key":"order-1"' in message
    assert r'"body":"{\"id\":1,\"total\":42,\"status\":\"placed\",\"version\":1}"' in message


def test_an_order_moves_on(folder):
    """Placed, paid, shipped; and not further."""
    run("outbox db upgrade", *[line for line in typed("orders.py") if "orders.py" in line])
    namespace: dict[str, Any] = {"__name__": "orders"}
    exec(compile((EXAMPLES / "orders.py").read_text(), "orders.py", "exec"), namespace)

    seen = [namespace["advance_order"](1) for _ in range(3)]

    bodies: list[bytes] = []
    Relay(namespace["outbox"], lambda message: bodies.append(message.body), name="list").until_empty()
    assert seen == ["paid", "shipped", "shipped"]
    assert bodies == [b'{"id":1,"total":42,"status":"%s","version":%d}' % each for each in STATES]


STATES = [(b"placed", 1), (b"paid", 2), (b"shipped", 3)]


def test_an_application_sends_its_own_messages(folder):
    """Without the one that was rolled back."""
    assert run(*typed("embedded_relay.py")).splitlines() == [
        'invoices: {"customer":"ann"}',
        'invoices: {"customer":"eve"}',
    ]


def test_writers_with_relays_inside_send_what_a_killed_one_of_them_left(folder):
    assert run(*typed("embedded_writers.py")) == "51 orders, 51 mails, 1 writer killed\n"


def test_coroutines_check_out_a_basket_in_one_transaction(folder):
    first, *messages = run(*typed("async_orders.py")).splitlines()

    assert first == "orders [1, 2] are placed"
    assert [json.loads(message)["body"] for message in messages] == [
        '{"id":1,"total":42}',
        '{"id":2,"total":7}',
        "Thank you for 2 orders!",
    ]


def test_one_relay_serves_the_databases_of_all_tenants(folder):
    messages = [json.loads(line) for line in run(*typed("tenants.py")).splitlines()]

    assert sorted(message["headers"]["tenant"] for message in messages) == ["acme", "acme", "globex"]


class Recorder(ThreadingHTTPServer):
    """A web server that answers what it is told to, by body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Recording)
        self.url = f"http://127.0.0.1:{self.server_port}/orders"
        self.answers: dict[bytes, int] = {}
        self.posted: list[tuple[str | None, bytes]] = []


class Recording(BaseHTTPRequestHandler):
    """One request to it."""

    server: Recorder

    def do_POST(self) -> None:
        """Keep what came."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.headers["Idempotency-Key"], body))
        self.send_response(self.server.answers.get(body, 200))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def website() -> Iterator[Recorder]:
    with Recorder() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def webhook(url: str) -> Any:
    namespace: dict[str, Any] = {"__name__": "webhook"}
    exec(compile((EXAMPLES / "webhook.py").read_text(), "webhook.py", "exec"), namespace)
    return namespace["Webhook"](url)


def test_a_webhook_gets_each_message_once_with_its_id(folder, website):
    engine = create_engine("sqlite:///shop.db")
    migrate.upgrade(engine)
    outbox = Outbox(engine)
    with outbox.begin() as session:
        first, second = outbox.send_all(session, [Message("orders", b"1", key="a"), Message("orders", b"2", key="a")])

    Relay(outbox, webhook(website.url), name="webhook").until_empty()

    assert website.posted == [(str(first), b"1"), (str(second), b"2")]


def test_a_webhook_tells_whose_fault_it_was(website):
    """And holds a key back behind its first message that was refused, but no other key."""
    website.answers = {b"bad": 422, b"broken": 500, b"busy": 503}
    messages = [
        Message("orders", b"bad", key="a"),
        Message("orders", b"behind", key="a"),
        Message("orders", b"broken", key="b"),
        Message("orders", b"busy"),
        Message("orders", b"fine", key="c"),
    ]

    verdicts = webhook(website.url).send(messages)

    assert [type(verdict) for verdict in verdicts] == [Reject, Unavailable, Retry, Unavailable, Done]
    assert [body for _, body in website.posted] == [b"bad", b"broken", b"busy", b"fine"]


def test_a_webhook_that_nobody_answers_is_unavailable():
    verdicts = webhook("http://127.0.0.1:9/orders").send([Message("orders", b"1")])

    assert [type(verdict) for verdict in verdicts] == [Unavailable]


def test_the_command_line_finds_the_examples():
    assert path_of("orders.py").read_text() == (EXAMPLES / "orders.py").read_text()

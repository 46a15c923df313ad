"""What `docs/webhooks.md` says is so; its commands, names and links are tested with those of the README."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import select
from werkzeug.serving import make_server

from outbox import create_engine, migrate
from outbox.model.verdict import Unavailable
from outbox.senders.webhook import WebhookSender
from outbox.senders.webhook_signature import SECRET_VARIABLE, keys_of
from outbox.senders.webhook_url import OPTIONS, Target
from outbox.testing.sender_contract import a_message, check_all_done
from tests.support.pages import TOP, run

PAGE = (TOP / "docs" / "webhooks.md").read_text()


@contextmanager
def served(app) -> Iterator[str]:
    """Serve an application of WSGI; return its URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's code, run from top to bottom in a folder with nothing in it but the tables of `outbox db upgrade`."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade_inbox(create_engine("sqlite:///billing.db"))
    return run(PAGE, "docs/webhooks.md")


def test_the_endpoint_of_the_page_handles_each_message_once(page, monkeypatch, tmp_path):
    """Signed with the page's secret, and sent twice."""
    monkeypatch.setenv(SECRET_VARIABLE, page["secret"])
    sent = [a_message("orders", {"id": n}, key=f"order-{n % 3}", headers={"name": "Zoë"}) for n in range(10)]

    with served(page["app"]) as url:
        sender = WebhookSender(f"{url}/hooks/orders?timeout=20")
        for _ in range(2):
            check_all_done(sender.send(sent), sent)
        sender.close()

    with page["engine"].connect() as connection:
        assert sorted(connection.scalars(select(page["invoices"].c.order_id))) == list(range(10))
    page["engine"].dispose()


def test_the_endpoint_of_the_page_refuses_what_is_not_signed_with_its_secret(page, monkeypatch, tmp_path):
    monkeypatch.setenv(SECRET_VARIABLE, page["secret"])
    (tmp_path / "foreign").write_text("whsec_Zm9yZWlnbmZvcmVpZ25mb3JlaWduZm9yZWlnbg==")

    with served(page["app"]) as url:
        sender = WebhookSender(f"{url}/hooks/orders?secret-file={tmp_path}/foreign")
        [verdict] = sender.send([a_message("orders", {"id": 1})])
        sender.close()

    assert isinstance(verdict, Unavailable)
    assert "HTTP 401" in verdict.error
    assert "the request was not signed with this secret, or was altered on its way" in verdict.error
    with page["engine"].connect() as connection:
        assert list(connection.execute(select(page["invoices"]))) == []
    page["engine"].dispose()


def test_the_endpoint_of_the_page_starts_again(page):
    again = run(PAGE, "docs/webhooks.md")

    for each in (page, again):
        each["engine"].dispose()


def test_the_secret_of_the_page_is_one(page):
    assert [len(key) for key in keys_of(page["secret"])] == [32]
    page["engine"].dispose()


def test_the_options_are_those_of_the_table():
    rows = re.findall(r"^\| `([a-z-]+)` \| (?:`([^`]+)`|none) \|", PAGE.partition("## On the wire")[0], re.MULTILINE)
    table = dict(rows)
    written = "&".join(f"{name}={default}" for name, default in rows if default)

    by_default, as_written = (
        Target.of(f"https://host/x?{query}", timeout=timedelta(seconds=5)) for query in ("", written)
    )

    assert tuple(table) == OPTIONS
    assert by_default == as_written

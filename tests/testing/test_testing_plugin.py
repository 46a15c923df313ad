"""The fixtures that pytest finds once the package is installed, in the tests of a small application."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from sqlalchemy import Engine

ROOT = Path(__file__).parents[2]

_SHOP = """
    from sqlalchemy import text
    from sqlalchemy.orm import Session
    from outbox import Outbox, create_engine

    engine = create_engine("URL")
    outbox = Outbox(engine)

    def place_order(session: Session, number: int) -> None:
        outbox.send(session, "orders", {"id": number}, key=f"order-{number}")
        outbox.send(session, "mails", f"Thank you for order {number}")
        session.commit()
"""


@pytest.fixture
def shop(sqlite_engine: Engine, tmp_path: Path) -> Path:
    """An application, in a folder of its own."""
    folder = tmp_path / "shop"
    folder.mkdir()
    lines = (line.removeprefix("    ") for line in _SHOP.splitlines())
    (folder / "shop.py").write_text("\n".join(lines).replace("URL", str(sqlite_engine.url)))
    return folder


def run(folder: Path, tests: str) -> tuple[int, str]:
    """Run tests in a process of their own; returns how it ended and what it said."""
    (folder / "test_shop.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not entry_points(group="pytest11", name="outbox"):
        # An installation from before the plugin, as of a working copy; twice would be an error.
        command += ["-p", "outbox.testing.plugin"]
    # Its own words are looked at: how the outer run is to print its tracebacks does not concern it.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.storm
def test_the_tests_of_an_application_pass_and_one_that_fails_shows_what_was_sent(shop):
    code, output = run(
        shop,
        """
import pytest
from sqlalchemy.orm import Session
from shop import engine, outbox, place_order

@pytest.fixture
def session():
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()

def test_an_order_is_announced(session, outbox_capture):
    place_order(session, 1)
    outbox_capture.assert_sent("orders", key="order-1", body={"id": 1})
    assert outbox_capture.assert_sent("mails").body == b"Thank you for order 1"
    outbox_capture.assert_nothing_sent("stock")

def test_a_rolled_back_test_left_nothing_behind(outbox_capture, outbox_drain):
    outbox_capture.assert_nothing_sent()
    assert outbox_drain(outbox) == []

def test_what_was_committed_is_delivered(outbox_drain, scripted_sender):
    with Session(engine) as session:
        place_order(session, 3)
    assert [m.key for m in outbox_drain(outbox, scripted_sender, name="tests")] == ["order-3", None]
    assert [message.topic for message in scripted_sender.stored] == ["orders", "mails"]

def test_another_order_is_announced(outbox_capture):
    with Session(engine) as session:
        place_order(session, 1)
        place_order(session, 2)
    outbox_capture.assert_sent("orders", key="order-3")
""",
    )

    assert (code, "1 failed, 3 passed" in output) == (1, True), output
    assert "\n".join(line.removeprefix("E").strip() for line in output.splitlines() if line.startswith("E")) == (
        "AssertionError: no message was sent to 'orders' with key='order-3'\n"
        "what was sent:\n"
        """'orders' key='order-1' body={"id":1}   (not the same: key)\n"""
        """'orders' key='order-2' body={"id":2}   (not the same: key)\n"""
        "'mails' body=Thank you for order 1\n"
        "'mails' body=Thank you for order 2"
    )
    assert "capture.py" not in output, "the failure belongs to the line of the test"


def test_the_kit_has_a_front_door():
    from outbox import testing

    assert {name: getattr(testing, name).__name__ for name in testing.__all__ if name != "ANY"} == {
        "Capture": "Capture",
        "ScriptedSender": "ScriptedSender",
        "drain": "drain",
    }
    with pytest.raises(AttributeError):
        testing.there_is_no_such_name  # noqa: B018


def test_the_plugin_costs_nothing_where_it_is_not_used(tmp_path):
    """It is loaded at every start of pytest, in every project that has the package installed."""
    code, output = run(
        tmp_path,
        """
import sys

def test_nothing_was_imported():
    assert not {"sqlalchemy", "psycopg", "tenacity", "outbox.outbox"} & set(sys.modules)
""",
    )

    assert code == 0, output

"""The rights that docs/rights.md names are enough to read and to extract, and one that is missing is told."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.errors import DatabaseError
from outbox.spark import position
from tests.spark.extracts import extracted, ids_in, ids_of, run_here
from tests.spark.streams import Stream
from tests.support.command_line import outbox as typed
from tests.support.guests import owner_and_guest

PAGE = (Path(__file__).parents[2] / "docs" / "rights.md").read_text()
TO_READ, *TO_REGISTER = re.findall(r"^GRANT .* TO spark;$", PAGE, re.MULTILINE)


@pytest.fixture
def engines(pg_engine: Engine) -> Iterator[tuple[Engine, Engine]]:
    """The owner's, and one of a role without any right."""
    with owner_and_guest(pg_engine) as found:
        yield found


@pytest.fixture(autouse=True)
def tasks_run_here(monkeypatch):
    monkeypatch.setattr("outbox.spark.job.run", run_here)


def send(owner, *bodies):
    with owner.begin() as connection:
        for body in bodies:
            Outbox(owner).send(connection, "orders", body)


def grant(owner, guest, *statements):
    """As the page says, to this role."""
    with owner.begin() as connection:
        for statement in statements:
            connection.execute(text(statement.replace(" TO spark;", f" TO {guest.url.username}")))


def test_what_the_page_grants_is_enough_to_read_and_extract(engines, tmp_path):
    owner, guest = engines
    send(owner, "a", "b")
    grant(owner, guest, TO_READ)

    stream = Stream(guest)
    with closing(stream.follower):
        assert stream.all(stream.start(), 1)[1] == [[b"a"], [b"b"]]
    assert '"position"' in position(url=guest.url.render_as_string(hide_password=False))
    extracted(guest, tmp_path / "archive")
    assert ids_of(tmp_path / "archive") == ids_in(owner)


def test_what_the_page_grants_is_enough_to_register(engines, tmp_path):
    """Again and again: what is old of its progress is deleted."""
    owner, guest = engines
    grant(owner, guest, TO_READ, *TO_REGISTER)

    for number in range(3):
        send(owner, f"{number}")
        extracted(guest, tmp_path, register="nightly")

    with owner.connect() as connection:
        found = connection.execute(text("SELECT max(n) FROM outbox_progress WHERE subscription = 'nightly'")).scalar()
    assert found == 3


@pytest.mark.parametrize("granted", [[], ["GRANT SELECT ON outbox_meta TO spark;"]])
def test_a_right_that_is_missing_is_told_with_those_that_are_needed(engines, tmp_path, monkeypatch, granted):
    """By the command before Spark is started."""
    monkeypatch.setattr("outbox.cli.spark.session", lambda **_: pytest.fail("Spark is started"))
    owner, guest = engines
    send(owner, "a")
    grant(owner, guest, *granted)
    told = r"permission denied for table \w+.*; have its owner GRANT SELECT ON outbox_message, outbox_meta TO this role"

    with pytest.raises(DatabaseError, match=told):
        extracted(guest, tmp_path)
    ended = typed(guest, "extract", str(tmp_path))
    assert (ended.code, re.search(told, ended.err) is not None, ended.err.count("\n")) == (2, True, 1), ended.err


def test_a_right_that_only_registering_needs_is_told(engines, tmp_path):
    owner, guest = engines
    grant(owner, guest, TO_READ)

    with pytest.raises(DatabaseError, match=r"outbox_subscription.* db grants --reader ROLE --register"):
        extracted(guest, tmp_path, register="nightly")

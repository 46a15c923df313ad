"""Settling fails while reading works: what was sent is not sent again and again."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from tenacity import wait_fixed

from outbox import Outbox, Reject, Retry, RetryPolicy
from outbox.model.verdict import DONE
from outbox.store.operations.status import statuses
from outbox.worker import upkeep
from tests.support.destination import Destination, fill, relay_to
from tests.support.waiting import eventually

COUNT = 20
SECONDS = 3.0
#: One full batch may be sent before the first settle is seen to fail; an adverse moment may cost another one.
MOST_OFFERS = 2 * COUNT


FUNCTION = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = '{code}'; END $$
"""
TRIGGER = {
    "postgresql": "CREATE TRIGGER refuse BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()",
    "sqlite": "CREATE TRIGGER refuse BEFORE {event} ON {table} BEGIN SELECT RAISE(ABORT, 'no space left'); END",
}
DROP = {"postgresql": "DROP FUNCTION refuse CASCADE", "sqlite": "DROP TRIGGER refuse"}


@contextmanager
def refused(engine: Engine, table: str, event: str, code: str = "53100") -> Iterator[None]:
    """Writes to a table fail, as on a disk that is full; everything else works."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(FUNCTION.format(code=code)))
        connection.execute(text(TRIGGER[engine.dialect.name].format(event=event, table=table)))
    try:
        yield
    finally:
        assert eventually(lambda: allowed_again(engine), 180)


def allowed_again(engine: Engine) -> bool:
    """Whether writes work again; on a stalled disk SQLite's lock may be held for longer than a writer waits for it."""
    try:
        with engine.begin() as connection:
            connection.execute(text(DROP[engine.dialect.name]))
    except OperationalError:
        return False
    return True


Trouble = Callable[[Engine], AbstractContextManager[None]]

TROUBLES: dict[str, Trouble] = {
    "progress, disk full": lambda engine: refused(engine, "outbox_progress", "INSERT"),
    "progress, any error": lambda engine: refused(engine, "outbox_progress", "INSERT", code="P0001"),
    "what is not done": lambda engine: refused(engine, "outbox_parked", "INSERT"),
}


class Offers(Destination):
    """Counts what it is offered, also what it does not take."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.offered = 0

    def send(self, messages):
        """Count and answer."""
        self.offered += len(messages)
        return super().send(messages)


@pytest.mark.storm
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_what_cannot_be_settled_is_not_sent_again_and_again(engine, trouble, caplog):
    """One message is refused, so that something has to be parked; the others are done."""
    outbox = Outbox(engine)
    destination = Offers(lambda message: Reject("never") if message.body == b"7" else DONE)
    relay = relay_to(destination, outbox)
    relay.start()
    fill(outbox, 1, first=1000)
    assert eventually(lambda: destination.bodies == [b"1000"] and unsettled(engine) == 0)
    with trouble(engine):
        destination.offered = 0
        fill(outbox, COUNT, keys=COUNT)
        assert eventually(lambda: destination.offered >= COUNT)
        time.sleep(SECONDS)
        offered = destination.offered
    settled = eventually(lambda: unsettled(engine) == 0)
    relay.stop()
    relay.join(60)

    assert settled
    assert offered <= MOST_OFFERS
    assert set(destination.bodies) == {b"1000", *(str(n).encode() for n in range(COUNT) if n != 7)}
    assert "settling fails, and nothing is sent until it works again" in caplog.text
    assert "no space left" in caplog.text


@pytest.mark.storm
def test_what_is_refused_at_the_commit_is_not_sent_again_and_again(pg_engine):
    """By a constraint that waits for it."""
    deferred = """
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON outbox_parked DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION refuse()
    """
    outbox, destination = Outbox(pg_engine), Offers(lambda _: Reject("never"))
    relay = relay_to(destination, outbox)
    with pg_engine.begin() as connection:
        connection.execute(text(FUNCTION.format(code="P0001")))
        connection.execute(text(deferred))
    relay.start()
    fill(outbox, COUNT, keys=COUNT)
    assert eventually(lambda: destination.offered >= COUNT)
    time.sleep(SECONDS)
    offered = destination.offered
    with pg_engine.begin() as connection:
        connection.execute(text(DROP["postgresql"]))
    settled = eventually(lambda: parked(pg_engine) == COUNT)
    relay.stop()
    relay.join(60)

    assert settled
    assert offered <= MOST_OFFERS


@pytest.mark.storm
def test_what_was_parked_and_cannot_be_settled_is_not_sent_again_and_again(engine):
    """They are due, they are accepted, and their copies cannot be removed."""
    outbox, destination = Outbox(engine), Offers(lambda _: Retry("not yet"))
    relay = relay_to(destination, outbox, retry=RetryPolicy(attempts=100, wait=wait_fixed(0.1)))
    relay.start()
    fill(outbox, COUNT, keys=COUNT)
    assert eventually(lambda: parked(engine) == COUNT)
    with refused(engine, "outbox_parked", "DELETE"):
        destination.offered = 0
        destination.answer = lambda _: DONE
        assert eventually(lambda: destination.offered >= COUNT)
        time.sleep(SECONDS)
        offered = destination.offered
    settled = eventually(lambda: parked(engine) == 0)
    relay.stop()
    relay.join(60)

    assert settled
    assert offered <= MOST_OFFERS
    assert {*destination.bodies} == {str(n).encode() for n in range(COUNT)}


def test_a_process_that_is_started_again_sends_nothing_before_it_can_settle(engine):
    """What the process before it has seen is forgotten, so it tries for itself."""
    outbox, destination = Outbox(engine), Offers()
    fill(outbox, COUNT, keys=COUNT)
    with refused(engine, "outbox_progress", "INSERT", code="P0001"):
        for _ in range(3):
            with pytest.raises(Exception, match="no space left"):
                relay_to(destination, outbox).until_empty()
        offered = destination.offered
    relay_to(destination, outbox).until_empty()

    assert offered == 0
    assert sorted(map(int, destination.bodies)) == list(range(COUNT))


def test_who_sends_what_there_is_hears_that_it_cannot_be_settled(engine):
    """And sends nothing at the next try, as long as that is so."""
    outbox, destination = Outbox(engine), Offers(lambda _: Reject("never"))
    relay = relay_to(destination, outbox)
    fill(outbox, COUNT, keys=COUNT)
    with refused(engine, "outbox_parked", "INSERT", code="P0001"):
        for _ in range(3):
            with pytest.raises(Exception, match="no space left"):
                relay.until_empty()
        offered = destination.offered
    relay.until_empty()

    assert offered == COUNT
    assert parked(engine) == COUNT


@pytest.mark.storm
@pytest.mark.parametrize("table", ["outbox_inbox", "outbox_dedup"])
def test_a_task_that_is_refused_ends_no_relay(engine, table, caplog, monkeypatch):
    """Neither feature need be in use, nor the right to delete from its table be given."""
    monkeypatch.setattr(upkeep, "PRUNE_EXPIRED", 0.1)
    outbox, destination = Outbox(engine), Destination()
    rows = {
        "outbox_inbox": "(consumer, message_id, handled_at, expires_at) VALUES ('c', :id, :past, :past)",
        "outbox_dedup": "(dedup_key, message_id, expires_at) VALUES ('k', :id, :past)",
    }
    with engine.begin() as connection:
        values = {"id": "0" * 32, "past": "2020-01-01 00:00:00"}
        connection.execute(text(f"INSERT INTO {table} {rows[table]}"), values)
    relay = relay_to(destination, outbox)
    with refused(engine, table, "DELETE", code="42501"):
        relay.start()
        assert eventually(lambda: "cannot delete" in caplog.text)
        time.sleep(1)
        fill(outbox, 1)
        arrived = eventually(lambda: destination.bodies == [b"0"])
        said = [record for record in caplog.records if "cannot delete" in record.getMessage()]
    relay.stop()
    relay.join(60)

    assert arrived
    assert len(said) == 1
    with engine.connect() as connection:
        assert connection.execute(text("SELECT epoch FROM outbox_lease")).scalar_one() == 1, "the relay began anew"


def unsettled(engine: Engine) -> int:
    """How many messages a subscription has not settled, as `outbox status` counts them."""
    database = Outbox(engine).database
    with closing(database.open()) as channel:
        return statuses(channel)[1][0].backlog


def parked(engine: Engine) -> int:
    """How many messages are parked."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outbox_parked")).scalar_one())

"""Relays side by side: whatever happens to one database or one destination, the others go on."""

import logging
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from tenacity import RetryCallState, wait_fixed
from tenacity.wait import wait_base

from outbox import Outbox, SchemaError, create_engine, migrate
from outbox.relay.supervisor import Relays
from outbox.runtime.stop import Stop
from outbox.store.dialects.postgresql.silence import WATCH
from outbox.store.label import label_of, told_apart
from outbox.worker.settings import Until
from tests.conftest import adopt
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import Destination, relay_to
from tests.support.leases import end_lease
from tests.support.servers.proxy import TcpProxy
from tests.support.several import behind, new_database, new_databases, send
from tests.support.waiting import eventually


def relays_of(*pairs, **options) -> Relays:
    """A relay from each outbox to each destination, tried again quickly."""
    relays = [relay_to(destination, outbox) for outbox, destination in pairs]
    return Relays(relays, **{"pause": wait_fixed(0.1), **options})


@contextmanager
def running(relays: Relays):
    """Run in a thread, because the test has something else to do; drained at the end."""
    thread = threading.Thread(target=relays.run, name="outbox-test-relays")
    thread.start()
    try:
        yield relays
    finally:
        relays.stop()
        thread.join(60)
    assert not thread.is_alive()


class Pauses(wait_base):
    """Short pauses between tries, which are counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, retry_state: RetryCallState) -> float:
        """Count one."""
        self.count += 1
        return 0.01


def arrives(destination: Destination, *bodies: str) -> bool:
    """Whether exactly these came."""
    return eventually(lambda: destination.bodies == [body.encode() for body in bodies])


def lease_holders(engine) -> list[str | None]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT owner FROM outbox_lease WHERE lease_until IS NOT NULL")).scalars())


def test_each_outbox_goes_to_its_own_destination(pg_engine, sqlite_engine):
    to_first, to_second = Destination(), Destination()
    send(pg_engine, "1")
    send(sqlite_engine, "2")

    with running(relays_of((Outbox(pg_engine), to_first), (Outbox(sqlite_engine), to_second))):
        came = arrives(to_first, "1"), arrives(to_second, "2")

    assert came == (True, True)
    assert (lease_holders(pg_engine), lease_holders(sqlite_engine)) == ([], [])


def test_until_empty_sends_what_is_there_of_each(pg_engine, sqlite_engine):
    to_first, to_second = Destination(), Destination()
    send(pg_engine, "1", "2")
    send(sqlite_engine, "3")

    relays_of((Outbox(pg_engine), to_first), (Outbox(sqlite_engine), to_second)).until_empty()

    assert (to_first.bodies, to_second.bodies) == ([b"1", b"2"], [b"3"])


def test_once_sends_a_batch_of_each(pg_engine, sqlite_engine):
    to_first, to_second = Destination(), Destination()
    send(pg_engine, *map(str, range(250)))
    send(sqlite_engine, "3")

    relays_of((Outbox(pg_engine), to_first), (Outbox(sqlite_engine), to_second)).once()

    assert (len(to_first.bodies), to_second.bodies) == (200, [b"3"])


def test_what_fails_for_good_is_raised_when_the_others_have_finished(pg_engine, sqlite_engine):
    destination = Destination()
    send(sqlite_engine, "1")
    with pg_engine.begin() as connection:
        connection.execute(text("DROP TABLE outbox_meta"))

    with pytest.raises(ExceptionGroup) as raised:
        relays_of((Outbox(pg_engine), Destination()), (Outbox(sqlite_engine), destination)).until_empty()

    assert ([type(error) for error in raised.value.exceptions], destination.bodies) == ([SchemaError], [b"1"])
    assert raised.value.exceptions[0].__notes__ == [label_of(pg_engine.url)]


def down_from_the_start(proxy: TcpProxy) -> None:
    proxy.refuse()


def silent_from_the_start(proxy: TcpProxy) -> None:
    proxy.black_hole()


@pytest.mark.parametrize("trouble", [down_from_the_start, silent_from_the_start])
def test_a_database_that_is_not_there_at_first_is_served_when_it_is(postgres, pg_template, trouble):
    to_well, to_away = Destination(), Destination()
    with ExitStack() as stack:
        well, away = stack.enter_context(new_databases(postgres, pg_template, 2))
        proxy = stack.enter_context(TcpProxy("127.0.0.1", postgres.port))
        trouble(proxy)
        far = stack.enter_context(behind(proxy, away))
        stack.enter_context(running(relays_of((Outbox(far), to_away), (Outbox(well), to_well))))
        send(well, "1")
        send(away, "2")

        assert arrives(to_well, "1")
        before = to_away.bodies
        proxy.pass_through()
        assert arrives(to_away, "2")

    assert (before, to_well.bodies) == ([], [b"1"])


@pytest.mark.parametrize("trouble", [TcpProxy.refuse, TcpProxy.black_hole])
def test_a_database_that_goes_away_in_the_middle_holds_up_no_other(postgres, pg_template, caplog, trouble):
    """For longer than its lease."""
    to_well, to_away = Destination(), Destination()
    with ExitStack() as stack:
        well, away = stack.enter_context(new_databases(postgres, pg_template, 2))
        proxy = stack.enter_context(TcpProxy("127.0.0.1", postgres.port))
        far = stack.enter_context(behind(proxy, away))
        stack.enter_context(running(relays_of((Outbox(far), to_away), (Outbox(well), to_well))))
        send(well, "1")
        send(away, "2")
        assert arrives(to_well, "1")
        assert arrives(to_away, "2")

        trouble(proxy)
        assert eventually(lambda: proxy.swallowed or "the database is away" in caplog.text)
        end_lease(away)
        send(away, "4")
        for n in range(8):
            send(well, f"during {n}")
            assert arrives(to_well, "1", *(f"during {sent}" for sent in range(n + 1)))
        proxy.pass_through()
        assert eventually(lambda: b"4" in to_away.bodies)

    assert (to_well.bodies[1:], set(to_away.bodies)) == ([f"during {n}".encode() for n in range(8)], {b"2", b"4"})


def test_connections_that_fall_silent_are_given_up(postgres, pg_engine, caplog):
    """They stay open, and new ones are answered: nothing but a deadline of the client's ends such a wait."""
    destination = Destination()
    with ExitStack() as stack:
        proxy = stack.enter_context(TcpProxy("127.0.0.1", postgres.port))
        far = stack.enter_context(behind(proxy, pg_engine))
        stack.enter_context(running(relays_of((Outbox(far), destination))))
        send(pg_engine, "1")
        assert arrives(destination, "1")

        proxy.silence_open()
        send(pg_engine, "2")

        def arrived() -> bool:
            WATCH.look()
            return b"2" in destination.bodies

        assert eventually(arrived)

    assert set(destination.bodies) == {b"1", b"2"}
    assert "the database has not answered for 70 s" in caplog.text


def test_a_database_without_its_tables_is_served_once_it_has_them(postgres, sqlite_engine, caplog):
    """It says what to do, not at every try, and which database is meant."""
    to_new, to_well, pauses = Destination(), Destination(), Pauses()
    with ExitStack() as stack:
        engine = stack.enter_context(new_database(postgres, "template1", adopted=False))
        relays = relays_of((Outbox(engine), to_new), (Outbox(sqlite_engine), to_well), pause=pauses)
        stack.enter_context(running(relays))
        send(sqlite_engine, "1")
        assert arrives(to_well, "1")
        assert eventually(lambda: pauses.count >= 5)
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

        migrate.upgrade(engine)
        send(engine, "2")
        assert arrives(to_new, "2")

    label = label_of(engine.url)
    url = f"'postgresql://{label}?user={engine.url.username}'"
    missing = f"the outbox tables are not there; run: outbox db upgrade --database {url}"
    assert said == [f"{label}: {missing}; relay will try again"]


def test_a_copied_database_is_served_once_it_is_adopted(postgres, pg_template, sqlite_engine):
    to_copy, to_well = Destination(), Destination()
    with ExitStack() as stack:
        copy = stack.enter_context(new_database(postgres, pg_template, adopted=False))
        send(copy, "2")
        stack.enter_context(running(relays_of((Outbox(copy), to_copy), (Outbox(sqlite_engine), to_well))))
        send(sqlite_engine, "1")
        assert arrives(to_well, "1")
        before = to_copy.bodies

        adopt(copy)
        assert arrives(to_copy, "2")

    assert before == []


def test_schemas_of_one_database_have_messages_of_their_own(postgres):
    to_a, to_b = Destination(), Destination()
    with ExitStack() as stack:
        engine = stack.enter_context(new_database(postgres, "template1", adopted=False))
        for tenant in ("tenant_a", "tenant_b"):
            migrate.upgrade(engine, tenant)
        a, b = Outbox(engine, schema="tenant_a"), Outbox(engine, schema="tenant_b")
        stack.enter_context(running(relays_of((a, to_a), (b, to_b))))
        send(engine, "1", "3", schema="tenant_a")
        send(engine, "2", "4", schema="tenant_b")

        assert arrives(to_a, "1", "3")
        assert arrives(to_b, "2", "4")


def test_a_commit_in_one_schema_wakes_the_relay_of_that_schema_alone(postgres):
    """The wake-ups go by the schema's name, so thousands of tenants do not wake each other."""
    with new_database(postgres, "template1", adopted=False) as engine:
        a, b = Outbox(engine, schema="tenant_a"), Outbox(engine, schema="tenant_b")
        listening = [a.database.open(), b.database.open()]
        for channel in listening:
            channel.listen()

        speaking = a.database.open()
        speaking.notify()
        heard = eventually(listening[0].hinted), listening[1].hinted()

        for channel in (*listening, speaking):
            channel.close()
    assert heard == (True, None)


def test_a_slow_destination_delays_only_its_own_outbox(pg_engine, sqlite_engine):
    to_slow, to_quick = Destination(), Destination()
    over = False
    to_slow.hanging = lambda _messages: not over
    send(pg_engine, "1")
    with running(relays_of((Outbox(pg_engine), to_slow), (Outbox(sqlite_engine), to_quick))):
        assert eventually(lambda: to_slow.calls == 1)
        for n in range(10):
            send(sqlite_engine, str(n))
        assert arrives(to_quick, *map(str, range(10)))
        before = to_slow.bodies
        over = True
        assert arrives(to_slow, "1")

    assert before == []


def test_a_destination_that_hangs_ends_no_relay_and_the_others_hear_nothing_of_it(pg_engine, sqlite_engine, caplog):
    """Where a relay alone would end for its supervisor to restart it."""
    to_hanging, to_well = Destination(), Destination()
    over = False
    to_hanging.hanging = lambda _messages: not over
    send(pg_engine, "1", "2", "3", "4", "5", "6")
    hanging = relay_to(overdue_when_hanging(to_hanging), Outbox(pg_engine))
    with running(Relays([hanging, relay_to(to_well, Outbox(sqlite_engine))])):
        assert eventually(lambda: "its call has not come back" in caplog.text)
        send(sqlite_engine, "well")
        assert arrives(to_well, "well")
        over = True
        assert eventually(lambda: sorted(to_hanging.bodies) == [b"1", b"2", b"3", b"4", b"5", b"6"])

    said = [record.getMessage() for record in caplog.records if "has not come back" in record.getMessage()]
    assert {line.partition(": ")[0] for line in said} == {label_of(pg_engine.url)}


@pytest.mark.storm
def test_a_stop_drains_what_answers_and_leaves_behind_what_does_not(postgres, pg_template, caplog):
    destination = Destination()
    with ExitStack() as stack:
        well, away = stack.enter_context(new_databases(postgres, pg_template, 2))
        proxy = stack.enter_context(TcpProxy("127.0.0.1", postgres.port))
        far = stack.enter_context(behind(proxy, away))
        relays = relays_of((Outbox(far), Destination()), (Outbox(well), destination), drain=timedelta(seconds=3))
        with running(relays):
            send(well, "1")
            assert arrives(destination, "1")
            assert eventually(lambda: lease_holders(away) != [])
            proxy.black_hole()
        unfinished, drained = relays.unfinished, eventually(lambda: lease_holders(well) == [])
        proxy.pass_through()
        assert eventually(lambda: relays.unfinished == ())

    assert (label_of(far.url) in unfinished, drained) == (True, True)
    assert f"{label_of(far.url)}: not finished 3 s after it was to stop" in caplog.text


def test_a_stop_ends_the_pause_of_a_relay_that_cannot_work(pg_engine, caplog):
    with pg_engine.begin() as connection:
        connection.execute(text("DROP TABLE outbox_meta"))

    with running(relays_of((Outbox(pg_engine), Destination()), pause=wait_fixed(3600))):
        assert eventually(lambda: "outbox db upgrade" in caplog.text)


def test_a_stop_that_comes_first_is_not_forgotten(pg_engine):
    destination = Destination()
    send(pg_engine, "1")
    relays = relays_of((Outbox(pg_engine), destination))

    relays.stop()
    relays.run()

    assert destination.bodies == []


def test_an_error_that_nobody_foresaw_is_logged_in_full_and_the_relay_tries_again(sqlite_engine, caplog):
    class Odd:
        """A relay that works at the third time."""

        name, label, stopping, tries = "relay", "odd", False, 0

        def work(self, until: Until, stop: Stop) -> None:
            self.tries += 1
            if self.tries < 3:
                raise KeyError("no such thing")

        def close(self) -> None: ...

    odd = Odd()
    Relays([odd], pause=wait_fixed(0.01)).run()

    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = record.getMessage(), record.exc_info is not None
    assert (odd.tries, said) == (3, ("odd: unexpected KeyError; relay will try again", True))


def test_a_relay_that_was_left_behind_is_not_served_again():
    """Its last call fails after everybody has gone."""
    over = threading.Event()

    class Late:
        """A relay whose work goes on after it is told to stop, and fails."""

        name, label, stopping, served, closed = "relay", "late", False, 0, False

        def work(self, until: Until, stop: Stop) -> None:
            self.served += 1
            over.wait(60)
            raise OSError("gone")

        def close(self) -> None:
            self.closed = True

    late = Late()
    relays = Relays([late], pause=wait_fixed(0.01), drain=timedelta(0))
    with running(relays):
        assert eventually(lambda: late.served == 1)
    over.set()

    assert eventually(lambda: late.closed)
    assert late.served == 1


def test_a_stop_that_came_when_one_had_ended_does_not_end_its_next_run(pg_engine, sqlite_engine):
    hanging = threading.Event()
    quick, slow = Destination(), Destination()
    slow.hanging = lambda _messages: not hanging.is_set()
    send(sqlite_engine, "1")
    relays = relays_of((Outbox(pg_engine), quick), (Outbox(sqlite_engine), slow))
    thread = threading.Thread(target=relays.until_empty)
    thread.start()
    assert eventually(lambda: slow.calls == 1 and not relays._supervised[0].alive)
    relays.stop()
    hanging.set()
    thread.join(60)
    send(pg_engine, "2")
    relays.until_empty()

    assert quick.bodies == [b"2"]


def test_no_relay_at_all_is_a_mistake():
    with pytest.raises(ValueError, match="nothing to run"):
        Relays([])


@pytest.mark.parametrize(
    ("url", "schema", "place"),
    [
        ("postgresql+psycopg://ann:secret@db1/shop", None, "db1/shop"),
        ("postgresql://ann:secret@db1:5433/shop?password=secret", "tenant_a", "db1:5433/shop/tenant_a"),
        ("postgresql://ann:secret@/shop?host=db1:5432&host=db2:5432", None, "db1:5432,db2:5432/shop"),
        ("postgresql:///shop", None, "localhost/shop"),
        ("postgresql://?service=shop", None, "shop"),
        ("sqlite:////var/lib/shop.db", None, "/var/lib/shop.db"),
    ],
)
def test_a_place_is_host_name_and_schema_and_nothing_secret(url, schema, place):
    assert label_of(make_url(url), schema) == place


def test_relays_of_one_database_are_told_apart():
    assert told_apart(["db1/shop", "db2/shop", "db1/shop"]) == ["db1/shop", "db2/shop", "db1/shop (2)"]


def test_a_password_is_in_no_line_of_the_log(caplog):
    caplog.set_level(logging.DEBUG, logger="outbox")
    engine = create_engine("postgresql+psycopg://ann:c4nary@127.0.0.1:1/shop")

    with running(relays_of((Outbox(engine), Destination()))):
        assert eventually(lambda: "127.0.0.1:1/shop: the database is away" in caplog.text)

    assert "c4nary" not in caplog.text

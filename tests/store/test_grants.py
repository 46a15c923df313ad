"""The rights that `outbox db grants` prints are enough for a role that has nothing else, and the pages show them."""

import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from outbox import Inbox, Message, Outbox, Reject, Relay, Retry, create_engine, migrate
from outbox.admin.admin import Admin
from outbox.rocketmq import TransactionMQProducer
from outbox.store.idempotency import dedup, inbox
from outbox.store.operations.purge import Purge
from outbox.store.subscriptions.readers import Readers
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker import upkeep
from tests.rocketmq.halves import begun
from tests.rocketmq.parts import COMMIT, GROUP, HALF_TOPIC, Listener, check_back
from tests.support.command_line import outbox as typed
from tests.support.destination import Destination, fill, relay_to
from tests.support.guests import owner_and_guest
from tests.support.pages import TOP, blocks
from tests.support.waiting import eventually

RIGHTS = (TOP / "docs" / "rights.md").read_text()
ROLE = "a b\"C'%s"


@pytest.fixture
def roles(pg_engine: Engine) -> Iterator[tuple[Engine, Engine]]:
    """The owner's engine, and one of a role without any right."""
    with owner_and_guest(pg_engine) as found:
        yield found


def granted(roles: tuple[Engine, Engine], *options: str) -> Outbox:
    """An outbox of the role, with what the command prints."""
    owner, guest = roles
    role = str(guest.url.username)
    statements = typed(None, "db", "grants", *(role if each == "ROLE" else each for each in options))
    allow(owner, statements.out)
    return Outbox(guest)


def allow(owner: Engine, statements: str) -> None:
    with owner.begin() as connection:
        connection.exec_driver_sql(statements)


def rights_on_log(roles: tuple[Engine, Engine]) -> list[str]:
    """What the role may do with a whole row of the log, or with a column that the server draws."""
    owner, guest = roles
    query = text(
        "SELECT p FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS p"
        " WHERE has_table_privilege(:role, 'outbox_message', p) UNION ALL"
        " SELECT p || ' ' || c FROM unnest(ARRAY['INSERT', 'UPDATE']) AS p, unnest(ARRAY['id', 'xact_id']) AS c"
        " WHERE has_column_privilege(:role, 'outbox_message', c, p)"
    )
    with owner.connect() as connection:
        return list(connection.scalars(query, {"role": guest.url.username}))


def test_a_plain_writer_inserts_into_the_log_and_nothing_else(roles):
    with closing(granted(roles, "--writer", "ROLE")) as outbox:
        with outbox.begin() as session:
            outbox.send(session, "orders", b"1", key="a", delay="30m", lock_key=True)
            outbox.send_all(session, [Message("orders", b"2") for _ in range(100)])
        for column in ("xact_id", "created_at"):
            with pytest.raises(ProgrammingError, match="permission denied"), outbox.begin() as session:
                session.execute(text(f"INSERT INTO outbox_message (topic, {column}) VALUES ('orders', NULL)"))
        with pytest.raises(ProgrammingError, match="permission denied") as refused, outbox.begin() as session:
            outbox.send(session, "orders", b"1", dedup_key="one")

    assert refused.value.__notes__ == ["for the rights of each role, run: outbox db grants --writer ROLE --dedup"]
    with roles[0].connect() as connection:
        query = text(
            "SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'public'::regnamespace"
            " AND c.relkind IN ('r', 'S') AND (has_table_privilege(:role, c.oid, 'DELETE, TRUNCATE')"
            " OR c.relkind = 'r' AND has_any_column_privilege(:role, c.oid, 'SELECT, INSERT, UPDATE'))"
        )
        allowed = connection.scalars(query, {"role": roles[1].url.username}).all()
    assert (rights_on_log(roles), allowed) == ([], ["outbox_message"])


def test_a_writer_with_dedup_keys(roles):
    with closing(granted(roles, "--writer", "ROLE", "--dedup")) as outbox, outbox.begin() as session:
        first, again = (outbox.send(session, "orders", b"2", dedup_key="two") for _ in range(2))

    assert first == again


def test_a_reader_that_registers_changes_no_kind_destination_or_policy_of_a_subscription(roles):
    with (
        closing(granted(roles, "--reader", "ROLE", "--register")) as outbox,
        closing(outbox.database.open()) as channel,
    ):
        readers = Readers(channel)
        for hold in (timedelta(days=1), timedelta(days=2)):
            readers.register("archive", archive="/archive", hold=hold)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            channel.run("UPDATE outbox_subscription SET destination = 'elsewhere'")

    with roles[0].connect() as connection:
        held = connection.scalar(text("SELECT hold_ms FROM outbox_subscription WHERE name = 'archive'"))
    assert timedelta(milliseconds=held) == timedelta(days=2)


def test_the_command_that_sends_names_the_right_that_a_writer_lacks_for_it(roles):
    """Only the command has to read how many slots the tables have; an application says so itself."""
    granted(roles, "--writer", "ROLE").close()

    refused = typed(roles[1], "send", "orders", "1")
    with roles[0].begin() as connection:
        connection.exec_driver_sql(f"GRANT SELECT ON outbox_meta TO {roles[1].url.username}")
    sent = typed(roles[1], "send", "orders", "1")

    assert (refused.code, sent.code) == (1, 0)
    assert "a command also reads how many slots the tables have: GRANT SELECT ON outbox_meta TO ROLE" in refused.err
    assert "--writer" not in refused.err


@pytest.mark.storm
def test_a_producer_of_transactions(roles):
    outbox = granted(roles, "--writer", "ROLE", "--transactions")
    producer = TransactionMQProducer(GROUP, outbox, Listener())
    for end in ("commit", "rollback"):
        transaction = producer.begin_transaction()
        transaction.send("orders", b"1")
        getattr(transaction, end)()
    with Session(roles[1]) as session:
        joined = producer.begin_transaction(verdict="join")
        joined.send("orders", b"2")
        joined.join(session)
        session.commit()
    left = producer.begin_transaction()
    left.send("orders", b"3")
    producer.shutdown()
    both = granted(roles, "--writer", "ROLE", "--transactions", "--relay", "ROLE")
    check_back(both, COMMIT)
    both.close()

    with roles[0].connect() as connection:
        found = connection.scalars(text(f"SELECT body FROM outbox_message WHERE topic <> '{HALF_TOPIC}' ORDER BY id"))
        assert list(found) == [b"1", b"2", b"3"]


@pytest.mark.storm
def test_a_producer_with_records_in_the_business_database(roles):
    """In the same database here. The check-back finds the record of one transaction, and fences another."""
    owner, guest = roles
    migrate.upgrade_record(owner)
    (grant,) = re.findall(r"`(GRANT [^`]* outbox_record TO )app`", RIGHTS)
    allow(owner, f"{grant}{guest.url.username}")
    outbox = granted(roles, "--writer", "ROLE", "--transactions", "--relay", "ROLE")
    producer = TransactionMQProducer(GROUP, outbox, business=guest)
    done, left = (producer.begin_transaction(verdict="record") for _ in range(2))
    for each in (done, left):
        each.send("orders", b"1")
    with Session(guest) as session:
        done.join(session)
        session.commit()
    producer.shutdown()
    check_back(outbox, business=guest)
    outbox.close()

    with owner.connect() as connection:
        found = connection.execute(text("SELECT transaction_id, op FROM outbox_op")).all()
    assert dict(map(tuple, found)) == {done.id: "commit", left.id: "rollback"}


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_relay_and_a_consumer(roles, partitions):
    """Poison, retries, another number of partitions, and what they delete besides."""
    owner = Outbox(roles[0])
    with owner.begin() as session:
        for key in "ab":
            for body in (b"bad", b"behind"):
                owner.send(session, "orders", body + key.encode(), key=key)
    outbox = granted(roles, "--relay", "ROLE")
    seen: list[bytes] = []

    def handle(message):
        if message.body == b"badb" and message.attempt < 3:
            return Retry("busy", after=timedelta(milliseconds=1))
        seen.append(message.body)
        return Reject("no") if message.body == b"bada" else None

    def until(count):
        deadline = time.monotonic() + 120
        while len(seen) < count and time.monotonic() < deadline:
            Relay(outbox, handle, name="look").until_empty()

    Relay(outbox, handle, name="look", partitions=partitions).until_empty()
    until(3)
    changed = typed(roles[0], "subscriptions", "alter", "look", "--partitions", "3", "--wait", "0s")
    until(3)
    consumer = outbox.consumer("billing", partitions=partitions)
    consumer.on("orders")(lambda message: seen.append(message.body))
    consumer.until_empty()
    # As /status and /metrics do.
    look = outbox.admin.look()
    with closing(outbox.database.open()) as channel:
        dedup.prune(channel)
        inbox.prune(channel)
        with Subscriptions(channel).changing():
            Subscriptions(channel).drop("billing")

    assert changed.code in (0, 1), changed.err
    assert [each.name for each in look.subscriptions] == ["billing", "look", "relay"]
    assert sorted(seen) == sorted([b"bada", b"badb", b"behindb", b"bada", b"badb", b"behinda", b"behindb"])
    assert rights_on_log(roles) == ["SELECT"]


def test_a_consumer_with_an_inbox_that_sends(roles):
    with Outbox(roles[0]).begin() as session:
        Outbox(roles[0]).send(session, "orders", b"1")
    outbox = granted(roles, "--relay", "ROLE", "--inbox", "--writer", "ROLE")
    consumer = outbox.consumer("billing", inbox=True)
    consumer.on("orders")(lambda session, message: outbox.send(session, "booked", message.body) and None)

    consumer.until_empty()

    with roles[0].connect() as connection:
        sent = connection.scalars(text("SELECT topic FROM outbox_message ORDER BY id")).all()
        known = connection.scalars(text("SELECT consumer FROM outbox_inbox")).all()
    assert (sent, known) == (["orders", "booked"], ["billing"])


def test_a_relay_that_purges(roles, monkeypatch):
    """As the command does, and by its retention; verdicts on transactions go, too."""
    monkeypatch.setattr(upkeep, "PURGE", 0.05)
    owner, _ = roles
    outbox = granted(roles, "--relay", "ROLE", "--purge")
    fill(Outbox(owner), 3)
    relay = relay_to(Destination(), outbox, keep=timedelta(milliseconds=1))
    relay.start()

    def is_empty():
        with owner.connect() as connection:
            return connection.scalar(text("SELECT count(*) FROM outbox_message")) == 0

    gone = eventually(is_empty)
    relay.stop()
    relay.join(60)
    with closing(outbox.database.open()) as channel:
        assert Purge(channel).run(timedelta(0)).rows == 0
    assert (gone, rights_on_log(roles)) == (True, ["SELECT", "DELETE"])


#: The questions of `Outbox.admin`, as a page asks them.
QUESTIONS: tuple[Callable[[Admin], object], ...] = (
    lambda admin: admin.look(),
    lambda admin: admin.statuses("relay"),
    lambda admin: admin.parked(state="dead"),
    lambda admin: admin.parked_count(),
    lambda admin: admin.unread(),
    lambda admin: admin.parked_message(1),
    lambda admin: admin.held(),
    lambda admin: admin.key("a"),
    lambda admin: admin.decisions(),
    lambda admin: admin.half_transactions(),
    lambda admin: admin.half_transactions(given_up=True),
    lambda admin: admin.subscriptions(),
    lambda admin: admin.workers(),
    lambda admin: admin.history("relay"),
    lambda admin: admin.newest(),
    lambda admin: admin.message(1),
    lambda admin: admin.trace(1),
    lambda admin: admin.check(),
)
#: What a page decides, in an order in which each has something to decide on.
DECISIONS: tuple[Callable[[Admin, str, str], object], ...] = (
    lambda admin, *_: admin.pause("relay", rate=5.0),
    lambda admin, *_: admin.resume("relay", key="b"),
    lambda admin, *_: admin.replay(1),
    lambda admin, *_: admin.set_aside(3, reason="no"),
    lambda admin, *_: admin.discard(2, reason="no"),
    lambda admin, one, _: admin.half_commit(one),
    lambda admin, _, other: admin.half_rollback(other),
)
#: Never a page's.
ORDERS: tuple[Callable[[Admin], object], ...] = (
    lambda admin: admin.drop("relay"),
    lambda admin: admin.reset("relay", "latest"),
    lambda admin: admin.purge(timedelta(0)),
    lambda admin: admin.erase(keys=["c"]),
    lambda admin: admin.alter("relay", on_dead="continue"),
    lambda admin: admin.create("other", destination="nats://h:4222"),
)


def answers(calls: Iterable[Callable[..., object]], admin: Admin, *given: str) -> list[str]:
    """The calls that the database refuses."""
    refused = []
    for number, call in enumerate(calls):
        try:
            call(admin, *given)
        except (psycopg.errors.InsufficientPrivilege, ProgrammingError) as error:
            refused.append(f"{number}: {error}")
    return refused


def test_a_dashboard_sees_every_answer_and_decides_nothing_unless_it_may(roles):
    owner, relay = Outbox(roles[0]), Destination(lambda _message: Reject("no"))
    with owner.begin() as session:
        for body, key in (("bad", "a"), ("worse", "c"), ("behind", "a")):
            owner.send(session, "orders", body, key=key, dedup_key=body)
    relay_to(relay, owner).until_empty()
    owner.admin.pause("relay", key="b")
    halves = [begun(roles[0]).id for _ in range(2)]
    before = owner.admin.parked(), owner.admin.subscriptions()

    seeing = granted(roles, "--dashboard", "ROLE").admin
    unseen, refused = answers(QUESTIONS, seeing), answers(DECISIONS, seeing, *halves)
    unchanged = owner.admin.parked(), owner.admin.subscriptions()
    deciding = granted(roles, "--dashboard", "ROLE", "--decide").admin
    forbidden = answers(DECISIONS, deciding, *halves)
    decided = [(each.verb, each.done_at is None) for each in owner.admin.decisions()]
    ordered = answers(ORDERS, deciding)

    assert (unseen, len(refused), unchanged, owner.admin.check()) == ([], len(DECISIONS), before, ())
    assert (forbidden, len(ordered)) == ([], len(ORDERS))
    assert decided == [
        (verb, False) for verb in ("rollback", "commit", "discard", "set_aside", "replay", "resume", "pause", "pause")
    ]


def test_an_inbox_of_a_consumer_and_a_monitor(roles):
    owner, guest = roles
    alone = [block for block in blocks(RIGHTS, "sql") if " TO consumer;" in block or " TO monitor;" in block]
    allow(owner, re.sub(r" TO \w+;", f" TO {guest.url.username};", alone[0]))
    inbox = Inbox(guest, consumer="billing")
    calls: list[object] = []
    for _ in range(2):
        inbox.idempotent(lambda _session, message: calls.append(message))("01a21424-84f2-73bd-9b98-e95f8f7ff396")
    inbox.prune()
    Relay(Outbox(owner), lambda _: None).until_empty()
    allow(owner, re.sub(r" TO \w+;", f" TO {guest.url.username};", alone[1]))
    watched = typed(guest, "status", "--check")

    assert (len(alone), len(calls), watched.code) == (2, 1, 0), watched.err


def test_a_schema_and_a_role_with_odd_names(pg_engine):
    """A writer in a schema; the role's name needs quotes, and is no text of a driver's parameter."""
    migrate.upgrade(pg_engine, "Shop")
    printed = typed(None, "db", "grants", "--writer", ROLE, "--schema", "Shop")
    quoted = '"' + ROLE.replace('"', '""') + '"'
    with pg_engine.begin() as connection:
        connection.connection.cursor().execute(f"CREATE ROLE {quoted} LOGIN".encode())
        connection.connection.cursor().execute(printed.out.encode())
    guest = create_engine(pg_engine.url.set(username=ROLE).render_as_string(hide_password=False))
    with closing(Outbox(guest, schema="Shop")) as outbox, outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    guest.dispose()
    with pg_engine.begin() as connection:
        written = connection.scalar(text('SELECT count(*) FROM "Shop".outbox_message'))
        connection.connection.cursor().execute(f"DROP OWNED BY {quoted}; DROP ROLE {quoted}".encode())

    assert (written, printed.out.count(quoted)) == (1, 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "no role: give --writer, --relay, --front, --reader or --dashboard"),
        (["--relay", "r", "--dedup"], "--dedup is a task of the writer: give --writer ROLE, too"),
        (["--writer", "é" * 32], "the name of a role has 1 to 63 bytes, not 64"),
        (["--writer", ""], "the name of a role has 1 to 63 bytes, not 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, told):
    ended = typed(None, "db", "grants", *options)

    assert (ended.code, told in ended.err) == (2, True), ended.err


def test_the_pages_show_what_the_command_prints():
    shown = re.findall(r"```sh\noutbox (db grants [^\n]*)\n```\n\n```sql\n(.*?)```", RIGHTS, re.DOTALL)

    assert len(shown) == 11
    assert {line: typed(None, *shlex.split(line)).out for line, _ in shown} == dict(shown)

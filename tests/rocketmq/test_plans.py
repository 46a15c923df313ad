"""A transaction costs what it holds, whatever the planner knows: with very many half messages that nobody ended.

Every statement of a transaction and of a checker is run beside them, under every state of the statistics that an
installation goes through, and may touch only so many pages, by the index of half messages or a primary key.
"""

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text

from outbox import Message
from outbox.model.limits import HALF_TOPIC
from outbox.model.parking import Parking
from outbox.store.database import Database
from outbox.store.dialects.statements import _PARAMETER, Sql
from outbox.store.half_messages.half import Half, Halves
from outbox.store.half_messages.op import DecidedHalves, Ops
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.parked import Parked
from outbox.testing.servers import PostgresServer
from tests.store.test_log_plans import nodes
from tests.support.planner_states import planner_states

GROUP, CHECK = "shop", "check:shop"
#: What one transaction touches, and what a checker's batch of 200 does; the tables have many thousands of pages.
MOST_OF_ONE, MOST_OF_A_BATCH = 150, 200 * 12
#: Of a look at what is due, which is sorted and looked at twice; a look at all of it touches a hundred times as many.
MOST_OF_A_CROWD = 200 * 25
#: What nobody has answered is asked again.
ASKED_LATER = Parking(state="retry", holds=True, attempts=2, error="UNKNOWN", delay=timedelta(days=1))
WALKS = {"Seq Scan", "Parallel Seq Scan"}

FILL = f"""
    INSERT INTO outbox_message (message_id, topic, key, slot, tags, headers, body, created_at)
    SELECT gen_random_uuid(), '{HALF_TOPIC}', 'tx-' || n, n % 256, '{GROUP}', :headers, decode(repeat('00', 60), 'hex'),
           now() - interval '1 hour'
    FROM generate_series(1, :rows) AS n
"""
#: Every second transaction has a verdict; some of the others were given up, the rest are to be asked later.
DECIDE = """
    INSERT INTO outbox_op (transaction_id, op, decided_by, decided_at)
    SELECT 'tx-' || n, 'rollback', 'test', now() FROM generate_series(2, :rows, 2) AS n
"""
PARK = f"""
    INSERT INTO outbox_parked (subscription, id, message_id, topic, key, slot, tags, headers, body, created_at, state,
                               unit, place, attempts, due_at, parked_at)
    SELECT '{CHECK}', id, message_id, topic, key, slot, tags, headers, body, created_at,
           CASE WHEN id % :every = 1 THEN 'dead' ELSE 'retry' END, key, 1, 1,
           CASE WHEN id % :every <> 1 THEN now() + interval '1 day' + id * interval '1 millisecond' END, now()
    FROM outbox_message WHERE id % 2 = 1
"""


@pytest.fixture(scope="module")
def rows(full: bool) -> int:
    """How many half messages there are."""
    return 1_000_000 if full else 100_000


@pytest.fixture(scope="module")
def logs(postgres: PostgresServer, pg_template: str, rows: int) -> Iterator[dict[str, Engine]]:
    """The same tables, never analysed, analysed when they were empty, and analysed as they are."""
    with planner_states(postgres, pg_template, partial(fill, rows=rows)) as engines:
        yield engines


def fill(engine: Engine, rows: int, *, analysed_first: bool) -> None:
    """Half messages, of which the planner knows nothing, or what it knew of the empty tables."""
    restored = '{"' + "n" * 80 + '": "1"}'
    headers = Half(transaction="tx", group=GROUP, way="join").headers_of(Message("orders", b""), 256, restored)
    with engine.begin() as connection:
        for table in ("outbox_message", "outbox_op", "outbox_parked"):
            connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = false)"))
        if analysed_first:
            connection.execute(text("ANALYZE"))
        connection.execute(text(FILL), {"headers": headers, "rows": rows})
        connection.execute(text(DECIDE), {"rows": rows})
        # A hundred were given up, however many there are.
        connection.execute(text(PARK), {"every": rows // 100})


#: The tables, and whether the plan is made without looking at the parameters, as PostgreSQL may after some executions.
STATES = {
    "never analysed": ("never", "force_custom_plan"),
    "generic plan, never analysed": ("never", "force_generic_plan"),
    "analysed when empty": ("stale", "force_custom_plan"),
    "generic plan": ("fresh", "force_generic_plan"),
    "fresh statistics": ("fresh", "force_custom_plan"),
}


class Asked:
    """A connection that notes what it is asked, and knows nothing."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.statements: list[tuple[str, dict[str, Any]]] = []

    def rows(self, statement: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        """There are none."""
        self.run(statement, **parameters)
        return []

    def run(self, statement: str, /, **parameters: Any) -> int:
        """It touched none."""
        filled = statement if isinstance(statement, Sql) else self.database.sql(statement)
        self.statements.append((filled, parameters))
        return 0


def of_a_transaction(database: Database, rows: int) -> dict[str, Any]:
    """What a transaction without a verdict does, by its name; each of them a script."""
    ops, halves, open_one = Ops(database), Halves(database), f"tx-{rows // 2 + 1}"
    half, message = Half(transaction=open_one, group=GROUP, way="join"), Message("orders", b"1")
    return {
        "half": halves.append(half, message, 0, "{}"),
        "only half": halves.append(half, message, 0, "{}", only=True),
        "is stored": halves.has(half, message),
        "commit": ops.commit(open_one, by="test", group=GROUP),
        "commit alone": ops.commit_alone(open_one, by="test", group=GROUP),
        "rollback": ops.roll_back(open_one, by="test", group=GROUP),
        "join": ops.join(open_one, by="test"),
        "restore": ops.restore(f"tx-{rows // 2}"),
        "standing": ops.standing(open_one),
    }


def of_a_checker(rows: int) -> dict[str, Any]:
    """What is asked about a batch of half messages, and about what is parked; each called with a connection."""
    keys = [f"tx-{n}" for n in range(1, rows, rows // 200)]
    messages = [Message("orders", b"", key=key) for key in keys]
    return {
        "pending": lambda asked: DecidedHalves(asked).pending(keys, timedelta(seconds=6)),
        "finished": lambda asked: DecidedHalves(asked).finished(messages),
        "dead": lambda asked: DecidedHalves(asked).dead(CHECK, 1000),
        "ready": lambda asked: Parked(asked, CHECK).ready([], 200, 8_000_000),
        "next due": lambda asked: Parked(asked, CHECK).next_due(),
        "fell due": lambda asked: FallingDue(asked, CHECK).due(100),
        "advance": lambda asked: Parked(asked, CHECK).advance(keys),
        "change": lambda asked: Parked(asked, CHECK).change([(n, ASKED_LATER) for n in range(1, rows, rows // 50)]),
    }


ONE = ("half", "only half", "is stored", "commit", "commit alone", "rollback", "join", "restore", "standing")
BATCH = ("pending", "finished", "dead", "ready", "next due", "fell due", "advance", "change")


@dataclass(frozen=True)
class Work:
    """What a statement touched, and how it found the log and the verdicts."""

    pages: int
    walked: frozenset[str]
    indexes: frozenset[str]


def work_of_script(engine: Engine, script: Any, mode: str) -> Work:
    """Run the statements of a script as prepared ones in one transaction, tell what they touched, and undo it."""
    done: list[Work] = []
    with a_connection(engine, mode) as connection, suppress(StopIteration):
        statement = next(script)
        while True:
            done.append(_work(connection, statement.sql, statement.parameters))
            # As if the statement had done what it is for.
            statement = script.send([(str(uuid.UUID(int=0)), None, None, None, None)])
    return Work(
        pages=sum(each.pages for each in done),
        walked=frozenset[str]().union(*(each.walked for each in done)),
        indexes=frozenset[str]().union(*(each.indexes for each in done)),
    )


def work(engine: Engine, statement: str, parameters: dict[str, Any], mode: str) -> Work:
    """Run a statement as a prepared one, tell what it touched, and undo what it did."""
    with a_connection(engine, mode) as connection:
        return _work(connection, statement, parameters)


@contextmanager
def a_connection(engine: Engine, mode: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that plans in this way; what it did is undone."""
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, cursor_factory=psycopg.ClientCursor) as connection:
        connection.execute(f"SET plan_cache_mode = {mode}")
        yield connection
        connection.rollback()


def _work(connection: psycopg.Connection[Any], statement: str, parameters: Any) -> Work:
    names = list(dict.fromkeys(_PARAMETER.findall(statement)))
    numbered = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    places = f"({', '.join(['%s'] * len(names))})" if names else ""
    explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE question {places}"
    connection.execute(f"PREPARE question AS {numbered}")
    found = connection.execute(explain, [parameters[name] for name in names]).fetchone()
    connection.execute("DEALLOCATE question")
    assert found is not None
    plan = found[0][0]["Plan"]
    done = [node for node in nodes(plan) if node.get("Actual Loops")]
    return Work(
        pages=plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
        walked=frozenset(node["Relation Name"] for node in done if node["Node Type"] in WALKS),
        indexes=frozenset(node["Index Name"] for node in done if "Index Name" in node),
    )


#: The index of half messages, and the primary keys.
OF_THE_LOG = {"outbox_message_half", "outbox_message_pkey", "outbox_op_pkey"}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ONE)
def test_a_transaction_costs_the_same_among_very_many_without_a_verdict(logs, rows, name, state):
    log, mode = STATES[state]
    script = of_a_transaction(Database(logs[log]), rows)[name]

    done = work_of_script(logs[log], script, mode)

    assert not done.walked, done
    assert done.indexes <= OF_THE_LOG, done
    assert done.pages <= MOST_OF_ONE, done


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", BATCH)
def test_a_checker_touches_what_it_asks_about(logs, rows, name, state):
    log, mode = STATES[state]
    asked = Asked(Database(logs[log]))
    of_a_checker(rows)[name](asked)

    done = [work(logs[log], statement, parameters, mode) for statement, parameters in asked.statements]

    # A verdict may be looked up by a walk over the verdicts where they are few.
    assert not any(each.walked - {"outbox_op"} for each in done), done
    assert sum(each.pages for each in done) <= MOST_OF_A_BATCH, done


@pytest.mark.storm
@pytest.mark.parametrize("log", ["never", "fresh"])
def test_of_a_crowd_that_is_due_few_are_looked_at(logs, rows, log):
    """All of it fell due at once, because nobody checked for a while; the pages of one look, of all tables."""
    database = Database(logs[log])
    with closing(database.open()) as channel:
        everything = Parked(channel, CHECK)
        channel.run("UPDATE outbox_parked SET due_at = due_at - interval '2 days' WHERE state = 'retry'")
        everything.ready([], 200, 8_000_000)
        before = pages(channel)
        found = everything.ready([], 200, 8_000_000)
        looked_at = pages(channel) - before

    assert [each.message.id for each in found] == [n for n in range(1, 500, 2) if n % (rows // 100) != 1][:200]
    assert looked_at <= MOST_OF_A_CROWD, looked_at


def pages(channel: Any) -> int:
    """How many pages of what is parked were looked at so far."""
    if int(channel.rows("SHOW server_version_num")[0][0]) < 150_000:
        pytest.skip("before PostgreSQL 15 a process cannot ask for its own figures at once")
    channel.rows("SELECT pg_stat_force_next_flush()")
    question = """
        SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read
        FROM pg_statio_user_tables WHERE relname = 'outbox_parked'
    """
    return int(channel.rows(question)[0][0])

"""Reading is bounded by what is read, whatever the planner knows: with 2 million passed rows behind the head.

Each statement of the library is run under every state of the statistics that an installation goes through, and may
touch only so many pages and rows. The statements that come to mind first fail the same check.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text

from outbox.model.lease import Partition
from outbox.model.position import EARLIEST, Position, Progress, Window
from outbox.model.subscription import EVERYTHING, Selection
from outbox.store.database import Channel, Database
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.dialects.statements import _PARAMETER
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import _BODIES, Limits, Log, selected
from outbox.testing.servers import PostgresServer
from tests.support.planner_states import planner_states

LIMIT = 1001
#: One page of the log holds some forty rows; a walk over all of them touches thousands.
MOST_PAGES = 300
MOST_ROWS = 3 * LIMIT
OLD = 1000  # the id, and the transaction, of a row that lies among the passed ones and committed late

COMMON: dict[str, Any] = {
    "inline": 8000, "limit": LIMIT, "hidden": "",
}  # fmt: skip
RARE_TOPIC = Selection(topics=("rare",))
RARE_PATTERN = Selection(topics=("ra*", "!*x"))
RARE_HEADER = Selection(filter="n > 3 AND n < 5")
#: A partition among several; the rows have each slot in turn.
PARTITION = {"partitions": 8, "partition": 5}


@dataclass(frozen=True)
class Case:
    """A statement of the library, the one that comes to mind first, and what both are asked."""

    ours: str
    obvious: str
    parameters: dict[str, Any]
    selection: Selection = EVERYTHING
    slots: Mapping[str, int] | None = None


def cases(rows: int) -> dict[str, Case]:
    """What is read, from a log whose row n was written by transaction n."""
    near_head = {**COMMON, "head": rows - 5, "open": [OLD]}
    backlog = {**COMMON, "head": rows - rows // 7, "target": rows + 1, "open": [rows - 9]}
    first = rows - rows // 7
    small_window = {"head": rows - 2000, "target": rows + 1, "open": [rows - 9], "late": [OLD]}
    return {
        "steady": Case(POSTGRESQL.reads.read_on, OBVIOUS_READ, near_head),
        "rare topic": Case(
            POSTGRESQL.reads.read_on_chosen, OBVIOUS_CHOICE, {**near_head, "head": rows // 2}, RARE_TOPIC
        ),
        "rare pattern": Case(
            POSTGRESQL.reads.read_on_chosen,
            OBVIOUS_PATTERN,
            {**near_head, "head": rows // 2},
            RARE_PATTERN,
        ),
        "page of a pattern": Case(
            POSTGRESQL.reads.page,
            OBVIOUS_PAGE,
            {**backlog, "first": first, "after": first - 1, "upto": first + 2000, "limit": 1000},
            RARE_PATTERN,
        ),
        "first page": Case(
            POSTGRESQL.reads.page,
            OBVIOUS_PAGE,
            {**backlog, "first": first, "after": first - 1, "upto": first + 2000, "limit": 1000},
        ),
        "page with one late row": Case(
            POSTGRESQL.reads.page_late,
            OBVIOUS_LATE_PAGE,
            {
                **backlog, "head": first + 5000, "first": first + 5000, "after": OLD - 1, "upto": first + 5500,
                "late": [OLD], "limit": 1000,
            },
        ),
        "steady, of a partition": Case(
            POSTGRESQL.reads.read_on_chosen, OBVIOUS_SHARE, {**near_head, "head": rows // 2}, slots=PARTITION
        ),
        "page of a partition": Case(
            POSTGRESQL.reads.page,
            OBVIOUS_PAGE,
            {**backlog, "first": first, "after": first - 1, "upto": first + 2000, "limit": 1000},
            slots=PARTITION,
        ),
        "page of a partition with one late row": Case(
            POSTGRESQL.reads.page_late,
            OBVIOUS_LATE_PAGE,
            {
                **backlog, "head": first + 5000, "first": first + 5000, "after": OLD - 1, "upto": first + 5500,
                "late": [OLD], "limit": 1000,
            },
            slots=PARTITION,
        ),
        "steady, of a rare header": Case(
            POSTGRESQL.reads.read_on_chosen, OBVIOUS_FILTER, {**near_head, "head": rows // 2}, RARE_HEADER
        ),
        "page of a rare header": Case(
            POSTGRESQL.reads.page,
            OBVIOUS_PAGE,
            {**backlog, "first": first, "after": first - 1, "upto": first + 2000, "limit": 1000},
            RARE_HEADER,
        ),
        "page of a rare header with one late row": Case(
            POSTGRESQL.reads.page_late,
            OBVIOUS_LATE_PAGE,
            {
                **backlog, "head": first + 5000, "first": first + 5000, "after": OLD - 1, "upto": first + 5500,
                "late": [OLD], "limit": 1000,
            },
            RARE_HEADER,
        ),
        "extent": Case(POSTGRESQL.reads.extent, OBVIOUS_EXTENT, small_window),
    }  # fmt: skip


OBVIOUS_READ = """
    SELECT * FROM {message} WHERE xact_id = ANY(CAST(:open AS bigint[])) OR xact_id >= CAST(:head AS bigint)
    LIMIT :limit
"""
OBVIOUS_CHOICE = """
    SELECT * FROM {message} WHERE xact_id >= CAST(:head AS bigint) AND topic = ANY(CAST(:topics AS text[]))
    ORDER BY xact_id, id LIMIT :limit
"""
OBVIOUS_PATTERN = """
    SELECT * FROM {message} WHERE xact_id >= CAST(:head AS bigint) AND topic LIKE ANY(CAST(:patterns AS text[]))
    ORDER BY xact_id, id LIMIT :limit
"""
OBVIOUS_FILTER = """
    SELECT * FROM {message} WHERE xact_id >= CAST(:head AS bigint)
      AND CAST(CAST(headers AS json) ->> 'n' AS numeric) BETWEEN CAST(:f0 AS numeric) AND CAST(:f1 AS numeric)
    ORDER BY xact_id, id LIMIT :limit
"""
OBVIOUS_SHARE = """
    SELECT * FROM {message} WHERE xact_id >= CAST(:head AS bigint)
      AND slot % CAST(:partitions AS integer) = CAST(:partition AS integer)
    ORDER BY xact_id, id LIMIT :limit
"""
OBVIOUS_PAGE = """
    SELECT * FROM {message} WHERE id > CAST(:after AS bigint)
      AND xact_id >= CAST(:head AS bigint) AND xact_id < CAST(:target AS bigint)
      AND xact_id <> ALL (CAST(:open AS bigint[]))
    ORDER BY id LIMIT :limit
"""
OBVIOUS_LATE_PAGE = """
    SELECT * FROM {message} WHERE id > CAST(:after AS bigint) AND id <= CAST(:upto AS bigint)
      AND (xact_id = ANY(CAST(:late AS bigint[]))
           OR (xact_id + 0 >= CAST(:head AS bigint) AND xact_id + 0 < CAST(:target AS bigint)))
    ORDER BY id LIMIT :limit
"""
OBVIOUS_EXTENT = """
    SELECT min(id), max(id) FROM {message}
    WHERE xact_id >= CAST(:head AS bigint) AND xact_id < CAST(:target AS bigint)
"""

CASES = tuple(cases(0))

FILL = """
    INSERT INTO outbox_message (xact_id, message_id, topic, key, slot, headers, body)
    SELECT n, gen_random_uuid(), CASE WHEN n % 50000 = 7 THEN 'rare' ELSE 'orders' END, 'k' || n % 1000, n % 256,
           '{{"n":"' || n || '"}}',
           decode(repeat('00', 60), 'hex')
    FROM generate_series(1, {rows}) AS n
"""


@pytest.fixture(scope="module")
def rows(full: bool) -> int:
    """How many rows have been passed."""
    return 2_000_000 if full else 200_000


@pytest.fixture(scope="module")
def logs(postgres: PostgresServer, pg_template: str, rows: int) -> Iterator[dict[str, Engine]]:
    """The same log, never analysed, analysed when it was empty, and analysed as it is."""
    with planner_states(postgres, pg_template, partial(fill, rows=rows)) as engines:
        yield engines


def fill(engine: Engine, rows: int, *, analysed_first: bool) -> None:
    """Passed rows, of which the planner knows nothing, or what it knew of the empty table."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox_message SET (autovacuum_enabled = false)"))
        if analysed_first:
            connection.execute(text("ANALYZE outbox_message"))
        connection.execute(text(FILL.format(rows=rows)))
        connection.execute(
            text("SELECT setval(pg_get_serial_sequence('outbox_message', 'id'), :rows)"), {"rows": rows or 1}
        )


#: The log, and whether the plan is made without looking at the parameters, as PostgreSQL may after some executions.
STATES = {
    "never analysed": ("never", "force_custom_plan"),
    "analysed when empty": ("stale", "force_custom_plan"),
    "generic plan": ("fresh", "force_generic_plan"),
    "fresh statistics": ("fresh", "force_custom_plan"),
}


@dataclass(frozen=True)
class Work:
    """What a statement touched."""

    pages: int
    rows: int
    scans: frozenset[str]

    @property
    def bounded(self) -> bool:
        """Whether it touched little more than what it was asked for."""
        return self.pages <= MOST_PAGES and self.rows <= MOST_ROWS and "Seq Scan" not in self.scans


def work_of(engine: Engine, template: str, case: Case, mode: str) -> Work:
    """Run a statement of a case."""
    chosen = selected(POSTGRESQL.values, case.selection, case.slots)
    statement = Database(engine).sql(template, chosen=chosen.sql)
    return work(engine, statement, {**chosen.parameters, **case.parameters}, mode)


def work(engine: Engine, statement: str, parameters: dict[str, Any], mode: str) -> Work:
    """Run a statement as a prepared one, and tell what it touched."""
    names = list(dict.fromkeys(_PARAMETER.findall(statement)))
    numbered = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    places = ", ".join(["%s"] * len(names))
    explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE question ({places})"
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, cursor_factory=psycopg.ClientCursor) as connection:
        connection.execute(f"SET plan_cache_mode = {mode}")
        connection.execute(f"PREPARE question AS {numbered}")
        found = connection.execute(explain, [parameters[name] for name in names]).fetchone()
    assert found is not None
    plan = found[0][0]["Plan"]
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "outbox_message"]
    return Work(
        pages=plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
        rows=sum(touched(node) for node in scans),
        scans=frozenset(node["Node Type"] for node in scans),
    )


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan and all plans below it."""
    yield plan
    for below in plan.get("Plans", []):
        yield from nodes(below)


def touched(scan: dict[str, Any]) -> int:
    """The rows that a scan looked at, also those that it threw away."""
    thrown_away = scan.get("Rows Removed by Filter", 0) + scan.get("Rows Removed by Index Recheck", 0)
    return int((scan["Actual Rows"] + thrown_away) * scan["Actual Loops"])


@pytest.mark.parametrize("state", STATES)
def test_a_read_touches_what_it_brings(logs, rows, state):
    log, mode = STATES[state]

    done = {name: work_of(logs[log], case.ours, case, mode) for name, case in cases(rows).items()}

    assert {name: each for name, each in done.items() if not each.bounded} == {}


@pytest.mark.parametrize("state", STATES)
def test_large_bodies_are_fetched_by_the_primary_key(logs, rows, state):
    log, mode = STATES[state]
    parameters = {"ids": list(range(1, rows, rows // 100)), "bytes": 10_000_000}

    done = work(logs[log], Database(logs[log]).sql(_BODIES), parameters, mode)

    # A hundred ids far apart, each looked up twice: three pages of the index and one of the table.
    assert done.pages <= 2 * 100 * 5, done
    assert done.rows <= MOST_ROWS, done
    assert "Seq Scan" not in done.scans, done


@pytest.mark.parametrize("name", CASES)
def test_the_obvious_statement_walks_the_log(logs, rows, name):
    """Under at least one state of the statistics; which one differs from case to case."""
    case = cases(rows)[name]

    done = {state: work_of(logs[log], case.obvious, case, mode) for state, (log, mode) in STATES.items()}

    assert not all(each.bounded for each in done.values()), done


@pytest.mark.parametrize("log", ["never", "stale", "fresh"])
@pytest.mark.parametrize("partition", [None, Partition("relay", 1, 5, 8)])
@pytest.mark.parametrize("topics", [None, ("rare",), ("ra*", "!*x")])
def test_reading_on_stays_bounded_when_the_driver_has_prepared_it(logs, rows, log, topics, partition):
    """Psycopg prepares a statement that comes often, and PostgreSQL may then plan it once and for all."""
    database = Database(logs[log])
    channel = database.open()
    reader = Log(selection=Selection(topics=topics), partition=partition)
    for _ in range(12):
        reader.read_on(channel, Position(rows - 5, (OLD,)))

    before = pages_of_the_log(channel)
    reading = reader.read_on(channel, Position(rows - 5, (OLD,)))
    after = pages_of_the_log(channel)
    channel.close()

    assert (reading.seen, reading.complete) == (7, True)
    assert after - before <= MOST_PAGES


@pytest.mark.parametrize(
    ("topics", "partition"),
    [(None, None), (("rare",), None), (("ra*", "!*x"), None), (None, Partition("relay", 1, 5, 8))],
)
@pytest.mark.parametrize(
    "first",
    [pytest.param(0, marks=pytest.mark.storm), 1, *(pytest.param(rows, marks=pytest.mark.storm) for rows in (20, 200))],
)
def test_reading_on_beside_an_open_writer_stays_bounded_when_it_was_planned_on_a_small_log(
    pg_engine, topics, partition, first
):
    """So every installation begins: PostgreSQL plans the statement then, and goes on with that plan."""
    head, open_one = 100_000, 99_990
    channel = Database(pg_engine).open()
    reader = Log(selection=Selection(topics=topics), partition=partition)
    fill(pg_engine, first, analysed_first=False)
    with pg_engine.begin() as connection:
        connection.execute(text("ANALYZE outbox_message"))
    for _ in range(12):
        reader.read_on(channel, Position(head, (open_one,)))
    with pg_engine.begin() as connection:
        connection.execute(text(FILL.format(rows=60_000).replace("SELECT n,", f"SELECT {head} + n,")))

    before = pages_of_the_log(channel)
    reading = reader.read_on(channel, Position(head + 59_995, (open_one,)))
    after = pages_of_the_log(channel)
    channel.close()

    assert (reading.seen, reading.complete) == (6, True)
    assert after - before <= MOST_PAGES


def pages_of_the_log(channel: Channel) -> int:
    """How many pages of the log and its indexes were looked at so far."""
    if int(channel.rows("SHOW server_version_num")[0][0]) < 150_000:
        pytest.skip("before PostgreSQL 15 a process cannot ask for its own figures at once")
    channel.rows("SELECT pg_stat_force_next_flush()")
    question = """
        SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read
        FROM pg_statio_user_tables WHERE relname = 'outbox_message'
    """
    return int(channel.rows(question)[0][0])


@pytest.mark.parametrize("partition", [None, Partition("relay", 1, 5, 8)])
@pytest.mark.parametrize("log", ["never", "stale", "fresh"])
def test_a_backlog_is_paged_at_the_same_price_from_the_first_page_to_the_last(logs, rows, log, partition):
    """With late rows far apart among the passed ones; every row of the window comes once, in order."""
    database = Database(logs[log])
    channel = database.open()
    base, target = Position(rows - 40_000, (OLD, rows // 2)), Position(rows + 1)
    extent = Log().extent(channel, Window(base, target))
    cursor = Cursor(Log(Limits(rows=1000), partition=partition), Progress(base, target, -1))

    ids: list[int] = []
    price_of_pages: list[int] = []
    done = False
    while not done:
        before = pages_of_the_log(channel)
        batch = cursor.read(channel)
        if len(batch.messages) == 1000:
            price_of_pages.append(pages_of_the_log(channel) - before)
        ids += [message.id or 0 for message in batch.messages]
        done = batch.end == Progress(target)
    channel.close()

    window = [OLD, rows // 2, *range(rows - 40_000, rows + 1)]
    assert ids == [n for n in window if partition is None or partition.owns(n % 256)]
    assert (extent.first, extent.last) == (OLD, rows)
    # The first one after a thin stretch looks too far ahead; what counts is that the others do not. A full page of a
    # partition costs what the pages of all partitions cost together.
    most = MOST_PAGES * (1 if partition is None else partition.partitions)
    assert median(price_of_pages) <= most, price_of_pages


@pytest.mark.parametrize("begun", [True, False])
def test_a_window_is_read_without_a_pass_over_its_index(logs, rows, begun):
    """A consumer that asks again and again takes the lease each time; a new one reads the log from its beginning."""
    database = Database(logs["fresh"])
    base, after = (Position(rows - 40_000), rows - 20_000) if begun else (EARLIEST, -1)
    with closing(database.open()) as channel:
        cursor = Cursor(Log(Limits(rows=1000)), Progress(base, Position(rows + 1), after))

        before = pages_of_the_log(channel)
        batch = cursor.read(channel)
        touched_pages = pages_of_the_log(channel) - before

    first = after + 1 if begun else 1
    assert [message.id for message in batch.messages] == list(range(first, first + 1000))
    assert touched_pages <= MOST_PAGES / 3

"""A year of an outbox in a minute: the log keeps the size of its retention, and nobody waits for the purge.

Time runs faster: a day of the story takes 164 ms, so that a year takes a minute, and a retention of 7 days 1.15 s. Of a
million messages a day 150 are written, one of 6 667. So rows come and go at 913 a second, which is 79 times the rate of
a million a day: the purge has more to do in each second than it would have, and a log of 1 050 rows in place of 7
million. That the cost of a batch does not grow with the log, the benchmark `keep_vs_drain` shows at a million rows.
Where autovacuum would have come, a vacuum does: when a fifth of the table is dead, every second day.
"""

import time
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Message, Outbox
from outbox.worker import upkeep
from tests.support.destination import Destination, relay_to
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

DAY_SECONDS = 60.0 / 365
KEPT_DAYS, MESSAGES_A_DAY = 7, 150


def figures(outbox: Outbox) -> tuple[int, int]:
    """The rows of the log, and its size in bytes."""
    size = "pg_total_relation_size('outbox_message')"
    if outbox.engine.dialect.name == "sqlite":
        size = "(SELECT page_count * page_size FROM pragma_page_count, pragma_page_size)"
    with outbox.engine.connect() as connection:
        rows, size = connection.execute(text(f"SELECT count(*), {size} FROM outbox_message")).one()
        return int(rows), int(size)


@pytest.mark.timeout(900)
def test_a_year_of_messages_in_a_minute(engine, full, monkeypatch):
    """Two months, at full scale a year: the second half is no larger than the first, and every message arrives."""
    monkeypatch.setattr(upkeep, "PURGE", DAY_SECONDS / 2)
    monkeypatch.setattr(upkeep, "PRUNE_AGAIN", 0.01)
    outbox, destination = Outbox(engine), Destination()
    days = 365 if full else 60
    keep = timedelta(seconds=KEPT_DAYS * DAY_SECONDS)
    relay = relay_to(destination, outbox, keep=keep)
    sizes, slowest = list[tuple[int, int]](), 0.0
    relay.start()
    try:
        began = time.monotonic()
        for day in range(days):
            before = time.monotonic()
            with outbox.begin() as session:
                outbox.send_all(session, [Message("orders", str(n), key=f"k{n % 20}") for n in range(MESSAGES_A_DAY)])
            slowest = max(slowest, time.monotonic() - before)
            if engine.dialect.name == "postgresql" and day % 2:
                with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    connection.execute(text("VACUUM outbox_message"))
            sizes.append(figures(outbox))
            time.sleep(max(0.0, began + (day + 1) * DAY_SECONDS - time.monotonic()))
        arrived = eventually(lambda: len(destination.messages) == days * MESSAGES_A_DAY)
        empty = eventually(lambda: figures(outbox)[0] == 0)
    finally:
        relay.stop()
        relay.join(60)

    (warm, later) = (sizes[days // 4 : days // 2], sizes[days // 2 :])
    print(
        f"rows and bytes: {max(warm)} in the second quarter, {max(later)} later; slowest write {slowest * 1000:.0f} ms"
    )
    assert (arrived, empty) == (True, True)
    # A busy machine purges late; a log that nobody purges has all rows.
    assert max(rows for rows, _ in sizes) < days * MESSAGES_A_DAY / 2
    assert max(size for _, size in later) <= 2 * max(size for _, size in warm)

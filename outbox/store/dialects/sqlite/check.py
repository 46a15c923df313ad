"""The check of an outbox on SQLite: whether ids are drawn once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from sqlalchemy import Connection, MetaData, text

from outbox.store.dialects.finding import Finding, given_again

_DRAWN = "SELECT max(seq) FROM sqlite_sequence WHERE name = 'outbox_message'"
_HAS_SEQUENCES = "SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_sequence'"


def check_tables(connection: Connection, _metadata: MetaData, present: Collection[str]) -> Iterator[Finding]:
    """Find a log whose ids could be given out twice."""
    if "outbox_message" not in present:
        return
    made = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'outbox_message'")).scalar_one()
    if "AUTOINCREMENT" not in made.upper():
        yield Finding("outbox_message.id", "is without AUTOINCREMENT, so ids would be given out twice", "make it anew")


def check_ids(connection: Connection, _names: Mapping[str, str], where: str, highest: int) -> Iterator[Finding]:
    """Find a sequence that would draw ids again. `where` is the column with the highest id."""
    if connection.execute(text(_HAS_SEQUENCES)).scalar_one():
        drawn = connection.execute(text(_DRAWN)).scalar_one()
        mend = (
            f"INSERT INTO sqlite_sequence (name, seq) VALUES ('outbox_message', {highest})"
            if drawn is None
            else f"UPDATE sqlite_sequence SET seq = {highest} WHERE name = 'outbox_message'"
        )
        yield from given_again(drawn or 0, where, highest, mend)

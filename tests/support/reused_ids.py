"""A log whose ids begin again, while what is known by the ids from before stands still."""

from sqlalchemy import Engine, text

#: As with TRUNCATE … RESTART IDENTITY. On SQLite, where positions are ids, workers would refuse to go on behind theirs.
_BEGIN_AGAIN = {
    "postgresql": ("TRUNCATE outbox_message RESTART IDENTITY",),
    "sqlite": (
        "DELETE FROM outbox_message",
        "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'outbox_message'",
        "UPDATE outbox_progress SET base = '0:0:', target = NULL, after_id = NULL",
    ),
}


def begin_again(engine: Engine) -> None:
    """Empty the log by hand; its next message has id 1."""
    with engine.begin() as connection:
        for statement in _BEGIN_AGAIN[engine.dialect.name]:
            connection.execute(text(statement))

"""A decision that raises has changed nothing, whichever right its role lacks."""

from collections.abc import Callable
from contextlib import closing

import pytest
from psycopg.errors import InsufficientPrivilege
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Reject, Relay
from outbox.admin.admin import Admin
from tests.support.guests import allow, owner_and_guest

RIGHTS = {
    "outbox_meta": ("SELECT",),
    "outbox_lease": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "outbox_subscription": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "outbox_parked": ("SELECT", "UPDATE", "DELETE"),
    "outbox_progress": ("SELECT", "INSERT", "DELETE"),
}
DECISIONS: dict[str, Callable[[Admin], object]] = {
    "pause": lambda admin: admin.pause("shop", rate=1),
    "resume": lambda admin: admin.resume("shop", key="a"),
    "create": lambda admin: admin.create("audit", destination="nats://h:4222"),
    "alter": lambda admin: admin.alter("shop", topics=["orders"], on_dead="continue"),
    "partitions": lambda admin: admin.alter("shop", partitions=2),
    "split": lambda admin: admin.split("shop", ["mail"], destination="nats://h:4222"),
    "backfill": lambda admin: admin.backfill("shop", ["orders"]),
    "reset": lambda admin: admin.reset("shop", "earliest"),
    "drop": lambda admin: admin.drop("shop"),
    "replay": lambda admin: admin.replay(all=True),
    "discard": lambda admin: admin.discard(all=True, reason="a test"),
}


#: A failed decision may leave an epoch of a lease behind.
CHANGED = " OR ".join(
    f"EXISTS (TABLE {one} EXCEPT TABLE {other})"
    for table in ("outbox_subscription", "outbox_parked", "outbox_progress")
    for one, other in ((table, f"saved_{table}"), (f"saved_{table}", table))
)
PUT_BACK = ";".join(f"DELETE FROM {table}; INSERT INTO {table} TABLE saved_{table}" for table in RIGHTS)


@pytest.mark.storm
def test_a_role_that_lacks_a_right_changes_nothing(pg_engine):
    """Each decision is tried with each right missing, on a subscription with dead letters and a paused key."""
    with owner_and_guest(pg_engine) as (owner, guest), closing(Outbox(guest)) as outbox:
        make_shop(owner)
        allow(owner, "ALL")
        needed: dict[str, set[str]] = {verb: set() for verb in DECISIONS}
        for table, rights in RIGHTS.items():
            for right in rights:
                allow(owner, *set(rights) - {right}, table=table)
                for verb, decision in DECISIONS.items():
                    try:
                        decision(outbox.admin)
                    except InsufficientPrivilege:
                        needed[verb].add(f"{right} {table}")
                    with owner.begin() as connection:
                        changed = connection.scalar(text(f"SELECT {CHANGED}"))
                        connection.exec_driver_sql(PUT_BACK if changed else "SELECT")
                    assert changed is (f"{right} {table}" not in needed[verb]), (verb, right, table)
            allow(owner, "ALL", table=table)

    assert all("SELECT outbox_lease" in each for each in needed.values()), needed
    assert needed["discard"] - needed["replay"] == {"DELETE outbox_parked"}


def make_shop(owner: Engine) -> None:
    """Two dead letters, a paused key, and a copy of the tables."""
    with closing(Outbox(owner)) as outbox:
        outbox.admin.drop("relay")
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"1"), Message("mail", b"2")])
        Relay(outbox, lambda _message: Reject("no"), name="shop", topics=["orders", "mail"]).until_empty()
        outbox.admin.pause("shop", key="a")
    with owner.begin() as connection:
        for table in RIGHTS:
            connection.execute(text(f"CREATE TABLE saved_{table} AS TABLE {table}"))

"""Messages inside of Django's transactions, on Django's own connections.

    with transaction.atomic():
        order = Order.objects.create(customer="ann", total=42)
        outbox.django.send("orders", {"id": order.pk}, key=f"order-{order.pk}")

Add `"outbox.django"` to `INSTALLED_APPS`, and run `manage.py migrate` and `manage.py outbox relay --to URL`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from uuid import UUID

from django.db import connections, transaction
from sqlalchemy.pool import NullPool

from outbox.django.databases import url_of
from outbox.errors import NoTransactionError, TransactionAbortedError
from outbox.outbox import Outbox
from outbox.runtime.failpoints import crash_point
from outbox.store.database import FAILED
from outbox.writing.engines import create_engine

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from outbox.model.message import Message, MessageFields

__all__ = ["outbox_on", "send", "send_all"]

R = TypeVar("R")

#: Marks a connection of Django whose commits are watched.
_WATCHED = "_outbox_watches"


def send(
    topic: str, body: object, *, using: str | None = None, lock_key: bool = False, **fields: Unpack[MessageFields]
) -> UUID:
    """Append one message in the running transaction of Django, and return its id.

    Args:
        topic, body, lock_key and fields: as for `Outbox.send`. Save the row that orders the key before.
        using: the alias of the database in Django's settings; None: "default".

    Raises:
        InvalidMessageError: a field breaks a limit; raised before any SQL.
        NoTransactionError: the code is not inside of `transaction.atomic()`.
        TransactionManagementError: Django's, if an error has broken the atomic block.
    """
    return _written(using, lambda outbox, driver: outbox.send(driver, topic, body, lock_key=lock_key, **fields))


def send_all(messages: Iterable[Message], *, using: str | None = None, lock_keys: bool = False) -> list[UUID]:
    """Append any number of messages in few statements, and return their ids in order; see `send`."""
    return _written(using, lambda outbox, driver: outbox.send_all(driver, messages, lock_keys=lock_keys))


def outbox_on(using: str | None = None) -> Outbox:
    """Return the outbox on a database of Django's settings: for a relay, an inbox, consumers, and `outbox.admin`."""
    return _outbox_at(url_of(connections[using or "default"]).render_as_string(hide_password=False))


# One for each database, because a test run gives the same alias another database.
@lru_cache(maxsize=16)
def _outbox_at(url: str) -> Outbox:
    return Outbox(create_engine(url, poolclass=NullPool))


def _written(using: str | None, write: Callable[[Outbox, Any], R]) -> R:
    connection = transaction.get_connection(using)
    if not connection.in_atomic_block:
        raise NoTransactionError(_why_none(connection))
    connection.ensure_connection()
    connection.validate_no_broken_transaction()
    outbox = outbox_on(connection.alias)
    written = write(outbox, connection.connection)
    _watch(connection, outbox)
    return written


def _why_none(connection: BaseDatabaseWrapper) -> str:
    """Return why there is no atomic block on a connection, and the fix."""
    alias = connection.alias
    others = [each.alias for each in connections.all(initialized_only=True) if each.in_atomic_block]
    if others:
        return (
            f"transaction.atomic() runs on {' and '.join(map(repr, others))}, not on {alias!r}; send with"
            f" using={others[0]!r}, or inside of transaction.atomic(using={alias!r})"
        )
    if _in_event_loop():
        return (
            "a coroutine is in no transaction of Django, whose connections belong to threads; put transaction.atomic()"
            " and send into one function, and call the function by sync_to_async"
        )
    if not connection.get_autocommit():
        return (
            f"autocommit is off for {alias!r}, and Django tells nobody about the end of such a transaction; send inside"
            " of transaction.atomic()"
        )
    return (
        "outside of transaction.atomic() Django commits every statement, so the message would outlive a rollback;"
        " send inside of it, or set ATOMIC_REQUESTS"
    )


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _watch(connection: BaseDatabaseWrapper, outbox: Outbox) -> None:
    """Check the commit of the running transaction, and wake workers after it."""
    if not hasattr(connection, _WATCHED):
        setattr(connection, _WATCHED, _Watch(connection))
    watch: _Watch = getattr(connection, _WATCHED)
    watch.outbox = outbox
    if not watch.is_due:
        connection.on_commit(watch.committed, robust=True)


class _Watch:
    """Watches the commits of one connection of Django."""

    outbox: Outbox

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._commit = connection.commit
        connection.commit = self._checked_commit

    @property
    def is_due(self) -> bool:
        """True while messages of the running transaction wait for its commit.

        Django forgets what is to be done after the commit when a savepoint or the transaction is rolled back.
        """
        return any(function == self.committed for _, function, *_ in self._connection.run_on_commit)

    def _checked_commit(self) -> None:
        """Commit, unless PostgreSQL would make a silent rollback of it, because an error was swallowed in the block."""
        if not self.is_due:
            self._commit()
            return
        if self.outbox.database.dialect.driving.is_aborted(self._connection.connection):
            self._connection.rollback()
            raise TransactionAbortedError(FAILED)
        crash_point("outbox.before_commit")
        self._commit()
        crash_point("outbox.after_commit")

    def committed(self) -> None:
        """Wake workers by Django's own connection, because one of ours would keep a test database in use."""
        database = self.outbox.database
        if database.dialect.driving.notifies:
            with self._connection.cursor() as cursor:
                cursor.execute(f'NOTIFY "{database.wake_up_name}"')
        else:
            self.outbox.wake()

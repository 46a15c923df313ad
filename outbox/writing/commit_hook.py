"""Hooks into the place where a transaction really ends: SQLAlchemy's dialect commits the driver's connection there.

SQLAlchemy's events are not used: a single listener on an engine makes SQLAlchemy look for listeners at every statement
of the application, and no event comes after the commit. An engine is prepared once for all outboxes. A connection
stores what was sent in its transaction, by listener. So nothing here keeps an outbox alive, and a commit asks only the
outboxes that have sent.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InvalidRequestError

from outbox.errors import TransactionAbortedError
from outbox.model.message import Message
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.named import named
from outbox.store.dialects.dialect import Driving
from outbox.writing.sent import Sent

#: The key in a connection's `info` of what was sent in its transaction, by listener.
_SENT = object()

_ABORTED = (
    "a statement of this transaction failed, so its COMMIT is a silent ROLLBACK and the message would be lost; roll"
    " back, or use a savepoint around what may fail"
)

_FORGOTTEN = (
    "a transaction in which messages were sent was rolled back: it ended without a commit, an error or a call of"
    " rollback(), so its messages are gone; commit it, for example by `with Session(engine) as session,"
    " session.begin():` (logged once a process)"
)
logger = logging.getLogger("outbox")
#: Whether this process has logged a forgotten commit.
_forgotten_told = False

_prepared: weakref.WeakSet[Any] = weakref.WeakSet()
_VERBS = (
    "do_commit", "do_rollback", "do_prepare_twophase", "do_commit_twophase", "do_rollback_twophase",
    "do_savepoint", "do_release_savepoint", "do_rollback_to_savepoint",
)  # fmt: skip


class CommitListener(Protocol):
    """Learns how transactions with messages end. Never raises."""

    def committed(self, sent: Sent, since: float) -> None:
        """Act on a commit; `since`: a moment before the commit, by `clock`."""

    def rolled_back(self, messages: Sequence[Message]) -> None:
        """Act on the rollback of messages, with the whole transaction or with a savepoint."""


def sent_so_far(listener: CommitListener, connection: Connection) -> Sent | None:
    """Return what a listener has sent in the running transaction; None: nothing."""
    everyone: dict[CommitListener, Sent] = _info_of(connection).get(_SENT, {})
    return everyone.get(listener)


def sent_by(listener: CommitListener, connection: Connection) -> Sent:
    """Return what a listener has sent in the running transaction; the caller may add to the result."""
    everyone: dict[CommitListener, Sent] = connection.info.setdefault(_SENT, {})
    sent = everyone.get(listener)
    if sent is None:
        sent = everyone[listener] = Sent()
    return sent


def has_sent(connection: Connection) -> bool:
    """Return whether a listener has sent messages in the running transaction."""
    return bool(_info_of(connection).get(_SENT))


def savepoint_set(connection: Connection, name: str) -> None:
    """Note a savepoint in the running transaction."""
    for sent in _info_of(connection).get(_SENT, {}).values():
        sent.set_savepoint(name)


def savepoint_released(connection: Connection, name: str) -> None:
    """Note the release of a savepoint; all later messages stay."""
    for sent in _info_of(connection).get(_SENT, {}).values():
        sent.release(name)


def rolled_back_to(connection: Connection, name: str) -> None:
    """Tell which messages a rollback to a savepoint has undone."""
    for listener, sent in _info_of(connection).get(_SENT, {}).items():
        listener.rolled_back(sent.roll_back_to(name))


def prepare(engine: Engine, driving: Driving) -> None:
    """Notice the commits on an engine, and on its copies with other execution options."""
    if engine.dialect not in _prepared:
        _prepared.add(engine.dialect)
        hook = _Hook(engine.dialect, driving)
        for verb in _VERBS:
            setattr(engine.dialect, verb, getattr(hook, verb))


class _Hook:
    """Replaces eight methods of a dialect, and calls the original ones."""

    def __init__(self, dialect: Any, driving: Driving) -> None:
        self._dialect = dialect
        self._driving = driving
        (
            self._commit, self._roll_back, self._prepare, self._commit_prepared, self._roll_back_prepared,
            self._set_savepoint, self._release_savepoint, self._roll_back_to_savepoint,
        ) = (getattr(dialect, verb) for verb in _VERBS)  # fmt: skip

    def do_commit(self, pooled: Any) -> None:
        everyone = self._about_to_commit(pooled, "rollback")
        if not everyone:
            self._commit(pooled)
            return
        since = clock()
        try:
            if not self._driving.commit(partial(self._commit, pooled), pooled.dbapi_connection):
                raise TransactionAbortedError(_ABORTED)
        except BaseException:
            _tell_rolled_back(everyone)
            raise
        _tell(everyone, since)

    def do_rollback(self, pooled: Any) -> None:
        everyone = _info_of(pooled).pop(_SENT, {})
        if everyone and not self._dialect.is_async:
            # Awaited sessions are closed in tasks of their own, where nobody sees the error of their block.
            _tell_forgotten(everyone)
        try:
            self._roll_back(pooled)
        finally:
            # Even if the connection is lost: nobody commits the transaction any more.
            _tell_rolled_back(everyone)

    def do_prepare_twophase(self, connection: Connection, xid: Any) -> None:
        self._finish(connection.connection, _info_of(connection.connection).get(_SENT, {}))
        self._prepare(connection, xid)

    def do_commit_twophase(self, connection: Connection, xid: Any, *how: Any, **more: Any) -> None:
        everyone = self._about_to_commit(connection.connection, "tpc_rollback")
        since = clock()
        self._commit_prepared(connection, xid, *how, **more)
        _tell(everyone, since)

    def do_rollback_twophase(self, connection: Connection, xid: Any, *how: Any, **more: Any) -> None:
        everyone = _info_of(connection.connection).pop(_SENT, {})
        self._roll_back_prepared(connection, xid, *how, **more)
        _tell_rolled_back(everyone)

    def do_savepoint(self, connection: Connection, name: str) -> None:
        self._set_savepoint(connection, name)
        savepoint_set(connection, name)

    def do_release_savepoint(self, connection: Connection, name: str) -> None:
        self._release_savepoint(connection, name)
        savepoint_released(connection, name)

    def do_rollback_to_savepoint(self, connection: Connection, name: str) -> None:
        self._roll_back_to_savepoint(connection, name)
        rolled_back_to(connection, name)

    def _about_to_commit(self, pooled: Any, roll_back: str) -> dict[CommitListener, Sent]:
        """Prepare for a commit, and return what was sent, by listener; `roll_back` names the driver's rollback."""
        info = _info_of(pooled)
        everyone: dict[CommitListener, Sent] = info.get(_SENT, {})
        if not everyone:
            return everyone
        try:
            self._finish(pooled, everyone)
        except BaseException:
            # SQLAlchemy takes the transaction for ended, so a Connection would stay in the aborted transaction.
            del info[_SENT]
            getattr(pooled.dbapi_connection, roll_back)()
            _tell_rolled_back(everyone)
            raise
        del info[_SENT]
        crash_point("outbox.before_commit")
        return everyone

    def _finish(self, pooled: Any, everyone: dict[CommitListener, Sent]) -> None:
        """Call the functions that belong right before the commit. A failed function fails again at another commit.

        Refuse to commit a failed transaction: PostgreSQL would roll back, and no driver raises an error.
        """
        if everyone and self._driving.is_aborted(self._dialect.get_driver_connection(pooled.dbapi_connection)):
            raise TransactionAbortedError(_ABORTED)
        for sent in everyone.values():
            for each in sent.last:
                each()
            sent.last = []


def _tell(everyone: dict[CommitListener, Sent], since: float) -> None:
    if everyone:
        crash_point("outbox.after_commit")
        for listener, sent in everyone.items():
            sent.committed = True
            listener.committed(sent, since)


def _tell_rolled_back(everyone: dict[CommitListener, Sent]) -> None:
    for listener, sent in everyone.items():
        listener.rolled_back(sent.messages)


def _tell_forgotten(everyone: dict[CommitListener, Sent]) -> None:
    """Log once that messages were rolled back, unless an error or the application is the cause."""
    global _forgotten_told
    if _forgotten_told or not any(sent.needs_hint for sent in everyone.values()):
        return
    if sys.exc_info()[1] is None and not _is_asked_for():
        _forgotten_told = True
        logger.warning(_FORGOTTEN, extra=named("forgotten_commit"))


def _is_asked_for() -> bool:
    """Return whether the application has called a `rollback` of SQLAlchemy, and no `close`."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "rollback" and frame.f_globals.get("__name__", "").startswith("sqlalchemy."):
            return True
        frame = frame.f_back
    return False


def _info_of(pooled: Any) -> dict[Any, Any]:
    """Return a connection's `info`; an empty dict if the connection is lost, or if the pool only tests it."""
    try:
        info: dict[Any, Any] = pooled.info
    except (NotImplementedError, InvalidRequestError):
        return {}
    return info

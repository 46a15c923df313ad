"""Relays of several outboxes in one process, each on its own: what one of them waits for delays no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Protocol

from tenacity.wait import wait_base

from outbox.relay.supervision import AGAIN, Supervision
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.wakeup import Wake
from outbox.store.label import told_apart
from outbox.worker.activity import activity_logger
from outbox.worker.worker import lease_logger

logger = logging.getLogger("outbox")

#: How often the relays that were asked to stop are looked at; one that ends is noticed at once.
_LOOK_SECONDS = 1.0

#: Where the relay of this thread works.
_label: ContextVar[str | None] = ContextVar("outbox_label", default=None)


class OneRelay(Protocol):
    """What runs beside others: a `Relay`, or whatever has to open its database first."""

    @property
    def label(self) -> str:
        """Which database it is about, without secrets."""

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop, and has not followed yet."""

    def serve(self) -> None:
        """Send until stopped; called again after an error."""

    def until_empty(self) -> None:
        """Send what is there, then return."""

    def once(self) -> None:
        """Send one batch, then return."""

    def stop(self) -> None:
        """Ask it to finish what is under way and return; takes no lock, a signal handler may call it."""

    def close(self) -> None:
        """Let go of its sender."""


class Relays:
    """Runs relays side by side: `Relays([Relay(Outbox(eu), "nats://…"), Relay(Outbox(us), "nats://…")]).run()`.

    Each has a thread, connections and a sender of its own, so that a database that is down, slow, silent, a standby or
    without its tables delays nobody else, and neither does a destination. `run` gives none up: what only a person can
    mend is logged with the database it is about, and the relay tries again after a growing pause. Lines that a relay
    logs begin with its database.

    A relay costs one thread and one connection while it waits for its lease. While it works there are a thread and a
    connection more that renew the lease, a thread for the calls of its sender, from its first backlog on a thread and a
    connection that read ahead, and what the sender has; the same again where writers send by themselves, for what they
    leave behind. None of these connections takes a place in a pool.

    Args:
        relays: one for each outbox; each with a sender of its own, because senders take one call at a time.
        drain: how long relays that were asked to stop are waited for. One that is still at it then, because its
            database or its destination does not answer, is left behind and logged; nothing of it is lost.
        pause: one of tenacity's wait strategies, in seconds, between two tries of a relay that cannot work.
    """

    def __init__(
        self, relays: Iterable[OneRelay], *, drain: timedelta = timedelta(seconds=15), pause: wait_base = AGAIN
    ) -> None:
        self._relays = list(relays)
        if not self._relays:
            raise ValueError("no relays: there is nothing to run")
        self._drain = drain
        self._pause = pause
        self._beside: list[_Beside] = []
        self._stopping = False
        # A socket, no lock: a signal handler may come in the middle of anything.
        self._wake = Wake()

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Where relays were left behind that had not finished in time."""
        return tuple(each.label for each in self._beside if each.alive)

    def run(self, *, signals: bool = True) -> None:
        """Send until stopped. In the main thread SIGTERM and SIGINT drain all and return; a second one ends at once."""
        with stopping_on_signals(self.stop) if signals else nullcontext():
            self._side_by_side(_Beside.serve)

    def until_empty(self) -> None:
        """Have each send what was committed before now, and what is parked and due; return when all are through.

        Raises:
            ExceptionGroup: what went wrong with some of them; the others have finished.
        """
        self._side_by_side(lambda each: each.relay.until_empty())
        self._raise_errors()

    def once(self) -> None:
        """Have each send one batch, if there is one; errors as in `until_empty`."""
        self._side_by_side(lambda each: each.relay.once())
        self._raise_errors()

    def stop(self) -> None:
        """Ask all to finish what is under way and return. May be called from anywhere."""
        self._stopping = True
        for each in self._beside:
            each.stop()
        self._wake.set()

    def close(self) -> None:
        """Close the senders, after `until_empty` or `once`; `run` does it by itself."""
        for relay in self._relays:
            relay.close()

    def _side_by_side(self, work: Callable[[_Beside], None]) -> None:
        for named in (logger, lease_logger, activity_logger):
            named.addFilter(_say_where)
        labels = told_apart([relay.label for relay in self._relays])
        pairs = zip(self._relays, labels, strict=True)
        self._beside = [_Beside(relay, label, self._pause, ended=self._wake.set) for relay, label in pairs]
        try:
            if self._stopping:
                self.stop()
            for each in self._beside:
                each.start(work)
            self._wait()
        except BaseException:
            self.stop()
            raise
        self._stopping = False
        for label in self.unfinished:
            logger.error(
                "%s: not finished %g s after it was to stop, left behind; what was under way may be sent again",
                label,
                self._drain.total_seconds(),
            )

    def _wait(self) -> None:
        """Until all have ended; those that do not follow a stop in time are not waited for."""
        while alive := [each for each in self._beside if each.alive]:
            overdue = [each.overdue(self._drain.total_seconds()) for each in alive]
            if all(overdue):
                return
            self._wake.wait(_LOOK_SECONDS)

    def _raise_errors(self) -> None:
        errors = [each.error for each in self._beside if each.error is not None]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(self._beside)} relays failed", errors)


class _Beside:
    """One of the relays, with its thread."""

    def __init__(self, relay: OneRelay, label: str, pause: wait_base, *, ended: Callable[[], None]) -> None:
        self.relay = relay
        self.label = label
        self.error: Exception | None = None
        self._ended = ended
        self._thread: threading.Thread | None = None
        self._supervision = Supervision(relay.serve, pause)
        self._asked_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[_Beside], None]) -> None:
        """Do the work in a thread of its own, which never keeps the process alive."""

        def perform() -> None:
            _label.set(self.label)
            try:
                work(self)
            except Exception as error:
                error.add_note(self.label)
                self.error = error
            finally:
                self._ended()

        self._thread = threading.Thread(target=perform, name=f"outbox-relay {self.label}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end, also out of a pause."""
        self._supervision.stop()
        self.relay.stop()

    def overdue(self, seconds: float) -> bool:
        """Whether it was asked to stop, and that for the first time seen longer ago than this."""
        if not self._supervision.stopping and not self.relay.stopping:
            return False
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        return now - self._asked_at > seconds

    def serve(self) -> None:
        """Run the relay until a stop, whatever happens to it."""
        try:
            self._supervision.run()
        finally:
            with suppress(Exception):
                self.relay.close()


def _say_where(record: logging.LogRecord) -> bool:
    """Begin what a relay's thread logs with its database; every other line stays as it is."""
    label = _label.get()
    if label is not None:
        record.msg = f"{label.replace('%', '%%') if record.args else label}: {record.msg}"
    return True

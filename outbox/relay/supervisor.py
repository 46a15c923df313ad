"""Several relays in one process. They run independently: when one has to wait, no other is delayed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Protocol

from tenacity.wait import wait_base

from outbox.relay.restarts import AGAIN, Supervision
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.runtime.text import labelled
from outbox.runtime.wakeup import Wake
from outbox.store.label import told_apart
from outbox.telemetry.activity_log import activity_logger
from outbox.worker.lease_search import lease_logger

logger = logging.getLogger("outbox")

#: Seconds between two checks of relays that were asked to stop. The end of a relay is noticed at once.
_LOOK_SECONDS = 1.0

#: The label of the relay of this thread, and the name of its subscription.
_about: ContextVar[tuple[str, str] | None] = ContextVar("outbox_about", default=None)


class OneRelay(Protocol):
    """A relay that runs beside others: a `Relay`, or an object that has to open its database first."""

    @property
    def name(self) -> str:
        """The name of its subscription."""

    @property
    def label(self) -> str:
        """The database that it works for, without secrets."""

    @property
    def stopping(self) -> bool:
        """True from when it is asked to stop until it has stopped."""

    def serve(self) -> None:
        """Send until stopped; it is called again after an error."""

    def until_empty(self) -> None:
        """Send what is there, then return."""

    def once(self) -> None:
        """Send one batch, then return."""

    def stop(self) -> None:
        """Ask it to finish what is under way and return. It takes no lock, because a signal handler may call it."""

    def close(self) -> None:
        """Close its sender."""


class Relays:
    """Runs relays side by side: `Relays([Relay(Outbox(eu), "nats://…"), Relay(Outbox(us), "nats://…")]).run()`.

    Each has a thread, connections and a sender of its own. So a database that is down, slow, silent, a standby or
    without its tables delays no other relay, and neither does a destination. `run` gives up none of them: an error that
    only a person can mend is logged with its database, and the relay tries again after a growing pause. Lines that a
    relay logs begin with its database.

    A relay costs one thread and one connection while it waits for its lease. While it works, it has a second thread and
    connection that renew the lease, and a thread for the calls of its sender. From its first backlog on it has another
    thread and connection, which read ahead; the sender may have its own. Where writers send directly, it has all of
    that again, for the messages that they leave behind. None of these connections takes a place in a pool.

    Args:
        relays: one for each outbox, or several with different names; `routes` makes them for topics of one outbox. Each
            with a sender of its own, because senders take one call at a time.
        drain: how long to wait for relays that were asked to stop. One that has not ended by then, because its
            database or its destination does not answer, is left behind and logged; none of its messages is lost.
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
        self._wake = Wake()
        self._stop = Stop(wake=self._wake.set)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The databases of the relays that had not finished in time and were left behind."""
        return tuple(each.label for each in self._beside if each.alive)

    def run(self, *, signals: bool = True) -> None:
        """Send until stopped. In the main thread SIGTERM and SIGINT drain all and return; a second one ends at once."""
        with stopping_on_signals(self.stop) if signals else nullcontext():
            self._side_by_side(_Beside.serve)

    def until_empty(self) -> None:
        """Have each send what was committed before now, and what is parked and due; return when all have finished.

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
        self._stop.ask()
        for each in self._beside:
            each.stop()

    def close(self) -> None:
        """Close the senders, after `until_empty` or `once`; `run` does it by itself."""
        for relay in self._relays:
            relay.close()

    def _side_by_side(self, work: Callable[[_Beside], None]) -> None:
        for named in (logger, lease_logger, activity_logger):
            named.addFilter(_say_where)
        labels = _labels(self._relays)
        pairs = zip(self._relays, labels, strict=True)
        self._beside = [_Beside(relay, label, self._pause, ended=self._wake.set) for relay, label in pairs]
        try:
            if self._stop.asked:
                self.stop()
            for each in self._beside:
                each.start(work)
            self._wait()
        except BaseException:
            self.stop()
            raise
        self._stop.withdraw()
        for label in self.unfinished:
            logger.error(
                "%s: not finished %g s after it was to stop, left behind; what was under way may be sent again",
                label,
                self._drain.total_seconds(),
            )

    def _wait(self) -> None:
        """Wait until all have ended, but no longer for those that do not stop in time."""
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
    """One of the relays, with its thread and its supervision."""

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
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[_Beside], None]) -> None:
        """Call `work` in a thread of its own, which does not keep the process alive."""

        def perform() -> None:
            _about.set((self.label, self.relay.name))
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
        """Ask it to end, unless it has ended, because then the stop would end its next run; a pause ends at once."""
        self._supervision.stop()
        if self._thread is None or self._thread.is_alive():
            self.relay.stop()

    def overdue(self, seconds: float) -> bool:
        """Return whether a stop was asked, and was first noticed here more than `seconds` ago."""
        if not self._supervision.stopping and not self.relay.stopping:
            return False
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        return now - self._asked_at > seconds

    def serve(self) -> None:
        """Run the relay until a stop, again after each error; then close it."""
        try:
            self._supervision.run()
        finally:
            with suppress(Exception):
                self.relay.close()


def _labels(relays: Sequence[OneRelay]) -> list[str]:
    """Return the databases, each with the name of its relay where several work for one database."""
    count = Counter(relay.label for relay in relays)
    return told_apart([each.label if count[each.label] == 1 else f"{each.label} {each.name}" for each in relays])


def _say_where(record: logging.LogRecord) -> bool:
    """Begin the lines of a relay's thread with its database; leave every other line as it is."""
    about = _about.get()
    if about is not None:
        text = record.getMessage()
        before = labelled(*about, text).removesuffix(text)
        record.msg = f"{before.replace('%', '%%') if record.args else before}{record.msg}"
    return True

"""Supervision: work in threads of a process, begun again after errors, drained and ended by one stop."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from tenacity.wait import wait_base, wait_exponential, wait_random

from outbox.errors import SubscriptionError
from outbox.model.retry import seconds_to_wait
from outbox.runtime.named import named
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.runtime.text import labelled
from outbox.runtime.throttled_log import Throttle
from outbox.runtime.wakeup import Wake
from outbox.store.failure import in_one_line
from outbox.store.label import told_apart
from outbox.telemetry.activity_log import activity_logger
from outbox.telemetry.events import Beat, DatabaseAway, Event
from outbox.worker.lease_search import lease_logger
from outbox.worker.settings import Until

logger = logging.getLogger("outbox")

#: Seconds between two tries that fail at once; partly random, so that many relays do not try at the same moment.
AGAIN = wait_exponential(multiplier=0.5, max=10) + wait_random(0, 1)
#: After it has worked for so long, its next failure counts as the first one.
_RECOVERED_SECONDS = 60.0

#: A work whose thread shows no sign of life for so long, while one is due, is stuck.
STUCK_SECONDS = 60.0

#: The work of this thread.
_here: ContextVar[_Supervised | None] = ContextVar("outbox_here", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of one work.

    `name`: the label of the work. `stuck`: its thread has ended, or hangs. `trouble`: why it neither works nor stands
    by; None: it does. `ended`: its thread has ended.
    """

    name: str
    stuck: bool
    trouble: str | None
    ended: bool = False

    @property
    def ready(self) -> bool:
        """True while the work works or stands by."""
        return not self.stuck and self.trouble is None


class Work(Protocol):
    """The work of a supervisor: a relay, the check of a producer group, or work that has to open a database first."""

    @property
    def name(self) -> str:
        """The name of the subscription."""

    @property
    def stopping(self) -> bool:
        """True from when the work is asked to stop by itself until the end."""

    def work(self, until: Until, stop: Stop) -> None:
        """Work until there, or until a stop is asked; called again after an error."""

    def close(self) -> None:
        """Close the connections of the work, which is not called again."""


class Supervisor:
    """Runs works side by side, each in a thread. One stop stops all."""

    def __init__(
        self,
        works: Iterable[Work],
        *,
        labels: Sequence[str] | None = None,
        drain: timedelta = timedelta.max,
        pause: wait_base | None = AGAIN,
    ) -> None:
        """`labels`: each begins the log lines of a work. `drain`: how long to wait for works after a stop.

        `pause`: between two tries of a failing work; None: an error ends the work and is raised.
        """
        self._works = list(works)
        self._labels = labels or ["" for _ in self._works]
        self._drain = drain
        self._pause = pause
        self._supervised: list[_Supervised] = []
        self._wake = Wake()
        self._stop = Stop(wake=self._wake.set)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The labels of works that had not finished in time and were left behind."""
        return tuple(each.label for each in self._supervised if each.alive)

    @property
    def alive(self) -> bool:
        """True while a work has a thread."""
        return any(each.alive for each in self._supervised)

    @property
    def health(self) -> list[Health]:
        """The health of each work, as far as `told` was told of events. Costs no look into a database."""
        return [each.health for each in self._supervised]

    def told(self, event: Event) -> None:
        """Note signs of life: `EVERYWHERE.listen(supervisor.told)`."""
        here = _here.get()
        if here is not None:
            here.told(event)

    def run(self, *, signals: bool = True) -> None:
        """Work until stopped. In the main thread SIGTERM and SIGINT drain all and return; a second one ends at once."""
        with stopping_on_signals(self.stop) if signals else nullcontext():
            self._side_by_side("stopped")

    def until_empty(self) -> None:
        """Have each do everything from before now, and parked messages that are due; return when all have finished.

        Raises:
            ExceptionGroup: the errors of some works; the others have finished.
        """
        self._side_by_side("empty")

    def once(self) -> None:
        """Have each handle a batch, if there is one; errors as in `until_empty`."""
        self._side_by_side("once")

    def start(self, until: Until = "stopped") -> None:
        """Begin all, and return at once; an earlier stop counts.

        Raises:
            SubscriptionError: the works run already.
        """
        if any(each.alive and not each.stopping for each in self._supervised):
            raise SubscriptionError("at work already; stop it and join it before it is started again")
        if any(self._labels):
            for named in (logger, lease_logger, activity_logger):
                named.addFilter(_say_where)
        pairs = zip(self._works, self._labels, strict=True)
        self._supervised = [
            _Supervised(work, label, self._pause, Stop(self._stop), ended=self._wake.set) for work, label in pairs
        ]
        try:
            for each in self._supervised:
                each.start(until)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask all to finish the work under way and return. May be called from anywhere."""
        self._stop.ask()

    def join(self, timeout: float | None = None) -> None:
        """Wait for all threads to end, for at most `timeout` seconds; None: without a limit."""
        until = None if timeout is None else time.monotonic() + timeout
        for each in self._supervised:
            each.join(None if until is None else max(0.0, until - time.monotonic()))
        if not self.alive:
            self._stop.withdraw()

    def ended(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return True when all have ended, or did not stop in time and are left behind."""
        # Each is asked, because its time to drain begins when its stop is noticed.
        overdue = [each.overdue(self._drain.total_seconds()) for each in self._supervised if each.alive]
        if not all(overdue):
            self._wake.wait(seconds)
            return False
        for each in self._supervised:
            if each.alive:
                each.leave_behind(self._drain.total_seconds())
        self._stop.withdraw()
        return True

    def raise_errors(self) -> None:
        """Raise the errors of the works, if any, as a group; of a single work without another try, the error alone."""
        errors = [each.error for each in self._supervised if each.error is not None]
        if errors and len(self._supervised) == 1 and self._pause is None:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} of {len(self._supervised)} relays failed", errors)

    def close(self) -> None:
        """Close the works, after `until_empty` or `once`; `run` closes them as well."""
        for work in self._works:
            work.close()

    def running(self, until: Until = "stopped", look: float = 1.0) -> Iterator[None]:
        """Begin all, and yield every `look` seconds until all have ended, which is noticed at once; errors as in
        `until_empty`.
        """
        self.start(until)
        try:
            while not self.ended(look):
                yield
        except BaseException:
            self.stop()
            raise
        self.raise_errors()

    def _side_by_side(self, until: Until) -> None:
        for _ in self.running(until):
            pass


class DatabaseWork(Work, Protocol):
    """A work with the name of its database, for several databases."""

    @property
    def label(self) -> str:
        """The database, without secrets."""


class Relays(Supervisor):
    """Runs relays side by side: `Relays([Relay(Outbox(eu), "nats://…"), Relay(Outbox(us), "nats://…")]).run()`.

    Each has a thread, connections and a sender of its own. So a database that is down, slow, silent, a standby or
    without tables delays no other relay, and neither does a destination. `run` gives up no relay: an error that only a
    person can mend is logged with the database, and the relay tries again after a growing pause. Log lines of a relay
    begin with the database.

    A relay costs a thread and a connection while it waits for a lease. At work, a second thread and connection renew
    the lease, and a thread calls the sender. From the first backlog on another thread and connection read ahead; the
    sender may have more. None of these connections takes a place in a pool.

    Args:
        relays: one for each outbox, or several with different names; `routes` makes them for topics of one outbox. Each
            with a sender of its own, because senders take one call at a time.
        drain: how long to wait for relays after a stop. A relay without an end by then, because database or destination
            do not answer, is left behind and logged; no message is lost.
        pause: one of tenacity's wait strategies, in seconds, between two tries of a relay that cannot work.
    """

    def __init__(
        self, relays: Iterable[DatabaseWork], *, drain: timedelta = timedelta(seconds=15), pause: wait_base = AGAIN
    ) -> None:
        works = list(relays)
        if not works:
            raise ValueError("no relays: there is nothing to run")
        super().__init__(works, labels=_labels(works), drain=drain, pause=pause)


class _Supervised:
    """A work with its thread."""

    def __init__(
        self, work: Work, label: str, pause: wait_base | None, stop: Stop, *, ended: Callable[[], None]
    ) -> None:
        self.label = label or work.name
        self.error: BaseException | None = None
        #: The label and the name of a work with a label.
        self.about = (label, work.name) if label else None
        self._work = work
        #: Until when there is to be a sign of life, by `time.monotonic`; and why the work does not work.
        self._due = time.monotonic()
        self._trouble: str | None = "has not reached the database yet"
        self._pause = pause
        self._stop = stop
        self._ended = ended
        self._throttle = Throttle()
        self._thread: threading.Thread | None = None
        #: True at the end of the thread, which is alive for a moment more.
        self._over = False
        self._asked_at: float | None = None

    @property
    def alive(self) -> bool:
        return self._thread is not None and not self._over and self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._stop.asked or self._work.stopping

    @property
    def health(self) -> Health:
        stuck = self._over or time.monotonic() - self._due > STUCK_SECONDS
        return Health(name=self.label, stuck=stuck and not self.stopping, trouble=self._trouble, ended=self._over)

    def told(self, event: Event) -> None:
        """Note an event of this thread."""
        if isinstance(event, Beat):
            self._due, self._trouble = time.monotonic() + event.seconds, None
        elif isinstance(event, DatabaseAway):
            self._due, self._trouble = time.monotonic(), event.error

    def start(self, until: Until) -> None:
        """Work in a thread, which does not keep the process alive."""
        name = f"outbox-{self._work.name}" if self.about is None else f"outbox-relay {self.label}"
        thread = threading.Thread(target=self._perform, args=(until,), name=name, daemon=True)
        thread.start()
        # Last, because nobody can join a thread that was not started.
        self._thread = thread

    def join(self, timeout: float | None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def overdue(self, seconds: float) -> bool:
        """Return whether a stop was asked, and was first noticed here more than `seconds` ago."""
        if not self.stopping:
            return False
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        return now - self._asked_at > seconds

    def leave_behind(self, seconds: float) -> None:
        """Wait no longer; the thread ends whenever it can."""
        self._stop.ask()
        logger.error(
            "%s: not finished %g s after it was to stop, left behind; what was under way may be sent again",
            self.label,
            seconds,
            extra=named("left_behind", seconds=seconds),
        )

    def _perform(self, until: Until) -> None:
        _here.set(self)
        try:
            if until == "stopped":
                self._work_until_stopped()
            else:
                self._work.work(until, self._stop)
        except BaseException as error:  # also SystemExit, after which this thread works no more
            if self.about is not None:
                error.add_note(self.label)
            self.error = error
            self._trouble = in_one_line(error)[0] if isinstance(error, Exception) else type(error).__name__
        finally:
            self._over = True
            self._ended()

    def _work_until_stopped(self) -> None:
        """Work until a stop, again after each error; then close the work."""
        failures = 0
        try:
            while not self._stop.asked:
                began = time.monotonic()
                try:
                    self._work.work("stopped", self._stop)
                    return
                except Exception as error:
                    if self._pause is None:
                        raise
                    failures = 1 if time.monotonic() - began > _RECOVERED_SECONDS else failures + 1
                    self._tell(error)
                pause = seconds_to_wait(self._pause, failures)
                self._due = time.monotonic() + pause
                self._stop.rest(pause)
        finally:
            with suppress(Exception):
                self._work.close()

    def _tell(self, error: Exception) -> None:
        """Log an error: at once when it is new, else once in a while."""
        text, foreseen = in_one_line(error)
        self._trouble = text
        if self._throttle.allows(text):
            about = named("worker_failed", subscription=self._work.name, error=text)
            trace = None if foreseen else error
            logger.error("%s; %s will try again", text, self._work.name, exc_info=trace, extra=about)


def _labels(works: Sequence[DatabaseWork]) -> list[str]:
    """Return the databases, each with the name of its relay if several work for a database."""
    count = Counter(work.label for work in works)
    return told_apart([each.label if count[each.label] == 1 else f"{each.label} {each.name}" for each in works])


def _say_where(record: logging.LogRecord) -> bool:
    """Begin the lines of a relay's thread with the database; leave other lines alone."""
    here = _here.get()
    if here is not None and here.about is not None:
        text = record.getMessage()
        before = labelled(*here.about, text).removesuffix(text)
        record.msg = f"{before.replace('%', '%%') if record.args else before}{record.msg}"
    return True

"""The life cycle of a relay and of a consumer: one worker that works here, or in a thread, until stopped."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol, Self

from outbox.errors import SubscriptionError
from outbox.relay.supervisor import Supervisor
from outbox.runtime.fork import in_child
from outbox.runtime.signals import stopping_on_signals
from outbox.runtime.stop import Stop
from outbox.worker.settings import Settings, Until
from outbox.writing.bare import BareOutbox


class Work(Protocol):
    """The parts of a `Worker` for a life cycle."""

    def work(self, until: Until) -> None:
        """Do as `Worker.work`."""

    def hint(self) -> None:
        """Do as `Worker.hint`."""


class LifeCycle:
    """Runs one worker: to the end, or in a thread until stopped; `with` starts the thread, and ends it."""

    #: For errors.
    _what: str

    def __init__(self, outbox: BareOutbox, name: str, settings: Settings | None) -> None:
        #: Where the messages are.
        self.outbox = outbox
        self._name = name
        self.settings = settings or Settings()
        self._stop = Stop()
        self._supervisor: Supervisor | None = None
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin without work; also in a fork, because the parent's threads do not run there."""
        self._at_work = threading.Lock()

    @property
    @abstractmethod
    def _worker(self) -> Work:
        """The worker; made once, before the first work. A mistake in an option raises here."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections of the handler, after `until_empty` or `once`; `run` closes them as well."""

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self._name

    @property
    def label(self) -> str:
        """The database of the messages: host, name and schema, for people to read."""
        return self.outbox.database.label

    @property
    def stopping(self) -> bool:
        """True from when a stop is asked until the work has stopped."""
        return self._stop.asked

    def run(self, *, signals: bool = True) -> None:
        """Work until stopped. In the main thread SIGTERM and SIGINT drain and return; a second one ends at once.

        Raises:
            SubscriptionError: at work already; also from `until_empty` and `once`.
            HungHandlerError: calls of the handler never come back; the process should be started again.
        """
        with self._alone():
            try:
                with stopping_on_signals(self.stop) if signals else nullcontext():
                    self._work("stopped")
            finally:
                self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Mark as at work; raise if at work already, because two runs at once would take the lease from each other."""
        if not self._at_work.acquire(blocking=False):
            what = self._what
            raise SubscriptionError(
                f"this {what} is at work already; stop it and join it first, or make another {what.capitalize()},"
                " which waits for it"
            )
        try:
            yield
        finally:
            self._at_work.release()

    def until_empty(self) -> None:
        """Handle all messages committed before now, and all parked messages that are due; then return.

        Also wait until writers may no longer send messages themselves.
        """
        with self._alone():
            self._work("empty")

    def once(self) -> None:
        """Handle a batch, if there is one."""
        with self._alone():
            self._work("once")

    def work(self, until: Until, stop: Stop) -> None:
        """Do as `run`, `until_empty` or `once`, until `stop` is asked, too; nothing is closed."""
        with self._alone(), self._stop.within(stop):
            self._work(until, stop)

    def _work(self, until: Until, outer: Stop | None = None) -> None:
        worker = self._worker
        listener = self.outbox.notifier.listen(worker.hint) if until == "stopped" else None
        try:
            worker.work(until)
        finally:
            del listener
            if outer is not None and self._stop.asked:
                # It may be that an error has ended the work just now: it is not to be tried again.
                outer.ask()
            self._stop.withdraw()

    def stop(self) -> None:
        """Ask the work to finish what is under way and return."""
        self._stop.ask()
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.stop()

    def start(self) -> None:
        """Run in a thread of this process, unless the thread runs already.

        An error is logged, and the work begins again after a pause, until `stop`.

        Raises:
            SubscriptionError: at work in another way, or not ended yet after a stop.
        """
        alive = self._supervisor is not None and self._supervisor.alive
        if alive and not self.stopping:
            return
        if alive or self._at_work.locked():
            raise SubscriptionError(
                f"this {self._what} is at work still; stop it and join it before it is started again"
            )
        # Made here, because a mistake in an option is the caller's, and no other try would mend it.
        _ = self._worker
        # A stop that was asked after the previous run had ended is forgotten, because there was nothing to stop.
        self._stop.withdraw()
        self._supervisor = supervisor = Supervisor([self])
        supervisor.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread of `start` to end."""
        if self._supervisor is not None:
            self._supervisor.join(timeout)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop, and wait for calls under way: each is left behind at its deadline."""
        self.stop()
        self.join()

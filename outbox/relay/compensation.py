"""A companion: a second worker that runs beside the first, from the moment when its subscription exists."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context

from tenacity.wait import wait_exponential

from outbox.errors import HungHandlerError
from outbox.model.retry import seconds_to_wait
from outbox.store.database import Channel
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.worker import Worker

logger = logging.getLogger("outbox")

#: Seconds before a worker that ended with an error begins again.
_BEGIN_AGAIN = wait_exponential(multiplier=1, min=1, max=30)
#: When a worker ran for so long before a failure, that failure counts as the first one.
_WELL_SECONDS = 60.0


class CompensationWorker:
    """Runs a worker in a thread, from when `look` finds its subscription until `stop`.

    An error that ends it, other than hanging calls, is logged, and a later `look` begins again.
    """

    def __init__(self, name: str, worker: Worker, *, every: float, hangs: Callable[[], None]) -> None:
        """`every`: seconds between two looks for the subscription. `hangs`: called when calls of the handler never come
        back, after that error is stored in `error`.
        """
        self._name = name
        self._worker = worker
        self._every = every
        self._hangs = hangs
        self._thread: threading.Thread | None = None
        self._look_at = 0.0
        self._failures = 0
        # Plain flags and no locks, because a signal handler may call `stop` at any point.
        self._may_begin = False
        self._works = False
        self._exists = False
        self.error: HungHandlerError | None = None

    def prepare(self, *, in_background: bool) -> None:
        """Reset the state, before the first worker begins; `in_background`: whether `look` may begin the thread."""
        self._may_begin = in_background
        self._look_at = 0.0
        # In a fork the thread of the parent does not run.
        self._works = self._exists = False
        # Asked when the worker had just ended, a stop would end its next work.
        self._worker.reset()
        self.error = None

    def look(self, channel: Channel) -> None:
        """Begin if the subscription exists by now.

        Asks the database seldom, and not while the worker runs.
        """
        if self._works or time.monotonic() < self._look_at:
            return
        self._exists = Subscriptions(channel).find(self._name) is not None
        self._look_at = time.monotonic() + self._every
        if self._exists and self._may_begin:
            self._works = True
            # In a copy of the context, so that its log lines name the same database.
            self._thread = threading.Thread(
                target=copy_context().run, args=(self._run,), name="outbox-compensation", daemon=True
            )
            self._thread.start()

    def perform(self, work: Callable[[Worker], None]) -> None:
        """Call `work` with the worker in this thread, if `look` has found its subscription."""
        if self._exists:
            self._works = True
            try:
                work(self._worker)
            finally:
                self._works = False

    def stop(self) -> None:
        """Finish what is under way, and do not begin again. May be called from anywhere."""
        self._may_begin = self._exists = False
        if self._works:
            self._worker.stop()

    def join(self) -> None:
        """Wait for the end of what is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            if self._may_begin:
                self._worker.run()
        except HungHandlerError as error:
            self.error = error
            self._may_begin = False
            self._hangs()
        except Exception:
            self._failures = self._failures + 1 if time.monotonic() - began < _WELL_SECONDS else 1
            self._look_at = time.monotonic() + seconds_to_wait(_BEGIN_AGAIN, self._failures)
            logger.exception("%s stopped, beginning again", self._name)
        finally:
            self._works = False

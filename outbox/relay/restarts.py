"""Supervision: serves until a stop. An error is logged, and after a growing pause it serves again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tenacity.wait import wait_base, wait_exponential, wait_random

from outbox.model.retry import seconds_to_wait
from outbox.runtime.stop import Stop
from outbox.runtime.throttled_log import Throttle
from outbox.store.failure import in_one_line

logger = logging.getLogger("outbox")

#: Seconds between two tries that fail at once; partly random, so that many relays do not try at the same moment.
AGAIN = wait_exponential(multiplier=0.5, max=10) + wait_random(0, 1)
#: After it has worked for so long, its next failure counts as the first one.
_RECOVERED_SECONDS = 60.0


class Supervision:
    """Calls `serve` until it returns, or until `stop`; after an error, logs it and calls again."""

    def __init__(self, serve: Callable[[], None], pause: wait_base = AGAIN, *, name: str = "the relay") -> None:
        """`pause`: one of tenacity's wait strategies, in seconds, between two calls. `name`: what the log calls it."""
        self._serve = serve
        self._name = name
        self._pause = pause
        # Of its own, because `serve` withdraws the stop that it follows when it returns.
        self._stop = Stop()
        self._throttle = Throttle()

    @property
    def stopping(self) -> bool:
        """True when a stop was asked."""
        return self._stop.asked

    def run(self) -> None:
        """Serve until a stop."""
        failures = 0
        while not self._stop.asked:
            began = time.monotonic()
            try:
                self._serve()
                return
            except Exception as error:
                failures = 1 if time.monotonic() - began > _RECOVERED_SECONDS else failures + 1
                self._tell(error)
            self._stop.rest(seconds_to_wait(self._pause, failures))

    def stop(self) -> None:
        """Do not call `serve` again once it has returned; end a pause at once. May be called from anywhere."""
        self._stop.ask()

    def _tell(self, error: Exception) -> None:
        """Log an error: at once when it is a new one, else once in a while."""
        text, foreseen = in_one_line(error)
        if self._throttle.allows(text):
            logger.error("%s; %s will try again", text, self._name, exc_info=None if foreseen else error)

"""Retries: the number of attempts of a message, and the pauses between attempts."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from datetime import timedelta

from tenacity import RetryCallState
from tenacity.wait import wait_base, wait_chain, wait_fixed, wait_random_exponential

from outbox.errors import OutboxError
from outbox.model.limits import MAX_DELAY, require_numbers

logger = logging.getLogger("outbox")

#: RocketMQ's retry levels: the pauses after the 1st to the 16th failure, from 10 s to 2 h.
RETRY_LEVELS: wait_base = wait_chain(
    *map(wait_fixed, (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200))
)
#: The pauses unless others are given: from 1 s to 10 min, with full jitter.
DEFAULT_WAIT: wait_base = wait_random_exponential(multiplier=1, min=1, max=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number of attempts of a message, and the pauses between attempts.

    `attempts`: failures after which a message is dead. `wait`: one of tenacity's wait strategies, in seconds;
    the default grows from 1 s to 10 min with full jitter.

    Raises:
        ValueError, TypeError: `attempts` or `wait` is something else.
    """

    attempts: int = 10
    wait: wait_base = DEFAULT_WAIT
    #: The mistakes of the strategy that were logged.
    _logged: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_numbers(attempts=self.attempts)
        if not callable(self.wait):
            raise TypeError(
                f"wait must be a wait strategy of tenacity, not {self.wait!r:.40}; write wait_fixed(5) or wait_chain(…)"
            )

    def exhausted(self, attempts: int) -> bool:
        """Return whether a message is dead after `attempts` failures."""
        return attempts >= self.attempts

    def delay(self, attempts: int, error: BaseException | str | None = None) -> timedelta:
        """Return how long a message waits after its `attempts`-th failure, with this error.

        The strategy is code of the application, and may do anything. Without a number of seconds from 0 on the
        default applies, and the mistake is logged once.
        """
        try:
            seconds = seconds_to_wait(self.wait, attempts, error)
            if not (isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"it returned {seconds!r:.40}, and not a number of seconds")
        except KeyboardInterrupt:
            raise
        except BaseException as mistake:
            # Also SystemExit, which would end the thread of a worker.
            self._log(mistake)
            seconds = seconds_to_wait(DEFAULT_WAIT, attempts)
        return timedelta(seconds=min(seconds, MAX_DELAY.total_seconds()))

    def _log(self, mistake: BaseException) -> None:
        kind = type(mistake).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("the retry strategy %r gives no pause, so the default applies", self.wait, exc_info=mistake)


def seconds_to_wait(wait: wait_base, attempt: int, error: BaseException | str | None = None) -> float:
    """Return the seconds that a tenacity strategy gives for an attempt and its error, outside of a tenacity loop."""
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]  # strategies read attempt and outcome only
    state.attempt_number = attempt
    if error is not None:
        cause = error if isinstance(error, BaseException) else OutboxError(error)
        state.set_exception((type(cause), cause, cause.__traceback__))
    return wait(state)

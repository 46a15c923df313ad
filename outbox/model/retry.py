"""Retries: the number of attempts of a message, and the pauses between attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from tenacity import RetryCallState
from tenacity.wait import wait_base, wait_chain, wait_fixed, wait_random_exponential

from outbox.model.limits import require_numbers

#: RocketMQ's retry levels: the pauses after the 1st to the 16th failure, from 10 s to 2 h.
RETRY_LEVELS: wait_base = wait_chain(
    *map(wait_fixed, (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1_200, 1_800, 3_600, 7_200))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number of attempts of a message, and the pauses between attempts.

    `attempts`: failures after which a message is dead. `wait`: one of tenacity's wait strategies, in seconds;
    the default grows from 1 s to 10 min with full jitter.

    Raises:
        ValueError, TypeError: `attempts` or `wait` is something else.
    """

    attempts: int = 10
    wait: wait_base = field(default_factory=lambda: wait_random_exponential(multiplier=1, min=1, max=600))

    def __post_init__(self) -> None:
        require_numbers(attempts=self.attempts)
        if not callable(self.wait):
            raise TypeError(
                f"wait must be a wait strategy of tenacity, not {self.wait!r:.40}; write wait_fixed(5) or wait_chain(…)"
            )

    def exhausted(self, attempts: int) -> bool:
        """Return whether a message is dead after `attempts` failures."""
        return attempts >= self.attempts

    def delay(self, attempts: int) -> timedelta:
        """Return how long a message waits after its `attempts`-th failure."""
        return timedelta(seconds=seconds_to_wait(self.wait, attempts))


def seconds_to_wait(wait: wait_base, attempt: int) -> float:
    """Return the seconds that a tenacity strategy gives for an attempt, outside of a tenacity loop."""
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]  # strategies read the attempt only
    state.attempt_number = attempt
    return wait(state)

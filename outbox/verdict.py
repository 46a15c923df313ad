"""Verdicts: what came of a message, and how long a failed one waits for its next attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from tenacity import RetryCallState
from tenacity.wait import wait_base, wait_random_exponential


@dataclass(frozen=True, slots=True)
class Done:
    """Stored at the destination."""


@dataclass(frozen=True, slots=True)
class Retry:
    """This message failed and counts an attempt. `after` overrides the back-off."""

    error: str
    after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """This message can never succeed: dead at once."""

    error: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The destination is sick, or was not asked. Nothing is counted against the message."""

    error: str


Verdict = Done | Retry | Reject | Unavailable

#: The one `Done` that everybody may share; comparing by identity is what makes a good batch cheap.
DONE = Done()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a message is tried, and what it waits in between.

    `attempts`: failures after which a message is dead. `wait`: one of tenacity's wait strategies, in seconds;
    the default grows from 1 s to 10 min with full jitter.
    """

    attempts: int = 10
    wait: wait_base = field(default_factory=lambda: wait_random_exponential(multiplier=1, min=1, max=600))

    def exhausted(self, attempts: int) -> bool:
        """Whether a message that failed `attempts` times is dead."""
        return attempts >= self.attempts

    def delay(self, attempts: int) -> timedelta:
        """What a message waits after its `attempts`-th failure."""
        return timedelta(seconds=seconds_to_wait(self.wait, attempts))


def seconds_to_wait(wait: wait_base, attempt: int) -> float:
    """Ask a tenacity strategy outside of a tenacity loop."""
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]  # strategies read the attempt only
    state.attempt_number = attempt
    return wait(state)

"""Verdicts: the outcome of sending a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, final

from outbox.model.limits import MAX_DELAY


def describe(said: object) -> str:
    """Return an answer or an exception of foreign code as text that every database can store.

    The text of an exception begins with the name of its class.
    """
    try:
        text = f"{type(said).__name__}: {said}" if isinstance(said, BaseException) else str(said)
    except Exception:
        text = type(said).__name__
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


class _Failed:
    """A verdict with a reason: any object, such as an exception, which is kept as text."""

    __slots__ = ()

    error: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", describe(self.error))


@final
class Done:
    """Stored at the destination. `Done()` is always the same object, because every message of a batch gets one."""

    __slots__ = ()

    def __new__(cls) -> Done:
        """Return `DONE`."""
        return DONE

    def __repr__(self) -> str:
        return "Done()"


@dataclass(frozen=True, slots=True)
class Retry(_Failed):
    """The message failed. `after` replaces the back-off, up to `MAX_DELAY`. `counts`: the try counts as an attempt.

    `cause`: the exception that was given as the error, for retry strategies.
    """

    error: str
    after: timedelta | None = None
    counts: bool = True
    cause: BaseException | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        said: object = self.error
        if isinstance(said, BaseException):
            object.__setattr__(self, "cause", said)
        _Failed.__post_init__(self)
        if self.after is not None:
            if not isinstance(self.after, timedelta):
                raise TypeError(f"after must be a timedelta, not {type(self.after).__name__}")
            object.__setattr__(self, "after", min(max(self.after, timedelta(0)), MAX_DELAY))


def failure_of(error: BaseException | None) -> Retry:
    """Return the verdict on a message whose handler has raised an exception."""
    return Retry(error)  # type: ignore[arg-type]  # kept as text, and as the cause


@dataclass(frozen=True, slots=True)
class Reject(_Failed):
    """The message can never succeed, and becomes dead at once."""

    error: str


@dataclass(frozen=True, slots=True)
class Unavailable(_Failed):
    """The destination does not accept the message now, or was not asked. Nothing is counted against the message.

    `everything`: the destination accepts no message of any topic, as when its server is away. The worker reports the
    outage, and probes with one message.
    """

    error: str
    everything: bool = field(default=False, compare=False)


Verdict = Done | Retry | Reject | Unavailable

#: The verdict on a message that was not handled in its turn.
BEHIND: Final = Retry("an earlier message of its key failed", after=timedelta(0), counts=False)

#: The only `Done`; compared by identity, so that checking a good batch costs almost nothing.
DONE: Final[Done] = object.__new__(Done)

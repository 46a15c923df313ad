"""The answers of an endpoint: the verdict for each status, and the pause that an endpoint asks for.

A status about the URL, the credentials or the whole endpoint makes no dead letters: all messages wait. Only a status
that blames the request rejects the message. No driver is used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from outbox.model.verdict import DONE, Reject, Unavailable, Verdict

#: An endpoint that asks for more is asked again all the same.
MOST_SECONDS = 300.0

#: Statuses that concern every message, with what to do about them.
ENDPOINT_AT_FAULT = {
    401: "check the credentials, and the secret",
    402: "the endpoint wants to be paid",
    403: "check what the user may do",
    404: "check the URL",
    405: "the URL takes no POST; check it",
    407: "check the user and the password of the proxy",
    410: "the endpoint wants no more messages; drop the subscription, or give it another URL",
    421: "check the URL",
    426: "the endpoint wants another protocol",
    429: "",
    501: "the URL takes no POST; check it",
    503: "",
    505: "the endpoint does not speak HTTP/1.1",
    511: "the network wants a login",
}
#: Statuses below 500 after which the same request may be taken.
_FOR_NOW = (408, 425, 429)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_SECONDS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer. `text`: the beginning of the body, and `location`: the target of a redirect, both fit to be shown.

    `retry_after`: the header Retry-After.
    """

    status: int
    text: str = ""
    location: str = ""
    retry_after: str | None = None

    def pause(self, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float:
        """Return the seconds without requests that the endpoint asks for, `MOST_SECONDS` at most, or 0.

        Only 408, 425, 429 and statuses from 500 on may ask.
        """
        if self.retry_after is None or not (self.status in _FOR_NOW or self.status >= 500):
            return 0.0
        return min(max(_seconds_of(self.retry_after, now), 0.0), MOST_SECONDS)

    def verdict(self) -> Verdict:
        """Return the verdict on the message."""
        if 200 <= self.status < 300:
            return DONE
        if 300 <= self.status < 400:
            where = f" to {self.location}" if self.location else ""
            advice = f"it redirects{where}, which is not followed; correct the URL"
            return Unavailable(self._described(advice), everything=True)
        if self.status in ENDPOINT_AT_FAULT:
            return Unavailable(self._described(ENDPOINT_AT_FAULT[self.status]), everything=True)
        if 400 <= self.status < 500 and self.status not in _FOR_NOW:
            return Reject(self._described())
        return Unavailable(self._described(), everything=self.pause() > 0)

    def _described(self, advice: str = "") -> str:
        parts = [f"HTTP {self.status} {_PHRASES.get(self.status, '')}".rstrip()]
        if advice:
            parts.append(advice)
        if (seconds := self.pause()) > 0:
            parts.append(f"Retry-After: {seconds:.0f} s")
        described = "; ".join(parts)
        return f"{described}; it says: {self.text}" if self.text else described


class Pause:
    """The time in which an endpoint wants no request."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._why = ""

    def begin(self, seconds: float, why: str) -> None:
        """Begin a pause, or make the present pause longer."""
        until = self._clock() + seconds
        if until > self._until:
            self._until, self._why = until, why

    @property
    def why(self) -> str | None:
        """The reason of the pause, if there is a pause now."""
        return self._why if self._clock() < self._until else None


def _seconds_of(retry_after: str, now: Callable[[], datetime]) -> float:
    """Return the seconds of a header Retry-After, a number or a date; else 0."""
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # OverflowError: of a year or an hour that no integer of C can hold
        return 0.0
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (aware - now()).total_seconds()

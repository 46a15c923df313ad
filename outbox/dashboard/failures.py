"""Errors as pages: the fact, and the fix."""

from __future__ import annotations

from outbox.dashboard.access import NotSeenError, RefusedError, StrangerError
from outbox.dashboard.filters import BadAddressError
from outbox.dashboard.port import Admin
from outbox.dashboard.redaction import clean
from outbox.dashboard.tokens import TokenError
from outbox.dashboard.visit import Page
from outbox.errors import InvalidMessageError, OutboxError, SchemaError, SubscriptionError, VerdictStandsError

#: A page waits for so many seconds for the database.
PATIENCE_SECONDS = 10.0

_TITLES = {
    400: "This address has a mistake",
    401: "Who are you?",
    403: "You may not do this",
    404: "Nothing is here",
    405: "Nothing is here",
    409: "Not as you saw it",
    500: "The dashboard failed",
    503: "The database does not answer",
    504: "The database is slow",
}


def page_of(error: Exception, admin: Admin | None = None) -> Page:
    """Return the page of an error. `admin`: of the outbox in question."""
    status, text = _told(error, admin)
    if isinstance(error, SchemaError):
        return failed(status, text, title="The tables are not ready")
    # The text of a missing right names the command with the rights.
    return failed(status, text, title="The database refused" if status == 503 and "db grants" in text else None)


def failed(status: int, text: str, *, title: str | None = None) -> Page:
    """Return a page about an error."""
    return Page("error.html", {"heading": title or _TITLES[status], "text": clean(text)}, status)


def _told(error: Exception, admin: Admin | None) -> tuple[int, str]:
    """Return the status and the text of an error."""
    told: dict[type[Exception], int] = {
        StrangerError: 401,
        RefusedError: 403,
        TokenError: 403,
        NotSeenError: 404,
        BadAddressError: 400,
        InvalidMessageError: 400,
        SchemaError: 503,
        VerdictStandsError: 409,
        SubscriptionError: 409,
        OutboxError: 503,
    }
    if isinstance(error, TimeoutError):
        return 504, (
            "no answer in time; the database may be busy: load the page again. A decision may"
            " still be carried out: look at the decisions before another one"
        )
    status = next((status for kind, status in told.items() if isinstance(error, kind)), None)
    if status is not None:
        return status, str(error)
    text, foreseen = ("", False) if admin is None else admin.explain(error)
    return (503, text) if foreseen else (500, "an unexpected error; the log of the dashboard has the whole text")

"""Headers of every answer, and the origin of every form."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outbox.dashboard.tokens import TokenError
from outbox.dashboard.values import plain

logger = logging.getLogger("outbox.dashboard")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self';"
    " frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class SecurityHeaders:
    """Puts the headers on every answer; by default an answer is stored nowhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Without the query, which may name keys and errors. A line end would begin a line of its own.
                logger.info("%s %s %d", scope["method"], plain(scope["path"]), message["status"])
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers)


def require_own_form(request: Request) -> None:
    """Raise unless a form may have come from a page of the same origin.

    Raises:
        TokenError: the form comes from elsewhere.
    """
    if not is_own_form(request):
        raise TokenError("the form comes from another site")


def is_own_form(request: Request) -> bool:
    """Return whether a form may have come from a page of the same origin; its token is asked for besides.

    A browser says `Origin: null` for the forms of pages without referrers, and `Sec-Fetch-Site` only where it encrypts.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site == "same-origin"
    # The scheme is left out: a proxy that ends TLS hides it.
    return origin in (None, "null") or urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()

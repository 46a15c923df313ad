"""Logins of a dashboard with a server of its own: a one-time address, a file of users, or the header of a proxy."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from outbox.dashboard.access import RIGHTS, Access, Session
from outbox.dashboard.failures import page_of
from outbox.dashboard.filters import BadAddressError
from outbox.dashboard.rendering import Renderer
from outbox.dashboard.security import SecurityHeaders, is_own_form, require_own_form
from outbox.dashboard.tokens import FORM_SECONDS, TokenError, Tokens
from outbox.dashboard.visit import Page, base_of, form_of, own_path
from outbox.runtime.process import user_and_host

#: The cost of scrypt: 16 MiB and about 50 ms for each password.
_COST, _BLOCKS, _LANES = 2**14, 8, 1
#: After a wrong password the answer waits.
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that logs people in. `header`: with the user; `networks`: of the proxy; `may`: the rights of all."""

    header: str
    networks: Sequence[IPv4Network | IPv6Network]
    may: Collection[str]

    def access(self, request: Request) -> Access | None:
        """Return the access of the user in the header; None: without one header of the name, or from elsewhere."""
        # A visitor may send the header, too, and a proxy may append its own.
        given = request.headers.getlist(self.header)
        user = given[0].strip() if len(given) == 1 else ""
        try:
            client = ip_address("" if request.client is None else request.client.host)
        except ValueError:
            return None
        is_proxy = any(client in network for network in self.networks)
        return Access(user=user, may=self.may) if user and is_proxy else None


class UserFile:
    """A file of users, a line each: `name:right,right:password`, and perhaps `:subscription,subscription`.

    The password is stored by `hashed`. A change of the file counts at once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def access(self, name: str) -> Access | None:
        """Return the access of a user; None: the file has no such user.

        Raises:
            ValueError: a line of the file has a mistake.
        """
        found = self._lines().get(name)
        return None if found is None else found[0]

    def stored(self, name: str) -> str:
        """Return the password of a user as the file keeps it; empty: the file has no such user."""
        return self._lines().get(name, (None, ""))[1]

    def login(self, name: str, password: str) -> Access | None:
        """Return the access of a user with the right password; unknown users take as long as known users."""
        access, stored = self._lines().get(name, (None, _NO_PASSWORD))
        return access if _matches(password, stored) else None

    def add(self, name: str, may: Collection[str], password: str) -> None:
        """Append a user, or replace the line of the user; the subscriptions of the line stay.

        Raises:
            ValueError: the name has a colon, or a right is unknown.
        """
        Access(user=name, may=may)
        if ":" in name or "\n" in name:
            raise ValueError("a name has no colon and no line end")
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.partition(":")[0] != name]
        before = self._lines().get(name, (None, ""))[0] if lines else None
        only = "" if before is None or before.subscriptions is None else f":{','.join(before.subscriptions)}"
        self._path.touch(mode=0o600)
        self._path.write_text(
            "".join(f"{line}\n" for line in [*kept, f"{name}:{','.join(sorted(may))}:{hashed(password)}{only}"])
        )

    def _lines(self) -> dict[str, tuple[Access | None, str]]:
        found: dict[str, tuple[Access | None, str]] = {}
        for number, line in enumerate(self._path.read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, *parts = line.strip().split(":", 3)
            try:
                may, password, only = (*parts, "")[:3]
                subscriptions = only.split(",") if only else None
                found[name] = Access(user=name, may=may.split(","), subscriptions=subscriptions), password
            except ValueError as error:
                raise ValueError(f"{self._path}, line {number}: write name:right,right:password; {error}") from None
        return found


def hashed(password: str, salt: bytes | None = None) -> str:
    """Return a password as a file of users keeps passwords."""
    salt = salt or secrets.token_bytes(16)
    key = hashlib.scrypt(password.encode(), salt=salt, n=_COST, r=_BLOCKS, p=_LANES)
    return f"scrypt${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}"


#: A password of nobody.
_NO_PASSWORD = f"scrypt${base64.b64encode(bytes(16)).decode()}$"


def _matches(password: str, stored: str) -> bool:
    try:
        kind, salt, _ = stored.split("$")
        return kind == "scrypt" and hmac.compare_digest(hashed(password, base64.b64decode(salt)), stored)
    except ValueError:
        return False


class Door:
    """Lets people in, and keeps a session in a cookie."""

    def __init__(self, *, users: UserFile | None = None, proxy: Proxy | None = None, title: str = "Outbox") -> None:
        """`users`, `proxy`: without both, the one-time address is the only way in."""
        self._users, self._proxy = users, proxy
        self.one_time = secrets.token_urlsafe(24) if users is None and proxy is None else None
        self._tokens, self._renderer = Tokens(), Renderer(title, ())
        # Passwords that wait for their turn must not hold the threads of all pages.
        self._one_password = asyncio.Lock()
        # Browsers send cookies to every port of a host.
        self._cookie = f"outbox-dashboard-{secrets.token_hex(4)}"

    def known(self, request: Request) -> Access | None:
        """Return the access of a request."""
        found = None if self._proxy is None else self._proxy.access(request)
        return found or self._logged_in(request)

    def _logged_in(self, request: Request) -> Session | None:
        """Return the access of a request by its cookie."""
        session = self._tokens.session(request.cookies.get(self._cookie, ""))
        user = (session or "").partition(" ")[2]
        if session is None or session != self._session_of(user):
            return None
        found = Access(user=user, may=RIGHTS) if self._users is None else self._users.access(user)
        if found is None:
            return None
        log_out = self._tokens.of_form(user)
        return Session(user=user, may=found.may, subscriptions=found.subscriptions, log_out=log_out)

    def _session_of(self, user: str) -> str:
        """Return the subject of a session, which ends with the password."""
        return f"{'' if self._users is None else self._tokens.short(self._users.stored(user))} {user}"

    def access(self, request: Request) -> Access | None:
        """Return the access of a request for a page; lead strangers to the login, if there is a login."""
        found = self.known(request)
        if found is None and self._users is not None and request.method == "GET":
            raise HTTPException(303, headers={"location": f"{base_of(own_path(request))}login"})
        return found

    async def enter(self, request: Request) -> Response:
        """Answer the one-time address."""
        given, wanted = request.query_params.get("once", ""), self.one_time
        if wanted is None or not hmac.compare_digest(given.encode(), wanted.encode()):
            return await self._page(request, "This address has been used. Start the dashboard again.", 403)
        self.one_time = None
        return self._session(request, user_and_host())

    async def login(self, request: Request) -> Response:
        """Ask for name and password, and check both."""
        if self._users is None:
            return await self.enter(request)
        if request.method == "GET":
            return await self._page(request, None, 200)
        try:
            fields = await form_of(request)
        except BadAddressError as error:
            return await self._page(request, str(error), 400)
        name, password = (fields.get(each, [""])[0] for each in ("user", "password"))
        found = None
        if is_own_form(request):
            async with self._one_password:
                found = await run_in_threadpool(self._users.login, name, password)
        if found is None:
            await anyio.sleep(_PAUSE_SECONDS)
            return await self._page(request, "Name or password is wrong.", 403)
        return self._session(request, found.user)

    async def logout(self, request: Request) -> Response:
        """End the session of a visitor, who asks for the end by a form of a page."""
        session = self._logged_in(request)
        if session is not None:
            try:
                fields = await form_of(request)
                require_own_form(request)
                self._tokens.require_form(fields.get("token", [""])[0], session.user)
                self._tokens.use(request.cookies[self._cookie])
            except (BadAddressError, TokenError) as error:
                return await self._shown(request, page_of(error))
        answer: Response = RedirectResponse("login", 303)
        if self._users is None:
            answer = await self._page(request, "You have logged out. Start the dashboard again to log in.", 200)
        answer.delete_cookie(self._cookie, httponly=True, samesite="strict")
        return answer

    def _session(self, request: Request, user: str) -> Response:
        answer = RedirectResponse("./", 303)
        # A proxy that ends TLS says so; whoever else says so harms the own session alone.
        secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        session = self._tokens.of_session(self._session_of(user))
        answer.set_cookie(self._cookie, session, max_age=FORM_SECONDS, httponly=True, samesite="strict", secure=secure)
        return answer

    async def _page(self, request: Request, error: str | None, status: int) -> Response:
        return await self._shown(request, Page("login.html", {"error": error, "asks": self._users is not None}, status))

    async def _shown(self, request: Request, page: Page) -> Response:
        return HTMLResponse(await run_in_threadpool(self._renderer.page, own_path(request), page, None), page.status)


def behind(door: Door, inner: ASGIApp) -> ASGIApp:
    """Return a dashboard behind a door, whose `access` and `known` the dashboard has."""
    headers = [Middleware(SecurityHeaders)]
    login = Route("/login", door.login, methods=["GET", "POST"], middleware=headers)
    logout = Route("/logout", door.logout, methods=["POST"], middleware=headers)
    return Router([login, logout], default=inner, redirect_slashes=False)

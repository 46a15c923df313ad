"""The dashboard as an ASGI application: routes and rights over the pages."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp

from outbox.admin.results import Look
from outbox.dashboard import deciding, pages
from outbox.dashboard.access import Access, Hook, NotSeenError, RefusedError, StrangerError
from outbox.dashboard.failures import PATIENCE_SECONDS, failed, page_of
from outbox.dashboard.live import Live, stream
from outbox.dashboard.numbers import Answer, Numbers
from outbox.dashboard.port import Admin, Outbox
from outbox.dashboard.redaction import Keys, Redact, cleaned, scrub
from outbox.dashboard.rendering import Renderer
from outbox.dashboard.security import SecurityHeaders, require_own_form
from outbox.dashboard.seen import Seen
from outbox.dashboard.tokens import Tokens
from outbox.dashboard.values import plain
from outbox.dashboard.visit import Page, Visit, form_of, own_path, path_of
from outbox.errors import SchemaError, SubscriptionError
from outbox.model.pausing import Pause
from outbox.runtime.document import json_text

T = TypeVar("T")

logger = logging.getLogger("outbox.dashboard")

_STATIC = Path(__file__).parent / "static"
_FILES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript", "icon.svg": "image/svg+xml"}
#: The name of an outbox, of several.
_NAME = re.compile(r"[\w-]+")
#: So many pages ask their databases at once.
_THREADS = 4
#: So many machines, whose answers must not wait for the pages of people.
_MACHINE_THREADS = 2
#: So many pages follow the numbers of a database; each of them is rendered by itself.
_MOST_VIEWERS = 100
#: A decision may wait for another command, and be carried out here.
_DECIDING_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Way:
    """A route: address, needed right, and page. `method`: POST for forms."""

    path: str
    right: str
    page: Callable[[Visit], Page]
    method: str = "GET"
    decides: bool = False


#: Every page. A decision asks for the right of its verb besides.
WAYS = (
    Way("", "see", pages.overview),
    Way("s/{name:path}", "see", pages.subscription),
    Way("parked", "see", pages.parked),
    Way("m", "see", pages.message),
    Way("m/{id}", "see", pages.message),
    Way("m/{id}/body", "bodies", pages.body, "POST"),
    Way("k", "see", pages.key),
    Way("k/{key}", "see", pages.key),
    Way("half", "see", pages.half),
    Way("half/{id:path}", "see", pages.transaction),
    Way("workers", "see", pages.workers),
    Way("decisions", "see", pages.decisions),
    Way("doctor", "see", pages.doctor),
    Way("decide", "see", deciding.decide, "POST", decides=True),
    Way("confirm", "see", deciding.confirm, "POST", decides=True),
)


def app(
    outbox: Outbox | Admin | Mapping[str, Outbox | Admin],
    *,
    access: Hook | None = None,
    machines: Hook | None = None,
    redact: Redact = scrub,
    keys: Keys = "shown",
    read_only: bool = False,
    title: str = "Outbox",
    secret: str | bytes | None = None,
    polls: timedelta | None = None,
) -> ASGIApp:
    """Return the dashboard of an outbox as an ASGI application.

    Args:
        outbox: an `Outbox` or an `admin`; or several, by the name in pages.
        access: called with each request; returns an `Access`, or None for strangers. A coroutine function is awaited.
            `LOCAL` gives every right to requests of the same machine.
        machines: the same for `/status.json` and `/healthz`; None: `access` decides.
        redact: returns headers and body of a message as people may see both; by default headers lose secrets.
        keys: `hashed` hides the keys of messages.
        read_only: there is no route for decisions.
        title: of all pages.
        secret: signs forms; the same in all processes behind an address. None: a new secret a process.
        polls: the pause after which an open page asks for new numbers; None: a page keeps a connection open for them.

    Raises:
        ValueError: `access` is missing, there is no outbox, or the secret is too short.
    """
    if access is None:
        raise ValueError(
            "access is missing: pass a function that returns outbox.dashboard.Access(user=…, may={'see', …}) for a"
            " request, or None for nobody; for your own machine alone pass access=outbox.dashboard.LOCAL"
        )
    several = isinstance(outbox, Mapping)
    named: Any = outbox if isinstance(outbox, Mapping) else {None: outbox}
    admins: dict[str | None, Admin] = {name: getattr(each, "admin", each) for name, each in named.items()}
    if not admins:
        raise ValueError("there is no outbox to show")
    if several and not all(_NAME.fullmatch(str(name)) for name in admins):
        raise ValueError("the name of an outbox is a part of addresses: use letters, digits, hyphens and underscores")
    site = Site(
        admins=admins,
        access=access,
        machines=machines or access,
        redact=redact,
        keys=keys,
        read_only=read_only,
        tokens=Tokens(secret),
        renderer=Renderer(title, map(str, admins) if several else ()),
        polls=polls,
    )
    made = Starlette(
        routes=site.routes(),
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={404: site.missing, 405: site.missing},
    )
    # The redirect of the router names the server, which a proxy may have hidden.
    made.router.redirect_slashes = False
    return made


class Site:
    """A dashboard with databases."""

    def __init__(
        self,
        *,
        admins: Mapping[str | None, Admin],
        access: Hook,
        machines: Hook,
        redact: Redact,
        keys: Keys,
        read_only: bool,
        tokens: Tokens,
        renderer: Renderer,
        polls: timedelta | None,
    ) -> None:
        self._admins = admins
        self._access, self._machines = access, machines
        self._redact, self._keys, self._read_only = redact, keys, read_only
        self._tokens, self._renderer, self._polls = tokens, renderer, polls
        self._numbers = {name: Numbers() for name in admins}
        self._live = {name: Live(partial(self._numbers[name].ask, admin)) for name, admin in admins.items()}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="outbox-dashboard")
        self._machine_threads = ThreadPoolExecutor(_MACHINE_THREADS, thread_name_prefix="outbox-dashboard-machine")

    # Routes

    def routes(self) -> list[Route]:
        """Return all routes; a read-only dashboard has no routes for decisions."""
        several = None not in self._admins
        place = "/db/{database}/" if several else "/"
        ways = [way for way in WAYS if not (way.decides and self._read_only)]
        found = [Route(place + way.path, self._endpoint(way), methods=[way.method]) for way in ways]
        if several:
            found.append(Route("/", self._endpoint(Way("", "see", lambda _visit: Page("databases.html")))))
        return [
            Route("/static/{name}", self._file),
            Route("/healthz", self._health),
            Route(f"{place}status.json", self._status),
            Route(f"{place}live", self._events),
            *found,
        ]

    def _endpoint(self, way: Way) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            visit = None
            try:
                visit = await self._visit(request)
                _require(visit, way.right)
                if request.method == "POST":
                    self._require_own_form(visit, first=way.page is not deciding.confirm)
                patience = _DECIDING_SECONDS if way.decides else PATIENCE_SECONDS
                return await self._answer(request, visit, await self._page(way.page, visit, patience))
            except HTTPException:
                raise
            except Exception as error:
                page = self._failed(request, error, visit)
                if visit is not None and way.page is pages.overview and not isinstance(error, SchemaError):
                    page = await run_in_threadpool(pages.last_overview, visit, page)
                return await self._answer(request, visit, page)

        return endpoint

    @staticmethod
    def _failed(request: Request, error: Exception, visit: Visit | None = None) -> Page:
        if isinstance(error, SubscriptionError) and request.method == "GET":
            error = NotSeenError(str(error))
        page = page_of(error, None if visit is None else visit.seen.admin)
        if page.status == 500:
            logger.error("%s failed", plain(path_of(request)), exc_info=error)
        return page

    async def _answer(self, request: Request, visit: Visit | None, page: Page) -> Response:
        html = await run_in_threadpool(self._renderer.page, own_path(request), page, visit)
        headers = {"www-authenticate": "Dashboard"} if page.status == 401 else None
        return HTMLResponse(html, page.status, headers)

    def _admin(self, request: Request) -> Admin:
        """Return the admin of the database of an address."""
        name = request.path_params.get("database")
        if name not in self._admins:
            raise NotSeenError(f"there is no database {name}")
        return self._admins[name]

    async def _page(self, page: Callable[[Visit], Page], visit: Visit, patience: float) -> Page:
        """Return a page; all questions share a connection."""

        def ask(admin: Admin) -> Page:
            return page(replace(visit, seen=replace(visit.seen, admin=admin)))

        return await self._asked(ask, visit.seen.admin, patience, self._threads)

    @staticmethod
    async def _asked(ask: Callable[[Admin], T], admin: Admin, patience: float, threads: ThreadPoolExecutor) -> T:
        """Ask in a thread, on a connection; give up after so many seconds."""

        def run() -> T:
            with admin.connected() as shared:
                return ask(shared)

        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(threads, run), patience)

    # Visitors

    async def _visit(self, request: Request) -> Visit:
        access = await self._allowed(self._access, request)
        if access is None:
            raise StrangerError("the access function of the dashboard gives no access to the request")
        name = request.path_params.get("database")
        # The list of several databases is about none.
        admin = self._admin(request) if name or None in self._admins else next(iter(self._admins.values()))
        form = await form_of(request) if request.method == "POST" else {}
        seen = Seen(admin, access, self._redact, self._keys, self._tokens)
        return Visit(
            request=request,
            seen=seen,
            database=name,
            form=form,
            read_only=self._read_only,
            numbers=self._numbers.get(name) or Numbers(),
        )

    @staticmethod
    async def _allowed(hook: Hook, request: Request) -> Access | None:
        found = hook(request) if inspect.iscoroutinefunction(hook) else await run_in_threadpool(hook, request)
        access: Access | None = await found if inspect.isawaitable(found) else found
        return access

    def _require_own_form(self, visit: Visit, *, first: bool) -> None:
        """Raise unless a form comes from a page of the dashboard for the same visitor."""
        require_own_form(visit.request)
        if first:
            self._tokens.require_form(visit.field("token"), visit.user)

    # What has no page of its own

    async def missing(self, request: Request, error: Exception) -> Response:
        """Answer a request without a route; the root without a slash leads to the root."""
        path = path_of(request)
        if not path:
            return RedirectResponse(f"{request.scope['path'].rpartition('/')[2]}/", 307)
        return await self._answer(request, None, failed(getattr(error, "status_code", 404), f"no page {path}"))

    async def _events(self, request: Request) -> Response:
        """Answer with the numbers of the overview whenever new numbers come."""
        try:
            visit = await self._visit(request)
            _require(visit, "see")
        except HTTPException:
            raise
        except Exception as error:
            return await self._answer(request, None, self._failed(request, error))
        if self._live[visit.database].viewers >= _MOST_VIEWERS:
            return PlainTextResponse("too many viewers\n", 503, {"retry-after": "60"})
        overview = path_of(request).removesuffix("live")

        def render(answer: Answer) -> dict[str, str]:
            values = pages.numbers(visit, answer)
            return {name: self._renderer.section(overview, name, visit, values) for name in pages.SECTIONS}

        lasting = {} if self._polls is None else {"lasting": timedelta(0), "pause": self._polls}
        return StreamingResponse(
            stream(self._live[visit.database], render, **lasting),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def _file(self, request: Request) -> Response:
        """Answer with a file of the library; the file holds no data."""
        name = request.path_params["name"]
        if name not in _FILES:
            raise HTTPException(404)
        return FileResponse(_STATIC / name, media_type=_FILES[name], headers={"cache-control": "no-cache"})

    async def _status(self, request: Request) -> Response:
        """Answer as `outbox status --json` prints, but without secrets, and with keys perhaps hashed."""
        found = await self._told_to_machine(request, lambda admin: admin.look())
        return found if isinstance(found, Response) else _json(cleaned(json_text(self._shown(found).document())))

    def _shown(self, look: Look) -> Look:
        """Return a look with keys perhaps hashed."""
        if self._keys == "shown":
            return look

        def hashed(pause: Pause) -> Pause:
            return pause if pause.key is None else replace(pause, key=f"#{self._tokens.short(pause.key)}")

        statuses = (replace(each, pauses=tuple(map(hashed, each.pauses))) for each in look.subscriptions)
        return replace(look, subscriptions=tuple(statuses))

    async def _health(self, request: Request) -> Response:
        """Answer whether each database answers."""
        for admin in self._admins.values():
            found = await self._told_to_machine(request, lambda admin: admin.subscriptions(), admin)
            if isinstance(found, Response):
                return found
        return PlainTextResponse("ok\n")

    async def _told_to_machine(self, request: Request, ask: Callable[[Admin], T], admin: Admin | None = None) -> Any:
        """Return the answer for a machine, or the response of an error."""
        try:
            access = await self._allowed(self._machines, request)
            if access is None or not access.allows("see") or access.subscriptions is not None:
                return PlainTextResponse("no access to all of this outbox\n", 401 if access is None else 403)
            return await self._asked(ask, admin or self._admin(request), PATIENCE_SECONDS, self._machine_threads)
        except HTTPException:
            raise
        except Exception as error:
            page = page_of(error, admin)
            return PlainTextResponse(f"{page.values['text']}\n", page.status)


def _require(visit: Visit, right: str) -> None:
    """Raise unless the visitor has a right.

    Raises:
        RefusedError: the right is missing.
    """
    if not visit.may(right):
        raise RefusedError(f"{visit.user} has not the right {right}")


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")

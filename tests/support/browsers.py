"""Pages in Debian's Chromium, and servers that show them: below any prefix, gone and back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, sync_playwright
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from outbox.testing.servers import ServerMissing
from tests.support.waiting import eventually

CHROMIUM = Path("/usr/bin/chromium")
#: WCAG 2.2 AA, and what axe calls good practice.
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
#: A browser reports here each resource that the policy of a page refuses.
_REPORTS = """
    window.refused = [];
    const refuse = (e) => window.refused.push(`${e.violatedDirective} ${e.blockedURI}`);
    document.addEventListener("securitypolicyviolation", refuse);
"""

Way = Literal["alone", "mounted", "stripped"]
#: A server of its own, an application mounted in another, and a proxy that strips a prefix which nobody is told of.
PREFIXES: dict[Way, str] = {"alone": "", "mounted": "/ops/outbox", "stripped": "/tools/box"}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium for some tests, which must not run an event loop in their thread.

    Raises:
        ServerMissing: Chromium is not installed.
    """
    if not CHROMIUM.exists():
        raise ServerMissing(f"{CHROMIUM} is missing; on Debian, root installs it by: bash .ci/servers chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Site:
    """A dashboard on a port of this machine."""

    def __init__(self, app: ASGIApp, way: Way = "alone") -> None:
        self._app = {"alone": lambda: app, "mounted": lambda: _mounted(app), "stripped": lambda: _stripping(app)}[way]()
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}{PREFIXES[way]}/"
        self.start()

    def start(self) -> None:
        """Answer, in a thread; also again after a stop."""
        config = uvicorn.Config(
            self._app, port=self._port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="dashboard of a test", daemon=True)
        self._thread.start()
        assert eventually(lambda: self._server.started)

    def stop(self) -> None:
        """Stop answering, and end what is open."""
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def site(app: ASGIApp, way: Way = "alone") -> Iterator[Site]:
    """Serve a dashboard while the block runs."""
    served = Site(app, way)
    try:
        yield served
    finally:
        served.stop()


def _mounted(app: ASGIApp) -> ASGIApp:
    return Starlette(routes=[Mount(PREFIXES["mounted"], app)])


def _stripping(app: ASGIApp) -> ASGIApp:
    """Return what an application gets from a proxy that strips the prefix and says nothing about it."""
    prefix = PREFIXES["stripped"]

    async def strip(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith(prefix), scope["path"]
        path = scope["path"].removeprefix(prefix)
        await app({**scope, "path": path, "raw_path": scope["raw_path"].removeprefix(prefix.encode())}, receive, send)

    return strip


class Visitor:
    """A person at a browser, who notes whatever goes wrong: errors of scripts, refusals, requests to other places."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.context: BrowserContext = browser.new_context(**options)
        self.context.add_init_script(_REPORTS)
        self.complaints: list[str] = []
        self.page = self.opened()

    def opened(self) -> Page:
        """Return another page of the same person."""
        page = self.context.new_page()
        page.on("console", lambda said: self._complain(f"{said.type}: {said.text}", said.type in ("error", "warning")))
        page.on("pageerror", lambda error: self._complain(f"script: {error}"))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self._complain(f"asks {request.url}", not request.url.startswith(self.url)))
        return page

    def goes(self, path: str = "") -> Page:
        """Open an address below the dashboard's root, and return the page."""
        self.page.goto(self.url + path, wait_until="domcontentloaded")
        return self.page

    def refused(self) -> list[str]:
        """Return what the policy of the page has refused."""
        found: list[str] = self.page.evaluate("window.refused ?? []")
        return found

    def failings(self, *rules: str) -> list[str]:
        """Return what axe finds wrong with the page; by some rules alone, where such are named."""
        chosen = {"type": "rule", "values": rules} if rules else _RULES
        found = Axe().run(self.page, options={"runOnly": chosen, "resultTypes": ["violations"]})
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
            for each in found.response["violations"]
            for node in each["nodes"]
        ]

    def _dismiss(self, dialog: Dialog) -> None:
        self._complain(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _complain(self, what: str, holds: object = True) -> None:
        if holds:
            self.complaints.append(what)


@contextmanager
def visiting(browser: Browser, url: str, **options: Any) -> Iterator[Visitor]:
    """Let a person visit a dashboard while the block runs."""
    visitor = Visitor(browser, url, **options)
    try:
        yield visitor
    finally:
        visitor.context.close()

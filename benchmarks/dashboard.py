"""What a dashboard costs: its pages over many parked messages, and a relay beside a page that somebody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from starlette.requests import Request
from starlette.testclient import TestClient

from benchmarks.arrivals import running
from benchmarks.drain import drain
from benchmarks.measure import Measurement, Turns, at_least, at_most
from benchmarks.site import Place, Site
from outbox import Message, Outbox, Relay, Verdict, create_engine
from outbox.dashboard import Access, app
from outbox.model.verdict import Reject

_PAGES = ("", "s/relay", "parked", "parked?name=relay&state=dead", "parked?name=relay&error=currency", "k?key=order-1")


class Refusing:
    """A sender whose destination refuses every message."""

    destination = "sender:refusing"

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """All of them are refused."""
        return [Reject(f"HTTP 422: {each.key} has no currency") for each in messages]

    def close(self) -> None:
        """Nothing is held."""


def dashboard_pages(site: Site) -> list[Measurement]:
    """Seconds of the slowest page while 100,000 messages are parked, against one second."""
    with site.place() as place:
        outbox = Outbox(place.engine)
        place.fill(site.scale.flat_drained)
        Relay(outbox, Refusing()).until_empty()
        browser = TestClient(app(outbox, access=_anybody))
        ours = [max(_seconds(browser, page) for page in _PAGES) for _ in range(site.scale.rounds)]
    return [
        Measurement(name="dashboard_pages", goal=at_most(1), unit="s", ours=ours, other=[1.0] * len(ours)),
    ]


def dashboard_drain(site: Site) -> list[Measurement]:
    """Messages a second of a relay beside a page that somebody watches, against a relay alone."""
    count, turns = site.scale.drained, Turns("dashboard_drain")
    with site.place() as place:
        place.fill(count)
        drain(place, count, "first")
        for number in range(site.scale.rounds):
            alone = drain(place, count, f"alone-{number}")
            turns.add(_watched(place, count, f"watched-{number}"), alone)
    return [Measurement(name=turns.name, goal=at_least(0.98), unit="msg/s", ours=turns.ours, other=turns.other)]


def _seconds(browser: TestClient, page: str) -> float:
    started = time.perf_counter()
    browser.get(f"/{page}").raise_for_status()
    return time.perf_counter() - started


def _watched(place: Place, count: int, name: str) -> float:
    with running(_watch, place.url) as pipe:
        pipe.recv()
        rate = drain(place, count, name)
        pipe.send("stop")
        return rate


def _watch(url: str, pipe: Pipe) -> None:
    """A process with a dashboard whose overview is watched until the process is told to stop."""
    asyncio.run(_viewed(url, pipe))


async def _viewed(url: str, pipe: Pipe) -> None:
    asked = {
        "type": "http", "method": "GET", "path": "/live", "raw_path": b"/live", "query_string": b"", "headers": [],
        "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    told = False

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(pipe.recv)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal told
        if not told and b"event: answer" in message.get("body", b""):
            told = True
            pipe.send("ready")

    await app(Outbox(create_engine(url)), access=_anybody)(asked, receive, send)


def _anybody(_request: Request) -> Access:
    return Access(user="benchmarks", may=("see", "replay"))

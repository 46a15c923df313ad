"""A dashboard as a browser without JavaScript uses it: pages, links and forms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

from sqlalchemy import Engine
from starlette.requests import Request
from starlette.testclient import TestClient

from outbox import Message, Outbox, Reject, Relay
from outbox.dashboard import Access, app

EVERYTHING = ("see", "bodies", "replay", "discard", "pause", "decide")


class Refusing:
    """A destination that refuses every message."""

    destination = "nats://h:4222"

    def __init__(self, error_of: Callable[[Message], str] = lambda message: "HTTP 422") -> None:
        self._error_of = error_of

    def send(self, messages: Sequence[Message]) -> list[Reject]:
        """Refuse all."""
        return [Reject(self._error_of(each)) for each in messages]

    def close(self) -> None:
        """Nothing is open."""


def twice_dead(engine: Engine) -> Outbox:
    """Return an outbox with a message that is a dead letter of two subscriptions."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b'{"card": "4711"}', key="order-1")
    for name in ("billing", "mail"):
        Relay(outbox, Refusing(), name=name).until_empty()
    return outbox


@dataclass
class Form:
    """A form with its fields; `button`: the text of its last button."""

    action: str
    method: str
    fields: dict[str, list[str]] = field(default_factory=dict)
    button: str = ""

    def filled(self, **more: str) -> dict[str, list[str] | str]:
        """The fields to send."""
        return {**self.fields, **more}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self.links: list[str] = []
        self.text = ""
        self._form: Form | None = None
        self._in_button = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.links += [given[each] for each in ("href", "src", "action", "data-events") if each in given]
        if tag == "form":
            self._form = Form(given.get("action", ""), given.get("method", "get"))
            self.forms.append(self._form)
        elif tag == "input" and self._form is not None and given.get("type") == "hidden":
            self._form.fields.setdefault(given["name"], []).append(given.get("value", ""))
        self._in_button = tag == "button" or (self._in_button and tag != "form")

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None
        if tag == "button":
            self._in_button = False

    def handle_data(self, data: str) -> None:
        if self._in_button and self._form is not None:
            self._form.button += data
        self.text += data


def read(html: str) -> _Reader:
    """Return what a page holds: `forms`, `links`, `text`."""
    reader = _Reader()
    reader.feed(html)
    return reader


def visitor(
    outbox: Any,
    may: Collection[str] = EVERYTHING,
    *,
    user: str = "eve",
    subscriptions: Collection[str] | None = None,
    **options: Any,
) -> TestClient:
    """Return the browser of a user with rights; None of `may`: a stranger."""

    def access(request: Request) -> Access | None:
        return Access(user=user, may=may, subscriptions=subscriptions) if may else None

    return TestClient(app(outbox, access=access, **options), raise_server_exceptions=True, follow_redirects=False)


def form(browser: TestClient, path: str, button: str) -> Form:
    """Return the form of a page with a button; its action as a path."""
    answer = browser.get(path)
    assert answer.status_code == 200, answer.text
    return form_of(answer, button)


def form_of(answer: Any, button: str) -> Form:
    """Return the form of an answer with a button."""
    found = next(each for each in read(answer.text).forms if button in each.button)
    found.action = urljoin(str(answer.url), found.action)
    return found


def send(browser: TestClient, form: Form, headers: Mapping[str, str] | None = None, **more: str) -> Any:
    """Send a form with more fields."""
    return browser.post(form.action, data=form.filled(**more), headers=headers)


def headline(answer: Any) -> str:
    """Return the h1 of a page."""
    return str(answer.text.partition("<h1>")[2].partition("</h1>")[0])

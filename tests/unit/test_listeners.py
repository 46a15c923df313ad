"""Whoever listens is told of every event, and disturbs nobody."""

import logging
from asyncio import CancelledError
from typing import Any

import pytest

from outbox.telemetry.events import Event, Listeners, RolledBack

EVENT = RolledBack(database=object(), messages=())  # type: ignore[arg-type]  # nobody asks for the database here


def test_those_who_listen_are_told_in_their_order_until_they_listen_no_more():
    told: list[tuple[str, Event]] = []
    beyond = Listeners()
    listeners = Listeners(beyond)
    seen = [bool(listeners)]

    @beyond.listen
    def everywhere(event: Event) -> None:
        told.append(("everywhere", event))

    @listeners.listen
    def here(event: Event) -> None:
        told.append(("here", event))

    seen.append(bool(listeners))
    listeners.tell(EVENT)
    listeners.unlisten(here)
    listeners.unlisten(here)
    seen.append(bool(listeners))
    listeners.tell(EVENT)
    beyond.unlisten(everywhere)
    seen.append(bool(listeners))
    listeners.tell(EVENT)

    assert told == [("here", EVENT), ("everywhere", EVENT), ("everywhere", EVENT)]
    assert seen == [False, True, True, False]


def test_a_listener_that_raises_is_logged_once_and_the_others_are_told(caplog):
    told: list[Any] = []
    listeners = Listeners()

    @listeners.listen
    def broken(event: Event) -> None:
        raise ZeroDivisionError

    listeners.listen(told.append)
    for _ in range(3):
        listeners.tell(EVENT)

    assert told == [EVENT] * 3
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, f"a listener to events failed; its further errors are not logged: {broken!r}")
    ]


def test_a_listener_may_end_itself():
    told: list[str] = []
    listeners = Listeners()

    @listeners.listen
    def once(event: Event) -> None:
        told.append("once")
        listeners.unlisten(once)

    @listeners.listen
    def always(event: Event) -> None:
        told.append("always")

    listeners.tell(EVENT)
    listeners.tell(EVENT)

    assert told == ["once", "always", "always"]


def test_a_coroutine_function_is_refused():
    async def later(event: Event) -> None: ...

    with pytest.raises(TypeError) as caught:
        Listeners().listen(later)

    assert str(caught.value) == "a listener is called on the thread where something happens, so it cannot be async"


@pytest.mark.parametrize("error", [CancelledError, SystemExit])
def test_a_listener_that_would_end_its_thread_does_not(error):
    told: list[Any] = []
    listeners = Listeners()

    @listeners.listen
    def broken(event: Event) -> None:
        raise error

    listeners.listen(told.append)
    listeners.tell(EVENT)

    assert told == [EVENT]

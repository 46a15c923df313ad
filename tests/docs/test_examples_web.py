"""The examples for web frameworks, over HTTP: a request leaves its order and its message, or neither."""

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from tests.support.readers import bodies

pytestmark = pytest.mark.storm

EXAMPLES = Path(__file__).parents[2] / "examples"
PLACED = {"customer": "ann", "total": 42}
TOO_MUCH = {"customer": "ben", "total": 4200}
ASYNCHRONOUS = ("fastapi_orders", "litestar_orders")
NONE: tuple[list[str], list[bytes]] = ([], [])

Use = Callable[[httpx.AsyncClient], Awaitable[list[int]]]


@pytest.fixture
def example(monkeypatch) -> Callable[[str], ModuleType]:
    """Imports an example, anew in each test."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def failing_commits():
    """Every commit of a session raises, as when the connection is lost right before it."""

    def fail(_session: Session) -> None:
        raise ConnectionError("no commit")

    event.listen(Session, "before_commit", fail)
    yield
    event.remove(Session, "before_commit", fail)


def left(engine: Engine) -> tuple[list[str], list[bytes]]:
    """The customers that have an order, and the messages."""
    with engine.connect() as connection:
        customers = list(connection.execute(text("SELECT customer FROM orders ORDER BY id")).scalars())
    return customers, bodies(engine)


def on_asgi(create_app: Callable[[str], Any], engine: Engine, use: Use) -> list[int]:
    """What `use` finds at an asynchronous application on that database, from its start to its end."""
    url = engine.url.set(drivername="sqlite+aiosqlite") if engine.dialect.name == "sqlite" else engine.url
    app = create_app(url.render_as_string(hide_password=False))

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            started(app),
            httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
        ):
            return await use(client)

    return asyncio.run(run())


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[None]:
    """The application has begun, and ends afterwards: servers say so by ASGI's messages."""
    asked: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    said: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    running = asyncio.create_task(app({"type": "lifespan", "app": app, "state": {}}, asked.get, said.put))
    for word in ("startup", "shutdown"):
        await asked.put({"type": f"lifespan.{word}"})
        assert await said.get() == {"type": f"lifespan.{word}.complete"}
        if word == "startup":
            yield
    await running


async def place(client: httpx.AsyncClient) -> list[int]:
    """One order."""
    return [(await client.post("/orders", json=PLACED)).status_code]


async def ask_too_much(client: httpx.AsyncClient) -> list[int]:
    """One order that is refused after its message was sent."""
    return [(await client.post("/orders", json=TOO_MUCH)).status_code]


async def place_at_once(client: httpx.AsyncClient) -> list[int]:
    """Orders at the same time, among them one that is refused."""
    wanted = [PLACED, TOO_MUCH, PLACED, PLACED]
    answers = await asyncio.gather(*(client.post("/orders", json=each) for each in wanted))
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_application_leaves_the_order_and_its_message(example, engine, name):
    assert on_asgi(example(name).create_app, engine, place) == [201]
    assert left(engine) == (["ann"], [b'{"id":1,"total":42}'])


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_application_leaves_nothing_of_a_request_that_fails_after_its_send(example, engine, name):
    assert on_asgi(example(name).create_app, engine, ask_too_much) == [409]
    assert left(engine) == NONE


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_application_keeps_requests_at_the_same_time_apart(example, pg_engine, name):
    assert on_asgi(example(name).create_app, pg_engine, place_at_once) == [201, 409, 201, 201]

    customers, sent = left(pg_engine)
    assert (customers, len(sent)) == (["ann"] * 3, 3)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_application_answers_after_the_commit(example, engine, failing_commits, name):
    """What was not committed is not confirmed."""
    assert on_asgi(example(name).create_app, engine, place) == [500]
    assert left(engine) == NONE


def on_flask(create_app: Callable[[dict[str, Any]], Any], engine: Engine, order: dict[str, Any]) -> int:
    """How an application on that database answers one order."""
    app = create_app({"SQLALCHEMY_DATABASE_URI": engine.url.render_as_string(hide_password=False)})
    status: int = app.test_client().post("/orders", json=order).status_code
    with app.app_context():
        app.extensions["outbox"].close()
        app.extensions["sqlalchemy"].engine.dispose()
    return status


def test_flask_leaves_the_order_and_its_message(example, engine):
    assert on_flask(example("flask_orders").create_app, engine, PLACED) == 201
    assert left(engine) == (["ann"], [b'{"id":1,"total":42}'])


def test_flask_leaves_nothing_of_a_request_that_fails_after_its_send(example, engine):
    assert on_flask(example("flask_orders").create_app, engine, TOO_MUCH) == 409
    assert left(engine) == NONE


def test_flask_answers_after_the_commit(example, engine, failing_commits):
    assert on_flask(example("flask_orders").create_app, engine, PLACED) == 500
    assert left(engine) == NONE


def test_two_flask_applications_have_an_outbox_each(example, pg_engine, sqlite_engine):
    """As the tests of an application make one after the other."""
    create_app = example("flask_orders").create_app

    answers = [on_flask(create_app, engine, PLACED) for engine in (pg_engine, sqlite_engine, pg_engine)]

    assert answers == [201, 201, 201]
    assert left(sqlite_engine)[0] == ["ann"]
    assert left(pg_engine)[0] == ["ann", "ann"]

"""What `docs/workflows.md` says is so, with real engines, where their libraries and servers are installed."""

import asyncio
import importlib
import json
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import aio_pika
import pytest
from sqlalchemy import create_engine, text

from outbox import Message, Outbox, Relay
from outbox.testing.servers import PostgresServer, ServerMissing
from outbox.testing.servers.process import free_port
from tests.support.pages import TOP, blocks
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.workflows import RestateServer, TemporalServer
from tests.support.waiting import eventually

PAGE = (TOP / "docs" / "workflows.md").read_text()
FILES = {block.splitlines()[0].removeprefix("# "): block for block in blocks(PAGE, "python")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the page, from which they are imported. Afterwards nothing of them is left."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def sent(sqlite_engine) -> list[str]:
    """The ids of what the shop has sent and no relay has taken."""
    messages = [Message("orders.placed", {"id": number}, key=f"order-{number}") for number in range(5)]
    with Outbox(sqlite_engine).begin() as session:
        return sorted(str(id) for id in Outbox(sqlite_engine).send_all(session, messages))


def hand_over_twice(engine: Any, file: ModuleType, function: str) -> None:
    """By two relays, as if the first had lost the answers; the second has loaded the file anew, as a process does.

    A server that is slow to answer in the crowd gets messages once more, later.
    """
    for name in ("first", "second"):
        with closing(Relay(Outbox(engine), getattr(file, function), name=name)) as relay:
            assert eventually(partial(everything_sent, engine, relay))
        importlib.reload(file)


def everything_sent(engine: Any, relay: Relay) -> bool:
    relay.until_empty()
    with engine.connect() as connection:
        return not connection.scalar(text("SELECT count(*) FROM outbox_parked"))


def attempts_while_away(engine: Any, file: ModuleType, function: str) -> int:
    """Let the first relay find no engine; return how many attempts it counted."""
    with closing(Relay(Outbox(engine), getattr(file, function), name="first")) as relay:
        relay.once()
    importlib.reload(file)
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT coalesce(sum(attempts), 0) FROM outbox_parked")))


def server_or_skip(server: Any) -> Any:
    try:
        return server()
    except ServerMissing as error:
        pytest.skip(str(error))


@pytest.mark.storm
def test_temporal_runs_the_workflow_of_a_message_once(folder, sqlite_engine, sent, monkeypatch):
    pytest.importorskip("temporalio")
    monkeypatch.setenv("TEMPORAL", f"127.0.0.1:{free_port()}")
    file = importlib.import_module("temporal_start")
    counted = attempts_while_away(sqlite_engine, file, "to_temporal")
    with server_or_skip(TemporalServer) as server:
        monkeypatch.setenv("TEMPORAL", server.address)
        assert eventually(lambda: asyncio.run(started(server.address)) is not None)

        hand_over_twice(sqlite_engine, file, "to_temporal")

        asyncio.run(work_off(server.address, sent))
        assert eventually(lambda: asyncio.run(started(server.address)) == sent)
    assert counted == 0


async def started(address: str) -> list[str] | None:
    """The ids of all runs that Temporal has; None: it is not ready."""
    from temporalio.client import Client

    with suppress(Exception):
        client = await Client.connect(address)
        return sorted([each.id async for each in client.list_workflows()])
    return None


async def work_off(address: str, ids: list[str]) -> None:
    """Run a worker until these workflows have come to an end."""
    from temporalio.client import Client
    from temporalio.worker import Worker

    from tests.support.temporal_workflow import PlaceOrder

    client = await Client.connect(address)
    async with Worker(client, task_queue="orders", workflows=[PlaceOrder]):
        await asyncio.gather(*(client.get_workflow_handle(id).result() for id in ids))


@pytest.mark.storm
def test_restate_runs_the_workflow_of_a_message_once(folder, sqlite_engine, sent, monkeypatch):
    pytest.importorskip("restate")
    pytest.importorskip("hypercorn")
    monkeypatch.setenv("RESTATE", f"http://127.0.0.1:{free_port()}")
    file = importlib.import_module("restate_start")
    counted = attempts_while_away(sqlite_engine, file, "to_restate")
    with server_or_skip(RestateServer) as server, placing_orders(server) as placed:
        monkeypatch.setenv("RESTATE", server.url)

        hand_over_twice(sqlite_engine, file, "to_restate")

        assert eventually(lambda: len(placed) >= len(sent))
        assert eventually(lambda: unfinished(server) == 0)
    assert sorted(placed) == sent
    assert counted == 0


@contextmanager
def placing_orders(server: RestateServer) -> Iterator[list[str]]:
    """A service with the workflow, registered; the ids of the workflows that ran."""
    import restate
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    placed: list[str] = []
    workflow = restate.Workflow("PlaceOrder")

    @workflow.main()
    async def run(context: Any, order: dict[str, int]) -> int:
        placed.append(context.key())
        return order["id"]

    config, ended = Config(), asyncio.Event()
    config.bind = [f"127.0.0.1:{free_port()}"]
    loop = asyncio.new_event_loop()
    serving = serve(restate.app([workflow]), config, shutdown_trigger=ended.wait)
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    try:
        body = json.dumps({"uri": f"http://{config.bind[0]}"}).encode()
        request = urllib.request.Request(f"{server.admin}/deployments", body, {"Content-Type": "application/json"})

        def registered() -> bool:
            with suppress(OSError), urllib.request.urlopen(request, timeout=10):
                return True
            return False

        assert eventually(registered)
        yield placed
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()


def unfinished(server: RestateServer) -> int:
    """How many workflows are not at their end."""
    query = json.dumps({"query": "SELECT count(*) AS n FROM sys_invocation WHERE status <> 'completed'"}).encode()
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.admin}/query", query, headers), timeout=10) as answer:
        return int(json.load(answer)["rows"][0]["n"])


@pytest.mark.storm
def test_dbos_runs_the_workflow_of_a_message_once(folder, postgres: PostgresServer, sqlite_engine, sent, monkeypatch):
    dbos = pytest.importorskip("dbos")
    url = postgres.create_database("dbos_orders")
    monkeypatch.setenv("DBOS_DATABASE", url)
    placed: list[str] = []
    dbos.DBOS(config={"name": "orders", "system_database_url": url})

    @dbos.DBOS.workflow(name="place_order")
    def place_order(order: int) -> int:
        placed.append(dbos.DBOS.workflow_id)
        return order

    try:
        dbos.DBOS.launch()
        dbos.DBOS.register_queue("orders")
        file = importlib.import_module("dbos_start")
        hand_over_twice(sqlite_engine, file, "to_dbos")
        assert eventually(lambda: len(placed) >= len(sent))
        assert eventually(lambda: {each.status for each in dbos.DBOS.list_workflows()} == {"SUCCESS"})
        in_transactions(file.client, url)
        assert eventually(lambda: len(placed) > len(sent))
        file.client.destroy()
    finally:
        dbos.DBOS.destroy(destroy_registry=True)
        postgres.drop_database("dbos_orders")
    assert sorted(placed) == sorted([*sent, "committed"])


def in_transactions(client: Any, url: str) -> None:
    """Enqueue workflows without an outbox, in a transaction that rolls back and in one that commits."""
    options = {"workflow_name": "place_order", "queue_name": "orders"}
    engine = create_engine(url)
    with suppress(ZeroDivisionError), engine.begin() as connection:
        client.enqueue_in_transaction(connection, options | {"workflow_id": "rolled back"}, 7)
        raise ZeroDivisionError
    with engine.begin() as connection:
        client.enqueue_in_transaction(connection, options | {"workflow_id": "committed"}, 7)
    engine.dispose()


@pytest.mark.storm
def test_a_chain_of_celery_starts_with_each_message(rabbitmq: RabbitServer, folder, sqlite_engine, sent, monkeypatch):
    monkeypatch.setenv("BROKER_URL", f"{rabbitmq.url}/")
    file = importlib.import_module("celery_start")
    # Celery has one name for the queue, and the server may have been used before.
    asyncio.run(taken(rabbitmq.url, "celery"))

    hand_over_twice(sqlite_engine, file, "to_celery")

    tasks = asyncio.run(taken(rabbitmq.url, "celery"))
    file.app.close()
    started = Counter(str(headers["id"]) for headers, _ in tasks)
    assert ({*started}, [id for id in sent if started[id] < 2]) == ({*sent}, [])
    assert {(headers["task"], step["task"]) for headers, embed in tasks for step in embed["chain"]} == {
        ("charge", "ship")
    }


async def taken(url: str, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The headers of the tasks in a queue, and what follows them.

    The queue stays: a pool of Celery's for all tests of a process remembers that the queue is there.
    """
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        queue, found = await channel.declare_queue(name, durable=True), []
        while (task := await queue.get(fail=False)) is not None:
            found.append((dict(task.headers), json.loads(task.body)[2]))
            await task.ack()
        return found

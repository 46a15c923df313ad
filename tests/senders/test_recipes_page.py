"""What `docs/own-destination.md` says of task queues is so: real brokers, and worker processes that run its files."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import aio_pika
import pytest
import redis as driver
from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Relay, create_engine, migrate
from outbox.model.verdict import DONE, Unavailable
from outbox.senders.opening import open_sender
from outbox.testing.servers.process import free_port
from tests.support.pages import TOP, blocks
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.redis import RedisServer
from tests.support.waiting import eventually

PAGE = (TOP / "docs" / "own-destination.md").read_text().partition("\n## Task queues\n")[2]
FILES = {block.splitlines()[0].removeprefix("# "): block for block in blocks(PAGE, "python")}
BIN = Path(sys.executable).parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the page and the tables that `outbox db upgrade` makes; from there they are imported.

    Afterwards nothing of them is left in this process.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    migrate.upgrade_inbox(create_engine("sqlite:///billing.db"))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    for name in FILES:
        if (module := sys.modules.pop(name.removesuffix(".py"), None)) is not None and hasattr(module, "engine"):
            module.engine.dispose()


def module(name: str, broker_url: str, monkeypatch):
    """A file of the page, imported for a broker."""
    monkeypatch.setenv("BROKER_URL", broker_url)
    return importlib.import_module(name)


@pytest.fixture
def sent(sqlite_engine) -> list[Message]:
    """What the shop has sent and no relay has taken."""
    messages = [Message("orders", {"id": number}, key=f"order-{number % 2}") for number in range(5)]
    with Outbox(sqlite_engine).begin() as session:
        Outbox(sqlite_engine).send_all(session, messages)
    return messages


def hand_over_twice(engine, tasks, function: str) -> None:
    """By two relays, as if the first had lost the answers; the second has loaded the file anew, as a process does."""
    for name in ("first", "second"):
        with closing(Relay(Outbox(engine), getattr(tasks, function), name=name)) as relay:
            relay.until_empty()
        importlib.reload(tasks)


def ids(messages: list[Message]) -> list[str]:
    """Their ids, each twice."""
    return sorted(str(message.message_id) for message in [*messages, *messages])


def invoices(folder: Path) -> list[int]:
    """What the workers have done."""
    billing = sys.modules["billing"]
    with Session(billing.engine) as session:
        return sorted(session.scalars(select(billing.Invoice.order)))


@contextmanager
def working(folder: Path, *command: str, end: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """A worker process and its children, which are ended by a signal."""
    path = os.pathsep.join([str(folder), str(TOP)])
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=folder, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield
            os.killpg(worker.pid, end)
            worker.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def check_work(
    folder: Path, queue_is_empty: Callable[[], bool], *command: str, end: signal.Signals = signal.SIGTERM
) -> None:
    """A worker of the queue does the work of each message once, and leaves no task."""
    with working(folder, *command, end=end):
        assert eventually(lambda: len(invoices(folder)) == 5 and queue_is_empty(), seconds=40), log_of(folder)

    assert (invoices(folder), queue_is_empty()) == ([0, 1, 2, 3, 4], True)


def log_of(folder: Path) -> str:
    return (folder / "worker.log").read_text()[-3000:]


@pytest.mark.storm
def test_celery_does_the_work_of_a_message_once(rabbitmq: RabbitServer, folder, sqlite_engine, sent, monkeypatch):
    tasks = module("celery_tasks", f"{rabbitmq.url}/", monkeypatch)

    hand_over_twice(sqlite_engine, tasks, "to_celery")

    assert asyncio.run(queued(rabbitmq.url, "celery")) == ids(sent)
    command = ["celery", "-A", "celery_tasks", "worker", "--pool=solo", "--without-gossip", "--without-mingle"]
    check_work(folder, lambda: asyncio.run(queued(rabbitmq.url, "celery")) == [], *command)
    tasks.app.close()
    asyncio.run(delete_queue(rabbitmq.url, "celery"))


async def queued(url: str, name: str) -> list[str]:
    """The ids of the tasks in a queue, which are given back."""
    async with await aio_pika.connect(url) as connection:
        queue = await (await connection.channel()).get_queue(name)
        found = []
        while (task := await queue.get(fail=False)) is not None:
            found.append(str(task.headers.get("id", task.message_id)))
        return sorted(found)


async def delete_queue(url: str, name: str) -> None:
    async with await aio_pika.connect(url) as connection:
        await (await connection.channel()).queue_delete(name)


@pytest.mark.storm
def test_dramatiq_does_the_work_of_a_message_once(redis: RedisServer, folder, sqlite_engine, sent, monkeypatch):
    tasks = module("dramatiq_tasks", f"{redis.url}/5", monkeypatch)
    client = driver.Redis(port=redis.port, db=5)

    hand_over_twice(sqlite_engine, tasks, "to_dramatiq")

    found = [json.loads(task)["message_id"] for task in client.hvals("dramatiq:default.msgs")]
    assert sorted(found) == ids(sent)
    command = ["dramatiq", "dramatiq_tasks", "--processes=1", "--threads=2"]
    check_work(folder, lambda: client.hlen("dramatiq:default.msgs") == 0, *command)
    tasks.broker.close()
    client.flushdb()


@pytest.mark.storm
def test_taskiq_does_the_work_of_a_message_once(redis: RedisServer, folder, sqlite_engine, sent, monkeypatch):
    tasks = module("taskiq_tasks", f"{redis.url}/6", monkeypatch)
    client = driver.Redis(port=redis.port, db=6)

    hand_over_twice(sqlite_engine, tasks, "to_taskiq")

    found = [json.loads(task)["task_id"] for task in stored(client)]
    assert sorted(found) == ids(sent)
    command = ["taskiq", "worker", "taskiq_tasks:broker", "--workers=1"]
    # A worker of taskiq 0.13 that is asked to stop may wait for ever.
    check_work(folder, lambda: all_read(client), *command, end=signal.SIGKILL)
    client.flushdb()


@pytest.mark.storm
def test_faststream_does_the_work_of_a_message_once(rabbitmq: RabbitServer, folder, sqlite_engine, sent, monkeypatch):
    tasks = module("faststream_tasks", f"{rabbitmq.url}/", monkeypatch)

    hand_over_twice(sqlite_engine, tasks, "to_faststream")

    assert asyncio.run(queued(rabbitmq.url, "invoices")) == ids(sent)
    check_work(folder, lambda: asyncio.run(queued(rabbitmq.url, "invoices")) == [], "python", "faststream_tasks.py")
    asyncio.run(delete_queue(rabbitmq.url, "invoices"))


def stored(client: Any) -> list[bytes]:
    """The tasks in taskiq's stream."""
    return [fields[b"data"] for _, fields in client.xrange("taskiq")]


def all_read(client: driver.Redis) -> bool:
    """Whether the workers have read and acknowledged every task."""
    [group] = client.xinfo_groups("taskiq")
    return (group["pending"], group["lag"]) == (0, 0)


@pytest.mark.storm
@pytest.mark.parametrize(
    ("name", "scheme", "function"),
    [
        ("celery_tasks", "amqp", "to_celery"),
        ("dramatiq_tasks", "redis", "to_dramatiq"),
        ("taskiq_tasks", "redis", "to_taskiq"),
        ("faststream_tasks", "amqp", "to_faststream"),
    ],
)
def test_messages_wait_while_the_broker_is_away(name, scheme, function, folder, monkeypatch):
    tasks = module(name, f"{scheme}://127.0.0.1:{free_port()}", monkeypatch)

    with closing(open_sender(getattr(tasks, function))) as sender:
        verdicts = sender.send([Message("orders", {"id": number}, key="k") for number in range(2)])

    assert [type(verdict) for verdict in verdicts] == [Unavailable, Unavailable]


@pytest.mark.storm
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("celery_tasks", "to_celery"),
        ("dramatiq_tasks", "to_dramatiq"),
        ("taskiq_tasks", "to_taskiq"),
        ("faststream_tasks", "to_faststream"),
    ],
)
def test_messages_wait_while_the_broker_is_silent(name, function, rabbitmq, redis, folder, monkeypatch):
    """A function that waits for it without end would hang, and this test with it."""
    server = rabbitmq if name in ("celery_tasks", "faststream_tasks") else redis
    with TcpProxy("127.0.0.1", server.port) as proxy:
        tasks = module(name, server.url.replace(str(server.port), str(proxy.port)), monkeypatch)
        with closing(open_sender(getattr(tasks, function))) as sender:
            messages = [Message("orders", {"id": number}) for number in range(2)]
            assert sender.send(messages) == [DONE, DONE]
            proxy.black_hole()

            [silent, _] = sender.send(messages)

    assert isinstance(silent, Unavailable)

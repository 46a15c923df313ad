"""`outbox consume`: handles by a consumer of the application, on the consumer's own database, until stopped."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from outbox import Outbox
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import outbox
from tests.support.consumers import write
from tests.support.waiting import eventually

SHOP = """
import os
import time
from datetime import timedelta
from pathlib import Path

from outbox import Outbox, create_engine

outbox = Outbox(create_engine(os.environ["SHOP_DATABASE"]))
billing = outbox.consumer("billing")


@billing.on("orders")
def handle(message):
    with Path("handled").open("a") as file:
        print(message.body.decode(), file=file)


hanging = outbox.consumer("hanging", concurrency=8, deadline=timedelta(seconds=1))


@hanging.on("orders")
def hang(message):
    time.sleep(3600)


wrong = outbox.consumer("wrong")
cache = outbox.consumer("cache", broadcast=True)
number = 7
"""


@pytest.fixture
def shop(folder: Path, engine, monkeypatch) -> Outbox:
    """An application in the current folder, whose consumer knows its database."""
    (folder / "shop.py").write_text(SHOP)
    monkeypatch.setenv("SHOP_DATABASE", engine.url.render_as_string(hide_password=False))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return Outbox(engine)


def handled() -> list[str]:
    """What the process has handled so far."""
    path = Path("handled")
    return path.read_text().split() if path.exists() else []


@contextmanager
def consuming(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The command as a process of its own, without a database among its options."""
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOX_DATABASE"}
    command = [sys.executable, "-m", "outbox", "consume", *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.storm)])
def test_a_consumer_handles_until_a_signal_lets_it_finish(shop, number):
    write(shop, "1", "2")
    with consuming("shop:billing", "--partitions", "2", "--concurrency", "3") as process:
        assert eventually(lambda: handled() == ["1", "2"] or sorted(handled()) == ["1", "2"])
        process.send_signal(number)
        said = process.communicate(timeout=60)[1].splitlines()

    with closing(shop.database.open()) as channel:
        stored = Subscriptions(channel).get("billing")
    assert (process.returncode, stored.kind, stored.partitions) == (0, "consumer", 2)
    assert [said[0], said[-1]] == [
        "billing: orders to shop:billing, a new subscription that begins at earliest",
        "billing: stopped; 2 messages handled",
    ]


@pytest.mark.storm
def test_a_consumer_that_is_started_again_goes_on(shop):
    write(shop, "1")
    for count in (1, 2):
        with consuming("shop:billing") as process:
            assert eventually(lambda: len(handled()) >= count)  # noqa: B023
            process.terminate()
            said = process.communicate(timeout=60)[1]
        write(shop, "2")

    assert "billing: orders to shop:billing, going on where it was" in said
    assert handled() == ["1", "2"]


@pytest.mark.storm
def test_a_process_whose_calls_never_come_back_ends_to_be_started_again(shop):
    write(shop, *map(str, range(20)))
    with consuming("shop:hanging") as process:
        said = process.communicate(timeout=100)[1]

    error = "Error: calls of the handler never came back; the process has to be restarted"
    assert (process.returncode, said.splitlines()[-1]) == (4, error), said


MISTAKES = [
    (("shop:number",), 2, "consume shop:number: it is no consumer but int; name the result of outbox.consumer(…)"),
    (("shop:nothing",), 2, "consume shop:nothing: shop has no nothing"),
    (("shop",), 2, "consume shop: write module:object, for example shop.orders:listener"),
    (("shop:wrong",), 2, "consumer wrong has no function: write @consumer.on('orders') above one, before it begins"),
    (
        ("shop:cache", "--partitions", "2"),
        2,
        "consume shop:cache: partitions: an instance of a broadcast consumer has one",
    ),
    (("shop:billing", "--concurrency", "0"), 2, "Invalid value for '--concurrency': 0 is not in the range x>=1."),
    (("shop:billing", "--partitions", "257"), 2, "partitions: must be from 1 to 256, not 257; this outbox has 256"),
]


def test_the_command_collects_garbage_rarely(shop, monkeypatch):
    thresholds = []
    monkeypatch.setattr(gc, "set_threshold", lambda *given: thresholds.append(given))

    # It ends before it works, because the consumer has no function.
    outbox(None, "consume", "shop:wrong")

    assert (10_000, *gc.get_threshold()[1:]) in thresholds


@pytest.mark.parametrize(("arguments", "code", "text"), MISTAKES)
def test_a_mistake_is_told_in_a_line(shop, arguments, code, text):
    ended = outbox(None, "consume", *arguments)

    assert (ended.code, text in ended.err) == (code, True), ended.err


def test_a_database_without_tables_is_told_with_the_command(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_DATABASE", f"sqlite:///{tmp_path}/empty.db")

    ended = outbox(None, "consume", "shop:billing")

    assert (ended.code, "outbox db upgrade" in ended.err) == (1, True), ended.err


def test_other_commands_show_a_consumer_in_its_words(shop):
    write(shop, "1")
    consumer = shop.consumer("billing")
    consumer.on("orders")(lambda _message: None)
    consumer.until_empty()

    listed = outbox(shop.engine, "subscriptions", "list").out
    status = outbox(shop.engine, "status", "--json").json

    (found,) = (each for each in status["subscriptions"] if each["name"] == "billing")
    assert (found["kind"], found["backlog"], found["live"]) == ("consumer", 0, False)
    assert [line.split()[:3] for line in listed.splitlines()[1:]] == [
        ["billing", "orders", "(consumer)"],
        ["relay", "all", "topics"],
    ]
    assert [each["next_command"] for each in status["findings"]] == ["outbox subscriptions drop relay"]


def test_a_consumer_is_altered_as_a_relay_is_but_has_no_destination(shop):
    consumer = shop.consumer("billing")
    consumer.on("orders")(lambda _message: None)
    consumer.until_empty()

    altered = outbox(
        shop.engine, "subscriptions", "alter", "billing", "--topics", "mail", "--no-ordered", "--json"
    ).json
    divided = outbox(shop.engine, "subscriptions", "alter", "billing", "--partitions", "4").code
    refused = outbox(shop.engine, "subscriptions", "alter", "billing", "--to", "stdout:")

    with closing(shop.database.open()) as channel:
        stored = Subscriptions(channel).get("billing")
    assert (stored.topics, stored.ordered, stored.partitions, divided) == (("mail",), False, 4, 0), altered
    assert (refused.code, "billing" in refused.err, stored.destination) == (2, True, None), refused.err


def test_an_idle_consumer_is_told_with_what_starts_it(shop, monkeypatch):
    consumer = shop.consumer("billing")
    consumer.on("orders")(lambda _message: None)
    consumer.until_empty()
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox_progress SET settled_at = '2020-01-01 00:00:00.000'")

    (found,) = [each for each in shop.admin.diagnosis() if each.subscription == "billing"]

    assert (found.what, found.next_command) == (
        "no worker runs",
        shop.database.commands.line("consume", "MODULE:NAME"),
    )

"""RocketMQ's official Java client at a front, in one Java machine: the program of the page, and what it leaves out."""

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import CheckPolicy
from tests.conftest import started
from tests.rocketmq.fronts import TOPICS, listening
from tests.support.pages import TOP, blocks
from tests.support.parked import states
from tests.support.servers.maven import class_path
from tests.support.waiting import eventually

PAGE = (TOP / "docs" / "rocketmq-clients.md").read_text()
CLIENT = "org.apache.rocketmq:rocketmq-client-java:5.0.8"
PROXY = "org.apache.rocketmq.proxy.common.ProxyException: "
CASES = Path(__file__).with_name("FrontCases.java")
SOON = CheckPolicy(transaction_timeout=timedelta(milliseconds=200), check_interval=timedelta(milliseconds=200))


@pytest.mark.jvm
def test_the_java_client_sends_ends_transactions_answers_questions_and_receives(
    sqlite_engine: Engine, tmp_path: Path
) -> None:
    """The first lines are those of the page's program."""
    jars = started(lambda: class_path("rocketmq-client-java", CLIENT))
    shop = tmp_path / "Shop.java"
    shop.write_text(blocks(PAGE, "java")[0])
    subprocess.run(["javac", "-cp", jars, "-d", tmp_path, shop, CASES], check=True)
    outbox = Outbox(sqlite_engine)

    topics = TOPICS | {"payments": "TRANSACTION"}
    with listening(outbox, topics=topics, fifo_groups=["billing"], policy=SOON) as front:
        # The client writes its log below the home folder.
        command = ["java", f"-Duser.home={tmp_path}", "-cp", f"{tmp_path}{os.pathsep}{jars}", "FrontCases"]
        done = subprocess.run([*command, str(front.listening)], capture_output=True, text=True, check=False)
        assert eventually(lambda: states(sqlite_engine) == {})
    outbox.close()

    lines = done.stdout.splitlines()
    assert (done.returncode, sorted(lines[:2]), lines[2:]) == (
        0,
        ["order 2 paid", "order 2 placed"],
        [
            "[sent, first, 01]",
            "[sent, second, 01]",
            "[refused, [response-code=40012] the max delay time of message is too large, max is 86400000]",
            "[chosen, a || c, [a, c]]",
            "[chosen, size > 97 AND TAGS <> 'c', [b]]",
            "[refused, [response-code=40013] INVALID_RECEIPT_HANDLE]",
            "[given back, late, 1, 2]",
            f"[refused, [response-code=50001] {PROXY}cannot found transaction data]",
            "[received, committed, not asked]",
            "[received, forgotten, 2]",
            "[pushed, first, 1, tag, [key-1, key-2], group, value]",
            "[pushed, second, 1, tag, [key-1, key-2], group, value]",
            "[pushed, second, 2, tag, [key-1, key-2], group, value]",
        ],
    ), done.stderr

"""RocketMQ's official Java client at a front: the program of the page, what it leaves out, and TLS with credentials."""

import logging
import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import CheckPolicy
from outbox.rocketmq.front import Security
from tests.conftest import started
from tests.rocketmq.fronts import TOPICS, listening
from tests.support.authority import Authority
from tests.support.pages import TOP, blocks
from tests.support.parked import states
from tests.support.servers.maven import class_path
from tests.support.waiting import eventually

PAGE = (TOP / "docs" / "rocketmq-clients.md").read_text()
CLIENT = "org.apache.rocketmq:rocketmq-client-java:5.0.8"
PROXY = "org.apache.rocketmq.proxy.common.ProxyException: "
HERE = Path(__file__).parent
SOON = CheckPolicy(transaction_timeout=timedelta(milliseconds=200), check_interval=timedelta(milliseconds=200))


def ran(folder: Path, name: str, *arguments: str) -> tuple[int, list[str], str]:
    """Compile a program with that of the page, and run it; return its exit code, its lines, and its errors."""
    jars = started(lambda: class_path("rocketmq-client-java", CLIENT))
    shop = folder / "Shop.java"
    shop.write_text(blocks(PAGE, "java")[0])
    subprocess.run(["javac", "-cp", jars, "-d", folder, shop, HERE / f"{name}.java"], check=True)
    # The client writes its log below the home folder.
    command = ["java", f"-Duser.home={folder}", "-cp", f"{folder}{os.pathsep}{jars}", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.jvm
def test_the_java_client_sends_ends_transactions_answers_questions_and_receives(
    sqlite_engine: Engine, tmp_path: Path
) -> None:
    """The first lines are those of the page's program."""
    outbox = Outbox(sqlite_engine)

    topics = TOPICS | {"payments": "TRANSACTION"}
    with listening(outbox, topics=topics, fifo_groups=["billing"], policy=SOON) as front:
        code, lines, errors = ran(tmp_path, "FrontCases", str(front.listening))
        assert eventually(lambda: states(sqlite_engine) == {})
    outbox.close()

    assert (code, sorted(lines[:2]), lines[2:]) == (
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
    ), errors


@pytest.mark.jvm
def test_the_java_client_works_by_tls_with_its_credentials_and_is_refused_with_others(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing tells the client of the authority: it accepts the certificate of any."""
    keys, (cert, key) = tmp_path / "keys", Authority(tmp_path / "authority").issue("front")
    keys.write_text("shop:s3cret\naudit:0ther:orders\n")
    keys.chmod(0o600)
    outbox = Outbox(engine)

    topics, security = TOPICS | {"sizes": "NORMAL"}, Security(auth_file=keys, tls_cert=cert, tls_key=key)
    with (
        caplog.at_level(logging.WARNING, "outbox"),
        listening(outbox, topics=topics, policy=SOON, security=security) as front,
    ):
        clients = ("shop:s3cret", "audit:0ther", "shop:wr0ng", "unkn0wn:s3cret", "none")
        code, lines, errors = ran(tmp_path, "FrontSecurity", str(front.listening), *clients)
    outbox.close()

    stranger = "[response-code=40100] check signature failed."
    assert (code, sorted(lines[:2]), lines[2:]) == (
        0,
        ["received committed", "received forgotten"],
        [
            "sent to orders by audit",
            "[response-code=40300] User:audit has no permission to access Topic:sizes",
            *[stranger] * 4,
            *["[response-code=40100] username cannot be null."] * 2,
        ],
    ), errors
    assert [each.getMessage().partition(" is refused: ")[2] for each in caplog.records] == [
        "access key audit is not for topic 'sizes'",
        "its signature is not by the secret of shop",
        "its access key is unknown",
        "there are no credentials",
    ]
    logs = [caplog.text, *(each.read_text() for each in tmp_path.rglob("*.log"))]
    assert not [secret for secret in ("s3cret", "0ther", "wr0ng") if any(secret in log for log in logs)]

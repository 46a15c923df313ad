"""RocketMQ's official client for Node at a front. `bash .ci/matrix node` fetches the client, and runs the tests."""

import json
import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import CheckPolicy, dead_letters
from outbox.rocketmq.front import Security
from tests.rocketmq.fronts import listening
from tests.support.authority import Authority
from tests.support.parked import states
from tests.support.waiting import eventually

CASES = Path(__file__).with_name("front_cases.js")
CLIENT = os.environ.get("OUTBOX_TEST_NODE_MODULES", "")
PROXY = "org.apache.rocketmq.proxy.common.ProxyException: "
SOON = CheckPolicy(transaction_timeout=timedelta(milliseconds=200), check_interval=timedelta(milliseconds=200))

pytestmark = [
    pytest.mark.storm,
    pytest.mark.skipif(not CLIENT, reason="the client for Node is not a tool of each machine: bash .ci/matrix node"),
]


def ran(folder: Path, *arguments: str, **environment: str) -> tuple[int, list[Any], str]:
    """Run the program; return its exit code, the facts of its lines, and its errors."""
    # The client writes its log below the home folder.
    variables = os.environ | {"HOME": str(folder), "NODE_PATH": CLIENT} | environment
    done = subprocess.run(
        ["node", CASES, *arguments], env=variables, capture_output=True, text=True, check=False
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def pushed(body: str, attempt: int) -> list[Any]:
    """The facts about a message that a push consumer was given."""
    return [body, attempt, "tag", ["k1", "k2"], "group", "value"]


FACTS = [
    ["sent", "first", "01"],
    ["sent", "second", "01"],
    ["refused", f"[response-code=50001] {PROXY}cannot found transaction data"],
    ["received", "paid", [["committed", 2], ["forgotten", 1]]],
    ["received", "orders", [["a", 2], ["c", 1]]],
    [
        "pushed",
        [pushed("first", 1), pushed("second", 1), pushed("second", 2)],
        # The client reads no pauses between attempts: in order, what fails once is a dead letter.
        [pushed("first", 1), pushed("second", 1)],
    ],
]


def test_the_node_client_sends_ends_transactions_answers_questions_and_receives(engine: Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine)

    with listening(outbox, fifo_groups=["billing"], policy=SOON) as front:
        code, facts, errors = ran(tmp_path, str(front.listening))
        assert eventually(lambda: states(engine) == {"dead": 1})
    dead = [each.message.body for each in dead_letters(outbox, "%DLQ%billing")]
    outbox.close()

    assert (code, facts) == (0, FACTS), errors
    assert dead == [b"second"]


def test_the_node_client_works_by_tls_with_its_credentials_and_is_refused_with_others(
    sqlite_engine: Engine, tmp_path: Path
) -> None:
    authority, keys = Authority(tmp_path / "authority"), tmp_path / "keys"
    cert, key = authority.issue("front")
    keys.write_text("shop:s3cret\n")
    keys.chmod(0o600)
    outbox = Outbox(sqlite_engine)

    security = Security(auth_file=keys, tls_cert=cert, tls_key=key)
    with listening(outbox, fifo_groups=["billing"], policy=SOON, security=security) as front:
        trusts = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority.ca)}
        done = [ran(tmp_path, str(front.listening), "shop", secret, **trusts)[:2] for secret in ("s3cret", "wr0ng")]
        distrusts = ran(tmp_path, str(front.listening), "shop", "s3cret")
    outbox.close()

    assert done[0] == (0, FACTS)
    assert done[1] == (1, [["failed", "[response-code=40100] check signature failed."]])
    assert distrusts[0] == 1
    assert "certificate" in distrusts[1][0][1]

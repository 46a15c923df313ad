"""RocketMQ's official Java client at a front, with TLS and credentials."""

import logging
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import CheckPolicy
from outbox.rocketmq.front import Security
from tests.rocketmq.fronts import TOPICS, listening
from tests.rocketmq.java_programs import compiled
from tests.support.authority import Authority

SOON = CheckPolicy(transaction_timeout=timedelta(milliseconds=200), check_interval=timedelta(milliseconds=200))


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
        command = [*compiled(tmp_path, "FrontSecurity"), str(front.listening), *clients]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    outbox.close()

    lines = done.stdout.splitlines()
    stranger = "[response-code=40100] check signature failed."
    assert (done.returncode, sorted(lines[:2]), lines[2:]) == (
        0,
        ["received committed", "received forgotten"],
        [
            "sent to orders by audit",
            "[response-code=40300] User:audit has no permission to access Topic:sizes",
            *[stranger] * 4,
            *["[response-code=40100] username cannot be null."] * 2,
        ],
    ), done.stderr
    assert [each.getMessage().partition(" is refused: ")[2] for each in caplog.records] == [
        "access key audit is not for topic 'sizes'",
        "its signature is not by the secret of shop",
        "its access key is unknown",
        "there are no credentials",
    ]
    logs = [caplog.text, *(each.read_text() for each in tmp_path.rglob("*.log"))]
    assert not [secret for secret in ("s3cret", "0ther", "wr0ng") if any(secret in log for log in logs)]

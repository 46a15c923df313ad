"""What the page about RocketMQ's own clients says is so."""

from typing import Any

import pytest

from outbox import Outbox, create_engine, migrate
from outbox.rocketmq import CheckPolicy
from tests.rocketmq.fronts import bodies, listening
from tests.support.pages import TOP, blocks

PAGE = (TOP / "docs" / "rocketmq-clients.md").read_text()


@pytest.mark.usefixtures("official")
def test_the_programs_of_the_page_send_to_a_front_and_receive_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = create_engine("sqlite:///shop.db")
    migrate.upgrade(engine)
    client: dict[str, Any] = {"__name__": "page"}
    embedded: dict[str, Any] = {"__name__": "page"}
    exec(blocks(PAGE, "python")[0], client)
    exec(blocks(PAGE, "python")[1], client)
    exec(blocks(PAGE, "python")[2], embedded)

    outbox = Outbox(engine)
    with listening(outbox, topics={"orders": "NORMAL", "payments": "TRANSACTION"}) as front:
        client["main"](str(front.listening))
        received = client["receive"](str(front.listening))

    assert sorted(received) == [b"order 1 paid", b"order 1 placed"]
    assert (bodies(outbox, "orders"), bodies(outbox, "payments")) == ([b"order 1 placed"], [b"order 1 paid"])
    embedded["outbox"].close()
    outbox.close()


def test_the_page_says_when_producers_are_asked():
    policy = CheckPolicy()

    assert (
        f"after {policy.transaction_timeout.seconds} seconds (`--transaction-timeout`), every"
        f" {policy.check_interval.seconds} seconds (`--check-interval`), at most {policy.check_max} times"
    ) in " ".join(PAGE.split())

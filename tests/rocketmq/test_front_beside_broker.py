"""Programs with RocketMQ's official clients print the same at a front as at a real RocketMQ 5.5, beside each other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import CheckPolicy
from outbox.rocketmq.front.declaring import Declarations
from tests.conftest import started
from tests.rocketmq import client_cases
from tests.rocketmq.fronts import listening
from tests.rocketmq.java_programs import compiled
from tests.support.pages import TOP
from tests.support.parked import states
from tests.support.servers.rocketmq import RocketServer
from tests.support.waiting import eventually

#: Half a minute for Python and a minute for Java, on an idle machine.
pytestmark = [pytest.mark.jvm, pytest.mark.timeout(900)]

#: Topics with types, and groups with settings of RocketMQ: those of the program in Python, and those in Java.
TOPICS = client_cases.TOPICS | {
    "orders": "NORMAL", "payments": "TRANSACTION", "steps": "FIFO", "later": "DELAY", "paid": "TRANSACTION",
    "dead": "NORMAL", "left": "TRANSACTION",
}  # fmt: skip
GROUPS: dict[str, dict[str, Any]] = client_cases.GROUPS | {
    **{
        each: {}
        for each in ("shipping", "choosing-TAG", "choosing-SQL92", "giving-back", "accounts", "heirs", "hauling")
    },
    "dying": {"retryMaxTimes": 2},
    "billing": {"consumeMessageOrderly": True},
}
#: When producers are asked at a front; the real server has the same times.
SOON = CheckPolicy(transaction_timeout=timedelta(seconds=4), check_interval=timedelta(seconds=3))
_FORGOTTEN = "org.apache.rocketmq.proxy.common.ProxyException: cannot found transaction data"
_IN_PYTHON, _IN_JAVA = f"ClientException: 50001, {_FORGOTTEN}", f"[response-code=50001] {_FORGOTTEN}"
_DEAD_LETTERS = "the topic of dead letters"

#: What the real server has to say, and what a front has to say instead.
#: The same verdict again is OK; the real server forgets a transaction after one answer. Dead letters are parked.
DIFFERENT_IN_PYTHON: Any = [
    *((f"transactions: {[verdicts, ['OK', _IN_PYTHON]]}", f"transactions: {[verdicts, ['OK', 'OK']]}")
      for verdicts in (["commit"] * 2, ["rollback"] * 2)),
    (f"dead_letter: {[_DEAD_LETTERS, 'nothing']}",
     f"dead_letter: {[_DEAD_LETTERS, 'Exception: failed to fetch topic:%DLQ%of_py_dead route.']}"),
]  # fmt: skip
DIFFERENT_IN_JAVA = [
    (f"[ended, {verdicts}, [OK, {_IN_JAVA}]]", f"[ended, {verdicts}, [OK, OK]]")
    for verdicts in ("commit commit", "rollback rollback")
]


@pytest.fixture(scope="module")
def broker() -> Iterator[RocketServer]:
    """A real server."""
    with started(lambda: RocketServer(topics=TOPICS, groups=GROUPS)) as server:
        yield server


@contextmanager
def front(engine: Engine) -> Iterator[str]:
    """The place of a front with the topics and groups of the real server."""
    outbox = Outbox(engine)
    with closing(outbox.database.open()) as channel:
        declarations = Declarations(channel)
        for name, settings in GROUPS.items():
            is_ordered = "consumeMessageOrderly" in settings
            declarations.add_group(name, ordered=is_ordered, retries=settings.get("retryMaxTimes"))
    with listening(outbox, topics=TOPICS, policy=SOON) as made:
        yield str(made.listening)
    outbox.close()


def printed(program: list[str], places: Sequence[str], home: Path) -> list[list[str]]:
    """What a program prints at places, in runs side by side. The client writes its log below the home folder."""
    environment = os.environ | {"HOME": str(home)}
    running, first = list[subprocess.Popen[str]](), list[str]()
    for place in places:
        run = subprocess.Popen([*program, place], stdout=subprocess.PIPE, text=True, env=environment, cwd=TOP)
        running.append(run)
        # A client in Java waits 3 s for its first answers: so one begins when the one before has begun.
        assert run.stdout is not None
        first.append(run.stdout.readline())
    lines = [(begin + run.communicate()[0]).splitlines() for begin, run in zip(first, running, strict=True)]
    assert [each.returncode for each in running] == [0] * len(places)
    return lines


def differences(there: list[str], here: list[str]) -> list[Any]:
    """The lines that differ."""
    return [(old, new) for old, new in zip_longest(there, here) if old != new]


def facts(lines: list[str]) -> list[str]:
    """The facts of the cases of the program in Python."""
    assert [json.loads(line)[0] for line in lines] == [case.__name__ for case in client_cases.CASES]
    return [f"{case}: {fact}" for case, found in map(json.loads, lines) for fact in found]


def test_a_program_in_python_prints_what_it_prints_at_a_real_server(broker, pg_engine, sqlite_engine, tmp_path):
    program = [sys.executable, "-m", client_cases.__name__]
    with front(pg_engine) as postgresql, front(sqlite_engine) as sqlite:
        there, *both = map(facts, printed(program, (broker.place, postgresql, sqlite), tmp_path))

    assert [differences(there, here) for here in both] == [DIFFERENT_IN_PYTHON] * 2


def test_a_program_in_java_prints_what_it_prints_at_a_real_server(broker, pg_engine, sqlite_engine, tmp_path):
    """The first two lines are those of the page's program, in either order."""
    program = compiled(tmp_path, "FrontCases")
    with front(pg_engine) as postgresql, front(sqlite_engine) as sqlite:
        runs = printed(program, (broker.place, postgresql, sqlite), tmp_path)
        assert eventually(lambda: [states(pg_engine), states(sqlite_engine)] == [{"dead": 1}] * 2)

    there, *both = ([*sorted(lines[:2]), *lines[2:]] for lines in runs)
    assert [differences(there, here) for here in both] == [DIFFERENT_IN_JAVA] * 2
    assert (there[:2], len(there)) == (["order 2 paid", "order 2 placed"], 44)

"""Business processes and checkers, which are killed. Run with a JSON object, the fields of `Task`.

Each run of this program forks one process after the other: those that work die, and this one begins new ones.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psycopg
from sqlalchemy import Engine, insert
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from outbox import Message, Outbox, create_engine
from outbox.errors import MQClientError, VerdictStandsError
from outbox.rocketmq import LocalTransactionState, Transaction, TransactionMQProducer
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.service import CheckService
from outbox.runtime import failpoints
from outbox.runtime.failpoints import crash_point
from outbox.runtime.stop import Stop
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.rocketmq.fire_business import Effect, FencingListener, NaiveListener, decided, reading, undecided
from tests.rocketmq.fire_plan import ANYWHERE, Act, Way, act_of
from tests.support.waiting import eventually

GROUP = "fire"
TIMEOUT, INTERVAL = timedelta(seconds=0.5), timedelta(seconds=0.3)
#: How long a slow transaction takes: the checkers come before it is over. On a busy machine they take their time.
_SLOW_SECONDS, _ANSWER_SECONDS, _PATIENCE_SECONDS = 0.8, 0.2, 120.0
_CHECKER_DEATHS = 0.01
#: So many half messages are looked at in no time.
_FEW = 50
#: The fence came first; or somebody else wrote for too long, which of a rollback by record the driver itself says.
_EXPECTED = (
    VerdictStandsError,
    MQClientError,
    IntegrityError,
    OperationalError,
    sqlite3.OperationalError,
    psycopg.OperationalError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to do, and in which databases. `folder`: where processes leave word for each other and for the judge.

    Writers perform `transactions` in `lanes` processes; those of checkers are killed every `kill_every` seconds.
    """

    url: str
    business: str
    folder: str
    role: str
    seed: int = 0
    transactions: int = 0
    lanes: int = 4
    ways: tuple[Way, ...] = ()
    slow: float = 0.0
    naive: bool = False
    kill_every: float = 5.0

    @property
    def asked(self) -> Path:
        """Where there is a file for each transaction that a listener was asked about."""
        return Path(self.folder) / "asked"

    @property
    def enough(self) -> Path:
        """When this file is there, checkers are killed no more."""
        return Path(self.folder) / "enough"

    def note(self, event: str) -> None:
        """Write down that somebody was killed at a point, or what else happened."""
        with (Path(self.folder) / "events").open("a") as file:
            file.write(f"{event}\n")


# Business processes


class ChangedMindError(Exception):
    """The business changed its mind."""


class Actor:
    """Performs transactions, and dies where it is told."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._engine, self._business = create_engine(task.url), create_engine(task.business)
        self._reading = reading(task.url)
        self._producer = TransactionMQProducer(
            GROUP,
            Outbox(self._engine),
            self,
            business=self._business,
            policy=CheckPolicy(transaction_timeout=TIMEOUT),
        )

    def perform(self, act: Act) -> None:
        """One transaction, to its end or to that of this process."""
        if act.slow:
            # Else, where checkers are slow too, it would be over before they come to it.
            eventually(lambda: undecided(self._reading) < _FEW)
        self._dies_at(act)
        try:
            if act.way == "execute":
                self._producer.send_message_in_transaction(Message("orders", act.names[0]), act)
            else:
                self._in_transaction(act)
        except _EXPECTED as error:
            if isinstance(error, VerdictStandsError | IntegrityError):
                self._task.note("fenced")
            logger.info("transaction %d: %s: %s", act.number, type(error).__name__, str(error)[:200])

    # The 4.x shape

    def execute_local_transaction(self, message: Message, act: Act) -> LocalTransactionState:
        """As planned."""
        assert message.transaction_id is not None
        transaction = message.transaction_id
        self._do(act, transaction, self._business, lambda _: None)
        if not act.ends:
            return LocalTransactionState.UNKNOWN
        return LocalTransactionState.COMMIT_MESSAGE if act.commits else LocalTransactionState.ROLLBACK_MESSAGE

    def check_local_transaction(self, _message: Message) -> LocalTransactionState:
        """Checkers are other processes."""
        raise NotImplementedError

    # The 5.x shape

    def _in_transaction(self, act: Act) -> None:
        assert act.way != "execute"
        transaction = self._producer.begin_transaction(verdict=act.way)
        for name in act.names:
            transaction.send("orders", name)
        engine = self._engine if act.way == "join" else self._business
        self._do(act, transaction.id, engine, lambda session: _join(act, transaction, session))
        if act.ends and act.commits:
            transaction.commit()
        elif act.ends:
            transaction.rollback()

    def _do(self, act: Act, transaction: str, engine: Engine, join: Callable[[Session], None]) -> None:
        """The local transaction; `join`: the part that the verdict's way has in it."""
        if act.slow == "before":
            self._linger(act, transaction)
        with suppress(ChangedMindError), Session(engine) as session, session.begin():
            join(session)
            session.execute(insert(Effect).values(transaction_id=transaction, messages=act.messages))
            if act.slow == "inside":
                self._linger(act, transaction)
            crash_point("business.inside")
            if not act.commits:
                raise ChangedMindError
        if act.commits:
            crash_point("business.after_commit")

    def _linger(self, act: Act, transaction: str) -> None:
        """Until a checker has decided, if it can; else until it has asked, and had time to write what it was told.

        A naive listener waits for no business transaction, so that its checker decides at any time.
        """
        if act.slow == "before" or self._task.naive:
            eventually(lambda: decided(self._reading, transaction), _PATIENCE_SECONDS)
        elif act.way in ("execute", "listener"):
            eventually((self._task.asked / transaction).exists, _PATIENCE_SECONDS)
            time.sleep(_ANSWER_SECONDS)
        else:
            time.sleep(_SLOW_SECONDS)

    def _dies_at(self, act: Act) -> None:
        prepared = 0

        def reached(point: str) -> None:
            nonlocal prepared
            if point == "half.after_prepare":
                prepared += 1
                if prepared <= act.dies_after:
                    return
            if point in act.deaths:
                die(self._task, point)

        failpoints.arm(reached)
        if ANYWHERE in act.deaths:
            timer = threading.Timer(random.uniform(0, 0.05), die, (self._task, ANYWHERE))
            timer.daemon = True
            timer.start()


def _join(act: Act, transaction: Transaction, session: Session) -> None:
    if act.way != "listener":
        transaction.join(session)


def die(task: Task, where: str) -> None:
    """As when the machine loses its power."""
    task.note(where)
    os.kill(os.getpid(), signal.SIGKILL)


def write(task: Task) -> None:
    """Perform all transactions; a process that died is followed by another, which begins with the next one."""
    at: MutableSequence[int] = multiprocessing.RawArray("q", range(task.lanes))
    running = {begin_process(partial(act_out, task, at, lane)): lane for lane in range(task.lanes)}
    while running:
        pid, status = os.wait()
        lane = running.pop(pid)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            assert status == 0, "a business process failed"
            continue
        at[lane] += task.lanes
        running[begin_process(partial(act_out, task, at, lane))] = lane


def act_out(task: Task, at: MutableSequence[int], lane: int) -> None:
    """Perform the transactions of a lane from its place on."""
    actor = Actor(task)
    while at[lane] < task.transactions:
        actor.perform(act_of(task.seed, at[lane], task.ways, task.slow))
        at[lane] += task.lanes


# Checkers


def check(task: Task) -> NoReturn:
    """Two of them, which are killed together again and again, and die by themselves now and then.

    Where everything is slow they live longer: who is killed before it has taken the lease decides nothing.
    """
    running: set[int] = set()
    killed_at, works_since = time.monotonic(), multiprocessing.RawValue("d", 0.0)
    while True:
        while len(running) < 2:
            running.add(begin_process(partial(check_back, task, works_since)))
        now = time.monotonic()
        works = bool(works_since.value) and now - works_since.value > task.kill_every / 2
        lived = now - killed_at
        if ((lived > task.kill_every and works) or lived > 5 * task.kill_every) and not task.enough.exists():
            killed_at, works_since.value = now, 0.0
            for pid in running:
                task.note("checker")
                os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "a checker failed"
            running.remove(ended)
        else:
            time.sleep(0.02)


def check_back(task: Task, works_since: Any) -> None:
    """Find out what became of transactions; `works_since` is set when it has the lease."""
    listener = (NaiveListener if task.naive else FencingListener)(task.business, task.asked)
    service = CheckService.of(
        Broker(Outbox(create_engine(task.url)), connections=2),
        GROUP,
        CheckPolicy(
            transaction_timeout=TIMEOUT,
            check_interval=INTERVAL,
            check_max=1_000_000,
            check_timeout=timedelta(seconds=2),
            threads=8,
        ),
        listener.check_local_transaction,
        Business(create_engine(task.business), connections=2),
        Settings(
            limits=Limits(rows=100),
            poll=(timedelta(milliseconds=20), timedelta(milliseconds=100)),
            lease=timedelta(seconds=1.5),
            renew_every=timedelta(seconds=0.3),
        ),
    )

    def reached(point: str) -> None:
        works_since.value = works_since.value or time.monotonic()
        if point in ("check.before_end", "check.after_end", "half.before_restore") and (
            random.random() < _CHECKER_DEATHS and not task.enough.exists()
        ):
            die(task, point)

    failpoints.arm(reached)
    service.work("stopped", Stop())


# Processes


def begin_process(work: Callable[[], None]) -> int:
    """Fork a process that ends with its work, or with this one; return its number."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        random.seed()
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        work()
        code = 0
    except BaseException:
        logger.exception("a process failed")
    finally:
        os._exit(code)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main(task: Task) -> None:
    """Do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    if task.role == "writers":
        write(task)
    else:
        check(task)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))

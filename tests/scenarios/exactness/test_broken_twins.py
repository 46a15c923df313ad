"""The suite can fail: each broken variant is caught by a script that the library itself passes.

Every test runs twice, with the library as it is and with one part of it replaced; what the judge finds is compared.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.store.database import Database
from outbox.store.dialects.dialect import Dialect
from outbox.store.log.log import Log
from outbox.store.subscriptions.progress import ProgressLog
from outbox.worker import partition
from outbox.worker import settle as settlement
from outbox.worker.settle import Settlement
from tests.scenarios.exactness import relays, twins
from tests.scenarios.exactness.business import Aggregate, note, set_up
from tests.scenarios.exactness.history import Fault, HistoryFile, delivery_of
from tests.scenarios.exactness.runs import Child, Plan, Run
from tests.scenarios.exactness.scripts import ROWS, Script, waits_for_lock, woken_again
from tests.support.readers import delivered
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


@pytest.fixture
def script(pg_engine: Engine) -> Script:
    """A database with two aggregates."""
    set_up(pg_engine, keys=2)
    return Script(pg_engine, Outbox(pg_engine), None, [])


@pytest.mark.parametrize(("dialect", "found"), [(None, set()), (twins.ID_AFTER_LAST, {"lost"})])
def test_a_reader_behind_the_last_id_loses_who_commits_late(
    script: Script, dialect: Dialect | None, found: set[str]
) -> None:
    """The lower id becomes visible after the higher one was passed."""
    script.dialect = dialect
    slow, quick = script.begin(), script.begin()
    script.change(slow, "first", key="k0")
    script.change(quick, "second", key="k1")
    quick.commit()
    script.deliver()
    slow.commit()

    script.deliver()

    assert script.found() == found


@pytest.mark.parametrize(("dialect", "found"), [(None, set()), (twins.BELOW_FLOOR, {"violations"})])
def test_a_reader_below_the_oldest_running_transaction_reorders_a_key(
    script: Script, dialect: Dialect | None, found: set[str]
) -> None:
    """The second writer of the key has an older id than a bystander that stays open; the first has a younger one."""
    script.dialect = dialect
    second, bystander, first = script.begin_early(), script.begin_early(), script.begin_early()
    script.change(first, "first")
    first.commit()
    script.change(second, "second")
    second.commit()
    script.deliver()
    bystander.rollback()

    script.deliver()

    assert script.found() == found


@pytest.mark.parametrize(("log", "found"), [(Log, set()), (twins.OrderedByXid, {"violations"})])
def test_order_by_the_transactions_number_reorders_a_key(
    script: Script, monkeypatch: pytest.MonkeyPatch, log: type[Log], found: set[str]
) -> None:
    """It was drawn by an early write, long before the wait for the row that orders the key."""
    monkeypatch.setattr(partition, "Log", log)
    second, first = script.begin_early(), script.begin_early()
    script.change(first, "first")
    first.commit()
    script.change(second, "second")
    second.commit()

    script.deliver()

    assert script.found() == found


@pytest.mark.parametrize(
    ("flushing", "found"), [(lambda _: nullcontext(), set()), (lambda session: session.no_autoflush, {"violations"})]
)
def test_a_keyed_send_without_a_flush_reorders_the_key(
    script: Script, flushing: Callable[[Session], AbstractContextManager[object]], found: set[str]
) -> None:
    """The UPDATE that takes the row's lock then comes at commit, after the message has drawn its place."""

    def write(name: str, sent: Callable[[], None]) -> None:
        with script.begin() as session:
            with flushing(session):
                aggregate = session.get_one(Aggregate, "k0")
                aggregate.version = Aggregate.version + 1
                script.outbox.send(session, "orders", name, key="k0")
            sent()
            note(session, aggregate, name)
            session.commit()

    def write_the_other() -> None:
        other.start()
        assert eventually(lambda: not other.is_alive() or waits_for_lock(script.engine))

    other = threading.Thread(target=write, args=("other", lambda: None))
    write("one", write_the_other)
    other.join(60)

    script.deliver()

    assert script.found() == found


@pytest.mark.parametrize(("twin", "found"), [(None, set()), ("marks_first", {"lost"})])
def test_marking_before_sending_loses_a_batch_with_the_process(
    script: Script, tmp_path: Path, twin: str | None, found: set[str]
) -> None:
    """Killed between the two, it has told the database what never left."""
    with script.begin() as session:
        script.change(session, "first")
        script.change(session, "second")
        session.commit()
    url = script.engine.url.render_as_string(hide_password=False)
    task = relays.Task(
        url=url, history=str(tmp_path / "history"), rows=ROWS, lease=1.0, twin=twin, kill_at="relay.before_send"
    )
    killed = Child(relays, task, tmp_path / "log")
    assert eventually(lambda: not killed.running), killed.end(signal.SIGKILL)
    assert HistoryFile(tmp_path / "history").read() == [], "it was to die before it sends"
    script.history.append(Fault("kill"))

    script.history += [delivery_of(m) for m in delivered(Database(script.engine), destination="history")]

    assert script.found() == found


@pytest.fixture
def ten_messages(script: Script) -> Script:
    """Ten changes of one aggregate: five batches."""
    with script.begin() as session:
        for n in range(10):
            script.change(session, f"m{n}")
        session.commit()
    return script


@pytest.mark.parametrize(("progress_log", "found"), [(ProgressLog, set()), (twins.SettlesWithoutEpoch, {"excess"})])
def test_a_settle_without_epoch_lets_a_zombie_move_the_position_back(
    ten_messages: Script, monkeypatch: pytest.MonkeyPatch, progress_log: type[ProgressLog], found: set[str]
) -> None:
    """Stopped with its first batch in hand, it wakes when another has delivered everything."""
    monkeypatch.setattr(settlement, "ProgressLog", progress_log)

    woken_again(ten_messages, lambda zombie: zombie.settle())

    assert ten_messages.found() == found


@pytest.mark.parametrize(("kind", "found"), [(Settlement, set()), (twins.ParksWithoutEpoch, {"excess"})])
def test_parking_without_epoch_lets_a_zombie_bring_back_what_is_done(
    ten_messages: Script, kind: type[Settlement], found: set[str]
) -> None:
    """Its handler failed; meanwhile another has delivered the batch, and eight messages more."""
    woken_again(ten_messages, lambda zombie: zombie.park_all(), kind)

    assert ten_messages.found() == found


@pytest.mark.timeout(300)
def test_the_run_with_real_processes_catches_the_reader_behind_the_last_id(pg_engine: Engine, tmp_path: Path) -> None:
    """The same writers as in the good run, a tenth of its length and no trouble at all."""
    plan = Plan(quota=40, relays=1, trouble=(), long=2, seconds=0.5, patience=3.0, twin="id_after_last")

    report = Run(pg_engine, tmp_path, plan, seed=1).perform()

    assert "lost" in report.findings.wrong, str(report)

"""The database ends the connection that settles while messages are handled: each arrives once, in its key's order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import Message, Outbox, Reject, Retry, RetryPolicy, Verdict, create_engine
from outbox.model.verdict import DONE
from outbox.store.operations.status import statuses
from outbox.worker import upkeep
from tests.support.destination import Destination, failing, fill, relay_to
from tests.support.parked import states
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

NINE = [str(n).encode() for n in range(9)]
#: A call hangs after this time.
DEADLINE = timedelta(seconds=0.5)


@contextmanager
def running(outbox: Outbox, destination: Destination, **options: Any) -> Iterator[None]:
    relay = relay_to(destination, outbox, **options)
    relay.start()
    try:
        yield
    finally:
        destination.hanging = lambda _messages: False
        relay.stop()
        relay.join(60)


def epoch(engine: Engine) -> int:
    """Of the lease of the relay."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT epoch FROM outbox_lease")).scalar_one())


def unread(engine: Engine) -> int:
    """How many messages of the log are not settled."""
    with closing(Outbox(engine).database.open()) as channel:
        return statuses(channel)[1][0].backlog


@pytest.fixture
def relaying(pg_engine: Engine) -> Iterator[Outbox]:
    """An outbox whose connections can be told from the test's own."""
    url = pg_engine.url.update_query_dict({"application_name": "relaying"})
    engine = create_engine(url.render_as_string(hide_password=False))
    yield Outbox(engine)
    engine.dispose()


def end_connections(engine: Engine) -> None:
    """End all connections of `relaying`, as a pooler or a firewall does with idle ones."""
    theirs = "application_name = 'relaying' AND datname = current_database()"
    with engine.connect() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {theirs}"))


# A late answer


class Late(Destination):
    """Holds back each call with the last message, until it is told to answer."""

    def __init__(self) -> None:
        super().__init__()
        #: Set while such a call is under way.
        self.holds = threading.Event()
        self.hanging = self._holds_back

    def answers(self) -> None:
        """Let the calls go on."""
        self.hanging = lambda _messages: False

    def _holds_back(self, messages: Sequence[Message]) -> bool:
        is_last = any(message.body == NINE[-1] for message in messages)
        if is_last:
            self.holds.set()
        return is_last


@pytest.mark.parametrize("is_parked", [False, True], ids=["soon", "when-all-wait"])
def test_a_late_answer_and_a_lost_connection_send_nothing_twice(pg_engine, relaying, is_parked):
    """The first message of a key is done, the call with the rest is late, and meanwhile the connections are lost.

    The answer may come when all of them, the first one as well, wait for the call.
    """
    destination = Late()
    fill(relaying, 9, keys=1)
    with running(relaying, destination, deadline=DEADLINE):
        assert destination.holds.wait(60)
        end_connections(pg_engine)
        assert eventually(lambda: epoch(pg_engine) == 2)
        assert eventually(lambda: not is_parked or states(pg_engine) != {})
        destination.answers()
        assert eventually(lambda: len(destination.messages) >= 9)
        assert eventually(lambda: unread(pg_engine) == 0 and states(pg_engine) == {})

    assert destination.bodies == NINE


def test_a_late_answer_from_before_another_holder_of_the_lease_does_not_count(engine, monkeypatch):
    """The other one may have sent any of them: the whole key goes again, and ends with its last message."""
    outbox, destination = Outbox(engine), Late()
    fill(outbox, 9, keys=1)
    # Nothing of the batch is settled before the other one has the lease, however long that takes here.
    monkeypatch.setattr(upkeep, "SETTLE_PARTS", 600.0)
    with running(outbox, destination, deadline=timedelta(seconds=3)):
        assert destination.holds.wait(60)
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_lease SET epoch = epoch + 1, owner = 'another', lease_until = NULL"))
        assert eventually(lambda: epoch(engine) == 3)
        destination.answers()
        assert eventually(lambda: len(destination.messages) >= 18)
        assert eventually(lambda: unread(engine) == 0 and states(engine) == {})

    assert destination.bodies == NINE + NINE


# Idle connections


@pytest.mark.parametrize("scope", ["DATABASE {database}", "ROLE {user} IN DATABASE {database}"])
def test_a_role_s_or_database_s_limit_for_idle_sessions_ends_no_connection_of_ours(pg_engine, scope):
    name = scope.format(database=f'"{pg_engine.url.database}"', user=f'"{pg_engine.url.username}"')
    with pg_engine.begin() as connection:
        connection.execute(text(f"ALTER {name} SET idle_session_timeout = '200ms'"))
    with closing(Outbox(pg_engine).database.open()) as channel:
        time.sleep(1)
        assert channel.rows("SELECT current_setting('idle_session_timeout')") == [("0",)]


def test_a_batch_that_takes_longer_than_sessions_may_be_idle_is_sent_once(pg_engine):
    with pg_engine.begin() as connection:
        connection.execute(text(f"ALTER DATABASE \"{pg_engine.url.database}\" SET idle_session_timeout = '200ms'"))
    outbox, destination, naps = Outbox(pg_engine), Destination(), [1.0] * 3

    def slow(_messages: Sequence[Message]) -> bool:
        time.sleep(naps.pop() if naps else 0)
        return False

    destination.hanging = slow
    fill(outbox, 20)
    with running(outbox, destination):
        assert eventually(lambda: len(destination.messages) >= 20)
        assert eventually(lambda: unread(pg_engine) == 0)

    assert (sorted(map(int, destination.bodies)), epoch(pg_engine)) == (list(range(20)), 1)


class Cutting(Destination):
    """Ends the connections to the database during its first calls, as if each of them took too long."""

    def __init__(self, engine: Engine, calls: int, answer: Any = lambda _: DONE) -> None:
        super().__init__(answer)
        self.engine, self.cuts = engine, calls
        self.offered: list[bytes] = []

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Keep what was offered, also what is not accepted."""
        self.offered += [message.body for message in messages]
        if self.cuts:
            self.cuts -= 1
            end_connections(self.engine)
        return super().send(messages)


#: Enough for every call; the last calls are spared, or nothing would be settled.
CUTS = 12


def test_a_batch_whose_connection_is_lost_again_and_again_is_sent_once(pg_engine, relaying):
    """Its outcome is known to the next lease, which settles it before anything else."""
    destination = Cutting(pg_engine, CUTS)
    fill(relaying, 40, keys=3)
    with running(relaying, destination):
        assert eventually(lambda: len(destination.messages) >= 40)
        assert eventually(lambda: unread(pg_engine) == 0)

    assert epoch(pg_engine) > 1
    assert destination.bodies == [str(n).encode() for n in range(40)]


def test_what_was_not_accepted_is_known_as_well(pg_engine, relaying):
    """Dead letters let their keys go on here; sent again, they would have what follows them sent again."""
    bad = Reject("never")
    destination = Cutting(pg_engine, CUTS, failing({b"0", b"4"}, bad))
    fill(relaying, 9, keys=1)
    with running(relaying, destination, on_dead="continue"):
        assert eventually(lambda: states(pg_engine) == {"dead": 2} and unread(pg_engine) == 0)

    assert epoch(pg_engine) > 1
    assert destination.of_key("k0") == [NINE[n] for n in (1, 2, 3, 5, 6, 7, 8)]
    assert sorted(destination.offered) == sorted([*NINE, *destination.offered[9:]])
    assert destination.offered.count(b"0") == 1


def test_a_parked_message_whose_connection_is_lost_is_sent_once(pg_engine, relaying):
    destination = Cutting(pg_engine, 0, lambda _: Retry("not yet"))
    fill(relaying, 20, keys=20)
    with running(relaying, destination, retry=RetryPolicy(attempts=100, wait=wait_fixed(0.05))):
        assert eventually(lambda: states(pg_engine) == {"retry": 20})
        destination.cuts = CUTS
        destination.answer = lambda _: DONE
        assert eventually(lambda: states(pg_engine) == {})

    assert epoch(pg_engine) > 1
    assert sorted(map(int, destination.bodies)) == list(range(20))


# A long batch


def test_a_long_batch_is_settled_in_parts(engine, monkeypatch):
    """A crash repeats a part of it, and nothing waits for its end."""
    monkeypatch.setattr(upkeep, "SETTLE_PARTS", 0.0)
    outbox, destination = Outbox(engine), Destination()
    released = threading.Event()

    def last(messages: Sequence[Message]) -> bool:
        return any(message.body == b"19" for message in messages) and not released.is_set()

    destination.hanging = last
    fill(outbox, 20)
    with running(outbox, destination):
        part = eventually(lambda: 0 < unread(engine) == 20 - len(destination.messages) < 20)
        released.set()
        assert eventually(lambda: unread(engine) == 0)

    assert part
    assert sorted(map(int, destination.bodies)) == list(range(20))


def test_parked_messages_are_settled_in_parts(engine, monkeypatch):
    """A failure makes the calls small; the second one of those hangs."""
    monkeypatch.setattr(upkeep, "SETTLE_PARTS", 0.0)
    outbox, destination = Outbox(engine), Destination(lambda _: Retry("not yet"))
    fails, released = [ValueError("once")], threading.Event()

    def answer(_message: Message) -> Verdict:
        if fails:
            raise fails.pop()
        return DONE

    fill(outbox, 20, keys=20)
    retry = RetryPolicy(attempts=1000, wait=wait_fixed(0.05))
    with running(outbox, destination, retry=retry):
        assert eventually(lambda: states(engine) == {"retry": 20})
        destination.hanging = lambda messages: not fails and len(messages) > 1 and not released.is_set()
        destination.answer = answer
        # The one whose call raised may wait for the destination since.
        part = eventually(lambda: sum(states(engine).values()) == 19)
        released.set()
        assert eventually(lambda: states(engine) == {})

    assert part
    assert sorted(map(int, destination.bodies)) == list(range(20))

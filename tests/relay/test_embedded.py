"""Relays inside the processes that write: what a killed process has committed is sent by the relay of another one."""

import json
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from outbox import Message, Outbox, Settings, create_engine
from outbox.telemetry.events import Event, Settled
from tests.support.destination import LONG_LEASE, Destination, briskly
from tests.support.faults import arm_kill
from tests.support.leases import end_lease
from tests.support.programs import run
from tests.support.waiting import eventually

#: Hints alone wake it.
ASLEEP = Settings(poll=(timedelta(hours=1), timedelta(hours=1)), lease=LONG_LEASE)


def write_and_die(argument: str) -> None:
    """What the killed process does: its own relay sends a message, and it dies right after another commit."""
    task = json.loads(argument)
    outbox, settled = Outbox(create_engine(task["url"])), threading.Event()

    def deliver(message: Message) -> None:
        # Its relay may look by itself between the commit and the end, and begin to send the next message.
        with Path(task["path"]).open("ab") as sent:
            sent.write(message.body)

    deliver.destination = Destination.destination  # type: ignore[attr-defined]  # as its users may write it

    @outbox.listen
    def note(event: Event) -> None:
        if isinstance(event, Settled):
            settled.set()

    with outbox.running(deliver, settings=ASLEEP):
        with outbox.begin() as session:
            outbox.send(session, "orders", b"sent by its writer", key="order-1")
        settled.wait(60)
        arm_kill("outbox.after_commit")
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", body, key="order-1") for body in (b"left 1", b"left 2")])


@pytest.mark.every_database
@pytest.mark.smoke("a process dies and its lease runs out")
def test_what_a_killed_process_has_committed_is_sent_by_the_relay_inside_another_one(engine, tmp_path):
    url, path = engine.url.render_as_string(hide_password=False), tmp_path / "sent"
    program = "import sys; from tests.relay.test_embedded import write_and_die; write_and_die(sys.argv[1])"

    killed = run(["-c", program, json.dumps({"url": url, "path": str(path)})], timeout=240)
    other, outbox = Destination(), Outbox(engine)
    with outbox.running(other, settings=briskly()):
        with outbox.begin() as session:
            outbox.send(session, "orders", b"later", key="order-1")
        waits = list(other.bodies)
        end_lease(engine)
        arrived = eventually(lambda: len(other.bodies) == 3)

    assert (killed.returncode, path.read_bytes()[:18]) == (-signal.SIGKILL, b"sent by its writer")
    assert (waits, arrived, other.bodies) == ([], True, [b"left 1", b"left 2", b"later"])

"""A program that sends by itself right after its commits, and ends in the way that it is told; run by tests.

What arrives is appended to a file, one line a message.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from outbox import Done, Message, Outbox, create_engine
from outbox.direct import delivery, sends
from outbox.direct.delivery import DirectDelivery
from outbox.model.verdict import DONE
from outbox.senders.opening import open_sender
from outbox.store.dialects.sqlite import channel
from outbox.store.dialects.sqlite.locking import is_busy
from tests.support.directly import at_rest, promises
from tests.support.waiting import eventually

#: How long a process may stand still on a busy machine, and still send by itself. Two ways are about the real times.
PATIENCE = 240.0
IN_TIME = ("hangs", "is_gone")


class LineFile:
    """A destination that outlives its process, and needs a thread of its own to be reached the first time."""

    destination = "file"

    def __init__(self, path: Path, pause: float = 0.0) -> None:
        self._path = path
        self._pause = pause
        self._connected = False

    def send(self, messages: Sequence[Message]) -> list[Done]:
        """One line a message."""
        if not self._connected:
            thread = threading.Thread(target=lambda: setattr(self, "_connected", True))
            thread.start()
            thread.join()
        time.sleep(self._pause)
        with self._path.open("a") as file:
            file.write("".join(f"{os.getpid()} {message.body.decode()}\n" for message in messages))
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is open."""


class Hanging:
    """A destination that never answers."""

    destination = "file"

    def send(self, messages: Sequence[Message]) -> list[Done]:
        """Not in this life."""
        time.sleep(3600)
        return []

    def close(self) -> None:
        """Nothing is open."""


def send(outbox: Outbox, *bodies: str) -> None:
    """One transaction."""
    with outbox.begin() as session:
        for body in bodies:
            outbox.send(session, "orders", body)


def returns(outbox: Outbox) -> None:
    send(outbox, "1", "2")


def exits(outbox: Outbox) -> None:
    send(outbox, "1", "2")
    sys.exit(3)


def raises(outbox: Outbox) -> None:
    send(outbox, "1", "2")
    raise LookupError


def is_gone(outbox: Outbox) -> None:
    send(outbox, "1", "2")
    os._exit(4)


def leaves_a_thread(outbox: Outbox) -> None:
    def late() -> None:
        threading.main_thread().join()
        # Until direct sends have ended, unless they have begun anew already.
        eventually(lambda: not promises(outbox), 5)
        send(outbox, "2")

    threading.Thread(target=late).start()
    send(outbox, "1")


def forks(outbox: Outbox) -> None:
    """The parent has something to send, and locks and turns that are taken, while its child sends its own."""
    assert outbox._direct is not None
    send(outbox, "parent")
    child = forked_child(outbox)
    send(outbox, "parent-again")
    assert os.waitpid(child, 0) == (child, 0)


def forked_child(outbox: Outbox) -> int:
    """Fork while this process holds whatever there is to hold."""
    direct, shared = outbox._direct, outbox._shared
    assert direct is not None
    assert shared is not None
    with direct._lock, shared.caller._lock:
        pid = os.fork()
        if pid:
            return pid
    outbox.engine.dispose(close=False)
    assert eventually(lambda: promises(outbox), 120)
    send(outbox, "child")
    sys.exit(0)


def is_a_process_of_multiprocessing(outbox: Outbox) -> None:
    import multiprocessing

    def work() -> None:
        outbox.engine.dispose(close=False)
        assert eventually(lambda: promises(outbox), 120)
        send(outbox, "child")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0


def hangs(outbox: Outbox) -> None:
    """Its sender does not come back."""
    assert outbox._shared is not None
    outbox._shared._sender = open_sender(Hanging())
    send(outbox, "1")
    time.sleep(0.5)
    print(time.time(), flush=True)


def is_short(outbox: Outbox) -> None:
    """Ends before direct sends have begun, which they cannot before the commit."""
    with patch.object(DirectDelivery, "refresh", side_effect=OSError), outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body) for body in ("1", "2")])


def writes(outbox: Outbox) -> None:
    """Writes from two threads, and ends when all of it is sent and acknowledged.

    It has SQLite's write lock in the end, however long the others keep it on a busy machine.
    """
    vars(channel)["BUSY_SECONDS"] = 600.0

    def write(number: int) -> None:
        for n in range(int(sys.argv[4])):
            while not is_sent(outbox, f"{os.getpid()}-{number}-{n}"):
                pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: at_rest(outbox), 300)


def is_sent(outbox: Outbox, body: str) -> bool:
    """False if the others kept SQLite's write lock for so long that nothing was written."""
    try:
        send(outbox, body)
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
        return False
    return True


def main() -> None:
    """Do what the arguments say: url, file or destination, way, and more of that way's own."""
    url, path, way = sys.argv[1:4]
    if way not in IN_TIME:
        vars(delivery)["GRACE_SECONDS"] = 2 * PATIENCE
        vars(sends).update(_LAST_SECONDS=PATIENCE, _PAUSE_SECONDS=PATIENCE)
    sender = path if "://" in path else LineFile(Path(path))
    outbox = Outbox(create_engine(url), sender=sender, direct="relay")
    if way != "is_short":
        assert eventually(lambda: promises(outbox), 120)
    globals()[way](outbox)


if __name__ == "__main__":
    main()

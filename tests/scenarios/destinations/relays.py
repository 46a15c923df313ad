"""`outbox relay` as a process that can be killed at its worst moment: when it has sent a batch and not settled it.

Run with what stands behind `outbox` on a command line. The variable `TWIN` makes it a broken twin.
"""

from __future__ import annotations

import os
import signal
import sys

from outbox.cli import main
from outbox.runtime import failpoints
from tests.scenarios.destinations import twins

TWIN = "OUTBOX_TEST_TWIN"
#: Tells the process to die at its worst moment.
WORST = signal.SIGUSR1


def _die_when_sent(*_: object) -> None:
    def reached(point: str) -> None:
        if point == "relay.after_send":
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.arm(reached)


if __name__ == "__main__":
    signal.signal(WORST, _die_when_sent)
    if os.environ.get(TWIN):
        twins.install(os.environ[TWIN])
    main(sys.argv[1:])

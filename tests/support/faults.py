"""Crash points, armed: this process dies, or stops, at the n-th time a named point is reached.

    arm_kill("relay.after_send", hit=3)        # in a process of the test's own, before it begins its work
    Relay(outbox, sender).run()                # dies when its third batch is sent and not yet settled

Points are places in the library's code where a crash would do most harm: `crash_point("…")` marks them. Some of them:
`outbox.after_insert`, `outbox.before_commit` and `outbox.after_commit` in a writer; `relay.before_send`,
`relay.after_send`, `worker.before_settle` and `worker.after_settle` in a relay; `half.after_prepare`, `half.before_end`
and `half.after_end` in a producer of transactional messages. An application may mark its own with
`outbox.runtime.failpoints.crash_point("billing.before_charge")`; where nothing is armed that costs one comparison. One
point at a time is armed in a process.
"""

from __future__ import annotations

import os
import signal
import threading

from outbox.runtime import failpoints


def arm_kill(name: str, hit: int = 1) -> None:
    """End this process with SIGKILL, as a crash does, when the point is reached for the `hit`-th time."""
    failpoints.arm(_Trap(name, hit, signal.SIGKILL))


def arm_stop(name: str, hit: int = 1) -> None:
    """Stop this process at the point until it gets SIGCONT, as a machine that is suspended stops."""
    failpoints.arm(_Trap(name, hit, signal.SIGSTOP))


class _Trap:
    def __init__(self, name: str, hit: int, number: signal.Signals) -> None:
        self._name = name
        self._left = hit
        self._number = number
        # Several threads may reach a point at once, but only one of them may be the n-th.
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        if name != self._name:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._number)

"""Python programs as processes of their own, without the time that an interpreter takes to start.

Each is forked from one process that has imported the library, and does nothing else. It runs as `python -m …` or
`python -c …` runs, dies by signals like any other, and ends with its threads, its exit handlers and its exit code.
Options of the interpreter (`-W`, `-X`) have no effect: a test that needs them starts one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import IO, Any, Self

ROOT = Path(__file__).parents[2]
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})
#: What most programs of the tests import.
_IMPORTED = (
    "outbox.admin.admin", "outbox.cli.relay", "outbox.cli.relaying", "outbox.cli.status", "outbox.migrate",
    "outbox.rocketmq", "tests.support.faults", "psycopg", "pytest", "sqlalchemy.orm",
    "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite", "tests.support.destination",
    "tests.scenarios.exactness.business", "tests.scenarios.exactness.history", "tests.scenarios.exactness.twins",
)  # fmt: skip


class Program:
    """A running program. `arguments`: as an interpreter takes them, `-m` or `-c` first.

    `environment`: more variables than those of this process. Where no file is given, it writes to our own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path = ROOT,
        environment: Mapping[str, str] = NOTHING_MORE,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
    ) -> None:
        task = {"arguments": list(arguments), "cwd": str(cwd), "environment": {**os.environ, **environment}}
        ours, theirs = os.pipe()
        try:
            _parent().fork(
                task, (1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()), theirs
            )
        finally:
            os.close(theirs)
        self._answers = os.fdopen(ours, "rb", buffering=0)
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        """Return its exit code, negative if a signal has ended it; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a program of the tests", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; to one that has ended it does nothing."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and _comes(self._answers.fileno(), timeout):
            self.returncode = int(self._answers.readline())
            self._answers.close()
        return self.returncode


def _comes(descriptor: int, timeout: float | None) -> bool:
    """Whether something comes within so many seconds; of a process with any number of descriptors."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def run(
    arguments: Sequence[str],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] = NOTHING_MORE,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return what it wrote, and its exit code.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        program = Program(arguments, cwd=cwd, environment=environment, stdout=stdout, stderr=stderr)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
            program.wait()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, stdout.read(), stderr.read())


class _Parent:
    """The process that programs are forked from. It ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end, os.getpid())

    def fork(self, task: Mapping[str, Any], output: tuple[int, int], answers: int) -> None:
        """Have a program started, which writes to `output`; its process id and its exit code go to `answers`."""
        text = json.dumps(task).encode()
        with self._lock:
            socket.send_fds(self._socket, [b"%8d" % len(text)], [*output, answers])
            self._socket.sendall(text)

    def _end(self, pid: int) -> None:
        if pid == os.getpid():
            self._socket.close()
            self._process.wait()


def _parent() -> _Parent:
    global _the_parent
    with _making:
        if _the_parent is None:
            _the_parent = _Parent()
        return _the_parent


_the_parent: _Parent | None = None
_making = threading.Lock()


# The other side


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a program for each request. Return, in each of these, what it has to do; end when there are no more."""
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which end this process
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_who_has_ended(running)
        if requests.fileno() in ready:
            head, files, _, _ = socket.recv_fds(requests, 8, 3)
            if not head:
                os._exit(0)
            task: dict[str, Any] = json.loads(_exactly(requests, int(head)))
            _import_for(task)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.dup2(files[0], 1)
                os.dup2(files[1], 2)
                requests.detach()  # its number may be that of another file soon
                os.closerange(3, 4096)
                return task
            os.close(files[0])
            os.close(files[1])
            running[pid] = files[2]
            os.write(files[2], b"%d\n" % pid)


def _import_for(task: Mapping[str, Any]) -> None:
    """Import once what a module of the tests imports; the module itself is run by each of its programs."""
    way, what, *_ = task["arguments"]
    if way == "-m" and what.startswith("tests."):
        with contextlib.suppress(Exception):  # a program that cannot run says so itself
            import_module(what)
        sys.modules.pop(what, None)
        gc.freeze()


def _tell_who_has_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        answers = running.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody has waited for it
            os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(answers)


def _exactly(requests: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        found += requests.recv(length - len(found))
    return found


def _run(task: Mapping[str, Any]) -> None:
    """Be the program."""
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["cwd"])
    way, what, *rest = task["arguments"]
    sys.argv = [way, *rest]
    sys.path[:0] = [task["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert way == "-c", f"{way} is not known here"
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    for name in _IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))

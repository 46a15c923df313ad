"""A server program beside this process: `Program` starts and ends it, `Guard` ends it when this process is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outbox.errors import OutboxError

#: Where Linux keeps files in memory. It is often small in a container.
_MEMORY = Path("/dev/shm")  # noqa: S108 - a new folder in it is private
#: The bytes that must be free there.
_ROOMY = 4 * 1024**3


class ServerFailedError(OutboxError):
    """A server program failed; the text ends with its output."""


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a program."""

    uid: int
    gid: int


def unprivileged() -> Account | None:
    """Return `nobody` when this process is root's, because PostgreSQL refuses root; else None: run as ourselves."""
    if os.geteuid() != 0:
        return None
    import pwd

    entry = pwd.getpwnam("nobody")
    return Account(entry.pw_uid, entry.pw_gid)


def reachable(path: Path, account: Account | None) -> bool:
    """Return whether `account` can pass through every folder above `path`."""
    if account is None:
        return True
    states = [folder.stat() for folder in path.absolute().parents]
    return all(state.st_mode & stat.S_IXOTH or state.st_uid == account.uid for state in states)


def scratch_folder(name: str, account: Account | None, *, in_memory: bool = False) -> Path:
    """Make a temporary folder of `account`, in a place within its reach.

    `in_memory`: keep the files in memory, where 4 GB are free.
    """
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]  # noqa: S108 - the new folder in it is private
    if in_memory and _MEMORY.is_mount() and shutil.disk_usage(_MEMORY).free > _ROOMY:
        places.insert(0, str(_MEMORY))
    place = next((place for place in places if reachable(Path(place, name), account)), None)
    folder = Path(tempfile.mkdtemp(prefix=f"outbox-{name}-", dir=place))
    hand_over(folder, account)
    return folder


def hand_over(folder: Path, account: Account | None) -> None:
    """Make `folder` the property of `account`."""
    if account is not None:
        os.chown(folder, account.uid, account.gid)


def free_port() -> int:
    """Return a TCP port of the loopback interface on which no program listens.

    The port lies below the range for outgoing connections. In the range a client that keeps trying to reach a stopped
    server would end up connected to the client itself, and the server could not come back.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def run_to_end(command: Sequence[str | Path], *, account: Account | None, cwd: Path) -> None:
    """Run a program to its end; raise `ServerFailedError` unless the exit status is 0."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )
    if done.returncode != 0:
        raise ServerFailedError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stdout[-2000:]}")


class Program:
    """A run of a server program."""

    def __init__(self, command: Sequence[str | Path], *, log: Path, account: Account | None) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=log.parent,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
                start_new_session=True,  # Ctrl-C goes to this process, which decides when the server stops
            )
        self.pid = self._process.pid

    def running(self) -> bool:
        """Return whether the program has not ended yet."""
        return self._process.poll() is None

    def end(self, signals: Iterable[signal.Signals], *, patience: float = 60.0) -> None:
        """Send one signal after the other, `patience` seconds apart, until the program has ended.

        Then kill the rest of its process group: helpers that the program has started would stay.
        """
        for number in (*signals, signal.SIGKILL):
            self._process.send_signal(number)
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
            break
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Guard:
    """Ends a program with its process group, and removes a folder, as soon as this process is gone, even by SIGKILL.

    The guard is a shell that waits for the end of input, at the death of this process. A parent-death signal would be
    bound to the thread that started the program, and to Linux, and would leave the folder.
    """

    _SCRIPT = """
        pid=
        while read -r line; do pid=$line; done
        if [ -n "$pid" ] && kill -INT "$pid" 2>/dev/null; then
            tries=0
            while kill -0 "$pid" 2>/dev/null && [ $tries -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
            kill -s KILL -- "-$pid" 2>/dev/null
        fi
        if [ -n "$1" ]; then rm -rf -- "$1"; fi
    """

    def __init__(self, folder: Path | None) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "outbox-guard", str(folder or "")],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int | None) -> None:
        """Set the program to end from now on to `pid`; None: nothing runs."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{pid or ''}\n".encode())
        self._shell.stdin.flush()

    def release(self) -> None:
        """End the program and remove the folder now; return when both are gone."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()


def copy_readable(source: Path, target: Path) -> None:
    """Copy a folder so that every account can read and run its files."""
    shutil.copytree(source, target, symlinks=True)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o055 if mode & stat.S_IXUSR else mode | 0o044)


def _environment() -> dict[str, str]:
    """Return our environment without the variables that configure a PostgreSQL of the user's own, and with LC_ALL=C."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}

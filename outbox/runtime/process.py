"""The name of this process, for people and for rows with their writer."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from functools import cache


def unique_name() -> str:
    """Return `host:pid:` and a random part, so that no other or later process has the same name."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"


def user_and_host() -> str:
    """Return user and host of the process, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def host_and_pid(name: str) -> str:
    """Return `host:pid` of a name of `unique_name`; return any other name as it is."""
    return name.rpartition(":")[0] or name


def parts_of_name(name: str) -> tuple[str | None, int | None]:
    """Return host and process of a name of `unique_name`; None for both of any other name."""
    host, _, process = host_and_pid(name).rpartition(":")
    return (host, int(process)) if host and process.isdecimal() else (None, None)


@cache
def library_version() -> str:
    """Return the version of the installed library; "unknown" where it runs without being installed."""
    # Imported here, because a writer does not need the module, which is slow to import.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outbox-log")
    except PackageNotFoundError:
        return "unknown"

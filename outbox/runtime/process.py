"""The name of this process, for people and for rows that tell which process wrote them."""

from __future__ import annotations

import os
import secrets
import socket


def unique_name() -> str:
    """Return `host:pid:` and a random part, so that no other process and no later one has the same name."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"


def host_and_pid(name: str) -> str:
    """Return `host:pid` of a name that `unique_name` has made; return any other name as it is."""
    return name.rpartition(":")[0] or name

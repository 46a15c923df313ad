"""A consumer behind a destination: whatever it reads takes effect once. Run with a JSON object, the fields of `Task`.

It remembers nothing of where it was: each start begins with the first message that the destination has.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from outbox import Inbox, create_engine
from tests.support.durable_destinations import KINDS
from tests.support.effects import handle_once


@dataclass(frozen=True, kw_only=True)
class Task:
    """Where to read what, and the database of the effects."""

    kind: str
    source: str
    database: str


def main(task: Task) -> None:
    """Handle each message in a transaction of its own."""
    engine = create_engine(task.database)
    inbox = Inbox(engine, "billing")
    for message in KINDS[task.kind].read(task.source):
        handle_once(engine, inbox, message, what=message.body.decode())


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))

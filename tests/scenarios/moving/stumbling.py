"""As `relaying`, to a destination that refuses a message now and then, so that keys are held.

Arguments: the database, the file, the destination.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tenacity import wait_fixed

from outbox import Message, Outbox, Relay, Retry, RetryPolicy, create_engine
from outbox.model.verdict import Verdict
from tests.scenarios.moving.relaying import SETTINGS, ArrivalSender

REFUSES = 0.03


class StumblingSender(ArrivalSender):
    """Refuses a message by chance, and after it the rest of its key."""

    def send(self, messages: Sequence[Message]) -> list[Verdict]:  # type: ignore[override]  # it answers more
        """Write down what is accepted."""
        held, verdicts = set[str | None](), list[Verdict]()
        for message in messages:
            if message.key in held or random.random() < REFUSES:
                held.add(message.key)
                verdicts.append(Retry("not now"))
            else:
                verdicts += super().send([message])
        return verdicts


if __name__ == "__main__":
    url, path, destination = sys.argv[1:]
    sender = StumblingSender(Path(path), destination)
    retry = RetryPolicy(attempts=100, wait=wait_fixed(0.3))
    Relay(Outbox(create_engine(url)), sender, retry=retry, settings=SETTINGS).run()

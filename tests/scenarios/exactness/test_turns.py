"""A key that was held back gets its turn again, whatever else comes for it in between."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, Retry
from outbox.model.verdict import DONE, Verdict
from tests.support.readers import worker

pytestmark = pytest.mark.storm


class FailsOnce:
    """Refuses the first message once; another of its key is committed while it is handed over again."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._calls_with_first = 0
        self.done: list[bytes] = []

    def __call__(self, messages: Sequence[Message]) -> list[Verdict]:
        """After a message that failed, none of its key is done."""
        if messages[0].body == b"first":
            self._calls_with_first += 1
            if self._calls_with_first == 1:
                return [Retry("refused", after=timedelta(0)) for _ in messages]
            with self._outbox.begin() as session:
                self._outbox.send(session, "orders", "third", key="k")
        self.done += [message.body for message in messages]
        return [DONE for _ in messages]


def test_what_waits_for_its_turn_is_not_held_back_by_what_comes_behind_it(engine: Engine) -> None:
    """The third message is parked behind the second, which waits for nothing any more."""
    outbox = Outbox(engine)
    handler = FailsOnce(outbox)
    with outbox.begin() as session:
        outbox.send(session, "orders", "first", key="k")
        outbox.send(session, "orders", "second", key="k")

    worker(outbox.database, handler).until_empty()

    assert handler.done == [b"first", b"second", b"third"]

"""Broken twins of the relay: the command line of `outbox` with one thing wrong in it. The suite has to catch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import DONE, Verdict
from outbox.relay import routes
from outbox.senders.opening import OpenedSender, open_sender
from outbox.senders.port import Sender
from tests.scenarios.exactness import twins as of_the_worker


class AnswersAtOnce:
    """Says Done, and sends meanwhile."""

    def __init__(self, to: str) -> None:
        self._sender = open_sender(to)
        self._pool = ThreadPoolExecutor(1)
        self.destination, self.deadline = self._sender.destination, self._sender.deadline

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """In the right order, and never a second time."""
        self._pool.submit(self._sender.send, messages)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Finish what is under way."""
        self._pool.shutdown()
        self._sender.close()


class TwoAtOnce:
    """Has two connections, which take every other message: those of a key do not wait for each other."""

    def __init__(self, to: str) -> None:
        self._senders = [open_sender(to) for _ in range(2)]
        self._pool = ThreadPoolExecutor(2)
        self.destination, self.deadline = self._senders[0].destination, self._senders[0].deadline

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Their verdicts are true."""
        parts = self._pool.map(lambda sender, part: sender.send(part), self._senders, (messages[::2], messages[1::2]))
        verdicts: list[Verdict] = [DONE] * len(messages)
        verdicts[::2], verdicts[1::2] = parts
        return verdicts

    def close(self) -> None:
        """Both."""
        for sender in self._senders:
            sender.close()


SENDERS: dict[str, Callable[[str], Sender]] = {"answers_at_once": AnswersAtOnce, "two_at_once": TwoAtOnce}


def install(name: str) -> None:
    """Make this process one of the twins."""
    if name in SENDERS:

        def opened(to: str, **options: Any) -> OpenedSender:
            return open_sender(SENDERS[name](to), **options)

        setattr(routes, "open_sender", opened)  # noqa: B010  # type checkers would rightly complain
    else:
        of_the_worker.install(name)

"""A sender that writes each call into a journal, and refuses some messages while a file says so.

Its URL is that of another sender with `watched+` before it. `installed` makes a folder by which a process knows it.
"""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import Done, Reject, Unavailable, Verdict
from outbox.senders.opening import open_sender
from outbox.senders.port import concurrency_of, deadline_of
from tests.scenarios.soak.judge import Call
from tests.support.records import RecordFile

#: Where the journal is, and the file that makes destinations refuse.
JOURNAL, REFUSING = "OUTBOX_TEST_JOURNAL", "OUTBOX_TEST_REFUSING"
_PREFIX = "watched+"
#: One message of so many is refused.
_REFUSED_OF = 100
_BEHIND = Unavailable("an earlier message of its key was refused")


def watched(url: str) -> str:
    """The URL of a destination whose calls are written down."""
    return _PREFIX + url


def installed(folder: Path) -> Mapping[str, str]:
    """The variables of a process that is to know such URLs; `folder` is made."""
    about = folder / "watched-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: watched\nVersion: 1\n")
    offers = "".join(f"{_PREFIX}{scheme} = {__name__}:WatchedSender\n" for scheme in ("nats", "kafka"))
    (about / "entry_points.txt").write_text(f"[outbox.senders]\n{offers}")
    return {"PYTHONPATH": str(folder)}


def calls(journal: RecordFile) -> list[Call]:
    """All calls that were written down."""
    handed: dict[str, tuple[float, tuple[str, ...]]] = {}
    answered: dict[str, tuple[float, frozenset[str]]] = {}
    for name, at, names, is_answer in journal.read():
        if is_answer:
            answered[name] = at, frozenset(names)
        else:
            handed[name] = at, tuple(names)
    nothing = None, frozenset[str]()
    return [
        Call(handed=at, names=names, answered=answered.get(name, nothing)[0], done=answered.get(name, nothing)[1])
        for name, (at, names) in handed.items()
    ]


class WatchedSender:
    """Hands messages on to the sender behind it."""

    def __init__(self, url: str) -> None:
        self._sender = open_sender(url.removeprefix(_PREFIX))
        self.deadline, self.concurrency = deadline_of(self._sender), concurrency_of(self._sender)
        self._journal = RecordFile(Path(os.environ[JOURNAL]))
        self._refusing = Path(os.environ[REFUSING])

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Write down what is handed over, and what is answered to be stored, whatever comes of it."""
        call = uuid.uuid4().hex
        self._note(call, messages, is_answer=False)
        verdicts: Sequence[Verdict] = ()
        try:
            verdicts = self._send(messages)
        finally:
            answers = zip(messages, verdicts, strict=False)
            self._note(call, [each for each, verdict in answers if isinstance(verdict, Done)], is_answer=True)
        return verdicts

    def close(self) -> None:
        """Close the sender behind it."""
        self._sender.close()

    def _send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        if not self._refusing.exists():
            return self._sender.send(messages)
        verdicts = _refusals(messages)
        left = [number for number, verdict in enumerate(verdicts) if verdict is None]
        answers = self._sender.send([messages[number] for number in left]) if left else ()
        return [*{**dict(enumerate(verdicts)), **dict(zip(left, answers, strict=True))}.values()]  # type: ignore[list-item]

    def _note(self, call: str, messages: Sequence[Message], *, is_answer: bool) -> None:
        record: list[Any] = [call, time.monotonic(), [message.body.decode() for message in messages], is_answer]
        self._journal.append(record)


def _refusals(messages: Sequence[Message]) -> list[Verdict | None]:
    """Return the verdicts of what is refused, and of what is behind it in its key; None for the others."""
    verdicts: list[Verdict | None] = []
    keys: set[str] = set()
    for message in messages:
        if message.key in keys:
            verdicts.append(_BEHIND)
        elif zlib.crc32(message.body) % _REFUSED_OF == 0:
            verdicts.append(Reject("refused"))
            if message.key is not None:
                keys.add(message.key)
        else:
            verdicts.append(None)
    return verdicts

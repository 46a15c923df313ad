"""The answers of JetStream: to a message, and to the question for the first copy of a message. No driver is used."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.senders.port import Doubt

#: JetStream's error codes for a message that its stream can never take: its size, the size of its headers.
_NEVER = (10054, 10097)
#: JetStream's error code for a message that is not in its stream any more.
_GONE = 10037

#: The limits at which a stream is full.
_LIMITS = ("max_msgs", "max_bytes", "max_msgs_per_subject")

#: Names of streams and domains, of which subjects are made.
_NAME = re.compile(r"[^\s.*>]+")


def verdict_of(answer: bytes, headers: Mapping[str, str] | None, subject: str) -> Verdict | Dropped:
    """Return the verdict on a message by the answer, or `Dropped` if the stream dropped the copy."""
    if headers is not None and headers.get("Status") == "503":
        return Unavailable(f"no JetStream stream takes subject {subject!r}; create one")
    reply = _reply(answer)
    failure = reply.get("error")
    if failure is None and "seq" in reply:
        return _dropped(reply, subject) if reply.get("duplicate") else DONE
    if not isinstance(failure, dict):
        return Unavailable(f"NATS: what answers on subject {subject!r} is not JetStream")
    text = f"JetStream on subject {subject!r}: {failure.get('description')} ({failure.get('err_code')})"
    return Reject(text) if failure.get("err_code") in _NEVER else Unavailable(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A copy for `subject` that a stream has dropped, because message `seq`, of any subject, has the same id."""

    subject: str
    stream: str
    seq: int
    domain: str | None

    def question(self, *, home: str | None) -> str:
        """Return the subject for the question to the stream, on a server of the domain `home`."""
        api = "$JS.API" if self.domain in (None, home) else f"$JS.{self.domain}.API"
        return f"{api}.STREAM.MSG.GET.{self.stream}"

    def verdict(self, answer: bytes, message: Message) -> Verdict:
        """Return `Done` if the stream has the message from our subject, else `Unavailable`."""
        reply = _reply(answer)
        found, failure = reply.get("message"), reply.get("error")
        if isinstance(found, dict) and _is_copy(found, message):
            return DONE if found.get("subject") == self.subject else self._of_another(found.get("subject"))
        if found is not None or (isinstance(failure, dict) and failure.get("err_code") == _GONE):
            return self.doubtful("the first copy is gone")
        return self.doubtful(str(failure.get("description")) if isinstance(failure, dict) else "JetStream is silent")

    def doubtful(self, why: str) -> Unavailable:
        """Return `Unavailable`, because nobody knows whether the first copy was of our subject.

        If so, sending again may bring the message twice; if not, the message would be lost without.
        """
        return self._waits(f"as a duplicate, and cannot tell of which subject the first copy was: {why}")

    def _of_another(self, other: object) -> Unavailable:
        fix = "give each of the two subjects a stream, or run one relay only"
        return self._waits(f"because it has the same message from {other!r}, and drops by the id alone; {fix}")

    def _waits(self, why: str) -> Unavailable:
        taken = "the copy is sent again, and taken when the stream's duplicate_window is over"
        return Unavailable(f"stream {self.stream!r} dropped it on subject {self.subject!r} {why}; {taken}")


def streams_of(answer: bytes) -> list[str]:
    """Return the names of the streams that take a subject, by the answer of `STREAM.NAMES`."""
    found = _reply(answer).get("streams")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def doubts_of(answer: bytes) -> list[Doubt]:
    """Return the settings under which a stream drops what it has accepted, by the answer of `STREAM.INFO`."""
    reply = _reply(answer)
    config, state = reply.get("config") or {}, reply.get("state") or {}
    where, doubts = f"stream {config.get('name')}", []
    if config.get("retention") == "interest" and not state.get("consumer_count"):
        problem = "retention interest without any consumer: each message is dropped as soon as it comes"
        doubts.append(Doubt(where, problem, "make the consumers before the relay sends, or set retention limits"))
    if config.get("storage") == "memory":
        problem = "storage memory: a restart of the server loses all messages"
        doubts.append(Doubt(where, problem, "make the stream with storage file"))
    limits = [limit for limit in _LIMITS if (config.get(limit) or 0) > 0]
    if limits and config.get("discard") != "new":
        problem = f"discard old with {' and '.join(limits)}: a full stream drops its oldest messages, read or not"
        doubts.append(Doubt(where, problem, "set discard new: a full stream refuses, and messages wait in the log"))
    return doubts


def _dropped(reply: dict[str, Any], subject: str) -> Verdict | Dropped:
    stream, seq, domain = reply.get("stream"), reply["seq"], reply.get("domain")
    names = (stream,) if domain is None else (stream, domain)
    if not isinstance(seq, int) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        return Unavailable(f"NATS: what answers on subject {subject!r} is not JetStream")
    return Dropped(subject=subject, stream=str(stream), seq=seq, domain=domain)


def _reply(answer: bytes) -> dict[str, Any]:
    """Return JetStream's answer; an empty dict for anything but a JSON object."""
    try:
        reply = json.loads(answer)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _is_copy(found: dict[str, Any], message: Message) -> bool:
    """Return whether a stream has found the message, and not a later one of a stream made anew."""
    try:
        return str(message.message_id).encode() in base64.b64decode(found.get("hdrs", ""))
    except (TypeError, ValueError):
        return False

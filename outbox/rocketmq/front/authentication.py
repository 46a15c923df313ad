"""Authentication: a client signs each call with the secret of an access key, and names topics that the key may."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from outbox.errors import MQClientError
from outbox.rocketmq.front.calls import Call
from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.settings import topics_of
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.rocketmq.front.validation import checked_number
from outbox.rocketmq.limits import checked_name_of_topic
from outbox.runtime.reloaded import Reloaded
from outbox.runtime.secret import secret_text, warning_of
from outbox.runtime.throttled_log import Throttle

logger = logging.getLogger("outbox")

_ALGORITHM = "MQv2-HMAC-SHA1"
#: Commas, slashes and = separate the parts of a signature.
_ACCESS_KEY = re.compile(r"((?![,/=:])[!-~])+")
_FORM = "write access_key:secret or access_key:secret:topic,topic"
#: Requests name their topics in these fields.
_TOPICS: Mapping[str, Callable[[Wire], Iterable[str]]] = {
    "topic": lambda request: [request.topic.name],
    "message_queue": lambda request: [request.message_queue.topic.name],
    "messages": lambda request: [message.topic.name for message in checked_number(request.messages)],
    "settings": lambda request: topics_of(request.settings),
}


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An access key. `topics`: the topics for its clients; None: all."""

    name: str
    secret: bytes = field(repr=False)
    topics: frozenset[str] | None = None


#: A key of nobody: a call with an unknown key takes as long as others.
_UNKNOWN = AccessKey("", b"", frozenset())


class Authentication:
    """Admits calls that are signed with a key of a file; a change of the file counts a second later."""

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            ValueError: the file cannot be read, or a line has a mistake.
        """
        if warning := warning_of(file):
            logger.warning("front: %s", warning)
        self._keys = Reloaded([file], partial(keys_of, file))
        self._throttle = Throttle()

    def admit(self, call: Call, request: Wire | None = None) -> Call:
        """Return a call with its client named after the access key, so that keys never share a client.

        Raises:
            RefusedError: the signature is not of a key of the file, or the key is not for a topic of the request.
        """
        name, signature = _signed(call.metadata)
        key = self._keys.value().get(name, _UNKNOWN)
        date = call.metadata.get("x-mq-date-time", "")
        right = hmac.digest(key.secret, date.encode(), "sha1").hex()
        if not hmac.compare_digest(signature.lower().encode(), right.encode()) or key is _UNKNOWN or not date:
            self._refuse_stranger(call, key, name)
        for topic in set() if request is None or key.topics is None else topics_in(request) - key.topics:
            self._log(call, key, Code.FORBIDDEN, f"access key {key.name} is not for topic {topic!r:.130}")
            raise RefusedError(Code.FORBIDDEN, f"User:{key.name} has no permission to access Topic:{topic}")
        return dataclasses.replace(call, client=f"{key.name}:{call.client}")

    def _refuse_stranger(self, call: Call, key: AccessKey, name: str) -> None:
        if not name:
            self._log(call, None, Code.UNAUTHORIZED, "there are no credentials")
            raise RefusedError(Code.UNAUTHORIZED, "username cannot be null. [give the client its credentials]")
        # The name of an unknown key may be a secret in the wrong place.
        why = "its access key is unknown" if key is _UNKNOWN else f"its signature is not by the secret of {key.name}"
        self._log(call, key, Code.UNAUTHORIZED, why)
        # Which of the two is wrong is not for strangers.
        raise RefusedError(Code.UNAUTHORIZED, "check signature failed. [unknown access key, or another secret]")

    def _log(self, call: Call, key: AccessKey | None, code: Code, why: str) -> None:
        """Log a refusal once a minute: for each key, for unknown keys together, and for calls without a key."""
        if self._throttle.allows((key and key.name, code)):
            logger.warning("front: client %.80r is refused: %s", call.client, why)


def topics_in(request: Wire) -> set[str]:
    """Return the names of the topics of a request.

    Raises:
        RefusedError: there are too many messages or topics to look at each.
    """
    fields = request.DESCRIPTOR.fields_by_name
    return {topic for name, topics in _TOPICS.items() if name in fields for topic in topics(request)}


def keys_of(file: Path) -> Mapping[str, AccessKey]:
    """Return the access keys of a file by name: lines `access_key:secret`, or `access_key:secret:topic,topic`.

    Raises:
        ValueError: the file cannot be read, or a line has a mistake. The text shows nothing of the contents.
    """
    found = dict[str, AccessKey]()
    lines = (secret_text("auth file", file, "") or "").split("\n")
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        try:
            key = _key_of(line)
            if key.name in found:
                raise ValueError("access_key: an earlier line has the same; remove one of the lines")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        found[key.name] = key
    if not found:
        raise ValueError(f"{file}: no line has an access key, so no client could connect; {_FORM}")
    return found


def _key_of(line: str) -> AccessKey:
    name, *rest = line.split(":", 2)
    if not _ACCESS_KEY.fullmatch(name):
        raise ValueError(f"access_key: it is empty, or has a comma, a slash, =, white space or no ASCII; {_FORM}")
    if not rest or not rest[0]:
        raise ValueError(f"secret: it is missing; {_FORM}")
    if re.search(r"\s", rest[0]):
        raise ValueError(f"secret: it has white space; {_FORM}")
    return AccessKey(name, rest[0].encode(), _topics_of(rest[1]) if len(rest) > 1 else None)


def _topics_of(text: str) -> frozenset[str]:
    try:
        return frozenset(checked_name_of_topic(each.strip()) for each in text.split(","))
    except MQClientError:
        # Without the text: it may be the end of a secret with a colon.
        raise ValueError(
            "topics: they are no names with commas in between; a secret has no colon, and without the second colon the"
            " key is for all topics"
        ) from None


def _signed(metadata: Mapping[str, str]) -> tuple[str, str]:
    """Return the access key and the signature of a call; empty where they are missing."""
    algorithm, _, rest = metadata.get("authorization", "").partition(" ")
    fields = dict(each.strip().partition("=")[::2] for each in rest.split(","))
    # Some clients name a region and a service behind the key.
    name = fields.get("Credential", "").partition("/")[0]
    return (name, fields.get("Signature", "")) if algorithm == _ALGORITHM else ("", "")

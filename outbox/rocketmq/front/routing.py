"""Routes: a topic has a single queue, and the front is the broker."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from outbox.rocketmq.front.calls import Call
from outbox.rocketmq.front.protocol import RPCS, Wire, kind, numbers
from outbox.rocketmq.front.statuses import Code, RefusedError, status
from outbox.rocketmq.front.validation import checked_topic

TopicType = Literal["NORMAL", "FIFO", "DELAY", "TRANSACTION"]

_Response = RPCS["QueryRoute"].response
_Endpoints, _Queue = kind("Endpoints"), kind("MessageQueue")
_SCHEMES, _TYPES = numbers("AddressScheme"), numbers("MessageType")
_READ_WRITE = numbers("Permission")["READ_WRITE"]
_BROKER = "outbox"
_FAQ = "For more information, please visit the url, https://rocketmq.apache.org/docs/bestPractice/06FAQ"


@dataclass(frozen=True, slots=True)
class Place:
    """A host and a port, by which clients find a front."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the place in a text, HOST:PORT; an address of IPv6 is in brackets.

        Raises:
            ValueError: the text is no such place.
        """
        host, colon, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
            raise ValueError(f"a place is HOST:PORT, such as 127.0.0.1:8081, not {text!r:.80}")
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_everywhere(self) -> bool:
        """True for an address of a whole machine, to which no client can connect."""
        return self.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound

    def endpoints(self) -> Wire:
        """Return the place in the words of the protocol."""
        try:
            scheme = f"IPv{ipaddress.ip_address(self.host).version}"
        except ValueError:
            scheme = "DOMAIN_NAME"
        made = _Endpoints(scheme=_SCHEMES[scheme])
        made.addresses.add(host=self.host, port=self.port)
        return made


class Routes:
    """Answers where a topic is."""

    def __init__(self, topics: Mapping[str, TopicType], advertised: Callable[[bool], Place]) -> None:
        """`advertised`: returns the place for clients, of those with TLS or of those without."""
        self._topics = topics
        self._advertised = advertised

    async def query(self, call: Call, request: Wire) -> Wire:
        """Return the route of a topic."""
        return _Response(status=status(), message_queues=[self.queue(call, request.topic)])

    @property
    def place(self) -> Place:
        """The place for clients without TLS, by which messages name the front."""
        return self._advertised(False)

    def has(self, topic: str) -> bool:
        """Return whether there is a topic with a name."""
        return topic in self._topics

    def known(self, name: str) -> str:
        """Return the name of a topic that is there.

        Raises:
            RefusedError: there is no such topic.
        """
        topic = checked_topic(name)
        if topic not in self._topics:
            raise RefusedError(
                Code.TOPIC_NOT_FOUND,
                f"CODE: 17  DESC: No topic route info in name server for the topic: {topic}\n{_FAQ}"
                f" [add it by: outbox rocketmq topics add {shlex.quote(topic)}]",
            )
        return topic

    def type_of(self, topic: str) -> TopicType:
        """Return the type of a topic; NORMAL for a topic that was dropped meanwhile."""
        return self._topics.get(topic, "NORMAL")

    def queue(self, call: Call, topic: Wire) -> Wire:
        """Return the queue of a topic for a caller; see `known` for errors."""
        type_ = _TYPES[self.type_of(self.known(topic.name))]
        made = _Queue(id=0, permission=_READ_WRITE, topic=topic, accept_message_types=[type_])
        made.broker.name, made.broker.id = _BROKER, 0
        made.broker.endpoints.CopyFrom(self._advertised(call.tls).endpoints())
        return made

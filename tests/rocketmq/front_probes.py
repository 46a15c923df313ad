"""Probes of a server that speaks RocketMQ's protocol: requests by hand, and the answers of a real RocketMQ 5.5.0.

`front_facts.jsonl` was recorded from a real server with the same requests. The numbers of queues are left out: there a
topic had four queues.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

import grpc

from outbox.rocketmq.front import Front
from outbox.rocketmq.front.protocol import RPCS, SERVICE, kind, numbers
from outbox.rocketmq.front.statuses import Code

TOPICS = {
    "oracle_normal": "NORMAL", "oracle_filt": "NORMAL", "oracle_ack": "NORMAL", "oracle_fifo": "FIFO",
    "oracle_delay": "DELAY", "oracle_tx": "TRANSACTION", "oracle_tx1": "TRANSACTION", "oracle_chk": "TRANSACTION",
    "oracle_chk2": "TRANSACTION",
}  # fmt: skip
_Message = kind("Message")
#: What only this front adds to a text.
_OURS = re.compile(r" \[.*\]$", re.DOTALL)
#: Seconds for a call, and for a stream.
_TIMEOUT = 300
_FACTS = Path(__file__).with_name("front_facts.jsonl")


def facts(section: str) -> dict[str, dict[str, Any]]:
    """The facts about a real server, by probe."""
    lines = map(json.loads, _FACTS.read_text().splitlines())
    return {
        each["probe"].removeprefix(section + " "): each["fact"]
        for each in lines
        if each["probe"].startswith(section + " ")
    }


class Wire:
    """A client without any check of its own."""

    def __init__(self, front: Front, *, client: str | None = "by-hand") -> None:
        self._channel = grpc.insecure_channel(str(front.listening))
        self._metadata = [] if client is None else [("x-mq-client-id", client)]

    def call(self, name: str, **fields: Any) -> Any:
        """Make a call; return the response, or all responses."""
        rpc = RPCS[name]
        made = self._channel.unary_stream if rpc.streams_out else self._channel.unary_unary
        ask = made(f"/{SERVICE}/{name}", rpc.request.SerializeToString, rpc.response.FromString)
        answer = ask(rpc.request(**fields), metadata=self._metadata, timeout=_TIMEOUT)
        return list(answer) if rpc.streams_out else answer

    def telemetry(self, commands: Iterator[Any]) -> Any:
        """Open a stream."""
        rpc = RPCS["Telemetry"]
        open_stream = self._channel.stream_stream(
            f"/{SERVICE}/Telemetry", rpc.request.SerializeToString, rpc.response.FromString
        )
        return open_stream(commands, metadata=self._metadata, timeout=_TIMEOUT)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def fact(answer: Any) -> dict[str, Any]:
    """The status of an answer, without what only this front adds."""
    code = answer.status.code
    return {"code": Code(code).name, "number": code, "text": without_ours(answer.status.message)}


def without_ours(text: str) -> str:
    """A text without what only this front adds."""
    return _OURS.sub("", text)


def message(topic: str, body: bytes = b"x", type_: str = "NORMAL", mid: str | None = None, **system: Any) -> Any:
    """A message as the recorded requests have it; a topic with = in front is meant literally."""
    made = _Message(body=body, user_properties=system.pop("props", {}))
    made.topic.name = topic[1:] if topic.startswith("=") else f"oracle_{topic}"
    properties = made.system_properties
    properties.message_id = f"01{uuid4().hex.upper()}" if mid is None else mid
    properties.message_type = numbers("MessageType")[type_]
    properties.born_timestamp.GetCurrentTime()
    properties.born_host = "born-host"
    properties.body_encoding = numbers("Encoding")["IDENTITY"]
    for name, value in system.items():
        if name == "keys":
            properties.keys.extend(value)
        elif name in ("delivery_timestamp", "orphaned_transaction_recovery_duration"):
            getattr(properties, name).FromMilliseconds(int(value * 1000))
        else:
            setattr(properties, name, value)
    return made


def sent() -> Iterator[tuple[str, list[Any]]]:
    """The probes of sending, by name."""
    now = time()
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("NORMAL", {}), ("FIFO", {"message_group": "g"}), ("DELAY", {"delivery_timestamp": now + 1}),
        ("TRANSACTION", {}),
    ]  # fmt: skip
    for type_, fields in kinds:
        for topic in ("normal", "fifo", "delay", "tx"):
            if TOPICS[f"oracle_{topic}"] != type_:
                name = f"{type_} to {TOPICS[f'oracle_{topic}']} topic"
                yield name, [message(topic, b"mix", type_, **fields)]
    many = {f"p{number}": "v" for number in range(129)}
    one: dict[str, Any] = {
        "type unspecified": message("normal", type_="MESSAGE_TYPE_UNSPECIFIED"),
        "type NORMAL with message group": message("normal", message_group="g"),
        "type NORMAL with delivery time": message("normal", delivery_timestamp=now + 2),
        "type FIFO without group": message("fifo", type_="FIFO"),
        "type DELAY without time": message("delay", type_="DELAY"),
        "TRANSACTION with group": message("tx", b"tx with group", "TRANSACTION", message_group="g"),
        "TRANSACTION with delivery time": message(
            "tx", b"tx with delivery time", "TRANSACTION", delivery_timestamp=now + 2
        ),
        "unknown topic": message("=oracle_nowhere"),
        "empty topic": message("="),
        "topic with blank": message("=a b"),
        "topic with slash": message("=a/b"),
        "topic 128 characters": message("=" + "x" * 128),
        "system topic half": message("=RMQ_SYS_TRANS_HALF_TOPIC"),
        "system topic TBW102": message("=TBW102"),
        "body empty": message("normal", b""),
        "body 4 MiB": message("normal", b"x" * 4194304),
        "body 4 MiB + 1": message("normal", b"x" * 4194305),
        "delay 24 h + 60 s": message("delay", type_="DELAY", delivery_timestamp=now + 86460),
        "delay 24 h - 60 s": message("delay", type_="DELAY", delivery_timestamp=now + 86340),
        "delay 3 days": message("delay", type_="DELAY", delivery_timestamp=now + 3 * 86400),
        "delay in the past": message("delay", type_="DELAY", delivery_timestamp=now - 60),
        "tag empty": message("normal", tag=""),
        "tag blank": message("normal", tag=" "),
        "tag with |": message("normal", tag="a|b"),
        "tag control character": message("normal", tag="a\x01b"),
        "key blank": message("normal", keys=[" "]),
        "key with space": message("normal", keys=["a b"]),
        "key control character": message("normal", keys=["a\x01"]),
        "property name empty": message("normal", props={"": "v"}),
        "property value empty": message("normal", props={"a": ""}),
        "property name reserved (KEYS)": message("normal", props={"KEYS": "v"}),
        "property name reserved (TRAN_MSG)": message("normal", props={"TRAN_MSG": "true"}),
        "property control character": message("normal", props={"a": "x\x02"}),
        "property name __transactionId__": message("normal", props={"__transactionId__": "v"}),
        "properties 128": message("normal", props=dict(list(many.items())[:128])),
        "properties 129": message("normal", props=many),
        "properties 16384 bytes": message("normal", props={"a": "v" * 16383}),
        "properties 16385 bytes": message("normal", props={"a": "v" * 16384}),
        "group 63 bytes": message("fifo", type_="FIFO", message_group="g" * 63),
        "group 64 bytes": message("fifo", type_="FIFO", message_group="g" * 64),
        "group 65 bytes": message("fifo", type_="FIFO", message_group="g" * 65),
        "group blank": message("fifo", type_="FIFO", message_group=" "),
        "message id empty": message("normal", mid=""),
        "message id free text": message("normal", mid="my-own-id"),
        "recovery duration 3600 s": message("tx", b"rec", "TRANSACTION", orphaned_transaction_recovery_duration=3600),
        "recovery duration 3601 s": message("tx", b"rec2", "TRANSACTION", orphaned_transaction_recovery_duration=3601),
    }
    yield from ((name, [each]) for name, each in one.items())
    yield "no message", []
    yield "two messages one topic", [message("normal", b"1"), message("normal", b"2")]
    yield "two messages two topics", [message("normal", b"1"), message("filt", b"2")]
    yield "two transactional in one request", [
        message("tx", b"two-1", "TRANSACTION"), message("tx", b"two-2", "TRANSACTION"),
    ]  # fmt: skip


def routed() -> dict[str, str]:
    """The names whose route is asked, by probe."""
    names = (
        "oracle_normal", "oracle_nowhere", "", "a b", "a/b", "\u00e4", "x" * 127, "x" * 128, "%RETRY%oracle_g00",
        "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102", "rmq_sys_x", "a|b", "a%b",
    )  # fmt: skip
    return {name if len(name) < 60 else f"{name[0]}*{len(name)}": name for name in names}


def ended() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]], dict[str, Any]]]:
    """The probes of transactions: name, the verdicts with their fields, and fields of the half message."""
    ok: tuple[str, dict[str, Any]] = ("COMMIT", {})
    no: tuple[str, dict[str, Any]] = ("ROLLBACK", {})
    yield "commit", [ok], {"props": {"p": "v"}}
    yield "rollback", [no], {}
    yield "commit twice", [ok, ok], {}
    yield "rollback after commit", [ok, no], {}
    yield "commit after rollback", [no, ok], {}
    yield "rollback twice", [no, no], {}
    yield "resolution unspecified, then commit", [("TRANSACTION_RESOLUTION_UNSPECIFIED", {}), ok], {}
    yield "wrong message id", [("COMMIT", {"message_id": "other"})], {}
    yield "empty message id", [("COMMIT", {"message_id": ""})], {}
    yield "wrong topic (NORMAL topic), then commit", [("COMMIT", {"topic": {"name": "oracle_normal"}}), ok], {}
    yield "wrong topic (other TRANSACTION topic), then commit", [("COMMIT", {"topic": {"name": "oracle_tx1"}}), ok], {}
    yield "unknown topic, then commit", [("COMMIT", {"topic": {"name": "oracle_nowhere"}}), ok], {}
    yield "commit by another client", [("COMMIT", {"by": "another"})], {}
    yield "unknown transaction id, then commit", [("COMMIT", {"transaction_id": "unknown"}), ok], {}
    yield "empty transaction id, then commit", [("COMMIT", {"transaction_id": ""}), ok], {}
    yield "half with message group, commit", [ok], {"message_group": "g"}
    yield "half with delivery time +3 s, commit", [ok], {"delivery_timestamp": time() + 0.1}
    yield "same id sent twice, two commits", [ok, ok, ok], {"mid": f"01{uuid4().hex.upper()}"}

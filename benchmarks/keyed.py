"""Messages with a key and two headers: sent with this library, and inserted by SQL that is written by hand."""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, text

from benchmarks.writers import BODY, Way
from outbox import Message, Outbox, create_engine
from outbox.writing.handles import Handle

_HEADERS = {"source": "checkout", "request-id": "01931f2e-7c5a-7d10-9f3c-2f1b8a6c4e55"}
_SLOTS = 256


def send_keyed(outbox: Outbox, handle: Handle, number: int, messages: int) -> None:
    """One by `send`, several by `send_all`; each transaction's number is a key of its own."""
    key = f"order-{number}"
    if messages == 1:
        outbox.send(handle, "orders", BODY, key=key, headers=_HEADERS)
    else:
        outbox.send_all(handle, [Message("orders", BODY, key=key, headers=_HEADERS) for _ in range(messages)])


def insert_text(messages: int, parameter: Callable[[str], str]) -> str:
    """One INSERT of so many rows, as one would type it; `parameter` says how the driver wants one named."""
    row = "({message_id}, {topic}, {key}, {slot}, {headers}, {body}, statement_timestamp())"
    names = ("message_id", "topic", "key", "slot", "headers", "body")
    rows = (row.format(**{name: parameter(f"{name}_{at}") for name in names}) for at in range(messages))
    columns = "message_id, topic, key, slot, headers, body, created_at"
    return f"INSERT INTO outbox_message ({columns}) VALUES {', '.join(rows)}"


def rows_by_hand(number: int, messages: int) -> dict[str, Any]:
    """Its parameters, with what the log's format asks of every writer: an id, the key's slot, headers as JSON."""
    key = f"order-{number}"
    slot = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % _SLOTS
    parameters: dict[str, Any] = {}
    for at in range(messages):
        parameters[f"message_id_{at}"] = uuid.uuid4()
        parameters[f"topic_{at}"] = "orders"
        parameters[f"key_{at}"] = key
        parameters[f"slot_{at}"] = slot
        parameters[f"headers_{at}"] = json.dumps(_HEADERS)
        parameters[f"body_{at}"] = BODY
    return parameters


def send_with_key(url: str) -> Way:
    """With this library, all messages of a transaction with one key."""
    engine = create_engine(url)
    outbox = Outbox(engine)
    numbers = itertools.count()

    def append(connection: Connection, messages: int) -> None:
        send_keyed(outbox, connection, next(numbers), messages)

    return Way(engine, append)


def insert_as_text(url: str) -> Way:
    """The same by hand."""
    engine = create_engine(url)
    statements = {messages: text(insert_text(messages, ":{}".format)) for messages in (1, 5)}
    numbers = itertools.count()

    def append(connection: Connection, messages: int) -> None:
        connection.execute(statements[messages], rows_by_hand(next(numbers), messages))

    return Way(engine, append)

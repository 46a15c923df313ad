"""The destination of the demo's messages, and a consumer at the destination."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from outbox.cli.demo.judge import Receipt

#: The shortest window that JetStream allows. It drops messages that come again within it, and the demo wants to see
#: such messages.
_DUPLICATE_WINDOW_SECONDS = 0.1
_PAGE = 500


class Destination(Protocol):
    """A destination with a consumer behind it."""

    url: str

    def receive(self) -> list[Receipt]:
        """Return the receipts since the last call, in the order of arrival."""

    def close(self) -> None:
        """Close the connections."""


class Stream:
    """A JetStream stream that takes the subject `orders`."""

    def __init__(self, url: str) -> None:
        self.url = url
        # An asyncio.Runner turns Ctrl-C into a cancellation, and the NATS client may take that for a timeout.
        self._loop = asyncio.new_event_loop()
        self._received = 0
        self._loop.run_until_complete(self._begin())

    def receive(self) -> list[Receipt]:
        """Return the receipts since the last call, up to the present end of the stream."""
        return self._loop.run_until_complete(self._read_on())

    def close(self) -> None:
        """Close the connection and its loop."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    async def _begin(self) -> None:
        import nats
        from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

        self._client = await nats.connect(self.url)
        self._jetstream = self._client.jetstream()
        config = StreamConfig(name="ORDERS", subjects=["orders"], duplicate_window=_DUPLICATE_WINDOW_SECONDS)
        await self._jetstream.add_stream(config)
        # Durable, because the server forgets any other consumer when nothing has come for a while.
        await self._jetstream.add_consumer("ORDERS", ConsumerConfig(durable_name="demo", ack_policy=AckPolicy.NONE))
        self._subscription = await self._jetstream.pull_subscribe_bind("demo", stream="ORDERS")

    async def _read_on(self) -> list[Receipt]:
        from outbox.senders.nats import MESSAGE_ID, read_message

        last = (await self._jetstream.stream_info("ORDERS")).state.last_seq
        receipts: list[Receipt] = []
        while self._received < last:
            fetched = await self._subscription.fetch(min(_PAGE, last - self._received), timeout=5)
            self._received += len(fetched)
            for each in fetched:
                message = read_message(each)
                receipts.append(_receipt(message.key, message.body, (each.headers or {})[MESSAGE_ID]))
        return receipts


class LinesFile:
    """A file with lines of JSON, appended by the relay."""

    def __init__(self, path: Path) -> None:
        self.url = f"file://{path}"
        self._path = path
        self._offset = 0

    def receive(self) -> list[Receipt]:
        """Return the receipts since the last call, up to the last whole line.

        An incomplete line of a killed relay is skipped: its message comes again.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        parsed = [fields for line in whole.splitlines() if (fields := _parsed(line)) is not None]
        return [_receipt(fields["key"], fields["body"], fields["message_id"]) for fields in parsed]

    def close(self) -> None:
        """Do nothing, because the file is not open between two calls."""


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        fields: Mapping[str, Any] = json.loads(line)
    except ValueError:
        return None
    return fields


def _receipt(key: str | None, body: str | bytes, message_id: str) -> Receipt:
    return Receipt(key or "", json.loads(body)["version"], message_id)

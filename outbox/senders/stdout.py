"""JSON lines: one line per message, to standard output or appended to a file.

    {"message_id": "…", "topic": "orders", "key": "order-7", "tags": null, "headers": {}, "content_type": "text/plain",
     "created_at": "2026-01-31T12:00:00+00:00", "body": "…"}

Lines are ASCII, for every terminal and every reader of lines. A body other than UTF-8 stands under `body_base64`.
Headers stand in an object under `headers`, so that no header can be taken for a field of the line.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote, urlsplit

from outbox.errors import InvalidMessageError, SenderError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.secret import redacted
from outbox.senders.headers import own_headers
from outbox.senders.key_order import in_order
from outbox.senders.port import destination_of


class StdoutSender:
    """Writes each message as one line, for the URL `stdout:`."""

    destination = "stdout:"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    @classmethod
    def from_url(cls, url: str) -> StdoutSender:
        """Return the sender for `stdout:` or `stdout:?as=name`."""
        name = _named(url)
        if name is None or destination_of(url).removesuffix(name) not in ("stdout:", "stdout://"):
            raise SenderError("stdout: takes nothing behind the colon but ?as=name")
        sender = cls()
        sender.destination += name
        return sender

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Write the messages. All with a line are `Done` when the last line is flushed, else none."""
        lines, verdicts = _lines(messages)
        # Looked up at every call, because code that captures output replaces sys.stdout.
        stream = self._stream or sys.stdout
        try:
            stream.writelines(lines)
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            return [Unavailable(f"standard output: {error}", everything=True)] * len(messages)
        return verdicts

    def close(self) -> None:
        """Do nothing: standard output belongs to the process."""


class FileSender:
    """Appends lines, for URLs `file:///path`; messages are `Done` when the whole call is on disk.

    The file is opened for each call, so that renaming rotates the file at any time. After a crash in the middle of a
    call the last line may be incomplete: the next call ends the line, and the message is sent again.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        self.destination = f"file://{self._path}"

    @classmethod
    def from_url(cls, url: str) -> FileSender:
        """Return the sender for `file:///absolute/path`; other characters are percent-encoded as in every URL.

        The one option is `as`, as in `file:///absolute/path?as=name`.
        """
        name = _named(url)
        parts = urlsplit(url)
        path = unquote(parts.path)
        is_path = path.startswith("/") and not path.endswith("/") and "\0" not in path
        if not is_path or parts.netloc or name is None or parts.fragment:
            given = redacted(url) if "@" in url else url
            raise SenderError(f"{given}: a file is written file:///absolute/path")
        sender = cls(path)
        sender.destination += name
        return sender

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Append the messages. All with a line are `Done` when the last line is on disk, else none."""
        lines, verdicts = _lines(messages)
        if not lines:
            return verdicts
        try:
            self._append("".join(lines).encode())
        except OSError as error:
            return [Unavailable(f"{self._path}: {error.strerror}", everything=True)] * len(messages)
        return verdicts

    def close(self) -> None:
        """Do nothing."""

    def _append(self, lines: bytes) -> None:
        is_new = not self._path.exists()
        with self._path.open("a+b") as file:
            _wait_for_others(file.fileno())
            file.write(lines if _ends_with_newline(file.fileno()) else b"\n" + lines)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._path.parent)


def _named(url: str) -> str | None:
    """Return the option `as` of a URL with the question mark, or an empty text; None: there is another option."""
    name = "".join(destination_of(url).partition("?")[1:])
    query = urlsplit(url).query
    return name if bool(query) == bool(name) and "&" not in query else None


def _lines(messages: Sequence[Message]) -> tuple[list[str], list[Verdict]]:
    """Return the lines to write, and the verdicts for when they are written."""
    lines: list[str] = []

    def write(message: Message) -> Verdict:
        try:
            lines.append(json_line(message))
        except InvalidMessageError as unfit:
            return Reject(str(unfit))
        return DONE

    return lines, in_order(messages, write)


def json_line(message: Message) -> str:
    """Return a message as a line of ASCII JSON; raise `InvalidMessageError` if the headers are no JSON object."""
    fields = {
        "message_id": str(message.message_id),
        "topic": message.topic,
        "key": message.key,
        "tags": message.tags,
        "headers": own_headers(message),
        "content_type": message.content_type,
        "created_at": None if message.created_at is None else message.created_at.astimezone(UTC).isoformat(),
    }
    try:
        fields["body"] = message.body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = base64.b64encode(message.body).decode()
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _wait_for_others(file: int) -> None:
    """Lock the file. Half a call of another relay would look like a torn line."""
    # Not every system and file system has locks; without them a line may be followed by an empty one.
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _sync_folder(folder: Path) -> None:
    """Write a folder to disk, because a new file survives a crash only with its folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

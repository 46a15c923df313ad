"""JSON lines on standard output and in files: nothing is altered, nothing is torn, nothing is done too early."""

import base64
import io
import json
import re
import sys
import threading
from uuid import UUID

import pytest

from outbox.errors import SenderError
from outbox.model.verdict import DONE, Unavailable
from outbox.senders.stdout import FileSender, StdoutSender, json_line
from outbox.testing.sender_contract import Destination, SenderContract, Stored, a_message


class _Lines(Destination):
    """A file of JSON lines in a folder that can vanish."""

    def __init__(self, folder):
        self._folder = folder / "out"
        self._folder.mkdir()
        self._path = self._folder / "messages.jsonl"

    def open(self):
        return FileSender(self._path)

    def stored(self):
        return [read(line) for line in self._path.open()] if self._path.exists() else []

    def disappear(self):
        self._folder.rename(self._folder.with_name("away"))

    def recover(self):
        self._folder.with_name("away").rename(self._folder)


class _Stream(Destination):
    """Standard output, kept in memory."""

    def __init__(self):
        self._text = io.StringIO()

    def open(self):
        return StdoutSender(self._text)

    def stored(self):
        return [read(line) for line in self._text.getvalue().split("\n") if line]


class TestFileSender(SenderContract):
    """A file passes the contract."""

    @pytest.fixture
    def destination(self, tmp_path):
        """A file that is not there yet."""
        return _Lines(tmp_path)


class TestStdoutSender(SenderContract):
    """Standard output passes the contract."""

    @pytest.fixture
    def destination(self):
        """A stream of its own."""
        return _Stream()


def read(line):
    """What a reader of the lines makes of one."""
    fields = json.loads(line)
    body = base64.b64decode(fields["body_base64"]) if "body_base64" in fields else fields["body"].encode()
    names = ("topic", "key", "tags", "headers", "content_type")
    return Stored(message_id=UUID(fields["message_id"]), body=body, **{name: fields[name] for name in names})


def test_standard_output_is_looked_up_at_every_call(capsys):
    sent = a_message("orders", "hello", key="a")

    assert StdoutSender().send([sent]) == [DONE]

    fields = json.loads(capsys.readouterr().out)
    assert fields == {
        "message_id": str(sent.message_id),
        "topic": "orders",
        "key": "a",
        "tags": None,
        "headers": {},
        "content_type": "text/plain",
        "created_at": str(sent.created_at).replace(" ", "T"),
        "body": "hello",
    }


def test_a_closed_standard_output_is_unavailable(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)

    [verdict] = StdoutSender().send([a_message("orders", 1)])

    assert verdict == Unavailable("standard output: I/O operation on closed file.")


def test_a_line_can_do_nothing_to_a_terminal():
    line = json_line(a_message("orders", "\x1b[2J\x9b2J\u2028\u202e\r\n\x00", key="\x1b]0;x\x07"))

    assert line.isascii()
    assert line.count("\n") == 1
    assert line[:-1].isprintable()


def test_a_torn_line_is_ended_and_the_next_ones_are_whole(tmp_path):
    path = tmp_path / "messages.jsonl"
    path.write_text('{"message_id": "torn by a cra')
    sent = a_message("orders", 1)

    assert FileSender(path).send([sent]) == [DONE]

    torn, whole = path.read_text().splitlines()
    assert torn == '{"message_id": "torn by a cra'
    assert read(whole).message_id == sent.message_id


def test_a_file_may_be_rotated_between_two_calls(tmp_path):
    path = tmp_path / "messages.jsonl"
    sender = FileSender(path)
    sender.send([a_message("orders", 1)])
    path.rename(tmp_path / "messages.1")

    assert sender.send([a_message("orders", 2)]) == [DONE]

    assert [read(line).body for line in path.open()] == [b"2"]


def test_a_full_disk_is_unavailable():
    [verdict] = FileSender("/dev/full").send([a_message("orders", 1)])

    assert verdict == Unavailable("/dev/full: No space left on device")


def test_nothing_is_done_before_it_is_on_disk(tmp_path, monkeypatch):
    """The call ends with an fsync of the file; a new file's folder is synced, too."""
    synced: list[int] = []
    monkeypatch.setattr("outbox.senders.stdout.os.fsync", synced.append)
    sender = FileSender(tmp_path / "messages.jsonl")

    sender.send([a_message("orders", 1)])
    assert len(synced) == 2

    sender.send([a_message("orders", 2)])
    assert len(synced) == 3


def test_several_senders_append_to_one_file_and_leave_no_line_torn_or_empty(tmp_path):
    """Relays of several databases may have one destination."""
    path = tmp_path / "messages.jsonl"
    calls = [[a_message("orders", n) for n in range(200)] for _ in range(100)]

    def append() -> None:
        sender = FileSender(path)
        for call in calls:
            sender.send(call)

    threads = [threading.Thread(target=append) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len([read(line) for line in path.open()]) == 3 * 100 * 200


def test_a_path_may_hold_any_character(tmp_path):
    sender = FileSender.from_url(f"file://{tmp_path}/a%20b%25%40.jsonl")

    sender.send([a_message("orders", 1)])

    assert (tmp_path / "a b%@.jsonl").exists()


@pytest.mark.parametrize("url", ["file:messages", "file://host/path", "file:///a?b=c", "file:///", "file:///a/"])
def test_a_file_is_an_absolute_path(url):
    with pytest.raises(SenderError, match=f"{re.escape(url)}: a file is written file:///absolute/path"):
        FileSender.from_url(url)


def test_standard_output_has_no_path():
    with pytest.raises(SenderError, match="stdout:"):
        StdoutSender.from_url("stdout://somewhere")

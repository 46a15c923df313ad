"""HTTP/2 by hand, for clients that break its rules: frames over a socket, and what comes back."""

import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import NamedTuple

from outbox.rocketmq.front.protocol import SERVICE
from outbox.rocketmq.front.routing import Place

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
MAX_STREAMS, INITIAL_WINDOW = 3, 4
#: The largest payload of a frame unless the other side allows more.
MOST = 16_384


class Frame(NamedTuple):
    """A frame of HTTP/2."""

    kind: int
    flags: int
    stream: int
    payload: bytes = b""


def encoded(frame: Frame, length: int | None = None) -> bytes:
    """A frame on the wire. `length`: as the frame says it, whatever the payload has."""
    size = len(frame.payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", frame.kind, frame.flags, frame.stream) + frame.payload


def fields(pairs: Mapping[str, str]) -> bytes:
    """Header fields as HPACK's literals without an index."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs.items())


def _text(text: str) -> bytes:
    raw = text.encode()
    length, head = len(raw), bytearray()
    if length < 127:
        return bytes([length]) + raw
    head.append(127)
    length -= 127
    while length >= 128:
        head.append(length % 128 + 128)
        length //= 128
    return bytes([*head, length]) + raw


def headers_of(name: str, client: str = "raw", **more: str) -> Mapping[str, str]:
    """The header fields of a call of the protocol."""
    return {
        ":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/{name}", ":authority": "front", "te": "trailers",
        "content-type": "application/grpc", "x-mq-client-id": client,
    } | more  # fmt: skip


def call(
    stream: int, name: str, *, flags: int = 0, client: str = "raw", encoding: str = "identity", **more: str
) -> bytes:
    """The begin of a call on the wire. `encoding`: of messages with that flag."""
    headers = headers_of(name, client, **more, **{"grpc-encoding": encoding})
    return encoded(Frame(HEADERS, END_HEADERS | flags, stream, fields(headers)))


def message(stream: int, body: bytes, *, flags: int = END_STREAM, size: int | None = None) -> bytes:
    """A message of a call on the wire, which says that it has `size` bytes."""
    raw = struct.pack(">BI", 0, len(body) if size is None else size) + body
    parts = [raw[at : at + MOST] for at in range(0, len(raw), MOST)]
    ends = [0] * (len(parts) - 1) + [flags]
    return b"".join(encoded(Frame(DATA, end, stream, part)) for end, part in zip(ends, parts, strict=True))


def payloads(raw: bytes) -> Iterator[bytes]:
    """The payloads of frames on the wire."""
    at = 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 3])
        yield raw[at + 9 : at + 9 + length]
        at += 9 + length


class Peer:
    """A connection by hand."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = b""
        #: The calls that the server has ended while bytes were poured.
        self.over = set[int]()

    def send(self, *parts: bytes) -> None:
        """Write bytes."""
        self._connection.sendall(b"".join(parts))

    def frames(self) -> Iterator[Frame]:
        """Yield what the server says, until it closes the connection; answer its settings and pings."""
        while True:
            head = self._read(9)
            if len(head) < 9:
                return
            length = int.from_bytes(head[:3])
            frame = Frame(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFF_FFFF, self._read(length))
            if frame.kind in (SETTINGS, PING) and not frame.flags & ACK:
                answer = frame.payload if frame.kind == PING else b""
                with suppress(OSError):
                    self.send(encoded(Frame(frame.kind, ACK, 0, answer)))
            yield frame

    def first(self, wanted: Callable[[Frame], bool]) -> Frame | None:
        """Return the first frame of this kind; None: the server has closed the connection before."""
        return next(filter(wanted, self.frames()), None)

    def until(self, wanted: Callable[[Frame], bool]) -> Iterator[Frame]:
        """Yield the frames before the first one of this kind."""
        return takewhile(lambda frame: not wanted(frame), self.frames())

    def pour(self, calls: Mapping[int, bytes], seconds: float = 2.0) -> int:
        """Send the bytes of calls as far as the server allows; return how many it has allowed.

        End when the server has allowed no more for so many seconds, or has ended the calls, which are in `over` then.
        """
        left, windows, whole, first = dict(calls), dict.fromkeys(calls, 65_535), 65_535, 65_535
        poured = 0
        self._connection.settimeout(seconds)
        with suppress(OSError):
            frames = self.frames()
            while any(left.values()):
                for stream, body in left.items():
                    size = max(0, min(MOST, len(body), whole, windows[stream]))
                    if size:
                        self.send(encoded(Frame(DATA, 0, stream, body[:size])))
                        left[stream], windows[stream] = body[size:], windows[stream] - size
                        whole, poured = whole - size, poured + size
                if all(min(whole, windows[stream]) <= 0 for stream, body in left.items() if body):
                    frame = next(frames, None)
                    if frame is None:
                        break
                    if frame.kind == WINDOW_UPDATE and frame.stream == 0:
                        whole += int.from_bytes(frame.payload)
                    elif frame.kind == WINDOW_UPDATE:
                        windows[frame.stream] += int.from_bytes(frame.payload)
                    elif frame.stream in left and (frame.kind == RST_STREAM or frame.flags & END_STREAM):
                        left[frame.stream] = b""
                        self.over.add(frame.stream)
                    elif frame.kind == SETTINGS and not frame.flags & ACK:
                        said = dict(struct.iter_unpack(">HI", frame.payload))
                        more = said.get(INITIAL_WINDOW, first) - first
                        windows, first = {stream: each + more for stream, each in windows.items()}, first + more
        return poured

    def _read(self, number: int) -> bytes:
        while len(self._left) < number:
            try:
                more = self._connection.recv(65_536)
            except ConnectionError:
                more = b""
            if not more:
                return b""
            self._left += more
        read, self._left = self._left[:number], self._left[number:]
        return read


def settings(values: Mapping[int, int]) -> bytes:
    """Settings on the wire."""
    return encoded(Frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in values.items())))


@contextmanager
def connected(place: Place | None, values: Mapping[int, int] | None = None) -> Iterator[Peer]:
    """A connection that has said that it speaks HTTP/2, with these settings of its own."""
    assert place is not None
    with socket.create_connection((place.host, place.port), 60) as connection:
        peer = Peer(connection)
        peer.send(PREFACE, settings(values or {}))
        yield peer

"""Limits: how much of a front a connection and a call may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

#: At a port, beside one for each client.
MORE_CONNECTIONS = 1000
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a front.

    Args:
        message_bytes: of a request on the wire; a larger one is refused with RESOURCE_EXHAUSTED.
        list_bytes: of acknowledgements.
        command_bytes: of a command of a client on its stream, which ends then.
        call_bytes: of the request of a call that sends no messages and has no list.
        unfinished_bytes: of all requests on their way; beyond, those of the connection with the most are ended.
        metadata_bytes: of the metadata of a call, as HTTP/2 counts; larger ones are refused in the same way.
        connections: at a port; a further one is closed.
        streams: calls at once on a connection; a client's next one waits.
        reads: requests of a connection that are read at once; of each other one at most 64 KiB are taken meanwhile.
        idle: until a connection without calls is closed.
        keepalive: until a silent client is asked for a sign of life, and then until its connection is closed.
        read_within: until the request of a call has to be there.
        take_within: until a client has to have taken a response of several; else the front leaves the call.
    """

    message_bytes: int = 8 * 1024 * 1024
    list_bytes: int = 2 * 1024 * 1024
    command_bytes: int = 256 * 1024
    call_bytes: int = 64 * 1024
    unfinished_bytes: int = 64 * 1024 * 1024
    metadata_bytes: int = 8 * 1024
    connections: int = 5000 + MORE_CONNECTIONS
    streams: int = 100
    reads: int = 4
    idle: timedelta = timedelta(minutes=10)
    keepalive: timedelta = timedelta(seconds=30)
    read_within: timedelta = timedelta(seconds=30)
    take_within: timedelta = timedelta(seconds=60)

    def most_bytes(self, rpc: str) -> int:
        """Return how many bytes a request may have, by the name of the call."""
        lists = {"AckMessage": self.list_bytes, "Telemetry": self.command_bytes}
        return self.message_bytes if rpc == "SendMessage" else lists.get(rpc, self.call_bytes)

    def options(self) -> Sequence[tuple[str, int]]:
        """Return the limits as options of gRPC's server."""
        return [
            # Otherwise two fronts on one port would each get some of the connections, and nobody would notice.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", -1),
            # Between the two, gRPC would refuse metadata by chance.
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
            # Also of connections that have not said anything yet.
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.streams),
            # With probes of the line's speed, more than 64 KiB of a request would be taken before it is read.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.keepalive_time_ms", self.keepalive // _MILLISECOND),
            ("grpc.keepalive_timeout_ms", self.keepalive // _MILLISECOND),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.max_connection_idle_ms", self.idle // _MILLISECOND),
            # A connection that does not even say that it speaks HTTP/2.
            ("grpc.server_handshake_timeout_ms", self.read_within // _MILLISECOND),
        ]

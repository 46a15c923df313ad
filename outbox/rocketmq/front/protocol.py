"""The messages and calls of RocketMQ 5's protocol, made of Apache's descriptors without generated code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "apache.rocketmq.v2"
SERVICE = f"{_PACKAGE}.MessagingService"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: A message of the protocol; its class is made at run time.
Wire = Any


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of the protocol, with the classes of request and response."""

    name: str
    request: type[Wire]
    response: type[Wire]
    streams_in: bool
    streams_out: bool


def _pool() -> DescriptorPool:
    """Return a pool of our own, because the official client adds the same names to the common one."""
    described = FileDescriptorSet.FromString(files(__package__).joinpath("rocketmq.binpb").read_bytes())
    pool = DescriptorPool()
    for file in described.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def kind(name: str) -> type[Wire]:
    """Return the class of the messages with a name of the protocol."""
    found: type[Wire] = GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
    return found


def numbers(name: str) -> Mapping[str, int]:
    """Return the values of an enum of the protocol, by name."""
    return {value.name: value.number for value in _POOL.FindEnumTypeByName(f"{_PACKAGE}.{name}").values}


#: The calls of the protocol by name.
RPCS: Mapping[str, Rpc] = {
    method.name: Rpc(
        method.name,
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        method.client_streaming,
        method.server_streaming,
    )
    for method in _POOL.FindServiceByName(SERVICE).methods
}


def set_moment(field: Wire, moment: datetime) -> None:
    """Set a field for a moment."""
    microseconds = (moment - _EPOCH) // _MICROSECOND
    field.seconds, field.nanos = microseconds // 1_000_000, microseconds % 1_000_000 * 1000


def moment_of(field: Wire) -> datetime:
    """Return the moment in a field.

    Raises:
        OverflowError: no datetime can have it.
    """
    return _EPOCH + timedelta(seconds=field.seconds, microseconds=field.nanos // 1000)


def set_duration(field: Wire, duration: timedelta) -> None:
    """Set a field for a length of time, which is not negative."""
    microseconds = duration // _MICROSECOND
    field.seconds, field.nanos = microseconds // 1_000_000, microseconds % 1_000_000 * 1000


def duration_of(field: Wire) -> timedelta:
    """Return the length of time in a field; see `moment_of` for errors."""
    return timedelta(seconds=field.seconds, microseconds=field.nanos // 1000)

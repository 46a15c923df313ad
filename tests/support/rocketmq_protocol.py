"""Make `outbox/rocketmq/front/rocketmq.binpb` of the descriptors inside the official Python client.

Run `python -m tests.support.rocketmq_protocol` after the client has got newer descriptors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import outbox

FILE = Path(outbox.__file__).parent / "rocketmq" / "front" / "rocketmq.binpb"


def descriptor_set() -> bytes:
    """Return the descriptors of the protocol's files and of the two files of Google below them."""
    from google.protobuf import duration_pb2, timestamp_pb2  # type: ignore[attr-defined,unused-ignore]
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from rocketmq.grpc_protocol import definition_pb2, service_pb2

    made: Any = FileDescriptorSet()
    for module in (duration_pb2, timestamp_pb2, definition_pb2, service_pb2):
        module.DESCRIPTOR.CopyToProto(made.file.add())
    return bytes(made.SerializeToString(deterministic=True))


if __name__ == "__main__":
    FILE.write_bytes(descriptor_set())

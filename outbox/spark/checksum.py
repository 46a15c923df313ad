"""A checksum over messages that is the same in whatever order, and in however many parts, they are added up."""

from __future__ import annotations

import zlib
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

#: A sum is kept below it, and so fits into a signed number of 64 bits.
MODULUS = 2**63
_MASK = 2**60 - 1
#: Odd numbers without a pattern: multiplying by them spreads every bit upwards.
_OF_ID, _OF_BODY, _OF_MESSAGE_ID = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_UUID = 36


def checksum(batch: pa.RecordBatch) -> int:
    """Return the sum, modulo 2**63, of a hash of 60 bits over each row's id, message_id and body.

    Sums of parts add up to that of the whole. It finds accidents (a row that is missing, stands there twice, or has
    another body or id), not a forgery: bodies are told apart by their CRC-32.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    def number(value: int) -> pa.Scalar:
        return pa.scalar(value, pa.uint64())

    ids = batch.column("id").cast(pa.uint64())
    bodies = pa.array(_crcs(batch.column("body")), pa.uint64())
    names = _message_ids(batch.column("message_id"))
    # Unchecked arithmetic of Arrow wraps around at 2**64, as this wants it. A product of sums, so that an id and a
    # body that have changed places with those of another row are noticed.
    left = pc.multiply(pc.add(ids, number(1)), number(_OF_ID))
    right = pc.add(pc.multiply(bodies, number(_OF_BODY)), pc.multiply(names, number(_OF_MESSAGE_ID)))
    mixed = pc.multiply(pc.bit_wise_xor(left, pc.shift_right(left, number(29))), pc.bit_wise_or(right, number(1)))
    hashes = pc.bit_wise_and(pc.bit_wise_xor(mixed, pc.shift_right(mixed, number(32))), number(_MASK))
    return (pc.sum(hashes).as_py() or 0) % MODULUS


def _crcs(column: pa.Array) -> list[int]:
    """The CRC-32 of each value, of a null that of nothing."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.binary_length(column), 0).to_pylist()
    return list(map(zlib.crc32, map(BytesIO(_data(column)).read, lengths)))


def _message_ids(column: pa.Array) -> pa.Array:
    """A number of each id: of its last eight letters, which are random; taken without a look at each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    plain = column.null_count == 0 and pc.all(pc.equal(pc.binary_length(column), _UUID)).as_py() is not False
    if not plain:
        return pa.array(_crcs(column.cast(pa.binary())), pa.uint64())
    words = pa.Array.from_buffers(pa.uint32(), len(column) * 9, [None, pa.py_buffer(_data(column))])
    rows = pa.FixedSizeListArray.from_arrays(words, 9)
    high, low = (pc.list_element(rows, place).cast(pa.uint64()) for place in (7, 8))
    return pc.add(pc.shift_left(high, pa.scalar(32, pa.uint64())), low)


def _data(column: pa.Array) -> memoryview:
    """The bytes of all values of a column, one after the other."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return memoryview(b"")
    places = memoryview(offsets).cast("i")
    return memoryview(data)[places[column.offset] : places[column.offset + len(column)]]

"""A tombstone says that what its key stands for is gone, and nothing becomes a tombstone by mistake."""

from typing import Any

import pytest

from outbox import InvalidMessageError, Message, Outbox, Tombstone
from outbox.model.encoding import TOMBSTONE_TYPE
from outbox.senders.envelopes import ENVELOPES
from tests.support.readers import delivered


@pytest.mark.parametrize("options", [{}, {"dumps": str}], ids=["plain", "with a serializer"])
def test_a_reader_tells_a_tombstone_from_an_empty_body(engine, options):
    outbox = Outbox(engine, **options)

    with outbox.begin() as session:
        outbox.send(session, "customers", Tombstone(), key="ann")
        outbox.send(session, "customers", b"", key="bob")

    found = [(m.key, m.body, m.is_tombstone, m.content_type) for m in delivered(outbox.database)]
    assert found == [("ann", b"", True, TOMBSTONE_TYPE), ("bob", b"", False, None)]


@pytest.mark.parametrize(
    ("body", "fields", "told"),
    [
        (Tombstone(), {}, "^key: must not be None beside a Tombstone"),
        (Tombstone(), {"key": "ann", "content_type": "text/plain"}, "^content_type: must be left out"),
        (None, {"key": "ann"}, "body"),
    ],
    ids=["without a key", "with content", "None"],
)
def test_what_is_no_tombstone_is_refused(body, fields: dict[str, Any], told):
    with pytest.raises(InvalidMessageError, match=told):
        Message("customers", body, **fields)


@pytest.mark.parametrize("name", ["raw", "cloudevents", "debezium"])
def test_an_envelope_leaves_a_tombstone_empty(name):
    sent = ENVELOPES[name](Message("customers", Tombstone(), key="ann"), "gone")

    assert (sent.topic, sent.key, sent.body, sent.is_tombstone) == ("gone", "ann", b"", True)


def test_a_copy_of_a_tombstone_with_another_key_is_one():
    assert Message("customers", Tombstone(), key="ann").replace(key="bob").is_tombstone

"""A line of the log says the name of its subscription once."""

import pytest

from outbox.runtime.text import labelled


@pytest.mark.parametrize(
    ("label", "text", "said"),
    [
        ("relay:a", "relay:a: lease lost", "relay:a: lease lost"),
        ("relay:a", "relay:a waits", "relay:a waits"),
        ("relay:a", "subscription 'relay:a' was dropped", "subscription 'relay:a' was dropped"),
        ("relay:a", "subscription relay:a: lease taken", "subscription relay:a: lease taken"),
        ("relay:a", "the database is away", "relay:a: the database is away"),
        ("relay:a", "relay:ab waits", "relay:a: relay:ab waits"),
        ("db1/shop relay:a", "relay:a: lease lost", "db1/shop relay:a: lease lost"),
        ("db1/shop relay:a", "subscription 'relay:a' was dropped", "db1/shop: subscription 'relay:a' was dropped"),
        ("db1/shop relay:a", "the database is away", "db1/shop relay:a: the database is away"),
        ("db1/shop", "relay:a: lease lost", "db1/shop: relay:a: lease lost"),
    ],
)
def test_a_name_is_said_once(label, text, said):
    assert labelled(label, "relay:a", text) == said

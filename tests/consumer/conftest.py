"""What tests of the inbox share."""

import pytest
from sqlalchemy import Engine

from outbox import Inbox, Message
from tests.support.effects import billing


@pytest.fixture
def inbox(engine: Engine) -> Inbox:
    """The inbox of a consumer whose effects can be counted."""
    return billing(engine)


@pytest.fixture
def message() -> Message:
    """A message that arrives, perhaps twice."""
    return Message("orders", b"1")

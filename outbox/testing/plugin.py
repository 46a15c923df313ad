"""Fixtures for tests of applications that use `outbox`. Pytest finds the plugin in the installed package.

A module is imported only when a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from outbox.model.message import Message
    from outbox.testing.capture import Capture
    from outbox.testing.scripted import ScriptedSender

    Drain = Callable[..., list[Message]]


@pytest.fixture
def outbox_capture() -> Iterator[Capture]:
    """All messages of any outbox during the test, also if the test rolls everything back: see `Capture`."""
    from outbox.testing.capture import Capture

    with Capture() as capture:
        yield capture


@pytest.fixture
def outbox_drain() -> Drain:
    """Deliver now the committed messages of the test: see `outbox.testing.drain`."""
    from outbox.testing.draining import drain

    return drain


@pytest.fixture
def scripted_sender() -> ScriptedSender:
    """A destination with a script of answers, and `Done` otherwise: see `ScriptedSender`."""
    from outbox.testing.scripted import ScriptedSender

    return ScriptedSender()

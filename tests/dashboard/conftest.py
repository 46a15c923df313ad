"""What tests of the dashboard's pages share: a browser for the tests of a file, and an outbox with everything in it."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.conftest import started
from tests.support.browsers import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for the tests of one file: its event loop runs in this thread, which other files need without one."""
    running = chromium()
    found = started(running.__enter__)
    yield found
    running.__exit__(None, None, None)

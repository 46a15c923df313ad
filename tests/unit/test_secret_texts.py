"""Secrets in texts of strangers."""

import pytest

from outbox.runtime.secret import scrubbed


@pytest.mark.parametrize("part", ["a.", "//", "token", "a=", "-file", "//user:password@"])
def test_hostile_text_is_searched_for_secrets_once(part):
    """A search from each of its characters on would hold the process for minutes, not only the thread."""
    text = part * (16 * 1024 // len(part))

    assert scrubbed(f"{text} password=hunter2 nats://me:hunter2@h", ()) == f"{text} password=… nats://…@h"

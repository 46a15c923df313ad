"""Whom a check-back may ask: objects and functions that answer at once, and nothing that only looks like one."""

import pytest

from outbox.rocketmq import TransactionResolution
from outbox.rocketmq.listener import question_of


class AwaitedChecker:
    """The 5.x shape, written with async."""

    async def check(self, message):
        """Commit, to whoever awaits it."""
        return TransactionResolution.COMMIT


class AwaitedQuestion:
    """A callable of this kind."""

    async def __call__(self, message):
        """Commit, to whoever awaits it."""
        return TransactionResolution.COMMIT


@pytest.mark.parametrize("listener", [AwaitedChecker(), AwaitedChecker().check, AwaitedQuestion()])
def test_a_listener_that_would_have_to_be_awaited_is_refused(listener):
    with pytest.raises(TypeError, match="without async"):
        question_of(listener)

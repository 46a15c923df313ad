"""The pause before another try: by a strategy that anybody may write, which may do anything."""

import logging
from datetime import timedelta
from typing import Any

import pytest
from tenacity import RetryCallState, wait_fixed

from outbox import Message, Retry, RetryPolicy
from outbox.model.limits import MAX_DELAY
from outbox.worker.policy import HandlerPolicy
from tests.support.stage import again, messages


def failing(_state: object) -> float:
    """A strategy that raises."""
    raise LookupError("no such attempt")


def exiting(_state: object) -> float:
    """A strategy that would end the thread."""
    raise SystemExit(3)


NO_PAUSES = (None, float("inf"), float("nan"), -1, "5")
WRONG = [failing, exiting, *(lambda _state, pause=pause: pause for pause in NO_PAUSES)]


@pytest.mark.parametrize("wait", WRONG)
def test_a_strategy_without_a_pause_counts_as_the_default_and_is_logged_once(wait: Any, caplog):
    policy = RetryPolicy(wait=wait)

    with caplog.at_level(logging.WARNING, "outbox"):
        pauses = [policy.delay(attempt, ValueError("failed")) for attempt in (1, 2, 3)]

    assert all(timedelta(seconds=1) <= pause <= timedelta(seconds=10) for pause in pauses)
    assert ["the retry strategy" in record.getMessage() for record in caplog.records] == [True]


def test_a_pause_has_a_longest():
    assert RetryPolicy(wait=wait_fixed(1e300)).delay(1, ValueError()) == MAX_DELAY


def test_a_message_is_tried_ten_times_with_pauses_from_one_second_to_ten_minutes():
    policy, (message,) = HandlerPolicy(), messages("a")

    parkings = [policy.failed(again(message, attempt), Retry("no")) for attempt in range(1, 11)]

    assert [parking.state for parking in parkings] == ["retry"] * 9 + ["dead"]
    pauses = [each.delay or timedelta() for each in parkings[:9]]
    assert all(timedelta(seconds=1) <= pause <= timedelta(minutes=10) for pause in pauses)


def by_the_error(state: RetryCallState) -> float:
    """A strategy that looks at the error, as tenacity's `wait_exception` does."""
    error = state.outcome.exception() if state.outcome else None
    return 7 if error is not None and error.args == ("x",) else 1


def test_a_strategy_gets_the_error_of_the_handler():
    policy = HandlerPolicy(retry=RetryPolicy(wait=by_the_error))  # type: ignore[arg-type]
    message = Message("orders", b"")

    said: list[Any] = [LookupError("x"), LookupError("y"), "x", "y"]
    parkings = [policy.failed(message, Retry(each)) for each in said]

    assert [parking.delay for parking in parkings] == [timedelta(seconds=seconds) for seconds in (7, 1, 7, 1)]


def test_a_pause_of_the_verdict_asks_no_strategy():
    verdict = Retry("later", after=timedelta(seconds=3))

    parking = HandlerPolicy(retry=RetryPolicy(wait=failing)).failed(Message("orders", b""), verdict)  # type: ignore[arg-type]

    assert parking.delay == timedelta(seconds=3)

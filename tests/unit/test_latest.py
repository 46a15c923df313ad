"""A costly question is asked once for all who want to know, seldom, and one that hangs holds nobody up."""

import threading
import time

import pytest

from outbox.runtime.latest import Latest

SOON, LATER = 0.05, 60.0


def test_all_who_ask_within_a_second_get_one_answer():
    asked: list[int] = []

    def ask() -> int:
        asked.append(len(asked))
        return asked[-1]

    latest = Latest(ask)
    answers = [latest.get(time.monotonic() + LATER) for _ in range(10)]

    assert (answers, asked) == ([0] * 10, [0])


def test_a_question_that_hangs_is_not_asked_a_second_time_and_its_late_answer_counts():
    asked, end = list[int](), threading.Event()

    def ask() -> str:
        asked.append(1)
        end.wait(60)
        return "late"

    latest = Latest(ask)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no answer in time"):
            latest.get(time.monotonic() + SOON)
    end.set()

    assert (latest.get(time.monotonic() + LATER), asked) == ("late", [1])


def test_the_error_of_a_question_is_its_answer():
    def ask() -> None:
        raise KeyError("odd")

    with pytest.raises(KeyError, match="odd"):
        Latest(ask).get(time.monotonic() + LATER)

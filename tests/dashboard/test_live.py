"""Live pages ask their database once for all viewers, and say when there is no answer."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox.dashboard.live import Live, stream
from tests.support.waiting import eventually

#: The next question comes at once.
QUICKLY = timedelta(0)
#: Nothing waits for so long in a test.
NEVER = timedelta(minutes=10)


class Questions:
    """Answers with 1, 2, 3 …, as soon as it may; and counts who asks at a time."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.asking = self.most = self.asked = 0

    def __call__(self) -> int:
        """Answer, or raise."""
        self.asking += 1
        self.most = max(self.most, self.asking)
        try:
            assert self.may_answer.wait(60)
            if self.error is not None:
                raise self.error
            self.asked += 1
            return self.asked
        finally:
            self.asking -= 1


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "outbox-dashboard"]


async def read(events: AsyncIterator[str], number: int) -> list[tuple[str, dict[str, Any]]]:
    """The next events of a stream, as a browser reads them."""
    found = list[tuple[str, dict[str, Any]]]()
    async for each in events:
        lines = dict(line.split(": ", 1) for line in each.strip().splitlines())
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
        if len(found) == number:
            break
    return found


def test_many_viewers_have_one_loop_of_questions_and_each_sees_the_newest_answers():
    ask = Questions()
    live = Live(ask, every=QUICKLY)

    async def viewer() -> list[int | None]:
        async with aclosing(live.answers()) as answers:
            return [(await anext(answers)).value for _ in range(3)]

    async def view() -> tuple[list[list[int | None]], int]:
        found = await asyncio.gather(*(viewer() for _ in range(20)))
        return found, ask.most

    found, most = asyncio.run(view())

    assert all(numbers == sorted(each for each in numbers if each) for numbers in found)
    assert most == 1
    assert eventually(lambda: (live.viewers, threads()) == (0, []))


def test_nothing_is_asked_without_a_viewer():
    ask = Questions()
    live = Live(ask, every=NEVER)

    async def view() -> int | None:
        async with aclosing(live.answers()) as answers:
            return (await anext(answers)).value

    assert (ask.asked, threads()) == (0, [])
    assert [asyncio.run(view()) for _ in range(2)] == [1, 2]
    assert eventually(lambda: threads() == [])
    assert (ask.asked, live.asked) == (2, 2)


def test_a_viewer_that_comes_later_sees_the_last_answer_at_once():
    live = Live(Questions(), every=NEVER)

    async def view() -> list[int | None]:
        async with aclosing(live.answers()) as one, aclosing(live.answers()) as other:
            return [(await anext(each)).value for each in (one, other)]

    assert asyncio.run(view()) == [1, 1]


def test_a_question_without_an_answer_is_not_asked_twice_and_viewers_know_since_when():
    ask = Questions()
    live = Live(ask, every=timedelta(milliseconds=20), deadline=QUICKLY)

    async def view() -> tuple[list[datetime | None], int | None]:
        async with aclosing(live.answers()) as answers:
            first = await anext(answers)
            while first.value is None:  # the first answer may take longer than no time
                first = await anext(answers)
            ask.may_answer.clear()
            silent = [each async for each in answers_without_value(answers, 2)]
            ask.may_answer.set()
            while (again := await anext(answers)).value is None:
                pass
            return silent, again.value

    silent, again = asyncio.run(view())

    assert ask.most == 1
    assert again is not None
    assert all(at is not None and at <= datetime.now(UTC) for at in silent)
    assert len(set(silent)) == 1


async def answers_without_value(answers, number: int) -> AsyncIterator[datetime | None]:
    """The moments of the last answer that viewers are told while there is none; answers on their way are left out."""
    last, count = object(), 0
    async for each in answers:
        if each.value is None:
            count = count + 1 if each.at == last else 1
            last = each.at
            if count == number:
                for _ in range(number):
                    yield each.at
                return


def test_a_stream_sends_what_has_changed_and_says_when_the_database_is_away():
    ask = Questions()
    live = Live(ask, every=timedelta(milliseconds=10))

    def render(number: int) -> dict[str, str]:
        return {"number": f"<p>{number}</p>", "head": "<p>\u202e\n</p>"}

    async def view() -> list[tuple[str, dict[str, Any]]]:
        async with aclosing(stream(live, render)) as events:
            found = await read(events, 2)
            ask.error = OSError("the database is away")
            while found[-1][0] == "answer":
                found += await read(events, 1)
            ask.error = None
            while found[-1][0] == "silent":
                found += await read(events, 1)
            return found

    found = asyncio.run(view())

    assert [list(each["sections"]) for name, each in found[:2]] == [["number", "head"], ["number"]]
    assert found[0][1]["sections"]["head"] == "<p>\u202e\n</p>"
    silent = [each for name, each in found if name == "silent"]
    assert {tuple(each) for each in silent} == {("at",)}
    assert silent[0]["at"] == [each for name, each in found if name == "answer"][-2]["at"]


def test_a_stream_ends_so_that_the_right_to_see_it_is_asked_again():
    live = Live(Questions(), every=NEVER)

    async def view() -> list[str]:
        return [name for name, _ in await read(stream(live, lambda _: {}, lasting=timedelta(0)), 10)]

    assert asyncio.run(view()) == ["answer", "again"]
    assert live.viewers == 0


def test_a_viewer_whose_loop_was_closed_does_not_stop_the_others():
    ask = Questions()
    live = Live(ask, every=QUICKLY)
    gone = asyncio.new_event_loop()
    answers = live.answers()
    gone.run_until_complete(anext(answers))
    gone.close()

    async def view() -> list[int | None]:
        async with aclosing(live.answers()) as others:
            return [(await anext(others)).value for _ in range(3)]

    found = asyncio.run(view())

    assert len(found) == 3
    asyncio.run(answers.aclose())
    assert eventually(lambda: threads() == [])

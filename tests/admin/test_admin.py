"""The Python API of an operator: the facts that the command line prints, frozen, blocking and awaited."""

import asyncio
from dataclasses import FrozenInstanceError

import pytest

from outbox import Admin, Outbox, Reject, Relay, Retry, SubscriptionError, Thresholds
from tests.support.command_line import leading_to
from tests.support.command_line import outbox as run


class Destination:
    """Answers with the body of a message: the error of a dead letter."""

    destination = "nats://h:4222"

    def send(self, messages):
        """Accept the topic `fine` alone."""
        return [Retry("not now") if message.topic == "fine" else Reject(message.body.decode()) for message in messages]

    def close(self):
        """Nothing is open."""


def rejected(engine, *errors: str) -> Admin:
    """An outbox with a dead letter for each error."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for error in errors:
            outbox.send(session, "bad", error)
    Relay(outbox, Destination()).until_empty()
    return outbox.admin


def test_the_awaited_forms_return_what_the_blocking_forms_return(engine):
    admin = rejected(engine, "too long")

    async def awaited():
        return await admin.adiagnosis(Thresholds(max_dead=1)), await admin.astatuses("relay")

    findings, statuses = asyncio.run(awaited())

    assert (findings, [each.parked for each in statuses]) == ((), [each.parked for each in admin.statuses()])


def test_the_results_are_frozen(engine):
    (status,) = rejected(engine, "too long").statuses()

    with pytest.raises(FrozenInstanceError):
        status.name = "other"  # type: ignore[misc]  # the point


def test_the_command_line_prints_the_same(engine):
    look = rejected(engine, "too long").look()

    printed = run(engine, "status", "--json").json

    assert set(printed) == {"version", "more", *look.document()}
    (finding,), (found,) = printed["findings"], look.findings
    assert (finding["kind"], finding["what"]) == (found.kind, found.what)
    # The command was given its database by the environment.
    assert f"{finding['next_command']} {leading_to(engine)}" == found.next_command
    assert found.since is not None and finding["since"] == found.since.isoformat()


def test_a_name_that_is_not_there_is_an_error(engine):
    with pytest.raises(SubscriptionError, match="nope"):
        Outbox(engine).admin.statuses("nope")


@pytest.mark.parametrize(
    ("errors", "evidence", "advice"),
    [
        (["too long"], "too long", "to decide, run"),
        (
            ["no stream 1", "no stream 2", *["no stream 3"] * 8, "too long"],
            "91 % have no stream 3; 9 % have too long",
            "do not replay yet, mend the common cause first; to look, run",
        ),
        (
            [*["too long"] * 7, *["no stream"] * 3],
            "70 % have too long; 30 % have no stream",
            "to decide, run",
        ),
    ],
    ids=["one letter", "a common cause", "two causes"],
)
def test_dead_letters_are_grouped_by_their_error(engine, errors, evidence, advice):
    """Errors that differ in numbers alone are one error."""
    (found,) = [each for each in rejected(engine, *errors).diagnosis() if each.kind == "dead"]

    assert (found.evidence, found.advice) == (evidence, advice)


def test_an_engine_is_refused_with_the_way_to_the_admin(sqlite_engine):
    with pytest.raises(TypeError, match=r"where must be the database of an outbox, not Engine; use Outbox\(…\)\.admin"):
        Admin(sqlite_engine)

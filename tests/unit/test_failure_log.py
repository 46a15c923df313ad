"""What the log says of outages and of dead letters: each thing once in a while, and never a line for each message."""

from collections.abc import Iterable

import pytest

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.telemetry.events import Listeners, Teller, UpkeepRefused
from outbox.telemetry.failure_log import FailureLog, Words
from outbox.worker.notice import Notice
from outbox.worker.outages import Outages
from outbox.worker.policy import BEHIND
from tests.support.stage import DESTINATION, NO_DATABASE, POLICY, messages


class Told:
    """A subscription whose events are listened to by a log, and by a notice that is kept instead of being stored."""

    def __init__(
        self,
        clock: list[float],
        destination: str = DESTINATION,
        subscription: str = "relay",
        words: Words | None = None,
    ) -> None:
        self.notes: list[tuple[str, float]] = []
        database, words = NO_DATABASE, words or Words(subscription, destination)
        self.notice = Notice(database, subscription, words)
        self.notice.write = lambda text, since=0.0: self.notes.append((text, since))  # type: ignore[method-assign]
        listeners = Listeners()
        listeners.listen(FailureLog(subscription, words, clock=lambda: clock[-1]).told)
        listeners.listen(self.notice.told)
        self.teller = Teller(listeners, {"database": database, "subscription": subscription})
        self.outages = Outages(self.teller, destination, clock=lambda: clock[-1])

    def accepted(self, *topics: str) -> None:
        """Messages of these topics are accepted again."""
        self.outages.accepted(topics)

    def settled(self, parkings: Iterable[tuple[Message, Parking]]) -> None:
        """What was parked is stored."""
        self.teller.of_partition(0).tell_settled([], list(parkings), 0.0)


@pytest.fixture
def clock() -> list[float]:
    """A clock that a test sets, in seconds."""
    return [100.0]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the log."""
    return [record.message for record in caplog.records]


def test_a_topic_that_is_not_accepted_is_told_once_in_a_while(caplog, clock):
    """Of many a few are named, and the number of the others."""
    told = Told(clock)

    for moment in (100.0, 130.0, 161.0):
        clock.append(moment)
        told.outages.refused({"orders": "no\x1b[2J\nstream"})
    told.outages.refused({f"t{n}": f"no {n}" for n in range(7)})

    refused = "relay: nats://h:4222 does not accept topic"
    assert said(caplog) == [
        f"{refused} orders, its messages wait: no\ufffd[2J stream",
        f"{refused} orders, its messages wait (since 1 min): no\ufffd[2J stream",
        *[f"{refused} t{n}, its messages wait: no {n}" for n in range(5)],
        "relay: nor does it accept 2 more topics",
    ]


def test_a_server_that_is_away_is_told_as_such_and_so_is_the_end_of_it(caplog, clock):
    """One that is accepted again while the server was not reported as away is told by its topic."""
    told = Told(clock, "nats://h:4222/shop")
    away = "NATS: nats://h:4222: connection refused"

    told.outages.refused({"orders": away}, by_all=away)
    told.settled((message, POLICY.waiting(message, away)) for message in messages(None, None))
    clock.append(110.0)
    told.outages.refused({"mail": away}, by_all=away)
    told.settled((message, BEHIND) for message in messages(None, first=2, topic="mail") + messages("k", first=3))
    clock.append(152.0)
    told.accepted("mail")

    assert said(caplog) == [
        "relay: nats://h:4222/shop accepts nothing, messages wait: NATS: connection refused",
        "relay: nats://h:4222/shop accepts messages again after 52 s; 3 messages had waited",
    ]
    assert not told.outages


def test_a_topic_is_accepted_again_when_a_message_of_it_is(caplog, clock):
    told = Told(clock)
    told.outages.refused({"orders": "no stream"})
    waiting = messages(None) + messages(None, first=2, topic="mail")
    told.settled((message, POLICY.waiting(message, "no stream")) for message in waiting)
    told.accepted("mail")
    assert told.outages

    clock.append(280.0)
    told.accepted("orders", "mail")

    again = "relay: nats://h:4222 accepts topic orders again after 3 min; 1 message had waited"
    assert said(caplog)[-1] == again


def test_a_topic_that_is_refused_by_a_server_that_is_back_is_another_outage(caplog, clock):
    """Of the first one no end is told: the server accepts something, and the topic still nothing."""
    told = Told(clock)
    told.outages.refused({"orders": "gone"}, by_all="gone")
    clock.append(110.0)
    told.outages.refused({"orders": "no stream"})
    clock.append(130.0)
    told.accepted("orders")

    assert said(caplog) == [
        "relay: nats://h:4222 accepts nothing, messages wait: gone",
        "relay: nats://h:4222 does not accept topic orders, its messages wait: no stream",
        "relay: nats://h:4222 accepts topic orders again after 20 s",
    ]


def test_a_destination_that_flaps_fills_no_log(caplog, clock):
    told = Told(clock)

    for second in range(50):
        clock.append(100.0 + second)
        told.outages.refused({"orders": "away"}, by_all="away")
        told.accepted("orders")

    assert len(said(caplog)) == 2


def test_a_paused_worker_notes_it_once_after_a_second(clock):
    told = Told(clock)
    told.outages.refused({"orders": "no stream"})

    for moment in (100.5, 101.0, 105.0):
        clock.append(moment)
        told.outages.refused({}, pauses=True)
    told.notice.withdraw(NO_DATABASE)
    told.outages.refused({"orders": "no stream"})
    told.outages.refused({"orders": "no stream"}, pauses=True)

    text = "waits for nats://h:4222 to accept topic orders: no stream"
    assert told.notes == [(text, 1.0), (text, 5.0)]


def test_a_check_back_speaks_of_half_messages_of_its_group(caplog, clock):
    """All of them have one topic, which says nothing to those who read the log."""
    topic = "RMQ_SYS_TRANS_HALF_TOPIC"
    told = Told(clock, "check:shop", "check:shop", Words("check:shop", "check:shop", "shop"))
    told.outages.refused({topic: "no answer in 20 s"})
    clock.append(165.0)
    told.outages.refused({topic: "no answer in 20 s"}, pauses=True)
    told.accepted(topic)
    told.settled((message, POLICY.dead(message, "UNKNOWN")) for message in messages("tx-1", "tx-2", "tx-1"))

    halves, decide = "half messages of producer group shop", "to decide, run: outbox half list --given-up --group shop"
    assert told.notes == [(f"waits for an answer about {halves}: no answer in 20 s", 65.0)]
    assert said(caplog) == [
        f"check:shop: nothing is found out about {halves}, they wait: no answer in 20 s",
        f"check:shop: nothing is found out about {halves}, they wait (since 1.1 min): no answer in 20 s",
        f"check:shop: {halves} are decided on again after 1.1 min",
        f"check:shop: 2 more transactions were given up, the first is tx-1: UNKNOWN; {decide}",
    ]


def test_dead_letters_are_told_a_line_for_all_of_a_settle(caplog, clock):
    told = Told(clock)
    parkings = [(message, POLICY.dead(message, f"bad {message.id}")) for message in messages("b", "a", first=7)]

    told.settled([*reversed(parkings), (messages("c")[0], BEHIND)])
    told.settled(parkings[:1])

    first = (
        "the first is message 7 of topic orders: bad 7; to decide, run: outbox parked list --name relay --state dead"
    )
    assert said(caplog) == [
        f"relay: 2 more dead letters, {first}",
        f"relay: 1 more dead letter, {first}",
    ]


def test_a_dead_letter_whose_id_is_none_is_told_without_it(caplog, clock):
    """Another writer may have given it anything, where a database has no type for ids."""
    (letter,) = messages(None)
    letter._message_id = "no id"
    Told(clock).settled([(letter, POLICY.dead(letter, "broken"))])

    (record,) = caplog.records
    about = record.outbox
    assert (about["event"], about["topic"], "message_id" in about) == ("dead_letters", "orders", False)


def test_upkeep_that_is_refused_is_told_once_for_each(caplog, clock):
    told = Told(clock)

    for what in ("old progress", "old progress", "expired rows"):
        told.teller.of_partition(0).tell(UpkeepRefused, what=what, error="permission denied")

    assert said(caplog) == [
        "relay: cannot delete old progress, going on: permission denied",
        "relay: cannot delete expired rows, going on: permission denied",
    ]

"""Whoever asks what is wrong gets one answer: Python, the command line, HTTP, metrics and the exit code."""

import json
import re
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any
from urllib.request import urlopen

import pytest
from sqlalchemy import Engine

from outbox import Done, Outbox, Reject, Relay, SubscriptionError, Unavailable
from outbox.admin.gauges import Looks
from outbox.cli.http import serving
from outbox.model.lease import Partition
from outbox.model.subscription import Declaration
from outbox.relay.supervisor import Supervisor
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.notices import RefusalNotice
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.telemetry.events import DestinationAway, Event
from tests.support.command_line import outbox as run
from tests.support.leases import step_clock

ANSWERS = {
    "down": Unavailable("connection refused", everything=True),
    "missing": Unavailable("no stream takes subject 'missing'"),
    "poison": Reject("too long"),
}
#: By subscription, which has the name of its topic.
EXPECTED = {
    ("down", "waiting"): "1 message waits for nats://down:4222",
    ("missing", "waiting"): "1 message waits for nats://missing:4222",
    ("poison", "dead"): "1 dead letter",
    ("slow", "behind"): "1 message waits for nats://slow:4222",
    ("dead", "not_run"): "no worker runs",
    ("refused", "refused"): "a worker cannot begin",
}
#: Whose begin is stored; the begin of the others is reckoned from now.
STORED = ("waiting", "dead", "refused")


class Destination:
    """Answers after its name."""

    def __init__(self, name: str) -> None:
        self.destination = f"nats://{name}:4222"
        self._answer = ANSWERS.get(name, Done())

    def send(self, messages):
        """The same answer to all."""
        return [self._answer] * len(messages)

    def close(self):
        """Nothing is open."""


def work(outbox: Outbox, name: str) -> None:
    Relay(outbox, Destination(name), name=name, topics=[name]).until_empty()


def take_lease(outbox: Outbox, *names: str) -> None:
    """As a worker that goes on."""
    with closing(outbox.database.open()) as channel:
        for name in names:
            assert Leases(channel).acquire(Partition(name), "host:1:worker", timedelta(minutes=5))


def refuse(outbox: Outbox, name: str) -> None:
    """As a worker with another destination."""
    other = Declaration(name=name, destination="nats://other:4222", topics=(name,))
    with closing(outbox.database.open()) as channel:
        notice = RefusalNotice(name)
        with pytest.raises(SubscriptionError), notice.noted(channel, "host:2:worker"):
            Subscriptions(channel).check(other)


def fall_ill(outbox: Outbox) -> None:
    """One destination is down for a minute, one slow for ten; a topic is missing, a message poison; relays are dead or
    refused.
    """
    engine = outbox.engine
    take_lease(outbox, "dead")
    step_clock(engine, timedelta(minutes=7))
    with outbox.begin() as session:
        for name in ("slow", *ANSWERS):
            outbox.send(session, name, b"1")
    step_clock(engine, timedelta(minutes=10), "outbox_message.created_at")
    for name in ANSWERS:
        work(outbox, name)
    take_lease(outbox, "slow", "refused", *ANSWERS)
    step_clock(engine, timedelta(minutes=1), "outbox_parked.parked_at")
    refuse(outbox, "refused")


def bare(command: str | None) -> str | None:
    """A command without the database, which a library names and the command line knows by its environment."""
    return None if command is None else command.partition(" --database ")[0]


def of_json(document: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {
        (each["subscription"], each["kind"]): (
            each["what"],
            datetime.fromisoformat(each["since"]) if each["kind"] in STORED else None,
            bare(each["next_command"]),
        )
        for each in document["findings"]
    }


def gauge(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by its labels, without the label of the database."""
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, flags=re.MULTILINE)
    return {tuple(re.findall(r'(?<!database)="([^"]*)"', labels)): float(value) for labels, value in found}


@pytest.mark.storm
def test_all_of_them_say_the_same(engine: Engine):
    outbox = Outbox(engine)
    outbox.admin.drop("relay")
    up: list[float] = []

    def see_outage(event: Event) -> None:
        if isinstance(event, DestinationAway) and event.subscription == "down":
            scraped = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
            up.append(gauge(scraped, "outbox_destination_up")[("nats://down:4222", "down")])

    with serving("127.0.0.1", 0, Supervisor([]), Looks({"shop": outbox.admin.look})) as port:
        for name in ("down", "missing", "poison", "slow", "dead", "refused"):
            work(outbox, name)
        assert (outbox.admin.diagnosis(), run(engine, "status", "--check").code) == ((), 0)

        # While the relay has the lease; after that, others know better.
        outbox.listeners.listen(see_outage)
        fall_ill(outbox)

    # Looks of its own, because the last scrape of the outage may count for a second or more.
    with serving("127.0.0.1", 0, Supervisor([]), Looks({"shop": outbox.admin.look})) as port:
        by_http = json.loads(urlopen(f"http://127.0.0.1:{port}/status", timeout=60).read())
        metrics = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    found = outbox.admin.diagnosis()
    printed, checked = run(engine, "status", "--json"), run(engine, "status", "--check")
    by_python = {
        (each.subscription, each.kind): (
            each.what,
            each.since if each.kind in STORED else None,
            bare(each.next_command),
        )
        for each in found
    }

    assert {about: what for about, (what, _, _) in by_python.items()} == EXPECTED
    assert of_json(printed.json) == of_json(by_http) == by_python
    assert all(each.what in checked.err and str(each.subscription) in checked.err for each in found)
    assert (printed.code, checked.code) == (0, 1)
    assert gauge(metrics, "outbox_findings") == {(kind, name): 1 for name, kind in EXPECTED}
    assert {name for (name,), number in gauge(metrics, "outbox_dead").items() if number} == {"poison"}
    waiting = {labels for labels, number in gauge(metrics, "outbox_unsent_messages").items() if number}
    assert waiting == {("waiting", "down"), ("waiting", "missing"), ("log", "slow")}
    assert gauge(metrics, "outbox_unsent_age_seconds")[("slow",)] >= 600
    assert set(up) == {0}

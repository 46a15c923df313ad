"""The gauges of metrics are the numbers of a look, and a database that does not answer has none."""

import threading

from outbox import Outbox, Reject, Relay, Retry
from outbox.admin.gauges import Looks
from outbox.telemetry.metrics import OF_STATE


def unreachable():
    raise ConnectionError("refused")


def test_they_say_what_a_look_says(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for topic in ("bad", "bad", "again"):
            outbox.send(session, topic, b"1")
    Relay(outbox, lambda message: Reject("never") if message.topic == "bad" else Retry("later")).until_empty()
    with outbox.begin() as session:
        outbox.send(session, "new", b"1")

    samples = list(Looks({"shop": outbox.admin.look, "away": unreachable}).samples())

    look = outbox.admin.look()
    found: dict[tuple[str, ...], float] = {(each.metric.name, *each.labels): each.value for each in samples}
    relay = ("shop", "relay")
    assert look.log is not None
    numbers: dict[tuple[str, ...], float] = {
        ("outbox.dead", *relay): 2,
        ("outbox.unsent.messages", *relay, "log"): 1,
        ("outbox.unsent.messages", *relay, "delayed"): 0,
        ("outbox.unsent.messages", *relay, "waiting"): 0,
        ("outbox.unsent.messages", *relay, "retry"): 1,
        ("outbox.unsent.messages", *relay, "behind"): 0,
        ("outbox.unsent.messages", *relay, "inflight"): 0,
        ("outbox.log.rows", "shop"): 4,
        ("outbox.log.bytes", "shop"): look.log.bytes,
        **{("outbox.findings", *relay, each.kind): 1 for each in look.findings},
    }
    assert {name: value for name, value in found.items() if not name[0].endswith("age")} == numbers
    assert {name[0] for name in found if name[0].endswith("age")} == {"outbox.unsent.age", "outbox.log.oldest.age"}
    assert {each.metric for each in samples} < set(OF_STATE)


def test_a_database_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr("outbox.admin.gauges._SECONDS", 0.01)
    over = threading.Event()
    looks = Looks({"shop": over.wait})  # type: ignore[dict-item]  # never a look
    found = {label: str(each) for label, each in looks.all().items()}
    over.set()

    assert found == {"shop": "shop has not answered within 0.01 s"}

"""What the page about consumers says is so: its code runs, and its consumers handle what is there."""

from sqlalchemy import text

from outbox import migrate
from tests.support.consumers import parked
from tests.support.pages import TOP, run

PAGE = (TOP / "docs" / "consumers.md").read_text()


def test_the_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = run(PAGE, "docs/consumers.md")
    outbox = page["outbox"]
    migrate.upgrade(outbox.engine)
    with outbox.engine.begin() as connection:
        connection.execute(text("CREATE TABLE account AS SELECT 0 AS total"))
    page["cache"].until_empty()
    with outbox.begin() as session:
        outbox.send(session, "orders", {"id": 1, "total": 42}, key="order-1")
        outbox.send(session, "orders", {"id": 2, "total": 4_200}, key="order-2")
        outbox.send(session, "prices", {"price": 3}, key="apple")
        outbox.send(session, "payments.late", "")

    for name in ("billing", "audit", "ledger", "cache"):
        page[name].until_empty()

    with outbox.engine.connect() as connection:
        total = connection.scalar(text("SELECT total FROM account"))
        booked = connection.scalar(text("SELECT count(*) FROM outbox_message WHERE topic = 'booked'"))
    assert capsys.readouterr().out.splitlines() == ["billed 1", "no longer valid: apple"]
    assert (total, booked) == (2, 2)
    assert {name: parked(outbox, name) for name in ("billing", "audit", "ledger", "cache@web-1")} == {
        "billing": [("retry", 1, "the bank is asked again")],
        "audit": [("retry", 1, "empty")],
        "ledger": [],
        "cache@web-1": [],
    }


def test_the_retries_and_the_deadline_are_those_of_the_library():
    from outbox.consumer.options import RETRIES, Options

    assert (RETRIES.attempts, Options().deadline.total_seconds()) == (17, 30)

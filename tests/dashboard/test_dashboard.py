"""The dashboard on SQLite and PostgreSQL: a person without a shell finds a dead letter, and decides."""

import pytest

from outbox import Outbox, Relay, dashboard
from tests.support.command_line import outbox as run
from tests.support.dashboards import form, form_of, headline, read, send, visitor
from tests.support.furnished import Poison
from tests.support.guests import owner_and_guest


@pytest.fixture
def poison() -> Poison:
    """The destination."""
    return Poison()


@pytest.fixture
def dead(engine, poison) -> Outbox:
    """An outbox with two dead letters."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for number in (1, 2):
            outbox.send(session, "orders", f"body {number}".encode(), key=f"order-{number}", headers={"token": "t0p"})
    Relay(outbox, poison).until_empty()
    return outbox


@pytest.mark.every_database
def test_from_a_dead_letter_to_replay_and_delivered_by_a_user_who_may_not_discard(dead, poison):
    browser = visitor(dead, {"see", "replay"}, user="ines")
    poison.mended = True

    overview = browser.get("/")
    assert ("2 dead letters" in read(overview.text).text, headline(overview)) == (True, "Overview")
    first = form(browser, "/m/1", "Replay")
    asked = send(browser, first)
    assert headline(asked) == "Replay 1 message?"
    done = send(browser, form_of(asked, "Replay"), reason="mended")
    Relay(dead, poison).until_empty()

    assert (headline(done), poison.bodies) == ("Decided", [b"body 1"])
    refused = send(browser, first, verb="discard")
    assert (refused.status_code, "ines has not the right discard" in refused.text) == (403, True)
    decided = [(each.by, each.verb, each.reason, each.count) for each in dead.admin.decisions()]
    assert decided == [("ines", "replay", "mended", 1)]


def test_a_dashboard_without_access_says_how_to_give_it(dead):
    with pytest.raises(ValueError, match=r"access is missing: pass a function .* access=outbox\.dashboard\.LOCAL"):
        dashboard.app(dead)


def test_a_role_of_the_database_that_only_looks_opens_every_page_and_decides_nothing(pg_engine, poison):
    owner = Outbox(pg_engine)
    with owner.begin() as session:
        owner.send(session, "orders", b"1", key="order-1")
    Relay(owner, poison).until_empty()
    with owner_and_guest(pg_engine) as (_, guest):
        grants = run(None, "db", "grants", "--dashboard", str(guest.url.username)).out
        with pg_engine.begin() as connection:
            connection.exec_driver_sql(grants)
        browser = visitor(Outbox(guest))
        pages = ("/", "/s/relay", "/parked", "/m/1", "/k/order-1", "/half", "/workers", "/decisions", "/doctor")
        statuses = {path: browser.get(path).status_code for path in pages}
        asked = send(browser, form(browser, "/m/1", "Replay"))
        refused = [
            send(browser, form_of(asked, "Replay"), reason="x"),
            send(browser, form(browser, "/m/1", "Show the body")),
        ]

    assert statuses == dict.fromkeys(pages, 200)
    assert [(each.status_code, headline(each)) for each in refused] == [(503, "The database refused")] * 2
    assert ["outbox db grants" in each.text for each in refused] == [True, True]
    assert (owner.admin.decisions(), owner.admin.parked_count().states["dead"]) == ((), 1)

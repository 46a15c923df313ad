"""Decisions: rehearsed with their number, asked again when the number has changed, and carried out by the user."""

import re

import pytest

from outbox import Outbox, Relay
from outbox.dashboard.tokens import Tokens
from tests.rocketmq.halves import begun
from tests.support.dashboards import Refusing, form, form_of, headline, read, send, visitor

SECRET = "0123456789abcdef"


@pytest.fixture
def outbox(sqlite_engine) -> Outbox:
    """An outbox with 120 dead letters of orders, one a key but for the last, and 3 of mail."""
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        for number in range(120):
            outbox.send(session, "orders", b"1", key=f"order-{number}")
        for _ in range(3):
            outbox.send(session, "mail", b"1")
        outbox.send(session, "orders", b"1", key="order-119")
    die(outbox)
    return outbox


def error_of(message):
    """An error that differs in a number, and by topic."""
    return f"HTTP 42{len(message.topic)} of order {message.id}: 100% {message.topic}"


def die(outbox):
    """Have what is unread become dead letters."""
    Relay(outbox, Refusing(error_of)).until_empty()


def kept(outbox):
    """Return person, verb, reason and count of each decision, the newest first."""
    return [(each.by, each.verb, each.reason, each.count) for each in outbox.admin.decisions()]


def test_above_a_hundred_the_number_is_typed_and_a_discard_has_a_reason(outbox):
    browser = visitor(outbox)
    asked = send(browser, form(browser, "/parked?state=dead&topic=orders", "Discard all"))

    assert (headline(asked), "1 message goes on behind them." in asked.text) == ("Discard 120 messages?", True)
    confirm = form_of(asked, "Discard")
    for reason, text in (("", "A discard needs a reason"), ("x", "Type the number of messages, 120")):
        asked = send(browser, confirm, reason=reason)
        assert (asked.status_code, text in asked.text) == (409, True)
    assert kept(outbox) == []
    done = send(browser, confirm, reason="duplicates", typed="120")
    assert (headline(done), kept(outbox)) == ("Decided", [("eve", "discard", "duplicates", 120)])


def test_a_group_of_errors_that_differ_in_numbers_is_decided_on_as_one(outbox):
    browser = visitor(outbox)
    page = browser.get("/s/relay")
    groups = [each for each in read(page.text).forms if each.button.strip() == "Replay these"]

    asked = [headline(send(browser, each)) for each in map(placed, groups)]

    assert asked == ["Replay 120 messages?", "Replay 3 messages?"]
    assert "98 %" in page.text
    assert re.search(r"HTTP 426 of order \d+: 100% orders", page.text)


def placed(form):
    """The form of a page below `/s/`."""
    form.action = form.action.replace("../", "/")
    return form


def test_a_number_that_has_changed_meanwhile_is_asked_again(outbox):
    browser = visitor(outbox)
    asked = send(browser, form(browser, "/parked?topic=mail", "Replay all"))
    with outbox.begin() as session:
        outbox.send(session, "mail", b"1")
    die(outbox)

    again = send(browser, form_of(asked, "Replay"))

    assert (again.status_code, headline(again)) == (409, "Replay 4 messages?")
    assert "changed meanwhile" in again.text
    assert kept(outbox) == []
    assert headline(send(browser, form_of(again, "Replay"))) == "Decided"
    assert kept(outbox) == [("eve", "replay", None, 4)]


def test_what_somebody_else_has_decided_first_is_told(outbox):
    browser = visitor(outbox)
    one = form(browser, "/m/121", "Discard")
    asked, group = send(browser, one), form(browser, "/parked?topic=mail", "Replay all")
    outbox.admin.discard(all=True, topic="mail", reason="mine", by="ben")

    answers = [send(browser, form_of(asked, "Discard"), reason="x"), send(browser, one), send(browser, group)]

    assert [(each.status_code, headline(each)) for each in answers] == [
        (409, "Not as you saw it"),
        (409, "Not as you saw it"),
        (409, "Nothing is left to decide"),
    ]
    assert kept(outbox) == [("ben", "discard", "mine", 3)]
    assert "discard by ben" in browser.get("/m/121").text


def test_selected_messages_of_a_page_are_decided_on(outbox):
    browser = visitor(outbox)
    page = browser.get("/parked?topic=mail")
    ids = re.findall(r'name="id" value="([^"]+)"', page.text)
    token = form_of(page, "selected").fields["token"][0]

    asked = browser.post("/decide", data={"token": token, "verb": "replay", "id": ids[:2], "back": "parked?topic=mail"})
    done = send(browser, form_of(asked, "Replay"))

    assert (headline(asked), headline(done)) == ("Replay 2 messages?", "Decided")
    assert 'href="./parked?topic=mail"' in done.text
    none = browser.post("/decide", data={"token": token, "verb": "replay"})
    many = browser.post("/decide", data={"token": token, "verb": "replay", "id": ids[:1] * 51})
    assert [each.status_code for each in (none, many)] == [400, 400]


def test_pauses_of_a_subscription_and_of_a_key_begin_change_and_end(outbox):
    browser = visitor(outbox)

    def decided(path, button, word, **more):
        asked = send(browser, form(browser, path, button), **more)
        return headline(asked), headline(send(browser, form_of(asked, word), reason="calm"))

    def pauses():
        return [(each.by, each.reason, each.key, each.rate) for each in outbox.admin.statuses("relay")[0].pauses]

    assert decided("/s/relay", "Slow down", "Pause", rate="5") == ("Pause?", "Decided")
    assert pauses() == [("eve", "calm", None, 5.0)]
    assert decided("/s/relay", "Resume", "Resume") == ("Resume?", "Decided")
    assert decided("/k?key=order-119", "Pause the key", "Pause") == ("Pause?", "Decided")
    assert decided("/s/relay", "Pause", "Pause") == ("Pause?", "Decided")
    assert pauses() == [("eve", "calm", "order-119", None), ("eve", "calm", None, None)]
    assert decided("/k?key=order-119", "Resume the key", "Resume") == ("Resume?", "Decided")
    assert pauses() == [("eve", "calm", None, None)]
    wrong = send(browser, form(browser, "/s/relay", "Resume"), verb="pause", rate="nan")
    assert wrong.status_code in (400, 409)


def test_a_pause_that_somebody_else_has_ended_is_asked_again(outbox):
    browser = visitor(outbox)
    outbox.admin.pause("relay", by="ben")
    asked = send(browser, form(browser, "/s/relay", "Resume"))
    outbox.admin.resume("relay", by="ben")

    again = send(browser, form_of(asked, "Resume"))

    assert (again.status_code, "changed meanwhile" in again.text) == (409, True)


def test_a_verdict_on_a_transaction_is_given_in_two_steps(sqlite_engine):
    id, outbox = begun(sqlite_engine, "orders", "mail", group="shop").id, Outbox(sqlite_engine)
    browser = visitor(outbox)

    listed = browser.get("/half?group=shop")
    asked = send(browser, form(browser, f"/half/{id}", "Commit"))
    done = send(browser, form_of(asked, "Commit"))

    assert (id in listed.text, headline(asked)) == (True, "Commit transaction?")
    assert "2 messages are delivered" in asked.text
    assert (headline(done), outbox.admin.half_transaction(id).op) == ("Decided", "commit")
    assert [(each.by, each.verb) for each in outbox.admin.decisions()] == [("eve", "commit")]
    assert "Committed by" in browser.get(f"/half/{id}").text
    assert "2 messages are" not in browser.get("/").text


def test_a_transaction_is_shown_and_decided_on_without_its_bodies(sqlite_engine, monkeypatch):
    id = begun(sqlite_engine, "orders", "mail").id
    browser = visitor(Outbox(sqlite_engine))
    monkeypatch.delattr("outbox.store.half_messages.pending.HalfTransactions.messages")

    asked = send(browser, form(browser, f"/half/{id}", "Commit"))

    assert "2 messages are delivered" in asked.text
    assert re.findall(r'number">(\d+)</td></tr>', browser.get(f"/half/{id}").text) == ["9", "7"]


def test_a_transaction_of_another_group_is_nobodys_business(sqlite_engine):
    id, outbox = begun(sqlite_engine, "orders", group="shop").id, Outbox(sqlite_engine)
    browser = visitor(outbox, subscriptions=["check:depot"], secret=SECRET)
    data = {"token": Tokens(SECRET).of_form("eve"), "verb": "commit", "transaction": id}

    answers = [browser.get(f"/half/{id}"), browser.post("/decide", data=data)]

    assert [each.status_code for each in answers] == [404, 404]
    assert id not in browser.get("/half").text

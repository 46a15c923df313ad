"""Rights: every page and every decision, for every right; forms of strangers, of other users and of yesterday."""

import asyncio
import re
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.testclient import TestClient

from outbox import Outbox, dashboard
from outbox.dashboard import LOCAL, Access
from outbox.dashboard.deciding import RIGHTS as RIGHT_OF
from outbox.dashboard.site import WAYS
from outbox.dashboard.tokens import REHEARSAL_SECONDS, TokenError, Tokens
from tests.support.dashboards import EVERYTHING, form, form_of, headline, read, send, twice_dead, visitor


@pytest.fixture
def outbox(sqlite_engine) -> Outbox:
    """An outbox with a dead letter of two subscriptions."""
    return twice_dead(sqlite_engine)


SECRET = "0123456789abcdef"
#: An address of each page.
ADDRESSES = {
    "": "/",
    "s/{name:path}": "/s/mail",
    "m": "/m?id=1",
    "m/{id}": "/m/1",
    "m/{id}/body": "/m/1/body",
    "k": "/k?key=order-1",
    "k/{key}": "/k/order-1",
    "half/{id:path}": "/half/none",
}


def test_every_page_asks_for_its_right_and_for_see(outbox):
    form_token = Tokens(SECRET).of_form("eve")
    answers = {}
    for way in WAYS:
        address = ADDRESSES.get(way.path, f"/{way.path}")
        data = {"token": form_token, "verb": "replay", "id": "1 mail"}
        for may in ((), ("see",), *((right,) for right in EVERYTHING[1:]), EVERYTHING):
            browser = visitor(outbox, may, secret=SECRET)
            answer = browser.request(way.method, address, data=data if way.method == "POST" else None)
            answers[(way.path, may)] = answer.status_code

    strangers = {status for (_, may), status in answers.items() if may == ()}
    without_see = {status for (_, may), status in answers.items() if len(may) == 1 and may != ("see",)}
    assert (strangers, without_see) == ({401}, {403})
    seen = {path: status for (path, may), status in answers.items() if may == ("see",)}
    forms = {way.path for way in WAYS if way.method == "POST"}
    assert {path for path, status in seen.items() if status == 403} == forms
    assert {status for path, status in seen.items() if path not in forms} == {200, 404}


def test_every_decision_asks_for_the_right_of_its_verb(outbox):
    fields = {"id": "1 mail", "transaction": "t", "name": "mail"}
    for verb, right in RIGHT_OF.items():
        for given in EVERYTHING[1:]:
            browser = visitor(outbox, ("see", given), secret=SECRET)
            answer = browser.post("/decide", data={**fields, "token": Tokens(SECRET).of_form("eve"), "verb": verb})
            refused = f"eve has not the right {right}" in answer.text
            assert (verb, given, refused) == (verb, given, given != right)


def test_a_visitor_of_one_subscription_meets_no_other_one(outbox):
    browser = visitor(outbox, subscriptions=["mail"])

    pages = [browser.get(path).text for path in ("/", "/parked", "/m/1", "/k?key=order-1", "/workers", "/decisions")]
    assert [("billing" in page) for page in pages] == [False] * 6
    assert all(">mail<" in page.replace("<bdi>", "").replace("</bdi>", "<") or "mail" in page for page in pages[:4])
    statuses = {path: browser.get(path).status_code for path in ("/s/billing", "/parked?name=billing", "/doctor")}
    assert statuses == {"/s/billing": 404, "/parked?name=billing": 404, "/doctor": 404}
    token = form(browser, "/m/1", "Replay").fields["token"]
    for meant in ({"id": "1 billing"}, {"all": "1", "name": "billing"}):
        answer = browser.post("/decide", data={"token": token, "verb": "discard", **meant})
        assert (answer.status_code, "may see" in answer.text) == (404, True)
    every = browser.post("/decide", data={"token": token, "verb": "replay", "all": "1"})
    assert (headline(every), "billing" in every.text) == ("Replay 1 message?", False)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "null"}, 200),
        ({"origin": "http://testserver"}, 200),
        ({"origin": "https://testserver"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "null"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://testserver:81"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://testserver"}, 403),
    ],
)
def test_a_form_comes_from_a_page_of_the_dashboard(outbox, headers, status):
    browser = visitor(outbox)
    first = form(browser, "/m/1", "Replay")

    asked = send(browser, first, headers)

    assert asked.status_code == status
    second = form_of(send(browser, first), "Replay")
    assert send(browser, second, headers).status_code == status


def test_a_form_counts_with_its_token_for_its_user_and_once(outbox):
    browser = visitor(outbox, secret=SECRET)
    other = visitor(outbox, secret=SECRET, user="mallory")
    first = form(browser, "/m/1", "Discard")
    second = form_of(send(browser, first), "Discard")

    def sent(to, path, **data):
        answer = to.post(path, data=data)
        return answer.status_code, headline(answer)

    token, no = second.fields["token"][0], (403, "You may not do this")
    fields = {name: values for name, values in first.fields.items() if name != "token"}
    assert sent(browser, "/decide", **fields) == no
    assert sent(other, "/decide", **first.fields) == no
    assert sent(browser, "/confirm", reason="x") == no
    assert sent(browser, "/confirm", token=first.fields["token"], reason="x") == no
    assert sent(browser, "/confirm", token=f"{token[:-1]}{'0' if token[-1] != '0' else '1'}", reason="x") == no
    assert sent(other, "/confirm", token=token, reason="x") == no
    assert outbox.admin.decisions() == ()
    assert sent(browser, "/confirm", token=token, reason="x") == (200, "Decided")
    assert sent(browser, "/confirm", token=token, reason="x") == no
    assert [each.by for each in outbox.admin.decisions()] == ["eve"]


def test_a_rehearsal_of_ten_minutes_ago_does_not_count(monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr("outbox.dashboard.tokens.time", SimpleNamespace(time=lambda: now))
    tokens = Tokens()
    token = tokens.of_rehearsal("eve", {"order": 1})
    assert tokens.rehearsed(token, "eve") == {"order": 1}

    now += REHEARSAL_SECONDS + 1

    with pytest.raises(TokenError, match="too old"):
        tokens.rehearsed(token, "eve")


def test_a_read_only_dashboard_has_no_route_and_no_button_to_decide(outbox):
    browser = visitor(outbox, read_only=True)

    pages = [browser.get(path).text for path in ("/", "/parked", "/m/1", "/s/mail", "/k?key=order-1")]
    buttons = [each.button.strip() for page in pages for each in read(page).forms if each.method == "post"]
    assert buttons == ["Show the body"]
    assert [browser.post(path).status_code for path in ("/decide", "/confirm")] == [404, 404]


@pytest.mark.parametrize(
    ("client", "host", "more", "known"),
    [
        ("127.0.0.1", "localhost:8025", {}, True),
        ("127.0.0.1", "127.0.0.1", {}, True),
        ("::1", "[::1]:8025", {}, True),
        ("::ffff:127.0.0.1", "[::1]", {}, True),
        ("127.0.0.1", "evil.example", {}, False),
        ("127.0.0.1", "localhost.evil.example:8025", {}, False),
        ("10.0.0.9", "localhost:8025", {}, False),
        ("127.0.0.1", "localhost", {"x-forwarded-for": "10.0.0.9"}, False),
        ("unix:", "localhost", {}, False),
    ],
)
def test_local_means_this_machine_by_its_own_name(client, host, more, known):
    headers = [(name.encode(), value.encode()) for name, value in {"host": host, **more}.items()]
    request = Request({"type": "http", "client": (client, 5), "headers": headers})

    access = LOCAL(request)

    assert (access is not None and access.allows("discard")) == known


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"user": "eve", "may": {"see", "reply"}}, "reply is no right"),
        ({"user": " ", "may": {"see"}}, "must not be empty"),
        ({"user": "eve", "may": "see"}, "not one text"),
        ({"user": "eve", "may": {"see"}, "subscriptions": "mail"}, "not one text"),
    ],
)
def test_an_access_that_means_nothing_is_refused(given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Access(**given)


def test_an_access_function_may_be_awaited(outbox):
    async def access(request):
        await asyncio.sleep(0)
        return Access(user="eve", may={"see"})

    assert TestClient(dashboard.app(outbox, access=access)).get("/").status_code == 200


@pytest.mark.parametrize("several", [False, True])
def test_an_access_function_may_lead_to_a_login_and_a_failing_one_lets_nobody_in(outbox, several):
    def to_login(request):
        raise HTTPException(303, headers={"location": "https://shop.example/login"})

    def failing(request):
        raise ConnectionError("the table of users is away: hunter2")

    shown = {"shop": outbox} if several else outbox
    place = "/db/shop" if several else ""
    paths = ("/", f"{place}/", f"{place}/m/1", f"{place}/live", f"{place}/status.json", "/healthz", "/db/none/")
    led, failed = (
        [TestClient(dashboard.app(shown, access=each), follow_redirects=False).get(path) for path in paths]
        for each in (to_login, failing)
    )

    known = 7 if several else 6
    assert [each.status_code for each in led] == [303] * known + [404] * (7 - known)
    assert [each.status_code for each in failed] == [500] * known + [404] * (7 - known)
    assert [each for each in failed if "hunter2" in each.text or "x-content-type-options" not in each.headers] == []

"""Attacks on a dashboard by strangers, and by visitors with few rights."""

import asyncio
import logging
import threading
from ipaddress import ip_network

import httpx
import pytest

from outbox import Outbox
from outbox.dashboard import Access, app
from outbox.dashboard.logins import Door, Proxy, UserFile, behind
from outbox.dashboard.numbers import Numbers
from tests.support.dashboards import EVERYTHING, form, form_of, headline, send, twice_dead, visitor


@pytest.fixture
def outbox(engine) -> Outbox:
    """An outbox with a dead letter of two subscriptions."""
    return twice_dead(engine)


def client(made) -> httpx.AsyncClient:
    """A client of an application in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://testserver")


@pytest.mark.parametrize(
    "path",
    [
        "/parked?before=0001-01-01T00:00:00%2B14:00",
        "/decisions?since=9999-12-31T23:59:59-14:00",
        "/s/a%00b",
        "/half/a%00b",
        "/half/" + 3_000 * "a",
    ],
)
def test_an_address_that_no_database_takes_is_a_mistake(outbox, path):
    answer = visitor(outbox).get(path)

    assert (answer.status_code, headline(answer)) == (400, "This address has a mistake")


def test_an_id_with_a_nul_is_a_mistake(outbox):
    browser = visitor(outbox)
    token = form(browser, "/m/1", "Replay").fields["token"]

    answer = browser.post("/decide", data={"token": token, "verb": "replay", "id": "1 ma\0il"})

    assert (answer.status_code, headline(answer)) == (400, "This address has a mistake")


def test_an_unknown_subscription_names_no_other_to_a_visitor_of_one(outbox):
    browser = visitor(outbox, subscriptions=["mail"])
    token = form(browser, "/m/1", "Replay").fields["token"]

    answers = [
        browser.get("/s/mail@none"),
        browser.get("/parked?name=mail@none"),
        browser.post("/decide", data={"token": token, "verb": "pause", "name": "mail@none"}),
        browser.post("/decide", data={"token": token, "verb": "replay", "id": "1 mail@none"}),
    ]

    assert [(each.status_code, "billing" in each.text) for each in answers] == [(404, False)] * 4


def test_a_body_is_read_by_no_subscription_of_others(outbox):
    browser = visitor(outbox, subscriptions=["mail"])
    token = form(browser, "/m/1", "Show the body").fields["token"]
    with outbox.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM outbox_message")

    answer = browser.post("/m/1/body", data={"token": token, "name": "billing"})

    assert (answer.status_code, [each.subscription for each in outbox.admin.decisions()]) == (200, ["mail"])


def test_a_request_is_one_line_of_the_log(outbox, caplog):
    door = Door()
    made = behind(door, app(outbox, access=door.access))
    caplog.set_level(logging.INFO, "outbox.dashboard")

    async def story() -> None:
        async with client(made) as browser:
            await browser.get("/m%0aforged%1b")

    asyncio.run(story())

    assert [each.getMessage() for each in caplog.records] == [r"GET /m\x0aforged\x1b 404"]


def test_pages_that_wait_for_their_database_keep_no_machine_waiting(outbox, monkeypatch):
    began, gate = threading.Semaphore(0), threading.Event()

    def ask(self, admin):
        began.release()
        gate.wait(60)
        raise TimeoutError

    monkeypatch.setattr(Numbers, "ask", ask)
    made = app(outbox, access=lambda request: Access(user="eve", may={"see"}))

    async def story() -> str:
        async with client(made) as browser:
            pages = [asyncio.create_task(browser.get("/")) for _ in range(8)]
            for _ in range(4):
                await asyncio.to_thread(began.acquire)
            health = await browser.get("/healthz")
            gate.set()
            await asyncio.gather(*pages)
            return health.text

    assert asyncio.run(story()) == "ok\n"


def test_passwords_that_wait_for_their_turn_keep_no_page_waiting(outbox, tmp_path, monkeypatch):
    began, gate = threading.Event(), threading.Event()
    monkeypatch.setattr("outbox.dashboard.logins._PAUSE_SECONDS", 0.0)

    def matches(password: str, stored: str) -> bool:
        began.set()
        return not gate.wait(60)

    monkeypatch.setattr("outbox.dashboard.logins._matches", matches)
    (tmp_path / "users").write_text("ines:see:x\n")
    door = Door(users=UserFile(tmp_path / "users"))
    made = behind(door, app(outbox, access=door.access))

    async def story() -> int:
        async with client(made) as browser:
            data = {"user": "ines", "password": "x"}
            logins = [asyncio.create_task(browser.post("/login", data=data)) for _ in range(60)]
            await asyncio.to_thread(began.wait)
            page = asyncio.create_task(browser.get("/login"))
            await asyncio.wait([page], timeout=20)
            answered = page.done()
            gate.set()
            await asyncio.gather(page, *logins)
            return answered

    assert asyncio.run(story())


def test_a_header_that_comes_twice_is_nobody(outbox):
    door = Door(proxy=Proxy("X-Remote-User", [ip_network("127.0.0.1")], {"see"}))
    made = behind(door, app(outbox, access=door.access))

    async def story() -> list[int]:
        async with client(made) as browser:
            names = [("X-Remote-User", name) for name in ("admin", "eve")]
            return [(await browser.get("/half", headers=given)).status_code for given in (names[1:], names)]

    assert asyncio.run(story()) == [200, 401]


def test_a_new_password_ends_the_sessions_and_keeps_the_subscriptions(outbox, tmp_path):
    users = UserFile(tmp_path / "users")
    users.add("ines", {"see"}, "old")
    (tmp_path / "users").write_text((tmp_path / "users").read_text().strip() + ":mail\n")
    door = Door(users=users)
    made = behind(door, app(outbox, access=door.access))

    async def story() -> list[int]:
        async with client(made) as browser:
            entered = await browser.post("/login", data={"user": "ines", "password": "old"})
            before = await browser.get("/half")
            users.add("ines", EVERYTHING, "new")
            return [each.status_code for each in (entered, before, await browser.get("/half"))]

    assert asyncio.run(story()) == [303, 200, 303]
    assert users.access("ines") == Access(user="ines", may=sorted(EVERYTHING), subscriptions=["mail"])


@pytest.mark.parametrize(("headers", "secure"), [({}, False), ({"x-forwarded-proto": "https"}, True)])
def test_behind_tls_a_session_is_sent_by_tls_alone(outbox, headers, secure):
    door = Door()
    made = behind(door, app(outbox, access=door.access))

    async def story() -> str:
        async with client(made) as browser:
            return (await browser.get(f"/login?once={door.one_time}", headers=headers)).headers["set-cookie"]

    assert ("Secure" in asyncio.run(story())) == secure


def test_a_login_that_is_too_long_is_a_mistake(outbox, tmp_path):
    (tmp_path / "users").touch()
    door = Door(users=UserFile(tmp_path / "users"))
    made = behind(door, app(outbox, access=door.access))

    async def story() -> int:
        async with client(made) as browser:
            return (await browser.post("/login", data={"user": 70_000 * "x"})).status_code

    assert asyncio.run(story()) == 400


def test_a_page_beyond_the_most_viewers_is_not_live(outbox, monkeypatch):
    monkeypatch.setattr("outbox.dashboard.site._MOST_VIEWERS", 0)

    assert visitor(outbox).get("/live").status_code == 503


def test_hashed_keys_are_in_no_status_and_in_no_error(outbox):
    browser = visitor(outbox, keys="hashed")
    outbox.admin.pause("mail", key="order-1", reason="token=hunter2")
    first = form(browser, "/k?of=1", "Resume")
    status = browser.get("/status.json").text
    outbox.admin.resume("mail", key="order-1")

    error = send(browser, form_of(send(browser, first), "Resume"))

    assert (error.status_code, "is not paused for key" in error.text) == (409, True)
    assert [each in text for text in (status, error.text) for each in ("order-1", "hunter2")] == [False] * 4


def test_decisions_of_others_hide_no_decision_from_a_visitor_of_one(outbox):
    outbox.admin.pause("mail", by="ines")
    for _ in range(30):
        outbox.admin.pause("billing", by="eve")
        outbox.admin.resume("billing", by="eve")

    page = visitor(outbox, subscriptions=["mail"]).get("/decisions").text

    assert [name in page for name in ("ines", "billing")] == [True, False]

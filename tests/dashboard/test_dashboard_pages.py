"""Pages: under any prefix, with hostile texts, with parameters that ask for too much, and with nothing to show."""

import asyncio
import contextlib
import json
import re
import sqlite3
import threading
from contextlib import closing
from datetime import timedelta
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from a2wsgi import ASGIMiddleware
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from outbox import Outbox, Relay, Retry, dashboard
from outbox.dashboard import Access
from outbox.model.lease import Partition
from outbox.model.subscription import Declaration
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.rocketmq.halves import ask, begun, producer
from tests.rocketmq.test_simple_consumer import HOUR, consumer_of
from tests.rocketmq.test_simple_consumer import send as of_receipts
from tests.support.dashboards import EVERYTHING, Refusing, form, form_of, headline, read, send, visitor

HOSTILE = "<script>alert(1)</script>\u202e\"'&javascript:"
HOSTILE_BODY = f'{{"n": 9007199254740993, "x": "{"</pre><script>"}"}}'.encode()


def hostile_error(message):
    """An error of a destination that is hostile, too."""
    return f"{HOSTILE} at https://user:hunter2@h/ password=hunter2"


@pytest.fixture
def outbox(sqlite_engine) -> Outbox:
    """An outbox with a hostile dead letter, and a key with one behind another one."""
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        headers = {
            "note": HOSTILE.encode("ascii", "ignore").decode(),
            "api-token": "hunter2",
            "authorization": "hunter2",
        }
        for _ in range(2):
            outbox.send(session, "orders", HOSTILE_BODY, key=HOSTILE, headers=headers, content_type="application/json")
    Relay(outbox, Refusing(hostile_error)).until_empty()
    outbox.admin.pause("relay", key="a/b?..", by=HOSTILE, reason=HOSTILE)
    return outbox


def section(html: str, name: str) -> str:
    """Return a live section of the overview."""
    return html.partition(f'<section data-live="{name}"')[2].partition("</section>")[0]


PAGES = (
    "/", "/s/relay", "/s/relay?hours=24", "/parked", "/parked?state=dead&topic=orders", "/m/1", "/k?key=a/b?..",
    "/half", "/workers", "/decisions", "/doctor",
)  # fmt: skip


def test_hostile_texts_are_shown_as_text_and_no_secret_is_shown(outbox):
    browser = visitor(outbox)
    texts = {path: browser.get(path) for path in PAGES}
    texts["body"] = send(browser, form(browser, "/m/1", "Show the body"))
    texts["asked"] = send(browser, form(browser, "/m/1", "Discard"))
    texts["wrong"] = browser.get("/parked", params={"state": HOSTILE})

    assert {path: answer.status_code for path, answer in texts.items()} == {
        **dict.fromkeys([*PAGES, "body", "asked"], 200),
        "wrong": 400,
    }
    for path, answer in texts.items():
        found = [each for each in ("<script>", "\u202e", "hunter2", "javascript:alert") if each in answer.text]
        assert (path, found) == (path, [])
        assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src=)|href=\"(?!\.|#|\")", answer.text), path
    typed = [browser.get(path, params={name: HOSTILE}) for path, name in (("/k", "key"), ("/parked", "error"))]
    assert [(each.status_code, "<script>" in each.text, HOSTILE[-13:] in each.text) for each in typed] == [
        (200, False, False)
    ] * 2
    assert "9007199254740993" in texts["body"].text
    assert [(each.verb, each.by, dict(each.choice)) for each in outbox.admin.decisions(limit=1)] == [
        ("read", "eve", {"message": 1})
    ]


def test_each_answer_has_the_headers_of_security(outbox):
    browser = visitor(outbox)
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
        " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
    wanted = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }

    for answer in (browser.get("/"), browser.get("/none"), browser.post("/decide"), visitor(outbox, ()).get("/")):
        assert {name: answer.headers.get(name) for name in wanted} == wanted


def mounted(app: Starlette) -> TestClient:
    """The dashboard below a path of another application."""
    return TestClient(Starlette(routes=[Mount("/ops/outbox", app)]), follow_redirects=False)


def behind_a_proxy(app: Starlette) -> TestClient:
    """A proxy takes the prefix away, and the server knows the prefix."""

    async def proxy(scope, receive, send):
        if scope["type"] == "http":
            path = scope["path"].removeprefix("/ops/outbox")
            scope = {**scope, "path": path, "root_path": "/ops/outbox", "raw_path": path.encode()}
        await app(scope, receive, send)

    return TestClient(proxy, follow_redirects=False)


def behind_a_silent_proxy(app: Starlette) -> TestClient:
    """A proxy takes the prefix away, and nobody tells the server."""

    async def proxy(scope, receive, send):
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].removeprefix("/ops/outbox")}
        await app(scope, receive, send)

    return TestClient(proxy, follow_redirects=False)


@pytest.mark.parametrize(
    ("placed", "several"),
    [(None, False), (None, True), (mounted, True), (behind_a_proxy, False), (behind_a_silent_proxy, True)],
)
def test_every_link_leads_to_a_page_under_any_prefix(outbox, placed, several):
    app = dashboard.app({"shop-1": outbox} if several else outbox, access=lambda _: Access(user="eve", may=EVERYTHING))
    browser = TestClient(app, follow_redirects=False) if placed is None else placed(app)
    root = "http://testserver/" if placed is None else "http://testserver/ops/outbox/"
    todo, seen = [root], dict[str, int]()
    while todo:
        at = todo.pop()
        answer = browser.get(at)
        seen[at] = answer.status_code
        if "text/html" not in answer.headers["content-type"]:
            continue
        for link in read(answer.text).links:
            to = urljoin(at, link).partition("#")[0]
            assert to.startswith(root), (at, link)
            if (
                to not in seen
                and to not in todo
                and not re.search(r"/(decide|confirm|body|live|static)", urlsplit(to).path)
            ):
                todo.append(to)

    missing = {at for at, status in seen.items() if status != 200}
    # Forms that ask for what is not given yet.
    assert {urlsplit(at).path.rpartition("/")[2] for at in missing} <= {"k", "m"}
    assert len(seen) > 15
    first = form_of(browser.get(urljoin(root, "db/shop-1/m/1" if several else "m/1")), "Replay")
    done = send(browser, form_of(send(browser, first), "Replay"))
    assert headline(done) == "Decided"


def test_a_finding_leads_to_the_page_where_a_person_decides(sqlite_engine, outbox):
    """The command that it names needs a shell."""
    begun(sqlite_engine)
    ask(sqlite_engine)

    findings = section(visitor(outbox).get("/").text, "findings")

    assert [each for each in read(findings).links if "?" in each] == [
        "./half?group=shop&given_up=1", "./parked?name=relay&state=dead", "./parked?name=relay&state=behind",
    ]  # fmt: skip


def test_paused_keys_are_counted_on_the_overview_and_lead_to_their_pages(outbox):
    outbox.admin.pause("relay", key="order-7", by="ann")
    browser = visitor(outbox)

    overview, links = browser.get("/").text, read(browser.get("/s/relay").text).links

    assert "2 keys paused" in read(section(overview, "subscriptions")).text
    assert "../k?key=order-7&name=relay" in links


def test_what_clients_have_in_their_hands_is_counted_beside_the_states(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    consumer = consumer_of(outbox)
    of_receipts(outbox, "1", "2")
    assert len(consumer.receive(2, HOUR)) == 2
    browser = visitor(outbox)

    overview, page = browser.get("/").text, browser.get("/s/billing").text

    assert ">Inflight</th>" in overview
    assert '<a href="./parked?name=billing">2</a>' in overview
    assert "inflight 2" in read(page).text


def test_orders_without_a_button_are_named_as_commands_where_a_person_looks_for_them(outbox):
    outbox.admin.create("spark", destination="nats://h:4222")
    browser = visitor(outbox)

    said = {path: read(browser.get(path).text).text for path in ("/", "/s/spark", "/k?key=a/b?..")}

    wanted = {
        "/": ["outbox purge --older-than 7d"],
        "/s/spark": [
            f"outbox subscriptions {verb}"
            for verb in ("alter spark", "alter spark --partitions N", "reset spark --to latest", "drop spark")
        ],
        "/k?key=a/b?..": ["outbox erase --key 'a/b?..'"],
    }
    assert {path: [each for each in found if each in said[path]] for path, found in wanted.items()} == wanted


def test_no_page_offers_a_pause_that_is_refused(sqlite_engine, outbox):
    """Nobody can pause an extract, and a check-back hands no key over."""
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).declare(Declaration(name="archive", destination=None, kind="extract"), "earliest")
    begun(sqlite_engine)
    browser = visitor(outbox)

    buttons = [each.button for path in ("/s/archive", "/k?key=x") for each in read(browser.get(path).text).forms]

    assert [each for each in buttons if "ause" in each or "Slow" in each] == ["Pause the key for relay"]


def test_transactions_are_counted_above_their_list(sqlite_engine, outbox):
    begun(sqlite_engine)
    ask(sqlite_engine)
    begun(sqlite_engine, "orders", "mail", group="other")

    pages = [
        read(visitor(outbox, subscriptions=seen).get(f"/half{query}").text).text
        for seen, query in ((None, ""), (None, "?group=shop"), (["check:other"], ""))
    ]

    counts = [re.search(r"(\d+ messages?) without a verdict, (\d+) transactions? given up", page) for page in pages]
    assert [each and each.groups() for each in counts] == [
        ("2 messages", "1"),
        ("0 messages", "1"),
        ("2 messages", "0"),
    ]


def test_a_transaction_that_was_given_up_is_not_selected_for_a_replay(sqlite_engine, outbox):
    """It waits for a verdict, on the page of transactions."""
    begun(sqlite_engine)
    ask(sqlite_engine)

    page = visitor(outbox).get("/parked").text

    assert re.findall(r'name="id" value="([^"]+)"', page) == ["1 relay"]


def test_what_was_decided_on_is_told_in_words(outbox):
    outbox.admin.read_body(1, by="ann")
    outbox.admin.replay(1, by="ann")
    outbox.admin.pause("relay", rate=20.0, by="ann")

    page = read(visitor(outbox).get("/decisions").text)

    words = " ".join(page.text.split())
    assert [each in words for each in ("rate 20 –", "1 states dead", "['dead']")] == [True, True, False]  # noqa: RUF001
    assert page.links.count("./m/1") == 2


def test_the_page_that_is_open_is_marked_among_all_pages(outbox):
    browser = visitor(outbox)

    marked = {
        path: re.findall(r'aria-current="page">(\w+)<', browser.get(path).text) for path in ("/", "/half", "/m/1")
    }

    assert marked == {"/": ["Overview"], "/half": ["Transactions"], "/m/1": []}


def test_the_root_without_its_slash_leads_to_the_root(outbox):
    app = dashboard.app(outbox, access=lambda _: Access(user="eve", may=EVERYTHING))
    scopes = [{"path": "/ops/outbox", "root_path": "/ops/outbox"}]

    async def root(scope, receive, send):
        await app({**scope, **scopes[0]} if scope["type"] == "http" else scope, receive, send)

    answer = TestClient(root, follow_redirects=False).get("/ops/outbox")

    assert (answer.status_code, answer.headers["location"]) == (307, "outbox/")


@pytest.mark.parametrize(
    ("address", "status", "text"),
    [
        ("/parked?state=all", 400, "state must be one of"),
        ("/parked?before=yesterday", 400, "before must be a moment"),
        ("/parked?before=2026-01-31T12:00:00", 400, "has no time zone"),
        (f"/parked?error={'x' * 2001}", 400, "at most 2000 characters"),
        ("/parked?topic=%00", 400, "without NUL"),
        ("/parked?after=x", 400, "a number from 1 on"),
        ("/parked?limit=1000000", 200, "at least|2 parked"),
        ("/parked?name=none", 404, "none"),
        ("/s/relay?hours=100000", 400, "hours must be one of 1, 6, 24"),
        ("/s/none", 404, "none"),
        ("/m/0", 400, "a number from 1 on"),
        ("/m/99999999999999999999", 400, "a number from 1 on"),
        ("/m/77", 404, "nothing of message 77 is stored now"),
        ("/m/0190b2f0-0000-7000-8000-000000000000", 404, "nothing of message"),
        ("/k?key=" + "x" * 2000, 400, "key"),
        ("/half/none", 404, "there is no transaction none"),
        ("/db/x/", 404, "no page"),
    ],
)
def test_a_parameter_is_a_page_or_a_mistake_and_never_sizes_the_work(outbox, address, status, text):
    answer = visitor(outbox).get(address)

    assert (answer.status_code, bool(re.search(text, read(answer.text).text))) == (status, True)


def pages_of(browser: TestClient, path: str, row: str) -> list[list[str]]:
    """Follow the links to the next page; return what each page has."""
    found = list[list[str]]()
    while path:
        answer = browser.get(path)
        found.append(re.findall(row, answer.text))
        path = next((urljoin(path, each) for each in read(answer.text).links if "after=" in each), "")
    return found


def test_a_page_of_a_list_leads_to_the_next_one(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        for _ in range(120):
            outbox.send(session, "orders", b"1")
    Relay(outbox, Refusing()).until_empty()

    found = pages_of(visitor(outbox), "/parked?state=dead", r'name="id" value="(\d+) relay"')

    assert found == [[str(number) for number in range(first, min(first + 50, 121))] for first in (1, 51, 101)]


def test_a_message_that_failed_says_which_attempt_failed_and_when_the_next_one_is_due(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1", key="a")
    Relay(outbox, lambda _: Retry("busy", after=timedelta(hours=1))).until_empty()
    browser, paths = visitor(outbox), ("/m/1", "/k/a", "/parked")

    nobody = [read(browser.get(path).text).text for path in paths]
    with closing(outbox.database.open()) as channel:
        Leases(channel).acquire(Partition("relay"), "web-1:4711:ab12", timedelta(minutes=1), attempts=10)
    at_work = [read(browser.get(path).text).text for path in paths]

    for pages, tries in ((nobody, "1"), (at_work, "1 of 10")):
        assert re.search(rf"Attempt {tries} failed; the next one is due 20\d\d-\d\d-\d\d", pages[0])
        assert f"; attempt {tries} failed: busy" in pages[1]
        assert re.search(rf"retry\s+{tries}\s+busy", pages[2])


@pytest.mark.storm
def test_pages_of_decisions_and_transactions_lead_to_the_next_ones(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    for _ in range(30):
        outbox.admin.pause("relay", reason="because", by="ann")
        outbox.admin.resume("relay", by="ann")
    shops = {group: producer(sqlite_engine, group) for group in ("theirs", "mine")}
    for group in ("theirs", "mine"):
        for _ in range(60):
            shops[group].begin_transaction().send("orders", b"1")

    decisions = pages_of(visitor(outbox), "/decisions?name=relay", r"<td>(pause|resume)</td>")
    transactions = pages_of(visitor(outbox, subscriptions=["check:mine"]), "/half", r"<bdi>(theirs|mine)</bdi>")

    assert [len(page) for page in decisions] == [50, 10]
    assert transactions == [["mine"] * 50, ["mine"] * 10]


def test_without_messages_subscriptions_or_tables_each_page_says_so(sqlite_engine, tmp_path):
    outbox = Outbox(sqlite_engine)
    outbox.admin.drop("relay")
    empty = visitor(outbox)
    bare = visitor(Outbox(create_engine(f"sqlite:///{tmp_path / 'bare.db'}")))
    gone = visitor(Outbox(create_engine("sqlite:////none/at/all.db")))

    said = {
        path: read(empty.get(path).text).text for path in ("/", "/parked", "/half", "/workers", "/decisions?name=none")
    }
    assert [
        "No subscription reads this log" in said["/"],
        "Nothing is parked." in said["/parked"],
        "No transaction waits" in said["/half"],
        "No process works" in said["/workers"],
        "Nobody has decided anything" in said["/decisions?name=none"],
    ] == [True] * 5
    answers = [browser.get("/") for browser in (bare, gone)]
    assert [(each.status_code, headline(each)) for each in answers] == [
        (503, "The tables are not ready"),
        (503, "The database does not answer"),
    ]
    assert "outbox db upgrade" in answers[0].text


def test_machines_read_the_status_by_a_rule_of_their_own(outbox):
    def probe(request):
        return Access(user="probe", may={"see"}) if request.headers.get("x-probe") == "1" else None

    browser = visitor(outbox, machines=probe)
    answers = [browser.get(path, headers={"x-probe": told}) for path in ("/status.json", "/healthz") for told in "01"]

    assert [each.status_code for each in answers] == [401, 200, 401, 200]
    assert (answers[1].json()["subscriptions"][0]["parked"]["dead"], answers[3].text) == (1, "ok\n")


def test_hashed_keys_are_shown_on_no_page_and_still_lead_to_theirs(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        for _ in range(2):
            outbox.send(session, "orders", b"1", key="anna@example.org")
    Relay(outbox, Refusing()).until_empty()
    browser = visitor(outbox, keys="hashed")

    link = next(each for each in read(browser.get("/parked").text).links if "of=1" in each)
    page = browser.get(urljoin("/parked", link))
    send(browser, form_of(send(browser, form_of(page, "Pause the key")), "Pause"))

    assert "lets 1 message go on" in read(page.text).text
    assert [each.key for each in outbox.admin.subscriptions()[0].pauses] == ["anna@example.org"]
    shown = [browser.get(path).text for path in ("/", "/parked", "/m/1", "/m/2", "/s/relay", "/decisions")]
    assert [("anna" in each) for each in (*shown, page.text)] == [False] * 7


class Away:
    """An admin whose database goes away, and comes back."""

    def __init__(self, admin):
        self._admin, self.is_away = admin, False

    def __getattr__(self, name):
        return getattr(self._admin, name)

    def connected(self, **options):
        """Raise as a driver does."""
        if self.is_away:
            raise OperationalError("SELECT secret", {}, sqlite3.OperationalError("unable to open database file"))
        return self._admin.connected(**options)


def test_the_last_overview_stays_with_its_time_while_the_database_is_away(outbox):
    admin = Away(outbox.admin)
    browser = visitor(admin)
    before = browser.get("/")
    admin.is_away = True

    away, other = browser.get("/"), browser.get("/parked")

    assert (away.status_code, '<body data-events="./live" class="stale">' in away.text) == (503, True)
    assert "No answer: OperationalError: unable to open database file. The numbers are those of" in read(away.text).text
    assert read(before.text).text.count("dead letter") == read(away.text).text.count("dead letter")
    assert (other.status_code, headline(other)) == (503, "The database does not answer")
    admin.is_away = False
    assert browser.get("/").status_code == 200


def test_a_page_that_takes_too_long_says_so(outbox, monkeypatch):
    monkeypatch.setattr("outbox.dashboard.site.PATIENCE_SECONDS", 0.05)
    admin, answered = Away(outbox.admin), threading.Event()
    monkeypatch.setattr(admin, "check", lambda: answered.wait(60), raising=False)
    monkeypatch.setattr(admin, "connected", lambda: contextlib.nullcontext(admin))

    answer = visitor(admin).get("/doctor")
    answered.set()

    assert (answer.status_code, headline(answer)) == (504, "The database is slow")


def test_a_viewer_gets_the_sections_of_the_overview_as_events(outbox):
    async def first_answer(app):
        """Read events until the first answer, then leave."""
        left, text = asyncio.Event(), ""

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            nonlocal text
            text += message.get("body", b"").decode()
            if "event: answer" in text:
                left.set()

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/live",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
        }
        await app({**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)
        return text

    app = dashboard.app(outbox, access=lambda _: Access(user="eve", may={"see"}))
    text = asyncio.run(first_answer(app))

    told = json.loads(text.partition("event: answer\ndata: ")[2].partition("\n")[0])
    assert list(told["sections"]) == ["findings", "subscriptions", "log", "workers"]
    assert "1 dead letter" in told["sections"]["findings"]
    assert '<a href="./s/relay">' in told["sections"]["subscriptions"]
    assert visitor(outbox, ()).get("/live").status_code == 401


def test_below_wsgi_an_answer_with_numbers_ends_and_the_page_asks_again_after_a_pause(outbox):
    """No thread of the server is kept."""
    pages: Any = dashboard.app(outbox, access=lambda _: Access(user="ines", may={"see"}), polls=timedelta(seconds=10))
    below: Any = ASGIMiddleware(pages)

    with httpx.Client(transport=httpx.WSGITransport(app=below), base_url="http://localhost") as client:
        events = client.get("/live").text

    assert re.findall(r"^event: (\w+)", events, re.MULTILINE) == ["answer", "again"]
    assert events.endswith('data: {"after": 10000}\n\n')

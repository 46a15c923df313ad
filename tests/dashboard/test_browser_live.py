"""Live sections in a browser: one loop of questions, a state line that tells the truth, and a page that keeps still."""

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from outbox import Outbox
from outbox.dashboard import Access, app
from tests.support.browsers import Site, site, visiting
from tests.support.waiting import eventually

LIVE = re.compile(r"^Live, as of ")
#: A browser waits for so many milliseconds, which nobody needs.
PATIENCE = 60_000


class Gate:
    """Counts the looks of live pages, and may hold them back or let them fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fails = False
        self.looks = self.at_once = self.most_at_once = 0

    def look(self, look: Any) -> Any:
        """Count a look of the thread that asks for live pages; the pages' own looks pass."""
        if threading.current_thread().name != "outbox-dashboard":
            return look()
        self.looks += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            assert self.open.wait(120)
            if self.fails:
                raise OSError("the database is away")
            return look()
        finally:
            self.at_once -= 1


class Counted:
    """An admin whose looks go through a gate."""

    def __init__(self, admin: Any, gate: Gate) -> None:
        self._admin, self._gate = admin, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    @contextmanager
    def connected(self, **options: Any) -> Iterator["Counted"]:
        """One connection for many calls, which are counted as well."""
        with self._admin.connected(**options) as shared:
            yield Counted(shared, self._gate)

    def look(self) -> Any:
        """A look."""
        return self._gate.look(self._admin.look)


@pytest.fixture
def outbox(sqlite_engine) -> Outbox:
    """An outbox with a message that nobody sends."""
    found = Outbox(sqlite_engine)
    write(found, 1)
    return found


@pytest.fixture
def gate() -> Gate:
    """Where the looks of live pages pass."""
    return Gate()


@pytest.fixture
def served(outbox, gate) -> Iterator[Site]:
    """The dashboard."""
    made = app(Counted(outbox.admin, gate), access=lambda _: Access(user="ada", may={"see"}))
    with site(made) as found:
        yield found


def write(outbox: Outbox, number: int) -> None:
    with outbox.begin() as session:
        for _ in range(number):
            outbox.send(session, "orders", b"1")


def backlog(number: int) -> re.Pattern[str]:
    return re.compile(rf"relay\s+nobody\s+{number}\b")


@pytest.mark.smoke("waits for the second question of a page")
def test_a_page_is_live_and_says_so(browser: Browser, served, outbox):
    with visiting(browser, served.url) as visitor:
        page = visitor.goes()
        expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        write(outbox, 6)
        expect(page.locator("section[data-live=subscriptions]")).to_contain_text(backlog(7), timeout=PATIENCE)

        assert (visitor.complaints, visitor.refused()) == ([], [])


@pytest.mark.storm
def test_ten_viewers_have_one_loop_of_questions_which_ends_with_the_last(browser: Browser, served, outbox, gate):
    with ExitStack() as stack:
        viewers = [stack.enter_context(visiting(browser, served.url)) for _ in range(2)]
        pages = [page for viewer in viewers for page in (viewer.page, *(viewer.opened() for _ in range(4)))]
        for page in pages:
            page.goto(served.url, wait_until="domcontentloaded")
        for page in pages:
            expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        gate.open.clear()
        assert eventually(lambda: gate.at_once == 1)
        before = gate.looks
        write(outbox, 6)
        gate.open.set()
        for page in pages:
            expect(page.locator("section[data-live=subscriptions]")).to_contain_text(backlog(7), timeout=PATIENCE)
        assert eventually(lambda: gate.looks > before)

    assert gate.most_at_once == 1
    assert eventually(lambda: "outbox-dashboard" not in {each.name for each in threading.enumerate()})


@pytest.mark.storm
def test_a_page_says_since_when_there_is_no_answer_and_comes_back(browser: Browser, served, outbox, gate):
    with visiting(browser, served.url) as visitor:
        page = visitor.goes()
        expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        for away, back in (
            (lambda: setattr(gate, "fails", True), lambda: setattr(gate, "fails", False)),
            (served.stop, served.start),
        ):
            away()
            silent = re.compile(r"^No answer since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\. Trying again\.$")
            expect(page.locator("#state")).to_have_text(silent, timeout=PATIENCE)
            expect(page.locator("body")).to_have_class("stale")
            expect(page.locator("h1")).to_have_text("Overview")
            back()
            expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
            expect(page.locator("body")).not_to_have_class("stale")


@pytest.mark.storm
def test_a_page_that_is_paused_or_hidden_asks_nothing(browser: Browser, served, outbox, gate):
    with visiting(browser, served.url) as visitor:
        page = visitor.goes()
        expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text(re.compile(r"^Paused, as of "))
        assert eventually(lambda: "outbox-dashboard" not in {each.name for each in threading.enumerate()})
        paused = gate.looks
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        assert eventually(lambda: gate.looks > paused)
        page.evaluate("""() => {
            Object.defineProperty(document, "hidden", { value: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
        assert eventually(lambda: "outbox-dashboard" not in {each.name for each in threading.enumerate()})


@pytest.mark.storm
@pytest.mark.parametrize("hold", ["hover", "focus", "selection", "details"])
def test_nothing_moves_under_a_person_s_hand(browser: Browser, served, outbox, hold):
    with visiting(browser, served.url) as visitor:
        page = visitor.goes()
        expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        section = page.locator("section[data-live=subscriptions]")
        link = section.get_by_role("link", name="relay")
        page.evaluate("window.link = document.querySelector('section[data-live=subscriptions] a')")
        if hold == "hover":
            link.hover()
        elif hold == "focus":
            page.keyboard.press("Tab")
            link.focus()
        elif hold == "selection":
            page.evaluate("getSelection().selectAllChildren(window.link)")
        else:
            page.evaluate("document.querySelector('section[data-live=subscriptions] details').open = true")
        write(outbox, 6)
        expect(page.locator("#state")).to_have_text(re.compile("Newer values wait"), timeout=PATIENCE)
        assert page.evaluate("window.link.isConnected")
        expect(section).to_contain_text(backlog(1))
        page.mouse.move(1, 1)
        page.evaluate("""() => {
            document.activeElement.blur();
            getSelection().removeAllRanges();
            document.querySelectorAll("details").forEach((each) => { each.open = false; });
        }""")
        expect(section).to_contain_text(backlog(7), timeout=PATIENCE)


@pytest.mark.storm
def test_what_is_in_the_middle_of_a_page_stays_there_when_a_part_above_grows(browser: Browser, served, outbox):
    with visiting(browser, served.url, viewport={"width": 800, "height": 300}) as visitor:
        page = visitor.goes()
        expect(page.locator("#state")).to_have_text(LIVE, timeout=PATIENCE)
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        place = "document.querySelector('h2#log-title').getBoundingClientRect().top"
        before = page.evaluate(place)
        for number in range(5):
            outbox.admin.create(f"audit-{number}", destination="nats://h:4222")
        expect(page.locator("section[data-live=subscriptions]")).to_contain_text("audit-4", timeout=PATIENCE)

        assert abs(page.evaluate(place) - before) < 2

"""The ways into a dashboard, in a browser: a login, below any prefix, and several databases."""

import pytest
from playwright.sync_api import Browser, expect

from outbox import Outbox
from outbox.dashboard import Access, app
from outbox.dashboard.logins import Door, UserFile, behind
from tests.support.browsers import PREFIXES, site, visiting

pytestmark = pytest.mark.storm


@pytest.fixture
def outbox(sqlite_engine) -> Outbox:
    """An outbox."""
    return Outbox(sqlite_engine)


@pytest.mark.parametrize(("way", "javascript"), [("alone", False), ("mounted", True), ("stripped", True)])
def test_a_person_logs_in_and_stays_logged_in(browser: Browser, outbox, tmp_path, way, javascript):
    users = UserFile(tmp_path / "users")
    users.add("ines", {"see"}, "correct horse")
    door = Door(users=users)
    made = behind(door, app(outbox, access=door.access, machines=door.known))
    with site(made, way) as served, visiting(browser, served.url, java_script_enabled=javascript) as visitor:
        page = visitor.goes("decisions")
        expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
        failings = visitor.failings() if javascript else []
        page.get_by_label("Name").fill("ines")
        page.get_by_label("Password").fill("correct horse")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        page.get_by_role("link", name="Decisions").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Decisions")
        expect(page.locator("footer")).to_contain_text("You are ines.")

        assert (failings, visitor.complaints, visitor.refused()) == ([], [], [])


def test_a_wrong_password_is_told_and_lets_nobody_in(browser: Browser, outbox, tmp_path, monkeypatch):
    monkeypatch.setattr("outbox.dashboard.logins._PAUSE_SECONDS", 0.0)
    users = UserFile(tmp_path / "users")
    users.add("ines", {"see"}, "correct horse")
    door = Door(users=users)
    made = behind(door, app(outbox, access=door.access, machines=door.known))
    with site(made) as served, visiting(browser, served.url) as visitor:
        page = visitor.goes("login")
        page.get_by_label("Name").fill("ines")
        page.get_by_label("Password").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_have_text("Name or password is wrong.")
        failings = visitor.failings()
        visitor.goes("")

        expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
        assert failings == []


@pytest.mark.parametrize("way", PREFIXES)
def test_each_of_several_databases_is_live_below_its_name(browser: Browser, outbox, way):
    made = app({"shop": outbox, "depot": outbox}, access=lambda _: Access(user="ada", may={"see"}))
    with site(made, way) as served, visiting(browser, served.url) as visitor:
        page = visitor.goes()
        failings = visitor.failings()
        page.get_by_role("link", name="depot").click()
        expect(page.locator("#state")).to_contain_text("Live, as of", timeout=60_000)
        failings += visitor.failings()
        page.get_by_role("link", name="Parked").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Parked messages")

        assert (failings, visitor.complaints, visitor.refused()) == ([], [], [])

"""Decisions in a browser: from a dead letter to its delivery, bodies of strangers, and forms of other sites."""

import re
import shutil
from collections.abc import Iterator
from io import BytesIO

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from outbox import Outbox, create_engine
from outbox.dashboard import Access, app
from tests.support.browsers import Site, Visitor, site, visiting
from tests.support.furnished import BODIES, NUMBERS, SCRIPT, Poison, relayed
from tests.support.pages import TOP

#: Where the story puts its pictures; those of the documentation are copies: cp build/dashboard/* docs/img/
PICTURES, PUBLISHED = TOP / "build" / "dashboard", TOP / "docs" / "img"
#: What a picture shows from its top, without the database of a test.
_WITHOUT_PLACES = """() => {
    scrollTo(0, 0);
    document.querySelectorAll("code bdi").forEach((each) => {
        each.textContent = each.textContent.replace(/ --database \\S+/, "");
    });
}"""
SIZE = {"width": 1000, "height": 740}


@pytest.fixture
def poison() -> Poison:
    """A destination that refuses orders."""
    return Poison()


@pytest.fixture
def outbox(folder, sqlite_template, poison) -> Iterator[Outbox]:
    """An outbox after an outage: payments were delivered, orders are dead letters."""
    shutil.copy(sqlite_template, "shop.db")
    engine = create_engine("sqlite:///shop.db")
    found = Outbox(engine)
    with found.begin() as session:
        for number in range(1, 9):
            found.send(session, "payments", b"{}", key=f"payment-{number}")
        for number in range(1, 4):
            body = NUMBERS.encode()
            found.send(session, "orders", body, key=f"order-{number}", content_type="application/json")
        found.send(session, "orders", b"{}", key="order-2")
    relayed(found, poison)
    yield found
    engine.dispose()


def served(outbox: Outbox, *may: str) -> Iterator[Site]:
    with site(app(outbox, access=lambda _: Access(user="ines", may={"see", *may}))) as found:
        yield found


@pytest.fixture
def shop(outbox) -> Iterator[Site]:
    """The dashboard of a person who may replay, and nothing else."""
    yield from served(outbox, "replay")


@pytest.fixture
def reading(outbox) -> Iterator[Site]:
    """The dashboard of a person who may read bodies."""
    yield from served(outbox, "bodies")


def picture(visitor: Visitor, name: str) -> None:
    """Keep what the person sees, in few colours."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    visitor.page.mouse.move(1, 1)
    visitor.page.evaluate(_WITHOUT_PLACES)
    image = Image.open(BytesIO(visitor.page.screenshot()))
    image.convert("RGB").quantize(64).save(PICTURES / f"dashboard-{name}.png", optimize=True)


def decided(outbox: Outbox) -> list[tuple[str, str, str | None, int | None]]:
    return [(each.by, each.verb, each.reason, each.count) for each in outbox.admin.decisions()]


def dialog_of(page: Page, title: str) -> None:
    """Wait for a dialog."""
    expect(page.get_by_role("dialog", name=title)).to_be_visible()


@pytest.mark.smoke("the one story in a browser that the quick tier plays")
def test_from_a_dead_letter_of_an_outage_to_replay_and_delivered(browser: Browser, shop, outbox, poison):
    with visiting(browser, shop.url, viewport=SIZE) as visitor:
        page = visitor.goes()
        expect(page.locator(".finding").first).to_contain_text("3 dead letters")
        picture(visitor, "overview")
        page.get_by_role("link", name="3", exact=True).first.click()
        page.get_by_role("row", name=re.compile("order-2")).get_by_role("link").first.click()
        expect(page.get_by_role("button", name="Discard")).to_have_count(0)
        poison.mended = True
        page.get_by_role("button", name="Replay").click()
        dialog_of(page, "Replay 1 message?")
        expect(page.get_by_role("dialog")).to_contain_text("1 message")
        page.get_by_label("Reason").fill("the currency is known again")
        picture(visitor, "rehearsal")
        page.get_by_role("dialog").get_by_role("button", name="Replay").click()
        dialog_of(page, "Decided")
        relayed(outbox, poison)
        page.reload()
        expect(page.locator("table .badge").first).to_have_text("passed")
        picture(visitor, "message")

        assert poison.bodies[-2:] == [NUMBERS.encode(), b"{}"]
        assert decided(outbox) == [("ines", "replay", "the currency is known again", 1)]
        assert all((PUBLISHED / each.name).is_file() for each in PICTURES.glob("*.png"))
        assert (visitor.complaints, visitor.refused()) == ([], [])


@pytest.mark.storm
def test_whoever_may_only_replay_is_refused_a_discard_that_the_page_does_not_offer(browser: Browser, shop, outbox):
    with visiting(browser, shop.url) as visitor:
        page = visitor.goes("parked?name=relay&state=dead")
        page.get_by_role("checkbox").first.check()
        page.get_by_role("button", name="Replay selected").evaluate("each => { each.value = 'discard'; }")
        page.get_by_role("button", name="Replay selected").click()

        expect(page.get_by_role("dialog")).to_contain_text("ines has not the right discard")
        assert decided(outbox) == []


@pytest.mark.storm
def test_every_column_of_a_list_is_seen_without_scrolling(browser: Browser, shop, outbox):
    outbox.admin.replay(9, by="ann", reason="the currency is known again")
    too_wide = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.ariaLabel)"
    with visiting(browser, shop.url, viewport={"width": 1200, "height": 740}) as visitor:
        paths = ("", "parked", "workers", "decisions", "s/relay", "m/9")
        found = {path: visitor.goes(path).locator(".scroll").evaluate_all(too_wide) for path in paths}

    assert found == {path: [] for path in paths}


@pytest.mark.storm
def test_the_same_story_needs_no_javascript(browser: Browser, shop, outbox, poison):
    poison.mended = True
    with visiting(browser, shop.url, java_script_enabled=False) as visitor:
        page = visitor.goes("k?key=order-2")
        page.get_by_role("button", name="Replay the head").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Replay 1 message?")
        page.get_by_label("Reason").fill("mended")
        page.get_by_role("button", name="Replay").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Decided")
        relayed(outbox, poison)
        page.get_by_role("link", name="Back").click()
        expect(page.locator("main")).to_contain_text("Nothing holds this key back")

        assert decided(outbox) == [("ines", "replay", "mended", 1)]
        assert visitor.complaints == []


@pytest.mark.storm
def test_a_decision_cannot_be_confirmed_twice(browser: Browser, shop, outbox):
    with visiting(browser, shop.url) as visitor:
        page = visitor.goes("k?key=order-1")
        page.get_by_role("button", name="Replay the head").click()
        dialog_of(page, "Replay 1 message?")
        form = page.locator("dialog form").evaluate(
            "each => [each.action, `${new URLSearchParams(new FormData(each))}`]"
        )
        page.get_by_role("dialog").get_by_role("button", name="Replay").click()
        dialog_of(page, "Decided")
        again = """async ([url, fields]) => {
            const headers = { "content-type": "application/x-www-form-urlencoded" };
            return (await fetch(url, { method: "POST", body: fields, headers })).status;
        }"""

        assert page.evaluate(again, form) == 403
        assert len(decided(outbox)) == 1


@pytest.mark.storm
def test_a_decision_without_an_answer_says_that_nobody_knows(browser: Browser, shop, outbox):
    with visiting(browser, shop.url) as visitor:
        page = visitor.goes("k?key=order-1")
        page.get_by_role("button", name="Replay the head").click()
        dialog_of(page, "Replay 1 message?")
        shop.stop()
        page.get_by_role("dialog").get_by_role("button", name="Replay").click()
        dialog_of(page, "The server does not answer")

        expect(page.get_by_role("dialog")).to_contain_text("Look at the decisions before you decide again.")
        assert decided(outbox) == []


@pytest.mark.storm
def test_a_form_of_another_site_decides_nothing_whatever_it_knows(browser: Browser, shop, outbox):
    with visiting(browser, shop.url) as visitor:
        page = visitor.goes("k?key=order-1")
        form = page.locator("form[data-dialog]").first.evaluate("each => each.outerHTML")
        page.goto("about:blank")
        stolen = re.sub(r'action="[^"]*"', f'action="{shop.url}decide"', form).replace("data-dialog", "")
        page.set_content(stolen)
        page.get_by_role("button").click()

        expect(page.get_by_role("alert")).to_contain_text("another site")
        assert decided(outbox) == []


@pytest.mark.storm
def test_no_other_site_can_put_a_page_into_a_frame(browser: Browser, shop):
    with visiting(browser, shop.url) as visitor:
        page = visitor.opened()
        page.goto("about:blank")
        page.set_content(f'<iframe src="{shop.url}"></iframe>')

        assert [each for each in page.frames if each.url.startswith(shop.url) and each.query_selector("h1")] == []


@pytest.mark.storm
@pytest.mark.parametrize("javascript", [True, False], ids=["script", "no-script"])
def test_bodies_of_strangers_are_read_and_do_nothing(browser: Browser, reading, outbox, poison, javascript):
    with outbox.begin() as session:
        for name, body in BODIES.items():
            outbox.send(session, "orders", body, key=name)
    relayed(outbox, poison)
    ids = {each.key: each.id for each in outbox.admin.parked(name="relay")}
    found = {}
    with visiting(browser, reading.url, java_script_enabled=javascript) as visitor:
        for name, body in BODIES.items():
            page = visitor.goes(f"m/{ids[name]}")
            if body:
                page.get_by_role("button", name="Show the body").click()
                shown = page.locator("pre.body")
                expect(shown).to_be_visible()
                found[name] = page.locator("p:has(+ pre.body)").inner_text(), shown.inner_text()

        assert {name: note for name, (note, _) in found.items()} == {
            "script": "text, 86 bytes", "numbers": "JSON, indented, 59 bytes",
            "large": "JSON, indented, the first 64 KiB of 4 MiB", "nul": "text, 106 bytes", "bytes": "bytes, 10 KiB",
        }  # fmt: skip
        texts = {name: text for name, (_, text) in found.items()}
        assert SCRIPT in texts["script"]
        assert "".join(texts["numbers"].split()) == "".join(NUMBERS.split())
        assert texts["nul"] == f"a\\x00b\\u202e{'c' * 100}"
        assert texts["bytes"].startswith("00000000  00 01 02 03")
        assert len(texts["large"]) < 70_000
        assert (visitor.complaints, visitor.refused()) == ([], [])

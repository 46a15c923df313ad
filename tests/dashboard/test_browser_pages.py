"""Every page in a real browser: light and dark, with and without JavaScript, below any prefix, for everybody."""

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from outbox import create_engine
from outbox.dashboard import Access, app
from tests.support.browsers import PREFIXES, Site, Visitor, site, visiting
from tests.support.furnished import SCRIPT, Furnished, furnished

EVERYTHING = frozenset({"see", "bodies", "replay", "discard", "pause", "decide"})
#: What is not there has a page as well, which a browser's console calls an error.
MISSING = ("m/999999", "nowhere", "s/nobody", "parked?state=sick")


def pages(found: Furnished) -> list[str]:
    """The addresses of all pages of an outbox."""
    transactions = [each.transaction_id for each in found.outbox.admin.half_transactions()]
    return [
        "", "s/relay", "s/audit?hours=24", "parked", "parked?name=relay&state=dead&topic=orders", "parked?topic=none",
        f"m/{found.ids['dead']}", f"m/{found.ids['behind']}", f"m/{found.ids['script']}", f"m/{found.ids['passed']}",
        "k?key=order-7", "k?key=nothing", "half", f"half/{transactions[0]}", "workers", "decisions", "doctor",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def outbox(tmp_path_factory, sqlite_template) -> Furnished:
    """An outbox with something of everything, which these tests do not change."""
    path = tmp_path_factory.mktemp("browser") / "outbox.sqlite3"
    shutil.copy(sqlite_template, path)
    return furnished(create_engine(f"sqlite:///{path}"))


@pytest.fixture(scope="module")
def sites(outbox) -> Iterator[dict[str, Site]]:
    """The dashboard below each prefix, for a person with all rights."""
    made = app(outbox.outbox, access=lambda _: Access(user="ada", may=EVERYTHING))
    with site(made, "alone") as alone, site(made, "mounted") as mounted, site(made, "stripped") as stripped:
        yield {"alone": alone, "mounted": mounted, "stripped": stripped}


#: Addresses and attributes of a page, what strangers may not bring, and the text.
_PARTS = """() => {
    const all = (selector) => [...document.querySelectorAll(selector)];
    return [
        ...all("a[href], form[action]").map((each) => each.href ?? each.action),
        ...all("main *").flatMap((each) => [...each.attributes].map((attribute) => attribute.value)),
        ...all("script:not([type=module]), style, [style], img, iframe, [onerror]").map((e) => `bad ${e.outerHTML}`),
        document.documentElement.innerText,
    ];
}"""
_BAD = re.compile(r"^javascript:|^bad |[\u202e\x00]")


def bad(page: Page) -> list[str]:
    """What no page may have: links that run scripts, scripts or styles of strangers, characters that hide something."""
    return [each[:200] for each in page.evaluate(_PARTS) if _BAD.search(each)]


def seen(visitor: Visitor, path: str) -> dict[str, object]:
    """Open a page; return whatever is wrong with it."""
    visitor.complaints.clear()
    page = visitor.goes(path)
    checks = {
        "heading": [] if page.locator("h1").count() == 1 else ["not one h1"],
        "style": [] if page.locator("main").evaluate("e => getComputedStyle(e).maxWidth") != "none" else ["none"],
        "complaints": list(visitor.complaints), "refused": visitor.refused(), "bad": bad(page),
    }  # fmt: skip
    return {name: what for name, what in checks.items() if what}


@pytest.mark.smoke("the only page that the quick tier looks at in a browser")
def test_a_page_with_hostile_text_in_it_has_no_fault(browser: Browser, sites, outbox):
    with visiting(browser, sites["alone"].url) as visitor:
        assert seen(visitor, f"m/{outbox.ids['script']}") == {}
        assert SCRIPT in visitor.page.locator("main").inner_text()


@pytest.mark.storm
@pytest.mark.parametrize("way", PREFIXES)
@pytest.mark.parametrize("javascript", [True, False], ids=["script", "no-script"])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_page_has_no_fault(browser: Browser, sites, outbox, way, javascript, colours):
    with visiting(browser, sites[way].url, java_script_enabled=javascript, color_scheme=colours) as visitor:
        found = {path: seen(visitor, path) for path in pages(outbox)}

    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.storm
@pytest.mark.parametrize(("colours", "rules"), [("light", ()), ("dark", ("color-contrast",))], ids=["light", "dark"])
def test_axe_finds_nothing_on_any_page(browser: Browser, sites, outbox, colours, rules):
    with visiting(browser, sites["alone"].url, color_scheme=colours) as visitor:
        found = {}
        for path in (*pages(outbox), *MISSING):
            visitor.goes(path)
            found[path] = visitor.failings(*rules)

    assert {path: failings for path, failings in found.items() if failings} == {}


@pytest.mark.storm
@pytest.mark.parametrize(("width", "size"), [(320, "100%"), (1280, "200%")])
def test_no_page_scrolls_sideways_when_it_is_narrow_or_its_letters_are_large(browser, sites, outbox, width, size):
    with visiting(browser, sites["alone"].url, viewport={"width": width, "height": 600}) as visitor:
        found = {}
        for path in (*pages(outbox), *MISSING):
            page = visitor.goes(path)
            page.evaluate("size => { document.documentElement.style.fontSize = size; }", size)
            found[path] = page.evaluate("document.documentElement.scrollWidth")

    assert {path: each for path, each in found.items() if each > width} == {}


@pytest.mark.storm
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_whatever_the_keyboard_reaches_shows_that_it_has_the_focus(browser: Browser, sites, outbox, colours):
    focused = """() => {
        const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
        const { tagName, outerHTML } = document.activeElement;
        return [tagName, parseFloat(outlineWidth) >= 2 && outlineStyle !== "none", outerHTML.slice(0, 100)];
    }"""
    with visiting(browser, sites["alone"].url, color_scheme=colours) as visitor:
        unseen, reached = list[str](), set[str]()
        for path in ("", "parked?name=relay&topic=orders", f"m/{outbox.ids['dead']}"):
            page = visitor.goes(path)
            for _ in range(60):
                page.keyboard.press("Tab")
                name, shows, html = page.evaluate(focused)
                if name == "BODY":
                    break
                reached.add(name)
                unseen += [] if shows else [html]

    assert unseen == []
    assert reached >= {"A", "BUTTON", "INPUT", "SELECT", "DIV", "SUMMARY"}

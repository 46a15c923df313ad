"""The page about the dashboard: its code mounts the dashboard into FastAPI, Litestar and Django."""

import httpx
import pytest
from litestar import Litestar
from starlette.testclient import TestClient

from outbox.dashboard.access import RIGHTS
from outbox.dashboard.site import WAYS
from tests.support.dashboards import headline, read
from tests.support.pages import TOP, run

PAGE = (TOP / "docs" / "dashboard.md").read_text()


def logged_in(app):
    """An application that has a session for each request."""

    async def with_session(scope, receive, send):
        await app({**scope, "session": {"user": "ines"}}, receive, send)

    return TestClient(with_session)


async def django(scope, receive, send):
    """What is not for the dashboard."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"Django"})


@pytest.fixture(scope="module")
def page(sqlite_template, tmp_path_factory):
    """What the code of the page defines."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "shop.db").write_bytes(sqlite_template.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield run(PAGE, "dashboard")


def test_the_dashboard_stands_in_a_wsgi_server(page):
    with httpx.Client(transport=httpx.WSGITransport(app=page["wsgi"]), base_url="http://localhost") as client:
        stranger, style = client.get("/"), client.get("/static/dashboard.css")

    assert (stranger.status_code, style.status_code) == (401, 200)


@pytest.mark.parametrize("framework", ["fastapi", "litestar", "django"])
def test_the_dashboard_is_a_part_of_an_application(page, framework):
    app = {
        "fastapi": page["api"],
        "litestar": page["below"]("/outbox", page["pages"], Litestar()),
        "django": page["below"]("/outbox", page["pages"], django),
    }[framework]

    answer, stranger = logged_in(app).get("/outbox"), TestClient(app).get("/outbox/parked")

    assert (answer.status_code, headline(answer), "ines" in answer.text) == (200, "Overview", True)
    assert (stranger.status_code, str(answer.url).endswith("/outbox/")) == (401, True)
    links = {each for each in read(answer.text).links if each.startswith(".") and "static" not in each}
    assert {logged_in(app).get(f"/outbox/{each}").status_code for each in links - {"./m", "./k", "./live"}} == {200}
    assert logged_in(app).get("/other").status_code == 404


def test_the_page_names_every_right_and_every_address():
    shown = {way.path.partition("{")[0].rstrip("/") for way in WAYS if way.method == "GET"} - {"", "m", "k", "s"}

    assert [each for each in RIGHTS if f"`{each}`" not in PAGE] == []
    assert [each for each in shown if f"`/{each}`" not in PAGE] == []

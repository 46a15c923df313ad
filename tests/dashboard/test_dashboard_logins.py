"""Logins of `outbox dashboard`: an address that counts once, users with passwords, and a proxy in a known place."""

import os
import re
import signal
import subprocess
import sys
from ipaddress import ip_network

import anyio
import httpx
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from outbox import Outbox
from outbox.cli import main
from outbox.dashboard import app
from outbox.dashboard.logins import Door, Proxy, UserFile, behind
from tests.support.command_line import outbox as run
from tests.support.command_line import the_tests_own_process
from tests.support.dashboards import form, headline, send


def browser(outbox, door, client=("testclient", 5)):
    """A browser in front of a door."""
    inner = app(outbox, access=door.access, machines=door.known)
    return TestClient(behind(door, inner), follow_redirects=False, client=client)


@pytest.fixture
def outbox(sqlite_engine) -> Outbox:
    """An outbox."""
    return Outbox(sqlite_engine)


@pytest.fixture
def users(tmp_path, monkeypatch) -> UserFile:
    """A file with one user."""
    monkeypatch.setattr("outbox.dashboard.logins._PAUSE_SECONDS", 0.0)
    users = UserFile(tmp_path / "users")
    users.add("ines", {"see", "replay"}, "correct horse")
    return users


def test_the_printed_address_lets_one_browser_in_once(outbox):
    door = Door()
    first, second = browser(outbox, door), browser(outbox, door)
    path = f"/login?once={door.one_time}"

    answers = [first.get("/"), second.get("/login?once=x"), first.get(path), first.get("/"), second.get(path)]

    assert [each.status_code for each in answers] == [401, 403, 303, 200, 403]
    assert answers[2].headers["location"] == "./"
    assert {"HttpOnly", "SameSite=strict"} <= {each.strip() for each in answers[2].headers["set-cookie"].split(";")}
    assert second.get("/").status_code == 401


def test_a_form_that_does_not_end_is_given_up(outbox, users, monkeypatch):
    monkeypatch.setattr("outbox.dashboard.visit._MOST_SECONDS", 0.1)

    async def endless():
        yield b"user="
        await anyio.sleep_forever()

    async def answer() -> httpx.Response:
        door = Door(users=users)
        server = httpx.ASGITransport(behind(door, app(outbox, access=door.access)))
        async with httpx.AsyncClient(transport=server, base_url="http://testserver") as client:
            return await client.post("/login", content=endless())

    answered = anyio.run(answer)

    assert (answered.status_code, "the form was not complete" in answered.text) == (400, True)


def test_a_user_logs_in_and_has_the_rights_of_the_file_until_the_line_goes(outbox, users, tmp_path):
    here = browser(outbox, Door(users=users))

    strange = here.get("/m/1")
    wrong = [
        here.post("/login", data={"user": name, "password": word}).status_code
        for name, word in (("ines", "wrong"), ("eve", "correct horse"), ("", ""))
    ]
    right = here.post("/login", data={"user": "ines", "password": "correct horse"})

    assert (strange.status_code, strange.headers["location"], wrong) == (303, "../login", [403, 403, 403])
    assert (right.status_code, headline(here.get("/")), "ines" in here.get("/").text) == (303, "Overview", True)
    foreign = {"origin": "https://evil.example"}
    again = here.post("/login", data={"user": "ines", "password": "correct horse"}, headers=foreign)
    assert again.status_code == 403
    (tmp_path / "users").write_text("")
    assert [here.get(path).status_code for path in ("/", "/healthz")] == [303, 401]


def test_a_session_ends_by_a_form_of_its_own_user_and_by_nothing_else(outbox, users):
    users.add("ben", {"see"}, "battery staple")
    door = Door(users=users)
    here, there = browser(outbox, door), browser(outbox, door)
    for each, name, password in ((here, "ines", "correct horse"), (there, "ben", "battery staple")):
        each.post("/login", data={"user": name, "password": password})
    leaving, of_ben = form(here, "/workers", "Log out"), form(there, "/", "Log out")
    cookies = dict(here.cookies)

    refused = [
        here.get("/logout"),
        here.post("/logout"),
        send(here, of_ben),
        send(here, leaving, {"origin": "https://evil.example"}),
        here.get("/"),
    ]
    left = send(here, leaving)
    after = [here.get("/"), send(here, leaving), there.get("/")]
    stolen = browser(outbox, door)
    stolen.cookies.update(cookies)

    assert [each.status_code for each in refused] == [405, 403, 403, 403, 200]
    assert (left.status_code, left.headers["location"], dict(here.cookies)) == (303, "login", {})
    assert [each.status_code for each in (*after, stolen.get("/"))] == [303, 303, 200, 303]


def test_after_a_one_time_address_a_log_out_leaves_nobody_in(outbox):
    door = Door()
    here = browser(outbox, door)
    here.get(f"/login?once={door.one_time}")

    left = send(here, form(here, "/", "Log out"))

    assert (left.status_code, "Start the dashboard again" in left.text) == (200, True)
    assert here.get("/").status_code == 401


def test_who_did_not_log_in_here_cannot_log_out_here(outbox):
    door = Door(proxy=Proxy("X-Remote-User", [ip_network("10.0.0.0/8")], {"see"}))

    page = browser(outbox, door, client=("10.1.2.3", 5)).get("/", headers={"X-Remote-User": "ines"})

    assert (page.status_code, "Log out" in page.text) == (200, False)


def test_a_header_counts_from_the_networks_of_the_proxy_alone(outbox):
    door = Door(proxy=Proxy("X-Remote-User", [ip_network("10.0.0.0/8")], {"see"}))

    def status(client, **headers):
        return browser(outbox, door, client=(client, 5)).get("/", headers=headers).status_code

    assert [
        status("10.1.2.3", **{"X-Remote-User": "ines"}),
        status("10.1.2.3"),
        status("11.1.2.3", **{"X-Remote-User": "ines"}),
        status("unix", **{"X-Remote-User": "ines"}),
    ] == [200, 401, 401, 401]


def test_a_password_is_asked_for_and_stored_by_scrypt(tmp_path):
    file = tmp_path / "users"
    arguments = ["dashboard", "--user-file", str(file), "--add-user", "ines", "--may", "see,replay"]

    with the_tests_own_process():
        ended = CliRunner().invoke(main, arguments, input="secret\nsecret\n")

    assert (ended.exit_code, ended.stderr.splitlines()[-1:]) == (0, ["ines may see, replay"])
    assert re.fullmatch(r"ines:replay,see:scrypt\$[\w+/=]+\$[\w+/=]+\n", file.read_text())
    assert UserFile(file).login("ines", "secret") == UserFile(file).access("ines")
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--add-user", "ines"], "--add-user needs --user-file PATH"),
        (["--trust-header", "X-User"], "--trust-header and --trust-from need each other"),
        (["--trust-header", "X-User", "--trust-from", "ten"], "'ten' is no address and no network"),
        (["--user-file", "none"], "No such file"),
        (["--listen", "8025"], "is no address with a port"),
        (["--listen", "192.0.2.1:1"], "give an address of this machine"),
    ],
)
def test_a_mistake_in_the_options_is_told(sqlite_engine, options, text):
    ended = run(sqlite_engine, "dashboard", *options)

    assert (ended.code, text in ended.err) == (2, True)


def test_a_mistake_in_the_file_of_users_is_told_with_its_line(sqlite_engine, tmp_path):
    (tmp_path / "users").write_text("# people\nines:see,repla:x\n")

    ended = run(sqlite_engine, "dashboard", "--user-file", str(tmp_path / "users"))

    text = "users, line 2: write name:right,right:password; may: repla is no right"
    assert (ended.code, text in ended.err) == (2, True)


def test_without_the_extra_the_error_names_it(sqlite_engine, monkeypatch):
    for name in [each for each in sys.modules if each.startswith("outbox.dashboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)

    ended = run(sqlite_engine, "dashboard")

    assert (ended.code, "pip install 'outbox-log[dashboard]'" in ended.err) == (2, True)


@pytest.mark.smoke("the one start of the server")
def test_the_command_serves_until_a_signal(sqlite_engine):
    command = [sys.executable, "-m", "outbox", "dashboard", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "OUTBOX_DATABASE": str(sqlite_engine.url)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("open ").strip()
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            answer = client.get(address)
        process.send_signal(signal.SIGTERM)
        ended = process.wait(60)

    assert (headline(answer), str(answer.url).endswith("/"), ended) == ("Overview", True, 0)

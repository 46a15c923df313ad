"""Probes say whether a command lives and works, by HTTP, by a file and to systemd; no client holds them up."""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from urllib.error import HTTPError
from urllib.request import urlopen

import click
import pytest

from outbox import Look, SchemaError, SubscriptionError, create_engine
from outbox.admin.gauges import Looks
from outbox.cli.http import MOST_CONNECTIONS, serving
from outbox.cli.probes import Address, Probes, Pulse, run_probed
from outbox.relay.supervisor import Health, Supervisor
from outbox.runtime.stop import Stop
from outbox.store.database import Database
from outbox.telemetry.events import EVERYWHERE, Beat, DatabaseAway, Event
from outbox.worker.settings import Until
from tests.support.waiting import eventually

DATABASE = Database(create_engine("sqlite:///never-opened"))
BEAT = Beat(database=DATABASE, seconds=3600)
AWAY = DatabaseAway(database=DATABASE, error="connection refused", seconds=1)


class Telling:
    """Work that tells an event at its beginning, if there is one, and rests until it is stopped."""

    stopping = False

    def __init__(self, name: str, event: Event | None) -> None:
        self.name = name
        self._event = event

    def work(self, until: Until, stop: Stop) -> None:
        """Tell, and rest."""
        if self._event is not None:
            EVERYWHERE.tell(self._event)
        while stop.rest(60):
            pass

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def at_work(*works: Telling) -> Iterator[Supervisor]:
    """A supervisor that is told of signs of life."""
    supervisor = Supervisor(works)
    EVERYWHERE.listen(supervisor.told)
    supervisor.start()
    try:
        yield supervisor
    finally:
        EVERYWHERE.unlisten(supervisor.told)
        supervisor.stop()
        supervisor.join(60)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve probes about works; the URL."""
    with ExitStack() as open:

        def serve(*works: Telling) -> str:
            supervisor = open.enter_context(at_work(*works))
            return f"http://127.0.0.1:{open.enter_context(serving('127.0.0.1', 0, supervisor, Looks({})))}"

        yield serve


def ask(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_a_work_without_a_database_lives_and_is_not_ready(serve):
    url = serve(Telling("well", BEAT), Telling("away", AWAY))

    assert eventually(lambda: ask(f"{url}/readyz") == (503, "away: connection refused\n"))
    assert ask(f"{url}/livez") == (200, "ok\n")
    assert ask(f"{url}/livez?verbose=1") == (200, "ok\n")
    assert ask(f"{url}/nothing") == (404, "try /livez /readyz /metrics /status\n")


def test_several_databases_have_a_status_each_or_the_reason_why_not():
    at = datetime(2026, 1, 1, tzinfo=UTC)

    def refuse() -> Look:
        raise SchemaError("there are no tables")

    looks = Looks({"db/eu": lambda: Look(at=at), "db/us": refuse})
    with at_work(Telling("well", BEAT)) as supervisor, serving("127.0.0.1", 0, supervisor, looks) as port:
        code, body = ask(f"http://127.0.0.1:{port}/status")

    frame = {"version": 1, "more": False}
    assert (code, json.loads(body)) == (503, {
        "db/eu": {**frame, "at": at.isoformat(), "findings": [], "subscriptions": [], "log": None},
        "db/us": {**frame, "error": "there are no tables"},
    })  # fmt: skip


def test_a_route_that_fails_answers_with_one_line(caplog):
    class Odd:
        @property
        def health(self) -> list[Health]:
            raise ValueError("a field is missing")

    with serving("127.0.0.1", 0, Odd(), Looks({})) as port:  # type: ignore[arg-type]
        answers = [ask(f"http://127.0.0.1:{port}/{route}") for route in ("readyz", "status")]

    assert answers == [(500, "unexpected ValueError\n"), (200, "")]
    assert "/readyz failed" in caplog.text


def test_a_request_without_an_address_is_answered(serve):
    with socket.create_connection(("127.0.0.1", int(serve(Telling("well", BEAT)).rpartition(":")[2])), 60) as client:
        client.sendall(b"GET http://[bad HTTP/1.0\r\n\r\n")
        answer = client.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.0 400 ")


def test_before_the_works_begin_the_process_lives_and_is_not_ready():
    with serving("127.0.0.1", 0, Supervisor([Telling("well", BEAT)]), Looks({})) as port:
        url = f"http://127.0.0.1:{port}"
        assert (ask(f"{url}/livez"), ask(f"{url}/readyz")) == ((200, "ok\n"), (503, "not begun yet\n"))


def test_a_work_whose_thread_hangs_is_stuck(serve, monkeypatch):
    monkeypatch.setattr("outbox.relay.supervisor.STUCK_SECONDS", 0.1)
    url = serve(Telling("well", BEAT), Telling("hangs", None))

    assert eventually(lambda: ask(f"{url}/livez") == (503, "stuck: hangs\n"))
    assert ask(f"{url}/readyz") == (503, "hangs: stuck\n")


def test_without_the_extra_the_answer_names_it(serve, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "outbox.telemetry.prometheus", raising=False)
    url = serve(Telling("well", BEAT))

    assert ask(f"{url}/metrics") == (501, "metrics need an extra: pip install 'outbox-log[metrics]'\n")


def test_silent_clients_hold_nobody_up(serve, monkeypatch):
    url = serve(Telling("well", BEAT))
    port = int(url.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2 * MOST_CONNECTIONS)]

    assert ask(f"{url}/livez") == (200, "ok\n")
    # The oldest were cut off for it; the others are when their time is over.
    assert silent[0].recv(1) == b""
    monkeypatch.setattr("outbox.cli.http.MOST_SECONDS", 0.1)
    assert [each.recv(1) for each in silent] == [b""] * len(silent)
    for each in silent:
        each.close()


@pytest.mark.parametrize(
    ("given", "meant"), [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::1]:0", ("::1", 0)), ("db:1", ("db", 1))]
)
def test_an_address_is_a_host_and_a_port(given, meant):
    assert Address()(given) == meant


@pytest.mark.parametrize("given", ["8080", ":8080", "host", "::1:80", "host:99999", "host:-1", "http://a:80", "a b:1"])
def test_another_address_is_refused(given):
    with pytest.raises(click.BadParameter, match=r"is no address with a port up to 65535; write 127\.0\.0\.1:8080"):
        Address()(given)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken, at_work(Telling("well", BEAT)) as supervisor:
        port = taken.getsockname()[1]
        with pytest.raises(click.UsageError, match=f"--http 127.0.0.1:{port}: Address already in use; give an address"):
            serving("127.0.0.1", port, supervisor, Looks({})).__enter__()


class Ill:
    """A supervisor with a health of its own."""

    def __init__(self) -> None:
        self.health = [Health(name="relay", stuck=False, trouble="connection refused")]


def test_a_work_that_gets_stuck_is_told_in_the_log_once_and_that_it_goes_on(caplog):
    """Otherwise the log would say nothing about the restart of a process whose database hangs."""
    caplog.set_level("INFO", "outbox")
    supervisor = Ill()
    pulse = Pulse(supervisor, None, {})  # type: ignore[arg-type]
    for stuck in (False, True, True, False, True):
        supervisor.health = [
            Health(name="relay", stuck=stuck, trouble=None),
            Health(name="b", stuck=False, trouble=None),
        ]
        pulse.beat()

    line = "relay is stuck: its thread has shown no sign of life for 60 s; start the process again"
    assert [record.getMessage() for record in caplog.records] == [line, "relay goes on", line]


class Refused(Telling):
    """Work that ends with an error."""

    def work(self, until: Until, stop: Stop) -> None:
        """Raise."""
        raise SubscriptionError("relay stands for nats://a:4222")


def test_a_refused_work_ends_its_command_with_the_reason_alone(caplog):
    """A line before the reason would say that another start mends it."""
    supervisor = Supervisor([Refused("relay", None)], pause=None)

    with pytest.raises(SubscriptionError, match="stands for nats://a:4222"):
        run_probed(supervisor, Probes(http=None, heartbeat_file=None), {})

    assert [record.getMessage() for record in caplog.records] == []


def test_a_work_that_has_ended_beside_others_is_told_with_its_reason(caplog):
    supervisor = Supervisor([Refused("a", None), Telling("b", BEAT)], pause=None)
    pulse = Pulse(supervisor, None, {})
    supervisor.start()
    assert eventually(lambda: supervisor.health[0].ended)

    pulse.beat()
    supervisor.stop()
    supervisor.join(60)

    told = [record.getMessage() for record in caplog.records]
    assert told == ["a has ended: relay stands for nats://a:4222; start the process again"]


def test_a_process_whose_work_stays_stuck_ends(caplog, monkeypatch):
    """A process manager starts a new one. A suspended process has looked at nothing, and gives up nothing."""
    monkeypatch.setattr("outbox.relay.supervisor.STUCK_SECONDS", -1.0)
    monkeypatch.setattr("outbox.cli.probes._HOPELESS", 0)
    supervisor = Supervisor([Telling("well", BEAT), Telling("hangs", None)], drain=timedelta(0))

    healthy = run_probed(supervisor, Probes(http=None, heartbeat_file=None), {})

    told = [record.getMessage() for record in caplog.records if record.outbox["event"] == "given_up"]
    assert (healthy, told) == (
        False,
        ["hangs is still stuck and is given up: this process stops, and ends with code 4"],
    )


def test_only_looks_in_a_row_count_for_giving_a_work_up(monkeypatch):
    monkeypatch.setattr("outbox.cli.probes._HOPELESS", 2)
    supervisor = Ill()
    pulse = Pulse(supervisor, None, {})  # type: ignore[arg-type]
    seen = []
    for stuck in (True, True, False, True, True, True):
        supervisor.health = [Health(name="relay", stuck=stuck, trouble=None)]
        pulse.beat()
        seen.append(pulse.hopeless)

    assert seen == [False, False, False, False, False, True]


def test_systemd_learns_what_a_work_waits_for_that_it_is_ready_and_lives(tmp_path):
    path, file = tmp_path / "notify", tmp_path / "heartbeat"
    supervisor = Ill()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.setblocking(False)
        pulse = Pulse(supervisor, file, {"NOTIFY_SOCKET": str(path)})  # type: ignore[arg-type]
        pulse.beat()
        supervisor.health = [Health(name="relay", stuck=False, trouble=None)]
        pulse.beat()
        file.unlink()
        supervisor.health = [Health(name="relay", stuck=True, trouble=None)]
        pulse.beat()

        told = [systemd.recv(1000).decode() for _ in range(2)]
        with pytest.raises(BlockingIOError):
            systemd.recv(1000)

    assert told == [
        "EXTEND_TIMEOUT_USEC=60000000\nWATCHDOG=1\nSTATUS=relay: connection refused",
        "READY=1\nWATCHDOG=1\nSTATUS=working, or standing by",
    ]
    assert not file.exists()

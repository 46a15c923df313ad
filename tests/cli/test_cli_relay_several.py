"""`outbox relay` with several databases or schemas: one process, a relay for each, none waits for another."""

import json
import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from outbox import migrate
from outbox.store.label import label_of
from tests.cli.test_cli_relay import bodies
from tests.support.command_line import outbox
from tests.support.programs import Program
from tests.support.servers.proxy import TcpProxy
from tests.support.several import behind, new_database, new_databases, send, url_of
from tests.support.waiting import eventually

QUICK = ["--lease", "2s"]


class Process:
    """The relay as a process of its own; what it says is collected in a file."""

    def __init__(self, urls: list[str], log: Path, *arguments: str, **environment: str) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = Program(
                ["-m", "outbox", "relay", *arguments],
                environment={"OUTBOX_DATABASE": "\n".join(urls), **environment},
                stderr=stderr,
            )

    @property
    def said(self) -> list[str]:
        """The lines so far."""
        return self._log.read_text().splitlines()

    def kill(self) -> None:
        """SIGKILL; harmless when it is gone."""
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self._process.send_signal(number)

    def ended(self, number: signal.Signals) -> int:
        """The exit code after a signal."""
        self.send(number)
        return self._process.wait(60)


@contextmanager
def running(urls, log, *arguments, **environment):
    process = Process(urls, log, *arguments, **environment)
    try:
        yield process
    finally:
        process.kill()
        print(*process.said, sep="\n")


def leases(engine, schema: str = "public") -> list[str | None]:
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT owner FROM {schema}.outbox_lease")).scalars())


@pytest.fixture
def two(postgres, pg_template):
    """Two databases on one server."""
    with new_databases(postgres, pg_template, 2) as engines:
        yield engines


def test_every_database_is_served_and_drained(two, tmp_path):
    out, urls = tmp_path / "out", [url_of(engine) for engine in two]
    places = [label_of(engine.url) for engine in two]
    with running(urls, tmp_path / "log", "--to", f"file://{out}") as process:
        for engine in two:
            send(engine, f"to {label_of(engine.url)}")
        assert eventually(lambda: sorted(bodies(out)) == sorted(f"to {place}" for place in places))

        code = process.ended(signal.SIGTERM)

    beginning = f"relay: all topics to file://{out}, from the earliest message on"
    assert code == 0
    assert sorted(process.said[:2]) == sorted(f"{place}: {beginning}" for place in places)
    assert process.said[2:] == [f"{place}: relay: stopped; 1 sent" for place in places]
    assert [outbox(engine, "status", "--json").json["subscriptions"][0]["lease_until"] for engine in two] == [None] * 2


def test_every_schema_of_every_database_is_served(postgres, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    tenants = ("tenant_a", "tenant_b")
    with ExitStack() as stack:
        engines = [stack.enter_context(new_database(postgres, "template1", adopted=False)) for _ in range(2)]
        for engine in engines:
            for tenant in tenants:
                migrate.upgrade(engine, tenant)
        urls = [url_of(engine) for engine in engines]
        environment = {"OUTBOX_SCHEMA": " ".join(tenants)}
        with running(urls, log, "--to", f"file://{out}", *QUICK, **environment) as process:
            wanted = [(engine, tenant) for engine in engines for tenant in tenants]
            for engine, tenant in wanted:
                send(engine, label_of(engine.url, tenant), schema=tenant)
            places = sorted(label_of(engine.url, tenant) for engine, tenant in wanted)

            assert eventually(lambda: sorted(bodies(out)) == places)
            assert process.ended(signal.SIGINT) == 0


@pytest.mark.storm
def test_another_process_takes_over_all_that_a_killed_one_served(two, tmp_path):
    out, urls = tmp_path / "out", [url_of(engine) for engine in two]
    with (
        running(urls, tmp_path / "first", "--to", f"file://{out}", *QUICK) as first,
        running(urls, tmp_path / "second", "--to", f"file://{out}", *QUICK) as second,
    ):
        for engine in two:
            send(engine, "before")
        assert eventually(lambda: len(bodies(out)) == 2)

        first.kill()
        for engine in two:
            send(engine, "after")

        assert eventually(lambda: {*bodies(out)} == {"before", "after"})
        assert eventually(lambda: bodies(out).count("after") == 2)
        assert second.ended(signal.SIGTERM) == 0


@pytest.mark.storm
def test_a_database_that_is_away_delays_no_other_and_is_served_when_it_is_back(two, postgres, tmp_path):
    """From the start on, and again in the middle; the process stays the same.

    What was sent but not settled when the network failed comes again, so only first copies are compared.
    """
    out = tmp_path / "out"
    well, away = two

    def came() -> list[str]:
        return list(dict.fromkeys(bodies(out)))

    with TcpProxy("127.0.0.1", postgres.port) as proxy, behind(proxy, away) as far:
        proxy.refuse()
        urls = [url_of(far), url_of(well)]
        with running(urls, tmp_path / "log", "--to", f"file://{out}", *QUICK) as process:
            send(well, "1")
            send(away, "away 1")
            assert eventually(lambda: came() == ["1"])
            proxy.pass_through()
            assert eventually(lambda: came() == ["1", "away 1"])

            proxy.black_hole()
            send(away, "away 2")
            send(well, "2")
            assert eventually(lambda: came() == ["1", "away 1", "2"])
            proxy.reset_all()
            proxy.pass_through()
            assert eventually(lambda: came() == ["1", "away 1", "2", "away 2"])
            code = process.ended(signal.SIGTERM)

    place = label_of(far.url)
    problems = [line.partition("error")[2].strip() for line in process.said if " error " in line]
    assert (code, len(problems)) == (0, 1)
    assert problems[0].startswith(f"{place}: OperationalError: connection failed")


def test_what_is_missing_is_said_and_made_while_it_runs(sqlite_engine, tmp_path):
    out, new = tmp_path / "out", tmp_path / "new.db"
    urls = [f"sqlite:///{new}", url_of(sqlite_engine)]
    with running(urls, tmp_path / "log", "--to", f"file://{out}") as process:
        send(sqlite_engine, "1")
        assert eventually(lambda: bodies(out) == ["1"])
        assert eventually(lambda: f"{new}: there is no file {new}" in "\n".join(process.said))

        assert outbox(urls[0], "db", "upgrade").code == 0

        assert eventually(lambda: any(f"{new}: relay: all topics" in line for line in process.said))
        assert process.ended(signal.SIGTERM) == 0


@pytest.mark.storm
def test_a_database_that_does_not_answer_cannot_hold_up_the_end(two, postgres, tmp_path):
    """The other is drained; the exit code says that not all were."""
    well, away = two
    with TcpProxy("127.0.0.1", postgres.port) as proxy, behind(proxy, away) as far:
        urls = [url_of(far), url_of(well)]
        with running(urls, tmp_path / "log", "--to", f"file://{tmp_path / 'out'}", *QUICK) as process:
            assert eventually(lambda: leases(well) != [None] and leases(away) != [None])
            proxy.black_hole()

            code = process.ended(signal.SIGTERM)

    assert (code, leases(well)) == (4, [None])
    assert f"{label_of(far.url)}: not finished 7 s after it was to stop" in "\n".join(process.said)


@pytest.mark.storm
def test_until_empty_finishes_the_others_before_it_says_who_gave_up(two, tmp_path):
    out = tmp_path / "out"
    well, held = two
    for engine in two:
        send(engine, "1")
    with held.begin() as connection:
        connection.execute(
            text("UPDATE outbox_lease SET owner = 'somebody', epoch = 1, lease_until = now() + interval '1 hour'")
        )

    ended = outbox(
        f"{url_of(well)} {url_of(held)}", "relay", "--to", f"file://{out}", "--until-empty", "--give-up-after", "10s"
    )

    lines = ended.err.splitlines()
    assert (ended.code, bodies(out)) == (4, ["1"])
    assert f"{label_of(well.url)}: relay: 1 sent" in lines
    gave_up = "gave up after 10 s: worker somebody holds the lease of relay"
    assert f"Error: {label_of(held.url)}: {gave_up}" in lines


@pytest.mark.parametrize(
    ("other", "code", "says"),
    [
        ("postgresql://ann:c4nary@localhost:1/shop", 3, "localhost:1/shop: the database cannot be reached"),
        ("sqlite:////nonexistent/x.db", 3, "/nonexistent/x.db: there is no file /nonexistent/x.db"),
        ("sqlite:///{empty}", 1, "{empty}: the outbox tables are not there; run: outbox db upgrade"),
    ],
)
def test_until_empty_says_which_database_failed(sqlite_engine, tmp_path, other, code, says):
    out, empty = tmp_path / "out", tmp_path / "empty.db"
    empty.touch()
    send(sqlite_engine, "1")

    urls = f"{other.format(empty=empty)} {url_of(sqlite_engine)}"
    ended = outbox(urls, "relay", "--to", f"file://{out}", "--until-empty")

    assert (ended.code, bodies(out), f"Error: {says.format(empty=empty)}" in ended.err) == (code, ["1"], True)
    assert "c4nary" not in ended.err


@pytest.mark.storm
def test_until_empty_gives_a_silent_database_up(pg_engine, sqlite_engine, postgres, tmp_path):
    out = tmp_path / "out"
    send(sqlite_engine, "1")
    with TcpProxy("127.0.0.1", postgres.port) as proxy, behind(proxy, pg_engine) as far:
        proxy.cut_after(10**9, "to_client")
        urls = f"{url_of(far)} {url_of(sqlite_engine)}"
        arguments = ["--to", f"file://{out}", "--until-empty", "--give-up-after", "10s", *QUICK]
        proxy.black_hole()
        ended = outbox(urls, "relay", *arguments)

    assert (ended.code in (3, 4), bodies(out)) == (True, ["1"])


def test_databases_may_be_given_as_options_or_one_a_line_of_a_file(sqlite_engine, pg_engine, tmp_path):
    file = tmp_path / "urls"
    file.write_text(f"{url_of(sqlite_engine)}\n\n{url_of(pg_engine)}\n")
    relay = ["relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty"]
    bare = pg_engine.url.set(password=None).render_as_string()

    from_file = outbox(None, *relay, "--database-file", str(file))
    as_options = outbox(
        None, *relay, "--database", url_of(sqlite_engine), "--database", bare, PGPASSWORD=pg_engine.url.password or ""
    )

    said = sorted(f"{label_of(engine.url)}: relay: 0 sent" for engine in (sqlite_engine, pg_engine))
    ends = [sorted(line for line in each.err.splitlines() if "sent" in line) for each in (from_file, as_options)]
    assert ends == [said, said]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_the_log_say_which_database_and_never_a_password(sqlite_engine, tmp_path, form):
    urls = f"postgresql://ann:c4nary@localhost:1/shop {url_of(sqlite_engine)}"
    send(sqlite_engine, "1")
    with running([urls], tmp_path / "log", "--to", "stdout:", "-vv", "--log-format", form) as process:
        begins = f"{label_of(sqlite_engine.url)}: subscription relay: lease taken, epoch 1"
        assert eventually(lambda: begins in "\n".join(process.said))
        assert eventually(lambda: "localhost:1/shop: OperationalError" in "\n".join(process.said))
        code = process.ended(signal.SIGTERM)

    logged = [json.loads(line)["message"] for line in process.said if line.startswith("{")]
    assert (code, "c4nary" in "\n".join(process.said)) == (0, False)
    assert (begins in logged) == (form == "json")


MISTAKES = [
    (["status"], "sqlite:///a.db sqlite:///b.db", "about one database, not 2"),
    (["db", "upgrade"], "sqlite:///a.db sqlite:///b.db", "about one database, not 2"),
    (["status", "--schema", "a", "--schema", "b"], "postgresql://localhost:1/x", "about one database, not 2"),
    (["relay", "--to", "stdout:"], "sqlite:///a.db sqlite:///a.db", "a.db is given twice"),
    (["relay", "--to", "stdout:"], "sqlite:///a.db mysql://localhost/x", "no outbox lives in mysql"),
    (["relay", "--to", "stdout:"], "sqlite:///a.db postgresql://localhost:port/x", "not given as a URL"),
    (["relay", "--to", "stdout:", "--schema", "a"], "sqlite:///a.db sqlite:///b.db", "SQLite has no schemas"),
    (["relay", "--to", "stdout:", "--schema", "a", "--schema", 'b"'], "postgresql://localhost:1/x", "identifier"),
    (["relay", "--to", "teapot:"], "sqlite:///a.db sqlite:///b.db", "no sender for teapot"),
    (["relay"], "sqlite:///a.db sqlite:///b.db", "no destination"),
    (["relay", "--to", "stdout:", "--name", "a:backfill"], "sqlite:///a.db sqlite:///b.db", "backfill of"),
]


@pytest.mark.parametrize(("arguments", "urls", "says"), MISTAKES)
def test_a_mistake_is_told_before_anything_begins(arguments, urls, says):
    ended = outbox(urls, *arguments)

    assert (ended.code, says in ended.err.strip().splitlines()[-1]) == (2, True)


def test_the_path_of_a_file_may_hold_a_blank(sqlite_engine, tmp_path):
    path = tmp_path / "my outbox.db"
    outbox(f"sqlite:///{path}", "db", "upgrade")

    alone = outbox(f"sqlite:///{path}", "status", "--json")
    both = outbox(f"sqlite:///{path} {url_of(sqlite_engine)}", "relay", "--to", "stdout:", "--until-empty")

    assert (alone.code, both.code, f"{path}: relay: 0 sent" in both.err) == (0, 0, True)


@pytest.mark.parametrize("place", [0, 1])
def test_a_password_as_one_of_several_arguments_is_refused(place):
    urls = ["postgresql://localhost:1/a", "postgresql://localhost:1/b"]
    urls[place] = "postgresql://ann:c4nary@localhost:1/c"

    ended = outbox(None, "relay", "--to", "stdout:", *(part for url in urls for part in ("--database", url)))

    assert (ended.code, "--database-file" in ended.err, "c4nary" in ended.err) == (2, True, False)


def test_a_line_of_the_file_that_holds_something_else_is_refused(tmp_path):
    file = tmp_path / "urls"
    file.write_text("sqlite:///a.db\nsqlite:///b.db c4nary\n")

    ended = outbox(None, "relay", "--to", "stdout:", "--database-file", str(file))

    assert (ended.code, "one URL a line" in ended.err, "c4nary" in ended.err) == (2, True, False)


def test_the_second_signal_ends_all_at_once(two, postgres, tmp_path):
    """Also while a database that does not answer is waited for."""
    well, away = two
    with ExitStack() as stack:
        proxy = stack.enter_context(TcpProxy("127.0.0.1", postgres.port))
        urls = [url_of(well), url_of(stack.enter_context(behind(proxy, away)))]
        process = stack.enter_context(running(urls, tmp_path / "log", "--to", "stdout:", "--lease", "60s"))
        assert eventually(lambda: leases(well) != [None] and leases(away) != [None])
        proxy.black_hole()
        process.send(signal.SIGTERM)
        assert eventually(lambda: leases(well) == [None])

        code = process.ended(signal.SIGTERM)

    assert code == -signal.SIGTERM

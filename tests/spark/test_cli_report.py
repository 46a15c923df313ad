"""`outbox report` and `outbox purge --archive`, as a person types them."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from outbox import Done, Outbox, Reject, Relay
from outbox.model.limits import HALF_TOPIC
from outbox.rocketmq import Transaction
from outbox.spark import extract
from tests.rocketmq.halves import ask, begun
from tests.support.command_line import outbox as typed

PNG = b"\x89PNG"
#: What is read is the same by either database; the source's own tests compare them.
ONE_DATABASE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)


@pytest.fixture
def shop(engine):
    with closing(Outbox(engine)) as made:
        yield made


@pytest.fixture(autouse=True)
def session(spark):
    """Commands use the session of this process, where there is one."""
    return spark


@pytest.fixture
def without_spark(monkeypatch):
    """A session that must not be asked for."""

    def session(**_):
        raise AssertionError("Spark is started")

    for module in ("report", "purge"):
        monkeypatch.setattr(f"outbox.cli.{module}.session", session)


def url_of(engine):
    return engine.url.render_as_string(hide_password=False)


def send(shop, *versions, key="a", topic="orders"):
    with shop.begin() as session:
        for version in versions:
            shop.send(session, topic, {"version": version}, key=key, headers={"version": str(version)})


class Sink:
    """Refuses version 13."""

    destination = "callable:sink"

    def send(self, messages):
        """A verdict for each."""
        return [Reject("unlucky") if message.json()["version"] == 13 else Done() for message in messages]

    def close(self):
        """Nothing is open."""


# Delivery


@pytest.mark.jvm
def test_a_delivery_report_shows_what_was_written_and_parked(engine, shop, tmp_path):
    send(shop, 1, 2)
    send(shop, 13, key="b", topic="mail")
    Relay(shop, Sink()).until_empty()
    send(shop, 3)
    plot = tmp_path / "delivery.png"

    ended = typed(engine, "report", "delivery", "--json", "--plot", str(plot))

    report = ended.json
    assert [(row["topic"], row["messages"]) for row in report["per_hour"]] == [("mail", 1), ("orders", 3)]
    assert [(row["subscription"], row["messages"]) for row in report["backlog"]] == [("relay", 1)]
    assert [(row["state"], row["age"], row["messages"]) for row in report["parked"]] == [("dead", "< 1 min", 1)]
    assert [(row["topic"], row["error"], row["letters"]) for row in report["dead"]] == [("mail", "unlucky", 1)]
    assert plot.read_bytes().startswith(PNG)


@ONE_DATABASE
def test_an_empty_log_has_a_report_too(engine, tmp_path):
    ended = typed(engine, "report", "delivery", "--plot", str(tmp_path / "x.png"))

    assert (ended.code, ended.out.count("\nnone\n")) == (0, 3)
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


# Transactions


@ONE_DATABASE
def test_a_report_on_transactions_shows_what_became_of_half_messages(engine, shop, tmp_path):
    committed, rolled_back, _given_up = begun(engine, "orders", "mail"), begun(engine), begun(engine)
    committed.commit()
    rolled_back.rollback()
    ask(engine)
    begun(engine)

    ended = typed(engine, "report", "transactions", "--json", "--plot", str(tmp_path / "x.png"))

    states = {row["topic"]: row for row in ended.json["states"]}
    numbers = ("committed", "rolled_back", "open", "parked", "contradictions", "unproven")
    assert {topic: [row[name] for name in numbers] for topic, row in states.items()} == {
        "orders": [1, 1, 1, 1, 0, 0], "mail": [1, 0, 0, 0, 0, 0],
    }  # fmt: skip
    assert (ended.code, ended.json["contradictions"]) == (0, [])
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


@ONE_DATABASE
def test_a_contradiction_is_told_and_ends_with_code_1(engine, shop):
    transaction = begun(engine)
    transaction.commit()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message WHERE topic = 'orders'"))

    ended = typed(engine, "report", "transactions")

    assert ended.code == 1
    assert transaction.id in ended.out
    assert "committed, but its message is not in the log" in ended.out


@ONE_DATABASE
def test_a_verdict_that_falls_while_it_is_read_is_no_contradiction(engine, shop, monkeypatch):
    """The log is loaded, then the transaction is committed, then the verdicts are read."""
    transaction: Transaction | None = begun(engine)
    from outbox.cli.report import Log

    table = Log.table

    def commit_first(self, name, columns=None):
        nonlocal transaction
        if transaction is not None:
            transaction.commit()
            transaction = None
        return table(self, name, columns)

    monkeypatch.setattr(Log, "table", commit_first)

    ended = typed(engine, "report", "transactions", "--json")

    assert (ended.code, ended.json["contradictions"], ended.json["states"][0]["contradictions"]) == (0, [], 0)


# Order


@ONE_DATABASE
def test_keys_whose_version_does_not_rise_are_shown(engine, shop, tmp_path):
    send(shop, 1, 2, 2, 3)
    send(shop, 2, 1, key="b")
    send(shop, 1, 2, key="c", topic="mail")

    ended = typed(engine, "report", "order", "--header", "version", "--json", "--plot", str(tmp_path / "x.png"))

    found = [(row["key"], row["previous"], row["version"], row["problem"]) for row in ended.json["breaks"]]
    assert (ended.code, ended.json["order"]) == (1, ["id"])
    assert found == [("a", 2, 2, "repeated"), ("b", 2, 1, "fell")]
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


@ONE_DATABASE
def test_programs_learn_that_a_report_was_cut(engine, shop):
    send(shop, 3, 2, 1)
    order = ("report", "order", "--header", "version", "--json")

    cut, whole = (typed(engine, *order, "--limit", limit).json for limit in ("1", "2"))

    assert [(len(each["breaks"]), each["more"]) for each in (cut, whole)] == [(1, True), (2, False)]


@pytest.mark.jvm
@ONE_DATABASE
def test_the_audit_of_an_archive_is_in_the_order_of_its_windows(engine, shop, spark, tmp_path):
    send(shop, 1)
    extract(spark, tmp_path / "archive", url=url_of(engine))
    send(shop, 2)
    extract(spark, tmp_path / "archive", url=url_of(engine))
    arguments = ("report", "order", "--json-path", "$.version", "--json")

    ended = typed(engine, *arguments, "--archive", str(tmp_path / "archive"))

    assert (ended.code, ended.json["order"], ended.json["summary"][0]["messages"]) == (0, ["window", "id"], 2)


@ONE_DATABASE
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["order"], "--header NAME or --json-path PATH"),
        (["order", "--header", "v", "--json-path", "$.v"], "by either --header NAME"),
        (["delivery", "--archive", "nowhere"], "nowhere; to write an archive: outbox extract"),
    ],
)
def test_an_obvious_mistake_is_told(engine, arguments, says):
    ended = typed(engine, "report", *arguments)

    assert (ended.code in (1, 2), says in ended.err, "Traceback" in ended.err) == (True, True, False)


@ONE_DATABASE
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("x.txt", "no picture can be drawn as .txt; name a FILE.png, .svg or .pdf"),
        ("nowhere/x.png", "there is no folder {}/nowhere; make the folder, or name another file"),
        ("", "this is a folder; name a file there, such as {}/report.png"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_read(
    engine, without_spark, tmp_path, file, says
):
    plot = str(tmp_path / file)

    for command in (["report", "delivery"], ["purge", "--older-than", "1d", "--archive", str(tmp_path)]):
        ended = typed(engine, *command, "--plot", plot)

        told = f"Error: --plot {plot}: {says.format(tmp_path)}"
        assert (ended.code, ended.err.splitlines()[-1]) == (2, told)


# Purge of what is archived


def kept(engine):
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT id FROM outbox_message ORDER BY id")).scalars())


@pytest.fixture
def archive(shop, engine, spark, tmp_path):
    """Three messages that were sent and archived, and one that was sent since."""
    send(shop, 1, 2, 3)
    extract(spark, tmp_path / "archive", url=url_of(engine), halves=True)
    send(shop, 4)
    Relay(shop, Sink()).until_empty()
    return tmp_path / "archive"


def purge(engine, archive, *options):
    return typed(engine, "purge", "--older-than", "0s", "--archive", str(archive), *options)


@pytest.mark.jvm
def test_what_is_in_the_archive_is_purged_and_nothing_else(engine, archive, tmp_path):
    before = kept(engine)
    rehearsed = purge(engine, archive, "--dry-run", "--json").json

    ended = purge(engine, archive, "--json", "--plot", str(tmp_path / "x.png"))

    (compared,) = ended.json["ranges"]
    assert (rehearsed["rows"], ended.json["rows"], kept(engine)) == (3, 3, before[3:])
    assert (compared["rows"], compared["archived"]) == (3, 3)
    assert compared["checksum"] == compared["archived_checksum"] != 0
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


@pytest.mark.jvm
@ONE_DATABASE
def test_what_cannot_be_purged_is_not_compared(engine, shop, spark, archive, without_spark):
    """Here the fourth message is not in the archive, and the first three are held by a relay that has not begun."""
    with shop.begin() as session:
        session.execute(text("DELETE FROM outbox_progress WHERE subscription = 'relay'"))
    before = kept(engine)

    ended = purge(engine, archive)

    assert (ended.code, kept(engine)) == (0, before)
    assert [line.split(" from before")[0] for line in ended.err.splitlines()] == [
        "0 messages",
        "older messages stay for relay, which has not passed them; see: outbox status",
    ]
    assert purge(engine, archive, "--json").json["ranges"] == []


@pytest.mark.jvm
@ONE_DATABASE
def test_only_what_every_subscription_is_past_is_compared(engine, shop, spark, tmp_path):
    send(shop, 1, 2)
    Relay(shop, Sink()).until_empty()
    send(shop, 3)
    extract(spark, tmp_path / "archive", url=url_of(engine), halves=True)

    compared = purge(engine, tmp_path / "archive", "--dry-run", "--json").json
    ended = purge(engine, tmp_path / "archive")

    (first,) = compared["ranges"]
    assert (first["rows"], first["last_id"], compared["rows"], len(kept(engine))) == (2, 3, 2, 1)
    assert ended.err.startswith("compared 2 messages in 1 range of ids: ")


@pytest.mark.jvm
@ONE_DATABASE
def test_an_archive_of_another_server_proves_nothing(engine, archive, without_spark):
    file = archive / "_outbox" / "00000001.json"
    file.write_text(file.read_text().replace('"dialect": "sqlite"', '"dialect": "postgresql"'))

    ended = purge(engine, archive)

    assert (ended.code, "(kind of database postgresql then, sqlite now)" in ended.err) == (1, True)


@pytest.mark.jvm
@ONE_DATABASE
def test_a_message_that_the_archive_has_not_stops_it(engine, archive):
    """Another body, under the same id: as after a restore, or a disk that lies."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_message SET body = :body WHERE id = 2"), {"body": b"another"})
    before = kept(engine)

    ended = purge(engine, archive)

    assert (ended.code, kept(engine)) == (1, before)
    assert "ids 0 to 4 are not the same in the archive" in ended.err
    assert "message 2 of topic orders is different" in ended.err


@pytest.mark.jvm
@ONE_DATABASE
def test_a_file_that_a_disk_has_damaged_stops_it(engine, archive):
    """Where no row shows it: in the name of the program that wrote the file."""
    (file,) = archive.rglob("*.parquet")
    file.write_bytes(file.read_bytes().replace(b"parquet-cpp-arrow", b"parquet-cpp-arroW"))
    before = kept(engine)

    ended = purge(engine, archive)

    assert (ended.code, kept(engine)) == (1, before)
    assert f"{file} is damaged: the bytes are not the written ones" in ended.err


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.jvm
@ONE_DATABASE
@pytest.mark.parametrize(("change", "says"), [(Path.unlink, "is not there"), (cut_short, "were written; restore")])
def test_a_file_that_is_missing_or_cut_short_stops_it(engine, archive, change, says):
    (file,) = archive.rglob("*.parquet")
    change(file)
    before = kept(engine)

    ended = purge(engine, archive)

    assert (ended.code, kept(engine), says in ended.err) == (1, before, True)


@pytest.mark.jvm
@ONE_DATABASE
def test_a_file_whose_messages_left_the_database_before_may_be_gone(engine, shop, spark, archive):
    """What a purge reads is what the database holds, and not all that was ever archived."""
    purge(engine, archive)
    (old,) = archive.rglob("*.parquet")
    send(shop, 5)
    extract(spark, archive, url=url_of(engine), halves=True)
    Relay(shop, Sink()).until_empty()
    old.unlink()
    manifest = archive / "_outbox" / "00000001.json"
    manifest.write_text("damaged")

    ended = purge(engine, archive, "--json")

    assert (ended.code, ended.json["rows"], kept(engine)) == (0, 2, [])


@pytest.mark.jvm
@ONE_DATABASE
def test_an_archive_without_half_messages_stops_a_purge_of_them(engine, shop, spark, tmp_path):
    begun(engine).commit()
    ask(engine)
    extract(spark, tmp_path / "archive", url=url_of(engine))
    Relay(shop, lambda message: None).until_empty()
    with engine.begin() as connection:
        # Else the transaction checks hold the half message back, and nothing would have to be compared.
        connection.execute(text("UPDATE outbox_progress SET base = '3:3:' WHERE subscription = 'check:shop'"))
    before = kept(engine)

    ended = purge(engine, tmp_path / "archive")

    assert (ended.code, kept(engine)) == (1, before)
    assert HALF_TOPIC in ended.err
    assert "extract with --halves" in ended.err


@pytest.mark.jvm
def test_a_message_that_was_committed_late_is_not_purged_with_its_neighbours(pg_engine, spark, tmp_path):
    """Its id is below those of the archive, whose position does not see it."""
    with closing(Outbox(pg_engine)) as shop, pg_engine.connect() as late:
        shop.send(late, "orders", {"version": 1})
        send(shop, 2, 3)
        extract(spark, tmp_path / "archive", url=url_of(pg_engine))
        late.commit()
        Relay(shop, Sink()).until_empty()
        first, *_ = kept(pg_engine)

        ended = purge(pg_engine, tmp_path / "archive", "--json")

    assert (ended.json["rows"], kept(pg_engine)) == (2, [first])


@ONE_DATABASE
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--archive", "nowhere"], "nowhere; to write an archive: outbox extract"),
        (["--plot", "x.png"], "--archive PATH"),
    ],
)
def test_a_purge_without_an_archive_is_told(engine, arguments, says):
    ended = typed(engine, "purge", "--older-than", "7d", *arguments)

    assert (ended.code in (1, 2), says in ended.err) == (True, True)

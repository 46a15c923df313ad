"""`outbox relay --route` and `--config`: several destinations by topic, and the mistakes that one can make."""

import json
import re
import signal

import pytest

from outbox import Message, Outbox, Relay
from outbox.cli.config import read
from outbox.cli.routes import pace_of_file
from outbox.store.log.log import Limits
from tests.cli.test_cli_relay_several import QUICK, running
from tests.support.command_line import outbox
from tests.support.deadlines import patience_ends_with_a_refusal
from tests.support.several import url_of
from tests.support.waiting import eventually


@pytest.fixture
def shop(engine):
    """An outbox with messages of three topics."""
    with Outbox(engine).begin() as session:
        for topic in ("orders.placed", "users", "orders.paid", "mail"):
            Outbox(engine).send(session, topic, topic.encode(), key="k")
    return engine


def topics(path) -> list[str]:
    """The topics of the messages in a file, in order."""
    return [json.loads(line)["topic"] for line in path.read_text().splitlines()] if path.exists() else []


def test_each_route_gets_its_topics(shop, tmp_path):
    orders, rest = tmp_path / "orders", tmp_path / "rest"

    ended = outbox(
        shop, "relay", "--route", f"orders.*=file://{orders}", "--route", f"*=file://{rest}", "--until-empty"
    )

    assert (ended.code, topics(orders), topics(rest)) == (0, ["orders.placed", "orders.paid"], ["users", "mail"])
    assert sorted(ended.err.splitlines()) == [
        "relay: !orders.* to file://" + f"{rest}, from the earliest message on",
        "relay: 2 sent",
        "relay:orders.*: 2 sent",
        f"relay:orders.*: orders.* to file://{orders}, a new subscription that begins at earliest",
    ]
    listed = outbox(shop, "status", "--json").json["subscriptions"]
    assert [(each["name"], each["topics"], each["backlog"]) for each in listed] == [
        ("relay", ["!orders.*"], 0), ("relay:orders.*", ["orders.*"], 0),
    ]  # fmt: skip


def test_no_route_begins_while_another_one_cannot(shop, tmp_path):
    """Nobody has the topic `mail` yet, but `orders.paid` was among what `relay` has sent."""
    paid, mail, rest = tmp_path / "paid", tmp_path / "mail", tmp_path / "rest"
    to = [f"--route=orders.paid=file://{paid}", f"--route=mail=file://{mail}", f"--route=*=file://{rest}"]
    outbox(shop, "relay", "--topics", "orders.*", "--to", f"file://{rest}", "--until-empty")

    ended = outbox(shop, "relay", *to, "--until-empty")

    waits = "Error: relay:mail waits until all routes can begin: subscription 'relay:orders.paid' is not there yet"
    assert (ended.code, waits in ended.err) == (2, True), ended.err
    assert (paid.exists(), mail.exists(), topics(rest)) == (False, False, ["orders.placed", "orders.paid"])


FILE = """
[routes."orders.*"]
to = "${ORDERS_URL}"
prefix = "shop."
rename = {"orders.placed" = "placed-orders"}
envelope = "debezium"
on_dead = "continue"
deadline = "10s"
partitions = 2
compact = true

[routes."*"]
to = "file://{rest}"
"""


def test_a_file_has_the_routes(shop, tmp_path):
    orders, rest, file = tmp_path / "orders", tmp_path / "rest", tmp_path / "routes.toml"
    file.write_text(FILE.replace("{rest}", str(rest)))

    ended = outbox(shop, "relay", "--config", str(file), "--until-empty", ORDERS_URL=f"file://{orders}")

    assert (ended.code, topics(orders), topics(rest)) == (
        0,
        ["shop.placed-orders", "shop.orders.paid"],
        ["users", "mail"],
    )
    first = json.loads(orders.read_text().splitlines()[0])
    assert first["headers"] == {"id": first["message_id"]}
    listed = outbox(shop, "subscriptions", "list", "--json").json["subscriptions"]
    assert [(each["name"], each["on_dead"], each["partitions"], each["compact"]) for each in listed] == [
        ("relay", "block", 1, False),
        ("relay:orders.*", "continue", 2, True),
    ]


@pytest.mark.storm
def test_a_process_goes_on_with_one_route_while_the_other_is_down(pg_engine, tmp_path):
    rest, log = tmp_path / "rest", tmp_path / "log"
    arguments = ["--route", "orders.*=nats://127.0.0.1:1", "--route", f"*=file://{rest}", *QUICK]
    with running([url_of(pg_engine)], log, *arguments) as process:
        for topic in ("orders.placed", "users", "mail"):
            with Outbox(pg_engine).begin() as session:
                Outbox(pg_engine).send(session, topic, b"1")
        assert eventually(lambda: topics(rest) == ["users", "mail"])
        code = process.ended(signal.SIGTERM)

    assert code == 0
    assert process.said[-2:] == ["relay:orders.*: stopped; 0 sent", "relay: stopped; 2 sent"]


@pytest.mark.storm
def test_a_process_whose_routes_cannot_begin_is_told_by_status_and_names_each_route_once(shop, tmp_path):
    """It tries again until somebody splits what is stored; each line says the name of its route once."""
    rest, log = tmp_path / "rest", tmp_path / "log"
    outbox(shop, "relay", "--to", f"file://{rest}", "--until-empty")
    arguments = ["--route", f"orders.*=file://{tmp_path / 'orders'}", "--route", f"*=file://{rest}", *QUICK, "-v"]
    split = ["subscriptions", "split", "relay", "--topics", "orders.*", "--to", f"file://{tmp_path / 'orders'}"]

    with running([url_of(shop)], log, *arguments) as process:
        refused = eventually(lambda: [each.kind for each in Outbox(shop).admin.diagnosis()].count("refused") == 2)
        warned = outbox(shop, "status", "--check")
        outbox(shop, *split)
        works = eventually(lambda: outbox(shop, "status", "--check").code == 0)
        process.ended(signal.SIGTERM)
        said = "\n".join(process.said)

    assert (refused, warned.code, works) == (True, 1, True)
    assert "subscription 'relay:orders.*' is not there yet" in said
    doubled = re.findall(r"^.*\b(relay(?::orders\.\*)?): (?:subscription )?'?\1'?[: ].*$", said, re.MULTILINE)
    assert doubled == []
    assert "the same options as before" not in warned.err


SINGLE = """
[relay]
attempts = 3
batch_size = 2
batch_bytes = 1000

[routes."*"]
to = "file://{out}"
prefix = "shop."
rename = {users = "people"}
envelope = "cloudevents"
"""


def test_a_file_with_one_route_says_all_about_a_single_destination(shop, tmp_path):
    out, file = tmp_path / "out", tmp_path / "routes.toml"
    file.write_text(SINGLE.replace("{out}", str(out)))

    ended = outbox(shop, "relay", "--config", str(file), "--until-empty")

    retry, limits = pace_of_file(read(file))
    assert (retry.attempts, limits) == (3, Limits(rows=2, bytes=1000))
    assert (ended.code, topics(out)) == (0, ["shop.orders.placed", "shop.people", "shop.orders.paid", "shop.mail"])
    assert {json.loads(line)["content_type"] for line in out.read_text().splitlines()} == {
        "application/cloudevents+json"
    }


ROUTE = ["--route", "*=stdout:"]
WRONG = {
    "no last route": (["--route", "a=stdout:"], "add the route '*' as the last one"),
    "no URL": (["--route", "orders.*"], "--route: write a topic or a pattern, = and a URL"),
    "twice": (["--route", "a=stdout:", "--route", "a=stdout:"], "--route: 'a' is given twice"),
    "beside a destination": ([*ROUTE, "--to", "stdout:"], "--to and --route exclude each other"),
    "beside topics": ([*ROUTE, "--topics", "a"], "--route and --topics exclude each other"),
    "a password": (["--route", "*=nats://u:secret@h"], "set OUTBOX_RELAY_ROUTE instead, or write routes to a file"),
    "an unknown scheme": (["--route", "*=nowhere://h"], "there is no sender for nowhere: URLs"),
    "nothing": ([], "no destination: give --to URL"),
}


@pytest.mark.parametrize("variable", ["OUTBOX_RELAY_TO", "OUTBOX_RELAY_TO_FILE"])
def test_a_destination_that_the_environment_names_is_told_by_its_variable(
    sqlite_engine, monkeypatch, tmp_path, variable
):
    """Nobody has typed --to."""
    (tmp_path / "url").write_text("stdout:")
    monkeypatch.setenv(variable, str(tmp_path / "url") if variable.endswith("FILE") else "stdout:")

    ended = outbox(sqlite_engine, "relay", *ROUTE, "--until-empty")

    assert (ended.code, f"{variable} and --route exclude each other" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(("arguments", "error"), WRONG.values(), ids=WRONG)
def test_mistakes_are_told_before_anything_is_sent(sqlite_engine, arguments, error):
    ended = outbox(sqlite_engine, "relay", *arguments, "--until-empty")

    assert (ended.code, error in ended.err, "secret" in ended.err) == (2, True, False), ended.err


OF_FILES = {
    "no file": (None, "FILE: No such file or directory"),
    "not TOML": ("[routes", "FILE: it is not TOML"),
    "a pattern without quotes": (
        "[routes.orders.*]\nto='stdout:'",
        'key part (at line 1, column 16); quote the pattern: [routes."orders.*"]',
    ),
    "nothing": ("", "no destination: give --to URL"),
    "no route": ("[routes]", "FILE: it has no routes; write tables such as"),
    "too large a batch": (
        "[relay]\nbatch_size=100001\n[routes.'*']\nto='stdout:'",
        "FILE: [relay] batch_size: is at most 100000, not 100001",
    ),
    "no attempts": (
        "[relay]\nattempts=0\n[routes.'*']\nto='stdout:'",
        "FILE: [relay] attempts: must be a whole number from 1 on",
    ),
    "a size in words": (
        "[relay]\nbatch_size='all'\n[routes.'*']\nto='stdout:'",
        "FILE: [relay] batch_size: must be a whole number",
    ),
    "no table": ("[routes]\n'*' = 'stdout:'", 'FILE: [routes."*"] must be a table'),
    "an unknown field": (
        "[routes.'*']\nto='stdout:'\ntopics=1",
        'FILE: [routes."*"] topics: is unknown; there are',
    ),
    "a topic without quotes": ("[routes.orders.new]\nto='stdout:'", "new: is unknown; there are"),
    "no destination": ("[routes.'*']\nprefix='a'", 'FILE: [routes."*"] to: is missing; write to ='),
    "another type": ("[routes.'*']\nto=5", 'FILE: [routes."*"] to: must be a text in quotation marks, not 5'),
    "a variable": (
        "[routes.'*']\nto='${NO_SUCH}'",
        '[routes."*"] to: takes the environment variable',
    ),
    "a deadline": ("[routes.'*']\nto='stdout:'\ndeadline='soon'", "deadline: 'soon' is not a duration; write 90s"),
    "no time": ("[routes.'*']\nto='stdout:'\ndeadline='0s'", "deadline: must be greater than 0"),
    "a number of seconds": ("[routes.'*']\nto='stdout:'\ndeadline=5", "deadline: must be a text in quotation marks"),
    "a policy": ("[routes.'*']\nto='stdout:'\non_dead='go'", "on_dead: must be one of block, continue, not 'go'"),
    "no partitions": ("[routes.'*']\nto='stdout:'\npartitions=0", "partitions: must be a whole number from 1 on"),
    "a switch": ("[routes.'*']\nto='stdout:'\ncompact='yes'", "compact: must be true or false; write compact = true"),
    "a text": ("[routes.'*']\nto='stdout:'\npartitions='2'", "partitions: must be a whole number from 1 on"),
    "an envelope": (
        "[routes.'*']\nto='stdout:'\nenvelope='avro'",
        "envelope: must be one of raw, cloudevents",
    ),
    "names": ("[routes.'*']\nto='stdout:'\nrename={a=5}", "rename: must be a table of texts; write rename ="),
    "a prefix that is none": ("[routes.'*']\nto='stdout:'\nprefix='a b'", "prefix: makes a topic that must be"),
    "a pattern for a name": (
        "[routes.'*']\nto='stdout:'\nrename={'a*'='b'}",
        """FILE: [routes."*"] rename: 'a*' = 'b': a pattern has one star on each side""",
    ),
    "no last route": ("[routes.a]\nto='stdout:'", "add the route '*' as the last one"),
}


@pytest.mark.parametrize(("content", "error"), OF_FILES.values(), ids=OF_FILES)
def test_mistakes_in_the_file_are_told_with_their_place(sqlite_engine, tmp_path, content, error):
    file = tmp_path / "routes.toml"
    if content is not None:
        file.write_text(content)

    ended = outbox(sqlite_engine, "relay", "--config", str(file), "--until-empty")

    assert (ended.code, error.replace("FILE", str(file)) in ended.err) == (2, True), ended.err


def test_a_secret_of_the_environment_is_never_shown(shop, tmp_path):
    file = tmp_path / "routes.toml"
    file.write_text('[routes."*"]\nto = "nats://user:${NATS_PASSWORD}@127.0.0.1:1"\n')

    with patience_ends_with_a_refusal():
        ended = outbox(shop, "relay", "--config", str(file), "-vv", "--until-empty", NATS_PASSWORD="tops3cret")

    assert (ended.code, "127.0.0.1" in ended.err, "tops3cret" in ended.err) == (4, True, False)


def test_routes_may_come_from_the_environment(shop, tmp_path):
    rest = tmp_path / "rest"

    ended = outbox(shop, "relay", "--until-empty", OUTBOX_RELAY_ROUTE=f"orders.*=file://{rest}.o *=file://{rest}")

    assert (ended.code, topics(rest)) == (0, ["users", "mail"])


@pytest.mark.parametrize("given", ["option", "python"])
def test_only_the_newest_of_a_key_is_sent(engine, tmp_path, given):
    """The earlier messages count as sent, also when the property is asked for by nobody later."""
    with Outbox(engine).begin() as session:
        Outbox(engine).send_all(session, [Message("prices", str(number), key=f"k{number % 2}") for number in range(6)])
    sent = tmp_path / "sent"
    if given == "option":
        outbox(engine, "relay", "--name", "prices", "--to", f"file://{sent}", "--compact", "--until-empty")
    else:
        Relay(Outbox(engine), f"file://{sent}", name="prices", compact=True).until_empty()
    outbox(engine, "relay", "--name", "prices", "--to", f"file://{sent}", "--until-empty")

    assert [json.loads(line)["body"] for line in sent.read_text().splitlines()] == ["4", "5"]

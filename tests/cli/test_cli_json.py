"""The JSON of each command is what its page says: each field is there, of its type, and no other."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Done, Message, Outbox, Reject, Relay, Unavailable, Verdict
from outbox.admin import pausing
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.rocketmq.halves import ask, begun
from tests.support.command_line import outbox
from tests.support.pages import page_of_json, reference

PAGE = page_of_json()
#: Objects whose names are data.
OPEN = ("parked", "headers", "again", "waiting", "held_back", "unread", "choice", "topics", "states", "arguments")
METRICS = "rocketmq_"
ALL = {"version": "number", "more": "boolean"}
BESIDES = "Besides, where there are half messages"
COMMANDS = {
    "status": [],
    "log tail": [],
    "send": ["fine", "a body"],
    "parked list": [],
    "parked replay": ["--all", "--topic", "bad", "--yes"],
    "parked discard": ["--all", "--topic", "bad", "--reason", "x", "--yes"],
    "parked set-aside": ["--all", "--topic", "away", "--reason", "x", "--yes"],
    "decisions": [],
    "subscriptions pause": ["relay", "--rate", "1/s"],
    "subscriptions list": [],
    "subscriptions alter": ["relay", "--on-dead", "continue"],
    "subscriptions split": ["relay", "--topics", "fine", "--to", "nats://h:4222"],
    "subscriptions reset": ["relay", "--to", "earliest", "--yes"],
    "subscriptions backfill": ["relay", "--topics", "fine"],
    "subscriptions drop": ["relay", "--yes"],
    "restore": ["--yes", "--force"],
    "doctor": [],
    "db upgrade": [],
    "db downgrade": ["--to", "0004"],
    "erase": ["--key", "nobody", "--dry-run"],
    "purge": ["--older-than", "0s", "--dry-run"],
}
#: Of which transaction each is.
ABOUT_TRANSACTIONS = {
    "half list": [],
    "half show": ["PENDING"],
    "half commit": ["PENDING"],
    "half rollback": ["PENDING"],
    "half resume": ["GIVEN_UP"],
}
KINDS = {str: "text", bool: "boolean", int: "number", float: "number", list: "list", dict: "object", type(None): "null"}


def section(title: str) -> str:
    """The section whose title is so, or has these words of a command."""
    sections = [each.partition("\n") for each in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]]
    (own,) = [text for heading, _, text in sections if heading == title or ("`" in title and title in heading)]
    return own


def documented(command: str) -> dict[str, str]:
    """The fields of a command and their types, with those that all have."""
    row = re.search(rf"^\| `outbox {command}` (\| .*)$", PAGE, flags=re.MULTILINE)
    return ALL | fields_of(section(f"`outbox {command}`") if row is None else row[1])


def fields_of(section: str) -> dict[str, str]:
    """The fields of a section and their types, with the fields of the objects that it names."""
    found: dict[str, str] = {}
    for name in re.findall(r"fields of (?:one )?\[(\w+)\]", section):
        found |= object_of(name)
    for name, kind in re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, flags=re.MULTILINE):
        inner = re.search(r"\[(\w+)\]\(#", kind)
        prefix = f"{name}[]" if kind.startswith("list of ") else name
        found |= {name: kind} if inner is None else {f"{prefix}.{k}": v for k, v in object_of(inner[1]).items()}
    return found


def object_of(name: str) -> dict[str, str]:
    """The fields of an object and their types."""
    return fields_of(section(name))


def fields(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Each field with its type; of objects in lists those of all, and of a body that is no text the name of others."""
    if isinstance(value, dict) and path.rpartition(".")[2] not in OPEN and not path.startswith(METRICS):
        for name, inner in value.items():
            shown = name.removesuffix("_base64")
            yield from fields(inner, f"{path}.{shown}" if path else shown)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for each in value:
            yield from fields(each, f"{path}[]")
    else:
        yield path, KINDS[type(value)]


class Destination:
    """Rejects one topic, waits with another."""

    destination = "nats://h:4222"

    def send(self, messages):
        """One answer for each topic."""
        answers = {"bad": Reject("never"), "away": Unavailable("no stream")}
        return [answers.get(message.topic, Done()) for message in messages]

    def close(self):
        """Nothing is open."""


@pytest.fixture
def shop(engine):
    """An outbox of which every command has something to tell."""
    sender = Outbox(engine)
    with sender.begin() as session:
        for topic in ("fine", "away", "bad"):
            sender.send(session, topic, b"1", key=topic)
    Relay(sender, Destination()).until_empty()
    with closing(sender.database.open()) as channel:
        pausing.pause(channel, "relay", by="ops", rate=1.0)
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX outbox_decision_done_at"))
    return engine


@pytest.fixture
def transactions(engine):
    """Two transactions: one is given up, one has text, bytes and a delay in its messages."""
    given_up = begun(engine, group="depot")
    ask(engine, group="depot")
    pending = begun(engine, "orders", "mail")
    pending.send("bytes", b"\xff", key="k", delay=timedelta(minutes=1))
    return {"GIVEN_UP": given_up.id, "PENDING": pending.id}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_and_the_command_agree(shop, command):
    if command == "status":
        assert outbox(shop, "relay", "--to", "nats://elsewhere:4222", "--until-empty").code == 2
    agree(command, outbox(shop, *command.split(), *COMMANDS[command], "--json").json)


@pytest.mark.parametrize("command", [["list"], ["show", "billing"]], ids=" ".join)
def test_the_page_and_a_command_about_consumers_agree(shop, command):
    consumer = Outbox(shop).consumer("billing", topics=["bad"])

    @consumer.on()
    def handle(_message: Message) -> Verdict:
        return Reject("never")

    consumer.until_empty()
    with closing(Outbox(shop).database.open()) as channel:
        pausing.pause(channel, "billing", by="ops", rate=1.0)

    agree(f"consumers {command[0]}", outbox(shop, "consumers", *command, "--json").json)


def test_the_page_and_parked_show_agree(shop):
    (first, *_) = outbox(shop, "parked", "list", "--json").json["parked"]

    shown = outbox(shop, "parked", "show", str(first["id"]), "--json").json

    besides = {"dead_at": "text or null", "behind": "number"}
    agree_on(ALL | object_of("ParkedMessage") | object_of("Contents") | besides, shown)


def test_the_page_and_the_commands_about_keys_agree(shop):
    sender = Outbox(shop)
    sender.admin.resume("relay")
    with sender.begin() as session:
        sender.send(session, "fine", b"1", key="bad")
    Relay(sender, Destination()).until_empty()
    for key in ("bad", "away"):
        sender.admin.pause("relay", key=key, by="ops")

    agree("parked held", outbox(shop, "parked", "held", "--json").json)
    agree("parked key", outbox(shop, "parked", "key", "bad", "--json").json)


def test_the_page_and_history_agree(shop):
    agree_on(ALL | object_of("History"), outbox(shop, "subscriptions", "history", "relay", "--json").json)


def test_the_page_and_parked_count_agree(shop):
    agree_on(ALL | object_of("ParkedCount"), outbox(shop, "parked", "count", "--json").json)


def test_the_page_and_workers_agree(shop):
    with closing(Outbox(shop).database.open()) as channel:
        Leases(channel).acquire(Subscriptions(channel).get("relay").partition(0), "h:1:a", timedelta(minutes=1))

    agree("workers", outbox(shop, "workers", "--json").json)


def test_the_page_and_log_show_agree(shop):
    admin = Outbox(shop).admin
    (letter,) = admin.dead_letters()
    admin.replay(letter.id, by="eve")

    shown = outbox(shop, "log", "show", str(letter.id), "--json").json

    of_one = {path.removeprefix("messages[]."): kind for path, kind in documented("log tail").items()}
    agree_on(of_one | documented("log show"), shown)


@pytest.mark.parametrize("command", ABOUT_TRANSACTIONS)
def test_the_page_and_a_command_about_transactions_agree(engine, transactions, command):
    names = ABOUT_TRANSACTIONS[command]

    agree(command, outbox(engine, *command.split(), *(transactions[each] for each in names), "--json").json)


def test_the_page_and_status_agree_where_there_are_half_messages(engine, transactions):
    document = outbox(engine, "status", "--json").json

    own = {re.split(r"[.[]", path)[0] for path in documented("status")} - {"version", "more"}
    agree_on(ALL | fields_of(section(BESIDES)), {name: value for name, value in document.items() if name not in own})


def test_the_docstring_of_a_result_explains_only_fields():
    """Of a field that is renamed no meaning stays."""
    stale = {
        each: names
        for each in reference().RESULTS
        if (names := set(reference().meanings(each)) - {field.name for field in dataclasses.fields(each)})
    }

    assert stale == {}


def agree(command: str, document: dict[str, object]) -> None:
    """Each documented field is there, of its type, and no other."""
    agree_on(documented(command), document)


def some_begin(said: dict[str, str], prefix: str) -> bool:
    return any(path.startswith(prefix) for path in said)


def agree_on(said: dict[str, str], document: dict[str, object]) -> None:
    """Each of these fields is there, of its type, and no other."""
    # An empty list of objects has none of their fields.
    found = [each for each in fields(document) if not (each[1] == "list" and some_begin(said, f"{each[0]}[]."))]
    assert list(document)[:2] == ["version", "more"]
    assert {path for path, _ in found} == set(said)
    assert [(path, kind) for path, kind in found if kind not in said[path].split(" or ")] == []

"""Log lines as JSON: stable names and fields, which the page about events has."""

import ast
import json
import re
from pathlib import Path
from typing import Any, cast, get_args

import outbox as package
from outbox import Message
from outbox.cli.logs import formatter
from outbox.model.decision import Verb
from outbox.model.parking import Parking
from outbox.telemetry.events import Dead
from outbox.telemetry.failure_log import FailureLog, Words
from tests.support.pages import TOP


def test_a_dead_letter_is_a_line_of_json_with_its_fields(caplog):
    """Names and fields are the same in an application, on the record."""
    failures = FailureLog("relay", Words("relay", "nats://h:4222"))
    message = Message("orders", b"1")
    failures.told(
        Dead(
            database=cast("Any", None),
            subscription="relay",
            partition=0,
            messages=[(message, Parking(state="dead", holds=True, attempts=10, error="HTTP 422"))],
        )
    )

    (record,) = caplog.records
    fields = {"topic": "orders", "message_id": str(message.message_id), "attempt": 10, "error": "HTTP 422"}
    shown = json.loads(formatter("json").format(record))
    assert {name: shown[name] for name in fields} == fields
    assert (shown["event"], shown["subscription"], shown["messages"]) == ("dead_letters", "relay", 1)


def test_each_event_of_a_log_line_is_on_the_page():
    calls = [
        node
        for path in Path(str(package.__file__)).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("named", "self._warn")
    ]
    said = {each.value for node in calls for each in node.args if isinstance(each, ast.Constant)}

    section = (TOP / "docs" / "events.md").read_text().partition("## Log lines")[2]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, flags=re.MULTILINE)
    page = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert said | set(get_args(Verb)) == page

"""What the page about events says is so: its code runs, and it has every event with every field."""

import dataclasses
import re

from outbox.telemetry import events
from tests.support.pages import TOP, run

#: What is said of all events of one kind together.
COMMON = {"database", "subscription", "partition"}

PAGE = (TOP / "docs" / "events.md").read_text()


def test_the_code_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    run(PAGE, "docs/events.md")

    shown = re.findall(r"^print\(.*#\s(.*)$", PAGE, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown


def test_every_event_is_there_with_its_fields():
    listed = PAGE.partition("\n## Log lines\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", listed, re.MULTILINE)

    found = {event: sorted(set(re.findall(r"`([a-z_]+)`", fields))) for event, fields in rows}
    kinds = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, events.Event)]
    fields = {
        kind.__name__: sorted(field.name for field in dataclasses.fields(kind))
        for kind in kinds
        if kind not in (events.Event, events.Worked) and not kind.__name__.startswith("_")
    }
    assert found == {event: [name for name in names if name not in COMMON] for event, names in fields.items()}

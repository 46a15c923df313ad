"""Pictures are SVG without a style of their own, beside a table that tells the same; other people's text stays text."""

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from outbox.admin.results import Passage, Trace
from outbox.dashboard.pictures import sparkline, timeline
from outbox.model.decision import Decision
from outbox.store.subscriptions.parked_messages import ParkedMessage

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>\u202e\x00\"'javascript:&"
ID = UUID(int=7)


def after(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


def parsed(html: str) -> ET.Element:
    """A picture as XML, which HTML of our own is as well."""
    return ET.fromstring(html)


def rows(picture: ET.Element) -> list[list[str]]:
    """The cells of the table's body."""
    return [["".join(cell.itertext()) for cell in row] for row in picture.iterfind(".//tbody/tr")]


def steps(*each: tuple[str, str]) -> str:
    """The cell of the table for what happened at moments of one day."""
    return "".join(f"2026-03-01 {at} UTC: {what}" for at, what in each)


def trace(*passages: Passage, **fields) -> Trace:
    at = {"created_at": NOON, "deliver_at": None, "expires_at": None, **fields}
    return Trace(id=42, message_id=ID, topic="orders", key="k", tags=None, in_log=True, subscriptions=passages, **at)


def copy(**fields) -> ParkedMessage:
    given = {"state": "retry", "head": None, "attempts": 2, "error": HOSTILE, "parked_at": after(1), "due_at": after(9)}
    return ParkedMessage(
        subscription="relay", id=42, message_id=ID, topic="orders", key="k", created_at=NOON, **{**given, **fields}
    )


def decision(**fields) -> Decision:
    given = {"at": after(3), "done_at": after(4), "verb": "replay", "by": "ada", "reason": None, "count": 1}
    return Decision(id=1, subscription="relay", choice={"ids": [42]}, **{**given, **fields})


def test_a_sparkline_has_a_gap_where_no_value_is_kept():
    points = [(after(n), value) for n, value in enumerate([1.0, 2.0, None, 4.0, None, 0.25, 1234.0])]

    found = parsed(sparkline(points, title="lag", unit="s"))

    lines = [each.get("points", "").split() for each in found.iter("polyline")]
    assert [len(each) for each in lines] == [2, 2, 2]
    assert found[0].get("aria-label") == "lag: last 1,234 s, least 0.25 s, most 1,234 s"
    assert [each[1] for each in rows(found)] == ["1 s", "2 s", "–", "4 s", "–", "0.25 s", "1,234 s"]  # noqa: RUF001


@pytest.mark.parametrize("points", [[], [(NOON, None)]])
def test_a_sparkline_of_nothing_says_so(points):
    assert sparkline(points, title="<b>") == '<p class="sparkline">&lt;b&gt;: no values yet</p>'


def test_a_sparkline_of_zeros_is_a_line_at_the_ground():
    found = parsed(sparkline([(NOON, 0.0), (after(1), 0.0)], title="dead"))

    assert [each.get("points") for each in found.iter("polyline")] == ["4.0,28.0 156.0,28.0"]


def test_a_timeline_tells_each_way_as_picture_and_as_table():
    passed = Passage(subscription="audit", kind="consumer", state="passed", what="passed", passed_at=after(0.5))
    tried = Passage(
        subscription="relay", kind="relay", state="retry", what="waiting for the next try", copy=copy(),
        decisions=(decision(),),
    )  # fmt: skip
    unread = Passage(subscription="spark", kind="extract", state="unread", what="not yet")
    other = Passage(subscription="users", kind="relay", state="unselected", what="not for it")

    found = parsed(timeline(trace(passed, tried, unread, other)))

    cells = [(name, state, what) for name, state, what, _ in rows(found)]
    assert cells == [
        ("audit", "passed", "passed"), ("relay", "retry", "waiting for the next try"), ("spark", "unread", "not yet"),
        ("users", "unselected", "not for it"),
    ]  # fmt: skip
    assert [each[3] for each in rows(found)] == [
        steps(("12:00:00", "written"), ("12:00:30", "passed")),
        steps(
            ("12:00:00", "written"), ("12:01:00", "set aside"), ("12:03:00", "replay by ada"),
            ("12:04:00", "replay carried out"), ("12:09:00", "due"),
        ),
        steps(("12:00:00", "written")),
        "",
    ]  # fmt: skip
    assert [each.get("class") for each in found.iter("g")] == [
        "round", "round", "round", "square", "diamond", "round", "triangle", "round",
    ]  # fmt: skip
    assert [each.get("class") for each in found.iter("path") if "way" in (each.get("class") or "")] == [
        "way whole", "way open", "way open",
    ]  # fmt: skip
    assert [each.text for each in found.iter("text") if each.get("y") == "30"] == [
        "2026-03-01", "+30 s", "+30 s", "+2 min", "+1 min", "+5 min",
    ]  # fmt: skip


def test_a_message_that_was_decided_on_had_been_set_aside_when_the_position_passed():
    way = Passage(
        subscription="relay", kind="relay", state="passed", what="", passed_at=after(1), decisions=(decision(),)
    )

    found = parsed(timeline(trace(way)))

    assert [each[3] for each in rows(found)] == [
        steps(
            ("12:00:00", "written"), ("12:01:00", "set aside"), ("12:03:00", "replay by ada"),
            ("12:04:00", "replay carried out"),
        ),
    ]  # fmt: skip


def test_a_decision_that_was_carried_out_at_once_is_seen_beside_it():
    way = Passage(subscription="relay", kind="relay", state="passed", what="", decisions=(decision(done_at=after(3)),))

    found = parsed(timeline(trace(way)))

    assert [(each.get("class"), each[1].get("cx") or each[1].get("d")) for each in found.iter("g")] == [
        ("round", "240"), ("diamond", "M350 61m0 -8l8 8l-8 8l-8 -8z"), ("round", "367"),
    ]  # fmt: skip


def test_a_timeline_without_any_moment_is_its_table():
    found = parsed(
        timeline(trace(Passage(subscription="relay", kind="relay", state="unknown", what=""), created_at=None))
    )

    assert (list(found.iter("svg")), rows(found)) == ([], [["relay", "unknown", "", ""]])


def test_a_picture_holds_other_people_s_text_as_text_and_no_style():
    parked = copy(decision="replay", decided_by=HOSTILE, decided_at=after(2))
    way = Passage(subscription=HOSTILE, kind="relay", state="retry", what=HOSTILE, copy=parked, decisions=(
        decision(by=HOSTILE, verb=HOSTILE),
    ))  # fmt: skip

    found = f"{timeline(trace(way))}{sparkline([(NOON, 1.0)], title=HOSTILE, unit=HOSTILE)}"

    assert not re.search(r"<script|\sstyle=|\son\w+=|[\u202e\x00]", found.replace("&lt;script", ""))
    assert "\\u202e" in found
    assert "&lt;script&gt;" in found

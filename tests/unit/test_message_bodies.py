"""A body is encoded exactly, or refused with the place of what is wrong; and a handler reads back what was meant."""

import dataclasses
import enum
import json
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from unittest.mock import MagicMock

import pydantic
import pydantic.dataclasses
import pytest
from fastapi.encoders import jsonable_encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from outbox import InvalidMessageError, Message

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ID = uuid.UUID(int=7)


@dataclasses.dataclass
class Line:
    """A plain part of a body."""

    sku: str
    price: object


@dataclasses.dataclass
class Cart:
    """A dataclass of dataclasses, and of what the application puts into it."""

    lines: list[Line]
    note: object = None


class Ticket(pydantic.BaseModel):
    """A model as applications have it, with what only pydantic knows how to put."""

    id: uuid.UUID
    at: datetime
    price: Decimal
    lines: list[Line] = []


class Cents:
    """Money that says itself what it is."""

    def __init__(self, cents: object) -> None:
        self.cents = cents

    def __json__(self) -> object:
        """What it is."""
        return {"cents": self.cents}


@dataclasses.dataclass
class Temperature:
    """A dataclass that wants to be something else as JSON."""

    kelvin: float

    def __json__(self) -> object:
        """Not its fields."""
        return f"{self.kelvin} K"


class Colour(enum.Enum):
    """An enumeration whose members are no text."""

    RED = "red"


class Odd(enum.Enum):
    """An enumeration whose value is no JSON either."""

    SET = frozenset({1})


TICKET = Ticket(id=ID, at=NOON, price=Decimal("1.50"))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (TICKET, {"id": str(ID), "at": "2026-01-01T12:00:00Z", "price": "1.50", "lines": []}),
        (Cents(5), {"cents": 5}),
        (Temperature(2.5), "2.5 K"),
        (Cart([Line("a", Cents(1))], note=(1, 2)), {"lines": [{"sku": "a", "price": {"cents": 1}}], "note": [1, 2]}),
        (
            {"id": ID, "at": NOON, "on": date(2026, 1, 2), "time": time(9, 30), "price": Decimal("1.10")},
            {"id": str(ID), "at": NOON.isoformat(), "on": "2026-01-02", "time": "09:30:00", "price": "1.10"},
        ),
        (
            Cart([Line("a", Decimal("1.5"))], note=[Colour.RED, ID]),
            {"lines": [{"sku": "a", "price": "1.5"}], "note": ["red", str(ID)]},
        ),
        ({"ticket": [TICKET]}, {"ticket": [TICKET.model_dump(mode="json")]}),
        ([Cents(1), [Temperature(1.0)]], [{"cents": 1}, ["1.0 K"]]),
        (pydantic.RootModel[list[int]]([1, 2]), [1, 2]),
    ],
    ids=[
        "pydantic",
        "hook",
        "hook before fields",
        "dataclass",
        "texts",
        "texts inside",
        "pydantic inside",
        "hooks inside",
        "root model",
    ],
)
def test_an_object_says_what_it_is_as_json_wherever_it_stands(body, value):
    message = Message("orders", body)

    assert (message.json(), message.content_type) == (value, "application/json")


class Level(enum.IntEnum):
    """An enumeration of numbers."""

    LOW = 1


class Size(enum.StrEnum):
    """An enumeration of text."""

    SMALL = "s"


@dataclasses.dataclass
class Basket:
    """A dataclass that holds a model, which holds a dataclass."""

    ticket: Ticket


@pydantic.dataclasses.dataclass
class Parcel:
    """A dataclass of pydantic's own."""

    id: uuid.UUID


@pytest.mark.parametrize(
    "value",
    [
        ID,
        NOON.replace(tzinfo=None, microsecond=500),
        NOON.astimezone(timezone(timedelta(hours=2))),
        date(2026, 1, 2),
        time(9, 30),
        Colour.RED,
        Level.LOW,
        Size.SMALL,
        TICKET,
        [{"tickets": [TICKET, TICKET]}],
        Basket(Ticket(id=ID, at=NOON, price=Decimal("1.50"), lines=[Line("a", [ID])])),
        Parcel(ID),
        (ID, {"at": (1, "2")}),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_what_web_frameworks_write_alike_is_written_in_the_same_way(value):
    """By FastAPI and by pydantic."""
    written = Message("orders", {"value": value}).json()["value"]

    assert (written, written) == (jsonable_encoder(value), json.loads(to_json(value)))


def test_where_they_differ_nothing_is_lost():
    """A Decimal is text, as pydantic writes it and FastAPI does not; UTC is +00:00, as FastAPI writes it."""
    assert Message("orders", [Decimal("1.50"), NOON]).json() == ["1.50", "2026-01-01T12:00:00+00:00"]


def test_json_is_compact_and_keeps_the_order_of_its_names():
    assert Message("orders", {"b": [1, {"é": None}], "a": Cents(1)}).body == (
        '{"b":[1,{"é":null}],"a":{"cents":1}}'.encode()
    )


NO_WORD = "which JSON has no word for"
NOT_TEXT = "holds a lone surrogate, which is not text"
ACCEPTED = "must be bytes, str, dict, list, a dataclass or an object with __json__() or model_dump()"


@pytest.mark.parametrize(
    ("body", "field", "limit", "fix"),
    [
        (
            Cart([Line("a", 1), Line("b", 1j)]),
            "body['lines'][1]['price']",
            f"is of type complex, {NO_WORD}",
            "pass plain values, or give the class a __json__() with plain values",
        ),
        ({"for": [timedelta(1)]}, "body['for'][0]", f"is of type timedelta, {NO_WORD}", "pass its total_seconds()"),
        ([PurePosixPath("/a")], "body[0]", f"is of type PurePosixPath, {NO_WORD}", "pass its text: str(path)"),
        (
            [Odd.SET],
            "body[0]",
            f"is of type frozenset, {NO_WORD}",
            "pass a list, sorted if the bytes should always be the same",
        ),
        ({ID: 1}, "body", f"the JSON name {ID!r} must be a str", "convert the dict's keys"),
        (ID, "body", f"{ACCEPTED}, not UUID", "put the value into a dict or a list"),
        (Colour.RED, "body", f"{ACCEPTED}, not Colour", "put the value into a dict or a list"),
        (
            [{"a"}],
            "body[0]",
            f"is of type set, {NO_WORD}",
            "pass a list, sorted if the bytes should always be the same",
        ),
        ({"raw": b"x"}, "body['raw']", f"is of type bytes, {NO_WORD}", "decode the bytes, or pass base64 text"),
        (
            {"what": object()},
            "body['what']",
            f"is of type object, {NO_WORD}",
            "pass plain values, or give the class a __json__() with plain values",
        ),
        ({"rate": float("nan")}, "body['rate']", f"is nan, {NO_WORD}", "pass None, or text"),
        ({"a": {1: "b"}}, "body['a']", "the JSON name 1 must be a str", "convert the dict's keys"),
        ({"a": "\ud800"}, "body['a']", NOT_TEXT, "decode the original bytes properly"),
        ({"\ud800": 1}, "body", f"the JSON name '\\ud800' {NOT_TEXT}", "decode it properly"),
        ((1, 2), "body", f"{ACCEPTED}, not tuple", "pass a list"),
        (NOON, "body", f"{ACCEPTED}, not datetime", "put the value into a dict or a list"),
        (42, "body", f"{ACCEPTED}, not int", "put the value into a dict or a list"),
    ],
    ids=lambda value: f"{value!a:.30}",
)  # fmt: skip
def test_a_refusal_says_where_what_and_how_to_mend_it(body, field, limit, fix):
    with pytest.raises(InvalidMessageError) as caught:
        Message("orders", body)

    assert str(caught.value) == f"{field}: {limit}; {fix}"


def test_a_refusal_of_something_deep_inside_stays_short():
    body: object = object()
    for _ in range(50):
        body = {"a rather long name of a field that goes on and on and on": body}

    with pytest.raises(InvalidMessageError) as caught:
        Message("orders", body)

    assert len(str(caught.value)) < 300
    assert caught.value.limit == "is of type object, which JSON has no word for"


def test_a_circle_through_objects_is_refused():
    line = Line("a", None)
    line.price = [line]

    with pytest.raises(InvalidMessageError) as caught:
        Message("orders", line)

    assert str(caught.value) == "body['price'][0]: contains itself; pass a value without circles"


def test_a_hook_that_never_ends_is_refused():
    class Endless:
        def __json__(self) -> object:
            return Endless()

    with pytest.raises(InvalidMessageError, match="nested too deeply"):
        Message("orders", Endless())


def test_what_a_hook_raises_on_its_own_account_is_the_callers():
    """A lost connection in a lazily loaded attribute is no fault of the message, and may be tried again."""

    class Lazy:
        def __json__(self) -> object:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        Message("orders", {"lazy": Lazy()})


@pytest.mark.parametrize(
    "body", [MagicMock(), {"mock": MagicMock()}, Cents, [Ticket]], ids=["mock", "mock inside", "class", "class inside"]
)
def test_only_a_type_that_defines_a_hook_has_one(body):
    """A mock answers to every name, and a class is not one of its objects."""
    with pytest.raises(InvalidMessageError):
        Message("orders", body)


def test_an_object_is_asked_once():
    asked = []

    class Counted:
        def __json__(self) -> object:
            asked.append(self)
            return {}

    Message("orders", Counted())

    assert len(asked) == 1


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_bytes_stay_as_they_are(data):
    assert [Message("orders", kind(data)).body for kind in (bytes, bytearray, memoryview)] == [data] * 3


@settings(max_examples=200)
@given(st.text(max_size=100))
def test_text_comes_back_as_it_was(text):
    assert Message("orders", text).text() == text


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    ).filter(lambda value: isinstance(value, dict | list))
)
def test_json_comes_back_as_it_was(value):
    message = Message("orders", value)

    assert message.json() == value
    assert message.body == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("data", "content_type", "text"),
    [
        (b"caf\xe9", "text/plain; charset=iso-8859-1", "café"),
        (b"caf\xe9", 'text/plain;charset="latin-1"; format=flowed', "café"),
        ("ü".encode("utf-16"), "TEXT/PLAIN; CHARSET=utf-16", "ü"),
        ("ü".encode(), "text/plain", "ü"),
        ("ü".encode(), None, "ü"),
        ("ü".encode(), "application/octet-stream", "ü"),
    ],
)
def test_text_is_read_by_the_charset_that_the_message_names(data, content_type, text):
    assert Message("orders", data, content_type=content_type).text() == text


def test_json_is_utf_8_whatever_the_content_type_says():
    message = Message("orders", '{"a":"ü"}'.encode(), content_type="application/json; charset=iso-8859-1")

    assert message.json() == {"a": "ü"}


@pytest.mark.parametrize(
    ("data", "content_type", "said"),
    [
        (b"\xff", None, "without a content type, is not UTF-8 text: 'utf-8' codec can't decode byte 0xff"),
        (b"a", "text/plain; charset=klingon", "of content type text/plain; charset=klingon, is not klingon text"),
        (b"a", "text/plain; charset=hex", "is not hex text"),
    ],
)
def test_what_is_not_text_says_which_message_it_was(data, content_type, said):
    message = Message("orders", data, content_type=content_type)

    with pytest.raises(InvalidMessageError) as caught:
        message.text()

    assert f"body: of message {message.message_id}, " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"NaN", b"[-Infinity]", b"[" * 100_000, b"\xef\xbb\xbf1"])
def test_what_is_not_json_says_which_message_it_was(data):
    message = Message("orders", data, content_type="text/csv")

    with pytest.raises(InvalidMessageError) as caught:
        message.json()

    assert f"body: of message {message.message_id}, of content type text/csv, is not JSON: " in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", ["é", {"a": "é"}, Cents(1)], ids=lambda body: type(body).__name__)
def test_a_charset_that_contradicts_the_encoding_is_refused(body):
    with pytest.raises(InvalidMessageError) as caught:
        Message("orders", body, content_type="text/plain; charset=latin-1")

    assert caught.value.field == "content_type"


@pytest.mark.parametrize("charset", ["utf-8", "UTF8", '"utf-8"'])
def test_a_charset_that_names_the_encoding_is_taken(charset):
    assert Message("orders", "é", content_type=f"text/plain; charset={charset}").text() == "é"

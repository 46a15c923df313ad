"""What people, files and attackers put into a message: seeds for its fields, and bodies of every kind."""

import dataclasses
import math
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

MIB = 1024 * 1024

TEXTS: list[str] = [
    "",
    "a",
    *("x" * size for size in (249, 250, 255, 256, 1023, 1024, 1025, 16_384, 65_535, 65_536)),
    "k" * (MIB + 1),
    "nul\0inside",
    "nul at the end\0",
    "\0",
    "lone \ud800",
    "\udfff lone",
    "\ufeffmark",
    "line\u2028separator",
    "paragraph\u2029separator",
    "\u202eright to left",
    "\u200bzero width",
    "emoji 😀 👩\u200d👩\u200d👧",
    "kéy",
    "ke\u0301y",
    "KEY",
    "key",
    "key ",
    " key",
    "\tkey",
    "key\u00a0",
    "e" + "\u0301" * 10_000,
    "café".encode().decode("latin-1"),
    "line\rline",
    "line\nline",
    "line\r\nx-injected: yes",
    "line\u0085line",
    "\x1b[31mred",
    "\x7f",
    "with:colon",
    "with space",
    ":path",
    "ü-name",
    "'; DROP TABLE outbox_message; --",
    "100%_\\",
    "%s %(x)s {0} {topic} ${jndi:ldap://x} :name",
    ":topic",
    ".",
    "..",
    "...",
    "/",
    "#",
    "*",
    ">",
    "a.*.b",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "NULL",
    "null",
    "None",
    "a|b",
    "{}",
    "\\x00",
    "\\",
    '"',
    "'",
    "\U0010ffff",
    "Nats-Msg-Id",
    "outbox-topic",
    "Content-Type",
]

NOT_TEXTS: list[object] = [b"bytes", 1, 1.5, True, ["list"], {"a": 1}, uuid.UUID(int=1), Decimal(1), object()]


@dataclasses.dataclass
class Order:
    """A body as an application has it."""

    id: int
    name: str


@dataclasses.dataclass
class WithMoment:
    """A body that JSON has no word for."""

    at: datetime


class Model:
    """A body that says itself what it is as JSON, as pydantic's models do."""

    def __init__(self, dumped: object) -> None:
        self.dumped = dumped

    def model_dump(self, *, mode: str) -> object:
        """What it is."""
        assert mode == "json"
        return self.dumped


class Money:
    """A body that says itself what it is as JSON, by the name that JSON libraries look for."""

    def __init__(self, said: object) -> None:
        self.said = said

    def __json__(self) -> object:
        """What it is."""
        return self.said


class Older:
    """A hook of another framework, which wants an argument."""

    def __json__(self, request: object) -> object:
        """Never gets here."""
        return request


def nested(depth: int) -> list[Any]:
    """Lists within lists."""
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


circle: list[Any] = []
circle.append(circle)

#: Bodies that arrive.
GOOD_BODIES: list[object] = [
    b"",
    b"\0",
    b"\xff\xfe\x00\x80 not text",
    bytes(range(256)),
    bytearray(b"array"),
    memoryview(b"0123456789")[::2],
    "",
    "text \0 with NUL",
    "emoji 😀 \ufeff\u2028",
    {},
    [],
    {"": ""},
    {"nul": "\0", "mark": "\ufeff", "line": "\u2028"},
    [1, 2.5, None, True, False, "x", -0.0, 1e200, 2**53 + 1, 2**80, -(2**200)],
    nested(100),
    Order(1, "ann"),
    Model({"id": 1}),
    Model(["a"]),
    Model("text"),
    Model(None),
    {"tuple": (1, 2)},
    Money({"cents": 150}),
    Money("text"),
    {"price": Money([1, "EUR"]), "order": Order(1, "ann"), "model": [Model({"id": 1})]},
    Money(Order(1, "ann")),
    {
        "decimal": Decimal("1.10"),
        "when": datetime(2026, 1, 1, tzinfo=UTC),
        "day": date(1, 1, 1),
        "id": uuid.UUID(int=1),
    },
    WithMoment(datetime(1, 1, 1, tzinfo=UTC)),
    Money(datetime(2026, 1, 1, tzinfo=UTC)),
    b"x" * (4 * MIB),
    "é" * (2 * MIB),
]

#: Bodies that are refused.
BAD_BODIES: list[object] = [
    None,
    1,
    1.5,
    True,
    Decimal("1.5"),
    datetime(2026, 1, 1, tzinfo=UTC),
    uuid.UUID(int=1),
    {1, 2},
    (1, 2),
    object(),
    Order,
    Model,
    "lone \ud800",
    {"lone": "\udfff"},
    {"\ud800": 1},
    {"nan": math.nan},
    {"inf": math.inf},
    [-math.inf],
    [float("1e400")],
    {1: "a"},
    {True: "a"},
    {None: "a"},
    {"a": {2: "b"}},
    {1: "a", "1": "b"},
    {uuid.UUID(int=1): "id"},
    {date(1, 1, 1): "when"},
    {"bytes": b"x"},
    {"set": {1}},
    Model({1: "a"}),
    Model({"a": math.nan}),
    Money({1: "a"}),
    Money,
    Older(),
    {"older": Older()},
    {"class": Money},
    {"price": Money(math.inf)},
    nested(100_000),
    circle,
    b"x" * (4 * MIB + 1),
    "é" * (2 * MIB) + "x",
    {"large": "x" * (4 * MIB)},
]

UTC14 = timezone(timedelta(hours=14))

GOOD_TIMES: list[datetime] = [
    datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    datetime(1970, 1, 1, 1, tzinfo=UTC14) + timedelta(days=1),
    datetime(2016, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime(2024, 2, 29, 12, 30, tzinfo=timezone(-timedelta(hours=23, minutes=59))),
    datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=UTC),
    datetime(8999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
]
BAD_TIMES: list[object] = [
    datetime(2026, 1, 1),  # noqa: DTZ001 - that it has no zone is the point
    datetime.min,  # noqa: DTZ901
    datetime.min.replace(tzinfo=UTC),
    datetime.min.replace(tzinfo=UTC14),
    datetime.max.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))),
    datetime(1969, 12, 31, tzinfo=UTC),
    datetime(9000, 1, 1, tzinfo=UTC),
    date(2026, 1, 1),
    "2026-12-31T23:59:60Z",
    "infinity",
    0,
    1e20,
    math.inf,
    timedelta(1),
]
GOOD_DELAYS: list[timedelta] = [timedelta(0), timedelta(microseconds=1), timedelta(days=36_525)]
BAD_DELAYS: list[object] = [
    timedelta(microseconds=-1),
    timedelta.min,
    timedelta.max,
    timedelta(36_526),
    5,
    True,
    "",
    "0s",
    "1 h",
    "1H",
    "24h",
    ["1h"],
]

"""Tables show the same at any width of a terminal: nothing is cut off, and nothing is wider than the terminal."""

import re
from collections import Counter

import pytest

from outbox import Done, Outbox, Reject, Relay, Unavailable
from outbox.cli.tables import folded, shown_width, table_lines
from tests.rocketmq.halves import ask, begun
from tests.support.command_line import outbox

WIDTHS = [80, 100, 120, 200]
NAME = "relay-of-the-invoicing-department-eu-001"
KEYS = ["invoice-0", "invoice-" + "0" * 31 + "1", "顧客-注文-番号-000000000000000042", "заказ-номер-" + "0" * 27 + "7"]
TOPIC = "dead.letters.of.the.invoicing.department"
ERROR = "the message is larger than the maximum that this stream takes: 1048576 bytes"


class Destination:
    """Rejects one topic, has no stream for another."""

    destination = "nats://messages-production-eu-central-1.example.internal:4222/shop"

    def send(self, messages):
        """One answer for each topic."""
        answers = {TOPIC: Reject(ERROR), "nowhere": Unavailable("no JetStream stream takes subject 'nowhere'")}
        return [answers.get(message.topic, Done()) for message in messages]

    def close(self):
        """Nothing is open."""


@pytest.fixture
def shop(sqlite_engine):
    """Dead letters with long and foreign names, and one that waits."""
    sender = Outbox(sqlite_engine)
    with sender.begin() as session:
        for topic in ("fine", "nowhere"):
            sender.send(session, topic, b"1")
        for key in KEYS:
            sender.send(session, TOPIC, b"1", key=key)
    Relay(sender, Destination(), name=NAME).until_empty()
    return sqlite_engine


def letters(shown: str) -> Counter[str]:
    """What is shown, without blanks and rules."""
    return Counter(re.sub(r"[\s─]", "", shown))


@pytest.fixture
def terminal(monkeypatch):
    """Have the command find a terminal of a width."""

    def of(width: int) -> None:
        monkeypatch.setattr("outbox.cli.output.terminal_width", lambda: width)

    return of


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["dead list", "subscriptions list", "status"])
def test_a_terminal_shows_every_letter_that_a_pipe_shows(shop, terminal, command, width):
    piped = re.sub(r"\d", "0", outbox(shop, *command.split()).out)
    terminal(width)

    shown = re.sub(r"\d", "0", outbox(shop, *command.split()).out)

    assert max(map(shown_width, shown.splitlines())) <= width
    assert letters(piped) - letters(shown) == Counter()


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_and_short_keys_are_never_parted(shop, terminal, width):
    ids = {str(each["id"]) for each in outbox(shop, "dead", "list", "--json").json["dead_letters"]}
    terminal(width)

    words = outbox(shop, "dead", "list").out.split()

    assert ids | {"invoice-0", "ID", "ERROR", "ATTEMPTS"} <= set(words)


GROUP = "producer-of-the-invoicing-department-eu1"
REAL_TOPIC = "orders_of_the_invoicing_department_eu_01"
ANSWER = "顧客-注文-番号: the ledger does not answer"


@pytest.fixture
def transactions(sqlite_engine):
    """Pending and given-up transactions, with long names and an answer of foreign letters."""

    def fail(_message):
        raise RuntimeError(ANSWER)

    given_up = begun(sqlite_engine, REAL_TOPIC, group=GROUP)
    ask(sqlite_engine, group=GROUP, answer=fail)
    asked = begun(sqlite_engine, REAL_TOPIC, "mail", group=GROUP)
    ask(sqlite_engine, group=GROUP, answer=fail, again=False)
    return sqlite_engine, [given_up.id, asked.id, begun(sqlite_engine).id]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_terminal_shows_each_transaction_with_an_id_that_can_be_copied(transactions, terminal, width):
    engine, ids = transactions
    piped = outbox(engine, "half", "list").out
    terminal(width)

    shown = outbox(engine, "half", "list").out

    assert max(map(shown_width, shown.splitlines())) <= width
    assert letters(re.sub(r"\d", "0", piped)) - letters(re.sub(r"\d", "0", shown)) == Counter()
    assert set(ids) <= set(shown.split())
    for whole in (GROUP, REAL_TOPIC, ANSWER):
        assert letters(whole) - letters(shown) == Counter()


HEADERS, ROW = ("NAME", "N", "ERROR"), ("relay", "17", "no stream takes it")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["NAME    N  ERROR", "relay  17  no stream takes it"]),
        (29, ["NAME    N  ERROR", "─" * 29, "relay  17  no stream takes it"]),
        (27, ["NAME   N ERROR", "─" * 27, "relay 17 no stream takes it"]),
        (24, ["NAME   N ERROR", "─" * 24, "relay 17 no stream takes", "         it"]),
        (18, ["NAME   relay", "N      17", "ERROR  no stream", "       takes it"]),
    ],
)
def test_the_layout_goes_by_the_width(width, lines):
    assert table_lines(HEADERS, [ROW], numbers=("N",), width=width) == lines


def test_what_has_to_be_copied_is_never_folded():
    rows = [("01a204f5-a718-720e-bdbf", "department of invoices")]

    lines = table_lines(("ID", "GROUP"), rows, whole=("ID",), width=37)

    assert lines == [
        "ID                      GROUP",
        "─" * 37,
        "01a204f5-a718-720e-bdbf department of",
        "                        invoices",
    ]
    assert table_lines(("ID", "GROUP"), rows, width=37)[2].startswith("01a204f5-a718-720e ")


def test_a_long_text_in_the_last_column_stands_below_its_row():
    lines = table_lines(HEADERS, [("relay", "17", ERROR)] * 2, numbers=("N",), width=32)

    text = ["  the message is larger than the", "  maximum that this stream", "  takes: 1048576 bytes"]
    assert lines == ["NAME   N", "  ERROR", "─" * 32, *["relay 17", *text] * 2]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("invoice-0", 12, ["invoice-0"]),
        ("invoice-0", 8, ["invoice-", "0"]),
        ("no stream takes it", 10, ["no stream", "takes it"]),
        ("顧客注文", 4, ["顧客", "注文"]),
        ("顧客注文", 5, ["顧客", "注文"]),
        ("", 5, [""]),
        ("a verylongword", 6, ["a", "verylo", "ngword"]),
        ("exact fit", 5, ["exact", "fit"]),
    ],
)
def test_a_cell_is_folded_at_blanks_where_there_are_any(text, width, lines):
    assert folded(text, width) == lines

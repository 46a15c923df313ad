"""Tables show the same at any width of a terminal: nothing is cut off, and what needs a person is in colour."""

import re
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from outbox import Done, Message, Outbox, Reject, Relay, Unavailable
from outbox.cli.status import show_watched
from outbox.cli.tables import table_lines
from outbox.model.command import OF_ENVIRONMENT
from tests.rocketmq.halves import ask, begun
from tests.support.command_line import at_a_terminal, outbox

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
@pytest.mark.parametrize("command", ["parked list", "subscriptions list", "status"])
def test_a_terminal_shows_every_letter_that_a_pipe_shows(shop, terminal, command, width):
    piped = re.sub(r"\d", "0", outbox(shop, *command.split()).out)
    terminal(width)

    shown = re.sub(r"\d", "0", outbox(shop, *command.split()).out)

    assert letters(piped) - letters(shown) == Counter()


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_and_short_keys_are_never_parted(shop, terminal, width):
    ids = {str(each["id"]) for each in outbox(shop, "parked", "list", "--json").json["parked"]}
    terminal(width)

    words = outbox(shop, "parked", "list").out.split()

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

    assert letters(re.sub(r"\d", "0", piped)) - letters(re.sub(r"\d", "0", shown)) == Counter()
    assert set(ids) <= set(shown.split())
    assert [each in shown for each in (GROUP, REAL_TOPIC, ANSWER)] == [True] * 3


HEADERS, ROW = ("NAME", "N", "ERROR"), ("relay", "17", "no stream takes it")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["NAME    N  ERROR", "relay  17  no stream takes it"]),
        (29, ["NAME    N  ERROR", "─" * 29, "relay  17  no stream takes it"]),
        (27, ["NAME   N ERROR", "─" * 27, "relay 17 no stream takes it"]),
        (26, ["NAME   N", "  ERROR", "─" * 26, "relay 17", "  no stream takes it"]),
        (7, ["NAME   relay", "N      17", "ERROR  no stream takes it"]),
    ],
)
def test_the_layout_goes_by_the_width(width, lines):
    assert table_lines(HEADERS, [ROW], numbers=("N",), width=width) == lines


def test_rows_of_a_narrow_terminal_have_an_empty_line_between_them():
    assert table_lines(("ID", "KEY"), [("1", ""), ("2", "b")], width=1) == ["ID   1", "KEY", "", "ID   2", "KEY  b"]


def test_columns_are_as_wide_as_the_letters_of_east_asia():
    lines = table_lines(("KEY", "N"), [("顧客", "1"), ("e\u0301", "2")])

    assert lines == ["KEY   N", "顧客  1", "e\u0301     2"]


@pytest.mark.parametrize(("environment", "in_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_shows_in_colour_what_needs_a_person(shop, environment, in_colour):
    shown = at_a_terminal(shop, "status", **environment)
    piped = outbox(shop, "status", **environment)

    red, yellow = "\x1b[31m", "\x1b[33m"
    assert (f"{red}\x1b[1m{len(KEYS)}" in shown.out, f"{yellow}\x1b[1mwarning:" in shown.err) == (in_colour,) * 2
    assert "\x1b" not in piped.out + piped.err


def test_a_watched_status_has_clock_database_rates_and_marks(sqlite_engine, capsys):
    """Only of the second look on: of the first nothing is known to have changed."""
    outbox_of_shop = Outbox(sqlite_engine)
    first = outbox_of_shop.admin.look()
    with outbox_of_shop.begin() as session:
        outbox_of_shop.send_all(session, [Message("orders", b"1") for _ in range(30)])
    second = outbox_of_shop.admin.look()
    second = replace(second, at=first.at + timedelta(seconds=2))

    show_watched(first, None, "shop.db", OF_ENVIRONMENT)
    before = capsys.readouterr().out
    show_watched(second, first, "shop.db", OF_ENVIRONMENT)
    after = capsys.readouterr().out

    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  shop.db\n", before)
    assert ("▲" in before, "  shop.db, 15 messages/s written\n" in after, "30▲ +15/s" in after) == (False, True, True)

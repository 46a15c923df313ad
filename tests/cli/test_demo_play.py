"""The play of the demo, its judge and its picture, without processes and servers."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from outbox.cli.demo import play
from outbox.cli.demo.judge import Judgement, Receipt, judge
from outbox.cli.demo.picture import History, drawn
from outbox.cli.demo.site import Books, prepared
from outbox.cli.demo.staff import ProcessFailedError, Staff
from outbox.cli.demo.writer import Writer


class Town:
    """A place where everything happens at once: shops place what they may, and a relay sends it.

    `idle`: a relay that sends nothing. `swallowed`: the message that the destination loses.
    """

    url, is_postgresql = "file:///town", False

    def __init__(self, *, idle: str = "", swallowed: str = "") -> None:
        self.destination = self.books = self
        self._idle, self._swallowed = idle, swallowed
        self._allowed: dict[str, int] = {}
        self._shares: dict[str, int] = {}
        self._relays: set[str] = set()
        self._sent: set[str] = set()

    def allow(self, shop: str, orders: int) -> None:
        """Raise the number of orders of a shop."""
        self._allowed[shop] = orders

    def writer(self, shop: str, share: int, _pause: float) -> Any:
        """Open a shop, which works until it may place its whole share."""
        self._shares[shop] = share
        return SimpleNamespace(
            kill=lambda: None, said=lambda: "", is_running=lambda: self._allowed[shop] < self._shares[shop]
        )

    def relay(self, name: str, _to: str, _lease: str) -> Any:
        """Start a relay."""
        self._relays.add(name)
        left = partial(self._relays.discard, name)
        return SimpleNamespace(name=name, kill=left, stop=left, is_running=lambda: True)

    def committed(self) -> dict[str, int]:
        """Return the three changes of each order."""
        return {f"{shop}, order {n}": 3 for shop, orders in self._allowed.items() for n in range(orders)}

    def changes(self) -> int:
        """Return the number of changes."""
        return sum(self.committed().values())

    def receive(self) -> list[Receipt]:
        """Return the receipts since the last call; none while no relay sends."""
        if not self._relays - {self._idle}:
            return []
        due = [key for key in self.committed() if key not in self._sent]
        self._sent.update(due)
        every = [Receipt(key, version, f"{key}: {version}") for key in due for version in (1, 2, 3)]
        return [one for one in every if one.message_id != self._swallowed]

    def tell(self, _text: str) -> None:
        """Do nothing: the history has the events, too."""

    def progress(self, *_numbers: int) -> None:
        """Do nothing."""


@pytest.fixture
def played(monkeypatch) -> Callable[..., tuple[Judgement, list[str]]]:
    """Perform a play in a town; return the judgement, and the events."""
    monkeypatch.setattr(play, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(play, "_PATIENCE_SECONDS", 0.0)

    def perform(orders: int, **faults: str) -> tuple[Judgement, list[str]]:
        town: Any = Town(**faults)
        performed = play.Play(town, town, town, orders)
        judgement = performed.perform(keep=False)
        return judgement, [event for _, event in performed.history.marks]

    return perform


@pytest.mark.parametrize("orders", [*range(4, 12), 2000])
def test_relay_2_has_something_to_send_although_relay_1_has_sent_everything(played, orders):
    """The shops wait for the play: some orders are placed only when relay 1 is gone."""
    judgement, events = played(orders)

    number = 3 * orders
    fine = {"lost": 0, "phantom": 0, "duplicates": 0, "violations": 0}
    assert judgement == Judgement(committed=number, received=number, **fine)
    assert events == ["relay 1 sends", "relay 1 is killed", "shop 1 is killed", "relay 2 has taken over"]


def test_a_takeover_that_never_comes_ends_the_demo_with_an_error(played):
    with pytest.raises(ProcessFailedError, match="relay 2 has sent nothing for 0 s"):
        played(8, idle="relay 2")


def test_a_message_that_the_destination_swallows_is_judged_lost(played):
    judgement, _ = played(8, swallowed="shop 2, order 1: 3")

    assert (judgement.lost, judgement.is_sound) == (1, False)


def test_a_shop_places_no_more_orders_than_it_may_by_now(tmp_path, monkeypatch):
    """The shop rests, and goes on when it may place more."""
    monkeypatch.chdir(tmp_path)
    url, staff = f"sqlite:///{tmp_path}/shop.db", Staff(tmp_path, {})
    service = prepared(url)
    seen: list[int] = []
    later = iter([2, 2, 5])

    def rest() -> None:
        seen.append(books.changes())
        staff.allow("shop 1", next(later))

    staff.allow("shop 1", 2)
    with closing(Books(url, service.Order)) as books:
        Writer(service, "shop 1", 5, 0.0, rest).run()
        seen.append(books.changes())
    service.engine.dispose()

    assert seen == [3 * 2, 3 * 2, 3 * 2, 3 * 5]


def history(*versions: int) -> list[Receipt]:
    return [Receipt("order-1", version, f"id-{version}") for version in versions]


def test_the_picture_shows_what_was_committed_and_received_and_when_what_happened():
    """Events in their order in time, one below the other."""
    history = History(samples=[(0.0, 0, 0), (1.0, 10, 5), (2.0, 20, 20)], marks=[(2.0, "it is over"), (1.0, "half")])

    picture = ET.fromstring(drawn(history))

    lines = [line.get("points") for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert lines == ["70.0,370.0 475.0,250.0 880.0,130.0", "70.0,370.0 475.0,310.0 880.0,130.0"]
    assert words[:5] == ["20", "0", "2 s", "half", "it is over"]
    assert history.first_with_more_received_than(5) == 2.0
    assert history.first_with_more_received_than(20) is None


def test_a_run_without_anything_has_a_picture():
    assert ET.fromstring(drawn(History())).tag.endswith("svg")


@pytest.mark.parametrize(
    ("receipts", "wrong"),
    [
        (history(1, 2, 3), {}),
        (history(1, 2, 3, 2, 3), {"duplicates": 2}),
        (history(1, 2), {"lost": 1}),
        (history(1, 3, 2), {"violations": 2}),
        (history(1, 3, 2, 3), {"violations": 2, "duplicates": 1}),
        (history(2, 3), {"violations": 1, "lost": 1}),
        (history(1, 2, 3, 4), {"phantom": 1}),
        ([*history(1, 2, 3), Receipt("order-1", 2, "another")], {"phantom": 1}),
        ([*history(1, 2, 3), Receipt("order-2", 1, "another")], {"phantom": 1}),
    ],
)
def test_the_judge_finds_what_is_wrong(receipts, wrong):
    """Of an order with three committed changes."""
    fine = {"lost": 0, "phantom": 0, "duplicates": 0, "violations": 0}

    judgement = judge({"order-1": 3}, receipts)

    assert judgement == Judgement(committed=3, received=len(receipts), **fine | wrong)
    assert judgement.is_sound == (set(wrong) <= {"duplicates"})

"""The play: shops place orders, a relay and a shop are killed, and at the end orders and receipts are compared.

The shops wait for the play: some orders are placed only after each kill, so that there is work for whoever takes over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox.cli.demo.judge import Judgement, Receipt, judge
from outbox.cli.demo.picture import History
from outbox.cli.demo.show import Show
from outbox.cli.demo.site import Site
from outbox.cli.demo.staff import Child, ProcessFailedError, Staff
from outbox.cli.demo.writer import ROLLED_BACK

SHOPS = 4
CHANGES = 3  # of each order: placed, paid, shipped
LEASE = "5s"

_TICK_SECONDS = 0.2
#: After so long without progress, messages that have not come count as lost. A takeover takes as long as a lease, and
#: longer on a busy machine.
_PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 2.0
_SHOPS_REST = "no shop has committed anything"


class Play:
    """One run of the demo on a site."""

    def __init__(self, site: Site, staff: Staff, show: Show, orders: int) -> None:
        self._site = site
        self._staff = staff
        self._show = show
        self._orders = orders
        self._expected = orders * CHANGES
        self._committed = 0
        self._receipts: list[Receipt] = []
        self._first_receipt = self._last_receipt = self._moved_at = time.monotonic()
        self._shops: list[Child] = []
        self._relays: list[Child] = []
        #: The course of the run, for the picture.
        self.history = History()
        self._began = time.monotonic()

    @property
    def rate(self) -> float:
        """Messages per second from the first receipt to the last, whatever happened in between."""
        seconds = self._last_receipt - self._first_receipt
        return len(self._receipts) / seconds if seconds > 0 else 0.0

    @property
    def rollbacks(self) -> int:
        """The number of rolled back transactions, as the shops say."""
        return sum(shop.said().count(f"{ROLLED_BACK}\n") for shop in self._shops)

    def perform(self, *, keep: bool) -> Judgement:
        """Run the whole play; return the comparison of orders and receipts. `keep`: the last relay goes on."""
        self._show.tell(f"{SHOPS} shops place {self._orders:,} orders, and move each from placed to paid to shipped:")
        self._show.tell(f"{self._expected:,} transactions with a message each, and some that are rolled back")
        self._allow(self._orders // 2)
        self._shops = [self._shop(number) for number in range(SHOPS)]
        self._relays = [self._relay("relay 1")]
        self._until(lambda: bool(self._receipts), "relay 1 has sent nothing")
        self._relays.append(self._relay("relay 2"))
        self._tell("relay 1 sends", ", relay 2 stands by")
        self._until(lambda: self._committed > self._expected // 4, _SHOPS_REST)
        self._relays.pop(0).kill()
        # Relay 1 may have sent all of that, although not all has been received yet.
        before = self._site.books.changes()
        self._tell("relay 1 is killed", f" with SIGKILL; its lease of {LEASE} has to run out")
        self._allow(self._orders * 3 // 4)
        self._until(lambda: self._committed > self._expected // 2, _SHOPS_REST)
        self._shops[0].kill()
        self._tell("shop 1 is killed", " with SIGKILL, whatever it was at, and started again")
        self._shops[0] = self._shop(0)
        self._until(lambda: len(self._receipts) > before, "relay 2 has sent nothing")
        # Told only now, but drawn where it happened.
        self._tell("relay 2 has taken over", at=self.history.first_with_more_received_than(before))
        self._allow(self._orders)
        self._until(lambda: not self._shops_work(), _SHOPS_REST)
        self._show.tell("every order is placed, paid and shipped")
        self._comes(lambda: not self._lost())
        if not keep:
            for relay in self._relays:
                relay.stop()
            self._relays = []
        self._tick()
        return judge(self._site.books.committed(), self._receipts)

    def arrived(self) -> list[Receipt]:
        """Return the receipts since the last look."""
        found = self._site.destination.receive()
        if found:
            self._moved_at = self._last_receipt = time.monotonic()
            self._first_receipt = self._first_receipt if self._receipts else self._last_receipt
            self._receipts += found
        return found

    def _tell(self, event: str, details: str = "", *, at: float | None = None) -> None:
        """Tell of an event, which the picture has without its details. `at`: the seconds, if not now."""
        self.history.marks.append((time.monotonic() - self._began if at is None else at, event))
        self._show.tell(event + details)

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition; raise an error with the words of `otherwise` if nothing moves any more."""
        if not self._comes(condition):
            raise ProcessFailedError(f"{otherwise} for {_PATIENCE_SECONDS:.0f} s")

    def _comes(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, as long as something moves; return whether the condition is true."""
        while not condition():
            self._tick()
            if time.monotonic() - self._moved_at > _PATIENCE_SECONDS:
                return condition()
        return True

    def _tick(self) -> None:
        time.sleep(_TICK_SECONDS)
        self.arrived()
        committed = self._site.books.changes()
        if committed > self._committed:
            self._committed, self._moved_at = committed, time.monotonic()
        self.history.samples.append((time.monotonic() - self._began, self._committed, len(self._receipts)))
        self._show.progress(self._committed, len(self._receipts), self._expected)
        self._shops_work()
        for relay in self._relays:
            if not relay.is_running():
                raise ProcessFailedError(f"{relay.name} ended by itself: {relay.said()[-2000:]}")

    def _lost(self) -> int:
        return judge(self._site.books.committed(), self._receipts).lost

    def _shops_work(self) -> bool:
        # All are asked, so that a shop that failed does not hide behind a shop that works.
        return True in [shop.is_running() for shop in self._shops]

    def _allow(self, orders: int) -> None:
        """Let the shops place orders until there are so many in all."""
        for number in range(SHOPS):
            self._staff.allow(_name_of(number), _share(orders, number))

    def _shop(self, number: int) -> Child:
        # One transaction stays open for a while: what others commit meanwhile has higher ids, and goes first.
        pause = _PAUSE_SECONDS if number == 1 and self._site.is_postgresql else 0.0
        return self._staff.writer(_name_of(number), _share(self._orders, number), pause)

    def _relay(self, name: str) -> Child:
        return self._staff.relay(name, self._site.destination.url, LEASE)


def _name_of(number: int) -> str:
    return f"shop {number + 1}"


def _share(orders: int, number: int) -> int:
    """Return how many of the first orders are those of a shop; the shops take turns."""
    return (orders + SHOPS - 1 - number) // SHOPS

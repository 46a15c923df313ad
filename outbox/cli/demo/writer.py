"""A process of the demo's order service: `python -m outbox.cli.demo.writer SHOP ORDERS PAUSE`.

The process places the missing orders of its shop, and moves on orders of all shops until all are shipped. A file says
how many orders the shop may place by now. Some transactions are rolled back after the message was written; one
transaction stays open for `PAUSE` seconds. After a kill the next process goes on from the committed orders. Each
rollback is a line of output.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from outbox.cli.demo.service import order_service

#: The line that it writes for each transaction that it rolled back.
ROLLED_BACK = "rolled back"

_ROLLED_BACK_SHARE = 0.1
#: All writers take some of the oldest open orders, so that several often change the same one.
_OLDEST = 60
_AT_HAND = 6
_SECONDS_BETWEEN_LOOKS = 0.05


def allowance_of(shop: str) -> str:
    """Return the name of the file that holds the number of orders that a shop may place by now."""
    return f"{shop.replace(' ', '-')}.orders"


class Declined(Exception):  # noqa: N818 - nothing went wrong
    """The business decides for a rollback."""


class Writer:
    """Places and moves on orders, until there is nothing left to do; calls `rest` while it may place no more."""

    def __init__(self, service: Any, shop: str, orders: int, pause: float, rest: Callable[[], None]) -> None:
        self._service = service
        self._shop = shop
        self._orders = orders
        self._pause = pause
        self._rest = rest
        self._allowance = Path(allowance_of(shop))
        self._random = random.Random(shop)

    def run(self) -> None:
        """Place an order and move two on, again and again, until no open order is left."""
        placed = self._placed()
        at_hand: list[int] = []
        while True:
            allowed = int(self._allowance.read_text())
            if placed < allowed:
                pause = self._pause if placed == self._orders // 4 else 0.0
                place = partial(self._service.place_order, self._shop, self._random.randint(1, 999))
                placed += self._decide(place, pause)
            for _ in range(2):
                at_hand = at_hand or self._open_orders()
                if at_hand:
                    self._decide(partial(self._service.advance_order, at_hand.pop()))
            if placed == allowed and not at_hand and not self._open_orders():
                if placed == self._orders:
                    return
                self._rest()

    def _decide(self, change: Callable[[], object], pause: float = 0.0) -> bool:
        """Make a change, then commit or roll back; return whether the change was committed."""
        try:
            with self._service.outbox.begin():
                change()
                time.sleep(pause)
                if self._random.random() < _ROLLED_BACK_SHARE:
                    raise Declined
        except Declined:
            sys.stdout.write(f"{ROLLED_BACK}\n")
            sys.stdout.flush()
            return False
        return True

    def _placed(self) -> int:
        order = self._service.Order
        with self._service.outbox.begin() as session:
            return int(session.scalar(select(func.count()).where(order.customer == self._shop)))

    def _open_orders(self) -> list[int]:
        order = self._service.Order
        with self._service.outbox.begin() as session:
            found = select(order.id).where(order.status != "shipped").order_by(order.id).limit(_OLDEST)
            oldest = list(session.scalars(found))
        return self._random.sample(oldest, min(_AT_HAND, len(oldest)))


if __name__ == "__main__":
    shop, orders, pause = sys.argv[1:]
    Writer(order_service(), shop, int(orders), float(pause), partial(time.sleep, _SECONDS_BETWEEN_LOOKS)).run()

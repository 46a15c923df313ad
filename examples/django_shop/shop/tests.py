"""Tests of the shop: `python manage.py test`."""

from django.test import TestCase

from outbox.testing import Capture
from shop.models import Order


class Orders(TestCase):
    """Each test is a transaction that Django rolls back, and the messages go with it."""

    def setUp(self) -> None:
        """Collect the messages of the test."""
        self.sent = self.enterContext(Capture())

    def place(self, total: int) -> int:
        """Place an order, and return the status of the answer."""
        order = {"customer": "ann", "total": total}
        return self.client.post("/orders", order, content_type="application/json").status_code

    def test_a_placed_order_is_told(self) -> None:
        """The row and the message are both there."""
        assert self.place(42) == 201
        order = Order.objects.get()
        self.sent.assert_sent("orders", key=f"order-{order.pk}", body={"id": order.pk, "total": 42})

    def test_a_refused_order_is_not_told(self) -> None:
        """Neither is there."""
        assert self.place(4200) == 409
        assert not Order.objects.exists()
        self.sent.assert_nothing_sent()

"""The steps of an order arrive in order, in several processes, and also after a failure.

    python steps.py

RocketMQ's own example of ordered messages: three orders with their steps, sent with a selector, so that the messages of
an order are in one queue. The listener fails when it sees a payment for the first time. Its queue waits for a moment,
and the payment comes again before the next step of the order.
"""

import time
from collections import defaultdict

from outbox import Message, Outbox, create_engine, migrate
from outbox.rocketmq import (
    ConsumeFromWhere,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    DefaultMQProducer,
    DefaultMQPushConsumer,
    MessageExt,
    MessageListenerOrderly,
    SelectMessageQueueByHash,
)

engine = create_engine("sqlite:///shop.db")
outbox = Outbox(engine)
producer = DefaultMQProducer("shop", outbox)

STEPS = ["created", "paid", "shipped", "finished"]
ORDERS = [15103111039, 15103111065, 15103117235]


class Fulfilment(MessageListenerOrderly):
    """Notes the steps of each order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: defaultdict[int, list[str]] = defaultdict(list)

    def consume_message(self, messages: list[MessageExt], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        """Note a step; refuse a payment at the first time, as a service does that is down for a moment."""
        for each in messages:
            step = each.message.json()
            if step["step"] == "paid" and each.reconsume_times == 0:
                context.suspend_current_queue_time_millis = 100
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
            self.seen[step["order"]].append(step["step"])
        return ConsumeOrderlyStatus.SUCCESS


def main() -> None:
    """Send the steps of all orders, each step in a transaction, and consume them."""
    migrate.upgrade(engine)
    for step in STEPS:
        for order in ORDERS:
            with outbox.begin():  # with the step itself, in your tables
                producer.send(Message("order-steps", {"order": order, "step": step}), SelectMessageQueueByHash(), order)

    fulfilment = Fulfilment()
    consumer = DefaultMQPushConsumer(
        "fulfilment", outbox, consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    )
    consumer.subscribe("order-steps")
    consumer.register_message_listener(fulfilment)
    with consumer:
        while not all(fulfilment.seen[order][-1:] == STEPS[-1:] for order in ORDERS):
            time.sleep(0.05)
    for order in ORDERS:
        print(f"{order}: {', '.join(fulfilment.seen[order])}")


if __name__ == "__main__":
    main()

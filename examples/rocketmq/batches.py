"""Ten thousand prices in batches, which no batch of RocketMQ's could hold at once.

    python batches.py

RocketMQ refuses a batch of more than 4 MiB. Its example has a splitter, which is `split_batch` here: batches of at most
1 000 000 bytes, in order. All of them are in one transaction, so that nobody sees half a price list.
"""

from collections.abc import Iterator
from datetime import timedelta

from outbox import Message, Outbox, create_engine, migrate
from outbox.rocketmq import DefaultMQProducer, MQClientError, SimpleConsumer, split_batch

engine = create_engine("sqlite:///prices.db")
outbox = Outbox(engine)
producer = DefaultMQProducer("shop", outbox)
TIME = timedelta(minutes=1)  # to write the labels


def prices() -> Iterator[Message]:
    """The prices of all articles, each with a text of its own."""
    for article in range(10_000):
        yield Message("prices", {"article": article, "price": article / 100, "text": "…" * 200})


def main() -> None:
    """Send the prices at once, which is refused, and in batches; then take some of them."""
    migrate.upgrade(engine)
    try:
        with outbox.begin():
            producer.send_batch(prices())
    except MQClientError as error:
        print(f"refused: {error}")

    with outbox.begin():
        sizes = []
        for batch in split_batch(prices()):
            producer.send_batch(batch)
            sizes.append(len(batch))
    print(f"sent: {sum(sizes)} prices in {len(sizes)} batches")

    consumer = SimpleConsumer("labels", outbox, {"prices": "*"})
    received = consumer.receive(32, TIME)
    for each in received:
        consumer.ack(each)
    print(f"received: {len(received)}, and {len(consumer.receive(32, TIME))} more")


if __name__ == "__main__":
    main()

"""Each group gets the messages that it asks for: by tags, or by a condition in SQL92 on the properties.

    python filters.py

The conditions are part of the statements that read the log, so a message that a group did not ask for is not even
fetched for it.
"""

from datetime import timedelta

from outbox import FilterError, Message, Outbox, create_engine, migrate
from outbox.rocketmq import DefaultMQProducer, MessageSelector, SimpleConsumer

engine = create_engine("sqlite:///shop.db")
outbox = Outbox(engine)
producer = DefaultMQProducer("shop", outbox)

ORDERS = [
    ("placed", {"region": "eu", "amount": "99.50"}),
    ("placed", {"region": "us", "amount": "250"}),
    ("paid", {"region": "eu", "amount": "250.00"}),
    ("shipped", {"region": "eu"}),
]
GROUPS = {
    "by-tags": MessageSelector.by_tag("paid || shipped"),
    "by-sql": MessageSelector.by_sql("region = 'eu' AND amount > 100"),
    "by-both": MessageSelector.by_sql("TAGS IN ('placed', 'paid') AND amount BETWEEN 90 AND 100"),
    "without-amount": MessageSelector.by_sql("amount IS NULL"),
}


def main() -> None:
    """Send four orders, and let four groups ask for them."""
    migrate.upgrade(engine)
    with outbox.begin():
        for tags, properties in ORDERS:
            text = f"{tags} in {properties['region']}"
            producer.send(Message("orders", text, tags=tags, headers=properties))

    for group, expression in GROUPS.items():
        with SimpleConsumer(group, outbox, {"orders": expression}) as consumer:
            found = [each.body.decode() for each in consumer.receive(32, timedelta(minutes=1))]
        print(f"{group}: {', '.join(found)}")

    try:
        MessageSelector.by_sql("region == 'eu'")
    except FilterError as error:
        print(error)


if __name__ == "__main__":
    main()

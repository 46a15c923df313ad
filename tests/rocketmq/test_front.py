"""RocketMQ's front, as the official Python client sees it."""

from tests.rocketmq.fronts import listening, producing


def test_a_producer_of_the_official_client_starts_and_says_good_bye(outbox, official):
    with listening(outbox) as front, producing(official, front, "orders") as producer:
        assert producer.is_running

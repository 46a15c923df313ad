"""What one class or function does. These tests start no server."""

import pytest


@pytest.fixture(scope="session")
def postgres() -> None:
    """None here."""
    pytest.fail("this test needs PostgreSQL: it belongs into the folder of its room, not into tests/unit")


@pytest.fixture(scope="session")
def nats() -> None:
    """None here."""
    pytest.fail("this test needs NATS: it belongs into the folder of its room, not into tests/unit")


@pytest.fixture(scope="session")
def rabbitmq() -> None:
    """None here."""
    pytest.fail("this test needs RabbitMQ: it belongs into the folder of its room, not into tests/unit")

"""Fixtures for destinations behind a network that fails; a module names each by what `placed` and the others return."""

from collections.abc import Callable, Iterator
from contextlib import closing
from operator import attrgetter
from typing import Any

import pytest

from tests.conftest import started
from tests.support.servers.proxy import TcpProxy


def begun(server: Callable[[], Any], scope: Any = "module") -> Any:
    """Return a fixture with a server of its own, to be killed and paused."""

    @pytest.fixture(scope=scope)
    def fixture() -> Iterator[Any]:
        with started(server) as found:
            yield found

    return fixture


def placed(kind: Callable[..., Any], server: str, port: str | None = "port") -> Any:
    """Return a fixture with a place of each test's own on the server of another fixture, behind a proxy.

    `port`: the attribute of the server; None: the server has a proxy itself.
    """

    @pytest.fixture
    def fixture(request: pytest.FixtureRequest) -> Iterator[Any]:
        found = request.getfixturevalue(server)
        if port is None:
            with closing(kind(found)) as place:
                yield place
            return
        with TcpProxy("127.0.0.1", attrgetter(port)(found)) as proxy, closing(kind(found, proxy)) as place:
            yield place

    return fixture


def opened(place: str) -> Any:
    """Return a fixture with a sender to the place of another fixture."""

    @pytest.fixture
    def fixture(request: pytest.FixtureRequest) -> Iterator[Any]:
        with closing(request.getfixturevalue(place).open()) as sender:
            yield sender

    return fixture

"""Messages of clients about themselves: settings on the stream, heartbeats and good-byes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from sys import intern

from outbox.rocketmq.front.calls import Call
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.protocol import RPCS, Wire
from outbox.rocketmq.front.settings import answered, topics_of
from outbox.rocketmq.front.statuses import Code, RefusedError, status
from outbox.store.fronts.groups import ConsumerGroup

#: No client needs its own names again: settings with more bytes come back without them, because clients that take no
#: answers would fill the memory.
_MOST_BYTES = 4096
_Command = RPCS["Telemetry"].response
_Beat = RPCS["Heartbeat"].response
_Gone = RPCS["NotifyClientTermination"].response


class Telemetry:
    """Answers settings, heartbeats and good-byes."""

    def __init__(
        self,
        clients: Clients,
        topics: Collection[str],
        groups: Mapping[str, ConsumerGroup],
        look: Callable[[Wire], Awaitable[None]],
    ) -> None:
        """`topics`, `groups`: of the catalog. `look`: looks for unknown topics and groups of a command."""
        self.clients = clients
        self._topics, self._groups, self._look = topics, groups, look

    async def hear(self, call: Call, command: Wire) -> Wire | None:
        """Return the answer to a command on a client's stream; None: it needs none.

        Raises:
            UnknownSettingsError: the settings are of no kind of client.
            RefusedError: there are too many clients, or the client is of a kind that is out.
        """
        if not command.HasField("settings"):
            return None
        with suppress(Exception):  # without the database a front goes on with what it knows
            await self._look(command)
        settings = answered(command.settings, self._groups.get(command.settings.subscription.group.name))
        named = topics_of(settings)
        # A client may send any number of names, and each of many clients the same ones.
        topics = frozenset(intern(name) for name in named if name in self._topics)
        self.clients.declared(call.client, settings.client_type, topics)
        if command.ByteSize() > _MOST_BYTES:
            names = (
                settings.publishing.topics if settings.HasField("publishing") else settings.subscription.subscriptions
            )
            del names[:]
        return _Command(status=status(), settings=settings)

    async def heartbeat(self, call: Call, _request: Wire) -> Wire:
        """Note a sign of life."""
        if not self.clients.beat(call.client):
            raise RefusedError(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings on its stream")
        return _Beat(status=status())

    async def terminated(self, call: Call, _request: Wire) -> Wire:
        """Forget the client."""
        self.clients.gone(call.client)
        return _Gone(status=status())

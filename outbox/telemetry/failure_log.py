"""Logs that messages are not accepted: since when, why, and the end. Never a line for each message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.model.command import OF_ENVIRONMENT, Commands
from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.model.subscription import Declaration, place_of
from outbox.runtime.clock import clock as monotonic
from outbox.runtime.named import named
from outbox.runtime.text import age, counted, one_line, without_server
from outbox.runtime.throttled_log import Throttle
from outbox.telemetry.events import Dead, DestinationAway, DestinationBack, Event, Outage, Parked, UpkeepRefused

logger = logging.getLogger("outbox")

_SAY_AGAIN_SECONDS = 60.0
#: At most so many topics are named at a time.
_MOST_LINES = 5
#: So many outages are kept in mind, and so many messages that wait for their end.
_MOST_TOPICS = _MOST_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Words:
    """The sentences about one subscription; topic None: all topics.

    `group`: the producer group of a check-back; None: messages go to a destination. Sentences about a check-back name
    no topic, because all half messages have one topic, RocketMQ's own. `commands`: about the outbox.
    """

    subscription: str
    destination: str
    group: str | None = None
    commands: Commands = OF_ENVIRONMENT

    def refused(self, topic: str | None) -> str:
        """Say that messages are not accepted, or half messages not decided on."""
        if self.group is not None:
            return f"nothing is found out about half messages of producer group {self.group}, they wait"
        if topic is None:
            return f"{self.destination} accepts nothing, messages wait"
        return f"{self.destination} does not accept topic {topic}, its messages wait"

    def accepted(self, topic: str | None) -> str:
        """Say that messages are accepted again, or half messages decided on."""
        if self.group is not None:
            return f"half messages of producer group {self.group} are decided on again"
        return f"{self.destination} accepts {'messages' if topic is None else f'topic {topic}'} again"

    def awaited(self, topic: str | None) -> str:
        """Say what the worker waits for."""
        if self.group is not None:
            return f"waits for an answer about half messages of producer group {self.group}"
        return f"waits for {self.destination}{'' if topic is None else f' to accept topic {topic}'}"

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Say how many became dead letters, name the first, and how to decide on them."""
        if self.group is None:
            said = counted(len(messages), "more dead letter")
            first = f"message {messages[0].id} of topic {messages[0].topic}"
            decide = self.commands.line("parked", "list", "--name", self.subscription, "--state", States.DEAD)
        else:
            # A verdict is about a transaction, however many half messages.
            transactions = len({each.key for each in messages})
            said = f"{counted(transactions, 'more transaction', ('was', 'were'))} given up"
            first = str(messages[0].key)
            decide = self.commands.line("half", "list", "--given-up", "--group", self.group)
        return f"{said}, the first is {first}: {error}; to decide, run: {decide}"


class FailureLog:
    """Listens to the failures of one subscription, over all leases."""

    def __init__(self, subscription: str, words: Words, *, clock: Callable[[], float] = monotonic) -> None:
        """`words`: the sentences for the subscription."""
        self._subscription = subscription
        self._words = words
        self._throttle = Throttle(_SAY_AGAIN_SECONDS, clock=clock)
        #: The topics of the outages that the log has a line about; None: the destination accepts nothing at all.
        self._logged: set[str | None] = set()
        #: The log ids of messages that wait for the end of an outage, with their topics.
        self._waiting: dict[int | None, str] = {}
        self._refused_upkeep: set[str] = set()

    def told(self, event: Event) -> None:
        """Log the news of an event."""
        match event:
            case DestinationAway(destination=destination, outages=outages):
                self._away(destination, outages)
            case DestinationBack(outage=outage) if outage.topic in self._logged:
                self._logged.discard(outage.topic)
                text = f"{self._words.accepted(outage.topic)} after {age(outage.seconds)}{self._waited(outage)}"
                self._warn(text, "destination_back", topic=outage.topic, seconds=outage.seconds)
            case Parked(messages=messages) if self._logged and len(self._waiting) < _MOST_WAITING:
                waiting = [m for m, parked in messages if parked.state in (States.WAITING, States.BEHIND)]
                self._waiting.update((m.id, m.topic) for m in waiting if self._logged & {None, m.topic})
            case Dead(messages=messages):
                self._dead(messages)
            case UpkeepRefused(what=what, error=error) if what not in self._refused_upkeep:
                self._refused_upkeep.add(what)
                self._warn(f"cannot delete {what}, going on: {error}", "upkeep_refused", error=error)

    def _away(self, destination: str, outages: Sequence[Outage]) -> None:
        if len(self._logged) > _MOST_TOPICS:
            self._logged.clear()
        if None not in (outage.topic for outage in outages):
            self._logged.discard(None)
        news = [outage for outage in outages if self._throttle.allows(outage.topic)]
        self._logged.update(outage.topic for outage in news)
        for outage in news[:_MOST_LINES]:
            since = f" (since {age(outage.seconds)})" if outage.seconds >= 1 else ""
            why = one_line(without_server(outage.error, destination))
            about = {"destination": destination, "topic": outage.topic, "error": why, "seconds": outage.seconds}
            self._warn(f"{self._words.refused(outage.topic)}{since}: {why}", "destination_away", **about)
        if len(news) > _MOST_LINES:
            more = len(news) - _MOST_LINES
            self._warn(f"nor does it accept {more} more topics", "destination_away", destination=destination)

    def _waited(self, outage: Outage) -> str:
        """Return how many messages have waited for the end of an outage, as far as they were parked; forget them."""
        more = " or more" if len(self._waiting) >= _MOST_WAITING else ""
        over = [id for id, topic in self._waiting.items() if outage.topic in (None, topic)]
        for id in over:
            del self._waiting[id]
        return f"; {counted(f'{len(over)}{more}', 'message')} had waited" if over else ""

    def _dead(self, messages: Sequence[tuple[Message, Parking]]) -> None:
        """Log dead letters, with one line for all of a settle."""
        dead = sorted(messages, key=lambda each: each[0].id or 0)
        error = one_line(dead[0][1].error or "no reason given")
        first, parking = dead[0]
        self._warn(
            self._words.given_up([message for message, _ in dead], error),
            "dead_letters",
            messages=len(dead),
            topic=first.topic,
            message_id=_id_of(first),
            attempt=parking.attempts,
            error=error,
        )

    def _warn(self, text: str, event: str, **fields: object) -> None:
        about = named(event, subscription=self._subscription, **fields)
        logger.warning("%s: %s", self._subscription, text, extra=about)


def _id_of(message: Message) -> UUID | None:
    """Return the id of a message; None if another writer has given the message something else."""
    try:
        return message.message_id
    except ValueError:
        return None


def words_of(declared: Declaration, commands: Commands) -> Words:
    """Return the sentences for a subscription of an outbox, with commands about the outbox."""
    group = declared.tags[0] if declared.kind == "check" and declared.tags else None
    return Words(declared.name, place_of(declared), group, commands)

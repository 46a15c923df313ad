"""Topics for which no answer comes in time, although the destination may accept messages of others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outbox.model.message import Message
from outbox.worker.blame import Blame

#: An answer for a silent topic is waited for so many seconds. An answer that refuses after so many is a silence, too.
PATIENCE_SECONDS = 1.0
#: So many different messages show that the topic is silent, and not a message.
_MESSAGES = 2


@dataclass(slots=True)
class _Silence:
    """The messages without an answer, as far as a call had no other topic. `accepted`: by the destination before.

    `singly`: a call with one message had no answer. Calls with many may have had too many.
    """

    accepted: int
    ids: set[int | None] = field(default_factory=set)
    singly: bool = False


class Silences:
    """The topics of one lease that are suspected to be silent.

    A suspected topic shares no call with another topic, because the call would show nothing about either. Each further
    call of a silent topic is given up early, so that others wait shortly.
    """

    def __init__(self, blame: Blame) -> None:
        self._blame = blame
        #: In the order of the last silence.
        self._suspected: dict[str, _Silence] = {}

    @property
    def suspected(self) -> Collection[str]:
        """The topics in the order of their last silence."""
        return self._suspected.keys()

    def is_silent(self, topic: str) -> bool:
        """Return whether several messages of a topic had no answer: one alone in a call, or while others had."""
        silence = self._suspected.get(topic)
        if silence is None or len(silence.ids) < _MESSAGES:
            return False
        return silence.singly or self._blame.count > silence.accepted

    def is_silent_alone(self, topic: str) -> bool:
        """Return whether a topic is silent, while others were accepted."""
        return self.is_silent(topic) and self._blame.count > self._suspected[topic].accepted

    def unanswered(self, messages: Sequence[Message], *, of: int, alone: bool) -> None:
        """Note that no answer came in time. `of`: so many messages the call had. `alone`: none of another topic."""
        for message in messages:
            silence = self._suspected.pop(message.topic, None) or _Silence(self._blame.count)
            silence.ids.update((message.id,) if alone else ())
            silence.singly |= of == 1
            self._suspected[message.topic] = silence

    def answered(self, messages: Sequence[Message]) -> None:
        """Note that an answer came."""
        for message in messages if self._suspected else ():
            self._suspected.pop(message.topic, None)

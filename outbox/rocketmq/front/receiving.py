"""Calls of consumers: messages are handed out for a time, and are acknowledged, prolonged, or given up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from outbox.errors import FilterError, MQClientError
from outbox.model.message import Message
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.front.calls import Call, Threads, Unary
from outbox.rocketmq.front.conversion import wire_of
from outbox.rocketmq.front.desk import Desk
from outbox.rocketmq.front.handles import Handle
from outbox.rocketmq.front.joining import Joining
from outbox.rocketmq.front.polls import Polls, Popped
from outbox.rocketmq.front.protocol import RPCS, Wire, duration_of, kind, numbers, set_moment
from outbox.rocketmq.front.renewing import LONGEST, RENEWED, Renewals
from outbox.rocketmq.front.routing import Routes
from outbox.rocketmq.front.settings import LONG_POLL, MOST_RECEIVED
from outbox.rocketmq.front.statuses import Code, RefusedError, internal, status
from outbox.rocketmq.front.validation import checked_group, checked_invisible, checked_topic
from outbox.rocketmq.hints import Hints
from outbox.store.subscriptions.receipts import Receipt

_Received, _Acked = RPCS["ReceiveMessage"].response, RPCS["AckMessage"].response
_Changed, _Assigned = RPCS["ChangeInvisibleDuration"].response, RPCS["QueryAssignment"].response
_Forwarded = RPCS["ForwardMessageToDeadLetterQueue"].response
_Entry = kind("AckMessageResultEntry")
_FILTERS = numbers("FilterType")
#: A long poll ends so many seconds before its deadline.
_BEFORE_DEADLINE = 0.5
_EXPIRED = "receipt handle is expired"
#: The pops of so many choices of one group and topic are kept.
_MOST_CHOICES = 16


class Receiving:
    """Answers the calls of consumers, in one event loop."""

    def __init__(
        self,
        desk_of: Callable[[str, str], Desk],
        hints: Hints,
        routes: Routes,
        threads: Threads,
        alive: Callable[[str], bool],
        fifo_groups: Collection[str],
    ) -> None:
        """`desk_of`: returns the desk of a group and a topic. `alive`: says whether a client is there."""
        self._desk_of, self._hints = desk_of, hints
        self._routes, self._threads, self._fifo = routes, threads, fifo_groups
        self.renewals = Renewals(threads, alive)
        self._groups: dict[tuple[str, str], _Group] = {}

    @property
    def unary(self) -> Mapping[str, Unary]:
        """The handlers of calls with one response, by name."""
        return {
            "QueryAssignment": self.assignment,
            "AckMessage": self.ack,
            "ChangeInvisibleDuration": self.change,
            "ForwardMessageToDeadLetterQueue": self.forward,
        }

    def end(self) -> None:
        """Answer the calls that wait for messages: the front stops."""
        for group in self._groups.values():
            group.end()

    async def receive(self, call: Call, request: Wire) -> AsyncIterator[Wire]:
        """Yield a status, messages, and the moment of the delivery."""
        topic = self._routes.known(request.message_queue.topic.name)
        group = self._group(request.group.name, topic)
        duration = RENEWED if request.auto_renew else checked_invisible(_duration(request.invisible_duration))
        choice = _choice(request.filter_expression)
        if request.batch_size < 0:
            raise RefusedError(Code.INTERNAL_SERVER_ERROR, f"Illegal Capacity: {request.batch_size}")
        asked = Asked(min(request.batch_size, MOST_RECEIVED), duration)
        seconds = _seconds(call, request) if asked.most else 0.0
        receipt, messages = await group.polls(choice).messages(asked, seconds)
        if not messages:
            raise RefusedError(Code.MESSAGE_NOT_FOUND, "no new message")
        handles = [Handle.of(each, receipt, LONGEST if request.auto_renew else duration) for each in messages]
        if request.auto_renew:
            self.renewals.begin(group.desk, call.client, [each.receipt for each in handles])
        yield _Received(status=status())
        for message, handle in zip(messages, handles, strict=True):
            yield _Received(message=self._delivered(message, handle, request.message_queue.topic))
        last = _Received()
        set_moment(last.delivery_timestamp, datetime.now(UTC))
        yield last

    def _delivered(self, message: Message, handle: Handle, topic: Wire) -> Wire:
        """Return a message in a client's hands; `topic`: as the client has it."""
        made = wire_of(message, self._routes.type_of(topic.name))
        made.topic.CopyFrom(topic)
        system = made.system_properties
        system.receipt_handle, system.queue_offset = str(handle), message.id or 0
        system.store_host = str(self._routes.place)
        if message.created_at is not None:
            set_moment(system.store_timestamp, message.created_at)
        return made

    async def assignment(self, call: Call, request: Wire) -> Wire:
        """Return the queue of a topic for a push consumer."""
        group = checked_group(request.group.name)
        made = _Assigned(status=status())
        queue = made.assignments.add().message_queue
        queue.CopyFrom(self._routes.queue(call, request.topic))
        # In RocketMQ only a consumer in order takes from a certain queue.
        queue.id = 0 if group in self._fifo else -1
        return made

    async def ack(self, call: Call, request: Wire) -> Wire:
        """Acknowledge messages, each with a status of its own."""
        group = self._group(request.group.name, checked_topic(request.topic.name))
        made = _Acked()
        for entry in request.entries:
            answer = _Entry(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status())
            try:
                handle = Handle.read(entry.receipt_handle)
                self.renewals.end(group.desk, handle.receipt)
                if not await group.acks.call(handle.receipt):
                    await self._require_done(group, handle)
            except RefusedError as error:
                answer.status.CopyFrom(status(error.code, error.text))
            made.entries.append(answer)
        made.status.CopyFrom(_overall([Code(each.status.code) for each in made.entries]))
        return made

    async def change(self, _call: Call, request: Wire) -> Wire:
        """Let a message be nobody else's for another time from now on; its handle stays."""
        group = self._group(request.group.name, checked_topic(request.topic.name))
        duration = checked_invisible(_duration(request.invisible_duration), least=timedelta(0))
        handle = Handle.read(request.receipt_handle)
        self.renewals.end(group.desk, handle.receipt)
        (good,) = await self._threads.run(partial(group.desk.postpone, [handle.receipt], duration))
        if not good:
            raise _expired()
        return _Changed(status=status(), receipt_handle=request.receipt_handle)

    async def forward(self, _call: Call, request: Wire) -> Wire:
        """Make a message a dead letter."""
        group = self._group(request.group.name, checked_topic(request.topic.name))
        handle = Handle.read(request.receipt_handle)
        self.renewals.end(group.desk, handle.receipt)
        error = f"given up by its consumer after {max(1, request.delivery_attempt)} deliveries"
        (good,) = await self._threads.run(partial(group.desk.dead_letter, [handle.receipt], error))
        if not good:
            await self._require_done(group, handle)
        return _Forwarded(status=status())

    async def _require_done(self, group: _Group, handle: Handle) -> None:
        """Refuse a receipt that is worth nothing, unless a call before has used it: its answer may be lost."""
        if handle.is_over or await self._threads.run(partial(group.desk.is_out, handle.receipt.id)):
            raise _expired()

    def _group(self, name: str, topic: str) -> _Group:
        checked = checked_group(name)
        found = self._groups.get((checked, topic))
        if found is None:
            found = self._groups[checked, topic] = _Group(self._desk_of(checked, topic), self._threads, self._hints)
        return found


class _Group:
    """The calls of one group and topic."""

    def __init__(self, desk: Desk, threads: Threads, hints: Hints) -> None:
        self.desk = desk
        self.acks: Joining[Receipt, bool] = Joining(threads, desk.ack)
        self._threads, self._hints = threads, hints
        self._polls: dict[MessageSelector, Polls] = {}

    def polls(self, choice: MessageSelector) -> Polls:
        """Return the calls that wait for what a choice selects."""
        found = self._polls.get(choice)
        if found is None:
            idle = [each for each, polls in self._polls.items() if not polls.waits]
            for each in idle[: len(self._polls) - _MOST_CHOICES + 1]:
                del self._polls[each]
            found = self._polls[choice] = self._made(choice)
        return found

    def end(self) -> None:
        """Answer the calls that wait."""
        for each in self._polls.values():
            each.end()

    def _made(self, choice: MessageSelector) -> Polls:
        desk, pops, threads = self.desk, self.desk.pops(choice), self._threads

        async def pop(asked: Sequence[Asked]) -> Popped:
            return await threads.run(partial(pops, asked))

        async def give_back(receipt: str, messages: Sequence[Message]) -> None:
            await threads.run(partial(desk.give_back, receipt, messages))

        return Polls(pop, give_back, self._hints.wake)


def _seconds(call: Call, request: Wire) -> float:
    """Return how long a call waits for messages."""
    asked = _duration(request.long_polling_timeout) if request.HasField("long_polling_timeout") else LONG_POLL
    seconds = min(max(asked, timedelta(0)), LONG_POLL * 3).total_seconds()
    return seconds if call.seconds is None else min(seconds, max(0.0, call.seconds - _BEFORE_DEADLINE))


def _duration(field: Wire) -> timedelta:
    """Return the length of time in a field; the longest one for what no timedelta can have."""
    try:
        return duration_of(field)
    except OverflowError:
        return timedelta.max if field.seconds > 0 else timedelta.min


def _choice(expression: Wire) -> MessageSelector:
    """Return the choice of an expression.

    Raises:
        RefusedError: the expression cannot be read.
    """
    text = expression.expression
    if expression.type != _FILTERS["SQL"]:
        if text and any(text.split("||")) and not text.replace("||", "").strip():
            # RocketMQ takes blanks between separators for tags, which no message has.
            return MessageSelector.by_sql("FALSE")
        try:
            return MessageSelector.by_tag(text)
        except FilterError as error:
            raise RefusedError(Code.ILLEGAL_FILTER_EXPRESSION, f"subString split error [{error}]") from error
    try:
        return MessageSelector.by_sql(text)
    except MQClientError as error:
        raise RefusedError(Code.ILLEGAL_FILTER_EXPRESSION, str(error)) from error
    except FilterError as error:
        raise internal("parse the consumer's subscription failed", str(error)) from error


def _expired() -> RefusedError:
    return RefusedError(Code.INVALID_RECEIPT_HANDLE, internal(_EXPIRED).text)


def _overall(codes: Sequence[Code]) -> Wire:
    """Return the status of an answer with several: theirs, if they are one."""
    if len(set(codes)) != 1:
        return status(Code.MULTIPLE_RESULTS, Code.MULTIPLE_RESULTS.name) if codes else status()
    return status(codes[0], codes[0].name)

"""Calls of consumers: messages are handed out for a time, and are acknowledged, prolonged, or given up."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from outbox.errors import FilterError, MQClientError
from outbox.model.message import Message
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.front.calls import Call, Send, Threads, Unary
from outbox.rocketmq.front.conversion import wire_of
from outbox.rocketmq.front.group_calls import GroupCalls, Groups
from outbox.rocketmq.front.group_subscription import GroupSubscription
from outbox.rocketmq.front.handles import Handle, expired
from outbox.rocketmq.front.hands import LONGEST, RENEWED, Batch, Hands, Key
from outbox.rocketmq.front.polls import Popped
from outbox.rocketmq.front.protocol import RPCS, Wire, duration_of, numbers, set_moment
from outbox.rocketmq.front.routing import Routes
from outbox.rocketmq.front.settings import LONG_POLL, MOST_RECEIVED
from outbox.rocketmq.front.statuses import Code, RefusedError, internal, line_of, status
from outbox.rocketmq.front.untaken import Untaken
from outbox.rocketmq.front.validation import checked_group, checked_invisible, checked_tags, checked_topic
from outbox.rocketmq.hints import Hints
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.subscriptions.receipts import Receipt

logger = logging.getLogger("outbox")

_Received, _Acked = RPCS["ReceiveMessage"].response, RPCS["AckMessage"].response
_Changed, _Assigned = RPCS["ChangeInvisibleDuration"].response, RPCS["QueryAssignment"].response
_Forwarded = RPCS["ForwardMessageToDeadLetterQueue"].response
_FILTERS = numbers("FilterType")
#: A long poll ends so many seconds before its deadline.
_BEFORE_DEADLINE = 0.5
#: A call acknowledges at most so many messages.
MOST_ENTRIES = 1000
#: A receive waits for so long at most, whatever it asks for.
LONGEST_POLL = LONG_POLL * 3


class Receiving:
    """Answers the calls of consumers, in one event loop."""

    def __init__(
        self,
        subscription_of: Callable[[str, str], GroupSubscription],
        hints: Hints,
        routes: Routes,
        threads: Threads,
        alive: Callable[[Collection[str]], Awaitable[Collection[str]]],
        fifo_groups: Collection[str],
    ) -> None:
        """`subscription_of`: returns that of a group to a topic. `alive`: returns which of some clients are there."""
        self._groups = Groups(subscription_of, hints, threads)
        self._routes, self._threads, self._fifo = routes, threads, fifo_groups
        self.hands = Hands(threads, alive)
        self._untaken = Untaken()
        self._log = ThrottledLog(logger)
        self._ended = False

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
        """Answer the calls that wait for messages, and all later ones, with nothing: the front stops."""
        self._ended = True
        self._groups.end()

    def changed(self, groups: Collection[str]) -> None:
        """Begin anew with groups of other properties."""
        self._groups.forget(groups)

    async def receive(self, call: Call, request: Wire, send: Send) -> None:
        """Send a status, messages, and the moment of the delivery, also after a refusal, as RocketMQ does."""
        try:
            await self._receive(call, request, send)
        except RefusedError as error:
            await send(_Received(status=status(error.code, error.text)))
            await send(_delivered_now())

    async def _receive(self, call: Call, request: Wire, send: Send) -> None:
        """Find and send messages; those of a call that ends before the last one was sent are given back."""
        name, topic = checked_group(request.group.name), checked_topic(request.message_queue.topic.name)
        duration = RENEWED if request.auto_renew else checked_invisible(_duration(request.invisible_duration))
        choice = _choice(request.filter_expression)
        group = self._groups.of(name, self._routes.known(topic))
        if request.batch_size < 0:
            raise RefusedError(Code.INTERNAL_SERVER_ERROR, f"Illegal Capacity: {request.batch_size}")
        asked = Asked(min(request.batch_size, MOST_RECEIVED), duration)
        batch = self.hands.begin(Key(call.client, name, topic, request.attempt_id), group.subscription)
        try:
            await self._find(group, batch, choice, asked, call, _seconds(call, request))
            with self._untaken.sending(call.connection, batch.messages):
                if request.auto_renew:
                    await self.hands.learn(batch)
                lasts = LONGEST if request.auto_renew else duration
                await send(_Received(status=status()))
                for each in batch.messages:
                    handle = Handle.of(each, batch.receipt, lasts, group.subscription.name)
                    delivered = self._delivered(group, batch, each, handle, request.message_queue.topic)
                    if delivered is not None:
                        await send(_Received(message=delivered))
                await send(_delivered_now())
            self.hands.hold(batch)
        except BaseException:
            if self.hands.end(batch) and batch.messages:
                group.give_back(Popped(batch.receipt, [batch.messages]))
            raise

    async def _find(
        self, group: GroupCalls, batch: Batch, choice: MessageSelector, asked: Asked, call: Call, seconds: float
    ) -> None:
        """Find the messages of a batch: those that an earlier one had and nobody else has had since, or others."""
        receipt, messages = batch.receipt, await self._still_out(batch, asked.time)
        if not messages and asked.most and not self._ended:
            batch.messages = ()
            receipt, messages = await group.polls(choice).messages(
                asked, seconds, partial(self._untaken.allows, call.connection)
            )
            if batch.replaced:
                group.give_back(Popped(receipt, [messages]))
        if not self.hands.got(batch, receipt, messages) or not messages:
            raise RefusedError(Code.MESSAGE_NOT_FOUND, "no new message")

    async def _still_out(self, batch: Batch, duration: timedelta) -> Sequence[Message]:
        """Return the messages of an earlier batch that are out under its receipt, and are from now on for a time."""
        if not batch.messages:
            return []
        good = await self._threads.run(partial(batch.subscription.postpone, batch.receipts, duration))
        return [each for each, is_good in zip(batch.messages, good, strict=True) if is_good]

    def _delivered(self, group: GroupCalls, batch: Batch, message: Message, handle: Handle, topic: Wire) -> Wire | None:
        """Return a message of a batch in a client's hands; None: it cannot be read, or is behind such a message.

        What cannot be read stays out for its time, as if the client had it, and so comes to its end.
        """
        if message not in batch.messages:
            return None
        try:
            return self._in_hands(message, handle, topic)
        except Exception as error:
            text = "front: message %s of topic %s cannot be read and counts as delivered, %s"
            self._log.warning(text, message.id, topic.name, line_of(error))
        at = batch.messages.index(message)
        behind = [each for each in batch.messages[at + 1 :] if message.key is not None and each.key == message.key]
        batch.messages = [each for each in batch.messages if each is not message and each not in behind]
        group.give_back(Popped(batch.receipt, [behind]))
        return None

    def _in_hands(self, message: Message, handle: Handle, topic: Wire) -> Wire:
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

    async def ack(self, _call: Call, request: Wire) -> Wire:
        """Acknowledge messages, each with a status of its own."""
        group, topic = checked_group(request.group.name), checked_topic(request.topic.name)
        if len(request.entries) > MOST_ENTRIES:
            raise RefusedError(Code.BAD_REQUEST, f"too many entries, max is {MOST_ENTRIES}")
        handles = [_handle(each.receipt_handle) for each in request.entries]
        refused = await self._ack(group, topic, [each for each in handles if isinstance(each, Handle)])
        made = _Acked()
        for entry, handle in zip(request.entries, handles, strict=True):
            error = refused.get(handle.receipt) if isinstance(handle, Handle) else handle
            said = status() if error is None else status(error.code, error.text)
            made.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=said)
        made.status.CopyFrom(_overall([Code(each.status.code) for each in made.entries]))
        return made

    async def _ack(self, name: str, topic: str, handles: Sequence[Handle]) -> Mapping[Receipt, RefusedError]:
        """Acknowledge messages by one statement; return the errors of receipts that are worth nothing."""
        receipts = [each.receipt for each in handles]
        if not self._routes.has(topic):
            return dict.fromkeys(receipts, _abnormal("ack", topic))
        group = self._groups.of(name, topic)
        own = [each for each in handles if each.is_of(group.subscription.name)]
        good = await group.acks.call([each.receipt for each in own])
        refused = await self._not_done(group, [each for each, is_good in zip(own, good, strict=True) if not is_good])
        others = [each for each in handles if not each.is_of(group.subscription.name)]
        # RocketMQ does nothing either for a group that has received nothing, and says OK.
        known = bool(others) and await self._threads.run(group.subscription.is_known)
        return refused | {each.receipt: expired() for each in others if known}

    async def change(self, _call: Call, request: Wire) -> Wire:
        """Let a message be nobody else's for another time from now on; its handle stays."""
        group = self._group_of(request, "changeInvisibleDuration")
        duration = checked_invisible(_duration(request.invisible_duration), least=timedelta(0))
        handle = group.handle(request.receipt_handle)
        (good,) = await self._threads.run(partial(group.subscription.postpone, [handle.receipt], duration))
        if not good:
            raise expired()
        return _Changed(status=status(), receipt_handle=request.receipt_handle)

    async def forward(self, _call: Call, request: Wire) -> Wire:
        """Make a message a dead letter."""
        group = self._group_of(request, "forwardMessageToDeadLetterQueue")
        handle = group.handle(request.receipt_handle)
        error = f"given up by its consumer after {max(1, request.delivery_attempt)} deliveries"
        (good,) = await self._threads.run(partial(group.subscription.dead_letter, [handle.receipt], error))
        if not good:
            for refused in (await self._not_done(group, [handle])).values():
                raise refused
        return _Forwarded(status=status())

    async def _not_done(self, group: GroupCalls, handles: Sequence[Handle]) -> dict[Receipt, RefusedError]:
        """Return the errors of receipts that are worth nothing.

        No error is for a receipt that a call before has used: the answer to that call may be lost.
        """
        ids = [each.receipt.id for each in handles if not each.is_over]
        out = await self._threads.run(partial(group.subscription.out, ids)) if ids else set[int]()
        return {each.receipt: expired() for each in handles if each.is_over or each.receipt.id in out}

    def _group_of(self, request: Wire, call: str) -> GroupCalls:
        """Return the group and topic of a call about a message that was received."""
        group, topic = checked_group(request.group.name), checked_topic(request.topic.name)
        if not self._routes.has(topic):
            raise _abnormal(call, topic)
        return self._groups.of(group, topic)


def _delivered_now() -> Wire:
    made = _Received()
    set_moment(made.delivery_timestamp, datetime.now(UTC))
    return made


def _handle(text: str) -> Handle | RefusedError:
    try:
        return Handle.read(text)
    except RefusedError as error:
        return error


def _seconds(call: Call, request: Wire) -> float:
    """Return how long a call waits for messages."""
    asked = _duration(request.long_polling_timeout) if request.HasField("long_polling_timeout") else LONG_POLL
    seconds = min(max(asked, timedelta(0)), LONGEST_POLL).total_seconds()
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
        checked_tags(text)
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


def _abnormal(call: str, topic: str) -> RefusedError:
    text = f"{call} failed: status is abnormal [there is no topic {topic}]"
    return RefusedError(Code.INTERNAL_SERVER_ERROR, text)


def _overall(codes: Sequence[Code]) -> Wire:
    """Return the status of an answer with several: theirs, if they are one."""
    if len(set(codes)) != 1:
        several = Code.MULTIPLE_RESULTS, Code.MULTIPLE_RESULTS.name
        return status(*several) if codes else status(Code.INTERNAL_SERVER_ERROR, "ack message result is empty")
    return status(codes[0], codes[0].name)

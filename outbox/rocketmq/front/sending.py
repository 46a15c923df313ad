"""Sending: a message of a client is in the log when the client has its receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.rocketmq.default_producer import Writes
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.conversion import KEYS, stored
from outbox.rocketmq.front.joining import Joining
from outbox.rocketmq.front.protocol import RPCS, Wire
from outbox.rocketmq.front.routing import TopicType
from outbox.rocketmq.front.statuses import Code, RefusedError, internal, status
from outbox.rocketmq.front.transactions import Transactions
from outbox.rocketmq.front.validation import checked_messages, checked_topic
from outbox.runtime.clock import clock
from outbox.store.dialects.statements import Script, Statement

_Response = RPCS["SendMessage"].response
#: Bytes of requests that wait for the database or are being stored: they are in memory until then.
MOST_BYTES = 128 * 1024 * 1024
#: So many transactions store messages at once, each with those of many calls, up to so many bytes.
AT_ONCE, _BYTES_AT_ONCE = 2, 1024 * 1024
#: A transaction waits for so long while another one stores the same message: a frozen front may have begun to store the
#: message, and the client has sent the message again.
PATIENCE = "1s"
#: A call that is stored alone waits for so long, as its first transaction has waited before.
_PATIENCE_ALONE = "50ms"
#: After so many seconds no further call is stored alone: most clients have given the calls up that are left.
ALONE_SECONDS = 3.0
#: A recall handle begins with this text.
_HANDLE = "recall:"
#: For a limit of the log that RocketMQ has not, by the field.
_CODES = {
    "tags": Code.ILLEGAL_MESSAGE_TAG,
    f"headers[{KEYS!r}]": Code.ILLEGAL_MESSAGE_KEY,
    "headers": Code.MESSAGE_PROPERTIES_TOO_LARGE,
}


@dataclass(frozen=True, slots=True)
class _Sent:
    """The messages of a call, all or none of which are stored."""

    messages: Sequence[Wire]
    bytes: int


class Sending:
    """Stores the messages of clients: as they are, or as half messages."""

    def __init__(
        self,
        outbox: Writes,
        topics: Mapping[str, TopicType],
        transactions: Transactions,
        threads: Threads,
        own_threads: Threads,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`own_threads`: store ordinary messages alone. `most_bytes`: of requests under way; one may have more."""
        self._outbox = outbox
        self._topics = topics
        self._transactions, self._threads = transactions, threads
        self._stored: Joining[_Sent, None] = Joining(
            own_threads, self._store, at_once=AT_ONCE, size=lambda sent: sent.bytes, most=_BYTES_AT_ONCE
        )
        self._most_bytes, self._bytes = most_bytes, 0

    async def send(self, _call: Call, request: Wire) -> Wire:
        """Store messages of a topic, all or none."""
        messages = list(request.messages)
        type_ = checked_messages(messages, self._topics)
        size = request.ByteSize()
        if self._bytes and self._bytes + size > self._most_bytes:
            raise RefusedError(Code.TOO_MANY_REQUESTS, "too many bytes wait for the database")
        transaction = id = messages[0].system_properties.message_id
        self._bytes += size
        try:
            if type_ == "TRANSACTION":
                transaction = await self._threads.run(lambda: self._transactions.prepare(messages[0]))
            else:
                await self._stored.call([_Sent(messages, size)])
        except InvalidMessageError as error:
            raise RefusedError(_CODES.get(error.field, Code.BAD_REQUEST), str(error)) from error
        finally:
            self._bytes -= size
        # RocketMQ, too, has one entry for all messages of a call.
        answer = _Response(status=status())
        handle = f"{_HANDLE}{id}" if type_ == "DELAY" else ""
        answer.entries.add(status=status(), message_id=id, transaction_id=transaction, recall_handle=handle)
        return answer

    async def recall(self, _call: Call, request: Wire) -> Wire:
        """Refuse to take a delayed message back, as RocketMQ does unless told otherwise."""
        checked_topic(request.topic.name)
        is_ours = request.recall_handle.startswith(_HANDLE)
        raise internal("recall failed, operation is forbidden" if is_ours else "recall handle is invalid")

    def _store(self, calls: Sequence[_Sent]) -> Sequence[Exception | None]:
        """Store the messages of calls in one transaction; return the error of each call."""
        made = [_made(call.messages) for call in calls]
        errors = iter(self._errors([each for each in made if not isinstance(each, InvalidMessageError)], PATIENCE))
        return [each if isinstance(each, InvalidMessageError) else next(errors) for each in made]

    def _errors(self, calls: Sequence[Sequence[Message]], patience: str) -> Sequence[Exception | None]:
        if not calls:
            return []
        try:
            self._append([message for call in calls for message in call], patience)
        except Exception as error:
            if len(calls) == 1 or not self._is_of_one(error):
                return [error] * len(calls)
            # A call that cannot be stored does not keep the other calls from the log.
            until = clock() + ALONE_SECONDS
            return [self._errors([call], _PATIENCE_ALONE)[0] if clock() < until else error for call in calls]
        return [None] * len(calls)

    def _is_of_one(self, error: Exception) -> bool:
        """Return whether one call may be the cause, and the others could be stored without that call."""
        database = self._outbox.database
        # A database without a statement for patience has one lock for all tables.
        waited = database.dialect.locks.patience is not None and database.locked(error)
        return waited or not database.transient(error)

    def _append(self, messages: Sequence[Message], patience: str) -> None:
        limit = self._outbox.database.dialect.locks.patience
        with self._outbox.begin("requires_new") as session:
            if limit is not None:
                connection = self._outbox.transactions.connection_of(session, "send_all", flush=False)
                self._outbox.database.execute(connection, _limited(limit, patience))
            self._outbox.send_all(session, messages)


def _limited(limit: str, patience: str) -> Script[None]:
    yield Statement(limit, {"patience": patience}, returns=True)


def _made(messages: Sequence[Wire]) -> Sequence[Message] | InvalidMessageError:
    """Return the messages of a call for the log; or why the log refuses one of them."""
    try:
        made = [stored(message) for message in messages]
    except InvalidMessageError as error:
        return error
    for message in made:
        # A message that is sent again has the same id, and is not stored again.
        message.dedup_key = message.id_text
    return made

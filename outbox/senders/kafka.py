"""Kafka, by confluent-kafka: URL `kafka://user:password@host:9092,host2:9092/prefix?timeout=5`; `kafkas://` with TLS.

A prefix in the path stands before each topic, with a dot. A message is `Done` when every replica in sync has a copy.
The key is Kafka's own, and finds the partition as Java's clients do. A missing topic is never created: its messages
wait.

Only the first record of a key in a call is waited for: as long as nothing is refused, Kafka itself stores no record
without the earlier ones. After a refusal one record of each key is sent at a time, for a while.

A consumer finds the id in the header `Outbox-Id`. The other fields have the names of `outbox.senders.headers`, and
`read_message` makes a `Message` of a record. Kafka drops a second copy only within one connection of a sender.

A record above the topic's `max.message.bytes` is answered with `Reject`. A topic that Kafka cannot have waits for
another name.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.fork import in_child
from outbox.senders.address import Address
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.headers import read_headers, wire_headers
from outbox.senders.key_order import Chains, send_again
from outbox.senders.port import Doubt, Stored, destination_of

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
    from confluent_kafka import Message as Record
    from confluent_kafka.admin import ClusterMetadata

    from outbox.senders.kafka_doubts import doubts_about
    from outbox.senders.kafka_refusals import (
        CLIENT_ERRORS,
        CLIENT_LOG,
        NO_BROKER,
        ONE_OF_A_BATCH,
        TopicLimits,
        no_topic,
        refusal_of,
        too_large_for_the_client,
        verdict_of_record,
        words_of,
    )
    from outbox.senders.kafka_settings import OPTIONS, Settings, Token
    from outbox.senders.kafka_transactions import Transactions
except ImportError as error:
    raise MissingExtraError("Kafka needs an extra: pip install 'outbox-log[kafka]'") from error

#: Far below what the client has room for.
_MOST_UNDER_WAY = 10_000
_MOST_BYTES_UNDER_WAY = 32 * 1024 * 1024
#: For so long after a refusal, records of a key wait for each other.
_CAREFUL_SECONDS = 1.0
#: A question to the brokers is asked again after so long, if what happened meanwhile does not answer it.
_SLICE_SECONDS = 0.3

_PREFIX = re.compile(r"[A-Za-z0-9._-]+")


class KafkaSender:
    """A sender that appends records to topics, and the records of a key in their order.

    `send` may be called in any thread; several calls take turns. Each returns before the deadline. The first call makes
    a producer, and so does a call after a broker has not answered in time.

    Args:
        url: the brokers and a prefix, as in the first lines of this page.
        timeout: the time of a call, unless the URL says another.
        settings: further settings of the client by their names in librdkafka. A setting on which a promise of the
            sender rests is refused.
        token: a function without arguments for OAUTHBEARER, as Amazon MSK wants. Each call returns a token, and when it
            expires, in seconds since 1970; the name of a principal and a dict of extensions may follow. A function that
            hangs is not called a second time.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: timedelta = timedelta(seconds=5),
        settings: Mapping[str, str | float] | None = None,
        token: Callable[[], Token] | None = None,
    ) -> None:
        self.destination = destination_of(url)
        form = "kafka://host:9092,host2:9092 or kafkas://host:9092"
        address = Address.of(url, form=form, options=OPTIONS)
        self._seconds = address.timeout(timeout)
        self.deadline = timedelta(seconds=self._seconds)
        self._prefix = "".join(f"{name}." for name in address.path)
        if self._prefix and not _PREFIX.fullmatch(self._prefix):
            address.refuse("the path is a prefix of topics, of letters, digits, - and _")
        self._where = f"{address.scheme}://{','.join(address.hosts)}"
        self._address = address
        self._settings = Settings(address, further=settings or {}, token=token, seconds=self._seconds)
        self._log = ConnectionLog(logging.getLogger(__name__), "Kafka")
        self._turn = threading.Lock()
        self._connection: _Connection | None = None
        #: Until then, records of a key wait for each other.
        self._careful_until = 0.0
        self._transactions = self._made_for(address.options.get("transactional.id"))
        self._limits = TopicLimits(self._settings.connecting, self._prefix)
        in_child(self._begin_in_child)

    def _begin_in_child(self) -> None:
        """Begin without a producer. The threads of the parent's do not run here: its end would wait for ever."""
        for of_parent in (self._connection, self._transactions):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_parent))
        self._turn = threading.Lock()
        self._connection = None
        self._transactions = self._made_for(self._address.options.get("transactional.id"))

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        until = time.monotonic() + self._seconds * 0.9
        if not messages:
            return []
        if not self._turn.acquire(timeout=self._seconds * 0.9):
            return [Unavailable("Kafka: another call is under way", everything=True)] * len(messages)
        try:
            self._settings.begin(until)
            if self._transactions is not None:
                verdicts = self._commit(self._transactions, messages, until)
            else:
                verdicts = self._send(messages, until)
            return (
                verdicts if verdicts.count(DONE) == len(verdicts) else self._limits.explain(messages, verdicts, until)
            )
        finally:
            self._turn.release()

    def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Return the doubts about the topics that the cluster has; see `Sender`."""
        stored = {f"{self._prefix}{topic}": each for topic, each in topics.items()}
        return doubts_about(dict(self._settings.connecting()), stored, self._seconds)

    def close(self) -> None:
        """End the producer; a call that is under way gives up."""
        connection = self._connection
        if connection is not None:
            connection.trouble = "the sender was closed"
        if self._transactions is not None:
            self._transactions.trouble = "the sender was closed"
        with self._turn:
            self._drop()
            if self._transactions is not None:
                self._transactions.close()

    def _send(self, messages: Sequence[Message], until: float) -> list[Verdict]:
        if time.monotonic() < self._careful_until:
            return self._deliver(_Call(messages), until)
        call = _Call(messages, streams=True)
        verdicts = self._deliver(call, until)
        if call.is_refused:
            self._careful_until = time.monotonic() + _CAREFUL_SECONDS
            if self._connection is not None:
                verdicts = send_again(messages, verdicts, lambda left: self._deliver(_Call(left), until))
        return verdicts

    def _deliver(self, call: _Call, until: float) -> list[Verdict]:
        try:
            connection = self._connected(streams=call.streams)
        except (*CLIENT_ERRORS, ConnectionError) as error:
            call.chains.give_up(self._log.lost(f"{self._where}: {reason_of(error)}"))
            return call.chains.verdicts()
        try:
            connection.begin(call)
            while call.chains.left:
                connection.hand_over(call, until)
                left = until - time.monotonic()
                connection.wait(call, max(0.0, min(left, 0.1)))
                if call.is_refused and not call.under_way:
                    break
                if connection.trouble or (left <= 0 and call.chains.left):
                    trouble = connection.trouble or f"no answer within {self._seconds * 0.9:g} s{connection.hint}"
                    call.chains.give_up(self._log.lost(f"{self._where}: {trouble}"))
                    self._drop()
                elif call.is_answered:
                    self._log.connected(self._where)
        except BaseException:
            # Reports that are still to come would count for the next call.
            self._drop()
            raise
        return call.chains.verdicts()

    def _commit(self, transactions: Transactions, messages: Sequence[Message], until: float) -> list[Verdict]:
        verdicts, failure = transactions.send(messages, self._prefix, until)
        if failure:
            self._log.lost(f"{self._where}: {failure}")
        else:
            self._log.connected(self._where)
        return verdicts

    def _made_for(self, name: str | None) -> Transactions | None:
        if name == "":
            self._address.refuse("transactional.id must be a name")
        if name is None:
            return None
        return Transactions(partial(self._settings.producing, streams=False), name, self._where, self._seconds)

    def _connected(self, *, streams: bool) -> _Connection:
        """Return the producer, made anew where needed."""
        if self._connection is not None and self._connection.streams is not streams:
            self._drop()
        if self._connection is None:
            self._connection = _Connection(self._settings.producing(streams=streams), self._prefix, streams=streams)
        return self._connection

    def _drop(self) -> None:
        """Give the producer up, so that nothing unsent is sent later."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def read_message(record: Record, *, prefix: str = "") -> Message:
    """Return the message of a record that a consumer received, without its place in the log.

    Raises:
        KeyError: no header `Outbox-Id` is there, so no outbox has written the record.
    """
    wire: Any = record.headers() or []
    headers = {name: text for name, value in wire if (text := _text(value)) is not None}
    topic = (record.topic() or "").removeprefix(f"{prefix}." if prefix else "")
    message = read_headers(topic, record.value() or b"", headers)
    key = record.key()
    message.key = key.decode() if isinstance(key, bytes) else key
    return message


def _text(value: bytes | None) -> str | None:
    """Return the text of a header; None for other bytes, which no outbox writes."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


class _Connection:
    """One producer, closed after a failure, and never used again."""

    def __init__(self, settings: dict[str, Any], prefix: str, *, streams: bool) -> None:
        self._producer = Producer(settings, error_cb=self._note, logger=CLIENT_LOG)
        self._prefix = prefix
        #: True when records of a key are sent without waiting for each other; a refused record ends the producer.
        self.streams = streams
        #: The topics that are there; and the verdicts on those that are not, or may not be used. The client itself
        #: would notice a new one very late.
        self._topics: set[str] = set()
        self._missing: dict[str, Verdict] = {}
        #: The reason why nothing can be sent; empty while all is well. `hint`: what the client said last.
        self.trouble = self.hint = ""
        self._call = _Call(())
        #: The callbacks for the messages of a call, by index. They serve every call, because as many new ones for each
        #: call would keep the garbage collector busy.
        self._reports: list[Callable[[KafkaError | None, Record], None]] = []

    def begin(self, call: _Call) -> None:
        """Begin a call: forget earlier words of the client, and missing topics, which may be there by now."""
        with suppress(*CLIENT_ERRORS):
            self._producer.poll(0)
        self.hint = ""
        self._missing.clear()
        self._call = call
        self._reports.extend(partial(self._report, n) for n in range(len(self._reports), len(call.messages)))

    def hand_over(self, call: _Call, until: float) -> None:
        """Hand over what may be sent now."""
        produce, reports, messages = self._producer.produce, self._reports, call.messages
        take = call.chains.take if call.streams else call.take
        while not call.is_refused and (index := take()) is not None:
            message = messages[index]
            topic = self._prefix + message.topic
            verdict = self._look_up(message.topic, until) if topic not in self._topics else None
            if self.trouble:
                return
            if verdict is not None:
                call.settle(index, verdict)
                continue
            try:
                headers: dict[str, Any] = wire_headers(message, keyed=False)
                # By place, because the client takes longer to find arguments by their names.
                value = None if message.is_tombstone else message.body
                produce(topic, value, message.key, -1, reports[index], None, 0, headers)
            except InvalidMessageError as unfit:
                call.refuse(index, Reject(str(unfit)))
            except ValueError as unfit:
                call.refuse(index, Reject(f"Kafka cannot carry it: {unfit}"))
            except KafkaException as error:
                if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                    call.refuse(index, too_large_for_the_client(message))
                else:
                    # The producer has ended, or it has found the topic missing meanwhile.
                    self._refuse(call, index, error.args[0])
                    self._note(error.args[0])

    def wait(self, call: _Call, seconds: float) -> None:
        """Send all records at once, and wait for the reports, for at most so long."""
        try:
            self._producer.flush(seconds)
        except CLIENT_ERRORS as error:
            # The client raises what ends the producer; the reports come by the next call.
            call.is_refused = self.streams
            if isinstance(error, KafkaException):
                self._note(error.args[0])
        call.settle_stored()
        if call.is_refused:
            # What the broker has not seen would wait until the deadline.
            self._producer.purge(in_queue=True, in_flight=False, blocking=False)

    def close(self) -> None:
        """Forget whatever was not sent, and end the producer."""
        self._producer.purge()
        with suppress(*CLIENT_ERRORS):
            self._producer.close()

    def _report(self, index: int, error: KafkaError | None, _record: Record) -> None:
        """Take the report on one message of the call."""
        call = self._call
        if error is None:
            call.stored.append(index)
            return
        if error.fatal():
            self._note(error)
        if error.code() in ONE_OF_A_BATCH:
            topic = self._prefix + call.messages[index].topic
            call.blame(index, f"Kafka on topic {topic!r}: {error.str()}", verdict_of_record(topic, error))
            return
        self._refuse(call, index, error)

    def _refuse(self, call: _Call, index: int, error: KafkaError) -> None:
        """Store that a message was refused. The topic is looked up before the next use."""
        topic = self._prefix + call.messages[index].topic
        self._topics.discard(topic)
        text = f"Kafka on topic {topic!r}: {error.str()}{self.hint}"
        call.refuse(index, verdict_of_record(topic, error) or Unavailable(text, everything=True))

    def _note(self, error: KafkaError) -> None:
        """Note an event of the client that is about no message."""
        if error.code() in NO_BROKER or (error.fatal() and not self.streams):
            self.trouble = self.trouble or words_of(error) + self.hint
        self.hint = f": {words_of(error)}"

    def _look_up(self, own: str, until: float) -> Verdict | None:
        """Return the verdict for a topic of ours that cannot be used. Without an answer in time, set `trouble`."""
        refusal = refusal_of(self._prefix, own)
        if refusal is not None:
            return refusal
        topic = self._prefix + own
        if topic in self._missing:
            return self._missing[topic]
        listed = self._listed(topic, until)
        if listed is None:
            return None
        about = listed.topics.get(topic)
        if about is None or about.error is not None:
            found = about and about.error and verdict_of_record(topic, about.error)
            self._missing[topic] = found or no_topic(topic)
            return self._missing[topic]
        self._topics.add(topic)
        return None

    def _listed(self, topic: str, until: float) -> ClusterMetadata | None:
        """Return the brokers' knowledge of a topic; None without an answer, with the reason in `trouble`."""
        while not self.trouble:
            try:
                listed: ClusterMetadata = self._producer.list_topics(topic, timeout=_SLICE_SECONDS)
                if not self._topics:
                    # A new producer asks for its id, without which nothing is sent, when it learns about topics while a
                    # broker is connected, or else after 0.5 s. The first answer often ends its own connection.
                    listed = self._producer.list_topics(topic, timeout=_SLICE_SECONDS)
                return listed
            except KafkaException as error:
                # That no broker can be reached is an event, which only a poll brings.
                with suppress(*CLIENT_ERRORS):
                    self._producer.poll(0.05)
                if time.monotonic() > until:
                    self.trouble = self.trouble or error.args[0].str()
        if self.hint.removeprefix(": ") not in self.trouble:
            self.trouble += self.hint
        return None


class _Call:
    """One call of `send`: messages and verdicts."""

    __slots__ = ("_alone", "_suspects", "chains", "is_answered", "is_refused", "messages", "stored", "streams")

    def __init__(self, messages: Sequence[Message], *, streams: bool = False) -> None:
        self.messages = messages
        self.streams = streams
        most, most_bytes = _MOST_UNDER_WAY, _MOST_BYTES_UNDER_WAY
        # A broker takes any record for the first one of a producer that it does not know. So the guarantee of a stream
        # begins in a partition with a record that is stored.
        self.chains = Chains(messages, most=most, most_bytes=most_bytes, order="first" if streams else "each")
        self.is_answered = False
        #: True when a record of a stream was refused: the rest of the call is not sent by it.
        self.is_refused = False
        #: Messages that are stored, and not settled yet.
        self.stored: list[int] = []
        #: Messages whose batch was refused. Each is sent once more, alone, which shows whether it is the cause.
        self._suspects: deque[int] = deque()
        self._alone = False

    @property
    def under_way(self) -> int:
        """The number of messages without a verdict that are not to be sent again."""
        return self.chains.number_under_way - len(self._suspects)

    def take(self) -> int | None:
        """Return the index of a message to send now, outside of a stream; None when there is none."""
        if self._suspects:
            if self.under_way:
                return None
            self._alone = True
            return self._suspects.popleft()
        if self._alone and self.under_way:
            return None
        self._alone = False
        return self.chains.take()

    def settle(self, index: int, verdict: Verdict) -> None:
        """Store the verdict on a message."""
        self.is_answered = True
        self.chains.settle(index, verdict)

    def settle_stored(self) -> None:
        """Settle the messages that are stored, all at once, because that takes less time for each."""
        stored, self.stored = self.stored, []
        if stored:
            self.is_answered = True
            self.chains.settle_all(stored, DONE)

    def refuse(self, index: int, verdict: Verdict) -> None:
        """Store the verdict on a refused message, which ends a stream."""
        self.is_refused = self.streams
        self.settle(index, verdict)

    def blame(self, index: int, error: str, verdict: Verdict | None) -> None:
        """Settle a message that was sent alone. A message of a batch may not be the cause, and is sent alone next."""
        if self._alone:
            self.refuse(index, verdict or Reject(error))
        elif self.streams:
            self.refuse(index, Unavailable(error))
        else:
            self._suspects.append(index)

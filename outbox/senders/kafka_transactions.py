"""Kafka's transactions: a call is a transaction, and a new producer shuts out all older producers of the same name.

So a relay that wakes up late, while another relay sends in its place, can store nothing any more. The late relay then
stays away for a while, instead of taking the name back.

A refused record fails the whole transaction. After the abort the other records are sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.senders.headers import wire_headers
from outbox.senders.kafka_refusals import (
    CLIENT_ERRORS,
    CLIENT_LOG,
    NO_BROKER,
    NO_SUCH_TOPIC,
    no_topic,
    refusal_of,
    too_large_for_the_client,
    verdict_of_record,
    words_of,
)
from outbox.senders.key_order import Chains

#: Seconds for which a sender that was shut out stays away: as long as a lease, so that its relay has noticed its loss.
STAY_AWAY = 10.0
#: Seconds after which a wait looks whether it is still wanted.
_SLICE = 0.2
#: What is reported of records whose transaction is aborted because of another one.
_PURGED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


class Transactions:
    """Sends calls with one producer, made when needed. One thread uses the object; any thread may set `trouble`.

    Args:
        settings: called for the settings of a producer that is made.
        name: its transactional id.
        where: the brokers, for people.
        seconds: the time of a call.
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]], name: str, where: str, seconds: float) -> None:
        milliseconds = max(1_000, int(seconds * 1_000))
        self._of_transactions = {"transactional.id": name, "transaction.timeout.ms": milliseconds}
        self._settings = settings
        self._name = name
        self._where = where
        self._producer: Producer | None = None
        #: Topics that were not there when they were last used. The client itself would notice a new one very late.
        self._missing: set[str] = set()
        self._events: tuple[KafkaError, ...] = ()
        self._away_until = 0.0
        #: The reason for which the call that is under way has to give up; empty while there is none.
        self.trouble = ""

    def send(self, messages: Sequence[Message], prefix: str, until: float) -> tuple[list[Verdict], str]:
        """Send messages; return one verdict per message, and the reason of a failure, or an empty text."""
        self._events, self.trouble = (), ""
        batch = _Batch(messages, prefix)
        try:
            producer = self._connected(until)
            batch.leave_out(self._still_missing(producer))
            while not self._is_committed(producer, batch, until):
                pass
        except (*CLIENT_ERRORS, OSError) as error:
            failure = self._told(error)
        else:
            return batch.verdicts(DONE), ""
        self._drop()
        return batch.verdicts(Unavailable(f"Kafka: {self._where}: {failure}", everything=True)), failure

    def close(self) -> None:
        """End the producer. The next call makes another producer, even after a shut-out."""
        self._drop()
        self._away_until = 0.0

    def _connected(self, until: float) -> Producer:
        """Return the producer. A new producer shuts out others of the name, and aborts their transactions."""
        if self._producer is None:
            if time.monotonic() < self._away_until:
                raise ConnectionError(self._shut_out)
            producer = Producer({**self._settings(), **self._of_transactions}, error_cb=self._note, logger=CLIENT_LOG)
            self._insist(producer, producer.init_transactions, until)
            self._producer = producer
        return self._producer

    def _is_committed(self, producer: Producer, batch: _Batch, until: float) -> bool:
        """Send the batch as one transaction; return False after an abort, when a smaller batch is worth a try."""
        producer.begin_transaction()
        batch.errors = {}  # reports of the one before may still come
        with suppress(_RefusedError):
            for index in batch.left():
                self._hand_over(producer, batch, index, until)
            self._flush(producer, batch, until)
            self._insist(producer, producer.commit_transaction, until)
            return True
        self._insist(producer, producer.abort_transaction, until)
        while len(producer) > 0:
            producer.flush(self._patience(until))
        batch.learn()
        self._missing |= batch.missing
        return False

    def _hand_over(self, producer: Producer, batch: _Batch, index: int, until: float) -> None:
        message = batch.messages[index]
        try:
            headers: dict[str, Any] = wire_headers(message, keyed=False)
            if index in batch.alone:
                self._flush(producer, batch, until)
            report = partial(_keep, batch.errors, index)
            value = None if message.is_tombstone else message.body
            producer.produce(batch.topic(message), value, message.key, headers=headers, on_delivery=report)
            if index in batch.alone:
                self._flush(producer, batch, until)
        except BufferError:
            self._flush(producer, batch, until)
            self._hand_over(producer, batch, index, until)
        except InvalidMessageError as unfit:
            batch.left_out[index] = Reject(str(unfit))
        except ValueError as unfit:
            batch.left_out[index] = Reject(f"Kafka cannot carry it: {unfit}")
        except KafkaException as error:
            if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                batch.left_out[index] = too_large_for_the_client(message)
                return
            # The client takes nothing more after a record was refused, which the reports tell. Of a topic that it has
            # found missing meanwhile, there is no report.
            producer.poll(0)
            if error.args[0].code() in NO_SUCH_TOPIC:
                batch.errors[index] = error.args[0]
            if not batch.errors:
                raise
            raise _RefusedError from error

    def _flush(self, producer: Producer, batch: _Batch, until: float) -> None:
        """Wait until the records are stored; raise `_RefusedError` after a refusal."""
        while len(producer) > 0 and not batch.errors:
            producer.flush(self._patience(until))
        if batch.errors:
            raise _RefusedError

    def _insist(self, producer: Producer, act: Callable[[float], object], until: float) -> None:
        """Wait for an act of the client to succeed."""
        while True:
            try:
                act(self._patience(until))
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise
            else:
                return
            producer.poll(0)

    def _patience(self, until: float) -> float:
        """Return how long to wait now; raise `ConnectionError` if there is no time left, or nothing to wait for."""
        away = [event for event in self._events if event.code() in NO_BROKER]
        if away and not self.trouble:
            self.trouble = words_of(away[0]) + self._hint
        if self.trouble:
            raise ConnectionError(self.trouble)
        left = until - time.monotonic()
        if left <= 0:
            raise ConnectionError(f"no answer in time{self._hint}")
        return min(left, _SLICE)

    def _told(self, error: BaseException) -> str:
        """Return why a call fails; stay away if another sender has the name."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KafkaException):
            cause = cause.__cause__ or cause.__context__
        if not isinstance(cause, KafkaException):
            return str(error)
        if cause.args[0].code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
            self._away_until = time.monotonic() + STAY_AWAY
            return self._shut_out
        return str(cause.args[0].str()) + self._hint

    @property
    def _shut_out(self) -> str:
        return f"another sender has the transactional id {self._name!r} now"

    @property
    def _hint(self) -> str:
        causes = [words_of(event) for event in self._events if event.code() not in NO_BROKER]
        return f": {causes[-1]}" if causes else ""

    def _note(self, error: KafkaError) -> None:
        """Note an event of the client. Nothing may be called here: an exception may be under way."""
        self._events = (*self._events, error)

    def _still_missing(self, producer: Producer) -> set[str]:
        self._missing = {topic for topic in self._missing if not _is_there(producer, topic)}
        return self._missing

    def _drop(self) -> None:
        """Give the producer up with everything unsent. The method `close` would wait, and complain."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(*CLIENT_ERRORS):
                producer.purge()


class _RefusedError(Exception):
    """Raised when refused records fail a transaction."""


class _Batch:
    """The messages of a call, some of them left out of the transaction."""

    def __init__(self, messages: Sequence[Message], prefix: str) -> None:
        self.messages = messages
        self._prefix = prefix
        self.left_out: dict[int, Verdict] = {}
        #: Messages whose batch of records was refused. Each is sent in one of its own, which shows whether it is why.
        self.alone: set[int] = set()
        #: What was reported of records in this transaction, other than that they are stored.
        self.errors: dict[int, KafkaError] = {}
        self.missing: set[str] = set()

    def topic(self, message: Message) -> str:
        return self._prefix + message.topic

    def leave_out(self, missing: set[str]) -> None:
        """Leave out messages that Kafka would refuse for the topic."""
        for index, message in enumerate(self.messages):
            topic = self.topic(message)
            if (refusal := refusal_of(self._prefix, message.topic)) is not None:
                self.left_out[index] = refusal
            elif topic in missing:
                self.left_out[index] = no_topic(topic)

    def left(self) -> Iterator[int]:
        """Return the indexes to send: none behind a message of the key that is left out."""
        blocked: set[str | None] = set()
        for index, message in enumerate(self.messages):
            if index not in self.left_out and message.key not in blocked:
                yield index
            if index in self.left_out and message.key is not None:
                blocked.add(message.key)

    def learn(self) -> None:
        """Leave out refused messages; raise if no message was at fault: the next transaction would fail, too."""
        known = len(self.left_out) + len(self.alone)
        for index, error in self.errors.items():
            topic = self.topic(self.messages[index])
            verdict = verdict_of_record(topic, error)
            if isinstance(verdict, Reject) and index not in self.alone:
                self.alone.add(index)
            elif verdict is not None:
                self.left_out[index] = verdict
            elif error.code() not in _PURGED:
                raise KafkaException(error)
            if error.code() in NO_SUCH_TOPIC:
                self.missing.add(topic)
        if len(self.left_out) + len(self.alone) == known:
            # The client may still be throwing away what is left of the transaction before, and takes the wrong records.
            time.sleep(0.02)

    def verdicts(self, rest: Verdict) -> list[Verdict]:
        """Return one verdict per message: `rest` for all messages in the transaction."""
        chains = Chains(self.messages, most=1, most_bytes=1)
        while (index := chains.take()) is not None:
            chains.settle(index, self.left_out.get(index, rest))
        return chains.verdicts()


def _keep(errors: dict[int, KafkaError], index: int, error: KafkaError | None, _record: object) -> None:
    """Keep the report on a record. Nothing may be called here either."""
    if error is not None:
        errors[index] = error


def _is_there(producer: Producer, topic: str) -> bool:
    try:
        found = producer.list_topics(topic, timeout=1).topics.get(topic)
    except KafkaException:
        return False
    return found is not None and found.error is None

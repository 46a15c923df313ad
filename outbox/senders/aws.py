"""Amazon SQS and SNS, by botocore: URL `sqs://region/account/prefix?fifo=1`, and `sns://` in the same form.

A topic is a queue of SQS, or a topic of SNS; a prefix stands before each name, with a hyphen. Queues and topics have to
exist. The account is the owner's: SQS takes the credentials' own without, SNS needs it. Credentials come from AWS's own
chain (environment, files, roles), never from the URL. `endpoint=http://localhost:4566` is for LocalStack or moto.

A name that ends with `.fifo` is FIFO; the option `fifo=1` adds the ending. There the group of a message is the key, and
the deduplication id is the message id, by which AWS drops a second copy for five minutes.

A call of AWS takes ten messages and may store some of them only, so it gets at most one message of a key: the next one
waits for the answer. `outbox.senders.aws_message` says what a message looks like on the way.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.text import one_line
from outbox.runtime.threads import Threads
from outbox.senders.address import Address
from outbox.senders.aws_message import group_of, text_of
from outbox.senders.connection_log import ConnectionLog, OfOthers, reason_of
from outbox.senders.key_order import Chains
from outbox.senders.new_topics import too_narrow
from outbox.senders.remote import MOST_BYTES_UNDER_WAY, Call, Connection, RemoteSender

try:
    from botocore.awsrequest import (
        AWSHTTPConnection,
        AWSHTTPConnectionPool,
        AWSHTTPSConnection,
        AWSHTTPSConnectionPool,
    )
    from botocore.config import Config
    from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError
    from botocore.loaders import create_loader
    from botocore.session import get_session
except ImportError as error:
    raise MissingExtraError("SQS and SNS need an extra: pip install 'outbox-log[aws]'") from error

#: The most messages of a call of AWS, a limit of AWS, and of calls under way.
_MOST_OF_A_CALL = 10
_MOST_CALLS = 16
#: A queue or a topic may be set to take less than this limit of AWS. By default a topic takes `_BYTES_OF_A_CALL`, which
#: counts all messages of a call; a larger message has a call of its own.
_MOST_BYTES = 1024 * 1024
_BYTES_OF_A_CALL = 256 * 1024

#: Codes of a message that AWS can never take. A whole call is refused for such a message, too, or for all of its bytes.
_NEVER = {
    "BatchRequestTooLong",
    "InvalidMessageContents",
    "InvalidParameter",
    "InvalidParameterValue",
    "ParameterValueInvalid",
}
#: Codes of a queue or topic that is not there, or not for us. All other codes are about the account or the service.
_MISSING = {"NonExistentQueue", "QueueDoesNotExist", "NotFound", "NotFoundException"}
_FORBIDDEN = re.compile(r"AccessDenied|Authorization|KMS|InvalidSecurity|UnsupportedOperation")
#: AWS explains a wrong signature with the signed headers, the session token among them.
_SIGNATURE = re.compile(r"Signature")

_REGION = re.compile(r"[a-z]{2,8}(-[a-z]+)+-[0-9]")
_ACCOUNT = re.compile(r"[0-9]{12}")
_PREFIX = re.compile(r"[A-Za-z0-9_-]+")
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.fifo)?")
_OTHERS = re.compile(r"[^A-Za-z0-9_-]")
_FIFO = ".fifo"

#: The descriptions of AWS's services, read once a process.
services = create_loader()

for _thread in ("outbox-sqs", "outbox-sns"):
    # The driver tells with each connection where it found the credentials.
    logging.getLogger("botocore.credentials").addFilter(OfOthers(_thread, logging.WARNING))


class _Sockets:
    """The open connections of a client, whose sockets another thread may cut. After that no connection opens.

    A thread that was left behind sends nothing any more. The driver's time-outs begin anew with each piece of an
    answer, so a server that trickles would keep a thread for ever.
    """

    def __init__(self, client: Any) -> None:
        self._opened: set[Any] = set()
        self._is_cut = False
        http = client._endpoint.http_session
        http._pool_classes_by_scheme = http._manager.pool_classes_by_scheme = {
            "http": self._pool(AWSHTTPConnectionPool, AWSHTTPConnection),
            "https": self._pool(AWSHTTPSConnectionPool, AWSHTTPSConnection),
        }

    def cut(self) -> None:
        """End all calls under way."""
        self._is_cut = True
        for connection in list(self._opened):
            opened = connection.sock
            if opened is not None:
                with suppress(OSError):  # it has been closed meanwhile
                    # Not the method of TLS, which takes the connection apart under the thread that reads.
                    socket.socket.shutdown(opened, socket.SHUT_RDWR)

    def _pool(self, pool: type[Any], connection: type[Any]) -> type[Any]:
        """Return a kind of pool whose connections are known here from connect to close."""
        sockets = self

        class Known(connection):  # type: ignore[misc]  # the driver has no types
            def connect(self) -> None:
                super().connect()
                sockets._opened.add(self)
                if sockets._is_cut:
                    raise ConnectionError("the call is over")

            def close(self) -> None:
                sockets._opened.discard(self)
                super().close()

        return type(pool.__name__, (pool,), {"ConnectionCls": Known})


class _AwsSender(RemoteSender):
    """Takes the URL apart, for both senders."""

    _kind: ClassVar[type[_Connection]]

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        target = _Target.of(url, self._kind)
        seconds = target.address.timeout(timeout)
        super().__init__(
            self._kind.service,
            url,
            (target.where,),
            lambda server, log: self._kind(server, log, target, seconds),
            seconds=seconds,
            chains=partial(Chains, most=_MOST_CALLS * _MOST_OF_A_CALL, most_bytes=MOST_BYTES_UNDER_WAY),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The parts of a URL that say where messages go. `fifo`: the end of each name, or nothing."""

    address: Address
    region: str
    account: str | None
    prefix: str
    fifo: str
    endpoint: str | None

    @classmethod
    def of(cls, url: str, kind: type[_Connection]) -> _Target:
        """Take a URL apart; raise `SenderError` for one that no destination has."""
        scheme = kind.service.lower()
        form = f"{scheme}://eu-central-1/123456789012/prefix"
        address = Address.of(url, form=form, options=("timeout", "fifo", "endpoint"))
        if address.user is not None:
            fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role"
            address.refuse(f"credentials are not taken from the URL: {fix}")
        region = ",".join(address.hosts)
        if not _REGION.fullmatch(region):
            address.refuse(f"the host is a region of AWS; write {form}")
        path = list(address.path)
        account = path.pop(0) if path and _ACCOUNT.fullmatch(path[0]) else None
        if account is None and kind.needs_account:
            address.refuse(f"the path begins with the account of the topics, of 12 digits; write {form}")
        if path and (len(path) > 1 or not _PREFIX.fullmatch(path[0])):
            address.refuse("the path is an account of 12 digits and a prefix of letters, digits, - and _")
        fifo, endpoint = address.options.get("fifo", "0"), address.options.get("endpoint")
        if fifo not in ("0", "1"):
            address.refuse("fifo must be 1 or 0")
        if endpoint is not None and (not endpoint.startswith(("http://", "https://")) or "@" in endpoint):
            address.refuse("endpoint must be an http:// or https:// URL without a user")
        return cls(
            address=address,
            region=region,
            account=account,
            prefix=f"{path[0]}-" if path else "",
            fifo=_FIFO if fifo == "1" else "",
            endpoint=endpoint,
        )

    @property
    def where(self) -> str:
        """The server in texts."""
        return self.endpoint or f"{self.address.scheme}://{self.region}"

    def name(self, topic: str) -> str:
        """Return the name of the queue, or of the topic of SNS."""
        return f"{self.prefix}{topic.removesuffix(self.fifo)}{self.fifo}"


class _Batch:
    """The messages of one call of AWS, for one queue or topic. The id of an entry is the index of the message."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: list[dict[str, Any]] = []
        self._bytes = 0

    def takes(self, size: int) -> bool:
        """Return whether a message of so many bytes may be added."""
        fits = self._bytes + size <= _BYTES_OF_A_CALL and len(self.entries) < _MOST_OF_A_CALL
        return fits or not self.entries

    def add(self, entry: dict[str, Any], size: int) -> None:
        """Add a message."""
        self.entries.append(entry)
        self._bytes += size

    def alone(self) -> Iterator[_Batch]:
        """Return a batch for each message."""
        for entry in self.entries:
            batch = _Batch(self.name)
            batch.add(entry, 0)
            yield batch


class _Answer(NamedTuple):
    """The answer to a message or to a whole call that was refused: AWS's code, without the name of an old API."""

    code: str
    text: str

    @classmethod
    def of(cls, refusal: Mapping[str, Any]) -> _Answer:
        """Return the answer in a refusal of AWS."""
        code = str(refusal.get("Code", "")).removeprefix("AWS.SimpleQueueService.")
        said = "" if _SIGNATURE.search(code) else str(refusal.get("Message") or "")
        return cls(code, one_line(f"{code}: {said}" if said else code))


class _Connection(Connection):
    """A client of AWS with its pool of connections. Each call of the client has a thread of its own."""

    service: ClassVar[str]
    noun: ClassVar[str]
    longest_name: ClassVar[int]
    text_field: ClassVar[str]
    needs_account: ClassVar[bool]

    def __init__(self, server: str, log: ConnectionLog, target: _Target, seconds: float) -> None:
        super().__init__(server, log)
        self._target = target
        self._seconds = seconds
        self._threads = Threads(f"outbox-{self.service.lower()}", most=_MOST_CALLS)
        self._client: Any = None
        self._sockets: _Sockets
        self._is_stale = False

    @property
    def is_lost(self) -> bool:
        return self.is_closed or self._is_stale

    async def open(self, deadline: float) -> None:
        """Find the credentials, and make the client; it connects with the first message."""
        async with asyncio.timeout_at(deadline):
            self._client = await self._threads.run(self._make_client)
        self._sockets = _Sockets(self._client)

    def _make_client(self) -> Any:
        session = get_session()
        session.register_component("data_loader", services)
        config = Config(
            connect_timeout=self._seconds,
            read_timeout=self._seconds,
            max_pool_connections=_MOST_CALLS,
            parameter_validation=False,
            # The relay tries again. A second try in here would hide that a message may be stored twice.
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        return session.create_client(
            self.service.lower(), region_name=self._target.region, endpoint_url=self._target.endpoint, config=config
        )

    async def store(self, batch: _Batch) -> Mapping[str, Any]:
        """Hand a batch to AWS; return the answer."""
        return await self._threads.run(partial(self.call, self._client, batch))

    @abstractmethod
    def call(self, client: Any, batch: _Batch) -> Mapping[str, Any]:
        """Do the same in a thread."""

    async def carry(self, call: Call) -> None:
        await _Sending(self, call, self._target).run()

    async def close(self) -> None:
        self.is_closed = True
        if self._client is not None:
            self._sockets.cut()
            self._client.close()

    def words(self, error: Exception) -> str:
        if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            return "AWS's own chain finds no credentials; set AWS_ACCESS_KEY_ID, AWS_PROFILE, or give a role"
        return one_line(reason_of(error))

    def away(self, reason: str) -> Unavailable:
        """Log that AWS takes nothing; return the verdict. The next connection looks for credentials anew."""
        self._is_stale = True
        return Unavailable(self.log.lost(f"{self.server}: {reason}"), everything=True)

    def verdict_of(self, answer: _Answer, name: str) -> Verdict:
        """Return the verdict on a message for a refusal of AWS."""
        where = f"{self.service} on {self.noun} {name!r}"
        if answer.code in _MISSING:
            return Unavailable(f"{self.service}: no {self.noun} {name!r} in {self._target.region}; create it")
        if answer.code in _NEVER:
            return Reject(f"{where}: {answer.text}")
        return Unavailable(f"{where}: {answer.text}")


class _TooNarrowError(Exception):
    """Raised for a topic that is no name of a queue or topic of AWS."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


class _Sending:
    """The calls of AWS for one call of `send`."""

    def __init__(self, connection: _Connection, call: Call, target: _Target) -> None:
        self._connection = connection
        self._call = call
        self._target = target
        #: The verdict on what is not sent any more, because it would get the same one.
        self._rest: Unavailable | None = None

    async def run(self) -> None:
        """Send the messages, as many at once as may be; raise `TimeoutError` if an answer is missing."""
        async with asyncio.timeout_at(self._call.deadline), asyncio.TaskGroup() as group:
            self._offer(group)
        if self._rest is not None:
            self._call.chains.give_up(self._rest.error)

    def _offer(self, group: asyncio.TaskGroup) -> None:
        """Begin the calls that may begin now."""
        if self._rest is None:
            for batch in self._batches():
                group.create_task(self._settle(batch, group))

    async def _settle(self, batch: _Batch, group: asyncio.TaskGroup) -> None:
        for index, verdict in (await self._verdicts(batch)).items():
            self._call.chains.settle(index, verdict)
            if isinstance(verdict, Unavailable) and verdict.everything:
                self._rest = verdict
        self._offer(group)

    def _batches(self) -> Sequence[_Batch]:
        """Return the messages that may be sent now, in batches."""
        batches: list[_Batch] = []
        newest: dict[str, _Batch] = {}
        while (index := self._call.chains.take()) is not None:
            message = self._call.messages[index]
            try:
                name, entry, size = self._entry(message)
            except _TooNarrowError as narrow:
                self._call.chains.settle(index, narrow.verdict)
                continue
            except (InvalidMessageError, ValueError) as unfit:
                self._call.chains.settle(index, Reject(f"{self._connection.service} cannot carry it: {unfit}"))
                continue
            batch = newest.get(name)
            if batch is None or not batch.takes(size):
                batch = newest[name] = _Batch(name)
                batches.append(batch)
            batch.add({"Id": str(index), **entry}, size)
        return batches

    def _entry(self, message: Message) -> tuple[str, dict[str, Any], int]:
        """Return the name of the queue or topic, the entry without its id, and the bytes that AWS counts."""
        to, name = self._connection, self._target.name(message.topic)
        if not _NAME.fullmatch(name) or len(name) > to.longest_name:
            problem = (
                f"{to.service} cannot carry it: {name!r} is no name of a {to.noun}, which has at most"
                f" {to.longest_name} letters, digits, - and _, and perhaps {_FIFO}"
            )
            room = to.longest_name - len(self._target.name(""))
            raise _TooNarrowError(too_narrow(message.topic, problem, _OTHERS.sub("-", message.topic)[:room]))
        text, attributes = text_of(message)
        size = len(text.encode()) + sum(len(part) for pair in attributes.items() for part in (*pair, "String"))
        if size > _MOST_BYTES:
            raise ValueError(f"{size} bytes with attributes are more than {_MOST_BYTES}; send a link to the data")
        entry: dict[str, Any] = {
            to.text_field: text,
            "MessageAttributes": {
                attribute: {"DataType": "String", "StringValue": value} for attribute, value in attributes.items()
            },
        }
        if name.endswith(_FIFO):
            entry |= {"MessageGroupId": group_of(message), "MessageDeduplicationId": message.id_text}
        return name, entry, size

    async def _verdicts(self, batch: _Batch) -> dict[int, Verdict]:
        """Send a batch; return the verdicts by index."""
        to = self._connection
        try:
            found = await to.store(batch)
        except ClientError as error:
            answer = _Answer.of(error.response.get("Error", {}))
            if len(batch.entries) > 1 and answer.code in _NEVER:
                apart = [await self._verdicts(one) for one in batch.alone()]
                return {index: verdict for each in apart for index, verdict in each.items()}
            if answer.code in _NEVER | _MISSING or _FORBIDDEN.search(answer.code):
                verdict = to.verdict_of(answer, batch.name)
            else:
                verdict = to.away(answer.text)
            return {int(entry["Id"]): verdict for entry in batch.entries}
        except Exception as error:  # any program may listen at that port, and answer anything
            if to.is_closed:
                raise
            away = to.away(to.words(error))
            return {int(entry["Id"]): away for entry in batch.entries}
        stored = {each.get("Id") for each in found.get("Successful") or ()}
        refused = {each.get("Id"): to.verdict_of(_Answer.of(each), batch.name) for each in found.get("Failed") or ()}
        if stored:
            to.log.connected(to.server)
        silent = Unavailable(f"{to.service} on {to.noun} {batch.name!r}: no answer about the message")
        return {
            int(entry["Id"]): refused.get(entry["Id"]) or (DONE if entry["Id"] in stored else silent)
            for entry in batch.entries
        }


class _Queues(_Connection):
    """A client of SQS, with the URLs of the queues."""

    service, noun, longest_name = "SQS", "queue", 80
    text_field, needs_account = "MessageBody", False

    def __init__(self, server: str, log: ConnectionLog, target: _Target, seconds: float) -> None:
        super().__init__(server, log, target, seconds)
        self._urls: dict[str, str] = {}

    def call(self, client: Any, batch: _Batch) -> Mapping[str, Any]:
        owner = {} if self._target.account is None else {"QueueOwnerAWSAccountId": self._target.account}
        url = self._urls.get(batch.name)
        if url is None:
            url = self._urls[batch.name] = client.get_queue_url(QueueName=batch.name, **owner)["QueueUrl"]
        answer: Mapping[str, Any] = client.send_message_batch(QueueUrl=url, Entries=batch.entries)
        return answer


class _Topics(_Connection):
    """A client of SNS."""

    service, noun, longest_name = "SNS", "topic", 256
    text_field, needs_account = "Message", True

    def call(self, client: Any, batch: _Batch) -> Mapping[str, Any]:
        arn = f"arn:{client.meta.partition}:sns:{self._target.region}:{self._target.account}:{batch.name}"
        answer: Mapping[str, Any] = client.publish_batch(TopicArn=arn, PublishBatchRequestEntries=batch.entries)
        return answer


class SqsSender(_AwsSender):
    """A sender that sends messages to queues of SQS; at most one message of a key is unanswered."""

    _kind = _Queues


class SnsSender(_AwsSender):
    """A sender that publishes messages to topics of SNS; at most one message of a key is unanswered."""

    _kind = _Topics

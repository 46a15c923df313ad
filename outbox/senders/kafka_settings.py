"""The settings of Kafka's client: what the URL says, what the user adds, and what no user may change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from confluent_kafka import KafkaException, Producer

from outbox.errors import SenderError
from outbox.model.verdict import describe
from outbox.runtime.fork import in_child
from outbox.runtime.secret import scrubbed, without
from outbox.runtime.text import one_line
from outbox.senders.address import Address
from outbox.senders.kafka_refusals import LARGEST_RECORD
from outbox.senders.tls import TLS_OPTIONS, Tls

#: A token, and when it expires, in seconds since 1970. The name of a principal and extensions may follow.
Token = tuple[str, float] | tuple[str, float, str] | tuple[str, float, str, dict[str, str]]

OPTIONS = ("timeout", "mechanism", "compression", "transactional.id", *TLS_OPTIONS)

_MECHANISMS = {"plain": "PLAIN", "scram-sha-256": "SCRAM-SHA-256", "scram-sha-512": "SCRAM-SHA-512"}
_COMPRESSIONS = {name: name for name in ("none", "gzip", "lz4", "snappy", "zstd")}
#: Other names that the client has for a setting.
_ALIASES = {
    "compression.codec": "compression.type",
    "message.timeout.ms": "delivery.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "sasl.mechanisms": "sasl.mechanism",
}
#: Settings on which a promise of the sender rests, or which the sender needs for itself; each with the reason.
_GUARDED = {
    "acks": "a message is done only when every replica in sync has a copy",
    "allow.auto.create.topics": "a missing topic is never created",
    "bootstrap.servers": "the hosts of the URL are the brokers",
    "delivery.report.only.error": "each message needs its report",
    "delivery.timeout.ms": "the timeout of the sender limits a call",
    "enable.gapless.guarantee": "no message may pass a refused message of its key",
    "enable.idempotence": "the client's own retries may neither repeat nor reorder messages",
    "message.max.bytes": "the topic's own limit counts",
    "oauth_cb": "pass the function as token",
    "partitioner": "a key is in the partition that Java's clients choose",
    "queue.buffering.max.kbytes": "the sender limits what is under way",
    "queue.buffering.max.messages": "the sender limits what is under way",
    "sasl.oauthbearer.metadata.authentication.type": "pass a function as token",
    "security.protocol": "the scheme of the URL says whether there is TLS",
    "test.mock.num.brokers": "brokers in memory store nothing, and the hosts of the URL are the brokers",
    "topic.metadata.propagation.max.ms": "messages of a missing topic are told apart at once",
    "transaction.timeout.ms": "the timeout of the sender limits a transaction",
    "transactional.id": "write the name into the URL",
}
_ALWAYS = {
    # No repetition and no hole while the client itself tries again.
    "enable.idempotence": True,
    "acks": "all",
    # The partition of a key is the one that Java's clients choose.
    "partitioner": "murmur2_random",
    "allow.auto.create.topics": False,
    "topic.metadata.propagation.max.ms": 0,
    "message.max.bytes": LARGEST_RECORD,
}
#: Greater numbers are milliseconds, not seconds.
_LATEST_EXPIRY = 100_000_000_000


class Settings:
    """The settings of the clients of one sender; no text of the object shows them.

    Args:
        address: the URL.
        further: settings of the client by their names in librdkafka.
        token: a function without arguments that returns a token, or None.
        seconds: the time of a call.

    Raises:
        SenderError: the URL or a setting cannot be used, or both contradict each other.
    """

    def __init__(
        self,
        address: Address,
        *,
        further: Mapping[str, str | float],
        token: Callable[[], Token] | None,
        seconds: float,
    ) -> None:
        self._in_time = {"delivery.timeout.ms": int(seconds * 800)}
        self._tls = address.tls("kafkas") or Tls()
        self._tokens = None if token is None else _Tokens(token)
        mechanism = address.choice("mechanism", _MECHANISMS)
        compression = address.choice("compression", _COMPRESSIONS)
        _check_login(address, has_token=token is not None)
        of_url = {
            "sasl.mechanism": "OAUTHBEARER" if token else mechanism if address.user else None,
            "sasl.username": address.user,
            "sasl.password": address.password,
            "ssl.ca.location": self._tls.ca,
            "ssl.certificate.location": self._tls.cert,
            "ssl.key.location": self._tls.key or self._tls.cert,
            "compression.type": compression if "compression" in address.options else None,
        }
        self._of_url = {name: value for name, value in of_url.items() if value is not None}
        self._further = _checked(address, further, self._of_url)
        has_login = any(name.startswith("sasl.") for name in (*self._of_url, *self._further))
        tls = "SSL" if address.scheme == "kafkas" else "PLAINTEXT"
        self._of_url["security.protocol"] = f"SASL_{tls}" if has_login else tls
        if further:
            _try(address, self._of_url | self._further | self._in_time)
        self._of_url["bootstrap.servers"] = ",".join(address.hosts)

    def begin(self, until: float) -> None:
        """Begin a call, which is over at a moment of the monotonic clock."""
        if self._tokens is not None:
            self._tokens.until = until

    def connecting(self) -> dict[str, Any]:
        """Return the settings by which a client made now finds the brokers, and is let in.

        Raises:
            ConnectionError: a file cannot be read, or the user's function has no token in time.
        """
        if self._tls != Tls():
            self._tls.context()
        callback = {} if self._tokens is None else {"oauth_cb": self._tokens.asked()}
        return {"client.id": "outbox", "log_level": 2, **self._further, **self._of_url, **callback}

    def producing(self, *, streams: bool) -> dict[str, Any]:
        """Return the settings of a producer made now; raise as `connecting` does."""
        return {
            # Records are put together while they are handed over; `flush` does not wait for so long.
            "linger.ms": 5,
            **self.connecting(),
            **_ALWAYS,
            # With the guarantee, a record that is refused ends the producer. It does not hold for a record that the
            # client gave up after some time, so this sender alone gives up.
            **({"enable.gapless.guarantee": True, "delivery.timeout.ms": 0} if streams else self._in_time),
        }


class _Tokens:
    """The tokens of the user's function. The client asks for another token before one expires."""

    def __init__(self, function: Callable[[], Token]) -> None:
        self._function = function
        self._next: Token | None = None
        #: The end of the call of `send` that is under way.
        self.until = float("inf")
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin without a call of the function: at first, and in a forked process, where its thread does not run."""
        self._called: Future[Token] | None = None

    def asked(self) -> _Tokens:
        """Get the token for a client that is made next, and return the callback for the client.

        Without a token the client would wait for ten seconds, and not tell why.
        """
        self._next = self._new()
        return self

    def __call__(self, _config: object) -> Token:
        token, self._next = self._next, None
        return token or self._new()

    def _new(self) -> Token:
        called = self._called = self._called or self._call()
        if not wait([called], max(0.0, self.until - time.monotonic())).done:
            raise ConnectionError("the function of token has not returned in time; let the function give up earlier")
        self._called = None
        try:
            token = called.result()
        except Exception as error:
            text = scrubbed(one_line(describe(error)), ())
            raise ConnectionError(f"the function of token failed: {text}") from None
        match token:
            case (
                (str(), float() | int() as expiry)
                | (str(), float() | int() as expiry, str())
                | (str(), float() | int() as expiry, str(), dict())
            ):
                pass
            case _:
                raise ConnectionError("token must return a text and its expiry in seconds since 1970")
        if expiry > _LATEST_EXPIRY:
            raise ConnectionError("the expiry of a token is in seconds since 1970, not in milliseconds")
        if expiry <= time.time():
            raise ConnectionError("the function of token returned a token that has expired")
        return token

    def _call(self) -> Future[Token]:
        """Call the function in a thread of its own, because nothing ends a function that hangs."""
        called: Future[Token] = Future()

        def call() -> None:
            try:
                called.set_result(self._function())
            except BaseException as error:
                called.set_exception(error)

        threading.Thread(target=call, name="outbox-token", daemon=True).start()
        return called


def _check_login(address: Address, *, has_token: bool) -> None:
    """Refuse an incomplete login, with which the client would connect as nobody, or not at all."""
    if has_token and (address.user is not None or "mechanism" in address.options):
        address.refuse("token is the login; leave out user, password and mechanism")
    if address.user is None and "mechanism" in address.options:
        address.refuse(f"mechanism belongs to a login; write {address.scheme}://user:password@host:9092")
    if address.user is not None and not (address.user and address.password):
        address.refuse(f"a login has a user and a password; write {address.scheme}://user:password@host:9092")


def _checked(address: Address, given: Mapping[str, str | float], of_url: Mapping[str, object]) -> dict[str, Any]:
    """Return the user's settings by the names that are used here; refuse what may not be set."""
    settings: dict[str, Any] = {}
    for written, value in given.items():
        name = _ALIASES.get(written, written)
        if name in _GUARDED:
            address.refuse(f"settings: leave out {written}; {_GUARDED[name]}")
        if name in of_url or name in settings:
            address.refuse(f"settings: leave out {written}; {'the URL' if name in of_url else 'another name'} says it")
        if not isinstance(value, str | int | float):
            address.refuse(f"settings: {written} must be a text, a number or a boolean")
        settings[name] = value
    login = [name for name in ("sasl.username", "sasl.password") if name in settings]
    if login and "sasl.mechanism" not in {*settings, *of_url}:
        # The client would take GSSAPI, and complain about a library that it was built without.
        address.refuse(f"settings: {login[0]} needs sasl.mechanism, too: {', '.join(_MECHANISMS.values())}")
    if address.scheme != "kafkas" and any(name.startswith("ssl.") for name in settings):
        address.refuse("settings: ssl.… is for kafkas://")
    return settings


def _try(address: Address, settings: Mapping[str, Any]) -> None:
    """Let the client look at settings, without a broker; refuse what the client refuses, without the values."""
    try:
        Producer({**settings, **_ALWAYS, "bootstrap.servers": "", "log_level": 2}).close()
    except (KafkaException, TypeError, AttributeError) as error:  # the last two: no function where one belongs
        said = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        texts = [value for value in settings.values() if isinstance(value, str)]
        raise SenderError(f"{address.shown}: settings: {without(one_line(said), texts)}") from None

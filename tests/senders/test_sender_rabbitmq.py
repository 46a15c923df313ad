"""RabbitMQ: the contract, over a network that fails; what a message looks like on its way; and each refusal."""

import asyncio
import json
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote
from uuid import UUID

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.common import FieldTable

from outbox.errors import SenderError
from outbox.model.message import Message, uuid7
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.rabbitmq import RabbitSender, read_message
from outbox.testing.sender_contract import (
    SenderContract,
    a_message,
    check_all_done,
    check_eventually_done,
    check_stored,
)
from outbox.testing.servers.process import free_port
from tests.conftest import started
from tests.support.authority import Authority, options
from tests.support.rabbit_exchanges import Exchange, user
from tests.support.remote import a_full_message, a_row
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.waiting import eventually

EARLIER = Unavailable("an earlier message of its key was not stored")
FIX = "send the message anew without that, and discard this one"
AWKWARD = "p@ss:w/rd?#% ü"

#: `ann` may write to `orders` and to `mail`, there but for the topic `secret`; `bob` may do everything in `shop/eu`.
DEFINITIONS: dict[str, Any] = {
    "users": [user("guest", "guest", "administrator"), user("ann", "pass"), user("bob", AWKWARD)],
    "vhosts": [{"name": "/"}, {"name": "shop/eu"}],
    "permissions": [
        {"user": "guest", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"},
        {"user": "ann", "vhost": "/", "configure": "", "write": "^(orders|mail)$", "read": ""},
        {"user": "bob", "vhost": "shop/eu", "configure": ".*", "write": ".*", "read": ".*"},
    ],
    "topic_permissions": [{"user": "ann", "vhost": "/", "exchange": "mail", "write": "^(?!secret)", "read": ""}],
    "exchanges": [
        {"name": name, "vhost": "/", "type": "topic", "durable": True, "auto_delete": False, "arguments": {}}
        for name in ("orders", "mail", "internal")
    ],
    "queues": [
        {"name": name, "vhost": vhost, "durable": True, "auto_delete": False, "arguments": {}}
        for name, vhost in (("all", "/"), ("orders", "shop/eu"))
    ],
    "bindings": [
        {
            "source": name, "vhost": "/", "destination": "all", "destination_type": "queue", "routing_key": "#",
            "arguments": {},
        }
        for name in ("orders", "mail")
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The authority that the server trusts, and another one."""
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "ours"), Authority(folder / "others")


@pytest.fixture(scope="module")
def strict(
    tmp_path_factory: pytest.TempPathFactory, authorities: tuple[Authority, Authority]
) -> Iterator[RabbitServer]:
    """A server with users, with a low limit, and with a second port for those who show a certificate."""
    definitions = tmp_path_factory.mktemp("rabbitmq") / "definitions.json"
    definitions.write_text(json.dumps(DEFINITIONS))
    certificate, key = authorities[0].issue("server")
    settings = {
        "load_definitions": str(definitions),
        "max_message_size": "5000",
        "listeners.ssl.default": f"127.0.0.1:{free_port()}",
        "ssl_options.cacertfile": str(authorities[0].ca),
        "ssl_options.certfile": str(certificate),
        "ssl_options.keyfile": str(key),
        "ssl_options.verify": "verify_peer",
        "ssl_options.fail_if_no_peer_cert": "true",
        "ssl_cert_login_from": "common_name",
        "auth_mechanisms.1": "PLAIN",
        "auth_mechanisms.2": "EXTERNAL",
    }
    with started(lambda: RabbitServer(settings=settings, plugins=["rabbitmq_auth_mechanism_ssl"])) as server:
        yield server


class TestRabbitSender(SenderContract):
    """RabbitMQ passes the contract."""

    @pytest.fixture
    def destination(self, exchange):
        """An exchange of its own for each test."""
        return exchange


def url_of(server: RabbitServer, name: str, password: str, path: str = "") -> str:
    """The server's URL for a user with a password."""
    return f"amqp://{name}:{quote(password, safe='')}@127.0.0.1:{server.port}/{path}"


def send(url: str, *sent: Message) -> list[Any]:
    """The verdicts of a sender of this call alone."""
    with closing(RabbitSender(url)) as sender:
        return list(sender.send(sent))


def test_the_fields_of_a_message_travel_as_documented(exchange, publisher):
    sent = a_full_message()

    check_all_done(publisher.send([sent]), [sent])

    [received] = exchange.received()
    assert (received.exchange, received.routing_key, received.body) == (exchange.name, "orders", b"{}")
    assert (received.message_id, received.content_type) == (str(sent.message_id), "application/json")
    assert received.timestamp == datetime(2026, 1, 31, 14, 0, 0, tzinfo=UTC)
    assert received.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert received.headers == {
        "Outbox-Key": "order%207%3A%20%C3%BC%25",
        "Outbox-Tags": "placed%2Fp%C3%A4id",
        "Outbox-Created-At": "2026-01-31T14:00:00.123456+00:00",
        "X-Trace": "a: b",
        "name": "Zoë",
    }
    others = ("content_encoding", "correlation_id", "reply_to", "expiration", "type", "user_id", "app_id")
    assert [getattr(received, name) for name in others] == [None] * len(others)


def test_a_field_that_a_message_has_not_is_not_sent(exchange, publisher):
    sent = Message("orders", b"")

    check_all_done(publisher.send([sent]), [sent])

    [received] = exchange.received()
    assert (received.message_id, received.headers) == (str(sent.message_id), {})
    assert (received.content_type, received.timestamp, received.body) == (None, None, b"")


def test_a_consumer_reads_the_message_back(exchange, publisher):
    sent = a_message("orders", {"id": 7}, key="a b", tags="x", headers={"n": "v"})
    publisher.send([sent])

    message = read_message(exchange.received()[0])

    assert (message.message_id, message.topic, message.key, message.tags) == (sent.message_id, "orders", "a b", "x")
    assert (message.headers, message.body, message.content_type) == ({"n": "v"}, b'{"id":7}', "application/json")
    assert (message.created_at, message.id) == (sent.created_at, None)


def test_what_no_outbox_wrote_is_not_read_as_a_message(exchange):
    """Some clients make ids of their own."""
    exchange.publish("orders", b"hello", message_id="1")
    [received] = exchange.received()

    with pytest.raises(ValueError, match="UUID"):
        read_message(received)
    without: Any = SimpleNamespace(message_id=None)
    with pytest.raises(KeyError, match="message_id"):
        read_message(without)


def test_what_the_broker_adds_on_the_way_is_not_read(rabbitmq, exchange):
    """A message that a consumer gave back is delivered again; one that it refused becomes a dead letter."""
    again, dead = f"{exchange.name}-again", f"{exchange.name}-dead"
    sent = a_message("orders", 1, key="k", headers={"n": "v"})
    found: list[AbstractIncomingMessage] = []

    async def act(channel: AbstractChannel) -> None:
        graves = await channel.declare_queue(dead, durable=True)
        arguments: FieldTable = {
            "x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead,
        }  # fmt: skip
        queue = await channel.declare_queue(again, durable=True, arguments=arguments)
        await queue.bind(exchange.name, "orders")
        check_all_done(await asyncio.to_thread(send, exchange.url, sent), [sent])
        await (await queue.get()).nack(requeue=True)
        redelivered = await get(queue)
        await redelivered.reject(requeue=False)
        found.extend((redelivered, await get(graves)))
        await found[1].ack()
        await channel.queue_delete(again)
        await channel.queue_delete(dead)

    async def get(queue):
        while (received := await queue.get(fail=False)) is None:
            await asyncio.sleep(0.05)
        return received

    exchange.run(act)

    assert found[0].headers["x-delivery-count"] == 1
    assert {"x-death", "x-first-death-reason"} <= set(found[1].headers)
    for received in found:
        message = read_message(received)
        assert (message.message_id, message.key, message.headers) == (sent.message_id, "k", {"n": "v"})


def test_a_routing_key_without_a_queue_is_named_and_stops_only_its_topic(exchange, publisher):
    exchange.take("orders", "mail")
    sent = [a_message(topic, n) for n, topic in enumerate(["orders", "odrers", "mail"] * 10)]

    verdicts = publisher.send(sent)

    text = f"RabbitMQ: no queue is bound to exchange {exchange.name!r} for routing key 'odrers'; bind one"
    assert verdicts == [DONE, Unavailable(text), DONE] * 10
    assert not verdicts[1].everything
    check_stored(exchange, [one for one in sent if one.topic != "odrers"])


def test_two_rows_of_one_id_are_told_apart(exchange, publisher):
    """A server returns by the id alone. Whose message it was may not be guessed."""
    exchange.take("orders")
    id = uuid7()
    routed, returned = (a_row(topic=topic, message_id=id) for topic in ("orders", "odrers"))

    for sent in ([routed, returned], [returned, routed], [returned, returned]):
        for one, verdict in zip(sent, publisher.send(sent), strict=True):
            assert verdict != DONE or one is routed

    assert publisher.send([routed]) == [DONE]


def test_without_an_exchange_a_topic_is_the_name_of_a_queue(exchange, rabbitmq):
    [done, missing] = send(rabbitmq.url, a_message(exchange.name, 1), a_message("no-such-queue", 2))

    text = (
        "RabbitMQ: no queue is bound for routing key 'no-such-queue': the default exchange wants a queue of this name"
    )
    assert (done, missing) == (DONE, Unavailable(text))
    assert [received.body for received in exchange.received()] == [b"1"]


def test_a_full_queue_is_unavailable(rabbitmq, exchange, publisher):
    arguments: FieldTable = {"x-max-length": 2, "x-overflow": "reject-publish"}
    name = f"{exchange.name}-full"

    async def act(channel: AbstractChannel) -> None:
        queue = await channel.declare_queue(name, arguments=arguments, auto_delete=False)
        await queue.bind(exchange.name, "full")

    exchange.run(act)
    verdicts = [publisher.send([a_message("full", n)])[0] for n in range(5)]
    exchange.run(lambda channel: remove(channel, name))

    refused = Unavailable("RabbitMQ: a queue for routing key 'full' refused it; it may be full")
    assert verdicts[:2] == [DONE, DONE]
    assert verdicts[-1] == refused
    assert not verdicts[-1].everything


async def remove(channel: AbstractChannel, queue: str) -> None:
    await channel.queue_delete(queue)


def test_a_missing_exchange_is_named_and_found_when_it_is_there(rabbitmq, exchange, caplog):
    """Each call tries once, over one and the same connection."""
    caplog.set_level(logging.INFO, logger="outbox")
    name = f"{exchange.name}-later"
    sent = [a_message("orders", n) for n in range(1000)]
    reason = f"RabbitMQ: amqp://127.0.0.1:{rabbitmq.port}: NOT_FOUND - no exchange '{name}' in vhost '/'"

    async def act(channel: AbstractChannel) -> None:
        exchange = await channel.declare_exchange(name, "fanout", durable=True)
        await (await channel.get_queue(exchange.name.removesuffix("-later"), ensure=False)).bind(exchange)

    with closing(RabbitSender(f"amqp://127.0.0.1:{rabbitmq.port}/?exchange={name}")) as sender:
        for _ in range(20):
            verdicts = sender.send(sent)
            assert (len(verdicts), set(verdicts)) == (1000, {Unavailable(reason)})
            assert all(isinstance(verdict, Unavailable) and verdict.everything for verdict in verdicts)
        exchange.run(act)
        check_all_done(sender.send(sent), sent)

    async def delete(channel: AbstractChannel) -> None:
        await channel.exchange_delete(name)

    exchange.run(delete)
    check_stored(exchange, sent)
    connected = f"RabbitMQ: connected to amqp://127.0.0.1:{rabbitmq.port}"
    assert [record.getMessage() for record in caplog.records] == [connected, reason]


@pytest.mark.storm
@pytest.mark.parametrize("size", [5_001, 200_000])
def test_a_message_above_the_servers_limit_is_rejected_alone(strict, size):
    """The server closes the channel, with all that it has not confirmed; nothing else is lost, or blamed."""
    plan = [(10, "a"), (5_000, None), (size, "a"), (10, "a"), (size, None), (10, "b"), (10, None), (10, "b")]
    sent = [a_message("orders", bytes([n]) * length, key=key) for n, (length, key) in enumerate(plan)]

    verdicts = send(url_of(strict, "ann", "pass", "?exchange=orders"), *sent)

    too_big = Reject(f"{size} bytes are more than the server's max_message_size of 5000")
    assert verdicts == [DONE, DONE, too_big, EARLIER, too_big, DONE, DONE, DONE]
    stored = {message.message_id: message.body for message in asyncio.run(stored_in(strict, "all"))}
    assert stored == {one.message_id: one.body for one, v in zip(sent, verdicts, strict=True) if v == DONE}


async def stored_in(server: RabbitServer, queue: str) -> list[Message]:
    """Take all that a queue holds."""
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        found = await channel.get_queue(queue, ensure=False)
        messages = []
        while (received := await found.get(fail=False, no_ack=True)) is not None:
            messages.append(read_message(received))
        return messages


def test_any_number_of_messages_above_the_limit_costs_one_channel(strict):
    sent = [a_message("orders", b"x" * (6_000 if n % 3 else 60), key=f"k{n}") for n in range(1500)]

    def refusals() -> int:
        log: str = (strict.folder / "server.log").read_text()
        return log.count("is larger than")

    before = refusals()

    verdicts = send(url_of(strict, "ann", "pass", "?exchange=orders"), *sent)

    assert eventually(lambda: 1 <= refusals() - before <= 10)
    assert [type(verdict) for verdict in verdicts] == [type(DONE), Reject, Reject] * 500
    stored = {message.message_id for message in asyncio.run(stored_in(strict, "all"))}
    assert stored == {one.message_id for one in sent[::3]}


@pytest.mark.parametrize("topic", ["secret.plan", "secret." + "x" * 240])
def test_a_forbidden_topic_stops_only_that_one(strict, topic):
    """The server shortens a reason that is too long, and the topic in it."""
    sent = [
        a_message(name, n, key=key)
        for n, (name, key) in enumerate([("a", "k"), (topic, "k"), ("b", "k"), (topic, None), ("a", None), ("b", "l")])
    ]

    verdicts = send(url_of(strict, "ann", "pass", "?exchange=mail"), *sent)

    forbidden = verdicts[1]
    assert verdicts == [DONE, forbidden, EARLIER, forbidden, DONE, DONE]
    assert isinstance(forbidden, Unavailable)
    assert forbidden.error.startswith(f"RabbitMQ: ACCESS_REFUSED - access to topic '{topic[:200]}")
    assert not forbidden.everything
    assert "ann" not in forbidden.error
    assert {message.topic for message in asyncio.run(stored_in(strict, "all"))} == {"a", "b"}


REFUSED = "refused for the user"
WANTS_ANOTHER = "(the server refuses the handshake of TLS: {}|.* at the login; another certificate may be wanted)"
LOGIN = "Login was refused using authentication mechanism PLAIN. For details see the broker logfile."


@pytest.mark.parametrize(
    ("name", "password", "path", "reason"),
    [
        ("ann", "pass", "?exchange=internal", f"ACCESS_REFUSED - access to exchange 'internal' in vhost '/' {REFUSED}"),
        ("ann", "pass", "shop%2Feu", f"NOT_ALLOWED - access to vhost 'shop/eu' {REFUSED}"),
        ("ann", "pass", "nowhere", "NOT_ALLOWED - vhost nowhere not found"),
        ("ann", "s3cr3t", "", f"ACCESS_REFUSED - {LOGIN}"),
    ],
    ids=["exchange", "access", "vhost", "password"],
)
def test_what_is_refused_is_named_and_no_credentials_are_told(strict, caplog, name, password, path, reason):
    caplog.set_level(logging.DEBUG)
    sender = RabbitSender(url_of(strict, name, password, path))

    for _ in range(2):
        [verdict] = sender.send([a_message("orders", 1)])

    told = caplog.text + repr(verdict) + repr(sender) + repr(vars(sender)) + sender.destination
    sender.close()
    assert verdict == Unavailable(f"RabbitMQ: amqp://127.0.0.1:{strict.port}: {reason}")
    assert verdict.everything
    assert [secret for secret in ("ann", "s3cr3t") if secret in told] == []


def test_credentials_and_a_virtual_host_may_hold_any_character(strict):
    sent = a_message("orders", 1)

    assert send(url_of(strict, "bob", AWKWARD, "shop%2Feu"), sent) == [DONE]


def test_certificates_are_checked_on_both_sides_and_one_may_be_the_login(strict, authorities, caplog):
    """Also after the server was away; and no text shows a key."""
    caplog.set_level(logging.DEBUG)
    ours, others = authorities
    (ann, key), bob, old = ours.issue("ann"), ours.issue("bob"), ours.issue("old", days=-1)
    shown = options(ca=ours.ca, shown=(ann, key))
    with TcpProxy("127.0.0.1", int(strict._settings["listeners.ssl.default"].partition(":")[2])) as proxy:
        where = f"amqps://127.0.0.1:{proxy.port}"
        password = f"{where.replace('//', '//ann:pass@')}/?exchange=orders&"
        external = f"{where}/?exchange=orders&mechanism=external&"
        refused = {
            # The server may end the connection before it is known why.
            password + options(ca=ours.ca): WANTS_ANOTHER.format("certificate required"),
            password + options(ca=ours.ca, shown=others.issue("ann")): WANTS_ANOTHER.format("unknown ca"),
            external + options(ca=ours.ca, shown=old): WANTS_ANOTHER.format("certificate expired"),
            external + options(ca=ours.ca, shown=bob): f"NOT_ALLOWED - access to vhost '/' {REFUSED}",
            external + options(ca=others.ca, shown=(ann, key)): "its certificate is refused: .*",
            password + options(shown=(ann, key)): "its certificate is refused: .*",
        }

        assert send(password + shown, a_message("orders", 1)) == [DONE]
        with closing(RabbitSender(external + shown)) as sender:
            check_all_done(sender.send(sent := [a_message("orders", 2)]), sent)
            proxy.refuse()
            [away] = sender.send(again := [a_message("orders", 3)])
            proxy.pass_through()
            check_eventually_done(sender, again)
            assert isinstance(away, Unavailable)

        for url, reason in refused.items():
            [verdict] = send(url, a_message("orders", 4))
            assert isinstance(verdict, Unavailable)
            assert re.fullmatch(f"RabbitMQ: {where}: {reason}", verdict.error)

    assert {message.body for message in asyncio.run(stored_in(strict, "all"))} == {b"1", b"2", b"3"}
    assert [line for line in key.read_text().splitlines()[1:-1] if line in caplog.text] == []


@pytest.mark.parametrize("name", ["CC", "cc", "BCC", "x-death", "X-Delay", "x-first-death-queue", "x-stream-offset"])
def test_a_header_that_the_broker_obeys_is_rejected(exchange, publisher, name):
    """Of `CC` it would send copies to other queues."""
    sent = [a_message("orders", 1, headers={name: exchange.name}), a_message("orders", 2, headers={"my-cc": "paid"})]

    refused, done = publisher.send(sent)

    assert refused == Reject(f"headers[{name!r}]: the name is reserved by RabbitMQ; {FIX}")
    assert done == DONE


def origin(exchange: Exchange) -> str:
    """The URL without what stands behind the port."""
    return exchange.url.partition("/?")[0]


OPTIONS = "its options are exchange, timeout, mechanism, ca, cert, key, as, each once"


def test_what_is_stored_of_a_destination_holds_no_secrets():
    sender = RabbitSender("amqp://ann:pass@b:5672,A/shop%2Feu?exchange=orders&timeout=7.5")

    assert sender.destination == "amqp://a,b:5672/shop%2Feu?exchange=orders"
    assert sender.deadline == timedelta(seconds=7.5)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp:///shop", "amqp:///shop: write amqp://host:port/vhost?exchange=name"),
        ("amqp://ann:s3cr3t@h/a/b", "amqp://h/a/b: the path is one virtual host; write %2F for a slash in its name"),
        (
            "amqp://ann:s3cr3t@h/?queue=s3cr3t",
            f"amqp://h/: {OPTIONS}; 'queue' is none of them",
        ),
        (
            "amqp://ann:s3cr3t@h?exchange=a&exchange=b",
            f"amqp://h: {OPTIONS}; 'exchange' is given twice",
        ),
        ("amqp://ann:s3cr3t@h?timeout=0", "amqp://h: timeout must be a number of seconds"),
        ("amqp://ann:s3cr3t@h?mechanism=digest", "amqp://h: mechanism must be one of plain, external"),
        (
            "amqp://ann:s3cr3t@h?mechanism=external",
            "amqp://h: with mechanism=external the certificate says who logs in; leave out user and password",
        ),
        (
            "amqps://h?mechanism=external",
            "amqps://h: mechanism=external needs amqps:// and a certificate; give cert and key",
        ),
        ("amqp://ann:s3cr3t@h?ca=/etc/ca.pem", "amqp://h: ca is an option of amqps://"),
        ("amqp://ann:s3cr3t@h?exchange=" + "x" * 128, "amqp://h: the driver takes names of at most 127 characters"),
        ("amqp://ann:s3cr3t@h?exchange=gr%C3%B6%C3%9Fe", "amqp://h: the driver takes names of at most 127 characters"),
        ("amqp://ann:s3cr3t@h/" + "x" * 128, "amqp://h/x"),
        ("amqp://ann:s3cr3t@h:port", "amqp://…: the hosts are malformed"),
    ],
)
def test_a_bad_url_is_an_error_without_its_secrets(url, reason):
    with pytest.raises(SenderError) as caught:
        RabbitSender(url)

    assert str(caught.value).startswith(reason)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))


def test_an_id_is_text_that_every_client_reads(exchange, publisher):
    sent = a_message("orders", 1)
    publisher.send([sent])

    assert UUID(exchange.received()[0].message_id) == sent.message_id

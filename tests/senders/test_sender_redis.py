"""Redis Streams: the contract, over a network that fails; and what a message looks like on its way."""

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from redis import Redis

from outbox.errors import SenderError
from outbox.model.message import Message, uuid7
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.opening import open_sender
from outbox.senders.redis import RedisSender, read_message, wait_command
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done, check_eventually_done
from outbox.testing.servers.process import free_port
from tests.support.authority import Authority
from tests.support.places import opened
from tests.support.redis_streams import NewerRedis, StrangeRedis
from tests.support.servers.redis import RedisServer
from tests.support.tls import CERTIFICATE, FOREIGN, KEY
from tests.support.tls import refused as refused_by_tls

USERS = (
    "user ann on >pass ~* +@all\n"
    "user bob on >p@ss:w/rd?#% ~allowed:* +xadd\n"
    "user no-exec on >p ~* +xadd +multi\n"
    "user no-multi on >p ~* +xadd +exec\n"
    "user default off\n"
)


sender = opened("streams")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with users, and with low limits."""
    users: Path = tmp_path_factory.mktemp("redis") / "users.acl"
    users.write_text(USERS)
    with RedisServer(settings={"aclfile": str(users), "proto-max-bulk-len": "1mb", "appendonly": "no"}) as server:
        yield server


class TestRedisSender(SenderContract):
    """Streams pass the contract."""

    @pytest.fixture
    def destination(self, streams):
        """Streams of each test's own."""
        return streams


def test_the_fields_of_a_message_travel_as_documented_fields(streams, sender):
    headers = {"X-Trace": "a: b", "name": "Zoë"}
    sent = a_message("orders", b"{}", key="order 7: ü%", tags="x/y", headers=headers, content_type="application/json")
    sent.created_at = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)

    check_all_done(sender.send([sent]), [sent])

    assert streams.entries("orders") == [
        {
            b"X-Trace": b"a: b",
            b"name": "Zoë".encode(),
            b"Outbox-Id": str(sent.message_id).encode(),
            b"Outbox-Key": b"order%207%3A%20%C3%BC%25",
            b"Outbox-Tags": b"x%2Fy",
            b"Outbox-Created-At": b"2026-01-31T12:00:00.123456+00:00",
            b"Content-Type": b"application/json",
            b"Outbox-Body": b"{}",
        }
    ]


def test_a_field_that_a_message_has_not_is_not_sent(streams, sender):
    sent = Message("orders", b"")

    check_all_done(sender.send([sent]), [sent])

    assert streams.entries("orders") == [{b"Outbox-Id": str(sent.message_id).encode(), b"Outbox-Body": b""}]


@pytest.mark.parametrize("decoded", [False, True])
def test_a_consumer_reads_the_message_back(streams, sender, decoded):
    sent = a_message("orders", {"id": 7}, key="a b", tags="x", headers={"n": "v"})
    sender.send([sent])
    name, fields = f"{streams.prefix}:orders", streams.entries("orders")[0]
    if decoded:
        fields = {each.decode(): value for each, value in fields.items()}

    message = read_message(name if decoded else name.encode(), fields, prefix=streams.prefix)

    assert (message.message_id, message.topic, message.key, message.tags) == (sent.message_id, "orders", "a b", "x")
    assert (message.headers, message.body, message.content_type) == ({"n": "v"}, b'{"id":7}', "application/json")
    assert (message.created_at, message.id) == (sent.created_at, None)


def test_what_no_outbox_wrote_is_not_read_as_a_message():
    with pytest.raises(KeyError, match="Outbox-Id"):
        read_message("orders", {b"hello": b"world"})


def test_without_a_path_there_is_no_prefix(redis, streams):
    sender = RedisSender(redis.url)
    topic = f"{streams.prefix}:x".replace(":", ".")

    check_all_done(sender.send(sent := [a_message(topic, 1)]), sent)

    assert streams.client.xlen(topic) == 1
    streams.client.delete(topic)
    sender.close()


def test_the_path_may_name_a_database(redis):
    sender = RedisSender(f"{redis.url}/3/shop")

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)

    command = ["redis-cli", "-p", str(redis.port), "-n", "3", "XLEN", "shop:orders"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
    sender.close()


def test_what_is_no_stream_stops_only_its_topic(streams, sender):
    streams.fail("beta")
    sent = [a_message(topic, n) for n, topic in enumerate(["alpha", "beta", "gamma"] * 10)]

    verdicts = sender.send(sent)

    wrong = "WRONGTYPE Operation against a key holding the wrong kind of value"
    assert verdicts == [DONE, Unavailable(f"Redis on stream '{streams.prefix}:beta': {wrong}"), DONE] * 10


def test_a_body_above_the_servers_limit_is_rejected_alone(strict):
    sender = RedisSender(f"redis://ann:pass@127.0.0.1:{strict.port}")
    sent = [a_message("orders", b"x" * size) for size in (10, 1024 * 1024, 1024 * 1024 + 1, 10)]

    verdicts = sender.send(sent)

    reason = "Redis cannot carry it: 1048577 bytes are more than the server's proto-max-bulk-len of 1048576"
    assert verdicts == [DONE, DONE, Reject(reason), DONE]
    sender.close()


def test_a_user_who_may_not_ask_for_the_limit_may_send(strict):
    sender = RedisSender(f"redis://bob:p%40ss%3Aw%2Frd%3F%23%25@127.0.0.1:{strict.port}/0/allowed")

    check_all_done(sender.send(sent := [a_message("orders", b"x" * 100)]), sent)

    sender.close()


def test_a_forbidden_stream_stops_only_its_topic(strict):
    url = f"redis://bob:p%40ss%3Aw%2Frd%3F%23%25@127.0.0.1:{strict.port}/0"
    sender, allowed = RedisSender(url), RedisSender(f"{url}/allowed")

    [forbidden] = sender.send([a_message("orders", 1)])

    assert isinstance(forbidden, Unavailable)
    assert not forbidden.everything
    assert forbidden.error.startswith("Redis on stream 'orders': ")
    assert "no permissions" in forbidden.error.lower()
    check_all_done(allowed.send(sent := [a_message("orders", 1)]), sent)
    sender.close()
    allowed.close()


BOB = "bob:p%40ss%3Aw%2Frd%3F%23%25"


@pytest.mark.parametrize("user", [BOB, "no-exec:p", "no-multi:p"])
def test_a_user_who_has_no_transactions_stores_each_message_of_a_key_once(strict, user, caplog):
    """XADD alone is a natural right of a relay."""
    caplog.set_level(logging.INFO, logger="outbox.senders.redis")
    topic = uuid7().hex
    sent = [a_message(topic, n, key=f"k{n % 3}") for n in range(12)]
    with closing(RedisSender(f"redis://{user}@127.0.0.1:{strict.port}/0/allowed")) as sender:
        check_all_done(sender.send(sent), sent)

    assert _bodies(strict, f"allowed:{topic}") == [b"%d" % n for n in range(12)]
    where = f"Redis: connected to redis://127.0.0.1:{strict.port}"
    assert caplog.messages == [f"{where}, without MULTI: the messages of a key wait for each other"]


def test_a_server_without_multi_stores_each_message_of_a_key_once(tmp_path):
    (settings := tmp_path / "redis.conf").write_text('rename-command MULTI ""\n')
    sent = [a_message("orders", n, key="k") for n in range(5)]
    with RedisServer(settings={"include": str(settings)}) as server, closing(RedisSender(server.url)) as sender:
        check_all_done(sender.send(sent), sent)

        with Redis(port=server.port) as client:
            assert [fields[b"Outbox-Body"] for _, fields in client.xrange("orders")] == [b"%d" % n for n in range(5)]


def test_a_right_that_is_withdrawn_stores_nothing_twice_as_done(strict):
    """The commands were carried out one by one then, so nobody says that the call went well."""
    topic = uuid7().hex
    sent = [a_message(topic, n, key="k") for n in range(3)]
    with Redis(port=strict.port, username="ann", password="pass") as client:
        client.execute_command("ACL SETUSER carl on >p ~* +xadd +multi +exec")
        with closing(RedisSender(f"redis://carl:p@127.0.0.1:{strict.port}")) as sender:
            check_all_done(sender.send(sent), sent)
            client.execute_command("ACL SETUSER carl -multi")

            refused = sender.send(sent)

            check_all_done(sender.send(sent), sent)

    why = "MULTI is answered with this user has no permissions to run the 'multi' command"
    text = f"Redis: redis://127.0.0.1:{strict.port}: {why}; let the user run MULTI and EXEC"
    assert refused == [Unavailable(text, everything=True)] * 3


@pytest.mark.parametrize("number", [1, 3])
def test_only_the_id_of_an_entry_means_that_it_is_stored(number):
    """As a server answers on whose connection somebody has begun a transaction."""
    with StrangeRedis(b"+QUEUED\r\n") as server, closing(RedisSender(server.url)) as sender:
        verdicts = sender.send([a_message("orders", n) for n in range(number)])

    why = "XADD is answered with b'QUEUED', not with the id of an entry"
    assert verdicts == [Unavailable(f"Redis: {server.url}: {why}", everything=True)] * number


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@pytest.mark.parametrize("answer", ["MOVED 1", "ASK 1 127.0.0.1:x"])
def test_a_redirection_without_an_address_is_a_refusal(answer, scheme):
    with (
        StrangeRedis(f"-{answer}\r\n".encode()) as server,
        closing(RedisSender(server.url.replace("redis", scheme))) as sender,
    ):
        [verdict] = sender.send([a_message("orders", 1)])

    assert verdict == Unavailable(f"Redis on stream 'orders': {answer}")


def test_a_user_who_may_not_wait_for_replicas_is_told(strict):
    with closing(RedisSender(f"redis://{BOB}@127.0.0.1:{strict.port}/0/allowed?wait=1")) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    why = "this user has no permissions to run the 'wait' command"
    text = f"Redis: WAIT, which the option wait needs, is refused: {why}"
    assert verdict == Unavailable(text, everything=True)


def _bodies(server: RedisServer, stream: str) -> list[bytes]:
    with Redis(port=server.port, username="ann", password="pass") as client:
        return [fields[b"Outbox-Body"] for _, fields in client.xrange(stream)]


def test_wrong_credentials_are_unavailable_and_never_told(strict, caplog):
    caplog.set_level(logging.DEBUG)
    sender = RedisSender(f"redis://ann:s3cr3t@127.0.0.1:{strict.port}")

    [verdict] = sender.send([a_message("orders", 1)])

    reason = "invalid username-password pair or user is disabled."
    assert verdict == Unavailable(f"Redis: redis://127.0.0.1:{strict.port}: {reason}", everything=True)
    assert "s3cr3t" not in caplog.text + repr(verdict) + repr(sender) + repr(vars(sender))
    sender.close()


@pytest.fixture(scope="module")
def safe() -> Iterator[str]:
    """Host and port of a server that speaks TLS there, and asks for a password."""
    port = free_port()
    tls = {"tls-port": str(port), "tls-cert-file": str(CERTIFICATE), "tls-key-file": str(KEY), "tls-auth-clients": "no"}
    with RedisServer(settings={**tls, "requirepass": "pass"}):
        yield f"127.0.0.1:{port}"


def test_a_certificate_that_ca_names_is_trusted(safe):
    with closing(RedisSender(f"rediss://:pass@{safe}?ca={CERTIFICATE}")) as sender:
        check_all_done(sender.send(sent := [a_message("orders", n) for n in range(3)]), sent)


def test_a_wrong_password_is_refused_through_tls_and_never_told(safe, caplog):
    caplog.set_level(logging.DEBUG)
    with closing(RedisSender(f"rediss://:s3cr3t@{safe}?ca={CERTIFICATE}")) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    reason = "invalid username-password pair or user is disabled."
    assert verdict == Unavailable(f"Redis: rediss://{safe}: {reason}", everything=True)
    assert "s3cr3t" not in caplog.text


@pytest.mark.parametrize("trusted", [FOREIGN, None])
def test_a_certificate_that_is_not_trusted_is_refused(safe, trusted):
    """One from the file, or else from those of the system."""
    with closing(RedisSender(f"rediss://:pass@{safe}" + (f"?ca={trusted}" if trusted else ""))) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert verdict.error.startswith(f"Redis: rediss://{safe}: ")
    assert "its certificate is refused: " in verdict.error


def test_a_certificate_of_another_host_is_refused(safe):
    host = safe.replace("127.0.0.1", "localhost")
    with closing(RedisSender(f"rediss://:pass@{host}?ca={CERTIFICATE}")) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert "certificate is not valid for 'localhost'" in verdict.error


def test_a_port_without_tls_is_told_from_a_server_that_hangs(redis):
    """The server waits for more of the strange command."""
    with closing(RedisSender(f"rediss://127.0.0.1:{redis.port}?timeout=1&ca={CERTIFICATE}")) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    why = "no answer to the handshake of TLS; perhaps the port takes no TLS"
    assert verdict == Unavailable(f"Redis: rediss://127.0.0.1:{redis.port}: {why}", everything=True)


def test_a_server_that_wants_a_certificate_takes_one_of_its_authority_alone(tmp_path):
    ours, port = Authority(tmp_path / "ours"), free_port()
    certificate, key = ours.issue("server")
    tls = {"tls-port": str(port), "tls-cert-file": str(certificate), "tls-key-file": str(key)}
    mine, my_key = ours.issue("relay")
    stranger, stranger_key = Authority(tmp_path / "theirs").issue("relay")
    with RedisServer(settings={**tls, "tls-ca-cert-file": str(ours.ca)}) as server:
        with Redis(port=server.port) as client:
            client.execute_command("ACL SETUSER relay on >p ~* +xadd")
        verdicts: list[object] = []
        for files in ("", f"&cert={stranger}&key={stranger_key}", f"&cert={mine}&key={my_key}"):
            with closing(RedisSender(f"rediss://relay:p@127.0.0.1:{port}?ca={ours.ca}{files}")) as sender:
                verdicts += sender.send([a_message("orders", 1)])

    *refused, known = verdicts
    assert known is DONE
    for verdict in refused:
        assert isinstance(verdict, Unavailable)
        assert verdict.everything
        assert re.fullmatch(f"Redis: rediss://127.0.0.1:{port}: {refused_by_tls()}", verdict.error)


def test_a_second_copy_is_dropped_by_a_server_that_can(streams, sender):
    """Redis can from 8.6 on. Below, and with Valkey, both copies are there."""
    server = streams.client.info("server")
    can = "valkey_version" not in server and tuple(map(int, server["redis_version"].split(".")[:2])) >= (8, 6)
    sent = [a_message("orders", n, key="k") for n in range(2)]

    check_all_done(sender.send(sent), sent)
    check_all_done(sender.send(sent), sent)

    bodies = [entry[b"Outbox-Body"] for entry in streams.entries("orders")]
    assert bodies == [b"0", b"1"] * (1 if can else 2)


def test_a_server_that_is_full_is_unavailable():
    settings = {"maxmemory": "3mb", "maxmemory-policy": "noeviction", "appendonly": "no"}
    with RedisServer(settings=settings) as server:
        sender = RedisSender(server.url, timeout=timedelta(seconds=60))
        verdicts = sender.send([a_message("orders", os.urandom(100_000), key="k") for _ in range(40)])
        sender.close()

    refused = Unavailable(
        "Redis on stream 'orders': command not allowed when used memory > 'maxmemory'.", everything=True
    )
    done = verdicts.count(DONE)
    assert 0 < done < 40
    assert verdicts[done] == refused
    assert set(verdicts[done + 1 :]) <= {refused, Unavailable("an earlier message of its key was not stored")}


def test_a_message_waits_for_its_replicas(redis):
    sender = RedisSender(f"{redis.url}?wait=1&timeout=6")

    verdicts = sender.send([a_message("waits", n) for n in range(3)])

    assert verdicts == [Unavailable("Redis: 0 of 1 replicas have it", everything=True)] * 3
    sender.close()


def test_nothing_of_a_key_is_appended_behind_what_too_few_replicas_have(redis):
    """These messages are more than one round of commands, so that the replica might be there for the next round."""
    sender = RedisSender(f"{redis.url}/0/behind?wait=1&timeout=6")

    verdicts = sender.send([a_message("waits", n, key="a") for n in range(1_500)])

    assert len(verdicts) == 1_500
    assert set(verdicts) == {Unavailable("Redis: 0 of 1 replicas have it", everything=True)}
    with Redis(port=redis.port) as client:
        assert client.xlen("behind:waits") == 1_000
    sender.close()


def test_a_replica_that_has_it_makes_it_done():
    with ExitStack() as stack:
        # Without the delay it takes a replica on at once; and without a log of its own, the replica stops at once.
        server = stack.enter_context(RedisServer(settings={"repl-diskless-sync-delay": "0"}))
        stack.enter_context(RedisServer(settings={"replicaof": f"127.0.0.1 {server.port}", "appendonly": "no"}))
        sender = stack.enter_context(closing(RedisSender(f"{server.url}?wait=1&timeout=4")))

        check_eventually_done(sender, [a_message("waits", n) for n in range(3)])


def test_a_server_that_can_drop_second_copies_is_asked_to():
    """As Redis does from 8.6 on; the distributions have older ones, so a stand-in says that it is one."""
    with NewerRedis() as server:
        sender = RedisSender(server.url)
        sent = a_message("orders", 1)
        check_all_done(sender.send([sent]), [sent])
        sender.close()

    assert server.commands[-1][:5] == [b"XADD", b"orders", b"IDMP", b"outbox", str(sent.message_id).encode()]
    assert server.commands[-1][5] == b"*"


def test_a_short_wait_for_replicas_is_not_one_for_ever():
    """WAIT with a time of 0 is."""
    assert wait_command(2, 0.003) == b"*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$1\r\n1\r\n"
    assert wait_command(2, 4) == b"*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$4\r\n1000\r\n"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://", "redis://: write redis://host:6379/0 or rediss://host:6379/0"),
        ("redis://a,b", "redis://a,b: write one host"),
        ("redis+cluster://a,b/1/shop", "redis+cluster://a,b/1/shop: a cluster has no other database than 0"),
        (
            "redis+sentinel://a,b",
            "redis+sentinel://a,b: write the name of the master behind the hosts, as in /mymaster",
        ),
        ("redis+cluster://a?ca=/etc/ca.pem", "redis+cluster://a: ca is an option of rediss+cluster://"),
        ("redis://a?wait=x", "redis://a: wait must be a number of replicas"),
        (
            "redis://a?db=1",
            "redis://a: its options are timeout, wait, ca, cert, key, as, each once; 'db' is none of them",
        ),
        (
            "redis://a?t0ken",
            "redis://a: its options are timeout, wait, ca, cert, key, as, each once; one is none of them",
        ),
        (
            "redis://a?timeout=1&timeout=2",
            "redis://a: its options are timeout, wait, ca, cert, key, as, each once; 'timeout' is given twice",
        ),
        ("redis://a?ca=/etc/ca.pem", "redis://a: ca is an option of rediss://"),
        ("redis://a?timeout=-1", "redis://a: timeout must be a number of seconds"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url, text):
    with pytest.raises(SenderError) as caught:
        open_sender(url)

    assert str(caught.value) == text

"""Credentials of clients: a front with a file of access keys admits those that sign, to the topics of their keys."""

import hmac
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from outbox.rocketmq.front import Front, Security
from outbox.rocketmq.front.authentication import AccessKey, Authentication, keys_of, topics_in
from outbox.rocketmq.front.calls import Call
from outbox.rocketmq.front.protocol import RPCS, SERVICE, numbers
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.runtime.reloaded import Reloaded
from tests.rocketmq.fronts import bodies, consuming, listening, producing
from tests.rocketmq.raw_http2 import DATA, call, connected, message

DATE, SECRET = "20260131T120000Z", "s3cret-of-shop"
LINES = f"# keys\n\nshop:{SECRET}\n  audit:0ther:orders, paid\r\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with a key for all topics, and a key for two."""
    file = tmp_path / "keys"
    file.write_text(LINES)
    file.chmod(0o600)
    return file


def signed(key: str = "shop", secret: str = SECRET, client: str = "raw", **changed: str) -> dict[str, str]:
    """The metadata of a call with a signature."""
    signature = hmac.digest(secret.encode(), DATE.encode(), "sha1").hex()
    authorization = f"MQv2-HMAC-SHA1 Credential={key}, SignedHeaders=x-mq-date-time, Signature={signature}"
    return {"x-mq-client-id": client, "x-mq-date-time": DATE, "authorization": authorization} | changed


class Signing:
    """A client by hand, whose calls have such metadata."""

    def __init__(self, front: Front, metadata: Mapping[str, str]) -> None:
        self.channel = grpc.insecure_channel(str(front.listening))
        self._metadata = [*metadata.items()]

    def code(self, name: str, request: Any) -> int:
        """Return the code of the answer to a call, or of the first answer."""
        rpc = RPCS[name]
        made = rpc.request.SerializeToString, rpc.response.FromString
        if rpc.streams_in:
            talk = self.channel.stream_stream(f"/{SERVICE}/{name}", *made)(iter([request]), metadata=self._metadata)
            return int(next(iter(talk)).status.code)
        if rpc.streams_out:
            return int(next(self.channel.unary_stream(f"/{SERVICE}/{name}", *made)(request, metadata=self._metadata)
                            ).status.code)  # fmt: skip
        return int(self.channel.unary_unary(f"/{SERVICE}/{name}", *made)(request, metadata=self._metadata).status.code)


def about(topic: str) -> dict[str, Any]:
    """A request of each call about a topic, by name; heartbeats and good-byes have none."""
    made = {name: rpc.request() for name, rpc in RPCS.items() if name in (
        "QueryRoute", "SendMessage", "QueryAssignment", "ReceiveMessage", "AckMessage", "EndTransaction", "Telemetry",
        "ForwardMessageToDeadLetterQueue", "ChangeInvisibleDuration", "RecallMessage",
    )}  # fmt: skip
    for name, request in made.items():
        if name == "SendMessage":
            request.messages.add().topic.name = topic
        elif name == "ReceiveMessage":
            request.message_queue.topic.name = topic
        elif name == "Telemetry":
            request.settings.client_type = numbers("ClientType")["PRODUCER"]
            request.settings.publishing.topics.add(name=topic)
        else:
            request.topic.name = topic
    return made


def test_a_file_has_a_line_for_each_key(keys):
    assert keys_of(keys) == {
        "shop": AccessKey("shop", SECRET.encode()),
        "audit": AccessKey("audit", b"0ther", frozenset({"orders", "paid"})),
    }
    assert SECRET not in repr(keys_of(keys))


@pytest.mark.parametrize(("text", "error"), [
    ("shop:hidden\n:hidden", "line 2: access_key: it is empty"),
    ("sh op:hidden", "line 1: access_key: it is empty, or has a comma, a slash, =, white space or no ASCII"),
    ("a/b:hidden", "line 1: access_key: "),
    ("hidden", "line 1: secret: it is missing; write access_key:secret or access_key:secret:topic,topic"),
    ("shop:", "line 1: secret: it is missing"),
    ("shop: hidden", "line 1: secret: it has white space"),
    ("shop:hidden:", "line 1: topics: they are no names with commas in between"),
    ("shop:hi:d/d/n", "line 1: topics: they are no names with commas in between; a secret has no colon"),
    ("shop:hidden:a,,b", "line 1: topics: "),
    ("shop:hidden\n\nshop:hidden:a", "line 3: access_key: an earlier line has the same; remove one of the lines"),
    ("# nothing", "no line has an access key, so no client could connect; write access_key:secret or"),
])  # fmt: skip
def test_a_mistake_in_the_file_is_told_with_line_field_and_fix_but_without_the_contents(keys, text, error):
    keys.write_text(text)

    with pytest.raises(ValueError, match=str(keys)) as raised:
        Security(auth_file=keys).authentication()

    assert error in str(raised.value)
    assert not any(each in str(raised.value) for each in ("hidden", "d/d/n"))


def by_hand(signature: str) -> str:
    """The metadata of a key's signature in this form."""
    return f"MQv2-HMAC-SHA1 Credential=shop, SignedHeaders=x-mq-date-time, Signature={signature}"


def hex_of(date: str) -> str:
    """The signature of a date with the secret of `shop`."""
    return hmac.digest(SECRET.encode(), date.encode(), "sha1").hex()


@pytest.mark.parametrize(("metadata", "admitted"), [
    (signed(), "shop:raw"),
    (signed("shop//Rocketmq"), "shop:raw"),
    (signed(authorization=by_hand(hex_of(DATE).upper())), "shop:raw"),
    (signed("audit", "0ther"), "audit:raw"),
    (signed(secret="other"), None),
    (signed("nobody"), None),
    (signed("nobody", ""), None),
    (signed("", ""), None),
    (signed("//Rocketmq", ""), None),
    (signed(authorization=""), None),
    (signed(authorization=f"Bearer {SECRET}"), None),
    (signed(authorization="MQv2-HMAC-SHA1 Credential=shop"), None),
    (signed(authorization=by_hand("\xe9")), None),
    (signed(**{"x-mq-date-time": DATE[1:]}), None),
    (signed(**{"x-mq-date-time": "", "authorization": by_hand(hex_of(""))}), None),
])  # fmt: skip
def test_a_call_is_admitted_when_the_secret_of_its_key_has_signed_its_date(keys, metadata, admitted):
    authentication, call = Authentication(keys), Call("raw", metadata)

    if admitted is not None:
        assert authentication.admit(call).client == admitted
    else:
        with pytest.raises(RefusedError) as refused:
            authentication.admit(call)
        assert refused.value.code is Code.UNAUTHORIZED


def test_a_key_for_some_topics_is_refused_for_others_in_every_call_of_producers_and_consumers(outbox, keys):
    requests = about("steps")
    with listening(outbox, security=Security(auth_file=keys)) as front:
        audit = Signing(front, signed("audit", "0ther"))
        codes = {name: audit.code(name, request) for name, request in requests.items()}
        allowed = audit.code("QueryRoute", about("orders")["QueryRoute"])
        audit.channel.close()

    assert (codes, allowed) == (dict.fromkeys(requests, 40300), 20000)
    assert all(topics_in(request) == {"steps"} for request in requests.values())


def test_a_stranger_is_refused_in_every_call_and_on_the_stream_and_the_log_says_so_once(outbox, keys, caplog):
    requests = {**about("orders"), **{name: RPCS[name].request() for name in ("Heartbeat", "NotifyClientTermination")}}
    with (
        caplog.at_level(logging.WARNING, "outbox"),
        listening(outbox, security=Security(auth_file=keys)) as front,
    ):
        codes = dict[str, set[int]]()
        for metadata in (signed(secret="wr0ng"), signed("unkn0wn"), signed("", "")):
            stranger = Signing(front, metadata)
            for name, request in requests.items():
                codes.setdefault(name, set()).add(stranger.code(name, request))
            stranger.channel.close()

    assert codes == {name: {40100} for name in requests}
    assert [each.getMessage() for each in caplog.records] == [
        "front: client 'raw' is refused: its signature is not by the secret of shop",
        "front: client 'raw' is refused: its access key is unknown",
        "front: client 'raw' is refused: there are no credentials",
    ]
    assert not any(each in caplog.text for each in (SECRET, "wr0ng", "unkn0wn"))


def test_a_front_says_where_it_listens_without_a_wish_for_more_lines(outbox, keys, caplog):
    with caplog.at_level(logging.INFO, "outbox.activity"):
        for security in (Security(auth_file=keys), None):
            with listening(outbox, security=security) as front:
                place = front.listening

            assert (
                f"front: listens at {place}, without TLS, with{'out' * (security is None)} credentials" in caplog.text
            )


def test_a_stranger_is_refused_before_the_request_is_read(outbox, keys):
    with listening(outbox, security=Security(auth_file=keys)) as front, connected(front.listening) as peer:
        peer.send(call(1, "SendMessage"), message(1, b"of a thousand bytes", size=1000, flags=0))
        answer = peer.first(lambda frame: frame.stream == 1 and frame.kind == DATA)

    assert answer is not None
    assert b"username cannot be null" in answer.payload


def test_a_key_cannot_pass_for_the_client_of_another_key(outbox, keys):
    """Otherwise a stream under the id of a producer would be asked about that producer's transactions."""
    declared = about("paid")["Telemetry"]
    bye = RPCS["NotifyClientTermination"].request()
    with listening(outbox, security=Security(auth_file=keys)) as front:
        owner, other = Signing(front, signed()), Signing(front, signed("audit", "0ther"))
        talk = owner.channel.stream_stream(
            f"/{SERVICE}/Telemetry", RPCS["Telemetry"].request.SerializeToString, RPCS["Telemetry"].response.FromString
        )(iter([declared]), metadata=[*signed().items()])
        next(iter(talk))

        codes = [each.code("Heartbeat", RPCS["Heartbeat"].request()) for each in (owner, other)]
        other.code("NotifyClientTermination", bye)
        codes.append(owner.code("Heartbeat", RPCS["Heartbeat"].request()))

        for each in (owner, other):
            each.channel.close()
    assert codes == [20000, 40015, 20000]


def test_a_change_of_the_file_counts_after_a_second_unless_the_file_has_a_mistake(keys, caplog):
    now = [0.0]
    made = Reloaded([keys], partial(keys_of, keys), clock=lambda: now[0])

    def secrets(text: str | None) -> list[bytes]:
        keys.unlink() if text is None else keys.write_text(text)
        at_once = made.value()
        now[0] += 1
        return [each["shop"].secret for each in (at_once, made.value())]

    found = [secrets(text) for text in ("shop:new:orders", "shop:n e w", None, "shop:newer")]

    assert found == [[SECRET.encode(), b"new"], [b"new"] * 2, [b"new"] * 2, [b"new", b"newer"]]
    assert "line 1: secret: it has white space" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="files have no such modes")
def test_a_file_that_everybody_may_read_is_warned_of(keys, caplog):
    keys.chmod(0o644)

    Authentication(keys)

    assert f"{keys} holds a secret, and everybody on this machine may read it" in caplog.text


def test_the_official_client_is_let_in_with_its_credentials_and_refused_with_others(outbox, official, keys, caplog):
    message = official.Message()
    message.topic, message.body = "orders", b"1"
    chosen = {"orders": official.FilterExpression()}
    with listening(outbox, security=Security(auth_file=keys)) as front:
        with producing(official, front, "orders", credentials=("shop", SECRET)) as producer:
            producer.send(message)
        with (
            producing(official, front, "orders", credentials=("shop", "wrong")) as stranger,
            pytest.raises(Exception, match="failed to fetch topic:orders route"),
        ):
            stranger.send(message)
        with consuming(official, front, chosen, credentials=("audit", "0ther")) as consumer:
            received = consumer.receive(1, 60)

    assert (bodies(outbox, "orders"), [each.body for each in received]) == ([b"1"], [b"1"])
    assert "40100, check signature failed." in caplog.text

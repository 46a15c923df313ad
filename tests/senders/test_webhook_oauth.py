"""Webhooks with OAuth 2 client credentials and with client certificates: who is let in, and what is said to others."""

import base64
import json
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote

import pytest

from outbox.model.verdict import DONE, Unavailable
from outbox.senders.webhook_oauth import SECRET_VARIABLE, Grant, Tokens
from outbox.testing.sender_contract import a_message, check_all_done
from tests.support.authority import Authority
from tests.support.webhook_endpoint import Answer, Endpoint, Received
from tests.support.webhooks import told

SECRET = "s3cr3t/Sesame+1"


class TokenEndpoint(Endpoint):
    """Gives a new token to each request of the client `shop`, whose secret it knows."""

    life: object = 3600
    answer_: Answer | None = None

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []
        self.judge = self._judge

    def _judge(self, received: Received) -> Answer:
        if self.answer_ is not None:
            return self.answer_
        login = f"shop:{quote(SECRET, safe='')}"
        if received.headers["Authorization"] != f"Basic {base64.b64encode(login.encode()).decode()}":
            return Answer(401, b'{"error": "invalid_client", "error_description": "who?"}')
        self.given.append(f"t0ken-{len(self.given)}")
        token = {"access_token": self.given[-1], "token_type": "bearer", "expires_in": self.life}
        return Answer(200, json.dumps(token).encode())


@pytest.fixture
def tokens(monkeypatch) -> Iterator[TokenEndpoint]:
    """A token endpoint; the secret is in the environment."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with TokenEndpoint() as tokens:
        yield tokens


@pytest.fixture
def url(endpoint, tokens) -> str:
    """A webhook that lets in whoever has the newest token."""
    endpoint.judge = lambda received: Answer(
        204 if received.headers.get("Authorization") == f"Bearer {tokens.given[-1]}" else 401
    )
    return f"{endpoint.url}/x?oauth-url={quote(f'{tokens.url}/token', safe='')}&oauth-client=shop"


def test_a_client_asks_once_for_the_token_of_many_requests(endpoint, tokens, url, to_webhook):
    sender = to_webhook(f"{url}&oauth-scope=orders+bills&oauth-audience=https%3A%2F%2Fapi")
    sent = [a_message("orders", n, key=f"k{n % 5}") for n in range(40)]

    check_all_done(sender.send(sent), sent)
    check_all_done(sender.send(more := [a_message("orders", 40)]), more)

    [asked] = tokens.asked
    form = {"grant_type": ["client_credentials"], "scope": ["orders bills"], "audience": ["https://api"]}
    assert (asked.target, parse_qs(asked.body.decode())) == ("/token", form)
    assert {each.headers["Authorization"] for each in endpoint.kept} == {"Bearer t0ken-0"}
    assert {each.target for each in endpoint.kept} == {"/x"}


def test_a_refused_token_is_renewed_and_no_message_is_stored_twice(endpoint, tokens, url, to_webhook):
    sender = to_webhook(url)
    check_all_done(sender.send(sent := [a_message("orders", 0, key="k")]), sent)
    tokens.given.append("of another client")  # so that the webhook refuses ours

    check_all_done(sender.send(more := [a_message("orders", n, key="k") for n in range(1, 6)]), more)

    assert [each.body for each in endpoint.kept] == [b"%d" % n for n in range(6)]
    assert len(tokens.asked) == 2


def test_a_webhook_that_refuses_every_token_is_asked_twice_and_is_unavailable(endpoint, tokens, url, to_webhook):
    endpoint.judge = lambda received: Answer(401)

    verdicts = to_webhook(f"{url}&most=1").send([a_message("orders", n) for n in range(3)])

    text = told(f"{endpoint.url}/x", "HTTP 401 Unauthorized; check the credentials, and the secret")
    assert verdicts == [Unavailable(text)] * 3
    assert all(isinstance(each, Unavailable) and each.everything for each in verdicts)
    assert (len(endpoint.asked), len(tokens.asked)) == (2, 2)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer(401, b'{"error": "invalid_client"}'), "HTTP 401, invalid_client; check oauth-client, its secret and"),
        (Answer(503, b"<html>"), "HTTP 503; check oauth-client, its secret and oauth-scope"),
        (Answer(302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP 302; check oauth-client"),
        (Answer(200, b"<html>"), "the answer holds no access_token"),
        (Answer(200, b'{"access_token": "a\\r\\nb", "token_type": "bearer"}'), "the answer holds no access_token"),
        (Answer(200, b'{"access_token": "abc", "token_type": "mac"}'), "the token is not of the type Bearer"),
    ],
)
def test_a_token_endpoint_that_gives_no_token_makes_all_messages_wait(endpoint, tokens, url, to_webhook, answer, why):
    """Three messages are sent at once, and the endpoint is asked once: many wrong logins may lock the client out."""
    tokens.answer_ = answer

    verdicts = to_webhook(url).send([a_message("orders", n) for n in range(3)])

    assert {type(each) for each in verdicts} == {Unavailable}
    assert all(each.everything for each in verdicts if isinstance(each, Unavailable))
    assert told(f"{endpoint.url}/x", f"the token endpoint {tokens.url}/token: {why}") in repr(verdicts[0])
    assert (endpoint.asked, len(tokens.asked)) == ([], 1)


def test_a_token_endpoint_that_is_away_makes_all_messages_wait_until_it_is_back(endpoint, monkeypatch, to_webhook):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    sender = to_webhook(f"{endpoint.url}/x?oauth-url=http://127.0.0.1:1/token&oauth-client=shop")

    [verdict] = sender.send([a_message("orders", 1)])

    text = "the token endpoint http://127.0.0.1:1/token: connection refused"
    assert verdict == Unavailable(told(f"{endpoint.url}/x", text))
    assert isinstance(verdict, Unavailable)
    assert verdict.everything


def test_the_secret_of_a_file_is_read_for_each_token(tokens, url, to_webhook, tmp_path):
    """Here each token lives for no time at all."""
    tokens.life = 0
    file: Path = tmp_path / "secret"
    sender = to_webhook(f"{url}&oauth-secret-file={file}")

    [missing] = sender.send([a_message("orders", 1)])
    file.write_text(f"{SECRET}x\n")
    [wrong] = sender.send([a_message("orders", 1)])
    file.write_text(f"{SECRET}\n")

    assert isinstance(missing, Unavailable)
    assert missing.error.endswith(f"the token endpoint {tokens.url}/token: oauth-secret-file {file}: no such file or"
                                  " directory")  # fmt: skip
    assert isinstance(wrong, Unavailable)
    assert "HTTP 401, invalid_client; check oauth-client" in wrong.error
    assert [sender.send([a_message("orders", 1)]) for _ in range(2)] == [[DONE], [DONE]]
    assert len(tokens.given) == 2


def test_without_a_secret_nothing_is_sent(endpoint, tokens, url, to_webhook, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE)

    [verdict] = to_webhook(url).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert "the client's secret is missing; set OUTBOX_WEBHOOK_OAUTH_SECRET, or give oauth-secret-file" in verdict.error
    assert (tokens.asked, endpoint.asked) == ([], [])


@pytest.mark.parametrize(("life", "seconds"), [(3600, 3540), (100, 80), ("100", 80), (None, 10**9)])
def test_a_token_is_renewed_shortly_before_its_end(life, seconds):
    moments = iter([0.0, seconds - 1, seconds + 1])
    grant = Grant(url="x", shown="x", client="shop", secret_file=None, scope=None, audience=None)
    tokens = Tokens(grant, clock=lambda: next(moments))
    answer = {"access_token": "abc", "token_type": "Bearer"} | ({} if life is None else {"expires_in": life})

    tokens.take(200, json.dumps(answer).encode())

    assert [tokens.token, tokens.token] == ["abc", "abc" if life is None else None]


def test_neither_secret_nor_token_is_told(endpoint, tokens, url, to_webhook, caplog):
    """Not even when both endpoints repeat what they were sent."""
    caplog.set_level(logging.DEBUG)
    endpoint.judge = lambda received: Answer(422, repr(received).encode())
    sender = to_webhook(url)

    verdicts = [*sender.send([a_message("orders", 1)])]
    login = base64.b64encode(f"shop:{quote(SECRET, safe='')}".encode()).decode()
    tokens.answer_ = Answer(400, json.dumps({"error": f"{SECRET} {login}"}).encode())
    endpoint.judge = lambda received: Answer(401)
    verdicts += sender.send([a_message("orders", 2)])

    said = caplog.text + repr(verdicts) + repr(vars(sender)) + sender.destination
    assert "it says" in repr(verdicts)
    assert "HTTP 400, " in repr(verdicts)
    assert [each for each in ("s3cr3t", "Sesame", "t0ken", login) if each in said] == []


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    """Signs the certificates of an endpoint and of its clients."""
    return Authority(tmp_path_factory.mktemp("authorities") / "ours")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_certificate_opens_the_door_and_another_one_does_not(authority, to_webhook, tmp_path, version):
    certificate, key = authority.issue("endpoint")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = version
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    mine, my_key = authority.issue("shop")
    stranger, stranger_key = Authority(tmp_path / "theirs").issue("shop")
    with Endpoint(tls=context) as endpoint:
        without, foreign, known = (
            to_webhook(f"{endpoint.url}/x?ca={authority.ca}{files}").send([a_message("orders", 1)])[0]
            for files in ("", f"&cert={stranger}&key={stranger_key}", f"&cert={mine}&key={my_key}")
        )

    assert (known, len(endpoint.kept)) == (DONE, 1)
    for refused, alert in ((without, "handshake failure"), (foreign, "unknown ca")):
        assert isinstance(refused, Unavailable)
        # With TLS 1.3 the request may be under way when the alert comes, and the reset may overtake the alert.
        if version == ssl.TLSVersion.TLSv1_2:
            assert refused == Unavailable(
                told(f"{endpoint.url}/x", f"the server refuses the handshake of TLS: {alert}")
            )
            assert refused.everything

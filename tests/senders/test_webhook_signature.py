"""Signatures of Standard Webhooks: written by the sender, checked by whoever receives."""

import base64
import time
from contextlib import closing
from datetime import timedelta

import pytest

from outbox.errors import SignatureError
from outbox.model.verdict import DONE, Unavailable
from outbox.senders.webhook import WebhookSender
from outbox.senders.webhook_reading import verify
from outbox.senders.webhook_signature import SECRET_VARIABLE, keys_of, signature_of
from outbox.testing.sender_contract import a_message, check_all_done
from outbox.testing.servers.process import free_port


def secret(letter: str) -> str:
    """A secret of so many equal bytes."""
    return f"whsec_{base64.b64encode(letter.encode() * 32).decode()}"


OLD, NEW, FOREIGN = secret("o"), secret("n"), secret("f")

#: The example that the reference libraries of Standard Webhooks test themselves with.
EXAMPLE_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EXAMPLE_BODY = b'{"test": 2432232314}'
EXAMPLE = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
SIGNED_AT = 1614265330


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of secrets."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    file = tmp_path / "secret"
    file.write_text(OLD)
    return file


@pytest.fixture
def sender(endpoint, file):
    sender = WebhookSender(f"{endpoint.url}/x?secret-file={file}")
    yield sender
    sender.close()


def send_one(endpoint, sender, body=b'{"a": 1}'):
    """Send a message; return what arrived of it."""
    check_all_done(sender.send(sent := [a_message("orders", body)]), sent)
    return endpoint.kept[-1]


def is_signed_with(received, key: str) -> bool:
    try:
        verify(received.headers, received.body, key)
    except SignatureError:
        return False
    return True


def test_a_signature_is_that_of_the_reference_libraries():
    [key] = keys_of(EXAMPLE_SECRET)

    made = signature_of(key, EXAMPLE["webhook-id"], EXAMPLE["webhook-timestamp"], EXAMPLE_BODY)

    assert made == EXAMPLE["webhook-signature"]
    verify(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET, clock=lambda: SIGNED_AT + 299)


@pytest.mark.parametrize("body", [b"", b"\x00\xff\r\n.", b"x" * 1_000_000])
def test_what_is_sent_is_signed(endpoint, file, body):
    sender = WebhookSender(f"{endpoint.url}/x?secret-file={file}")

    received = send_one(endpoint, sender, body)
    sender.close()

    assert (is_signed_with(received, OLD), is_signed_with(received, NEW)) == (True, False)


def test_without_a_secret_nothing_is_signed(endpoint, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    sender = WebhookSender(endpoint.url)

    received = send_one(endpoint, sender)
    sender.close()

    assert "webhook-timestamp" in received.headers
    assert "webhook-signature" not in received.headers
    with pytest.raises(SignatureError, match="the request has no header webhook-signature"):
        verify(received.headers, received.body, OLD)


def test_a_secret_is_replaced_without_a_restart(endpoint, sender, file):
    """Old, both, new: a receiver that has one of them can always check."""
    seen = []
    for secrets in (OLD, f"{OLD}\n\n  {NEW}\n", NEW):
        file.write_text(secrets)
        received = send_one(endpoint, sender)
        seen.append((is_signed_with(received, OLD), is_signed_with(received, NEW)))

    assert seen == [(True, False), (True, True), (False, True)]


def test_a_receiver_may_have_several_secrets(endpoint, sender):
    received = send_one(endpoint, sender)

    verify(received.headers, received.body, f"{NEW}\n{OLD}")
    with pytest.raises(SignatureError):
        verify(received.headers, received.body, f"{NEW}\n{FOREIGN}")


def test_a_secret_may_stand_in_the_environment(endpoint, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, NEW)
    sender = WebhookSender(endpoint.url)

    received = send_one(endpoint, sender)
    sender.close()

    assert is_signed_with(received, NEW)


def test_a_file_goes_before_the_environment(endpoint, sender, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, NEW)

    received = send_one(endpoint, sender)

    assert (is_signed_with(received, OLD), is_signed_with(received, NEW)) == (True, False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file or directory"),
        (b"", "no secret there; write whsec_ and base64, one secret in a line"),
        (b"\n \n", "no secret there; write whsec_ and base64, one secret in a line"),
        (b"Sesame", "line 1 is no secret; write whsec_ and base64"),
        (b"whsec_Sesame!", "line 1 is no secret; write whsec_ and base64"),
        (b"whsec_", "line 1 is no secret; write whsec_ and base64"),
        (OLD.encode() + b"\nSesame", "line 2 is no secret; write whsec_ and base64"),
        (b"whsec_\xff\xfeSesame", "it is no text"),
    ],
)
def test_nothing_is_sent_unsigned_because_of_a_bad_file(endpoint, sender, file, content, reason):
    """It may be replaced at this moment, so the messages wait."""
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)

    [verdict] = sender.send([a_message("orders", 1)])

    assert verdict == Unavailable(f"Webhook: {endpoint.url}/x: secret-file {file}: {reason}")
    assert (verdict.everything, endpoint.asked, "Sesame" in repr(verdict)) == (True, [], False)
    file.write_text(NEW)
    assert is_signed_with(send_one(endpoint, sender), NEW)


@pytest.mark.parametrize("content", ["", "Sesame"])
def test_nothing_is_sent_unsigned_because_of_a_bad_variable(endpoint, monkeypatch, content):
    monkeypatch.setenv(SECRET_VARIABLE, content)
    sender = WebhookSender(endpoint.url)

    [verdict] = sender.send([a_message("orders", 1)])
    sender.close()

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(f"Webhook: {endpoint.url}: {SECRET_VARIABLE}: ")
    assert (endpoint.asked, "Sesame" in repr(verdict)) == ([], False)


def test_each_attempt_has_its_own_time_and_the_same_id(endpoint, sender, monkeypatch):
    """An old signature is refused, so a message that waited for a day needs a new one."""
    message = a_message("orders", 1)
    sender.send([message])
    monkeypatch.setattr("outbox.senders.webhook.time.time", lambda: 1_900_000_000.7)

    assert sender.send([message]) == [DONE]

    first, second = endpoint.kept
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == str(message.message_id)
    assert second.headers["webhook-timestamp"] == "1900000000"
    verify(second.headers, second.body, OLD, clock=lambda: 1_900_000_000)


@pytest.mark.parametrize(
    ("changed", "body", "reason"),
    [
        ({"webhook-id": "msg_other"}, EXAMPLE_BODY, "was not signed with this secret, or was altered"),
        ({"webhook-timestamp": "1614265331"}, EXAMPLE_BODY, "was not signed with this secret, or was altered"),
        ({}, EXAMPLE_BODY + b" ", "was not signed with this secret, or was altered"),
        ({"webhook-signature": "v1,"}, EXAMPLE_BODY, "was not signed with this secret, or was altered"),
        ({"webhook-signature": "v2,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}, EXAMPLE_BODY, "was not signed"),
        ({"webhook-signature": "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}, EXAMPLE_BODY, "was not signed"),
        ({"webhook-signature": "v1,é \ud800"}, EXAMPLE_BODY, "was not signed"),
        ({"webhook-id": ""}, EXAMPLE_BODY, "the request has no header webhook-id"),
        ({"webhook-timestamp": ""}, EXAMPLE_BODY, "the request has no header webhook-timestamp"),
        ({"webhook-signature": ""}, EXAMPLE_BODY, "the request has no header webhook-signature"),
        ({"webhook-timestamp": "soon"}, EXAMPLE_BODY, "must hold seconds since 1970"),
        ({"webhook-timestamp": "1614265330.0"}, EXAMPLE_BODY, "must hold seconds since 1970"),
        ({"webhook-timestamp": "٣"}, EXAMPLE_BODY, "must hold seconds since 1970"),
    ],
)
def test_what_was_altered_is_refused(changed, body, reason):
    with pytest.raises(SignatureError, match=reason):
        verify({**EXAMPLE, **changed}, body, EXAMPLE_SECRET, clock=lambda: SIGNED_AT)


@pytest.mark.parametrize("seconds", [-301, 301, 86_400])
def test_what_was_signed_at_another_time_is_refused(seconds):
    """Whoever has seen a request could send it again."""
    with pytest.raises(SignatureError, match="more than 300 s from now"):
        verify(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET, clock=lambda: SIGNED_AT + seconds)


def test_the_tolerance_is_the_receivers():
    verify(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET, tolerance=timedelta(days=1), clock=lambda: SIGNED_AT + 86_000)
    with pytest.raises(SignatureError, match="more than 1 s from now"):
        verify(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET, tolerance=timedelta(seconds=1), clock=lambda: SIGNED_AT + 2)


@pytest.mark.parametrize("spelt", [str.upper, str.title])
def test_names_of_headers_may_be_spelt_in_any_case(spelt):
    headers = {spelt(name): value for name, value in EXAMPLE.items()}

    verify(headers, EXAMPLE_BODY, EXAMPLE_SECRET, clock=lambda: SIGNED_AT)


def test_one_of_several_signatures_is_enough():
    others = "v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc= v2,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="
    headers = {**EXAMPLE, "webhook-signature": f"{others} {EXAMPLE['webhook-signature']} {others}"}

    verify(headers, EXAMPLE_BODY, EXAMPLE_SECRET, clock=lambda: SIGNED_AT)


@pytest.mark.parametrize("malformed", ["", "Sesame", "whsec_", "whsec_Sesame!"])
def test_a_receiver_with_a_malformed_secret_is_told_so(malformed):
    with pytest.raises(ValueError, match="secret") as caught:
        verify(EXAMPLE, EXAMPLE_BODY, malformed, clock=time.time)

    assert "Sesame" not in str(caught.value)


def test_a_secret_may_have_no_padding():
    assert keys_of("whsec_YWI") == keys_of("whsec_YWI=") == (b"ab",)


@pytest.mark.parametrize(
    ("option", "mode", "warnings"),
    [
        ("secret-file", 0o644, 1),
        ("secret-file", 0o640, 0),
        ("oauth-url=http%3A%2F%2Fh&oauth-client=shop&oauth-secret-file", 0o644, 1),
    ],
)
def test_a_secret_that_everybody_may_read_is_warned_of_when_a_sender_is_opened(file, caplog, option, mode, warnings):
    """Once, although each call in an outage makes a connection."""
    file.chmod(mode)

    with closing(WebhookSender(f"http://127.0.0.1:{free_port()}/x?{option}={file}")) as sender:
        at_opening = list(caplog.messages)
        for n in range(3):
            sender.send([a_message("orders", n)])

    warning = f"{file} holds a secret, and everybody on this machine may read it; run: chmod o-r {file}"
    assert (at_opening, caplog.messages.count(warning)) == ([warning] * warnings, warnings)

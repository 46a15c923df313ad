"""Webhooks: certificates, servers without TLS, and proxies."""

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from outbox.model.verdict import Unavailable
from outbox.testing.sender_contract import a_message, check_all_done
from tests.support.tls import CERTIFICATE, FOREIGN, server_context
from tests.support.webhook_endpoint import Endpoint
from tests.support.webhooks import SECRET, Parrot, told


@pytest.fixture
def safe_endpoint() -> Iterator[Endpoint]:
    with Endpoint(tls=server_context()) as endpoint:
        yield endpoint


def test_a_certificate_that_ca_names_is_trusted(safe_endpoint, to_webhook):
    sender = to_webhook(f"{safe_endpoint.url}/x?ca={CERTIFICATE}")

    check_all_done(sender.send(sent := [a_message("orders", n) for n in range(3)]), sent)

    assert len(safe_endpoint.kept) == 3


def test_a_certificate_that_nobody_vouches_for_is_refused_before_anything_is_sent(safe_endpoint, to_webhook):
    [verdict] = to_webhook(safe_endpoint.url.replace("//", "//ann:s3cr3t@")).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(told(safe_endpoint.url, "its certificate is refused: "))
    assert verdict.everything
    assert safe_endpoint.asked == []


def test_a_certificate_of_another_host_is_refused(safe_endpoint, to_webhook):
    url = safe_endpoint.url.replace("127.0.0.1", "localhost")
    [verdict] = to_webhook(f"{url}/x?ca={CERTIFICATE}").send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(told(f"{url}/x", "its certificate is refused: "))
    assert safe_endpoint.asked == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "{}: no such file or directory"), ("no certificate", "the file holds no certificates")],
)
def test_a_file_of_certificates_that_is_none_is_told_and_read_again(
    safe_endpoint, to_webhook, tmp_path, content, reason
):
    ca = tmp_path / "ca.pem"
    ca.write_text(CERTIFICATE.read_text())
    sender = to_webhook(f"{safe_endpoint.url}/x?ca={ca}")
    ca.unlink()
    if content is not None:
        ca.write_text(content)

    [verdict] = sender.send([a_message("orders", 1)])
    ca.write_text(CERTIFICATE.read_text())

    assert verdict == Unavailable(told(f"{safe_endpoint.url}/x", f"ca: {reason.format(ca)}"))
    check_all_done(sender.send(sent := [a_message("orders", 2)]), sent)


def test_a_file_of_certificates_may_be_replaced(safe_endpoint, to_webhook, tmp_path):
    ca = tmp_path / "ca.pem"
    ca.write_text(FOREIGN.read_text())
    sender = to_webhook(f"{safe_endpoint.url}/x?ca={ca}")

    [verdict] = sender.send([a_message("orders", 1)])
    ca.write_text(CERTIFICATE.read_text())

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(told(f"{safe_endpoint.url}/x", "its certificate is refused: "))
    check_all_done(sender.send(sent := [a_message("orders", 2)]), sent)


def test_a_server_without_tls_is_unavailable_and_gets_no_credentials(to_webhook):
    with Parrot(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as parrot:
        url = parrot.url.replace("http://", "https://")
        [verdict] = to_webhook(url.replace("//", "//ann:s3cr3t@"), seconds=2).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert b"s3cr3t" not in parrot.heard
    assert b"Basic" not in parrot.heard


def test_proxies_of_the_environment_are_not_used(endpoint, to_webhook, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")

    check_all_done(to_webhook(endpoint.url).send(sent := [a_message("orders", 1)]), sent)


def test_a_proxy_of_the_url_is_used_with_its_credentials(to_webhook):
    with Parrot(b"HTTP/1.1 204 No Content\r\n\r\n", closes=False) as proxy:
        host = proxy.url.removesuffix("/hook").replace("//", f"//bob:{quote(SECRET, safe='')}@")
        sender = to_webhook(f"http://ann:pw@shop.example.org/x?token=1&proxy={quote(host, safe='')}")

        check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)

        head = proxy.heard.split(b"\r\n")
        assert head[0] == b"POST http://shop.example.org/x?token=1 HTTP/1.1"
        assert {b"Proxy-Authorization: Basic Ym9iOnMzY3IzdC9TZXNhbWU=", b"Authorization: Basic YW5uOnB3"} <= set(head)


def test_a_proxy_that_refuses_is_told_without_its_password(to_webhook):
    with Parrot(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n") as proxy:
        host = proxy.url.removesuffix("/hook").replace("//", f"//bob:{quote(SECRET, safe='')}@")
        sender = to_webhook(f"https://shop.example.org/x?proxy={quote(host, safe='')}")

        [verdict] = sender.send([a_message("orders", 1)])

    assert verdict == Unavailable(told("https://shop.example.org/x", "407 Proxy Authentication Required"))
    assert "s3cr3t" not in repr(verdict) + repr(vars(sender))

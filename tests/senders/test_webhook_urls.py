"""Webhooks: the URL, what is wrong with one, and what is remembered of it."""

from datetime import timedelta
from urllib.parse import quote

import pytest

from outbox.errors import SenderError
from outbox.senders.port import destination_of
from outbox.senders.webhook import WebhookSender
from tests.support.webhooks import SECRET


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:host/path",
        "https:///path",
        "https://ann:s3cr3t",
        f"https://ann:{SECRET}@host,other/path",
        f"https://ann:{SECRET}@host:99999/",
        f"https://ann:{SECRET}@host:0/",
        f"https://ann:{SECRET}@[::1/",
        f"https://ann:{SECRET}@ho st/",
        f"https://host/#{SECRET}",
        f"https://host/?timeout={SECRET}",
        f"https://host/?timeout=0&token={SECRET}",
        f"https://host/?timeout=1&timeout=2&token={SECRET}",
        f"https://host/?most={SECRET}",
        "https://host/?most=0",
        "https://host/?most=1001",
        "https://host/?most=٣",
        "https://host/?secret-file=",
        "https://host/?secret-file=relative",
        "https://host/?ca=",
        "http://host/?ca=/etc/ssl/cert.pem",
        f"https://host/?proxy=http://ann:{SECRET}",
        f"https://host/?proxy=socks5://ann:{quote(SECRET, safe='')}%40proxy:1",
        "https://host/?proxy=http://proxy",
        "https://host/?proxy=http://pro%20xy:1",
        "https://host/?proxy=http://a,b:1",
        f"https://host/?proxy={SECRET}://%40%40",
        f"https://host/\x01?token={SECRET}",
        f"https://host/?token={SECRET}@",
        f"https://host/?oauth-client=x&oauth-url={quote(f'https://ann:{SECRET}@auth/token', safe='')}",
        f"https://host/?oauth-client=x&oauth-url={quote(f'https://auth:port/{SECRET}', safe='')}",
    ],
)
def test_a_bad_url_is_an_error_without_its_secrets(url):
    with pytest.raises(SenderError) as caught:
        WebhookSender(url)

    assert [each for each in ("s3cr3t", "Sesame") if each in str(caught.value)] == []


FIXES = {
    "https://host/x?most=no": "most must be a number of requests from 1 to 1000",
    "https://host/x?per-connection=0": "per-connection must be a number of requests from 1 to 1000",
    "https://host/x?timeout=no": "timeout must be a number of seconds",
    "https://host/x?timout=3": "did you mean the option timeout? A parameter of the endpoint with the name 'timout' is"
    " written %74imout",
    "https://host/x?a=b&Secret_File=/x": (
        "did you mean the option secret-file? A parameter of the endpoint with the name 'Secret_File' is written"
        " %53ecret_File"
    ),
    "https://host/x?secret-file=x": "secret-file must be the absolute path of a file",
    "http://host/x?ca=/x": "ca is an option of https://",
    "https://host/x?proxy=x": "proxy must be http://host:port or https://host:port",
    "https://host/x#y": "leave out the # and what follows, which is never sent",
    "https://host:0/x": "the port must be a number from 1 to 65535",
    "https://a,b/x": "write one host",
    "https:///x": "write https://host/path",
    "https://host/x?most=1&most=2": (
        "its options are secret-file, timeout, most, per-connection, proxy, oauth-url, oauth-client, oauth-secret-file,"
        " oauth-scope, oauth-audience, ca, cert, as, each once; 'most' is given twice"
    ),
    "https://host/x?key=1&cert=/dev/null": "cert: the file holds no certificate",
    "https://host/x?oauth-client=shop": "oauth-client belongs to a client; give both oauth-url and oauth-client",
    "https://ann@host/x?oauth-url=https://auth/token&oauth-client=shop": (
        "leave out the user before the @, or the options of OAuth: a request has one of both"
    ),
    "https://host/x?oauth-url=ftp://auth/token&oauth-client=shop": (
        "oauth-url must be https://host/path, percent-encoded and without a user"
    ),
}


@pytest.mark.parametrize("url", FIXES)
def test_a_bad_url_is_told_what_to_write(url):
    with pytest.raises(SenderError) as caught:
        WebhookSender(url)

    shown = url.partition("?")[0].partition("#")[0].replace("ann@", "")
    assert str(caught.value) == f"{shown}: {FIXES[url]}"


def test_the_destination_is_the_url_without_credentials_and_query():
    url = f"https://ann:{SECRET.replace('/', '%2F')}@Shop.example.org:8443/hooks/?token=1&timeout=3"

    sender = WebhookSender(url)

    assert sender.destination == destination_of(url) == "https://shop.example.org:8443/hooks"
    assert sender.deadline == timedelta(seconds=3)

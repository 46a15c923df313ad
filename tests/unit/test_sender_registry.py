"""A URL becomes a sender, a subscription remembers its destination, and neither ever tells a secret."""

import re
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from outbox.errors import MissingExtraError, SenderError
from outbox.runtime.secret import redacted
from outbox.senders import opening as registry
from outbox.senders.function import FunctionSender
from outbox.senders.opening import open_sender
from outbox.senders.port import destination_of
from outbox.senders.stdout import FileSender, StdoutSender

SECRET = "s3cr3t"


def offers(*pairs: tuple[str, str]):
    """Stands in for what is installed."""
    every = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in pairs)
    return every.select


@pytest.mark.parametrize("scheme", registry.SCHEMES)
def test_each_scheme_of_ours_has_a_sender(scheme):
    """Whether the library is installed or run from a path."""
    factory = EntryPoint(scheme, registry.SCHEMES[scheme], registry.ENTRY_POINTS).load()

    assert callable(factory)


def test_other_packages_offer_senders_for_other_schemes(monkeypatch):
    ours, theirs = ("stdout", "nowhere:open"), ("lines", "outbox.senders.stdout:FileSender")
    monkeypatch.setattr(registry, "entry_points", offers(ours, theirs))

    assert isinstance(open_sender("lines:x")._sender, FileSender)
    assert isinstance(open_sender("stdout:")._sender, StdoutSender)


def test_the_scheme_of_a_url_finds_its_sender(tmp_path):
    assert isinstance(open_sender("stdout:")._sender, StdoutSender)
    assert isinstance(open_sender(f"file://{tmp_path}/messages")._sender, FileSender)


def test_an_unknown_scheme_is_told_what_there_is(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", offers(("lines", "a:open")))
    known = ", ".join(sorted([*registry.SCHEMES, "lines"]))

    with pytest.raises(SenderError, match=f"there is no sender for pubsub: URLs; known are {re.escape(known)}$"):
        open_sender("pubsub://localhost")


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("postgres://host/shop", "postgresql"),
        ("postgresql+psycopg://host/shop", "postgresql"),
        ("rabbitmq://host/", "amqp"),
        ("valkey://host/", "redis"),
    ],
)
def test_who_takes_the_scheme_of_others_is_told_ours(url, meant):
    with pytest.raises(SenderError, match=rf"there is no sender for .*; did you mean {meant}://\?"):
        open_sender(url)


@pytest.mark.parametrize("url", ["localhost:4222", "127.0.0.1:4222", "nats.example.org:4222"])
def test_who_leaves_the_scheme_out_is_told_what_was_perhaps_meant(url):
    with pytest.raises(SenderError, match=rf"did you mean nats://{url}\?"):
        open_sender(url)


def test_a_scheme_that_two_packages_claim_is_nobodys(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", offers(("x", "a:open"), ("x", "b:open")))

    with pytest.raises(SenderError, match="x: URLs are claimed twice, by a:open and b:open"):
        open_sender("x://localhost")


def test_a_missing_driver_is_named_by_its_extra(monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "nats" or name == "outbox.senders.nats"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nats", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'outbox-log\[nats\]'"):
        open_sender("nats://localhost:4222")


def test_no_driver_is_imported_before_its_destination_is_opened():
    script = "import sys, outbox.senders.function, outbox.senders.stdout; sys.exit('nats' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    "url",
    [
        f"nats://ann:{SECRET}",
        f"nats://ann:{SECRET}/{SECRET}@host:4222",
        f"nats://ann:12{SECRET}?x@host",
        f"nats://ann:1#{SECRET}@host",
        f"nats://ann:12/{SECRET}@host:4222",
        f"nats://ann:{SECRET}@host:port",
        f"nats://ann:{SECRET}@host,bob:{SECRET}@other",
        f"nats://ann:{SECRET}@host:4222/a..b",
        f"nats://ann:{SECRET}@host:4222?speed=9&token={SECRET}",
        f"nats://ann:{SECRET}@host:4222?timeout={SECRET}",
        f"nats://ann:{SECRET}@",
        f"nats://ann:{SECRET}@[::1",
        f"nats://ann:{SECRET}@h\u2100st",
        f"nats:ann:{SECRET}@host",
        f"ann:{SECRET}@host",
        f"{SECRET}@host",
        f"{SECRET}",
        f"://{SECRET}",
        f"file://ann:{SECRET}@/path",
        f"stdout:{SECRET}",
        f"sqs://ann:{SECRET}@host",
    ],
)
def test_a_bad_url_is_an_error_without_its_secrets(url):
    with pytest.raises(SenderError) as caught:
        open_sender(url)

    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://ann:pw@host:4222/shop?timeout=2", "nats://host:4222/shop"),
        ("nats://token@a:1,b:2", "nats://a:1,b:2"),
        ("nats://ann:p/w?x#y@host/shop", "nats://host/shop"),
        ("nats://[::1]:4222", "nats://[::1]:4222"),
        ("nats://ann:pw", "nats://…"),
        ("file:///var/log/x", "file:///var/log/x"),
        ("stdout:", "stdout:…"),
        ("pw", "…"),
        ("ann:pw@host?a://b", "ann:…"),
    ],
)
def test_a_redacted_url_shows_too_little_rather_than_a_secret(url, shown):
    assert redacted(url) == shown


@pytest.mark.parametrize(
    ("url", "destination"),
    [
        ("nats://ann:pw@B:4222,a:4222/shop/?timeout=2", "nats://a:4222,b:4222/shop"),
        ("NATS://localhost", "nats://localhost"),
        ("nats://localhost/", "nats://localhost"),
        ("file:///var/log/X", "file:///var/log/X"),
        ("stdout:", "stdout:"),
        ("stdout:?as=main", "stdout:?as=main"),
        ("nats://ann:pw@b:1,a:2/shop/?timeout=2&as=main", "nats://a:2,b:1/shop?as=main"),
        ("https://h/hooks?as=a%2Fb+c&token=x", "https://h/hooks?as=a%2Fb%20c"),
        ("https://h/hooks?%61s=theirs", "https://h/hooks"),
    ],
)
def test_the_destination_of_a_url_is_scheme_hosts_path_and_its_name(url, destination):
    assert destination_of(url) == destination


class _Webhook:
    def send(self, messages):
        return []

    def close(self):
        pass

    def __call__(self, message):
        return None


def _handle(message):
    return None


def test_the_destination_of_a_function_is_its_name():
    class _Callable:
        def __call__(self, message):
            return None

    assert destination_of(_handle) == f"callable:{__name__}._handle"
    assert destination_of(partial(partial(_handle))) == f"callable:{__name__}._handle"
    assert destination_of(_Callable()).endswith("._Callable")


def test_the_destination_of_a_sender_is_what_it_says_or_its_class():
    assert destination_of(FunctionSender(_handle)) == destination_of(_handle)
    assert destination_of(_Webhook()) == f"sender:{__name__}._Webhook"


def test_a_url_and_its_sender_have_the_same_destination(tmp_path):
    named = ("nats://a:1?as=main", f"file://{tmp_path}/a?as=main", "stdout:?as=main")
    for url in ("nats://ann:pw@b:1,a:2/shop?timeout=1", f"file://{tmp_path}/a", "stdout:", *named):
        assert open_sender(url).destination == destination_of(url)


@pytest.mark.parametrize(
    "url",
    [
        "nats://h:4222/shop?as=main",
        "kafka://h:9092/shop?as=main",
        "redis://h:6379/0?as=main",
        "amqp://h/shop?as=main",
        "postgresql://h/shop?as=main",
        "https://h/hooks?as=main",
        "file:///var/log/x?as=main",
        "stdout:?as=main",
    ],
)
def test_every_destination_can_have_a_name(url):
    sender = open_sender(url)
    destination = sender.destination
    sender.close()

    assert destination == destination_of(url) == url


@pytest.mark.parametrize("url", ["nats://h?as=", "file:///x?as=%00", "stdout:?as=" + 256 * "a"])
def test_a_name_is_short_and_printable(url):
    with pytest.raises(SenderError, match="as must be 1 to 255 printable characters"):
        open_sender(url)


@pytest.mark.parametrize(
    "url", ["stdout:?as=a&as=b", "stdout:?as=a&x=1", "stdout:?x=1", "file:///x?as=a&x=1", "file:///x?x=1"]
)
def test_a_file_and_standard_output_take_no_other_option(url):
    with pytest.raises(SenderError, match=r"stdout: takes nothing|a file is written"):
        open_sender(url)


class _Shop(_Webhook):
    destination = "shop"


def test_an_opened_sender_says_what_has_to_be_known_of_it():
    class Slow(_Shop):
        deadline = timedelta(seconds=30)
        concurrency = 4

    opened = open_sender(Slow())

    assert (opened.destination, opened.deadline, opened.concurrency) == ("shop", timedelta(seconds=30), 4)
    assert open_sender(_Shop(), deadline=timedelta(seconds=1)).deadline == timedelta(seconds=1)
    assert (open_sender(_handle).deadline, open_sender(_handle).concurrency) == (timedelta(seconds=5), 1)


def test_what_is_open_is_not_opened_again():
    opened = open_sender(_Shop(), prefix="shop.")

    assert open_sender(opened) is opened
    again = open_sender(opened, rename={"orders": "placed"})
    assert (again is opened, again.destination) == (False, "shop")

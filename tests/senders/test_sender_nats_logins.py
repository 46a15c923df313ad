"""NATS by a certificate, by a credentials file and by an nkey, each with a server that demands it."""

import base64
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outbox.errors import SenderError
from outbox.model.verdict import DONE, Unavailable
from outbox.senders.nats import NatsSender
from outbox.senders.port import destination_of
from outbox.senders.tls import Tls
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done
from outbox.testing.servers import NatsServer
from tests.support.authority import Authority, options
from tests.support.nats_accounts import Operator, Pair
from tests.support.nats_streams import make_stream
from tests.support.tls import refused as refused_by_tls

VIOLATION = "nats: 'Authorization Violation'"
UNTRUSTED = "its certificate is refused: unable to get"


class Guarded(NamedTuple):
    """A server with the stream `orders`; the options that it accepts, and those that it refuses, with the reason."""

    server: NatsServer
    scheme: str
    accepted: str
    refused: Mapping[str, str]

    def url(self, query: str = "") -> str:
        """Return a URL with options."""
        return f"{self.scheme}://127.0.0.1:{self.server.port}?{query}"


def by_certificate(folder: Path) -> tuple[NatsServer, Guarded, dict[str, Any]]:
    """A server that takes the name of the user from the certificate."""
    authority, stranger = Authority(folder / "authority"), Authority(folder / "stranger")
    (own, own_key), ann, bob = authority.issue("server"), authority.issue("ann"), authority.issue("bob")
    files = f'cert_file: "{own}", key_file: "{own_key}", ca_file: "{authority.ca}"'
    users = '{ users: [ { user: "CN=ann" } ] }'
    server = NatsServer(settings={"tls": f"{{ {files}, verify_and_map: true }}", "authorization": users})
    refused = {
        options(ca=authority.ca): refused_by_tls("certificate required"),
        options(ca=authority.ca, shown=stranger.issue("ann")): refused_by_tls("unknown ca"),
        options(ca=authority.ca, shown=authority.issue("old", days=-1)): refused_by_tls("certificate expired"),
        options(ca=authority.ca, shown=bob): VIOLATION,
        options(ca=stranger.ca, shown=ann): f"{UNTRUSTED} local issuer certificate",
        options(shown=ann): f"{UNTRUSTED} local issuer certificate",
    }
    login = {"tls": Tls(str(authority.ca), *map(str, ann)).context()}
    return server, Guarded(server, "tls", options(ca=authority.ca, shown=ann), refused), login


def by_credentials_file(folder: Path) -> tuple[NatsServer, Guarded, dict[str, Any]]:
    """A server of an operator, whose accounts sign the JWTs of users."""
    operator, stranger = Operator(), Operator()
    server = NatsServer(settings=operator.settings)
    ann, eve, old, mixed = (folder / f"{name}.creds" for name in ("ann", "eve", "old", "mixed"))
    user = operator.admit(ann)
    stranger.admit(eve)
    operator.admit(old, seconds=-60)
    mixed.write_text(ann.read_text().replace(user.seed, Pair().seed))
    # As an editor on another system saves the file, which the driver itself does not understand.
    (other := folder / "other.creds").write_bytes(ann.read_bytes().replace(b"\n", b"\r\n"))
    expired = rf"{VIOLATION}: the JWT of creds expired at [0-9]{{4}}-[0-9-]{{5}} [0-9:]{{8}} UTC"
    refused = {f"creds={eve}": VIOLATION, f"creds={old}": expired, f"creds={mixed}": VIOLATION, "": VIOLATION}
    return server, Guarded(server, "nats", f"creds={other}", refused), {"user_credentials": str(ann)}


def by_nkey(folder: Path) -> tuple[NatsServer, Guarded, dict[str, Any]]:
    """A server that knows the public key of a user."""
    pair = Pair()
    server = NatsServer(settings={"authorization": f"{{ users: [ {{ nkey: {pair.name} }} ] }}"})
    (seed := folder / "seed").write_text(f"{pair.seed}\n")
    (other := folder / "other").write_text(Pair().seed)
    Operator().admit(creds := folder / "creds")
    refused = {f"nkey={other}": VIOLATION, f"creds={creds}": VIOLATION, "": VIOLATION}
    return server, Guarded(server, "nats", f"nkey={seed}", refused), {"nkeys_seed": str(seed)}


@pytest.fixture(scope="module", params=[by_certificate, by_credentials_file, by_nkey])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that demands something of everybody."""
    make: Callable[[Path], tuple[NatsServer, Guarded, dict[str, Any]]] = request.param
    server, found, login = make(tmp_path_factory.mktemp("nats"))
    with server:
        make_stream(found.url().rstrip("?"), "orders", **login)
        yield found


def secrets_in(query: str) -> list[str]:
    """The contents of the files that a URL names, as far as they are secret."""
    paths = [Path(part.partition("=")[2]) for part in query.split("&") if part and not part.startswith("ca=")]
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if len(line) > 40 and " " not in line]


def test_messages_arrive_also_after_the_server_has_begun_anew(guarded, caplog):
    caplog.set_level(logging.INFO, "outbox")
    with closing(NatsSender(guarded.url(guarded.accepted))) as sender:
        check_all_done(sender.send(sent := [a_message("orders", n, key="k") for n in range(3)]), sent)
        guarded.server.kill()
        [lost] = sender.send(again := [a_message("orders", 4)])
        guarded.server.start()
        check_eventually_done(sender, again)

    assert isinstance(lost, Unavailable)
    assert [record.getMessage() for record in caplog.records if not record.name.startswith("outbox")] == []


@pytest.mark.storm
def test_what_the_server_refuses_is_unavailable_with_the_reason_and_no_secret(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    for query, reason in guarded.refused.items():
        url = guarded.url(query)
        with closing(NatsSender(url)) as sender:
            [verdict] = sender.send([a_message("orders", 1)])
            told = caplog.text + repr(verdict) + repr(sender) + repr(vars(sender)) + destination_of(url)

        assert isinstance(verdict, Unavailable)
        assert verdict.everything
        assert re.fullmatch(f"NATS: {re.escape(guarded.url().rstrip('?'))}: {reason}", verdict.error)
        assert [secret for secret in secrets_in(query) if secret in told] == []


def test_another_file_of_the_same_name_is_used_for_the_next_connection(tmp_path):
    """A JWT is renewed before it expires, and so is a certificate."""
    operator, file = Operator(), tmp_path / "ann.creds"
    with NatsServer(settings=operator.settings) as server:
        operator.admit(file)
        make_stream(server.url, "orders", user_credentials=str(file))
        Operator().admit(file)
        with closing(NatsSender(f"{server.url}?creds={file}")) as sender:
            [refused] = sender.send(sent := [a_message("orders", 1)])
            file.unlink()
            [missing] = sender.send(sent)
            operator.admit(file)

            assert sender.send(sent) == [DONE]

    assert isinstance(refused, Unavailable)
    assert missing == Unavailable(f"NATS: {server.url}: creds: {file}: no such file or directory")


@pytest.mark.parametrize("option", ["creds", "nkey"])
def test_a_file_that_holds_no_login_is_refused_and_never_shown(tmp_path, option):
    user = Operator().admit(tmp_path / "whole")
    jwt = next(line for line in (tmp_path / "whole").read_text().splitlines() if line.startswith("eyJ"))
    mistyped = user.seed[:20] + ("B" if user.seed[20] == "A" else "A") + user.seed[21:]
    no_seed = "the file holds no seed of a user, which begins with SU"
    contents = {
        "": no_seed,
        jwt: no_seed,
        user.name: no_seed,
        f"SUZ{user.seed[3:]}": no_seed,
        f"{jwt}\n{mistyped}": "the checksum of the seed is wrong",
        **({user.seed: "the file holds no JWT of a user"} if option == "creds" else {}),
    }
    for text, problem in contents.items():
        (file := tmp_path / "login").write_text(text)

        with pytest.raises(SenderError) as refused:
            NatsSender(f"nats://h?{option}={file}")

        assert str(refused.value) == f"nats://h: {option}: {problem}"


@pytest.mark.parametrize("claims", [b'{"exp": 1e30}', b'{"exp": -1e30}', b'["exp"]', b"[" * 100_000])
def test_a_jwt_that_cannot_be_read_is_left_to_the_server(tmp_path, claims):
    (file := tmp_path / "login").write_text(
        f"eyJhbGciOiJub25lIn0.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.c2ln\n{Pair().seed}\n"
    )

    with closing(NatsSender(f"nats://h?creds={file}")) as sender:
        assert sender.destination == "nats://h"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nats://ann:s3cr3t@h?creds=/x", "there is one way to log in: user and password, a token, creds or nkey"),
        ("nats://h?creds=/x&nkey=/y", "there is one way to log in: user and password, a token, creds or nkey"),
        ("nats://h?nkey=/no/such/file", "nkey: /no/such/file: no such file or directory"),
        ("nats://h?nkey=", "nkey must be the path of a file"),
        ("nats://h?cert=/x", "cert is an option of tls://"),
    ],
)
def test_a_login_that_cannot_be_meant_is_refused(url, text):
    with pytest.raises(SenderError) as refused:
        NatsSender(url)

    assert str(refused.value) == f"nats://h: {text}"


def test_a_login_makes_no_other_destination():
    assert destination_of("nats://h/shop?creds=/a&as=x") == destination_of("nats://h/shop?nkey=/b&as=x")

"""The options of TLS, which have the same names and the same errors at every sender that has them."""

import ssl
from pathlib import Path
from urllib.parse import urlencode

import pytest

from outbox.errors import SenderError
from outbox.senders.address import Address
from outbox.senders.port import destination_of
from outbox.senders.tls import TLS_OPTIONS, Tls
from tests.support.authority import Authority, locked


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of an authority: certificate and key of ann and of bob, and files that are of no use."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "authority")
    (ann, key), (_, bobs_key) = authority.issue("ann"), authority.issue("bob")
    (both := folder / "both.pem").write_bytes(ann.read_bytes() + key.read_bytes())
    (broken := folder / "broken.pem").write_bytes(b"\n".join(ann.read_bytes().splitlines()[::2]))
    (broken_key := folder / "broken.key").write_bytes(b"\n".join(key.read_bytes().splitlines()[::2]))
    made = {"ca": authority.ca, "ann": ann, "key": key, "bobs": bobs_key, "both": both, "locked": locked(key, "s3cr3t")}
    return made | {"broken": broken, "broken_key": broken_key, "none": folder / "none", "folder": folder}


def tls_of(url: str) -> Tls | None:
    return Address.of(url, form="safe://host", options=TLS_OPTIONS).tls("safe")


def test_the_files_that_a_url_names_are_used(files):
    tls = tls_of(f"safe://h?ca={files['ca']}&cert={files['ann']}&key={files['key']}")

    assert tls == Tls(*(str(files[name]) for name in ("ca", "ann", "key")))
    context = tls.context()
    assert [each["subject"] for each in context.get_ca_certs()] == [((("commonName", "authority"),),)]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_certificate_and_key_may_stand_in_one_file(files):
    assert tls_of(f"safe://h?cert={files['both']}") == Tls(cert=str(files["both"]))


def test_without_options_the_system_says_what_to_trust_and_without_tls_there_is_nothing():
    assert tls_of("safe://h") == Tls(None, None, None)
    assert tls_of("plain://h") is None


def test_renewed_files_count_from_the_next_connection_on(files, tmp_path):
    (ca := tmp_path / "ca.pem").write_bytes(files["ca"].read_bytes())
    tls = tls_of(f"safe://h?ca={ca}")
    assert tls is not None

    ca.unlink()

    with pytest.raises(ConnectionError, match=f"^ca: {ca}: no such file or directory$"):
        tls.context()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ca": "none"}, "ca: {none}: no such file or directory"),
        ({"ca": "folder"}, "ca: {folder}: is a directory"),
        ({"ca": "key"}, "ca: the file holds no certificates"),
        ({"ca": "broken"}, "ca: the certificates are malformed"),
        ({"cert": "none", "key": "key"}, "cert: {none}: no such file or directory"),
        ({"cert": "key", "key": "key"}, "cert: the file holds no certificate"),
        ({"cert": "broken", "key": "key"}, "key: the private key or cert is malformed"),
        ({"cert": "ann"}, "cert: the file holds no private key; give the path of the key's file as key"),
        ({"cert": "ann", "key": "none"}, "key: {none}: no such file or directory"),
        ({"cert": "ann", "key": "ann"}, "key: the file holds no private key"),
        ({"cert": "ann", "key": "broken_key"}, "key: the private key or cert is malformed"),
        ({"cert": "ann", "key": "bobs"}, "key: the private key is of another certificate than cert"),
        (
            {"cert": "ann", "key": "locked"},
            "key: the private key has a passphrase; write the key to the file without passphrase",
        ),
        ({"key": "key"}, "key belongs to cert; give the path of the certificate's file as cert, too"),
    ],
)
def test_a_file_of_no_use_is_named_by_its_option(files, options, text):
    query = urlencode({option: files[name] for option, name in options.items()})

    with pytest.raises(SenderError) as refused:
        tls_of(f"safe://h?{query}")

    assert str(refused.value) == f"safe://h: {text.format_map(files)}"


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, False)])
def test_a_key_that_everybody_may_read_is_warned_of(files, mode, warned, caplog):
    files["key"].chmod(mode)

    tls_of(f"safe://h?cert={files['ann']}&key={files['key']}")

    fix = f"holds a secret, and everybody on this machine may read it; run: chmod o-r {files['key']}"
    assert (fix in caplog.text) == warned


@pytest.mark.parametrize("option", TLS_OPTIONS)
def test_the_options_belong_to_a_scheme_with_tls_and_are_paths(option):
    with pytest.raises(SenderError, match=f"plain://h: {option} is an option of safe://"):
        tls_of(f"plain://h?{option}=/etc/x.pem")
    with pytest.raises(SenderError, match=f"safe://h: {option} must be the path of a file"):
        tls_of(f"safe://h?{option}=")


@pytest.mark.parametrize("scheme", ["kafkas", "amqps", "tls", "rediss", "https"])
def test_the_files_do_not_make_another_destination(scheme):
    assert destination_of(f"{scheme}://h/x?ca=/ca.pem&cert=/c.pem&key=/k.pem") == f"{scheme}://h/x"

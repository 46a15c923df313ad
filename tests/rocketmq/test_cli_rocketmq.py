"""`outbox rocketmq serve`: a mistake in an option is told at once."""

import pytest

from tests.support.command_line import outbox


@pytest.mark.parametrize(("options", "text"), [
    (["--topic", "a b"], "The specified topic[a b] contains illegal characters"),
    (["--topic", "orders=normal"], "the type of topic orders is one of NORMAL, FIFO, DELAY, TRANSACTION, not 'normal'"),
    (["--topic", "orders", "--fifo-group", "a b"], "the specified group[a b] contains illegal characters"),
    (["--topic", "orders", "--listen", "8081"], "a place is HOST:PORT, such as 127.0.0.1:8081, not '8081'"),
    (["--topic", "orders", "--listen", "0.0.0.0:8081"], "no client can connect to 0.0.0.0:8081"),
    (["--topic", "orders", "--check-interval", "0s"], "check_interval must be greater than 0"),
    (["--topic", "orders", "--auth-file", "nowhere/keys"], "auth file nowhere/keys: no such file or directory"),
    (["--topic", "orders", "--tls-cert", "c"], "TLS wants both, a certificate and its private key"),
    (["--topic", "orders", "--tls-cert", "no/c", "--tls-key", "k"], "TLS: cert: no/c: no such file or directory"),
    (["--topic", "orders", "--tls-listen", "h:1"], "a second place with TLS wants a certificate and its private key"),
    (["--topic", "orders", "--tls-advertise", "h:1"], "but no second place to listen at with TLS"),
    ([], "Missing option '--topic'"),
])  # fmt: skip
def test_a_mistake_in_an_option_is_a_usage_error(sqlite_engine, options, text):
    done = outbox(sqlite_engine, "rocketmq", "serve", *options)

    assert (done.code, text in done.err) == (2, True)

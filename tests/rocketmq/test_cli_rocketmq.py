"""`outbox rocketmq`: a mistake is told at once; topics and groups are added, listed and dropped."""

import pytest

from outbox import Outbox
from tests.support.command_line import outbox


@pytest.mark.parametrize(("options", "text"), [
    (["--listen", "8081"], "a place is HOST:PORT, such as 127.0.0.1:8081, not '8081'"),
    (["--listen", "0.0.0.0:8081"], "0.0.0.0:8081: say by which host and port, with --advertise"),
    (["--check-interval", "0s"], "check_interval must be greater than 0"),
    (["--auth-file", "nowhere/keys"], "auth file nowhere/keys: no such file or directory"),
    (["--tls-cert", "c"], "TLS wants both, a certificate and its private key"),
    (["--tls-cert", "no/c", "--tls-key", "k"], "TLS: cert: no/c: no such file or directory"),
    (["--tls-listen", "h:1"], "a second place with TLS wants a certificate and its private key"),
    (["--tls-advertise", "h:1"], "but no second place to listen at with TLS"),
    (["--create-topics", "FIFO"], "'FIFO' is not one of 'NORMAL', 'no'"),
    (["--max-clients", "0"], "0 is not in the range x>=1"),
])  # fmt: skip
def test_a_mistake_in_an_option_is_a_usage_error(sqlite_engine, options, text):
    done = outbox(sqlite_engine, "rocketmq", "serve", *options)

    assert (done.code, text in done.err) == (2, True)


@pytest.mark.every_database
def test_topics_are_added_listed_and_dropped(engine):
    told = [outbox(engine, "rocketmq", "topics", *line.split()) for line in (
        "list", "add orders", "add paid --type TRANSACTION", "add orders", "list", "drop orders", "list --json",
    )]  # fmt: skip

    assert [each.code for each in told] == [0] * 7
    assert "no topics; to add one, run: outbox rocketmq topics add NAME" in told[0].err
    assert [line.split() for line in told[4].out.splitlines()] == [
        ["NAME", "TYPE"], ["orders", "NORMAL"], ["paid", "TRANSACTION"],
    ]  # fmt: skip
    assert told[3].err.strip() == "topic orders is there, of type NORMAL"
    assert told[6].json["topics"] == [{"name": "paid", "type": "TRANSACTION"}]


@pytest.mark.every_database
def test_groups_are_added_changed_listed_and_dropped(engine):
    told = [outbox(engine, "rocketmq", "groups", *line.split()) for line in (
        "list", "add billing --fifo --retries 3", "add other", "add billing --fifo", "list", "drop billing",
        "list --json",
    )]  # fmt: skip

    assert [each.code for each in told] == [0] * 7
    assert told[0].err.splitlines() == [
        "no groups were added; to add one, run: outbox rocketmq groups add NAME",
        "groups that receive are listed by: outbox subscriptions list",
    ]
    assert [line.split() for line in told[4].out.splitlines()] == [
        ["NAME", "FIFO", "RETRIES"], ["billing", "yes", "3"], ["other", "no", "16"],
    ]  # fmt: skip
    assert told[6].json["groups"] == [{"name": "other", "fifo": False, "retries": 16}]


@pytest.mark.parametrize(("line", "text"), [
    ("topics add a|b*", "The specified topic[a|b*] contains illegal characters"),
    ("topics add orders --type FIFO", "NORMAL, not FIFO; to give it another type, first: outbox rocketmq topics drop"),
    ("topics drop strange", "there is no topic 'strange'; there are: orders"),
    ("groups add a*b", "the specified group[a*b] contains illegal characters"),
    ("groups add g --retries -1", "-1 is not in the range 0<=x<=1000"),
    ("groups drop strange", "there is no group 'strange'; there are: none"),
    ("groups add receiving --fifo", "|orders' --ordered && outbox subscriptions alter 'receiving|steps' --ordered"),
])  # fmt: skip
def test_a_mistake_about_a_topic_or_a_group_names_the_fix(sqlite_engine, line, text):
    outbox(sqlite_engine, "rocketmq", "topics", "add", "orders")
    for topic in ("steps", "orders"):
        name = f"receiving|{topic}"
        consumer = Outbox(sqlite_engine).consumer(name, topics=[topic], ordered=False, on_dead="continue")
        consumer.on(topic)(print)
        consumer.until_empty()

    done = outbox(sqlite_engine, "rocketmq", *line.split())

    assert (done.code, text in done.err) == (2, True), done.err

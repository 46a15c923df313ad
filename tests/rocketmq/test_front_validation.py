"""Messages of clients are refused for the fault that a real server finds first, and by our own limits."""

import base64
from time import time
from typing import Any

import pytest

from outbox.model.encoding import MAX_BODY_BYTES
from outbox.model.limits import MAX_HEADER_BYTES, checked_headers
from outbox.rocketmq.front.authentication import topics_in
from outbox.rocketmq.front.conversion import stored, wire_of
from outbox.rocketmq.front.handles import Handle
from outbox.rocketmq.front.protocol import RPCS
from outbox.rocketmq.front.settings import MOST_TOPICS
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.rocketmq.front.validation import MAX_EXPRESSION, MAX_KEYS, MAX_MESSAGES, checked_messages, checked_tags
from outbox.rocketmq.names import subscription_name
from outbox.store.subscriptions.receipts import Receipt
from tests.rocketmq.front_probes import TOPICS, message

DAY, HOUR = 86_400, 3_600
PROXY = "org.apache.rocketmq.proxy.common.ProxyException: "
TOO_MUCH = (
    f"{PROXY}the message is illegal, maybe msg body or properties length not matched. msg body length limit 4194304B,"
    " msg properties length limit 32KB. [a call has one message of a transaction, or messages whose bodies keep the"
    " limit together]"
)
#: Faults of a message with what they are answered, in the order in which a real server looks for them.
FAULTS: list[tuple[dict[str, Any], tuple[int, str]]] = [
    ({"body": b""}, (41302, "message body cannot be empty")),
    ({"props": {f"p{n}": "v" for n in range(129)}}, (43101, "too many user properties, max is 128")),
    ({"props": {"\1": "v"}}, (40007, "the key of property cannot contain control character")),
    ({"tag": "a|b"}, (40004, "tag cannot contain '|'")),
    ({"keys": ["", "k", " "]}, (40005, "key cannot be the char sequence of whitespace")),
    ({"keys": ["k" * 16385]}, (43101, "the total size of user property is too large, max is 16384")),
    ({"mid": " "}, (40009, "message id cannot be empty")),
    ({"orphaned_transaction_recovery_duration": HOUR + 1},
     (40000, "the max transaction recovery time of message is too large, max is 3600")),
    ({"delivery_timestamp": time() + 2 * DAY},
     (40012, "the max delay time of message is too large, max is 86400000")),
    ({"message_group": "\1" * 64}, (40006, "message group exceed the max size 64")),
]  # fmt: skip


def refused(*messages: Any) -> tuple[int, str] | None:
    """The code and the text with which messages are refused; None: they are not."""
    try:
        checked_messages(messages, TOPICS)
    except RefusedError as error:
        return int(error.code), error.text
    return None


def a_message(**fields: Any) -> Any:
    """A half message, in whose type every fault is one."""
    return message("tx", type_="TRANSACTION", **fields)


def test_a_message_is_refused_for_the_first_fault_of_a_real_servers_order():
    """`keys` and `props` of two faults are one field, of which the later one stays."""
    pairs = [
        (one, two) for at, one in enumerate(FAULTS) for two in FAULTS[at + 1 :] if not one[0].keys() & two[0].keys()
    ]

    answers = [refused(a_message(**two[0] | one[0])) for one, two in pairs]

    assert answers == [answer for (_, answer), _ in pairs]


def test_each_fault_alone_is_refused():
    assert [refused(a_message(**fields)) for fields, _ in FAULTS] == [answer for _, answer in FAULTS]


def test_faults_of_a_message_come_before_those_of_the_next_one_and_the_type_is_looked_at_last():
    bad, other = message("normal", b""), message("filt")

    assert [refused(bad, other), refused(other, bad), refused(message("fifo", tag=" "))] == [
        (41302, "message body cannot be empty"),
        (40016, "topic in message is not same"),
        (40004, "tag cannot be the char sequence of whitespace"),
    ]


def test_what_is_no_fault_on_a_real_server_is_none_here():
    """The time of recovery is in whole seconds, and only of a transaction; an empty key is none."""
    messages = [
        message("normal", keys=["", "k"], props={"BORN_HOST": "v", "MESSAGE_TYPE": "v"}),
        message("normal", orphaned_transaction_recovery_duration=HOUR + 1),
        a_message(orphaned_transaction_recovery_duration=HOUR + 0.5),
        message("normal", tag="t" * 100, keys=["k" * 16284]),
    ]

    assert [refused(each) for each in messages] == [None] * 4


@pytest.mark.parametrize(("fields", "actual"), [({"priority": 1}, "PRIORITY"), ({"lite_topic": "l"}, "LITE")])
def test_a_message_of_a_type_that_no_topic_has_is_refused(fields, actual):
    assert refused(message("normal", **fields)) == (
        40014,
        f"{PROXY}TopicMessageType validate failed, the expected type is NORMAL, but actual type is {actual}",
    )


def test_a_call_has_so_many_messages_keys_and_bytes_together():
    half = b"x" * (MAX_BODY_BYTES // 2)
    small, keyed = message("normal"), message("normal", keys=[""] * (MAX_KEYS // 2))

    answers = [
        refused(*[small] * MAX_MESSAGES),
        refused(*[small] * (MAX_MESSAGES + 1)),
        refused(keyed, keyed),
        refused(keyed, keyed, message("normal", keys=["k"])),
        refused(message("normal", half), message("normal", half)),
        refused(message("normal", half), message("normal", half), small),
    ]

    assert answers == [
        None,
        (41300, f"too many messages, max is {MAX_MESSAGES}"),
        None,
        (43101, f"too many keys, max is {MAX_KEYS}"),
        None,
        (50001, TOO_MUCH),
    ]


def test_a_tag_expression_has_so_many_characters():
    longest = "t" * MAX_EXPRESSION
    assert checked_tags(longest) == longest

    with pytest.raises(RefusedError) as refused:
        checked_tags(longest + "t")

    assert (refused.value.code, refused.value.text) == (
        40010,
        f"subString split error [a tag expression has at most {MAX_EXPRESSION} characters, not {MAX_EXPRESSION + 1}]",
    )


@pytest.mark.parametrize("id", [" id", "id\n", "\0", "\u00e4" * 513])
def test_an_id_that_cannot_be_stored_is_refused(id):
    code, _ = refused(message("normal", mid=id)) or (0, "")

    assert code == Code.ILLEGAL_MESSAGE_ID


@pytest.mark.parametrize("value", ["v" * 124, "\u4e2d" * 41, "\U0001f600" * 31, "\u2028"])
def test_properties_of_the_most_that_a_message_may_have_come_back_as_they_were(value):
    """Of names that no header can have, and beside a host that leaves no room."""
    properties = {f"\u00e4{number:02x}": value for number in range(128)}
    sent = message("normal", props=properties, born_host="h" * MAX_HEADER_BYTES, trace_context="t" * MAX_HEADER_BYTES)
    assert refused(sent) is None

    kept = stored(sent)

    checked_headers(kept.headers)
    assert dict(wire_of(kept, "NORMAL").user_properties) == properties


def test_a_blank_parts_two_keys_and_no_other_white_space_does():
    kept = stored(message("normal", keys=[" a", "b  c", "", "d\u3000e"]))

    assert (kept.headers["KEYS"], list(wire_of(kept, "NORMAL").system_properties.keys)) == (
        "a b c d\u3000e",
        ["a", "b", "c", "d\u3000e"],
    )


# Names and handles


def test_two_pairs_of_group_and_topic_have_two_subscriptions():
    pairs = [("a|b", "c"), ("a", "b|c"), ("a%7Cb", "c"), ("a", "|b|c"), ("a|", "b|c"), ("a%", "|b|c"), ("%7C", "c")]

    assert subscription_name("billing", "orders") == "billing|orders"
    assert len({subscription_name(*pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize(
    "fields",
    ['[true, "r", 1, "o"]', f'[1, "{"r" * 101}", 1, "o"]', '[1, "r\\u0000", 1, "o"]', '[1, "\\ud800", 1, "o"]',
     '[1, "r", 1, 2]', '[1, "r", "1", "o"]', '[1, "r", 1, "o"]' + " " * 1024, '[-1, "r", 1, "o"]',
     '[9223372036854775808, "r", 1, "o"]', '[1, "r", 1]', '"r"', "["],
)  # fmt: skip
def test_a_handle_that_no_front_has_made_is_refused(fields):
    with pytest.raises(RefusedError, match="Parse failed"):
        Handle.read(base64.urlsafe_b64encode(fields.encode()).decode())


def test_a_handle_is_read_as_it_was_made():
    handle = Handle(Receipt(1, f"handed out under receipt {2**64 - 1}"), 1.5, "owner")

    assert Handle.read(str(handle)) == handle


def test_a_request_with_more_messages_or_topics_than_a_call_may_have_is_refused_before_a_look_at_each():
    """A request has room for millions of messages without contents, whose names would take seconds of all clients."""
    messages = RPCS["SendMessage"].request()
    published, subscribed = RPCS["Telemetry"].request(), RPCS["Telemetry"].request()
    several = [
        (messages, messages.messages, MAX_MESSAGES),
        (published, published.settings.publishing.topics, MOST_TOPICS),
        (subscribed, subscribed.settings.subscription.subscriptions, MOST_TOPICS),
    ]
    found: list[Any] = []
    for request, parts, most in several:
        for _ in range(most):
            parts.add()
        found.append(topics_in(request))
        parts.add()
        with pytest.raises(RefusedError) as refused:
            topics_in(request)
        found.append((int(refused.value.code), refused.value.text))

    too_many_topics = (40000, "too many topics, max is 10000")
    assert found == [{""}, (41300, "too many messages, max is 1000"), {""}, too_many_topics, {""}, too_many_topics]

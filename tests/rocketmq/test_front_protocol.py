"""The protocol of RocketMQ's front: made of the official client's descriptors, with the codes of the client."""

import pytest
from sqlalchemy import create_engine

from outbox import Outbox
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.protocol import RPCS, numbers
from outbox.rocketmq.front.routing import Place
from outbox.rocketmq.front.settings import UnknownSettingsError, answered
from outbox.rocketmq.front.statuses import Code
from tests.support.rocketmq_protocol import FILE, descriptor_set


@pytest.mark.usefixtures("official")
def test_the_descriptors_are_those_of_the_official_client():
    assert FILE.read_bytes() == descriptor_set()


def test_codes_have_the_numbers_of_the_protocol():
    assert {code.name: code.value for code in Code}.items() <= numbers("Code").items()


@pytest.mark.parametrize(("arm", "type_"), [("publishing", "PRODUCER"), ("subscription", "SIMPLE_CONSUMER")])
def test_settings_are_answered_with_the_arm_that_was_asked_for(arm, type_):
    asked = RPCS["Telemetry"].request().settings
    asked.client_type = numbers("ClientType")[type_]
    getattr(asked, arm).SetInParent()

    made = answered(asked)

    assert (made.WhichOneof("pub_sub"), made.HasField("metric"), made.metric.on) == (arm, True, False)


@pytest.mark.parametrize("type_", ["PRODUCER", "CLIENT_TYPE_UNSPECIFIED"])
def test_settings_without_an_arm_or_a_type_are_unknown(type_):
    asked = RPCS["Telemetry"].request().settings
    asked.client_type = numbers("ClientType")[type_]
    if type_ != "PRODUCER":
        asked.publishing.SetInParent()

    with pytest.raises(UnknownSettingsError):
        answered(asked)


@pytest.mark.parametrize("text", ["8081", "localhost", "localhost:x", ":8081", "::1:8081", "a:70000"])
def test_a_place_is_a_host_and_a_port(text):
    with pytest.raises(ValueError, match="a place is HOST:PORT"):
        Place.of(text)


@pytest.mark.parametrize(
    ("text", "scheme"), [("127.0.0.1:1", "IPv4"), ("[::1]:1", "IPv6"), ("broker:1", "DOMAIN_NAME")]
)
def test_a_place_is_told_by_its_kind_of_address(text, scheme):
    place = Place.of(text)

    assert (str(place), place.endpoints().scheme) == (text, numbers("AddressScheme")[scheme])


@pytest.mark.parametrize(("options", "text"), [
    ({"listen": "0.0.0.0:8081", "topics": {}}, "no client can connect to 0.0.0.0:8081"),
    ({"topics": {"a b": "NORMAL"}}, "contains illegal characters"),
    ({"topics": {"a": "normal"}}, "is one of NORMAL, FIFO, DELAY, TRANSACTION, not 'normal'"),
])  # fmt: skip
def test_a_mistake_in_an_option_of_a_front_is_said_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        Front(Outbox(create_engine("sqlite://")), **options)

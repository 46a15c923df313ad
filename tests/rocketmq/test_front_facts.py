"""What RocketMQ's front does beside the recorded probes: repetitions, clients without a name, streams that end."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from sqlalchemy import text

from outbox import Outbox
from outbox.rocketmq.front.protocol import RPCS, numbers
from tests.rocketmq.front_probes import TOPICS, Wire, fact, message
from tests.rocketmq.fronts import listening

OK = {"code": "OK", "number": 20000, "text": "OK"}


@pytest.fixture
def wire(outbox: Outbox) -> Iterator[Wire]:
    """A client by hand of a front that knows the topics of the recorded requests."""
    with listening(outbox, topics=TOPICS) as front:
        made = Wire(front)
        yield made
        made.close()


def test_a_message_or_a_half_message_that_is_sent_again_is_delivered_once(wire, outbox):
    normal, half = message("normal", b"again"), message("tx", b"again", "TRANSACTION")
    id = half.system_properties.message_id

    answers = [fact(wire.call("SendMessage", messages=[each])) for each in (normal, normal, half, half)]
    wire.call(
        "EndTransaction", topic=half.topic, transaction_id=id, resolution=numbers("TransactionResolution")["COMMIT"]
    )
    answers.append(fact(wire.call("SendMessage", messages=[half])))

    with outbox.engine.connect() as connection:
        rows = connection.execute(text("SELECT topic FROM outbox_message WHERE topic LIKE 'oracle%' ORDER BY topic"))
        assert (answers, [topic for (topic,) in rows]) == ([OK] * 5, ["oracle_normal", "oracle_tx"])


def test_a_client_says_who_it_is(wire, outbox):
    with listening(outbox, topics=TOPICS) as front:
        nobody = Wire(front, client=None)
        requests: dict[str, Any] = {name: {} for name in ("QueryRoute", "SendMessage", "EndTransaction", "Heartbeat")}

        answers = {name: fact(nobody.call(name, **fields)) for name, fields in requests.items()}
        streamed = [fact(each) for each in nobody.telemetry(iter([RPCS["Telemetry"].request()]))]

        nobody.close()
    refused = {"code": "CLIENT_ID_REQUIRED", "number": 40017, "text": "client id cannot be empty"}
    assert (answers, streamed) == (dict.fromkeys(requests, refused), [refused])


def test_a_heartbeat_of_a_client_without_settings_is_refused(wire):
    assert fact(wire.call("Heartbeat"))["number"] == 40015


def test_a_call_that_is_out_is_unimplemented(wire):
    with pytest.raises(grpc.RpcError) as refused:
        wire.call("SyncLiteSubscription")

    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_stream_ends_when_the_client_has_closed_its_half(wire):
    command = RPCS["Telemetry"].request()
    command.settings.client_type = numbers("ClientType")["PRODUCER"]
    command.settings.publishing.topics.add(name="oracle_normal")

    heard = list(wire.telemetry(iter([command])))

    assert [(each.status.code, each.settings.publishing.max_body_size) for each in heard] == [(20000, 4194304)]


def test_a_stream_with_settings_of_no_client_ends_with_an_error(wire):
    command = RPCS["Telemetry"].request()
    command.settings.SetInParent()

    with pytest.raises(grpc.RpcError) as refused:
        list(wire.telemetry(iter([command])))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

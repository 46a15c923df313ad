"""A front in a process of its own, which is asked to end while calls of the database hang."""

import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from outbox import Outbox, create_engine
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.protocol import RPCS, SERVICE
from tests.rocketmq.front_probes import message
from tests.rocketmq.fronts import TOPICS
from tests.support.programs import Program
from tests.support.waiting import eventually


def serve(url: str, place: str) -> None:
    """Serve until a signal, and tell where."""
    front = Front(Outbox(create_engine(url)), listen="127.0.0.1:0", topics=TOPICS)

    def tell() -> None:
        assert eventually(lambda: front.listening)
        Path(place).write_text(str(front.listening))

    threading.Thread(target=tell).start()
    front.run()


@pytest.mark.timed("a front ends within ten seconds")
def test_a_front_whose_calls_hang_ends_within_ten_seconds_and_answers_those_that_wait_at_once(engine, outbox, tmp_path):
    url, place = engine.url.render_as_string(hide_password=False), tmp_path / "place"
    answers, ends = dict[str, Any](), dict[str, float]()
    with (
        Program(["-c", f"from tests.rocketmq.test_front_stop import serve; serve({url!r}, {str(place)!r})"]) as program,
        closing(engine.raw_connection()) as other,
    ):
        assert eventually(lambda: place.exists() and place.read_text())
        channel = grpc.insecure_channel(place.read_text())

        def call(name: str, request: Any) -> None:
            rpc, metadata = RPCS[name], (("x-mq-client-id", name),)
            make = channel.unary_stream if rpc.streams_out else channel.unary_unary
            asked = make(f"/{SERVICE}/{name}", rpc.request.SerializeToString, rpc.response.FromString)
            try:
                answer = asked(request, metadata=metadata, timeout=300)
                answers[name] = (next(answer) if rpc.streams_out else answer).status.code
            except grpc.RpcError as error:
                answers[name] = error.code()
            ends[name] = time.monotonic()

        receive = RPCS["ReceiveMessage"].request(
            batch_size=1, long_polling_timeout={"seconds": 60}, invisible_duration={"seconds": 60}
        )
        receive.group.name, receive.message_queue.topic.name = "billing", "orders"
        send = RPCS["SendMessage"].request(messages=[message("=paid", type_="TRANSACTION")])
        threads = [
            threading.Thread(target=call, args=each) for each in (("ReceiveMessage", receive), ("SendMessage", send))
        ]
        threads[0].start()
        assert eventually(lambda: any(each.name == "billing|orders" for each in outbox.admin.subscriptions()))
        lock = "BEGIN IMMEDIATE" if engine.dialect.name == "sqlite" else "LOCK TABLE outbox_message IN EXCLUSIVE MODE"
        other.cursor().execute(lock)
        threads[1].start()
        call("QueryRoute", RPCS["QueryRoute"].request(topic={"name": "orders"}))  # comes after the call that hangs
        asked = time.monotonic()
        program.send_signal(signal.SIGTERM)
        code = program.wait(60)
        took = time.monotonic() - asked
        for each in threads:
            each.join()
        channel.close()
    assert (code, answers) == (
        0,
        {"QueryRoute": 20000, "ReceiveMessage": 40401, "SendMessage": grpc.StatusCode.UNAVAILABLE},
    )
    assert ends["ReceiveMessage"] - asked < 2 < took < 10

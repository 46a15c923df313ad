"""A message carries the trace of whoever wrote it; and nothing of it is noticed without OpenTelemetry."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry.context import attach, detach
from opentelemetry.propagators.textmap import TextMapPropagator, default_setter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from outbox import Message, Outbox
from outbox.model.message import traced
from outbox.model.trace_context import trace_headers
from tests.support.readers import delivered

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def remote() -> Iterator[None]:
    """Within a request that arrived with a trace of somebody else."""
    context = SpanContext(
        trace_id=0x0AF7651916CD43DD8448EB211C80319C,
        span_id=0xB7AD6B7169203331,
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState([("vendor", "a"), ("other", "b")]),
    )
    with trace.use_span(NonRecordingSpan(context)):
        yield


@pytest.mark.usefixtures("remote")
def test_the_current_span_is_what_a_message_carries():
    assert trace_headers("orders") == {"traceparent": PARENT, "tracestate": "vendor=a,other=b"}


def test_a_span_of_the_sdk_is_carried_by_its_ids():
    with TracerProvider().get_tracer("shop").start_as_current_span("place order") as span:
        context = span.get_span_context()

        ids = f"{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert trace_headers("orders") == {"traceparent": f"00-{ids}"}


def test_without_a_span_there_is_nothing_to_carry():
    assert trace_headers("orders") == {}


def test_without_opentelemetry_it_is_not_loaded():
    script = """
import sys
from outbox.model.trace_context import trace_headers
assert trace_headers("orders") == {}
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert run.stdout.strip() == "[]"


def test_a_trace_that_cannot_be_captured_costs_no_message(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a context that is no context")

    monkeypatch.setattr("opentelemetry.trace.propagation.tracecontext.TraceContextTextMapPropagator.inject", broken)

    assert trace_headers("orders") == {}


def test_a_trace_travels_beside_the_headers_of_the_user():
    message = Message("orders", b"", headers={"to": "ann"})

    stored = message.headers_json_with({"traceparent": PARENT, "tracestate": "a=b"})

    assert json.loads(stored or "") == {"to": "ann", "traceparent": PARENT, "tracestate": "a=b"}
    assert message.headers == {"to": "ann"}


def test_a_message_without_headers_gets_those_of_the_trace():
    assert json.loads(Message("orders", b"").headers_json_with({"traceparent": PARENT}) or "") == {
        "traceparent": PARENT
    }


@pytest.mark.parametrize("headers", [None, {"to": "ann"}])
def test_without_a_trace_the_headers_stay_as_they_are(headers):
    message = Message("orders", b"", headers=headers)

    assert message.headers_json_with({}) == message.headers_json


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACESTATE"])
def test_a_trace_of_the_user_wins_as_a_whole(name):
    """A state of one trace beside the parent of another would mean nothing."""
    message = Message("orders", b"", headers={name: "mine"})

    assert message.headers_json_with({"traceparent": PARENT, "tracestate": "a=b"}) == message.headers_json


@pytest.mark.parametrize(
    ("headers", "added"),
    [
        ({f"h{n}": "v" for n in range(158)}, ["traceparent", "tracestate"]),
        ({f"h{n}": "v" for n in range(159)}, ["traceparent"]),
        ({f"h{n}": "v" for n in range(160)}, []),
        ({"a": "x" * (32 * 1024 - 70)}, ["traceparent"]),
        ({"a": "x" * (32 * 1024 - 1)}, []),
    ],
    ids=["room for both", "room for one", "full", "bytes for one", "no bytes left"],
)
def test_a_trace_never_makes_a_message_too_large(headers, added):
    """What a consumer gets must be a message that could have been written; the parent matters more than the state."""
    message = Message("orders", b"", headers=headers)

    stored = json.loads(message.headers_json_with({"traceparent": PARENT, "tracestate": "a=b"}) or "")

    assert list(stored) == [*headers, *added]
    assert Message("orders", b"", headers=stored).headers == stored


@pytest.mark.usefixtures("remote")
def test_whoever_gets_a_message_gets_the_trace_of_its_writer(engine):
    outbox = Outbox(engine)

    with outbox.begin() as session:
        outbox.send(session, "orders", b"1", headers={"to": "ann"})
        outbox.send_all(session, [Message("orders", b"2"), Message("orders", b"3", headers={"traceparent": "mine"})])

    trace = {"traceparent": PARENT, "tracestate": "vendor=a,other=b"}
    assert [message.headers for message in delivered(outbox.database)] == [
        {"to": "ann", **trace},
        trace,
        {"traceparent": "mine"},
    ]


# Baggage, and other propagators


@pytest.fixture
def tenant() -> Iterator[None]:
    """Within a context that has baggage."""
    token = attach(baggage.set_baggage("tenant", "a b"))
    yield
    detach(token)


@pytest.mark.usefixtures("tenant")
def test_baggage_is_carried_without_a_span():
    assert trace_headers("orders") == {"baggage": "tenant=a+b"}


@pytest.mark.usefixtures("remote", "tenant")
def test_baggage_is_carried_beside_a_trace():
    assert trace_headers("orders") == {
        "traceparent": PARENT, "tracestate": "vendor=a,other=b", "baggage": "tenant=a+b",
    }  # fmt: skip


def test_the_propagators_of_the_process_write_the_headers(monkeypatch):
    class Single(TextMapPropagator):
        fields = {"b3"}

        def extract(self, carrier, context=None, getter=None):
            raise NotImplementedError

        def inject(self, carrier, context=None, setter=default_setter):
            setter.set(carrier, "b3", "80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1")

    monkeypatch.setattr(propagate, "get_global_textmap", Single)

    assert trace_headers("orders") == {"b3": "80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1"}


@pytest.mark.parametrize("odd", [{"a b": "c"}, {"content-type": "c"}, {"b3": " c"}], ids=["name", "reserved", "value"])
def test_headers_of_a_propagator_that_no_message_may_have_are_left_out(odd):
    assert traced({"to": "ann"}, {**odd, "baggage": "tenant=a"}) == {"to": "ann", "baggage": "tenant=a"}


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({"Baggage": "mine"}, ["traceparent", "tracestate"]),
        ({"traceparent": "mine"}, ["baggage"]),
        ({"B3": "mine"}, ["traceparent", "tracestate", "baggage"]),
    ],
    ids=["baggage", "trace", "another form"],
)
def test_a_users_own_baggage_stays_as_a_users_own_trace_does(own, added):
    stored = traced(own, {"traceparent": PARENT, "tracestate": "a=b", "baggage": "tenant=a"})

    assert list(stored) == [*own, *added]


def test_a_trace_in_another_form_is_not_added_beside_a_users_own():
    assert traced({"traceparent": "mine"}, {"b3": "0"}) == {"traceparent": "mine"}


def test_baggage_without_room_is_left_out():
    headers = {f"h{n}": "v" for n in range(159)}

    assert list(traced(headers, {"traceparent": PARENT, "baggage": "tenant=a"})) == [*headers, "traceparent"]

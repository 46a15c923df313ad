"""RocketMQ's front answers each recorded probe as a real RocketMQ 5.5.0 does, but for a written list of differences."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from time import time
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import CheckPolicy
from tests.rocketmq.front_probes import TOPICS, ended, fact, facts, message, routed, sent, without_ours
from tests.rocketmq.front_stage import Stage, named, shown
from tests.rocketmq.fronts import consuming, listening, producing
from tests.support.waiting import eventually

_QUEUE = "a topic has one queue"
_AGAIN = "the same verdict again is OK; the real server forgets a transaction after one answer"
_FIRST_VERDICT = "the first verdict stands; the real server delivers after a rollback, or once more after a commit"
_COUNTED = "TRANSACTION_CHECK_TIMES counts questions that a producer was asked"
_HANDLE = "a receipt handle stays the same when its time is changed"
_JAVA = "the text of a Java exception is not copied"
_DECIMAL = "a number as text is compared as a decimal; the real server compares whole numbers only"
_STRICT = "what is no condition is refused; the real server ignores a text behind a condition, or finds nothing"
_LATE = "a transaction that was given up waits for its verdict; the real server has lost it"

#: The probes that are answered otherwise, each with the reason.
DIFFERENT = {
    "route oracle_normal": _QUEUE,
    "tx commit twice": _AGAIN,
    "tx rollback twice": _AGAIN,
    "tx resolution unspecified, then commit": "UNSPECIFIED changes nothing; the real server forgets the transaction",
    "tx same id sent twice, two commits": "one delivery; the real server delivers twice",
    "tx half with delivery time +3 s, commit": "it is delivered at its time; the real server loses it",
    "check producer commits after first UNKNOWN check": "nobody is asked about a decided transaction",
    "check producer commits after check COMMIT": _FIRST_VERDICT,
    "check producer commits after check ROLLBACK": _FIRST_VERDICT,
    "check recovery duration 5 s": _COUNTED,
    "check recovery duration 5 s, committed after 3.5 s": _FIRST_VERDICT,
    "check sender gone, other producer of the topic": _COUNTED,
    "slow commit 45 s after the half send": _LATE,
    "slow deliveries": _LATE,
    "fifo orderly group: after group b became visible again": "delivery_attempt counts in order, too",
    "ack garbage handle": _JAVA,
    "ack empty handle": _JAVA,
    "ack receive with batch -1": _JAVA,
    "ack change invisible 20 s": _HANDLE,
    "ack change invisible 0 s": _HANDLE,
    "client commit twice": _AGAIN,
    "client receive with a group the server does not know": "a group is made at its first receive",
    **dict.fromkeys([f"filter SQL {each!r}" for each in (
        "a > 1", "a >= 10", "a <> 1", "NOT (a = 1)", "a NOT BETWEEN 1 AND 5", "a > 1 AND s IS NULL",
        "a > 1 OR TAGS = 'B'", "-1 < a", "a > 0.0", "a > 99999999999999999999",
    )], _DECIMAL),
    **dict.fromkeys([f"filter SQL {each!r}" for each in (
        "a = 1 garbage", "a + 1 > 3", "a LIKE 'x%'", "lower(a) = 'x'", "x-y = 1", "a = 1)",
    )], _STRICT),
    "filter SQL 'TRUE = b'": "TRUE is equal to itself on either side",
}  # fmt: skip

#: The answers by probe.
Found = dict[str, dict[str, Any]]
#: Producers are asked at once, and again when time passes; in one section again and again.
ONCE = CheckPolicy(transaction_timeout=timedelta(0))
AGAIN = CheckPolicy(transaction_timeout=timedelta(0), check_interval=timedelta(milliseconds=1))
UNKNOWN = ("TRANSACTION_RESOLUTION_UNSPECIFIED",)


def route(stage: Stage) -> Found:
    """Ask where topics are."""
    found: Found = {}
    for name, topic in routed().items():
        answer = stage.wire.call("QueryRoute", topic={"name": topic})
        found[name] = fact(answer)
        for queue in answer.message_queues[:1]:
            found[name] |= {
                "queues": len(answer.message_queues),
                "accept": [named("MessageType", each) for each in queue.accept_message_types],
                "permission": named("Permission", queue.permission),
            }
    return found


def send(stage: Stage) -> Found:
    """Send what is taken, and what is refused."""
    found: Found = {}
    answer = stage.wire.call("SendMessage", messages=[plain := message("normal", b"plain", tag="t", keys=["k"])])
    (entry,) = answer.entries
    found["normal"] = fact(answer) | {
        "message_id": "as sent" if entry.message_id == plain.system_properties.message_id else "other",
        "transaction_id": "equals message id" if entry.transaction_id == entry.message_id else "other",
        "recall_handle": bool(entry.recall_handle),
    }
    for name, messages in sent():
        found[name] = stage.send(*messages)
    return found


def tx(stage: Stage) -> Found:
    """End transactions; a producer that comes then is asked about none of them, but about those that nobody ends."""
    found: Found = {}
    answers, halves = dict[str, list[Any]](), dict[str, Any]()
    for label, verdicts, fields in ended():
        if "mid" in fields:
            stage.half("tx", label, **fields)
        halves[label] = stage.half("tx", label, **fields)
        answers[label] = [stage.end(halves[label], verdict, **changed) for verdict, changed in verdicts]
    others = ["tx with delivery time", "tx with group"]
    with stage.producer("tx", {}) as producer, stage.producer("tx1", {}) as other:
        for label in others:
            stage.half("tx1", label)
        assert eventually(lambda: all(map(other.has_answered, others)))
    got = stage.comes("g", "tx", b"half with delivery time +3 s, commit")
    delivered = Counter(each.body.decode() for each in got)
    (committed,) = [each for each in got if each.body == b"commit"]
    found["committed message as consumed"] = shown(committed, halves["commit"])
    for label, each in answers.items():
        found[label] = {"answers": each, "deliveries": delivered.pop(label, 0), "checks": producer.times(label)}
    checked = sorted({each.body.decode() for each in producer.asked + other.asked} - answers.keys())
    found["deliveries of other probes"] = {"labels": dict(delivered), "checked": checked}
    receipt = stage.wire.call("SendMessage", messages=[message("tx", type_="TRANSACTION")]).entries[0]
    is_id = receipt.transaction_id == receipt.message_id
    found["half receipt"] = {"transaction_id": "equals message id" if is_id else "other"}
    return found


def check(stage: Stage) -> Found:
    """Ask a producer about open transactions, by the answers that it gives."""
    found: Found = {}
    plan = {
        "answer COMMIT": ["COMMIT"],
        "answer ROLLBACK": ["ROLLBACK"],
        "answer UNKNOWN twice then COMMIT": [*UNKNOWN, *UNKNOWN, "COMMIT"],
        "checker raises once then COMMIT": ["SILENCE", "COMMIT"],
        "producer commits after first UNKNOWN check": UNKNOWN,
        "producer commits after check COMMIT": ["COMMIT"],
        "producer commits after check ROLLBACK": ["ROLLBACK"],
        "recovery duration 5 s": ["COMMIT"],
        "recovery duration 5 s, committed at once": ["COMMIT"],
        "recovery duration 5 s, committed after 3.5 s": ["COMMIT"],
    }
    answers: dict[str, dict[str, Any] | None] = dict.fromkeys(plan)
    halves: dict[str, Any] = {}
    with stage.producer("chk", plan) as producer:
        for label in plan:
            is_late = label.startswith("recovery")
            fields: dict[str, Any] = {"orphaned_transaction_recovery_duration": 5} if is_late else {}
            halves[label] = stage.half("chk", label, **fields, props={"p": "v"} if label == "answer COMMIT" else {})
            if "commit" in label:
                assert is_late or eventually(partial(producer.has_answered, label))
                answers[label] = stage.end(halves[label])
        # The open transactions: that of the recovery duration, and those without a verdict in the first answers.
        for questions in ([0, 1, 1], [2], []):
            assert eventually(partial(stage.has_questions, questions))
            stage.let_time_pass()
    got = stage.drain("g", "chk")
    for label, answer in answers.items():
        checks, mine = producer.times(label), [each for each in got if each.body.decode() == label]
        found[label] = {
            "answers": answer,
            "checks": checks if checks < 4 else "4 or more",
            "check_times": [each.user_properties.get("TRANSACTION_CHECK_TIMES") for each in mine],
            "deliveries": len(mine),
        }
    asked, committed = (next(each for each in some if each.body == b"answer COMMIT") for some in (producer.asked, got))
    found["delivered after COMMIT answer"] = shown(committed, halves["answer COMMIT"])
    found["message as the checker sees it"] = as_asked(asked, halves["answer COMMIT"])
    found["sender gone, other producer of the topic"] = sender_gone(stage)
    return found


def as_asked(asked: Any, half: Any) -> dict[str, Any]:
    """A message of a question, as a checker sees it."""
    view = shown(asked, half)
    own = ("message_id", "tag", "keys", "delivery_attempt", "born_host", "born_timestamp", "message_type")
    return (
        {name: view[name] for name in ("topic", "body", "user")}
        | {name: view["system"][name] for name in own}
        | {"receipt_handle": "receipt_handle" in view["system"]}
    )


def sender_gone(stage: Stage) -> dict[str, Any]:
    """Ask another producer than the one that has sent the half message and is gone."""
    with stage.producer("chk2", {}) as gone:
        pass
    answer = stage.send(message("chk2", b"sender gone", "TRANSACTION"))
    with stage.producer("chk2", {"sender gone": ["COMMIT"]}) as other:
        got = stage.comes("g", "chk2", b"sender gone")
    times = got[0].user_properties.get("TRANSACTION_CHECK_TIMES")
    return {
        "send": answer, "first_asked": len(gone.asked), "other_asked": bool(other.asked), "deliveries": len(got),
        "check_times": "1" if times == "1" else "more than 1",
    }  # fmt: skip


def slow(stage: Stage) -> Found:
    """Ask a producer that never knows, until the transactions are given up."""
    found: Found = {}
    labels = ["never", "late commit"]
    with stage.producer("chk", dict.fromkeys(labels, UNKNOWN)) as producer:
        halves = [stage.half("chk", label) for label in labels]
        assert eventually(lambda: stage.has_questions([15, 15], given_up=True) and producer.times("never") >= 15)
        checks = producer.times("never")
        answer = stage.end(halves[1])
        bodies = Counter(each.body.decode() for each in stage.drain("g", "chk"))
    found["checker always UNKNOWN, 45 s"] = {
        "checks": checks,
        "still_asked_in_last_20_s": producer.times("never") > checks,
    }
    found["commit 45 s after the half send"] = answer
    found["deliveries"] = {label: bodies[label] for label in labels}
    return found


def order(stage: Stage) -> Found:
    """Receive in the order of the commits."""
    found: Found = {}
    for name, labels, verdicts, batch in (
        ("one queue, sent A B C, committed C A B, batch 1", "ABC", "CAB", 1),
        ("one queue, sent A..H, committed H..A, batch 16", "ABCDEFGH", "HGFEDCBA", 16),
    ):
        halves = {label: stage.half("tx1", label) for label in labels}
        for label in verdicts:
            stage.end(halves[label])
        found[name] = {"received": [each.body.decode() for each in stage.drain("g", "tx1", batch_size=batch)]}
    return found


def fifo(stage: Stage) -> Found:
    """Receive messages of message groups, in order or not."""
    found: Found = {}
    for group, name in (("oracle_orderly", "orderly group"), ("ordinary", "ordinary group")):
        stage.drain(group, "fifo")
        for number in range(4):
            for key in "ab":
                stage.send(
                    message("fifo", f"o{key}{number}".encode(), "FIFO", message_group=f"group-{key}", keys=["o"])
                )
        first = [each for _ in range(4) for each in stage.receive(group, "fifo", batch_size=2)[1]]
        found[f"{name}: four receives of 2 without ack"] = {
            "got": by_group(first), "attempts": sorted({each.system_properties.delivery_attempt for each in first}),
        }  # fmt: skip
        for each in first:
            if each.system_properties.message_group == "group-a":
                stage.ack(group, each)
        found[f"{name}: after ack of group a only"] = {"got": by_group(stage.drain(group, "fifo"))}
        stage.let_time_pass()
        back = stage.drain(group, "fifo")
        found[f"{name}: after group b became visible again"] = {
            "got": by_group(back),
            "attempts": sorted([each.body.decode()[1:], each.system_properties.delivery_attempt] for each in back),
        }
        found[f"{name}: message as consumed"] = shown(next(each for each in first if each.body == b"ob0"))
    return found


def by_group(messages: list[Any]) -> dict[str, list[str]]:
    """The numbers of messages, by the letter of the message group."""
    bodies = [each.body.decode() for each in messages]
    return {key: [body[2] for body in bodies if body[1] == key] for key in "ab"}


def delay(stage: Stage) -> Found:
    """Send messages for later, and try to take them back."""
    found: Found = {}
    for seconds in ("3.0", "1.5"):
        late = message("delay", b"late", "DELAY", delivery_timestamp=time() + 0.1)
        answer = stage.wire.call("SendMessage", messages=[late])
        got = stage.comes("g", "delay", b"late")
        found[f"{seconds} s"] = {
            "send": fact(answer), "recall_handle": bool(answer.entries[0].recall_handle), "deliveries": len(got),
            "message": shown(got[0], late),
        }  # fmt: skip
    answer = stage.wire.call(
        "SendMessage", messages=[message("delay", b"recalled", "DELAY", delivery_timestamp=time() + 0.1)]
    )
    handles = {"own": answer.entries[0].recall_handle, "garbage": "abc", "empty": ""}
    for name, handle in handles.items():
        recalled = stage.wire.call("RecallMessage", topic={"name": "oracle_delay"}, recall_handle=handle)
        found[f"recall, {name} handle"] = fact(recalled)
    found["message after recall"] = {"deliveries": len(stage.comes("g", "delay", b"recalled"))}
    return found


def filter(stage: Stage) -> Found:
    """Receive what an expression chooses, with a group for each."""
    found: Found = {}
    chosen: list[tuple[str | None, dict[str, str]]] = [
        ("A", {"a": "1", "s": "abc"}), ("B", {"a": "2"}), (None, {"a": "10"}), ("A", {"a": "x", "s": "xyz"}),
        ("Aa", {}), ("BB", {"b": "true"}), ("B", {"a": "5.5", "s": "b"}), ("C", {"a": "3000000000", "b": "false"}),
    ]  # fmt: skip
    for number, (tag, props) in enumerate(chosen):
        stage.send(
            message("filt", f"m{number}".encode(), keys=[f"k{number}"], props=props, **{"tag": tag} if tag else {})
        )
    for number, probe in enumerate(facts("filter")):
        kind, expression = probe.split(" ", 1)
        status, messages = stage.receive(f"g{number}", "filt", eval(expression), kind)
        is_taken = status["code"] in ("OK", "MESSAGE_NOT_FOUND")
        found[probe] = {"matched": sorted(each.body.decode() for each in messages)} if is_taken else {"refused": status}
    return found


def ack(stage: Stage) -> Found:
    """Acknowledge, prolong, and receive with arguments that RocketMQ takes or refuses."""
    found: Found = {}
    for number in range(6):
        stage.send(message("ack", f"a{number}".encode(), tag="t", keys=["k"]))
    _, (first, second, third, fourth, *_) = stage.receive("g", "ack")
    found["normal message as consumed"] = shown(first)
    found["once"] = stage.ack("g", first)
    found["twice"] = stage.ack("g", first)
    found["garbage handle"] = stage.ack("g", second, "abc")
    found["empty handle"] = stage.ack("g", second, "")
    found["by unknown group"] = stage.ack("nobody", second)
    fields: dict[str, dict[str, Any]] = {
        "invisible 5 s": {"invisible_duration": {"seconds": 5}},
        "invisible 13 h": {"invisible_duration": {"seconds": 13 * 3600}},
        "invisible missing": {"invisible_duration": None},
        "batch 0": {"batch_size": 0},
        "batch -1": {"batch_size": -1},
        "batch 100": {"batch_size": 100},
        "unknown group": {"group": {"name": "nobody"}},
        "empty group": {"group": {"name": ""}},
        "illegal group": {"group": {"name": "a b"}},
        "no filter": {"filter_expression": None},
    }
    for name, changed in fields.items():
        status, messages = stage.receive("g", "ack", **changed)
        found[f"receive with {name}"] = status | {"messages": len(messages)}
    for name, seconds in (("20 s", 20), ("13 h", 13 * 3600), ("0 s", 0)):
        handle = third.system_properties.receipt_handle
        answer = stage.wire.call(
            "ChangeInvisibleDuration", group={"name": "g"}, topic=third.topic, receipt_handle=handle,
            invisible_duration={"seconds": seconds},
        )  # fmt: skip
        found[f"change invisible {name}"] = fact(answer) | {"new_handle": answer.receipt_handle not in ("", handle)}
    stage.let_time_pass()
    _, back = stage.receive("g", "ack")
    found["redelivery after invisible time"] = {
        "bodies": sorted(each.body.decode() for each in back),
        "attempts": sorted({each.system_properties.delivery_attempt for each in back}),
    }
    found["with the expired handle"] = stage.ack("g", fourth)
    return found


def client(stage: Stage) -> Found:
    """Use the official client as users do."""
    found: Found = {}
    stage.send(message("normal"))
    official = stage.official
    checker = type("Checker", (official.TransactionChecker,), {"check": lambda _self, _message: None})()
    topics = ("oracle_tx", "oracle_normal", "oracle_delay")
    with producing(official, stage.front, *topics, checker=checker) as producer:
        for name, action in client_actions(stage, producer).items():
            try:
                result = action()
                found[name] = {"ok": True, "result": result if isinstance(result, int) else None}
            except Exception as error:
                text = without_ours(str(error))
                found[name] = {"raised": type(error).__name__, "number": getattr(error, "code", None), "text": text}
    return found


def client_actions(stage: Stage, producer: Any) -> Mapping[str, Callable[[], object]]:
    """What users do with the official client."""
    official = stage.official

    def made(topic: str, body: bytes = b"c", **fields: Any) -> Any:
        found = official.Message()
        found.topic, found.body = topic, body
        for name, value in fields.items():
            setattr(found, name, value)
        return found

    def transaction(*messages: Any, commits: int = 0) -> None:
        begun = producer.begin_transaction()
        for each in messages:
            producer.send(each, begun)
        for _ in range(commits):
            begun.commit()

    def receive() -> int:
        topics = {"oracle_normal": official.FilterExpression()}
        with consuming(official, stage.front, topics, group="oracle_nogroup_client") as consumer:
            return len(consumer.receive(1, 20))

    return {
        "send to unknown topic": lambda: producer.send(made("oracle_nowhere")),
        "send NORMAL to TRANSACTION topic": lambda: producer.send(made("oracle_tx")),
        "send transaction to NORMAL topic": lambda: transaction(made("oracle_normal")),
        "body 4 MiB + 1": lambda: producer.send(made("oracle_normal", b"x" * 4194305)),
        "body empty": lambda: producer.send(made("oracle_normal", b"")),
        "delay 25 h": lambda: producer.send(made("oracle_delay", delivery_timestamp=int(time()) + 90000)),
        "illegal topic name": lambda: made("a b"),
        "tag with |": lambda: made("oracle_normal", tag="a|b"),
        "two messages in one transaction": lambda: transaction(*(made("oracle_tx", keys="two") for _ in range(2))),
        "commit before send": lambda: transaction(commits=1),
        "commit twice": lambda: transaction(made("oracle_tx"), commits=2),
        "receive with a group the server does not know": receive,
        "transaction with message group": lambda: transaction(made("oracle_tx", message_group="g")),
    }


SECTIONS: dict[str, Callable[[Stage], Found]] = {
    play.__name__: play for play in (route, send, tx, check, slow, order, fifo, delay, filter, ack, client)
}


#: These wait for questions, which come by the clock.
_SLOW = ("check", "slow")


@pytest.mark.parametrize(
    "section", [pytest.param(each, marks=pytest.mark.storm if each in _SLOW else ()) for each in SECTIONS]
)
def test_each_probe_is_answered_as_by_a_real_server_unless_a_reason_is_written(
    sqlite_engine: Engine, official: ModuleType, section: str
) -> None:
    outbox = Outbox(sqlite_engine)
    policy = AGAIN if section == "slow" else ONCE
    with listening(outbox, topics=TOPICS, fifo_groups=["oracle_orderly"], policy=policy) as front:
        stage = Stage(front, outbox, official)
        found = SECTIONS[section](stage)
        stage.close()
    outbox.close()

    real = facts(section)
    different = {name.removeprefix(f"{section} ") for name in DIFFERENT if name.startswith(f"{section} ")}
    assert {name: found.get(name) for name in real if name not in different} == {
        name: each for name, each in real.items() if name not in different
    }
    assert [name for name in different if found[name] == real[name]] == []
    assert found.keys() == real.keys()

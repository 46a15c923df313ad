"""What half messages cost: their writer, the relay that passes them, and the checker that finds few among many."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median

from psycopg import sql

from benchmarks.business import versus
from benchmarks.drain import drain
from benchmarks.measure import Measurement, Turns, at_least, at_most
from benchmarks.site import Place, Site
from benchmarks.writers import BODY, co_located, send_one
from outbox import Message, Outbox
from outbox.model.limits import HALF_TOPIC, stored_headers
from outbox.model.message import TRANSACTION_ID
from outbox.model.subscription import check_of
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq import TransactionResolution
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.service import CheckService
from outbox.store.half_messages.half import Half
from outbox.store.subscriptions.subscriptions import Subscriptions

_GROUP = "orders"
_TRANSACTION = "{transaction}"
#: Keys are the ids of transactions, which rise with time.
_FILL = """
    INSERT INTO outbox_message (message_id, topic, key, slot, tags, headers, body, created_at)
    SELECT gen_random_uuid(), {half}, id, i % 256, {group}, replace({headers}, {transaction}, id), {body},
           statement_timestamp() - make_interval(secs => {age})
    FROM generate_series(1, {count}) AS i
    CROSS JOIN LATERAL (SELECT lpad(to_hex(i), 8, '0') || substr(gen_random_uuid()::text, 9) AS id) AS t
"""
#: As the check service does with those that it is to ask about later.
_PARK = """
    INSERT INTO outbox_parked (subscription, id, message_id, topic, key, slot, tags, headers, body, created_at, state,
                               unit, place, attempts, due_at, error, parked_at)
    SELECT {name}, id, message_id, topic, key, slot, tags, headers, body, created_at, 'retry', key, 1, 1,
           statement_timestamp() + interval '1 day' + id * interval '1 millisecond', 'UNKNOWN', statement_timestamp()
    FROM outbox_message WHERE topic = {half} AND tags = {group}
"""
#: Spread over all that are parked.
_LET_FALL_DUE = """
    UPDATE outbox_parked SET due_at = statement_timestamp() WHERE subscription = {name} AND (id - 1) % {every} = 0
"""
_STILL_DUE = "SELECT count(*) FROM outbox_parked WHERE due_at <= statement_timestamp()"

_PATIENCE = 300.0
#: Rows that a check service takes at once.
_ROWS = 200

#: So that what is ahead of the service stays there, and what was asked about is not due again.
_POLICY = CheckPolicy(
    transaction_timeout=timedelta(hours=1),
    check_interval=timedelta(hours=1),
    check_max=1_000_000,
    age_limit=timedelta(days=30),
)


def fill_halves(place: Place, count: int, *, age: timedelta = timedelta(0)) -> None:
    """Append half messages without a verdict, each of a transaction of its own."""
    half = Half(transaction=_TRANSACTION, group=_GROUP, way="listener")
    restored = stored_headers({TRANSACTION_ID: _TRANSACTION})
    statement = sql.SQL(_FILL).format(
        half=sql.Literal(HALF_TOPIC),
        group=sql.Literal(_GROUP),
        headers=sql.Literal(half.headers_of(Message("orders", BODY, key="order-1"), 256, restored)),
        transaction=sql.Literal(_TRANSACTION),
        body=sql.Literal(BODY),
        age=sql.Literal(age.total_seconds()),
        count=sql.Literal(count),
    )
    with place.connect() as connection:
        connection.autocommit = True
        connection.execute(statement)
        connection.execute("VACUUM (ANALYZE) outbox_message")
        connection.execute("CHECKPOINT")


# Writers


def half_vs_send(site: Site) -> list[Measurement]:
    """Transactions a second with a half message that they commit themselves, against one message of `send`."""
    return [versus(site, "half_vs_send", (co_located, send_one), messages=1, goal=at_least(0.4))]


# The relay


def half_pending_relay(site: Site) -> list[Measurement]:
    """Messages a second, with half messages behind the relay that nobody has decided on, against none."""
    count = site.scale.half_drained
    turns = Turns("half_pending_relay")
    with site.place() as beside, site.place() as alone:
        fill_halves(beside, site.scale.halves)
        # The first brings the stored base behind all that is there; until the last, the server has tidied up.
        for place in (beside, alone) * site.scale.business_turns:
            _append_and_drain(place, count)
        for _ in range(site.scale.rounds):
            drained: dict[Place, list[float]] = {beside: [], alone: []}
            for turn in range(site.scale.business_turns):
                # Each is first as often as the other.
                for place in (beside, alone) if turn % 2 else (alone, beside):
                    drained[place].append(_append_and_drain(place, count))
            turns.add(median(drained[beside]), median(drained[alone]))
    return [Measurement(name=turns.name, goal=at_least(0.95), unit="msg/s", ours=turns.ours, other=turns.other)]


def _append_and_drain(place: Place, count: int) -> float:
    """Each place is drained right after it is filled: of two that are filled first, the later one is drained faster."""
    place.fill(count)
    return drain(place, count)


# The checker


def check_pass(site: Site) -> list[Measurement]:
    """Microseconds for each half message that is due, with very many others pending, against few.

    Half of those pending are due later, the others are ahead of the service.
    """
    many, few = site.scale.halves, site.scale.few_halves
    turns = Turns("check_pass")
    with _checks(site, many, few // 2) as large, _checks(site, few, few // 2) as small:
        remark = f"first question after {large.first:.2f} s, against {small.first:.2f} s"
        for _ in range(site.scale.rounds):
            pairs = [(large.microseconds(), small.microseconds()) for _ in range(site.scale.half_turns)]
            turns.add(median(pair[0] for pair in pairs), median(pair[1] for pair in pairs))
    return [
        Measurement(name=turns.name, goal=at_most(1.5), unit="µs", ours=turns.ours, other=turns.other, remark=remark)
    ]


@contextmanager
def _checks(site: Site, pending: int, due: int) -> Iterator[Checks]:
    """A check service at work, with so many half messages pending; all questions of the warm-up are answered."""
    with site.place() as place:
        checks = Checks(place, pending, due)
        try:
            yield checks
        finally:
            checks.close()


class Checks:
    """A check service that is never told anything; some of what is pending falls due again and again."""

    def __init__(self, place: Place, pending: int, due: int) -> None:
        self._place = place
        self._due = due
        self._asked: list[float] = []
        outbox = self._outbox = Outbox(place.engine)
        self._broker = Broker(outbox, connections=1)
        self._set_aside(pending // 2)
        fill_halves(place, pending - pending // 2)
        self._every = pending // 2 // due
        self._service = Supervisor([CheckService.of(self._broker, _GROUP, _POLICY, self._answer)])
        self._let_fall_due()
        started = time.perf_counter()
        self._service.start()
        self._wait()
        #: Seconds from the start of the service to its first question.
        self.first = self._asked[0] - started

    def microseconds(self) -> float:
        """The time for each question of the batches that are full, with all that comes between two batches."""
        self._asked.clear()
        self._let_fall_due()
        self._wait()
        whole = max(1, (self._due - 1) // _ROWS * _ROWS)
        return (self._asked[whole] - self._asked[0]) / whole * 1e6

    def close(self) -> None:
        """End the service."""
        self._service.stop()
        self._service.join()
        self._broker.close()
        self._outbox.close()

    def _set_aside(self, count: int) -> None:
        """Half messages that have been asked about; the service begins behind them."""
        name = check_of(_GROUP)
        fill_halves(self._place, count, age=2 * _POLICY.transaction_timeout)
        channel = self._broker.database.open()
        declaration = declaration_of(_GROUP, _POLICY.transaction_timeout)
        Subscriptions(channel).declare(declaration, "latest")
        channel.close()
        park = sql.SQL(_PARK).format(name=sql.Literal(name), half=sql.Literal(HALF_TOPIC), group=sql.Literal(_GROUP))
        with self._place.connect() as connection:
            connection.autocommit = True
            connection.execute(park)
            connection.execute("VACUUM (ANALYZE) outbox_parked")

    def _let_fall_due(self) -> None:
        statement = sql.SQL(_LET_FALL_DUE).format(name=sql.Literal(check_of(_GROUP)), every=sql.Literal(self._every))
        with self._place.connect() as connection:
            connection.execute(statement)

    def _wait(self) -> None:
        """Until all that is due has been asked about and put off."""
        until = time.monotonic() + _PATIENCE
        with self._place.connect() as connection:
            connection.autocommit = True
            while len(self._asked) < self._due or connection.execute(_STILL_DUE).fetchone() != (0,):
                if time.monotonic() > until:
                    raise RuntimeError(f"{len(self._asked)} questions for {self._due} half messages")
                time.sleep(0.05)

    def _answer(self, _message: Message) -> TransactionResolution:
        self._asked.append(time.perf_counter())
        return TransactionResolution.UNKNOWN

"""`import outbox` is light, and what it offers is a list that is changed on purpose."""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.resources import files

import outbox

#: Distributions that an `import outbox` may load: its three dependencies, and what these load themselves.
LIGHT = {
    "outbox-log",
    "sqlalchemy",
    "psycopg",
    "psycopg-binary",
    "psycopg-c",
    "tenacity",
    "typing-extensions",
    "greenlet",
}

PUBLIC = [
    "Admin", "Consumer", "DatabaseError", "Decided", "Decision", "Destination", "Done", "FilterError", "Finding",
    "HalfTransaction", "HalfVerdict", "HeldKey", "History", "HistoryStep", "HungHandlerError", "Inbox",
    "InvalidMessageError", "KeyDetail", "LeaseLostError", "Limits", "Look", "Message", "MissingExtraError",
    "NoTransactionError", "Outbox", "OutboxError", "ParkedCount", "ParkedDetail", "ParkedMessage", "PartitionStatus",
    "Passage", "PositionError", "Proposal", "Reject", "Relay", "Relays", "Removal", "Resumed", "Retry", "RetryPolicy",
    "Route", "SchemaError", "Sender", "SenderError", "Settings", "SplitResult", "StandbyError", "Status",
    "SubscriptionDetails", "SubscriptionError", "Thresholds", "Tombstone", "Trace", "TransactionAbortedError",
    "TransactionDetail", "TransactionsStatus", "TroubleStatus", "Unavailable", "Verdict", "WorkerStatus",
    "create_async_engine", "create_engine", "routes",
]  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """The modules that a statement loads in a fresh interpreter, without those of Python itself."""
    script = f"""
import json, sys
before = set(sys.modules)
{statement}
loaded = set(sys.modules) - before
print(json.dumps(sorted(name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(run.stdout))


def distributions(modules: set[str]) -> set[str]:
    """The packages that modules come from. What compilers add to a process comes from none."""
    known = packages_distributions()
    tops = {module.partition(".")[0] for module in modules}
    return {each.lower().replace("_", "-") for top in tops for each in known.get(top, [])}


def test_an_import_loads_nothing_but_what_writing_needs():
    """Neither alembic nor click or any destination's driver."""
    assert distributions(loaded_by("import outbox")) <= LIGHT


def test_writing_and_relaying_load_nothing_more():
    statement = """
import datetime, tempfile, outbox
from sqlalchemy import text
with tempfile.TemporaryDirectory() as folder:
    engine = outbox.create_engine(f"sqlite:///{folder}/outbox.sqlite3")
    from outbox import schema
    schema.metadata(dialect="sqlite").create_all(engine)
    box = outbox.Outbox(engine)
    with box.begin() as session:
        box.send(session, "orders", {"id": 1}, key="order-1")
    class Nowhere:
        def send(self, messages): return [outbox.Done() for _ in messages]
        def close(self): pass
    outbox.Relay(box, Nowhere()).until_empty()
    engine.dispose()
"""
    assert distributions(loaded_by(statement)) <= LIGHT


def test_a_writer_loads_no_worker():
    """A third of the time that it takes to import what writes."""
    loaded = loaded_by("from outbox import Message, Outbox, create_engine")

    assert "outbox.writing.transaction" in loaded
    assert [name for name in loaded if name.startswith(("outbox.worker", "outbox.relay"))] == []


def test_a_heavy_import_would_be_seen():
    assert not distributions(loaded_by("import outbox.migrate")) <= LIGHT


def test_the_public_names_are_these():
    assert sorted(outbox.__all__) == PUBLIC
    assert [name for name in PUBLIC if not hasattr(outbox, name)] == []


def test_every_error_is_one_of_the_tree_and_says_what_it_is_for():
    errors = [getattr(outbox, name) for name in PUBLIC if name.endswith("Error")]

    assert all(issubclass(error, outbox.OutboxError) and error.__doc__ for error in errors)
    assert len(errors) == 14


def test_the_package_is_typed():
    """Type checkers of applications look for this file."""
    assert (files("outbox") / "py.typed").is_file()

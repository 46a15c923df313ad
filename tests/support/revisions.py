"""Tables of an earlier revision; and a library that has one more revision of the tables than this one."""

import shutil
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Engine

from outbox import migrate

_NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{head}"


def upgrade() -> None:
    op.create_table("outbox_next", sa.Column("id", sa.Integer, primary_key=True))
"""


def add_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library find a revision `next`, which makes the table `outbox_next`."""
    scripts = folder / "migrations"
    shutil.copytree(migrate._scripts(), scripts)
    (scripts / "versions" / "next.py").write_text(_NEXT.format(head=migrate.head_revision()))
    monkeypatch.setattr(migrate, "_scripts", lambda: scripts)


def make_earlier(engine: Engine, revision: str, schema: str | None = None) -> None:
    """Make the tables of an earlier revision, as the library of that time did."""
    with engine.begin() as connection:
        command.upgrade(migrate._config(connection=connection, schema=schema), revision)
        migrate._write_rows(connection, schema, 256, 1)

"""A library that has one more revision of the tables than this one."""

import shutil
from pathlib import Path

import pytest

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

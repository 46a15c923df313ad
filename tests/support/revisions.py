"""A library that has one more revision of the tables than this one."""

import shutil
from pathlib import Path

import pytest

from outbox import migrate

_NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table("outbox_next", sa.Column("id", sa.Integer, primary_key=True))
"""


def add_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library find a revision 0002, which makes the table `outbox_next`."""
    scripts = folder / "migrations"
    shutil.copytree(migrate._scripts(), scripts)
    (scripts / "versions" / "0002_next.py").write_text(_NEXT)
    monkeypatch.setattr(migrate, "_scripts", lambda: scripts)

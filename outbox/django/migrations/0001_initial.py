"""The tables of the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import migrations

if TYPE_CHECKING:
    from django.apps.registry import Apps
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def upgrade(_apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """Create the tables, or bring them up to date."""
    from outbox.django.databases import url_of
    from outbox.migrate import upgrade as upgrade_tables
    from outbox.writing.engines import create_engine

    engine = create_engine(url_of(editor.connection).render_as_string(hide_password=False))
    upgrade_tables(engine)
    engine.dispose()


class Migration(migrations.Migration):
    """Works on a connection of its own, for which Django must not hold a lock."""

    atomic = False
    initial = True
    operations = [migrations.RunPython(upgrade, migrations.RunPython.noop)]

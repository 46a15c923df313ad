"""What `docs/postgresql.md` says is so; its commands, names and links are tested with those of the README."""

from tests.support.handles import conninfo_of
from tests.support.pages import TOP, run
from tests.support.several import new_database, url_of

PAGE = (TOP / "docs" / "postgresql.md").read_text()


def test_the_code_runs_from_top_to_bottom(postgres, pg_template, sqlite_engine, monkeypatch):
    """One namespace, from an outbox on SQLite to one on PostgreSQL."""
    with new_database(postgres, pg_template) as there:
        monkeypatch.setenv("SHOP_DATABASE", url_of(sqlite_engine))
        monkeypatch.setenv("BILLING_DATABASE", url_of(there))
        monkeypatch.setenv("BILLING_URL", conninfo_of(there.url))

        page = run(PAGE, "docs/postgresql.md")

        for name in ("shop", "billing"):
            page[name].close()
            page[name].engine.dispose()

"""The example for Django, as its README says: its tests, its commands, and a request."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine

pytestmark = pytest.mark.storm

EXAMPLE = Path(__file__).parents[2] / "examples" / "django_shop"
REQUEST = """
from django.test import Client
orders = [{"customer": "ann", "total": 42}, {"customer": "ben", "total": 4200}]
print([Client().post("/orders", order, content_type="application/json").status_code for order in orders])
"""


@pytest.fixture
def manage(engine: Engine, tmp_path: Path):
    """Runs `manage.py` in a copy of the example, on a database without tables of ours."""
    shutil.copytree(EXAMPLE, tmp_path / "django_shop")
    url = engine.url
    home = {"OUTBOX_DATABASE": "", "PGDATABASE": "", "DJANGO_SETTINGS_MODULE": "shop.settings"}
    if url.host:
        home |= {"PGHOST": url.host, "PGPORT": f"{url.port}"}
        home |= {"PGUSER": f"{url.username}", "PGDATABASE": f"{url.database}"}
    environment = {key: value for key, value in (os.environ | home).items() if value}

    def run(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, "manage.py", *arguments], cwd=tmp_path / "django_shop", env=environment,
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout + ended.stderr

    return run


def test_a_request_leaves_its_order_and_its_message(manage):
    assert "Ran 2 tests" in manage("test")
    manage("migrate")
    assert "[201, 409]" in manage("shell", "-c", REQUEST)
    sent = manage("outbox", "relay", "--to", "stdout:", "--until-empty")
    assert sent.count('"orders"') == 1
    assert '"total\\":42' in sent
    assert "Order.objects" not in sent
    manage("outbox", "doctor")
    manage("outbox", "status", "--check")

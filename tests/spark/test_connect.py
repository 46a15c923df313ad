"""Spark Connect: nothing of ours reaches for what only a session inside the server has."""

import json
import os
import subprocess
import sys

import pytest

from outbox import Outbox
from tests.support.programs import ROOT

pytestmark = pytest.mark.jvm


@pytest.mark.timeout(1600)
def test_batches_streams_and_archives_over_connect(spark_home, pg_engine, tmp_path):
    """In a process of its own: a client and an ordinary session do not share one."""
    if "CI" not in os.environ:
        pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect]")
    with pg_engine.begin() as connection:
        for n in range(5):
            Outbox(pg_engine).send(connection, "orders" if n % 2 else "mails", str(n))
    url = pg_engine.url.render_as_string(hide_password=False)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "SPARK_HOME": str(spark_home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": paths}

    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.connect_program", url, str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "read.json").read_text()) == {
        "client": "pyspark.sql.connect.session", "found": 5, "bodies": ["1", "3"], "streamed": 5, "empty": 0,
        "windows": [5, None], "archived": ["0", "1", "2", "3", "4"], "mails": 3,
    }  # fmt: skip

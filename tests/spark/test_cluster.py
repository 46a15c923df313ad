"""A standalone cluster of two workers: the tasks of a read and of an extract run in processes of other machines, which
have nothing of the driver but the network, the disk and their own environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.testing.servers.process import free_port
from tests.spark.conftest import settings
from tests.support.programs import ROOT
from tests.support.waiting import eventually

pytestmark = pytest.mark.jvm

DEPLOY = "org.apache.spark.deploy"


@contextmanager
def daemon(log: Path, home: Path, environment: dict[str, str], *command: str) -> Iterator[Path]:
    """A master or a worker, until the end of the block; yields its log."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            [home / "bin" / "spark-class", *command], cwd=log.parent, env=environment, stdout=said, stderr=said
        )
        try:
            yield log
        finally:
            process.terminate()
            process.wait(120)


def test_two_workers_read_and_extract(spark, spark_home: Path, pg_engine: Engine, tmp_path: Path, full: bool) -> None:
    """The password of the database is in no setting: the executors find it in the environment of the workers."""
    with pg_engine.begin() as connection:
        for n in range(8):
            Outbox(pg_engine).send(connection, "orders", str(n))
    environment = {
        **os.environ, "SPARK_HOME": str(spark_home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1", "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": settings(tmp_path)["spark.driver.extraJavaOptions"],
        "OUTBOX_DATABASE": pg_engine.url.render_as_string(hide_password=False),
    }  # fmt: skip
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    with ExitStack() as cluster:
        options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
        log = cluster.enter_context(
            daemon(tmp_path / "master.log", spark_home, environment, f"{DEPLOY}.master.Master", *options)
        )
        for node in ("one", "two"):
            options = ["--cores", "1", "--memory", "700m", "--webui-port", "0", "--work-dir", str(tmp_path / node)]
            worker = [f"{DEPLOY}.worker.Worker", *options, master]
            cluster.enter_context(daemon(tmp_path / f"{node}.log", spark_home, {**environment, "NODE": node}, *worker))
        assert eventually(lambda: log.read_text().count("Registering worker") == 2, seconds=120)

        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.cluster_program", master, str(tmp_path)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500 if full else 250, check=False,
        )  # fmt: skip

    bodies = [str(n) for n in range(8)]
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "read": bodies, "nodes": ["one", "two"], "window": 8, "archived": bodies,
    }  # fmt: skip

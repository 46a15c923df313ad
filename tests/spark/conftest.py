"""One Spark session a run, started as fast as can be: C1, class data sharing, workers that find their imports made."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark_home() -> Path:
    """A home of Spark's without `pyspark.zip`, out of which workers would compile what they import, each time anew.

    It stays for later runs, because class data is shared only along the same class path.
    """
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        if os.environ.get("CI"):
            pytest.fail("Spark needs Java 17 or newer")
        pytest.skip("Spark needs Java 17 or newer")
    import pyspark

    package = Path(pyspark.__file__).parent
    home = cache() / f"home-{pyspark.__version__}"
    (home / "python" / "lib").mkdir(parents=True, exist_ok=True)
    for each in package.iterdir():
        if each.name != "python":
            with suppress(FileExistsError):  # another worker makes the same home
                (home / each.name).symlink_to(each)
    _leave_class_data(home)
    return home


@pytest.fixture(scope="session")
def spark(spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session of this run. Names of views and tables are each test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(spark_home))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("TZ", "UTC")
        session = _builder(tmp_path_factory.mktemp("spark")).getOrCreate()
        yield session
        session.stop()


def settings(folder: Path, class_data: str = "") -> dict[str, str]:
    """Settings of a small session that starts fast. `class_data`: another option of Java than that to use it."""
    # Java logs to standard output, which belongs to the programs of the tests, unless it is told otherwise.
    log = "-Xlog:disable -Xlog:all=warning:stderr"
    classes = class_data or use_class_data()
    java = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {log} {classes} -Dderby.system.home={folder}"
    return {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "1",
        "spark.default.parallelism": "2",
        "spark.sql.adaptive.enabled": "false",
        # A few rows are read sooner than code for them is compiled.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.python.daemon.module": "tests.spark.worker_daemon",
        "spark.driver.extraJavaOptions": java,
    }


def use_class_data() -> str:
    """Return the option of Java to use the classes that were left. Java ignores what does not fit it."""
    return f"-XX:SharedArchiveFile={cache() / 'classes.jsa'}"


def _leave_class_data(home: Path) -> None:
    """Have one process leave the classes, once in an environment; other workers wait.

    That takes Java longer than some starts without them; so a session with much to do does not leave its own.
    """
    classes, new = cache() / "classes.jsa", cache() / f"{os.getpid()}.jsa"
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not classes.exists():
            environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
            subprocess.run(
                [sys.executable, "-m", "tests.spark.class_data", str(new)], cwd=ROOT, env=environment, check=True
            )
            # Not every Java can leave them.
            if new.exists():
                new.rename(classes)


def cache() -> Path:
    """A folder for what makes a start fast, of this user, this environment and this Java."""
    installed = f"{sys.prefix} {os.path.realpath(shutil.which('java') or '')} {os.environ.get('JAVA_HOME')}"
    name = blake2b(installed.encode(), digest_size=8).hexdigest()
    # Not where TMPDIR says: that may be memory.
    folder = Path("/tmp") / f"outbox-spark-{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _builder(folder: Path) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in settings(folder).items():
        builder = builder.config(name, value)
    return builder

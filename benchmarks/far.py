"""A network of some milliseconds: a proxy, in a process of its own, that passes bytes on after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from benchmarks.site import PROCESSES

#: Bytes that are on their way in one direction of a connection, at most: far more than fit into a few milliseconds.
_ON_THE_WAY = 16 * 1024 * 1024
_AT_ONCE = 256 * 1024


@contextmanager
def far(port: int, seconds: float, *, own_port: int = 0) -> Iterator[int]:
    """Return the port of a way to `port` on which everything takes half of `seconds`, there and back."""
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_run, args=(there, port, own_port, seconds / 2), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


def _run(ready: Connection, port: int, own_port: int, seconds: float) -> None:
    asyncio.run(_serve(ready, port, own_port, seconds))


async def _serve(ready: Connection, port: int, own_port: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_client = await asyncio.open_connection("127.0.0.1", port, limit=_AT_ONCE)
        with suppress(ConnectionError):
            await asyncio.gather(_pass_on(reader, from_client, seconds), _pass_on(to_server, writer, seconds))

    server = await asyncio.start_server(connected, "127.0.0.1", own_port, limit=_AT_ONCE)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Pass bytes on, each after the same time; what comes meanwhile waits for nothing else."""
    loop, on_the_way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](_ON_THE_WAY // _AT_ONCE)

    async def arrive() -> None:
        while True:
            moment, data = await on_the_way.get()
            await asyncio.sleep(moment - loop.time())
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.close()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(arrive())
        while True:
            data = await reader.read(_AT_ONCE)
            await on_the_way.put((loop.time() + seconds, data))
            if not data:
                break

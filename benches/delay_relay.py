"""A relay of TCP connections on which every byte takes so much longer: the kernel here may have no netem."""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Writes what is read, each piece `seconds` after it came; pieces overlap, so that the rate stays what it was."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

    async def write() -> None:
        while True:
            due, piece = await waiting.get()
            await asyncio.sleep(max(due - loop.time(), 0))
            if not piece:
                break
            writer.write(piece)
            await writer.drain()
        writer.close()

    writing = asyncio.create_task(write())
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(64 << 10):
            await waiting.put((loop.time() + seconds, piece))
    await waiting.put((loop.time() + seconds, b""))
    with contextlib.suppress(ConnectionError):
        await writing


async def main(listen: str, target: str, port: int, seconds: float) -> None:
    """Relays connections to `listen` at `port` to `target` until it is killed."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(target, port)
        await asyncio.gather(carry(reader, there_writer, seconds), carry(there_reader, writer, seconds))

    server = await asyncio.start_server(relay, listen, port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))

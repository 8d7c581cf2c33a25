"""A client that GETs one message at a steady rate and prints its waits: `… PORT PID MESSAGE_ID RATE`.

A request is sent when it is due, whether the ones before it are answered or not, so a node that stops
for a second is charged with every request that was due meanwhile. The client is a process of its own
and imports little: it runs beside loads that leave it little of the processor. It ends with its
standard input, and then prints two lists as JSON, in milliseconds: its waits, and the CPU time of the
node's event loop meanwhile (thread PID of process PID; 0 if it is gone). The second list is what the
node itself does to its readers, however busy the machine is with other things.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

OWN_ADDRESS = ("127.1.0.1", 0)
"""None of those that the participants of a load have."""

CONNECTIONS_MAX = 100
"""More requests without an answer wait for a connection, and their time counts from when they were due."""

ANSWER_S_MAX = 60.0

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Client:
    def __init__(self, port: int, process_id: int, message_id: str) -> None:
        self.waits_ms: list[float] = []
        self.busy_ms: list[float] = []
        self._port = port
        self._clock = Path(f"/proc/{process_id}/schedstat")
        self._request = (
            f"GET /v1/messages/{message_id} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        )
        self._idle: list[_Streams] = []
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)

    async def read(self) -> None:
        """One request. If its connection breaks, it is repeated and its time goes on."""
        due_s, busy_ns = time.monotonic(), self._busy_ns()
        async with self._places, asyncio.timeout(ANSWER_S_MAX):
            while True:
                try:
                    streams = self._idle.pop() if self._idle else await self._connected()
                    await self._exchange(*streams)
                except (OSError, EOFError):
                    await asyncio.sleep(0.01)
                    continue
                self._idle.append(streams)
                break
        self.waits_ms.append((time.monotonic() - due_s) * 1e3)
        self.busy_ms.append(max(0, self._busy_ns() - busy_ns) / 1e6)

    def _busy_ns(self) -> int:
        try:
            return int(self._clock.read_text().split()[0])
        except OSError:
            return 0

    async def _connected(self) -> _Streams:
        return await asyncio.open_connection("127.0.0.1", self._port, local_addr=OWN_ADDRESS)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        if not head.startswith(b"http/1.1 200 "):
            raise SystemExit(head.decode("latin-1"))


async def _main(port: int, process_id: int, message_id: str, per_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    client = _Client(port, process_id, message_id)
    tasks = []
    due_s = time.monotonic()
    while not ended.done():
        tasks.append(asyncio.create_task(client.read()))
        due_s += 1 / per_s
        await asyncio.wait([ended], timeout=max(0.0, due_s - time.monotonic()))
    await asyncio.gather(*tasks)
    sys.stdout.write(json.dumps([client.waits_ms, client.busy_ms]))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))

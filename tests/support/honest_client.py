"""A client that reads and publishes and prints how long the node let it wait.

It is a script that imports nothing but the codec: it starts several times in each attack, beside
attackers that leave it little of the processor.
"""

from __future__ import annotations

import json
import socket
import sys
import time

from sdstore.sds.codec import encode
from sdstore.sds.model import Message

PUBLISH = (
    "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-protobuf\r\n"
)


def _exchange(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    answer = connection.recv(65_536)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65_536)
    return answer


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[max(0, int(len(seconds) * 0.99) - 1)]


def _main(port: int, known_id: str, window_s: float, window_count: int) -> None:
    get = f"GET /v1/messages/{known_id} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    gets, publishes = [], []
    number = 0
    for _ in range(window_count):
        get_s: list[float] = []
        publish_s: list[float] = []
        ends_s = time.monotonic() + window_s
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            while time.monotonic() < ends_s or len(publish_s) < 3:
                for _ in range(5):
                    started_s = time.monotonic()
                    assert _exchange(connection, get).startswith(b"HTTP/1.1 200")
                    get_s.append(time.monotonic() - started_s)
                    time.sleep(0.002)
                number += 1
                message_id = f"{time.time_ns()} {number}"
                frame = encode(Message(message_id, "honest", lamport_timestamp=1, content=b"hi"))
                started_s = time.monotonic()
                answer = _exchange(
                    connection, f"{PUBLISH}content-length: {len(frame)}\r\n\r\n".encode() + frame
                )
                assert answer.startswith(b"HTTP/1.1 201"), answer
                publish_s.append(time.monotonic() - started_s)
        gets.append(_p99(get_s))
        publishes.append(_p99(publish_s))
    sys.stdout.write(json.dumps([gets, publishes]))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))

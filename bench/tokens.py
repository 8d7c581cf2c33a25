"""What a token adds to a GET by ID: `python -m bench.tokens [--quick]`.

CPU time of a node with SQLite, from the kernel in nanoseconds. One client on one connection asks for
the same messages in each way of `WAYS`. The ways take turns of a few requests in random order, because
machines drift; a ratio is the median of those to the turn without a token beside it. The first two ways are
equal: their ratio is the noise.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from urllib.parse import urlsplit

from app.access.tokens import TOKENS_FILE, TokenFile
from bench.frame_workloads import small_frames
from bench.http import CHANNELS, FORMS, Row, Sampled
from bench.http_load import request
from bench.http_servers import Served, serving
from bench.loading import load
from bench.scratch import in_scratch
from bench.table import publish

MESSAGES = 10_000
REQUESTS_PER_TURN = 20
TURNS, QUICK_TURNS = 1_500, 50
WARM_UP_TURNS = 50
ANSWER_BYTES_MAX = 65_536

WITHOUT, AGAIN, OTHER_HEADER, TOKEN = (
    "no token",
    "no token, again",
    "no token, another header as long",
    "token",
)
WAYS = (WITHOUT, AGAIN, OTHER_HEADER, TOKEN)


def main() -> None:
    """Measure and print."""
    turns = QUICK_TURNS if "--quick" in sys.argv else TURNS
    with tempfile.TemporaryDirectory(prefix="sdstore-bench-") as folder:
        held = Sampled(small_frames(MESSAGES, channels=CHANNELS), MESSAGES)
        url = f"sqlite:///{folder}/store.db"
        load(url, held.items())
        _, token = TokenFile(Path(folder) / TOKENS_FILE).create(scopes=["read"])
        with serving("node", url, folder) as node:
            rows = [
                row
                for form in FORMS
                for row in _compared(node, form, held.message_ids, token, turns)
            ]
    publish("tokens", "GET by ID with and without a token, one connection", rows)


def _compared(
    node: Served, form: str, message_ids: Sequence[str], token: str, turns: int
) -> list[Row]:
    credentials = f"Bearer {token}"
    headers = dict.fromkeys(WAYS, FORMS[form])
    headers[OTHER_HEADER] = FORMS[form] | {"x" * len("authorization"): credentials}
    headers[TOKEN] = FORMS[form] | {"authorization": credentials}
    costs_us: dict[str, list[float]] = {way: [] for way in WAYS}
    random = Random(1)
    address = urlsplit(node.url)
    with socket.create_connection((address.hostname, address.port or 80)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for turn in range(-WARM_UP_TURNS, turns):
            asked = random.choices(message_ids, k=REQUESTS_PER_TURN)
            for way in random.sample(WAYS, len(WAYS)):
                requests = [request("GET", f"/v1/messages/{i}", headers[way]) for i in asked]
                before_ns = node.cpu_ns()
                _ask(connection, requests)
                cost_us = (node.cpu_ns() - before_ns) / len(requests) / 1e3
                if turn >= 0:
                    costs_us[way].append(cost_us)
    return [_row(form, way, costs_us[way], costs_us[WITHOUT]) for way in WAYS]


def _ask(connection: socket.socket, requests: Sequence[bytes]) -> None:
    for each in requests:
        connection.sendall(each)
        # The node writes head and body at once, and they fit the buffers of a loopback connection.
        answer = connection.recv(ANSWER_BYTES_MAX)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500].decode("latin-1"))


def _row(form: str, way: str, costs_us: Sequence[float], without_us: Sequence[float]) -> Row:
    ratios = [cost / base for cost, base in zip(costs_us, without_us, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    more_us = median(cost - base for cost, base in zip(costs_us, without_us, strict=True))
    return {
        "form": form,
        "way": way,
        "cpu us": round(median(costs_us), 1),
        "more us": round(more_us, 2),
        "ratio": f"{middle:.3f}",
        "quartiles": f"{low:.3f} … {high:.3f}",
    }


if __name__ == "__main__":
    in_scratch(main)

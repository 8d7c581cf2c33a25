"""Several workers over one SQLite file: one writes, the others answer as one process would."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from app.callers import Caller, Rate, Scope
from app.http import handing
from app.http.application import ROUTES
from app.http.routing import AnsweredBy
from app.siblings import WorkerState
from recon.session import Interest
from sdstore.sds.codec import encode
from sdstore.sds.model import Kind, Message
from sdstore.wire import recon_pb2, store_pb2
from tests.support.server import (
    AS_OPERATOR,
    PROTOBUF,
    RunningNode,
    RunningWorkers,
    running_node,
    running_workers,
)

READERS = (1, 2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorkers]:
    with running_workers(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("alone")) as running:
        yield running


def message(message_id: str, channel_id: str = "c", lamport: int | None = 1) -> Message:
    return Message(message_id, channel_id, lamport_timestamp=lamport, content=b"hi")


def of_worker(service: RunningWorkers, number: int) -> httpx.Client:
    """A client of one worker alone, over its private socket."""
    siblings = service.workers[number].node.siblings
    assert siblings is not None
    transport = httpx.HTTPTransport(uds=siblings.paths[number])
    return httpx.Client(base_url="http://worker", transport=transport, timeout=30)


# --- which worker answers --------------------------------------------------------------------------

ANSWERED_BY_ALL = {
    "POST /v1/messages/lookup",
    "POST /v1/entries",
    "POST /v1/messages/ancestors",
    "POST /v1/negentropy",
    "POST /v1/tokens",
    "DELETE /v1/tokens/{token_id}",
    "POST /v1/reload",
}
"""What is not a GET and yet writes nothing to the database. Tokens and settings are in files of their own,
and a reload reaches all workers."""


def test_each_route_that_is_no_get_goes_to_a_worker_that_writes_unless_it_is_known_to_read() -> (
    None
):
    answered_by_all = {
        f"{route.method} {route.template}"
        for route in ROUTES
        if route.answered_by is AnsweredBy.ANY and route.method != "GET"
    }
    assert answered_by_all == ANSWERED_BY_ALL


def test_what_only_the_first_worker_knows_is_asked_of_it(service: RunningWorkers) -> None:
    checking = [each.node.audit for each in service.workers]
    checking[0].cpu_s = 12_345.678
    assert service.http.get("/v1/audit").json()["cpu_s"] == pytest.approx(12_345.678, abs=60)


def test_only_steps_of_a_reconciliation_that_push_go_to_the_writer() -> None:
    [route] = [each for each in ROUTES if each.template == "/v1/recon"]
    reading = recon_pb2.ReconRequest(version=1, total=True)
    reading.ranges.SetInParent()
    pushing = recon_pb2.ReconRequest(
        version=1, push=[recon_pb2.Item(entry=recon_pb2.Item.Entry(frame=b"x"))]
    )
    call: Any = type("Call", (), {})()
    assert route.writes is not None
    for request, writes in ((reading, False), (pushing, True)):
        call.body = request.SerializeToString()
        assert route.writes(call) is writes
    for torn in (b"", b"\x2a", pushing.SerializeToString()[:1], b"\xff" * 20):
        call.body = torn
        assert route.writes(call) in (True, False)


def test_readers_write_nothing_and_every_acknowledged_message_is_on_all_of_them(
    service: RunningWorkers,
) -> None:
    with of_worker(service, 1) as one, of_worker(service, 2) as two:
        for number in range(20):
            assert service.publish(message(f"at once {number}")).status_code == 201
            for client in (one, two):
                assert client.get(f"/v1/messages/at%20once%20{number}").status_code == 200
    entries = [each.node.committer.counters.entries for each in service.workers]
    assert entries[0] >= 20
    assert entries[1:] == [0, 0]


# --- the same bytes --------------------------------------------------------------------------------

FRAME = encode(message("same"))
BATCH = store_pb2.PublishBatch(
    items=[store_pb2.PublishItem(frame=each) for each in (FRAME, b"\xff", encode(message("b 2")))]
).SerializeToString()
JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson"}
LINE = json.dumps(
    {"message_id": "j", "channel_id": "c", "lamport_timestamp": "5", "content": "aGk="}
)
REQUESTS: list[tuple[str, str, dict[str, str], bytes]] = [
    ("POST", "/v1/messages", PROTOBUF, FRAME),
    ("POST", "/v1/messages", PROTOBUF, FRAME),
    ("POST", "/v1/messages", PROTOBUF | {"accept": "application/x-protobuf"}, FRAME),
    ("POST", "/v1/messages", PROTOBUF | {"retrieval-hint": "00ff, 01"}, FRAME),
    ("POST", "/v1/messages", PROTOBUF | {"retrieval-hint": "zz"}, FRAME),
    ("POST", "/v1/messages", PROTOBUF | {"content-encoding": "gzip"}, gzip.compress(FRAME, mtime=0)),
    ("POST", "/v1/messages", PROTOBUF | {"content-encoding": "gzip"}, b"no gzip"),
    ("POST", "/v1/messages", PROTOBUF | {"content-encoding": "br"}, FRAME),
    ("POST", "/v1/messages", PROTOBUF, b"\xff"),
    ("POST", "/v1/messages", PROTOBUF, b""),
    ("POST", "/v1/messages", JSON, LINE.encode()),
    ("POST", "/v1/messages", JSON, b"{"),
    ("POST", "/v1/messages", {"content-type": "text/plain"}, FRAME),
    ("POST", "/v1/messages", PROTOBUF | {"accept": "image/png"}, FRAME),
    ("POST", "/v1/messages?nonsense=1", PROTOBUF, FRAME),
    ("POST", "/v1/messages", PROTOBUF, bytes(3 << 20)),
    ("POST", "/v1/messages", PROTOBUF, encode(Message("eph", "c", content=b"x"))),
    ("POST", "/v1/messages/batch", PROTOBUF, BATCH),
    ("POST", "/v1/messages/batch", NDJSON, f"{LINE}\nnot json\n\n{LINE}".encode()),
    ("POST", "/v1/messages/batch", NDJSON, b"\n" * 9),
    ("POST", "/v1/messages/batch", PROTOBUF, b""),
    ("POST", "/v1/recon", PROTOBUF, b"\xff\xff"),
    ("POST", "/v1/recon", PROTOBUF, recon_pb2.ReconRequest(version=99).SerializeToString()),
    ("POST", "/v1/mvds/p?channel_id=c", PROTOBUF, b""),
    ("POST", "/v1/mvds/p", PROTOBUF, b""),
    ("PUT", "/v1/messages", PROTOBUF, FRAME),
    ("GET", "/v1/messages/same", {}, b""),
    ("HEAD", "/v1/messages/same", {}, b""),
    ("GET", "/v1/peers", {}, b""),
    ("HEAD", "/v1/peers", {}, b""),
    ("GET", "/v1/peers/nope", {}, b""),
    ("GET", "/v1/syncs/nope/events", {}, b""),
    ("POST", "/v1/peers", JSON, b'{"url": 5}'),
    ("DELETE", "/v1/peers/nope", {}, b""),
    ("GET", "/v1/channels", {}, b""),
    ("GET", "/v1/channels/c/messages?limit=2", {"host": "here"}, b""),
    ("GET", "/v1/hints/00ff", {}, b""),
    ("GET", "/v1/nothing", {}, b""),
]  # fmt: skip


def answer(
    node: RunningNode, method: str, target: str, headers: dict[str, str], body: bytes
) -> Any:
    with httpx.Client(base_url=node.url, trust_env=False, timeout=30, auth=AS_OPERATOR) as client:
        got = client.request(method, target, headers={"host": "127.0.0.1"} | headers, content=body)
    # The time at which a node first saw a message, and cursors, which name their database.
    text = re.sub(
        rb"\b20\d\d-[-\d]+T[:.\d]+Z\b", b"TIME", re.sub(rb'"next":"[^"]*"', b"NEXT", got.content)
    )
    # An early refusal closes the connection if the body is still on its way, which is chance.
    differing = (b"link", b"connection", b"etag")
    return got.status_code, [each for each in got.headers.raw if each[0] not in differing], text


def test_answers_are_those_of_one_process_byte_by_byte(alone: RunningNode, tmp_path: Path) -> None:
    with running_workers(tmp_path) as fresh:
        for each in REQUESTS:
            assert answer(fresh, *each) == answer(alone, *each), each[:3]


def test_a_batch_of_many_megabytes_goes_through(service: RunningWorkers) -> None:
    frames = [
        encode(Message(f"large {n}", "large", lamport_timestamp=n, content=bytes(100_000)))
        for n in range(120)
    ]
    batch = store_pb2.PublishBatch(items=[store_pb2.PublishItem(frame=each) for each in frames])
    got = service.http.post(
        "/v1/messages/batch", content=batch.SerializeToString(), headers=PROTOBUF
    )
    assert [each["outcome"] for each in got.json()["outcomes"]] == ["stored"] * 120


def test_bodies_in_flight_leave_no_units_behind(service: RunningWorkers) -> None:
    for _ in range(5):
        service.http.post("/v1/messages/batch", content=BATCH, headers=PROTOBUF)
    deadline = time.monotonic() + 60
    for worker in service.workers:
        sharing, limits = worker.node.sharing, worker.node.limits
        while sharing.bodies.free_units != limits.bodies_bytes_max:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# --- the caller --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "caller",
    [
        Caller("local"),
        Caller("address 10.0.0.1", frozenset({Scope.OPEN, Scope.READ}), is_trusted=False, rate=Rate.STRANGER),
        Caller("p", publishable=Interest.make(channels=frozenset({"b"})), instance_id="ab"),
        Caller('a "name"\r\nx: y', frozenset(), Interest.make(channels=frozenset({"ü", "\n"}))),
        Caller("t", frozenset({Scope.SYNC}), Interest.make(prefixes=frozenset({"a/"})), token_id=None),
    ],
)  # fmt: skip
def test_a_caller_is_the_same_at_the_other_worker(caller: Caller) -> None:
    encoded = handing._encoded(caller)
    assert b"\n" not in encoded
    assert b"\r" not in encoded
    assert handing._decoded(encoded) == caller


def test_nobody_outside_names_a_caller(tmp_path: Path) -> None:
    forged = {
        "sdstore-caller": handing._encoded(Caller("forged")).decode(),
        "sdstore-address": "10.1.1.1",
        "sdstore-sent-bytes": "1000000",
    }
    with running_workers(tmp_path, trust_loopback=False) as service:
        tokens = service.workers[1].node.tokens.file
        _, text = tokens.create(scopes=["publish"], channels=["mine"])
        bearer = {"authorization": f"Bearer {text}"}

        def publish(channel_id: str, headers: dict[str, str]) -> int:
            return service.http.post(
                "/v1/messages",
                content=encode(message("x", channel_id)),
                headers=PROTOBUF | headers | forged,
            ).status_code

        assert publish("mine", {}) == 401
        assert publish("theirs", bearer) == 403
        assert publish("mine", bearer) == 201
        assert service.http.get("/v1/peers", headers=bearer | forged).status_code == 403
        assert service.http.get("/siblings/notices", headers=forged).status_code == 404
        assert service.http.post("/siblings/recheck", headers=forged).status_code == 404


def test_grants_of_a_caller_hold_at_the_writer(tmp_path: Path) -> None:
    with running_workers(tmp_path, trust_loopback=False) as service:
        tokens = service.workers[1].node.tokens.file
        _, text = tokens.create(scopes=["publish"], channels=["mine"])
        # The reader knows no channel of a frame: the writer refuses it.
        statuses = [
            service.http.post(
                "/v1/messages",
                content=encode(message("x", channel_id)),
                headers=PROTOBUF | {"authorization": f"Bearer {text}"},
            ).status_code
            for channel_id in ("mine", "theirs")
        ]
        assert statuses == [201, 403]


def test_the_writer_counts_each_caller_and_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    with running_workers(tmp_path) as service:
        door = service.workers[0].node.door
        publish = door.publish
        take = service.workers[0].node.sharing.replies.take

        async def noting(caller: str, units: int, holder: Any = None) -> Any:
            seen.append(caller)
            return await take(caller, units, holder)

        monkeypatch.setattr(service.workers[0].node.sharing.replies, "take", noting)
        service.http.post("/v1/messages/batch", content=BATCH, headers=PROTOBUF)
        assert publish is not None
    assert seen == ["127.0.0.1"]


# --- a worker is away --------------------------------------------------------------------------------


def test_while_the_writer_is_away_reads_are_answered_and_writes_are_asked_to_come_again(
    tmp_path: Path,
) -> None:
    with running_workers(tmp_path) as service:
        assert service.publish(message("kept")).status_code == 201
        service.board.set_state(0, WorkerState.STARTING)
        assert service.http.get("/v1/messages/kept").status_code == 200
        assert service.http.get("/livez").status_code == 200
        for refused in (
            service.publish(message("later")),
            service.http.post("/v1/messages/batch", content=BATCH, headers=PROTOBUF),
            service.http.get("/v1/peers"),
            service.http.get("/readyz"),
        ):
            assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
            assert int(refused.headers["retry-after"]) > 0
        service.board.set_state(0, WorkerState.SERVING)
        assert service.publish(message("later")).status_code == 201
        assert service.http.get("/readyz").status_code == 200


def test_a_writer_that_is_gone_without_a_word_is_no_fault_of_the_reader(tmp_path: Path) -> None:
    with running_workers(tmp_path) as service:
        assert service.publish(message("kept")).status_code == 201
        writer = service.workers[0]
        siblings = writer.node.siblings
        assert siblings is not None
        # What a killed process does to its connections, with nobody in its place yet.
        Path(siblings.paths[0]).unlink()
        for connection in list(writer.connections):
            writer.abort(connection)
        answers = [service.publish(message(f"n{n}")) for n in range(4)]
        assert {(each.status_code, each.json()["code"]) for each in answers} == {(503, "not_ready")}
        assert service.http.get("/v1/messages/kept").status_code == 200


# --- live readers --------------------------------------------------------------------------------------


LAST = "the last one"


def lines_of(service: RunningWorkers, number: int, heard: list[tuple[float, str]]) -> Thread:
    """A thread that notes each line of a worker's live stream with its time, up to the message LAST."""

    def read() -> None:
        with of_worker(service, number) as client, client.stream("GET", "/v1/live") as stream:
            for line in stream.iter_lines():
                heard.append((time.monotonic(), line))
                if LAST in line:
                    return

    thread = Thread(target=read, daemon=True)
    thread.start()
    return thread


def wait_for(heard: list[tuple[float, str]], text: str) -> float:
    deadline = time.monotonic() + 60
    while True:
        for at, line in list(heard):
            if text in line:
                return at
        assert time.monotonic() < deadline, heard
        time.sleep(0.005)


def test_live_readers_on_every_worker_hear_commits_and_relayed_messages_soon(
    service: RunningWorkers,
) -> None:
    heard: dict[int, list[tuple[float, str]]] = {number: [] for number in READERS}
    threads = [lines_of(service, number, heard[number]) for number in READERS]
    for number in READERS:
        wait_for(heard[number], "still here")
    delays_s = []
    for round_number in range(5):
        assert service.publish(message(f"live {round_number}")).status_code == 201
        acknowledged_s = time.monotonic()
        delays_s += [
            wait_for(heard[number], f"live {round_number}") - acknowledged_s for number in READERS
        ]
    # Without announcements, half of the second between two looks at the database.
    assert sorted(delays_s)[len(delays_s) // 2] < 0.25, delays_s
    ephemeral = Message("passing by", "c", content=b"x")
    assert ephemeral.kind is Kind.EPHEMERAL
    assert service.publish(ephemeral).status_code == 202
    for number in READERS:
        wait_for(heard[number], "passing by")
        assert sum("passing by" in line for _, line in heard[number]) == 1
    assert service.publish(message(LAST)).status_code == 201
    for thread in threads:
        thread.join()


def test_a_slow_body_is_cut_at_the_worker_that_reads_it(service: RunningWorkers) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\nx")
        assert service.publish(message("meanwhile")).status_code in (200, 201)
    # Nothing of it reached the writer.
    assert service.workers[0].node.sharing.bodies.free_units == (
        service.workers[0].node.limits.bodies_bytes_max
    )

"""Several processes over one PostgreSQL: each peer is held by one of them, and all of them know it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from app.server.node import Node
from app.store.peerrows import LEASE_S
from sdstore.sds.codec import encode
from sdstore.wire import store_pb2 as wire
from tests.support.federation import message, open_nodes, publish, run
from tests.support.publications import content_frame
from tests.support.server import AS_OPERATOR, RunningNode, running_node
from tests.support.store_process import StoreProcess
from tests.support.stores import PostgresStores


def store_batch(numbers: range, seed: int) -> bytes:
    """A batch of small messages."""
    batch = wire.PublishBatch()
    for number in numbers:
        frame = encode(message(number, f"c{number % 50}", content=b"%d %d" % (seed, number)))
        batch.items.add(frame=frame)
    return batch.SerializeToString()


DEAD = "http://127.0.0.1:9"
QUIET_S = 3_600.0


def wait_until(is_so: Callable[[], Any], seconds: float = 30.0) -> Any:
    until_s = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    return found


def peers_of(node: RunningNode) -> dict[str, dict[str, Any]]:
    return {each["url"]: each for each in node.http.get("/v1/peers").json()["peers"]}


@contextmanager
def two_hosts(
    tmp_path: Path, url: str, **settings: Any
) -> Iterator[tuple[RunningNode, RunningNode]]:
    """Two nodes with data directories of their own over one database."""
    settings = {"database_url": url, "sync_interval_s": QUIET_S, **settings}
    with (
        running_node(tmp_path / "one", **settings) as one,
        running_node(tmp_path / "two", **settings) as two,
    ):
        yield one, two


def started_at(node: RunningNode, peer_id: str) -> dict[str, Any]:
    """A session that an operator starts, once no other one with the peer is running."""

    def start() -> dict[str, Any] | None:
        reply = node.http.post(f"/v1/peers/{peer_id}/sync")
        assert reply.status_code in (202, 409), reply.text
        started: dict[str, Any] = reply.json()
        return started if reply.status_code == 202 else None

    found: dict[str, Any] = wait_until(start)
    return found


def holder_of(database_url: str) -> tuple[str, int]:
    with psycopg.connect(database_url) as connection:
        [found] = connection.execute("SELECT holder, fence FROM peers").fetchall()
        return found


def shares_of(database_url: str) -> dict[str, int]:
    """How many peers each process holds under a live lease; those that nobody holds under ""."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT CASE WHEN expires_ms > extract(epoch FROM clock_timestamp()) * 1000"
            " THEN holder ELSE '' END, count(*) FROM peers GROUP BY 1"
        ).fetchall()
    return dict(rows)


def test_a_host_that_starts_gets_its_share_of_the_peers_and_gives_it_back(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    url = postgres_stores.new_url()
    settings: dict[str, Any] = {"database_url": url, "sync_interval_s": QUIET_S}
    with ExitStack() as closing:
        peers = [closing.enter_context(running_node(tmp_path / f"peer{n}")) for n in range(2)]
        one = closing.enter_context(running_node(tmp_path / "one", **settings))
        for each in (*(peer.url for peer in peers), DEAD, f"{DEAD}1"):
            assert one.http.post("/v1/peers", json={"url": each}).status_code == 201
        wait_until(lambda: [*shares_of(url).values()] == [4])
        with running_node(tmp_path / "two", **settings) as two:
            wait_until(lambda: sorted(shares_of(url).values()) == [2, 2])
            # Each message goes out once to each peer, whoever holds it, and at once.
            for number, node in enumerate((one, two)):
                node.publish(message(number))
                for peer in peers:
                    wait_until(
                        lambda peer=peer, number=number: (
                            peer.http.get(f"/v1/messages/m{number}").is_success
                        ),
                        10,
                    )
        wait_until(lambda: [*shares_of(url).values()] == [4])


def test_peers_and_sessions_of_one_host_are_those_of_the_others(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    with (
        running_node(tmp_path / "peer") as peer,
        two_hosts(tmp_path, postgres_stores.new_url()) as hosts,
    ):
        one, two = hosts

        def ends_of(sync_id: str) -> list[dict[str, Any]]:
            return [each.http.get(f"/v1/syncs/{sync_id}").json() for each in hosts]

        peer.publish(message(1))
        added = one.http.post("/v1/peers", json={"url": peer.url}).json()
        assert peers_of(two).keys() == {peer.url}
        for node in hosts:
            wait_until(lambda node=node: peers_of(node)[peer.url]["state"] == "healthy", 5)
        # An operator can ask any of them; one of the two holds the peer.
        for node, other in ((one, two), (two, one)):
            started = started_at(node, added["id"])
            assert started["started_by"] == "operator"
            # The other host follows the session by its record.
            events = other.http.get(f"/v1/syncs/{started['id']}/events").text
            assert events.rstrip().rsplit("event: ", 1)[1].startswith("end")
            # The host that ran it says so first; its record follows.
            wait_until(
                lambda sync_id=started["id"]: all(each["outcome"] for each in ends_of(sync_id)), 5
            )
            ends = ends_of(started["id"])
            assert {each["outcome"] for each in ends} == {"in_sync"}
            assert len({each["process"] for each in ends}) == 1
        statuses = [each.http.get(f"/v1/peers/{added['id']}/status").json() for each in hosts]
        assert statuses[0]["divergence"]["missing_there"] == 0
        assert {each["divergence"]["missing_here"] for each in statuses} == {0}
        shown = [
            {each["id"] for each in node.http.get("/v1/syncs").json()["syncs"] if each["outcome"]}
            for node in hosts
        ]
        assert shown[0] & shown[1]
        assert two.http.delete(f"/v1/peers/{added['id']}").status_code == 204
        assert peers_of(one) == {}
        assert one.http.get(f"/v1/peers/{added['id']}").status_code == 404


def test_a_peer_of_one_hosts_settings_is_known_to_the_other_and_held_by_the_first(
    postgres_stores: PostgresStores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = postgres_stores.new_url()
    with running_node(tmp_path / "one", database_url=url) as one:
        with running_node(tmp_path / "two", database_url=url, peers=[DEAD]):
            wait_until(lambda: peers_of(one).get(DEAD, {}).get("state") == "unreachable")
            assert peers_of(one)[DEAD]["origin"] == "settings"
            refused = one.http.delete(f"/v1/peers/{peers_of(one)[DEAD]['id']}")
            assert (refused.status_code, refused.json()["code"]) == (400, "invalid_parameter")
            assert "remove it from them" in refused.json()["detail"]
        with caplog.at_level(logging.WARNING, "app.federation"):
            caplog.clear()
            assert peers_of(one) == {}
            assert any(f"peer {DEAD} is no longer listed" in each for each in caplog.messages)
        assert "sdstore_peers_vanished_total 1.0" in one.http.get("/metrics").text


def test_nothing_is_missing_where_four_processes_write_at_once(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    written_count = 100

    async def scenario() -> None:
        url = postgres_stores.new_url()
        async with open_nodes(tmp_path, *[{"database_url": url}] * 6) as nodes:

            async def write(node: Node, start: int) -> None:
                for number in range(start, start + written_count):
                    await publish(node, [message(number, f"c{number % 7}")])

            async def follow(node: Node) -> None:
                while len(node.recon.index.elements) < 4 * written_count:
                    await node.recon.index.catch_up()
                    await asyncio.sleep(0.005)

            writing = [write(node, n * written_count) for n, node in enumerate(nodes[:4])]
            async with asyncio.timeout(60):
                await asyncio.gather(*writing, *map(follow, nodes[4:]))
            with psycopg.connect(url) as connection:
                [(in_sql,)] = connection.execute("SELECT count(*) FROM messages").fetchall()
            assert in_sql == 4 * written_count
            assert [len(node.recon.index.elements) for node in nodes[4:]] == [in_sql, in_sql]

    run(scenario())


# ---- processes that are killed and paused


@pytest.fixture
def processes(
    postgres_stores: PostgresStores, tmp_path: Path
) -> Iterator[tuple[str, list[StoreProcess]]]:
    """A database, and two processes over it."""
    url = postgres_stores.new_url()
    found = [
        StoreProcess(tmp_path / str(n), "--database", url, "--sync-interval", 3_600)
        for n in range(2)
    ]
    try:
        for each in found:
            each.start()
        yield url, found
    finally:
        for each in found:
            if each.process is not None:
                each.process.send_signal(signal.SIGCONT)
                each.end(signal.SIGKILL)


def holding(url: str, processes: list[StoreProcess]) -> tuple[StoreProcess, StoreProcess]:
    """The process that holds the peer, and the other one."""
    pids = [each.process.pid for each in processes if each.process]
    wait_until(lambda: holder_of(url)[1])
    holder = int(holder_of(url)[0].split(":")[1])
    first, second = processes
    return (first, second) if pids[0] == holder else (second, first)


@pytest.mark.slow
def test_another_process_takes_over_within_the_lease_when_the_holder_is_killed(
    processes: tuple[str, list[StoreProcess]], tmp_path: Path
) -> None:
    url, both = processes
    with running_node(tmp_path / "peer") as peer:
        httpx.post(
            f"{both[0].url}/v1/peers",
            json={"url": peer.url},
            trust_env=False,
            auth=AS_OPERATOR,
            timeout=30,
        )
        holder, other = holding(url, both)
        before = holder_of(url)
        holder.end(signal.SIGKILL)
        killed_s = time.monotonic()
        frame = content_frame(1)
        published = httpx.post(
            f"{other.url}/v1/messages",
            content=frame,
            headers={"content-type": "application/x-protobuf"},
            trust_env=False,
            auth=AS_OPERATOR,
            timeout=30,
        )
        assert published.status_code == 201
        wait_until(lambda: peer.http.get("/v1/feed").json()["messages"], LEASE_S + 10)
        assert time.monotonic() - killed_s < 10 + 2  # sync included, on a busy machine
        after = holder_of(url)
        assert after[0] != before[0]
        assert after[1] == before[1] + 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_peers_also_after_kill_9_and_none_waits_longer_than_a_lease(
    postgres_stores: PostgresStores, tmp_path: Path, count: int
) -> None:
    url, peers_count = postgres_stores.new_url(), 8
    with ExitStack() as closing:
        found = [
            StoreProcess(tmp_path / str(n), "--database", url, "--sync-interval", 3_600)
            for n in range(count)
        ]
        for each in found:
            closing.callback(lambda each=each: each.process and each.end(signal.SIGKILL))
            each.start()
        for n in range(peers_count):
            httpx.post(
                f"{found[n % count].url}/v1/peers",
                json={"url": f"{DEAD}{n}"},
                trust_env=False,
                auth=AS_OPERATOR,
                timeout=30,
            ).raise_for_status()
        longest_s = 0.0
        free_since_s: dict[str, float] = {}
        with psycopg.connect(url, autocommit=True) as connection:

            def are_shared(processes_count: int) -> bool:
                nonlocal longest_s
                now_s = time.monotonic()
                free = connection.execute(
                    "SELECT peer_id FROM peers"
                    " WHERE expires_ms <= extract(epoch FROM clock_timestamp()) * 1000"
                ).fetchall()
                for (peer_id,) in free:
                    longest_s = max(longest_s, now_s - free_since_s.setdefault(peer_id, now_s))
                for peer_id in free_since_s.keys() - {peer_id for (peer_id,) in free}:
                    del free_since_s[peer_id]
                shares = shares_of(url)
                return (
                    "" not in shares
                    and sum(shares.values()) == peers_count
                    and max(shares.values()) <= -(-peers_count // processes_count)
                )

            wait_until(lambda: are_shared(count), 20)
            # One is killed: the others have its peers soon, each its share.
            found[0].end(signal.SIGKILL)
            killed_s = time.monotonic()
            wait_until(lambda: are_shared(count - 1))
            assert time.monotonic() - killed_s <= LEASE_S + 6  # on a busy machine
            # It comes back, and gets its share again.
            found[0].start()
            wait_until(lambda: are_shared(count) and len(shares_of(url)) == count, 20)
        assert longest_s <= LEASE_S


@pytest.mark.slow
def test_a_process_that_was_paused_beyond_its_lease_writes_nothing_of_the_peer(
    processes: tuple[str, list[StoreProcess]], tmp_path: Path
) -> None:
    url, both = processes
    with running_node(tmp_path / "peer") as peer:
        httpx.post(
            f"{both[0].url}/v1/peers",
            json={"url": peer.url},
            trust_env=False,
            auth=AS_OPERATOR,
            timeout=30,
        )
        holder, _ = holding(url, both)
        before = holder_of(url)
        assert holder.process is not None
        os.kill(holder.process.pid, signal.SIGSTOP)
        wait_until(lambda: holder_of(url) != before, LEASE_S + 10)
        with psycopg.connect(url, autocommit=True) as connection:
            # Every write of the peer's row from now on is noted, with the holder that it leaves behind.
            connection.execute("CREATE TABLE noted (application int, holder text, fence bigint)")
            connection.execute(
                "CREATE FUNCTION note() RETURNS trigger AS $$BEGIN INSERT INTO noted VALUES"
                " (pg_backend_pid(), NEW.holder, NEW.fence); RETURN NEW; END$$ LANGUAGE plpgsql"
            )
            connection.execute(
                "CREATE TRIGGER note BEFORE UPDATE ON peers FOR EACH ROW EXECUTE FUNCTION note()"
            )
            os.kill(holder.process.pid, signal.SIGCONT)
            after = wait_until(lambda: holder_of(url))
            # Its session was due: the peer goes away and comes back, and both would note that.
            started = httpx.post(
                f"{holder.url}/v1/peers/{peers_at(holder)[0]['id']}/sync",
                trust_env=False,
                auth=AS_OPERATOR,
                timeout=30,
            )
            assert started.status_code == 202
            # Both look at the row once a second.
            count = "SELECT count(*) FROM noted"
            wait_until(lambda: connection.execute(count).fetchall() >= [(5,)])
            noted = set(connection.execute("SELECT holder, fence FROM noted").fetchall())
            ran = connection.execute(
                "SELECT DISTINCT process FROM syncs WHERE sync_id = %s", [started.json()["id"]]
            ).fetchall()
        assert noted == {after}
        assert ran == [(after[0],)]


def peers_at(process: StoreProcess) -> list[dict[str, Any]]:
    reply = httpx.get(f"{process.url}/v1/peers", trust_env=False, auth=AS_OPERATOR, timeout=30)
    found: list[dict[str, Any]] = reply.json()["peers"]
    return found


@pytest.mark.slow
def test_nothing_is_missing_where_four_processes_ingest_200_000_entries_and_two_follow(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    count, batch = 200_000, 1_000
    url = postgres_stores.new_url()
    seed = random.Random(15).randrange(10**6)
    with ExitStack() as closing:
        found = [StoreProcess(tmp_path / str(n), "--database", url) for n in range(6)]
        for each in found:
            each.start()
            closing.callback(each.end, signal.SIGKILL)

        async def write(process: StoreProcess, numbers: range) -> None:
            async with httpx.AsyncClient(trust_env=False, auth=AS_OPERATOR, timeout=120) as client:
                for start in numbers[::batch]:
                    items = store_batch(range(start, start + batch), seed)
                    reply = await client.post(
                        f"{process.url}/v1/messages/batch",
                        content=items,
                        headers={"content-type": "application/x-protobuf"},
                    )
                    assert reply.status_code == 200, reply.text

        async def follow(process: StoreProcess) -> set[str]:
            seen: set[str] = set()
            after = None
            async with httpx.AsyncClient(trust_env=False, auth=AS_OPERATOR, timeout=120) as client:
                while len(seen) < count:
                    asked = {"limit": 1_000} | ({"after": after} if after else {})
                    page = (await client.get(f"{process.url}/v1/feed", params=asked)).json()
                    seen |= {each["meta"]["digest"] for each in page["messages"]}
                    after = page["next"] or after
                    if not page["messages"]:
                        await asyncio.sleep(0.1)
            return seen

        async def scenario() -> list[set[str]]:
            share = count // 4
            writing = [
                write(each, range(n * share, (n + 1) * share)) for n, each in enumerate(found[:4])
            ]
            async with asyncio.timeout(400):
                _, *seen = await asyncio.gather(asyncio.gather(*writing), *map(follow, found[4:]))
            return seen

        one, two = asyncio.run(scenario())
        with psycopg.connect(url) as connection:
            in_sql = {
                digest.hex() for (digest,) in connection.execute("SELECT digest FROM messages")
            }
        assert len(in_sql) == count
        assert one == two == in_sql

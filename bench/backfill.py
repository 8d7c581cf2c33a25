"""Backfill of a participant's log from a node: `python -m bench.backfill [--quick] [few | full]`.

Few: 10 messages are missing of a large channel. Round trips, bytes of bodies beyond the frames, and
seconds, from a cold start (no nonce of the store) and from a warm one. The log's columns are
synthetic, the node is a process of its own over a store loaded in bulk.

Full: an empty participant gets a whole channel into its SQLite file: fetched and staged, then taken by
the participant in log order, delivered and confirmed. Messages of 300 bytes with two causes each.

Memory is what the client's process grew by, at most. Results: bench/results/backfill*.csv.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from bench.http_servers import Served, serving
from bench.loading import load_file
from bench.scratch import in_scratch
from bench.table import publish
from sdstore.client import AsyncStoreClient
from sdstore.participant.backfill import drain
from sdstore.participant.file import ParticipantFile
from sdstore.sds import Deliver, Participant
from sdstore.sds.codec import encode
from sdstore.sds.effects import Effect, Save
from sdstore.sds.log import ELEMENTS_PER_PIECE_MAX, Noted, Staged
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from sdstore.sync.report import SyncReport

CHANNEL = "channel"
CONTENT_BYTES = 300
MISSING = 10
FIRST_MS = 1_763_000_000_000
STEP_MS = 977
SEED = 20_261_122
Row = dict[str, str | int | float]


def messages(count: int, content_bytes: int) -> Iterator[Message]:
    """A channel of ten senders; each message names the two before it."""
    rng = Random(SEED)
    history: tuple[HistoryEntry, ...] = ()
    for number in range(count):
        message_id, sender = f"{number:016x}", f"sender{number % 10}"
        yield Message(
            message_id, CHANNEL, sender, FIRST_MS + STEP_MS * number, history,
            content=rng.randbytes(content_bytes),
        )  # fmt: skip
        history = (*history[-1:], HistoryEntry(message_id, sender_id=sender))


class ColumnsLog:
    """A log that is only its elements: of any size, and it keeps what is staged."""

    keeps_variants = False
    noted_count = 0

    def __init__(self, elements: Sequence[tuple[int, bytes]]) -> None:
        self.taken: list[Staged] = []
        self._elements = elements

    def elements(self) -> Iterator[tuple[list[int], bytes]]:
        """See `BackfillLog`."""
        for start in range(0, len(self._elements), ELEMENTS_PER_PIECE_MAX):
            piece = self._elements[start : start + ELEMENTS_PER_PIECE_MAX]
            yield [lamport for lamport, _ in piece], b"".join([digest for _, digest in piece])

    def digests(self, _message_ids: Sequence[str]) -> dict[str, bytes]:
        """See `BackfillLog`."""
        return {}

    def frames(self, _digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
        """See `BackfillLog`."""
        return {}

    def stage(self, messages: Sequence[Staged], _noted: Sequence[Noted]) -> None:
        """See `BackfillLog`."""
        self.taken += messages


class Peak:
    """The growth of this process's memory from now to its highest point (Linux)."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._start_bytes = self._bytes("VmRSS")

    def megabytes(self) -> float:
        """The growth in MB."""
        return (self._bytes("VmHWM") - self._start_bytes) / 1e6

    @staticmethod
    def _bytes(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024


# --- few -------------------------------------------------------------------------------------------


def few_rows(node: Served, every: Sequence[tuple[int, bytes]]) -> list[Row]:
    """10 missing: anywhere, the newest, and none."""
    count = len(every)
    places = {
        "none": [],
        "10 newest": list(range(count - MISSING, count)),
        "10 anywhere": Random(SEED).sample(range(count), MISSING),
        "10 together": list(range(count // 3, count // 3 + MISSING)),
    }
    rows: list[Row] = []
    for name, missing in places.items():
        lacking = set(missing)
        held = [each for place, each in enumerate(every) if place not in lacking]
        rows += asyncio.run(_few(node, name, held, len(missing)))
    return rows


async def _few(
    node: Served, name: str, held: Sequence[tuple[int, bytes]], missing: int
) -> list[Row]:
    rows: list[Row] = []
    async with AsyncStoreClient(node.url) as client:
        for start in ("cold", "warm"):
            log = ColumnsLog(held)
            peak, started_s, node_cpu_s = Peak(), time.perf_counter(), node.cpu_s()
            report = await client.backfill(CHANNEL, log)
            assert (report.outcome, len(log.taken)) == ("in_sync", missing)
            frames = sum(len(each.frame) for each in log.taken)
            rows.append(
                {
                    "channel": len(held) + missing,
                    "missing": name,
                    "start": start,
                    "round trips": report.rounds,
                    "bytes beyond frames": report.bytes_up + report.bytes_down - frames,
                    "s": time.perf_counter() - started_s,
                    "node CPU s": node.cpu_s() - node_cpu_s,
                    "client peak MB": peak.megabytes(),
                }
            )
    return rows


# --- full ------------------------------------------------------------------------------------------


def full_rows(node: Served, folder: Path, count: int) -> list[Row]:
    """A whole channel into a participant's file; the rate of all steps together comes last."""
    rows: list[Row] = []
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    peak, node_cpu_s = Peak(), node.cpu_s()
    with ParticipantFile(folder / "participant.db") as file:
        participant = file.participant(CHANNEL, "reader")
        report = asyncio.run(_fetch(node, file))
        assert (report.outcome, report.entries_received) == ("in_sync", count)
        fetched_s, fetched_cpu_s = time.perf_counter(), time.process_time()
        delivered = take(participant, file)
        assert delivered == count == len(file.log(CHANNEL))
    taken_s, taken_cpu_s = time.perf_counter(), time.process_time()
    node_cpu_s = node.cpu_s() - node_cpu_s
    steps = {
        "fetch and stage": (fetched_s - started_s, fetched_cpu_s - started_cpu_s, node_cpu_s),
        "take and deliver": (taken_s - fetched_s, taken_cpu_s - fetched_cpu_s, 0.0),
        "all": (taken_s - started_s, taken_cpu_s - started_cpu_s, node_cpu_s),
    }
    for name, (wall_s, cpu_s, of_node_s) in steps.items():
        rows.append(
            {
                "messages": count,
                "step": name,
                "s": wall_s,
                "messages/s": round(count / wall_s),
                "client CPU us each": cpu_s / count * 1e6,
                "node CPU us each": of_node_s / count * 1e6,
                "client peak MB": peak.megabytes(),
            }
        )
    return rows


async def _fetch(node: Served, file: ParticipantFile) -> SyncReport:
    async with AsyncStoreClient(node.url) as client:
        return await client.backfill(CHANNEL, file.log(CHANNEL))


def take(participant: Participant, file: ParticipantFile) -> int:
    """Take all that is staged, and confirm what is delivered; the number of deliveries."""
    delivered = 0

    def save(saves: Sequence[Save]) -> None:
        file.save(CHANNEL, saves)

    for effects in drain(participant, save, now_ms=lambda: int(time.time() * 1_000)):
        waiting: list[Effect] = list(effects)
        while numbers := [each.number for each in waiting if isinstance(each, Deliver)]:
            delivered += len(numbers)
            waiting = participant.confirm(numbers[-1])
            save([each for each in waiting if isinstance(each, Save)])
    return delivered


def main() -> int:
    """Measure both or one, print, write CSV."""
    quick = "--quick" in sys.argv
    few, full = (20_000, 5_000) if quick else (1_000_000, 100_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every: list[tuple[int, bytes]] = []

        def frames(count: int, size: int) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
            every.clear()
            for each in messages(count, size):
                every.append((each.lamport_timestamp or 0, entry_digest(each)))
                yield encode(each), ()

        for part, count in (("few", few), ("full", full)):
            if {"few", "full"} & set(sys.argv) and part not in sys.argv:
                continue
            (folder / part).mkdir()
            path = folder / part / "sdstore.db"
            load_file(path, frames(count, CONTENT_BYTES if part == "full" else 30))
            with serving("node", f"sqlite:///{path}", str(folder / part)) as node:
                if part == "few":
                    title = f"Backfill of {MISSING} missing messages"
                    publish("backfill_few", title, few_rows(node, every))
                else:
                    title = f"Backfill of a whole channel, messages of {CONTENT_BYTES} bytes"
                    publish("backfill", title, full_rows(node, folder, count))
    return 0


if __name__ == "__main__":
    sys.exit(in_scratch(main))

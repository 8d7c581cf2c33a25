"""What a `ParticipantFile` costs by itself: `python -m bench.participant_file [--quick]`.

Messages are appended in batches of 500, each batch in one durable transaction. "small" messages have
frames of some 300 bytes and no filter. "js-waku" messages have 19 kB with js-waku's filter, which gains
ten bits a message and has 2,000 IDs at the start. Then, with the file opened anew:

- append: messages per second of CPU time, and of time, over the last tenth
- open: seconds until the log of the channel can be asked
- a look-up of a random ID that is in the log, and of one that is not, while a message is unsaved
- newest: the newest 2 of the log; and the last 2 before a random timestamp
- elements: seconds to read all timestamps and digests for a backfill

CPU times are microseconds per call.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from bench.frame_workloads import filter_frames
from bench.scratch import in_scratch
from bench.table import publish
from sdstore.participant import ParticipantFile
from sdstore.sds.codec import decode, encode
from sdstore.sds.effects import Save
from sdstore.sds.log import LogEntry
from sdstore.sds.model import LAMPORT_MAX, HistoryEntry, Message

CHANNEL = "/app/1/conversation/proto"
BATCH = 500
CALLS = 10_000
SMALL_COUNTS, FILTER_COUNTS = (1_000, 100_000, 1_000_000), (10_000,)
QUICK_COUNTS = (1_000, 10_000), (2_000,)
SAVE = Save((("progress", bytes(20)),))


def small_frames(count: int) -> Iterator[bytes]:
    """One sender; each message names the one before."""
    random, history = Random(count), tuple[HistoryEntry, ...]()
    for number in range(count):
        message_id = random.randbytes(32).hex()
        content = random.randbytes(120)
        message = Message(
            message_id, CHANNEL, "ada", 1_763_000_000_000 + 3 * number, history, content=content
        )
        yield encode(message)
        history = (HistoryEntry(message_id),)


def microseconds(call: Callable[[Any], object], arguments: Iterable[Any], count: int) -> float:
    """CPU time of one call."""
    given = list(arguments)
    start = time.process_time()
    for each in given:
        call(each)
    return (time.process_time() - start) / count * 1e6


def row(name: str, frames: Iterator[bytes], count: int) -> dict[str, Any]:
    """Fill a file, then ask it."""
    random = Random(1)
    ids: list[str] = []
    frame_bytes = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log.db")
        with ParticipantFile(path) as file:
            log = file.log(CHANNEL)
            cpu_s = wall_s = 0.0
            measured = 0
            while batch := list(islice(frames, BATCH)):
                entries = []
                for frame in batch:
                    message, _ = decode(frame)
                    ids.append(message.message_id)
                    entries.append(LogEntry(message, frame, len(ids)))
                    frame_bytes += len(frame)
                cpu, wall = time.process_time(), time.perf_counter()
                for entry in entries:
                    log.append(entry)
                file.save(CHANNEL, [SAVE])
                if len(ids) > count * 0.9:
                    cpu_s += time.process_time() - cpu
                    wall_s += time.perf_counter() - wall
                    measured += len(batch)
        start = time.perf_counter()
        with ParticipantFile(path) as file:
            log = file.log(CHANNEL)
            open_s = time.perf_counter() - start
            newest_lamport = log.newest(1, LAMPORT_MAX)[-1].lamport_timestamp
            first_lamport = 1_763_000_000_000
            lamports = [random.randrange(first_lamport, newest_lamport) for _ in range(CALLS)]
            message = Message("unsaved", CHANNEL, "ada", 0, content=b"unsaved")
            log.append(LogEntry(message, encode(message)))
            known: Sequence[str] = random.choices(ids, k=CALLS)
            unknown = [random.randbytes(32).hex() for _ in range(CALLS)]
            found = {
                "messages": count,
                "frames": name,
                "append /s CPU": measured / cpu_s,
                "append /s": measured / wall_s,
                "open s": open_s,
                "known us": microseconds(log.contains, known, CALLS),
                "unknown us": microseconds(log.contains, unknown, CALLS),
                "newest us": microseconds(lambda _: log.newest(2, LAMPORT_MAX), lamports, CALLS),
                "before us": microseconds(lambda at: log.newest(2, at), lamports[:1_000], 1_000),
            }
            start = time.process_time()
            read = sum(len(lamports) for lamports, _ in log.elements())
            found["elements s"] = time.process_time() - start
            if read != count + 1:
                raise RuntimeError(f"{read} elements of {count}")
        return found | {
            "file bytes": round(path.stat().st_size / count),
            "frame bytes": round(frame_bytes / count),
        }


def main() -> int:
    """Measure, print, write CSV."""
    small, filters = QUICK_COUNTS if "--quick" in sys.argv else (SMALL_COUNTS, FILTER_COUNTS)
    rows = [row("small", small_frames(count), count) for count in small]
    rows += [row("js-waku", filter_frames(count, known=2_000), count) for count in filters]
    publish("participant_file", "ParticipantFile, batches of 500", rows)
    return 0


if __name__ == "__main__":
    sys.exit(in_scratch(main))

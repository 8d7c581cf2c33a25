"""A program that is killed at any moment loses nothing that it saved, and handles each message once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sdstore.participant import ParticipantFile, ParticipantFileError
from sdstore.participant.file import FileLog
from sdstore.sds.codec import decode
from sdstore.sds.effects import Broadcast, Deliver
from sdstore.sds.log import LogEntry, Staged
from sdstore.sds.model import entry_digest
from sdstore.sds.participant import Participant

CHANNEL = "general"
MESSAGES_COUNT = 1_500
INBOX = "CREATE TABLE IF NOT EXISTS inbox (number INTEGER, content BLOB)"


def conversation() -> list[bytes]:
    """Frames of a sender, each of which names those before it."""
    bob = Participant(CHANNEL, "bob")
    frames = []
    for n in range(MESSAGES_COUNT):
        effects = bob.send(b"message %d" % n, 1_000 + n)
        frames += [each.frame for each in effects if isinstance(each, Broadcast)]
    return frames


def program(path: Path, frames: list[bytes], seed: int, report: int) -> None:
    """Receive, stage and take frames in a shuffled order; handle and confirm what is delivered.

    Frame numbers are reported when they are on the disk, and `confirmed` after each delivery.
    """
    random = Random(seed)
    with ParticipantFile(path) as file:
        with file.transaction() as connection:
            connection.execute(INBOX)
        ada = file.participant(CHANNEL, "ada")
        log = file.log(CHANNEL)
        effects = ada.tick(5_000)
        start = max(len(log) - 20, 0)
        while start < len(frames):
            block = list(range(start, min(start + 30, len(frames))))
            random.shuffle(block)
            start += 25
            for part in (block[:10], block[10:]):
                if random.random() < 0.3:
                    messages = [(decode(frames[n])[0], frames[n]) for n in part]
                    log.stage(
                        [
                            Staged(message, frame, entry_digest(message))
                            for message, frame in messages
                            if not log.digests([message.message_id])
                        ],
                        [],
                    )
                    effects += ada.take_staged(5_000, random.randrange(1, 20))
                else:
                    for n in part:
                        effects += ada.receive(frames[n], 5_000)
                if random.random() < 0.2:
                    effects += ada.send(b"from ada %d" % random.getrandbits(60), 5_000)
                file.save(CHANNEL, effects)
                os.write(report, b"".join(b"%d\n" % n for n in part))
                for effect in effects:
                    if isinstance(effect, Deliver):
                        with file.transaction() as connection:
                            values = (effect.number, effect.message.content)
                            connection.execute("INSERT INTO inbox VALUES (?, ?)", values)
                            file.confirm(CHANNEL, effect.number)
                        os.write(report, b"confirmed\n")
                numbers = [each.number for each in effects if isinstance(each, Deliver)]
                effects = ada.confirm(numbers[-1]) if numbers else []


def killed(path: Path, frames: list[bytes], seed: int, after_s: float) -> tuple[list[str], int]:
    """The reports of a program that is killed after some time, and its exit status."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        status = 1
        try:
            program(path, frames, seed, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as reports:
        return reports.read().split(), status


def all_deliveries(log: FileLog) -> list[LogEntry]:
    """All of them: one read is bounded in bytes."""
    found: list[LogEntry] = []
    while part := log.deliveries(len(found), 10_000):
        found += part
    return found


def check(path: Path, frames: list[bytes], saved: set[int], confirmed: int) -> int:
    """The number of deliveries in the file."""
    ids = [decode(frame)[0].message_id for frame in frames]
    with ParticipantFile(path) as file:
        assert file._database.raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        log, state = file.log(CHANNEL), file.state(CHANNEL)
        staged = {each.message.message_id: each.frame for each in log.staged(10_000)}
        for n in saved:
            found = log.frame(ids[n]) or staged.get(ids[n])
            if found is None:
                waiting = file.participant(CHANNEL, "ada")._incoming.waiting(ids[n])
                found = waiting and waiting.frame
                assert f"waiting/{ids[n]}" in state
            assert found == frames[n]
        delivered = all_deliveries(log)
        assert [each.number for each in delivered] == list(range(1, len(delivered) + 1))
        contents = [each.message.content for each in delivered]
        assert contents == [b"message %d" % n for n in range(len(delivered))]  # causal order
        with file.transaction() as connection:
            rows = connection.execute("SELECT * FROM inbox ORDER BY number").fetchall()
        assert rows == list(enumerate(contents[: len(rows)], 1))
        assert len(rows) >= confirmed
        own = len(log) - len(delivered)
        assert own >= 0
        effects = file.participant(CHANNEL, "ada").tick(6_000)
        again = [each.number for each in effects if isinstance(each, Deliver)]
        # Those that wait can follow; what was handled never comes again.
        assert again[: len(delivered) - len(rows)] == list(range(len(rows) + 1, len(delivered) + 1))
        return len(delivered)


def kill_and_check(path: Path, seconds: float, seed: int) -> tuple[int, int]:
    """Rounds and deliveries."""
    random, frames = Random(seed), conversation()
    saved: set[int] = set()
    confirmed = rounds = delivered = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or not (rounds >= 3 and delivered):
        reports, status = killed(path, frames, random.getrandbits(32), random.uniform(0.0, 0.25))
        assert status in (0, signal.SIGKILL), seed
        if not path.exists():
            continue
        with ParticipantFile(path) as file, file.transaction() as connection:
            connection.execute(INBOX)
        saved |= {int(each) for each in reports if each != "confirmed"}
        confirmed += reports.count("confirmed")
        delivered = check(path, frames, saved, confirmed)
        rounds += 1
        if delivered == MESSAGES_COUNT:
            path.unlink()
            saved, confirmed = set(), 0
    return rounds, delivered


def test_a_program_that_is_killed_loses_nothing_and_handles_nothing_twice(tmp_path: Path) -> None:
    seed = int(os.environ.get("SDSTORE_SEED", time.time_ns() % 2**32))
    print(f"SDSTORE_SEED={seed}")
    rounds, delivered = kill_and_check(tmp_path / "chat.db", 4.0, seed)
    assert rounds >= 3
    assert delivered


def state_of(path: Path) -> tuple[object, ...]:
    """What the file holds for the channel, as a restart finds it."""
    with ParticipantFile(path) as file:
        assert file.check() == []
        log, state = file.log(CHANNEL), file.state(CHANNEL)
        delivered = [(each.number, each.frame) for each in log.deliveries(0, 10_000)]
        staged = [each.frame for each in log.staged(10_000)]
        file.participant(CHANNEL, "ada").tick(6_000)
        return len(log), delivered, staged, state, file.confirmed(CHANNEL)


def commit_ends(wal: bytes) -> list[int]:
    """Where each transaction of a write-ahead log ends (the SQLite file format, section 4.1)."""
    frame_bytes = 24 + int.from_bytes(wal[8:12])
    starts = range(32, len(wal), frame_bytes)
    return [start + frame_bytes for start in starts if any(wal[start + 4 : start + 8])]


def test_a_power_cut_at_any_byte_of_the_log_leaves_a_save_as_a_whole(tmp_path: Path) -> None:
    """Whatever prefix of SQLite's write-ahead log is on the disk: all of the commits in it count."""
    seed = int(os.environ.get("SDSTORE_SEED", time.time_ns() % 2**32))
    print(f"SDSTORE_SEED={seed}")
    random, frames = Random(seed), conversation()[:30]
    path, copy = tmp_path / "chat.db", tmp_path / "copy.db"
    wal = Path(f"{path}-wal")

    def cut(size_bytes: int, tail: bytes = b"") -> tuple[object, ...]:
        for each in tmp_path.glob("copy.db*"):
            each.unlink()
        copy.write_bytes(main)
        Path(f"{copy}-wal").write_bytes(wal.read_bytes()[:size_bytes] + tail)
        return state_of(copy)

    with ParticipantFile(path) as file:
        ada, log = file.participant(CHANNEL, "ada"), file.log(CHANNEL)
        file.save(CHANNEL, ada.tick(5_000))
        file._database.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        main = path.read_bytes()
        ends = [0]
        for start in range(0, len(frames), 10):
            part = frames[start : start + 10]
            messages = [(decode(frame)[0], frame) for frame in part[5:]]
            log.stage([Staged(each, frame, entry_digest(each)) for each, frame in messages], [])
            ends.append(wal.stat().st_size)
            effects = [each for frame in part[:5] for each in ada.receive(frame, 5_000)]
            effects += ada.take_staged(5_000, 4)
            file.save(CHANNEL, effects)
            ends.append(wal.stat().st_size)
            with file.transaction():
                file.confirm(CHANNEL, len(log.deliveries(0, 1_000)) - 1)
            ends.append(wal.stat().st_size)
        assert path.read_bytes() == main  # no checkpoint meanwhile
        assert commit_ends(wal.read_bytes()) == ends[1:]  # each call is one transaction
        whole = [cut(end) for end in ends]
        assert len({repr(each) for each in whole}) == len(ends)
        for _ in range(10):
            size_bytes = random.randrange(ends[-1])
            last = max(n for n, end in enumerate(ends) if end <= size_bytes)
            tail = random.choice([b"", bytes(5_000), random.randbytes(5_000)])
            assert cut(size_bytes, tail) == whole[last]


def test_the_file_is_written_as_durably_as_sqlite_can(tmp_path: Path) -> None:
    with ParticipantFile(tmp_path / "chat.db") as file:
        found: dict[str, Any] = {
            name: file._database.raw.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2}


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with ParticipantFile(path):
                os.write(writing, b"open")
                time.sleep(60)
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 4) == b"open"
        with pytest.raises(ParticipantFileError) as refused:
            ParticipantFile(path)
        assert refused.value.code == "in_use"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    ParticipantFile(path).close()

"""`ParticipantFile`: its log behaves as the one in memory, and what was saved is there afterwards."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sdstore.errors import LocalProtocolError
from sdstore.participant import ParticipantFile, ParticipantFileError
from sdstore.sds.codec import encode
from sdstore.sds.effects import Broadcast, Deliver, Effect, Save, Status
from sdstore.sds.log import LogEntry, MemoryLog, Noted, Staged
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN, HistoryEntry, Message, entry_digest
from sdstore.sds.participant import Participant

CHANNEL = "general"
IDS = ["a", "b", "ä", "Z", "10", "9", "\U0001f41d", "\uffff", "x" * 1_000, "e\u0301", "é"]
LAMPORTS = [LAMPORT_MIN, -1, 0, 1, 2, 2, 3, 1_763_000_000_000, LAMPORT_MAX]


def message_of(
    message_id: str, lamport: int = 1, content: bytes = b"hum", **fields: object
) -> Message:
    return Message(message_id, CHANNEL, "ada", lamport, content=content, **fields)  # type: ignore[arg-type]


def entry_of(message: Message, number: int = 0, hint: bytes = b"") -> LogEntry:
    return LogEntry(message, encode(message), number, hint)


def staged_of(message: Message, hint: bytes = b"") -> Staged:
    return Staged(message, encode(message), entry_digest(message), hint)


def save_of(**changes: bytes | None) -> Save:
    return Save(tuple(changes.items()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


@pytest.fixture
def file(path: Path) -> Iterator[ParticipantFile]:
    with ParticipantFile(path) as file:
        yield file


class Logs(RuleBasedStateMachine):
    """The same calls to a log in memory and to one in a file, which is closed and opened in between.

    `saved` is the log in memory as of the last save, because unsaved changes end with the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name, "chat.db")
        self.file = self.opened()
        self.file.log("another").append(entry_of(message_of("a", 2), 1))
        self.file.save("another", [save_of(progress=b"of another")])
        self.state: dict[str, bytes] = {}
        self.log = MemoryLog()
        self.calls: list[tuple[str, object]] = []
        self.saved: list[tuple[str, object]] = []
        self.number = 0

    def opened(self) -> ParticipantFile:
        file = ParticipantFile(self.path)
        file._database.raw.execute("PRAGMA synchronous = OFF")  # another test cuts the power
        return file

    def both(self, name: str, argument: object) -> None:
        for log in (self.log, self.file.log(CHANNEL)):
            getattr(log, name)(argument)
        self.calls.append((name, argument))

    @rule(
        message_id=st.sampled_from(IDS),
        lamport=st.sampled_from(LAMPORTS),
        content=st.binary(min_size=1, max_size=3),
        is_own=st.booleans(),
        hint=st.sampled_from([b"", b"\0hint"]),
        after_gap=st.lists(st.sampled_from([*IDS, "\0", '"']), max_size=2).map(tuple),
        is_late=st.booleans(),
        filter_bytes=st.sampled_from([0, 1_024, 1_100]),
        changed=st.integers(0, 1_023),
    )
    def append(
        self, message_id: str, lamport: int, content: bytes, is_own: bool, hint: bytes,
        after_gap: tuple[str, ...], is_late: bool, filter_bytes: int, changed: int,
    ) -> None:  # fmt: skip
        delivered = self.log.deliveries(0, 10_000)
        supersedes = message_id in {each.message.message_id for each in delivered}
        if self.log.contains(message_id) and not supersedes:
            return
        is_own &= not supersedes
        bloom = bytearray(filter_bytes)
        if bloom:
            bloom[changed] = 255
        message = message_of(message_id, lamport, content, bloom_filter=bytes(bloom))
        self.number += not is_own
        number = 0 if is_own else self.number
        frame = encode(message)
        entry = LogEntry(message, frame, number, hint, after_gap, is_late, supersedes)
        self.both("append", entry)

    @rule(
        ids=st.lists(st.sampled_from(IDS), max_size=4),
        lamport=st.sampled_from(LAMPORTS),
        content=st.binary(min_size=1, max_size=2),
        noted=st.lists(
            st.builds(Noted, st.sampled_from(LAMPORTS), st.sampled_from([b"n" * 32, b"m" * 32]))
        ),
    )
    def stage(self, ids: list[str], lamport: int, content: bytes, noted: list[Noted]) -> None:
        staged = [
            staged_of(message_of(each, lamport, content), b"hint")
            for each in ids
            if not self.log.contains(each)
        ]
        for log in (self.log, self.file.log(CHANNEL)):
            log.stage(staged, noted)
        # Staging is durable at once, whatever was not saved.
        self.calls.append(("stage", (staged, noted)))
        self.saved.append(("stage", (staged, noted)))

    @rule(ids=st.lists(st.sampled_from(IDS), max_size=4))
    def unstage(self, ids: list[str]) -> None:
        self.both("unstage", ids)

    @rule(count=st.integers(0, 5))
    def unstage_the_first(self, count: int) -> None:
        self.both("unstage", [each.message.message_id for each in self.log.staged(count)])

    @rule(
        key=st.sampled_from(["progress", "sent/\0", "waiting/ä"]),
        value=st.none() | st.binary(max_size=3),
    )
    def save(self, key: str, value: bytes | None) -> None:
        self.file.save(CHANNEL, [Status(), Save(((key, value),))])
        if value is None:
            self.state.pop(key, None)
        else:
            self.state[key] = value
        self.saved = list(self.calls)

    @rule()
    def open_anew(self) -> None:
        self.file.close()
        self.file = self.opened()
        self.log = MemoryLog()
        self.calls = []
        for name, argument in self.saved:
            if name == "stage":
                staged, noted = argument  # type: ignore[misc]
                self.log.stage(
                    [s for s in staged if not self.log.contains(s.message.message_id)], noted
                )
                self.calls.append((name, argument))
            else:
                getattr(self.log, name)(argument)
                self.calls.append((name, argument))
        self.saved = list(self.calls)
        self.number = max((each.number for each in self.log.deliveries(0, 10_000)), default=0)

    @rule(count=st.integers(0, 12), before=st.sampled_from([*LAMPORTS, LAMPORT_MAX + 1]))
    def newest_are_equal(self, count: int, before: int) -> None:
        assert self.file.log(CHANNEL).newest(count, before) == self.log.newest(count, before)

    @rule(after=st.integers(0, 5), count=st.integers(0, 5))
    def deliveries_are_equal(self, after: int, count: int) -> None:
        found = self.file.log(CHANNEL).deliveries(after, count)
        assert found == self.log.deliveries(after, count)

    @rule(count=st.integers(0, 8))
    def staged_are_equal(self, count: int) -> None:
        assert self.file.log(CHANNEL).staged(count) == self.log.staged(count)

    @invariant()
    def ids_and_frames_are_equal(self) -> None:
        log = self.file.log(CHANNEL)
        assert len(log) == len(self.log)
        for each in IDS:
            assert log.contains(each) == self.log.contains(each)
            assert log.frame(each) == self.log.frame(each)
        assert log.digests(IDS) == self.log.digests(IDS)

    @rule()
    def elements_are_equal(self) -> None:
        def elements(log: MemoryLog) -> set[tuple[int, bytes]]:
            return {
                (lamport, ids[32 * n : 32 * n + 32])
                for lamports, ids in log.elements()
                for n, lamport in enumerate(lamports)
            }

        log = self.file.log(CHANNEL)
        ours = elements(self.log)
        assert elements(log) == ours  # type: ignore[arg-type]
        digests = [element_id for _, element_id in ours]
        assert log.frames(digests) == self.log.frames(digests)
        assert log.noted_count == self.log.noted_count

    @invariant()
    def the_other_channel_is_untouched(self) -> None:
        another = self.file.log("another")
        assert (len(another), another.contains("a"), another.contains("b")) == (1, True, False)
        assert self.file.state("another") == {"progress": b"of another"}
        assert self.file.state(CHANNEL) == self.state

    def teardown(self) -> None:
        self.file.close()
        self.directory.cleanup()


TestLogs = Logs.TestCase
TestLogs.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# --- faults --------------------------------------------------------------------------------------


def code_of(path: Path) -> str:
    with pytest.raises(ParticipantFileError) as refused:
        ParticipantFile(path).close()
    return refused.value.code


def test_a_file_is_open_once(path: Path, file: ParticipantFile) -> None:
    assert code_of(path) == "in_use"
    file.close()
    with ParticipantFile(path):
        assert code_of(path) == "in_use"


def test_another_schema_is_refused_and_left_as_it_is(path: Path) -> None:
    ParticipantFile(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE sds_meta SET value = x'7f' WHERE name = 'version'")
    raw.close()
    before = path.read_bytes()
    assert code_of(path) == "other_version"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is long enough" * 50, b"SQLite format 3\0junk"]
)
def test_a_file_that_is_no_database_is_called_damaged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert code_of(path) == "damaged"
    assert path.read_bytes() == content


def test_a_file_without_one_of_its_tables_is_called_damaged(path: Path) -> None:
    ParticipantFile(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TABLE sds_frames")
    raw.close()
    assert code_of(path) == "damaged"


def test_damaged_pages_raise_and_are_never_read_as_content(path: Path) -> None:
    messages = [message_of(f"m{n}", n, b"text %d" % n * 20) for n in range(300)]
    with ParticipantFile(path) as file:
        for number, message in enumerate(messages, 1):
            file.log(CHANNEL).append(entry_of(message, number))
        file.save(CHANNEL, [save_of(progress=b"1")])
    whole = path.read_bytes()
    codes = set()
    for page in range(1, len(whole) // 4_096):
        rotten = bytearray(whole)
        rotten[page * 4_096 + 2_000 : page * 4_096 + 2_040] = b"\xa5" * 40
        path.write_bytes(rotten)
        try:
            with ParticipantFile(path) as file:
                log = file.log(CHANNEL)
                delivered = [each.message for each in log.deliveries(0, 1_000)]
                assert delivered == messages[: len(delivered)]
                for message in messages:
                    if log.contains(message.message_id):
                        assert log.frame(message.message_id) == encode(message)
        except ParticipantFileError as error:
            codes.add(error.code)
    assert codes == {"damaged"}


def test_a_full_disk_is_an_error_and_the_next_save_writes_everything(
    path: Path, file: ParticipantFile
) -> None:
    log = file.log(CHANNEL)
    pages = file._database.raw.execute("PRAGMA page_count").fetchone()[0]
    file._database.raw.execute(f"PRAGMA max_page_count = {pages + 4}")
    big = bytes(range(256)) * 4
    for number in range(1, 41):
        log.append(
            entry_of(message_of(f"m{number}", number, b"x" * 2_000, bloom_filter=big), number)
        )
    for _ in range(2):
        with pytest.raises(ParticipantFileError) as refused:
            file.save(CHANNEL, [save_of(progress=b"40")])
        assert refused.value.code == "disk_full"
        assert (len(log), log.contains("m40"), file.state(CHANNEL)) == (40, True, {})
        assert [each.entry.message_id for each in log.newest(2, 100)] == ["m39", "m40"]
    file._database.raw.execute("PRAGMA max_page_count = 1000000")
    log.append(entry_of(message_of("m41", 41), 41))
    file.save(CHANNEL)
    file.close()
    with ParticipantFile(path) as again:
        assert again.state(CHANNEL) == {"progress": b"40"}
        entries = again.log(CHANNEL).deliveries(0, 100)
        assert [each.number for each in entries] == list(range(1, 42))


def test_a_file_that_cannot_be_written_is_an_error_and_keeps_what_it_had(
    path: Path, file: ParticipantFile
) -> None:
    log = file.log(CHANNEL)
    file._database.raw.execute("PRAGMA query_only = 1")
    log.append(entry_of(message_of("a"), 1))
    with pytest.raises(ParticipantFileError) as refused:
        file.save(CHANNEL, [save_of(progress=b"1")])
    assert refused.value.code == "read_only"
    with pytest.raises(ParticipantFileError):
        log.stage([staged_of(message_of("b"))], [])
    assert log.staged(9) == []
    file._database.raw.execute("PRAGMA query_only = 0")
    file.close()
    with ParticipantFile(path) as again:
        assert (len(again.log(CHANNEL)), again.state(CHANNEL)) == (0, {})


def test_a_file_that_was_deleted_is_not_written_in_vain(path: Path, file: ParticipantFile) -> None:
    file.log(CHANNEL).append(entry_of(message_of("a"), 1))
    path.unlink()
    for _ in range(2):
        with pytest.raises(ParticipantFileError) as refused:
            file.save(CHANNEL)
        assert refused.value.code == "file_gone"


# --- values --------------------------------------------------------------------------------------


def test_channels_states_and_their_keys_are_any_strings(path: Path) -> None:
    channels = ["", "0", "\0", "a\0b", "a\0c", "\U0001f41d", "\uffff", "\ud800", "é", "e\u0301"]
    with ParticipantFile(path) as file:
        for channel in channels:
            key = f"sent/{channel}"
            file.save_all({channel: [Save(((key, channel.encode("utf-8", "replace")),))]})
    with ParticipantFile(path) as file:
        assert file.channels() == sorted(channels, key=lambda c: c.encode("utf-8", "surrogatepass"))
        for channel in channels:
            assert file.state(channel) == {f"sent/{channel}": channel.encode("utf-8", "replace")}


def test_order_and_deliveries_span_what_is_saved_and_what_is_not(file: ParticipantFile) -> None:
    log = file.log(CHANNEL)
    for number, (message_id, lamport) in enumerate([("c", 5), ("b", 2), ("a", 2)], 1):
        log.append(entry_of(message_of(message_id, lamport), number))
    for is_saved in (False, True):
        assert [each.entry.message_id for each in log.newest(9, 9)] == ["a", "b", "c"]
        assert [each.entry.message_id for each in log.newest(1, 5)] == ["b"]
        assert [each.number for each in log.deliveries(1, 9)] == [2, 3]
        assert [each.number for each in log.deliveries(0, 2)] == [1, 2]
        if not is_saved:
            file.save(CHANNEL)
    log.append(entry_of(message_of("aa", 2), 4))
    assert [each.entry.message_id for each in log.newest(3, 5)] == ["a", "aa", "b"]
    assert [each.number for each in log.deliveries(2, 9)] == [3, 4]


def test_a_save_over_several_channels_is_one_transaction(path: Path, file: ParticipantFile) -> None:
    writes = []
    file._database.raw.set_trace_callback(
        lambda text: writes.append(text) if text == "BEGIN IMMEDIATE" else None
    )
    logs = [file.log(each) for each in ("a", "b")]
    writes.clear()
    for log in logs:
        log.append(entry_of(message_of("m"), 1))
    file.save_all({"a": [save_of(progress=b"a")], "b": [save_of(progress=b"b")]})
    file.save_all({"a": [], "b": []})  # nothing to write
    assert writes == ["BEGIN IMMEDIATE"]
    assert (file.state("a"), file.state("b")) == ({"progress": b"a"}, {"progress": b"b"})


def frames_with_filters(count: int) -> list[Message]:
    """A conversation whose filters gain ten bits a message, from two senders with other filters."""
    random = Random(count)
    blooms = [bytearray(18_752), bytearray(random.randbytes(18_752))]
    messages = []
    for n in range(count):
        bloom = blooms[n % 7 == 0]
        for _ in range(10):
            bloom[random.randrange(len(bloom))] |= 1 << random.randrange(8)
        content = random.randbytes(random.randrange(1, 200))
        messages.append(message_of(f"m{n}", n, content, bloom_filter=bytes(bloom)))
    return messages


def test_a_reference_of_a_failed_save_is_not_used_by_the_next(
    path: Path, file: ParticipantFile
) -> None:
    log = file.log(CHANNEL)
    for number, message in enumerate(frames_with_filters(20), 1):
        without = replace(message, bloom_filter=b"")  # as a participant logs it
        log.append(LogEntry(without, encode(message), number))
    pages = file._database.raw.execute("PRAGMA page_count").fetchone()[0]
    file._database.raw.execute(f"PRAGMA max_page_count = {pages + 6}")
    with pytest.raises(ParticipantFileError, match="disk_full"):
        file.save(CHANNEL)
    file._database.raw.execute("PRAGMA max_page_count = 1000000")
    file._database.raw.execute("INSERT INTO sds_filters (channel_no, filter) VALUES (7, x'00')")
    file.save(CHANNEL)
    file.close()
    with ParticipantFile(path) as again:
        found = [each.message for each in again.log(CHANNEL).deliveries(0, 99)]
        assert found == frames_with_filters(20)


# --- participants --------------------------------------------------------------------------------


def effects_of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [each for each in effects if isinstance(each, kind)]


def test_a_participant_continues_from_its_file(path: Path) -> None:
    bob = Participant(CHANNEL, "bob")
    hello, lost, late = (
        effects_of(bob.send(content, 1_000), Broadcast)[0].frame
        for content in (b"hello", b"lost for now", b"waits")
    )
    with ParticipantFile(path) as file:
        ada = file.participant(CHANNEL, "ada")
        effects = ada.receive(hello, 2_000) + ada.receive(late, 2_000) + ada.send(b"hi", 2_000)
        file.save(CHANNEL, effects, [Save((("driver/cursor/url", b"1"),))])
        (own,) = effects_of(effects, Broadcast)
        assert [each.number for each in effects_of(effects, Deliver)] == [1]
    with ParticipantFile(path) as file:
        ada = file.participant(CHANNEL, "ada")
        assert str(ada.status) == "1 missing, 1 waiting for their causes"
        again = effects_of(ada.tick(3_000), Deliver)
        assert [(each.number, each.message.content) for each in again] == [(1, b"hello")]
        effects = ada.confirm(1) + ada.receive(lost, 4_000)
        assert [each.number for each in effects_of(effects, Deliver)] == [2, 3]
        assert ada.log.frame(own.message_id) == own.frame
        file.save(CHANNEL, effects)
    with ParticipantFile(path) as file:
        with pytest.raises(LocalProtocolError, match="state_of_another"):
            file.participant(CHANNEL, "eve")
        ada = file.participant(CHANNEL, "ada")
        assert str(ada.status) == "all synced"
        assert [each.number for each in effects_of(ada.tick(5_000), Deliver)] == [2, 3]


def test_what_the_application_confirmed_is_not_delivered_again(path: Path) -> None:
    bob = Participant(CHANNEL, "bob")
    frames = [effects_of(bob.send(b"%d" % n, 1_000), Broadcast)[0].frame for n in range(3)]
    with ParticipantFile(path) as file:
        ada = file.participant(CHANNEL, "ada")
        for frame in frames:
            file.save(CHANNEL, ada.receive(frame, 2_000))
        with file.transaction():
            file.confirm(CHANNEL, 2)
        # The program does not tell the participant, whose later save knows of no confirmation.
        file.save(CHANNEL, ada.send(b"hi", 3_000))
    with ParticipantFile(path) as file:
        effects = file.participant(CHANNEL, "ada").tick(4_000)
        assert [each.number for each in effects_of(effects, Deliver)] == [3]


# --- the application's transaction ---------------------------------------------------------------


def test_an_application_confirms_a_delivery_with_its_own_work(path: Path) -> None:
    with ParticipantFile(path) as file:
        file.log(CHANNEL)
        with file.transaction() as connection:
            connection.execute("CREATE TABLE inbox (number INTEGER, content BLOB)")
            connection.execute("INSERT INTO inbox VALUES (1, 'hum')")
            file.confirm(CHANNEL, 1)
        with pytest.raises(ZeroDivisionError), file.transaction() as connection:  # noqa: PT012
            connection.execute("INSERT INTO inbox VALUES (2, 'buzz')")
            file.confirm(CHANNEL, 2)
            _ = 1 // 0
        assert file.confirmed(CHANNEL) == 1
    with ParticipantFile(path) as file:
        assert file.confirmed(CHANNEL) == 1
        with file.transaction() as connection:
            assert connection.execute("SELECT count(*) FROM inbox").fetchone() == (1,)
            file.confirm(CHANNEL, 0)  # confirmations never go back
        assert file.confirmed(CHANNEL) == 1


def test_a_file_that_cannot_be_opened_is_refused_with_advice_that_helps(tmp_path: Path) -> None:
    with pytest.raises(ParticipantFileError, match="does its folder exist"):
        ParticipantFile(tmp_path / "nowhere" / "chat.db")
    text = tmp_path / "text.db"
    text.write_text("hello")
    with pytest.raises(ParticipantFileError, match="not a SQLite database") as refused:
        ParticipantFile(text)
    assert "restore" not in refused.value.detail


def test_a_staged_message_that_waited_is_logged_with_its_frame(path: Path) -> None:
    cause, effect = message_of("m1", 1), message_of("m2", 2)
    effect = replace(effect, causal_history=(HistoryEntry("m1"),))
    with ParticipantFile(path) as file:
        ada = file.participant(CHANNEL, "ada")
        file.log(CHANNEL).stage([staged_of(effect)], [])
        file.save(CHANNEL, ada.take_staged(5_000, 10))  # it waits: its row is gone
        file.save(CHANNEL, ada.receive(encode(cause), 5_000))
    with ParticipantFile(path) as file:
        log = file.log(CHANNEL)
        assert [each.message.message_id for each in log.deliveries(0, 9)] == ["m1", "m2"]
        assert log.frame("m2") == encode(effect)


def test_a_check_names_what_the_log_relies_on(path: Path) -> None:
    with ParticipantFile(path) as file:
        log = file.log(CHANNEL)
        for number in range(1, 4):
            log.append(entry_of(message_of(f"m{number}", number), number))
        log.stage([staged_of(message_of("m9"))], [Noted(1, b"n" * 32)])
        file.save(CHANNEL)
        assert file.check() == []
        raw = file._database.raw
        raw.execute("DELETE FROM sds_frames WHERE log_no = (SELECT max(log_no) FROM sds_log)")
        raw.execute("UPDATE sds_channels SET noted_count = 7")
        raw.execute("UPDATE sds_log SET number = -1 WHERE number = 3")
        assert file.check() == [
            f"channel {CHANNEL!r} has 2 logged messages, and counts 3",
            f"channel {CHANNEL!r} has 1 names, and counts 7",
            "the log has 1 rows without a frame",
        ]

"""SQLite files that are none, or damaged: refused when they are opened, a problem when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from app.store.database import UnusableFileError
from app.store.store import Store
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, entry_of

pytestmark = pytest.mark.anyio

PAGE_BYTES = 4_096
MESSAGES = 2_000


@pytest.fixture
async def damaged(tmp_path: Path) -> Path:
    """A store whose pages are garbage, but for those that are read when it is opened."""
    path = tmp_path / "store.db"
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    store.begin_writing()
    store.writer.write([entry_of(content_frame(n), b"hint") for n in range(MESSAGES)])
    await store.close()
    content = bytearray(path.read_bytes())
    for page in range(48, len(content) // PAGE_BYTES):
        content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = b"\xff" * PAGE_BYTES
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"no database at all", b"\xff" * 20_000])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises(UnusableFileError, match=r"store\.db cannot be used"):
        await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    assert path.read_bytes() == content


async def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableFileError):
        await Store.open(f"sqlite:///{tmp_path}", DEFAULT_LIMITS)
    (tmp_path / "store.db-writer").mkdir()
    with pytest.raises(UnusableFileError):
        await Store.open(f"sqlite:///{tmp_path}/store.db", DEFAULT_LIMITS)


async def test_every_read_of_a_damaged_file_is_refused_and_none_blocks_the_next(
    damaged: Path,
) -> None:
    store = await Store.open(f"sqlite:///{damaged}", DEFAULT_LIMITS)
    ids, last = [f"message-{n:06}" for n in range(MESSAGES)], MESSAGES - 1
    for _ in range(2):
        for read in (
            store.entries.find(ids[last], None),
            store.entries.lookup(ids, [], None, presence_only=True, bytes_max=BYTES_MAX),
            store.entries.by_digest([entry_of(content_frame(n)).digest for n in range(MESSAGES)]),
            store.claims.page(b"hint", None, 100),
            store.channels.feed(0, MESSAGES, BYTES_MAX),
            store.channels.page("channel", limit=MESSAGES, bytes_max=BYTES_MAX),
        ):
            with pytest.raises(Problem) as refused:
                await read
            assert refused.value.code is Code.STORE_UNAVAILABLE
    assert len(await store.channels.after(None, 10)) == 1
    await store.close()

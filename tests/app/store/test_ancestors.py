"""Ancestors: whatever the graph, the pages together are its closure, each in causal order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.entries import Entry, MetId, NewEntry
from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS, Limits
from app.store.entryrows import Position
from app.store.histories import AncestorPage
from app.store.store import Store
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.graphs import reaches
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, Stores, entry_of

IDS = ["a", "b", "c", "d", "é", "z"]
CHANNEL = "channel"

messages = st.builds(
    Message,
    message_id=st.sampled_from(IDS),
    channel_id=st.sampled_from([CHANNEL, CHANNEL, CHANNEL, "other"]),
    lamport_timestamp=st.integers(0, 3),
    causal_history=st.lists(
        st.builds(HistoryEntry, st.sampled_from([*IDS, "never"])), max_size=3
    ).map(tuple),
    content=st.sampled_from([b"1", b"2"]),
)
graphs = st.lists(messages, min_size=1, max_size=14)
some_ids = st.lists(st.sampled_from([*IDS, "never"]), max_size=3, unique=True)


def closure(
    entries: Sequence[NewEntry], heads: Sequence[str], known: Sequence[str]
) -> tuple[set[bytes], set[str]]:
    """Digests of everything before the heads, and the IDs that are not here."""
    by_id: dict[str, list[NewEntry]] = {}
    for entry in entries:
        if entry.message.channel_id == CHANNEL:
            by_id.setdefault(entry.message.message_id, []).append(entry)
    found: set[bytes] = set()
    missing: set[str] = set()
    starts = set(heads) - set(known)
    seen, waiting = {*heads, *known}, sorted(starts)
    while waiting:
        message_id = waiting.pop()
        if message_id not in by_id:
            missing.add(message_id)
        for entry in by_id.get(message_id, []):
            if message_id not in starts:
                found.add(entry.digest)
            named = {told.message_id for told in entry.message.causal_history} - seen
            seen |= named
            waiting += named
    return found, missing


async def all_pages(
    store: Store, heads: Sequence[str], known: Sequence[str], limit: int
) -> list[AncestorPage]:
    pages: list[AncestorPage] = []
    after: Position | None = None
    while not pages or after is not None:
        page = await store.ancestors.page(
            CHANNEL, heads, known, limit=limit, bytes_max=BYTES_MAX, after=after
        )
        pages.append(page)
        after = page.next
        assert len(pages) < 200
    return pages


def check_order(page: list[Entry], entries: Sequence[NewEntry]) -> None:
    by_digest = {entry.digest: entry.message for entry in entries}
    numbers: dict[str, list[int]] = {}
    for number, entry in enumerate(page):
        numbers.setdefault(entry.message_id, []).append(number)
    causes = [
        [n for told in by_digest[e.digest].causal_history for n in numbers.get(told.message_id, [])]
        for e in page
    ]
    for number, its_causes in enumerate(causes):
        for cause in its_causes:
            assert cause < number or number in reaches(causes, cause)


@given(graphs, some_ids, some_ids, st.sampled_from([1, 2, 3, 100]))
@settings(max_examples=60, deadline=None)
def test_the_pages_together_are_the_closure_and_each_is_in_causal_order(
    stores: Stores, sent: list[Message], heads: list[str], known: list[str], limit: int
) -> None:
    async def scenario() -> None:
        entries = [entry_of(encode(message)) for message in sent]
        found, missing = closure(entries, heads, known)
        async with stores.open() as store:
            store.writer.write(entries)
            pages = await all_pages(store, heads, known, limit)
            times = Counter(entry.digest for page in pages for entry in page.entries)
            assert set(times) == found
            assert {each for page in pages for each in page.missing} == missing
            assert max(times.values(), default=0) <= (2 if limit < 100 else 1)
            for page in pages:
                assert len(page.entries) <= limit
                check_order(page.entries, entries)

    asyncio.run(scenario())


def chain(count: int, *, channel_id: str = CHANNEL) -> list[NewEntry]:
    """Each names the two before it."""
    return [
        entry_of(
            content_frame(
                number,
                channel_id=channel_id,
                history=tuple(
                    HistoryEntry(f"message-{n:06}") for n in range(max(0, number - 2), number)
                ),
            )
        )
        for number in range(count)
    ]


@pytest.mark.anyio
async def test_a_chain_comes_back_oldest_first(stores: Stores) -> None:
    async with stores.open() as store:
        entries = chain(400)
        store.writer.write(entries)
        page = await store.ancestors.page(
            CHANNEL, ["message-000399"], limit=1000, bytes_max=BYTES_MAX
        )
        assert [entry.digest for entry in page.entries] == [e.digest for e in entries[:-1]]
        assert (page.missing, page.next) == ([], None)


@pytest.mark.anyio
async def test_a_page_is_cut_at_its_bound_in_bytes_but_never_empty(stores: Stores) -> None:
    async with stores.open() as store:
        store.writer.write(chain(20))
        page = await store.ancestors.page(CHANNEL, ["message-000019"], limit=1000, bytes_max=1)
        found = [len(page.entries)]
        while page.next is not None:
            page = await store.ancestors.page(
                CHANNEL, ["message-000019"], limit=1000, bytes_max=1, after=page.next
            )
            found.append(len(page.entries))
        # The head takes the first one.
        assert found == [0, *[1] * 19]


@pytest.mark.anyio
async def test_what_a_continuation_cannot_remember_is_named_as_missing(stores: Stores) -> None:
    narrow = Limits(ancestors_frontier_max=3, history_entries_max=256)
    leaves = [entry_of(content_frame(number)) for number in range(10)]
    history = tuple(HistoryEntry(entry.message.message_id) for entry in leaves)
    head = entry_of(content_frame(99, message_id="head", history=history))
    async with stores.open(narrow) as store:
        store.writer.write([*leaves, head])
        page = await store.ancestors.page(CHANNEL, ["head"], limit=1, bytes_max=BYTES_MAX)
        found = {entry.message_id for entry in page.entries}
        left = set(page.missing)
        while page.next is not None:
            page = await store.ancestors.page(
                CHANNEL, ["head"], limit=1, bytes_max=BYTES_MAX, after=page.next
            )
            found |= {entry.message_id for entry in page.entries}
            left |= set(page.missing)
        assert left
        assert found
        assert found | left == {entry.message.message_id for entry in leaves}
        assert not found & left


@pytest.mark.anyio
async def test_a_cursor_leads_to_no_other_channel_and_nonsense_is_refused(stores: Stores) -> None:
    async with stores.open() as store:
        secret = entry_of(content_frame(1, channel_id="secret"))
        (result,) = store.writer.write([secret])
        store.writer.write(chain(3))
        waiting = f"{result.seq:x}"
        page = await store.ancestors.page(
            CHANNEL, ["x"], limit=10, bytes_max=BYTES_MAX, after=(9, "z", "00", waiting, "")
        )
        assert (page.entries, page.next) == ([], None)
        for nonsense in ("g", "-1", "f" * 40, "1.-5"):
            with pytest.raises(Problem) as refused:
                await store.ancestors.page(
                    CHANNEL, ["x"], limit=1, bytes_max=1, after=(9, "z", "00", nonsense, "")
                )
            assert refused.value.code is Code.INVALID_CURSOR


@pytest.mark.anyio
async def test_a_channel_that_is_not_here_has_nothing_but_missing_heads(stores: Stores) -> None:
    async with stores.open(DEFAULT_LIMITS) as store:
        page = await store.ancestors.page("none", ["b", "a"], ["b"], limit=1, bytes_max=1)
        assert page == AncestorPage([], ["a"], None)


@pytest.mark.anyio
async def test_ids_of_sync_messages_stay_missing_and_are_marked(stores: Stores) -> None:
    async with stores.open(DEFAULT_LIMITS) as store:
        named = HistoryEntry("met"), HistoryEntry("never")
        frame = content_frame(1, channel_id=CHANNEL, message_id="head", history=named)
        store.writer.write([entry_of(frame)], [MetId(CHANNEL, "met"), MetId("other", "never")])
        page = await store.ancestors.page(CHANNEL, ["head"], limit=9, bytes_max=BYTES_MAX)
        assert page == AncestorPage([], ["met", "never"], None, (), ("met",))
        other = await store.ancestors.page("other", ["never"], limit=9, bytes_max=BYTES_MAX)
        assert other == AncestorPage([], ["never"], None, (), ("never",))

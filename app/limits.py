"""Every bound of the node, with its unit and its reason; nothing else in `app` declares one.

The same table is printed by `sdstore serve --show-limits` and stands in docs/limits.md (a test
compares them). Bounds of the reconciliation engine itself live in `recon.limits`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from sdstore.sync.limits import DEFAULT_LIMITS as SYNC
from sdstore.sync.limits import SyncLimits

KIB = 1024
MIB = 1024 * KIB


def _bound(value: int, unit: str, reason: str) -> int:
    bound: int = field(default=value, metadata={"unit": unit, "reason": reason})
    return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one node. All are inclusive: a value equal to the bound is accepted."""

    # --- one message -------------------------------------------------------------------------
    frame_bytes_max: int = _bound(
        MIB, "bytes", "seven times the 150 KiB a Waku relay carries; one frame fits any reply"
    )
    message_id_bytes_max: int = _bound(KIB, "bytes of UTF-8", "IDs are hashes or short names")
    channel_id_bytes_max: int = _bound(256, "bytes of UTF-8", "channel IDs are names, not content")
    sender_id_bytes_max: int = _bound(KIB, "bytes of UTF-8", "as message IDs: keys or names")
    history_entries_max: int = _bound(
        256, "entries", "js-waku sends 200, everybody else 2 to 10; each costs an index look-up"
    )
    hint_bytes_max: int = _bound(256, "bytes", "hints in use are 32-byte hashes")
    hints_per_publish_max: int = _bound(16, "hints", "one per transport a message went over")
    bloom_filter_bytes_max: int = _bound(
        64 * KIB, "bytes", "the filters in use have 18,752; the store never reads them"
    )

    # --- one request -------------------------------------------------------------------------
    batch_items_max: int = _bound(
        10_000, "items", "bounds the list of outcomes and the time one caller holds the writer"
    )
    body_bytes_max: int = _bound(
        32 * MIB, "bytes", "a batch of 1,000 real js-waku frames is 19 MiB"
    )
    small_body_bytes_max: int = _bound(
        2 * MIB, "bytes", "every request that is not a batch: one frame as JSON is 1.4 MiB"
    )
    operator_body_bytes_max: int = _bound(
        512 * KIB, "bytes", "of what an operator asks for: 1,000 channels of a sync"
    )
    batch_fields_max: int = _bound(
        200_000, "protobuf fields", "10,000 items with sixteen hints each; counted before parsing"
    )
    lookup_keys_max: int = _bound(
        10_000, "IDs and hints", "a page of missed messages, below one second of look-ups"
    )
    entries_max: int = _bound(
        10_000, "digests", "one streamed answer; only a part of it is in memory at a time"
    )
    page_items_max: int = _bound(
        1_000,
        "messages",
        "one page: a few milliseconds of the database, and its bytes are bounded too",
    )
    page_items_default: int = _bound(
        100, "messages", "what a screen of a client shows; a caller that wants more asks for it"
    )
    reply_bytes_max: int = _bound(
        8 * MIB, "bytes", "what one reply may hold in memory; a cut reply says how to go on"
    )
    variants_listed_max: int = _bound(
        100, "digests", "an equivocator can make any number; the rest is reached by paging"
    )
    hint_candidates_max: int = _bound(
        1_000, "entries", "claims are free to make; ranked first, then cut and paged"
    )
    hint_claims_per_entry_max: int = _bound(
        64, "claims", "more claims on one entry are spam; the first ones stay"
    )
    header_bytes_max: int = _bound(
        32 * KIB,
        "bytes of request line and headers, or of trailers",
        "sixteen hints and a cursor need 20 KiB; chunk headers count with the trailers",
    )
    header_lines_max: int = _bound(
        128, "lines", "browsers and proxies send 40; a line costs 200 bytes, however short it is"
    )
    unpack_factor_max: int = _bound(
        200,
        "times the bytes sent",
        "batches compress to a tenth, at most to a hundredth; up to unpacked_free_bytes any factor",
    )
    unpacked_free_bytes: int = _bound(
        2 * MIB, "bytes", "one message of equal bytes packs to nothing and is harmless"
    )

    # --- one connection ----------------------------------------------------------------------
    headers_timeout_s: int = _bound(10, "seconds", "headers fit one packet of a slow client")
    body_read_timeout_s: int = _bound(
        30, "seconds", "32 MiB at 1 MiB/s; a slower sender holds a connection for nothing"
    )
    unread_body_linger_s: int = _bound(
        2,
        "seconds",
        "after an answer to an unfinished body the rest is dropped, so that the answer arrives",
    )
    write_stall_timeout_s: int = _bound(
        30, "seconds", "a client that reads nothing for so long is gone"
    )
    connection_idle_s: int = _bound(
        75, "seconds", "longer than the pauses of clients that poll every minute"
    )
    pipelined_requests_max: int = _bound(
        16, "requests", "parsed ahead on one connection; the rest of what arrived waits as bytes"
    )

    # --- shared by all requests of a process ---------------------------------------------------
    connections_max: int = _bound(
        2_048, "connections", "each costs at most 100 KiB; the process raises its limit of files"
    )
    connections_per_address_max: int = _bound(
        1_536,
        "connections",
        "a proxy may stand for many clients; a quarter stays for everybody else",
    )
    bodies_bytes_max: int = _bound(
        64 * MIB, "bytes", "of bodies in flight, packed and unpacked: two of the largest at a time"
    )
    body_free_bytes: int = _bound(
        16 * KIB, "bytes", "of one body that need no room: a message waits for no large body"
    )
    replies_bytes_max: int = _bound(
        64 * MIB, "bytes", "of replies that are made or not yet read: eight of the largest"
    )
    reply_free_bytes: int = _bound(
        16 * KIB,
        "bytes",
        "of one reply that need no room: a message is served whoever does not read",
    )
    turns_max: int = _bound(
        2,
        "requests",
        "pages, look-ups and batches worked on at a time; each takes 20 ms of the loop",
    )
    sync_turns_max: int = _bound(
        4, "requests", "of reconciliation worked on at a time; they wait for the disk, too"
    )
    requests_waiting_max: int = _bound(
        512, "requests", "of one address that wait for the same thing; more get 503 at once"
    )
    share_wait_s: int = _bound(
        10, "seconds", "that a request waits for its turn or for room; then it gets 503"
    )
    stall_under_load_s: int = _bound(
        2, "seconds", "without 64 KiB sent or read; then a client makes room for those who wait"
    )

    # --- ancestors and gaps ------------------------------------------------------------------
    ancestors_max: int = _bound(1_000, "messages", "one page of a causal closure")
    ancestors_heads_max: int = _bound(
        1_000, "IDs", "heads of one request; a channel has a handful that nobody answered yet"
    )
    ancestors_visited_max: int = _bound(
        20_000, "IDs", "looked at for one page, missing ones included; 0.3 s of look-ups"
    )
    ancestors_frontier_max: int = _bound(
        4_096, "messages", "what a continuation remembers: 15 kB; the rest is named as missing"
    )
    gaps_max: int = _bound(1_000, "IDs", "one page of gaps")
    met_ids_max: int = _bound(
        1_000_000, "IDs", "sync messages are free to send; the oldest are forgotten first"
    )
    refused_digests_max: int = _bound(
        100_000, "digests", "what local policy refuses; one forgotten costs one more fetch"
    )

    # --- ingest ------------------------------------------------------------------------------
    group_items_max: int = _bound(
        8_192, "messages", "larger groups touch each index page less often; this one takes 0.4 s"
    )
    group_bytes_max: int = _bound(16 * MIB, "bytes of frames", "memory of one transaction")
    ingest_queue_items_max: int = _bound(
        65_536, "messages", "about two seconds of writing; beyond it callers get 503"
    )
    ingest_queue_bytes_max: int = _bound(
        128 * MIB, "bytes of frames", "memory of frames that wait for the writer"
    )

    # --- verification of stored frames -------------------------------------------------------
    verification_percent_max: int = _bound(
        1, "percent of one core", "10^6 frames of 19 kB in three hours, small ones in half an hour"
    )
    verification_interval_s: int = _bound(
        86_400, "seconds", "between the beginnings of two passes; disks do not rot faster"
    )
    verification_delay_s: int = _bound(60, "seconds", "after a start, which has enough to read")

    # --- PostgreSQL ---------------------------------------------------------------------------
    database_connections_max: int = _bound(
        8, "connections", "one process's readers; more than the server has cores gain nothing"
    )
    database_wait_s: int = _bound(
        5, "seconds", "for a connection: longer than a restart of the server, or it is down"
    )
    database_statement_s: int = _bound(
        60, "seconds", "one statement, or another writer's turn; all take milliseconds"
    )
    database_probe_interval_s: int = _bound(
        1, "seconds", "between two questions whether the database is there; each takes 0.1 ms"
    )
    database_answer_age_s_max: int = _bound(
        3, "seconds", "since the database last answered a node that calls itself ready"
    )
    lookups_shared_max: int = _bound(
        256, "look-ups", "in one query: 5 ms of the server, and memory of one reply"
    )
    lookups_waiting_max: int = _bound(
        8_192, "look-ups", "half a second of work; beyond it callers get 503"
    )

    # --- live readers ------------------------------------------------------------------------
    live_readers_max: int = _bound(1_000, "connections", "each holds a write buffer")
    live_queue_items_max: int = _bound(
        1_000, "messages", "a reader further behind gets a gap event and reads the feed"
    )
    live_queue_bytes_max: int = _bound(
        32 * MIB, "bytes of frames", "all live readers share one buffer"
    )
    live_unread_bytes_max: int = _bound(
        64 * MIB,
        "bytes",
        "of events that readers have not read, each counted, though they share the memory",
    )
    live_heartbeat_s: int = _bound(
        15, "seconds", "proxies close connections that are silent for 30 to 60"
    )

    # --- reconciliation and peers --------------------------------------------------------------
    recon_body_bytes_max: int = _bound(
        16 * MIB, "bytes", "one request with pushed entries; ranges alone stay below 1 MiB"
    )
    recon_push_items_max: int = _bound(
        4_096,
        "items",
        "four batches of our own initiator; an item of two bytes costs 1 us and more",
    )
    recon_fields_max: int = _bound(
        100_000, "protobuf fields", "4,096 items with sixteen hints each; counted before parsing"
    )
    recon_reply_bytes_max: int = _bound(8 * MIB, "bytes", "memory of one reply; the rest follows")
    recon_answer_bytes_max: int = _bound(
        SYNC.answer_bytes_max,
        "bytes",
        "summaries and lists of one reply: at most 50 ms; the rest is asked again",
    )
    index_save_interval_s: int = _bound(
        300, "seconds", "a killed node reads at most what came since the index was last written"
    )
    index_save_growth_min: int = _bound(
        20_000, "elements", "fewer are read from SQL in a few milliseconds"
    )
    recon_views_max: int = _bound(16, "views", "sessions at a time; one more costs a rebuilding")
    recon_views_bytes_max: int = _bound(
        1024 * MIB,
        "bytes",
        "three views of 10^7 elements, 28 bytes each; the last one always stays",
    )
    recon_view_elements_per_minute: int = _bound(
        60_000_000,
        "elements per minute and caller",
        "six seconds of one core; a byte that asks counts as one",
    )
    recon_reply_bytes_per_minute: int = _bound(
        4_096 * MIB, "bytes per minute and caller", "68 MiB/s, more than one node can serve"
    )
    recon_untrusted_reply_factor: int = _bound(
        16, "times the request", "a caller without credentials gains little by forging one"
    )
    recon_interests_bytes_max: int = _bound(
        32 * MIB, "bytes", "interests remembered by hash; one of 16,384 names takes 2 MiB"
    )
    negentropy_body_bytes_max: int = _bound(MIB, "bytes", "clients set frames of 60 to 500 kB")
    negentropy_ranges_max: int = _bound(
        131_072, "ranges", "of one message: 0.3 s of work; 1 MiB of fingerprints has 55,000"
    )
    negentropy_reply_bytes_max: int = _bound(
        500_000, "bytes", "what relays of that protocol use; the client asks on"
    )
    negentropy_channels_max: int = _bound(
        16, "channels", "sorted columns kept for the next message: 44 bytes per entry"
    )
    session_nonce_lifetime_s: int = _bound(
        SYNC.nonce_lifetime_s,
        "seconds",
        "how long a session key may be used before both sides draw new nonces",
    )
    recon_proof_lifetime_s: int = _bound(
        SYNC.proof_lifetime_s,
        "seconds",
        "so long idle peers compare roots, which have no key; then a session again",
    )
    peers_max: int = _bound(256, "peers", "each has a task and a record")
    syncs_remembered_max: int = _bound(256, "sessions", "the list an operator looks at")
    sync_seconds_max: int = _bound(
        SYNC.seconds_max,
        "seconds",
        "a session that takes longer is ended as partial and continued later",
    )

    @property
    def sync(self) -> SyncLimits:
        """The bounds of a session that this node drives."""
        return SyncLimits(
            seconds_max=self.sync_seconds_max,
            nonce_lifetime_s=self.session_nonce_lifetime_s,
            proof_lifetime_s=self.recon_proof_lifetime_s,
            answer_bytes_max=self.recon_answer_bytes_max,
        )


DEFAULT_LIMITS = Limits()


def limits_table(limits: Limits = DEFAULT_LIMITS) -> list[tuple[str, int, str, str]]:
    """(name, value, unit, reason) of every bound, in the order of declaration."""
    return [
        (f.name, getattr(limits, f.name), f.metadata["unit"], f.metadata["reason"])
        for f in fields(limits)
    ]

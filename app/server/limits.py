"""Every bound of the node, with its unit and its reason; nothing else in `app` declares one.

`sdstore serve --show-limits` prints them all, and docs/limits.md is made of them (`python -m tools.reference`). The bounds of the reconciliation engine are in `recon.limits`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from sdstore.sync.report import DEFAULT_LIMITS as SYNC
from sdstore.sync.report import SyncLimits

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
        MIB,
        "bytes",
        "seven times the 150 KiB that a Waku relay carries; any reply has room for one frame",
    )
    message_id_bytes_max: int = _bound(KIB, "bytes of UTF-8", "IDs are hashes or short names")
    channel_id_bytes_max: int = _bound(256, "bytes of UTF-8", "channel IDs are names, not content")
    sender_id_bytes_max: int = _bound(KIB, "bytes of UTF-8", "as message IDs: keys or names")
    history_entries_max: int = _bound(
        256, "entries", "js-waku sends 200, other clients 2 to 10; each costs an index look-up"
    )
    hint_bytes_max: int = _bound(256, "bytes", "hints in use are 32-byte hashes")
    hints_per_publish_max: int = _bound(16, "hints", "one per transport that carried the message")
    bloom_filter_bytes_max: int = _bound(
        64 * KIB, "bytes", "filters in use have 18,752; the store never reads them"
    )

    # --- one request -------------------------------------------------------------------------
    batch_items_max: int = _bound(
        10_000,
        "items",
        "bounds the list of outcomes and the time for which one caller occupies the writer",
    )
    body_bytes_max: int = _bound(
        32 * MIB, "bytes", "a batch of 1,000 real js-waku frames is 19 MiB"
    )
    small_body_bytes_max: int = _bound(
        2 * MIB, "bytes", "where no other bound of a body holds; one frame as JSON is 1.4 MiB"
    )
    operator_body_bytes_max: int = _bound(
        512 * KIB, "bytes", "of an operator's request; a sync of 1,000 channels fits"
    )
    batch_fields_max: int = _bound(
        200_000, "protobuf fields", "10,000 items with sixteen hints each; counted before parsing"
    )
    json_brackets_max: int = _bound(
        32_768,
        "[ and { characters",
        "of a message in JSON, counted before parsing (5 ms); 256 history entries have 60 in each ID",
    )
    lookup_keys_max: int = _bound(
        10_000, "IDs and hints", "a page of missed messages: less than one second of look-ups"
    )
    entries_max: int = _bound(
        10_000, "digests", "one streamed answer, of which one part is in memory at a time"
    )
    page_items_max: int = _bound(
        1_000,
        "messages",
        "one page costs the database a few milliseconds; its bytes have their own bound",
    )
    page_items_default: int = _bound(
        100, "messages", "one screen of a client; a caller can ask for more"
    )
    reply_bytes_max: int = _bound(
        8 * MIB, "bytes", "memory of one reply; a cut reply has a cursor for the rest"
    )
    variants_listed_max: int = _bound(
        100, "digests", "an equivocator can make any number; paging reaches the rest"
    )
    hint_candidates_max: int = _bound(
        1_000, "entries", "claims cost nothing to make; they are ranked first, then cut and paged"
    )
    hint_claims_per_entry_max: int = _bound(
        64, "claims", "more claims on one entry are spam; the store keeps the first"
    )
    hint_claims_with_peers_max: int = _bound(
        256, "claims", "on one entry, with those of peers: four stores that kept others get all"
    )
    header_bytes_max: int = _bound(
        32 * KIB,
        "bytes of request line and headers, or of trailers",
        "sixteen hints and a cursor need 20 KiB; chunk headers count with the trailers",
    )
    header_lines_max: int = _bound(
        128, "lines", "browsers and proxies send 40; even a short line costs 200 bytes of memory"
    )
    unpack_factor_max: int = _bound(
        200,
        "times the bytes sent",
        "batches compress by 10, at most by 100; any factor is allowed up to unpacked_free_bytes",
    )
    unpacked_free_bytes: int = _bound(
        2 * MIB, "bytes", "a message of equal bytes compresses by any factor and is harmless"
    )

    # --- one connection ----------------------------------------------------------------------
    headers_timeout_s: int = _bound(
        10,
        "seconds",
        "a slow client sends its headers in one packet; over TLS the first ones follow the handshake",
    )
    body_read_timeout_s: int = _bound(
        30, "seconds", "32 MiB at 1 MiB/s; a slower sender wastes a connection"
    )
    unread_body_linger_s: int = _bound(
        2,
        "seconds",
        "after an early answer the node drops the rest of the body while 2 MiB of it come in this time",
    )
    write_stall_timeout_s: int = _bound(
        30, "seconds", "a client that reads nothing for this long is gone"
    )
    connection_idle_s: int = _bound(
        75, "seconds", "longer than the pause of a client that polls every minute"
    )
    pipelined_requests_max: int = _bound(
        16, "requests", "parsed ahead on one connection; further ones wait as bytes"
    )

    # --- shared by all requests of a process ---------------------------------------------------
    connections_max: int = _bound(
        2_048, "connections", "each costs at most 100 KiB; the process raises its file limit"
    )
    connections_per_address_max: int = _bound(
        1_536,
        "connections",
        "a proxy can have many clients; a quarter remains for everybody else",
    )
    bodies_bytes_max: int = _bound(
        64 * MIB, "bytes", "of bodies in flight, packed and unpacked: two of the largest"
    )
    body_free_bytes: int = _bound(
        16 * KIB,
        "bytes",
        "of one body are not counted, so that a message does not wait for large bodies",
    )
    replies_bytes_max: int = _bound(
        64 * MIB, "bytes", "of replies in work or unread: eight of the largest"
    )
    reply_free_bytes: int = _bound(
        16 * KIB,
        "bytes",
        "of one reply are not counted, so that slow readers do not delay a message",
    )
    turns_max: int = _bound(
        2,
        "requests",
        "pages, look-ups and batches in work; each takes 20 ms of the event loop",
    )
    sync_turns_max: int = _bound(
        4, "requests", "of reconciliation in work; they also wait for the disk"
    )
    requests_waiting_max: int = _bound(
        512, "requests", "of one address that wait for the same resource; more get 503 at once"
    )
    share_wait_s: int = _bound(
        10, "seconds", "a request waits for its turn or for memory; then it gets 503"
    )
    stall_under_load_s: int = _bound(
        2,
        "seconds",
        "while others wait, a client that moves less than 64 KiB in this time is disconnected",
    )

    # --- rates of one caller -------------------------------------------------------------------
    caller_requests_per_minute: int = _bound(
        600_000,
        "requests",
        "of one token: 10,000 a second, more than a process serves; the node's machine has no limit",
    )
    caller_bytes_per_minute: int = _bound(
        16_384 * MIB, "bytes", "of bodies and replies of one token: 273 MiB/s"
    )
    anonymous_requests_per_minute: int = _bound(
        1_200,
        "requests",
        "of one address without credentials: 20 a second, enough for a page that shows a channel",
    )
    anonymous_bytes_per_minute: int = _bound(
        64 * MIB, "bytes", "of bodies and replies of one address without credentials: 1 MiB/s"
    )
    anonymous_live_readers_max: int = _bound(
        8,
        "connections",
        "of one address without credentials; half of all live readers are for others",
    )
    anonymous_order_ms_per_minute: int = _bound(
        1_000, "milliseconds of CPU per minute", "of ordering for one address without credentials"
    )

    # --- ancestors, orders and gaps ------------------------------------------------------------------
    ancestors_max: int = _bound(1_000, "messages", "one page of a causal closure")
    ancestors_heads_max: int = _bound(
        1_000, "IDs", "heads of one request; a channel has a handful of unanswered messages"
    )
    ancestors_visited_max: int = _bound(
        20_000, "IDs", "examined for one page, missing ones included: 0.3 s of look-ups"
    )
    ancestors_frontier_max: int = _bound(
        4_096, "messages", "in a cursor: 15 kB; the page lists the rest as missing"
    )
    order_writers_max: int = _bound(
        64, "senders", "named in one request for an order; 33 indexers cost 0.4 ms per message"
    )
    order_messages_per_call_max: int = _bound(
        20_000, "messages", "read and ordered in one call: 2 s; the next call continues"
    )
    order_call_s: int = _bound(
        5, "seconds", "of ordering in one call; graphs made to be slow take longer per message"
    )
    order_ms_per_minute: int = _bound(
        20_000,
        "milliseconds of CPU per minute and caller",
        "of ordering, a third of a core; 200,000 messages with 9 indexers",
    )
    order_turns_max: int = _bound(
        4, "requests", "that read or compute orders; one thread computes for all of them"
    )
    order_sets_max: int = _bound(
        32, "orders", "cached: a channel with its writers; one more costs a rebuild"
    )
    order_bytes_max: int = _bound(
        192 * MIB, "bytes, estimated", "memory of one order: 150,000 messages"
    )
    order_cache_bytes_max: int = _bound(
        256 * MIB, "bytes, estimated", "memory of all cached orders: a large one and others"
    )
    gaps_max: int = _bound(1_000, "IDs", "one page of gaps")
    met_ids_max: int = _bound(
        1_000_000, "IDs", "sync messages cost nothing to send; the store forgets the oldest first"
    )
    named_by_sync_max: int = _bound(
        1_000, "IDs", "named only by sync messages, per channel; the oldest are forgotten first"
    )

    # --- ingest ------------------------------------------------------------------------------
    group_items_max: int = _bound(
        8_192, "messages", "a larger group touches each index page less often; this one takes 0.4 s"
    )
    group_bytes_max: int = _bound(16 * MIB, "bytes of frames", "memory of one transaction")
    group_references_max: int = _bound(
        16_384, "entries of histories", "if nobody named them before, a group takes about a second"
    )
    ingest_queue_items_max: int = _bound(
        65_536, "messages", "about two seconds of writing; beyond it callers get 503"
    )
    ingest_queue_bytes_max: int = _bound(
        128 * MIB, "bytes of frames", "memory of frames that wait for the writer"
    )

    # --- the operator's policy ---------------------------------------------------------------
    policy_call_items_max: int = _bound(100, "messages", "judged between two looks at the clock")
    policy_call_s_max: int = _bound(
        1, "seconds", "for so many messages: 10 ms each; then they are refused"
    )
    quarantine_items_max: int = _bound(
        10_000, "messages", "more than an operator looks at; further ones are refused"
    )
    quarantine_bytes_max: int = _bound(
        256 * MIB, "bytes of frames", "on the disk of the data directory; further ones are refused"
    )
    quarantine_dropped_max: int = _bound(
        100_000, "digests", "that an operator dropped; the oldest is forgotten and judged again"
    )
    retired_ahead_max: int = _bound(
        100_000, "entries", "retired before they arrived: a digest of 32 bytes and a reason each"
    )
    retire_reason_bytes_max: int = _bound(
        256, "bytes", "of a reason for retiring; each retired entry keeps it"
    )
    retention_interval_s: int = _bound(
        60, "seconds", "between two looks at the channels: what is beyond its bounds stays so long"
    )
    quarantine_told_max: int = _bound(
        100_000,
        "messages",
        "refused or held, of which readers are told; the oldest that no operator decides on are forgotten",
    )
    quarantine_told_of_one_max: int = _bound(
        10_000, "messages", "of these of one caller or peer: a flood displaces its own"
    )

    # --- lost content ------------------------------------------------------------------------
    frames_read_percent_max: int = _bound(
        2, "percent of one core", "for reading every frame: 10^6 small messages in 20 minutes"
    )
    frames_read_interval_s: int = _bound(
        86_400, "seconds", "between two readings of every frame; disks decay slowly"
    )

    # --- SQLite -------------------------------------------------------------------------------
    sqlite_read_s: int = _bound(
        60, "seconds", "for a reading transaction: while it lasts, the write-ahead log only grows"
    )

    # --- PostgreSQL ---------------------------------------------------------------------------
    database_connections_max: int = _bound(
        8, "connections", "readers of one process; more than the server has cores gain nothing"
    )
    database_wait_s: int = _bound(
        5, "seconds", "for a connection; longer than a restart of the server"
    )
    database_read_s: int = _bound(
        10, "seconds", "for one read; reads take milliseconds, and callers wait for them"
    )
    database_statement_s: int = _bound(
        60, "seconds", "one statement that writes, or a wait for another writer"
    )
    database_probe_interval_s: int = _bound(
        1, "seconds", "between two probes of the database; each takes 0.1 ms"
    )
    database_answer_age_s_max: int = _bound(
        3, "seconds", "since the last answer of the database; after this the node is not ready"
    )
    lookups_shared_max: int = _bound(
        256, "look-ups", "in one query: 5 ms of the server, and the memory of one reply"
    )
    lookups_waiting_max: int = _bound(
        8_192, "look-ups", "half a second of work; beyond it callers get 503"
    )

    # --- live readers ------------------------------------------------------------------------
    live_readers_max: int = _bound(1_000, "connections", "each holds a write buffer")
    live_queue_items_max: int = _bound(
        1_000, "messages", "a reader further behind gets a gap event, and can read the feed"
    )
    live_queue_bytes_max: int = _bound(
        32 * MIB, "bytes of frames", "all live readers share one buffer"
    )
    live_unread_bytes_max: int = _bound(
        64 * MIB,
        "bytes",
        "of unread events, counted for each reader although they share the memory",
    )
    live_compressed_max: int = _bound(
        500, "streams", "with 144 KiB of context each; further ones are sent uncompressed"
    )
    live_names_max: int = _bound(
        200, "channels and prefixes", "of one live stream: 50 KiB of names; open another for more"
    )
    live_heartbeat_s: int = _bound(
        15, "seconds", "proxies close connections that are silent for 30 to 60"
    )

    # --- relayed messages --------------------------------------------------------------------
    relay_queue_items_max: int = _bound(
        4_096, "messages", "that wait for peers and other workers; the oldest are dropped first"
    )
    relay_queue_bytes_max: int = _bound(
        16 * MIB, "bytes of frames", "of that queue, which all peers share: 800 js-waku frames"
    )
    relay_age_s: int = _bound(
        10, "seconds", "in that queue; an older message is of no use to live readers"
    )
    relay_seen_max: int = _bound(
        131_072, "frame hashes", "20 MB; a minute of messages at relay_messages_per_s"
    )
    relay_seen_s: int = _bound(
        300, "seconds", "a hash is remembered: thirty stores, each with a full queue"
    )
    relay_batch_items_max: int = _bound(
        256, "messages", "of one request; the next one follows at once"
    )
    relay_messages_per_s: int = _bound(
        2_000, "messages per second", "taken from the stream of one peer: a tenth of a core"
    )
    relay_bytes_per_s: int = _bound(
        8 * MIB, "bytes of frames per second", "taken from the stream of one peer"
    )
    relay_nudges_per_s: int = _bound(
        4, "nudges per second", "to one peer; further commits within that time share the next one"
    )
    relay_retry_s_max: int = _bound(
        60, "seconds", "between two attempts to reach a peer; the first follows after one"
    )

    # --- reconciliation and peers --------------------------------------------------------------
    recon_body_bytes_max: int = _bound(
        16 * MIB, "bytes", "one request with pushed entries; ranges alone stay below 1 MiB"
    )
    recon_push_items_max: int = _bound(
        4_096,
        "items",
        "four batches of our own initiator; even an item of two bytes costs 1 us",
    )
    recon_fields_max: int = _bound(
        100_000, "protobuf fields", "4,096 items with sixteen hints each; counted before parsing"
    )
    recon_reply_bytes_max: int = _bound(8 * MIB, "bytes", "memory of one reply; the rest follows")
    recon_answer_bytes_max: int = _bound(
        SYNC.answer_bytes_max,
        "bytes",
        "summaries and lists of one reply: at most 50 ms; the initiator asks again for the rest",
    )
    index_save_interval_s: int = _bound(
        300, "seconds", "a killed node reads again at most the elements of one interval"
    )
    index_save_growth_min: int = _bound(20_000, "elements", "SQL reads fewer in a few milliseconds")
    recon_views_bytes_max: int = _bound(
        1024 * MIB,
        "bytes",
        "views of sessions, 28 bytes an element: three of 10^7, or of 3,000 participants with 10,000 messages each",
    )
    recon_view_elements_per_minute: int = _bound(
        60_000_000,
        "elements per minute and caller",
        "six seconds of one core; a byte of a request counts as one",
    )
    recon_reply_bytes_per_minute: int = _bound(
        4_096 * MIB, "bytes per minute and caller", "68 MiB/s, more than one node can serve"
    )
    recon_interests_bytes_max: int = _bound(
        32 * MIB, "bytes", "interests kept by hash; one of 16,384 names takes 2 MiB"
    )
    negentropy_body_bytes_max: int = _bound(MIB, "bytes", "clients set frames of 60 to 500 kB")
    negentropy_ranges_max: int = _bound(
        131_072, "ranges", "of one message: 0.3 s of work; 1 MiB of fingerprints has 55,000"
    )
    negentropy_reply_bytes_max: int = _bound(
        500_000, "bytes", "as in relays of that protocol; the client asks for the rest"
    )
    negentropy_channels_max: int = _bound(
        16, "channels", "sorted columns kept for the next message: 44 bytes per entry"
    )
    mvds_payload_bytes_max: int = _bound(
        4 * MIB,
        "bytes",
        "of one MVDS payload, either way: half of it holds one of the largest frames",
    )
    mvds_fields_max: int = _bound(
        50_000, "protobuf fields", "10,000 messages and as many IDs; counted before parsing"
    )
    mvds_channels_max: int = _bound(
        100, "channels", "of one MVDS peer: each costs three queries of an exchange"
    )
    mvds_peer_id_bytes_max: int = _bound(
        256, "bytes of UTF-8", "peer IDs are names or keys; one is a part of the path"
    )
    mvds_records_per_peer_max: int = _bound(
        1_000, "records", "messages on their way to one MVDS peer; read and written in 20 ms"
    )
    mvds_peers_max: int = _bound(
        1_000,
        "peers",
        "100 MB of records at most; the caller with the most peers loses the one silent for longest",
    )
    mvds_known_ids_max: int = _bound(
        65_536, "IDs", "10 MiB; an offer of a message whose ID is not among them costs its transfer"
    )
    session_nonce_lifetime_s: int = _bound(
        600, "seconds", "lifetime of a session key; then both sides draw new nonces"
    )
    peers_max: int = _bound(256, "peers", "each has a record, and its memory of what is set aside")
    peer_sessions_max: int = _bound(
        32, "sessions", "started by the schedule and in work; a further peer that is due waits"
    )
    peer_sessions_slow_max: int = _bound(
        8,
        "sessions",
        "of them with new, failing or slow peers, which can hold 30 MiB and last for an hour",
    )
    syncs_remembered_max: int = _bound(256, "sessions", "in the operator's list")
    sync_seconds_max: int = _bound(
        SYNC.seconds_max,
        "seconds",
        "a longer session ends as partial and continues later",
    )

    @property
    def sync(self) -> SyncLimits:
        """The bounds of a session that this node drives."""
        return SyncLimits(
            seconds_max=self.sync_seconds_max,
            answer_bytes_max=self.recon_answer_bytes_max,
        )


DEFAULT_LIMITS = Limits()


def limits_table(limits: Limits = DEFAULT_LIMITS) -> list[tuple[str, int, str, str]]:
    """(name, value, unit, reason) of every bound, in the order of declaration."""
    return [
        (f.name, getattr(limits, f.name), f.metadata["unit"], f.metadata["reason"])
        for f in fields(limits)
    ]

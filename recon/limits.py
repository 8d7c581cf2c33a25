"""The sizes of the protocol and the bounds of a session.

Each number has its unit and its reason. Numbers that only tune this side are beside the code that
uses them; those of negentropy are in its folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from recon.errors import LocalProtocolError

PROTOCOL_VERSION = 3
NONCE_BYTES = 16  # 128 bits: never repeats by accident
SESSION_KEY_BYTES = 16  # AES-128
INTEREST_HASH_BYTES = 16  # names a document both sides hold; a collision ends in a mismatch only
ID_BYTES = 32  # a BLAKE3 digest
SHORT_ID_BYTES = 6  # 10^6 ids against lists of 16: one accident in 10^7 sessions
SUM_BYTES = 16  # keyed sum of a whole view: too long to guess, or to find another set with it
SUMMARY_HASH_BYTES = 6  # keyed, so only chance can hit: 2^-48 per different range
INTEREST_BYTES_MAX = 1 << 20  # 4,000 channels of the longest name; sent once per peer
INTEREST_NAMES_MAX = 1 << 14  # channels and prefixes together: matching stays below a second
COUNT_MAX = 1 << 40  # elements in a range: more than any store, so that sums stay inside 64 bits
RANGES_MAX = 1 << 16  # in one message: beside a short id 16 bits are left for a range's number
PARTS_MAX = 64  # parts of one split: the smallest frame must hold one split
LIST_COUNT_MAX = 4096  # short ids in one answer: 24 kB, fits beside others in a 60 kB frame
FRAME_BYTES_MIN = 4096  # one split or one list with its overhead always fits
PHASE_MAX = 128  # cuts move by up to a quarter of a part either way
PHASE_NONE = 64  # the middle: not at all
FRAME_RESERVE_BYTES = 128  # of a response: fields beside the answers
ORDER_END = 2**64 - 1
VIEW_ELEMENT_BYTES = 28  # of memory: order, row number, two prefix sums
VIEW_BYTES = 4_000  # of memory, even if empty: the cipher, the columns
VIEW_GROUP_BYTES = 64  # of memory: a number in a set


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one side takes and gives. The defaults suit two nodes on a network."""

    request_bytes_max: int = 8 << 20  # of our own requests: a node takes as much
    response_bytes_max: int = 8 << 20  # a disjoint million is answered in one message
    ranges_max: int = RANGES_MAX  # per request, ours and theirs: one search each, 0.05 s
    ranges_answered_max: int = 1 << 15  # of them: 50 ms where all orders tie; the rest comes again
    fetch_ids_max: int = 1 << 16  # short ids in one fetch
    fetch_scan_max: int = 1 << 18  # elements looked at for one fetch: 15 ms; the rest is cut
    fetch_elements_max: int = 1 << 14  # and brought of whole ranges: one answer holds no more
    fetch_barren_max: int = 64  # cut answers of a session that brought nothing: 10^7 looked at
    depth_max: int = 64  # splits above a range; 10^6 honest elements need 7
    requests_max: int = 1 << 16  # per session
    in_flight_max: int = (
        4  # requests without an answer: hides the latency of a round; more would only queue
    )
    bytes_base: int = 4 << 20  # the cost of a session before anything was transferred
    bytes_per_element: int = 64  # and per own element: ids twice, summaries, bounds
    bytes_per_credit: int = 4  # and per byte of content that really arrived
    seconds_base: float = 60.0  # a session's patience before anything was transferred
    seconds_per_credit_mib: float = 10.0  # and per MiB of content that really arrived

    def __post_init__(self) -> None:
        if self.ranges_max > RANGES_MAX:
            raise LocalProtocolError(f"a message has at most {RANGES_MAX} ranges")


DEFAULT_LIMITS = Limits()

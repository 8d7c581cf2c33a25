"""Every error of this node: a stable code, an HTTP status, a title and an advice, declared once.

An error is a `Problem`. The same fault raises the same code by every path (HTTP, batch, recon,
import); only the HTTP layer makes an RFC 9457 problem document of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sdstore.sds.model import MessageError
from sdstore.sync.report import SyncError


class Code(StrEnum):
    """Stable identifiers of errors; `_CATALOGUE` describes each, and docs/errors.md is made of it."""

    # the frame itself (the codes of `sdstore.sds.codec.MessageError`, unchanged)
    MALFORMED_FRAME = "malformed_frame"
    MISSING_MESSAGE_ID = "missing_message_id"
    INVALID_UTF8 = "invalid_utf8"
    NUL_CHARACTER = "nul_character"
    LAMPORT_OUT_OF_RANGE = "lamport_out_of_range"
    NO_CONTENT_NO_LAMPORT = "no_content_no_lamport"
    INVALID_JSON_MESSAGE = "invalid_json_message"
    # limits of the door
    FRAME_TOO_LARGE = "frame_too_large"
    MESSAGE_ID_TOO_LONG = "message_id_too_long"
    CHANNEL_ID_TOO_LONG = "channel_id_too_long"
    SENDER_ID_TOO_LONG = "sender_id_too_long"
    HISTORY_TOO_LONG = "history_too_long"
    HINT_TOO_LONG = "hint_too_long"
    TOO_MANY_HINTS = "too_many_hints"
    BLOOM_FILTER_TOO_LARGE = "bloom_filter_too_large"
    # the request around it
    INVALID_PARAMETER = "invalid_parameter"
    INVALID_BODY = "invalid_body"
    INVALID_HEX = "invalid_hex"
    INVALID_CURSOR = "invalid_cursor"
    FOREIGN_CURSOR = "foreign_cursor"
    CURSOR_ROLLED_BACK = "cursor_rolled_back"
    CURSOR_REWOUND = "cursor_rewound"
    MALFORMED_REQUEST = "malformed_request"
    HEADERS_TOO_LARGE = "headers_too_large"
    EMPTY_BODY = "empty_body"
    BODY_TOO_LARGE = "body_too_large"
    TOO_MANY_ITEMS = "too_many_items"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    NOT_ACCEPTABLE = "not_acceptable"
    NOT_FOUND = "not_found"
    WITHHELD = "withheld"
    REFUSED = "refused"
    NO_SUCH_ROUTE = "no_such_route"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    SENDER_NOT_YOURS = "sender_not_yours"
    TOKENS_UNAVAILABLE = "tokens_unavailable"
    RATE_LIMITED = "rate_limited"
    # the operator's policy
    POLICY_REFUSED = "policy_refused"
    QUARANTINED = "quarantined"
    POLICY_FAILED = "policy_failed"
    # the order of a channel
    ORDER_TOO_LARGE = "order_too_large"
    ORDER_BUDGET_SPENT = "order_budget_spent"
    # reconciliation and peers
    INVALID_RECON_REQUEST = "invalid_recon_request"
    INVALID_NEGENTROPY_MESSAGE = "invalid_negentropy_message"
    RECON_BUDGET_SPENT = "recon_budget_spent"
    PEER_URL_REFUSED = "peer_url_refused"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_MISBEHAVED = "peer_misbehaved"
    PEER_VERSION = "peer_version"
    SYNC_BUSY = "sync_busy"
    NOT_RELAYED = "not_relayed"
    # this node
    INVALID_SETTING = "invalid_setting"
    OVERLOADED = "overloaded"
    NOT_READY = "not_ready"
    DISK_FULL = "disk_full"
    STORE_UNAVAILABLE = "store_unavailable"
    CONTENT_LOST = "content_lost"
    RETIRED = "retired"
    INTERNAL_ERROR = "internal_error"


_CATALOGUE: dict[Code, tuple[int, str, str]] = {
    Code.MALFORMED_FRAME: (422, "The frame is not an SDS message", ""),
    Code.MISSING_MESSAGE_ID: (
        422,
        "The message has no message ID",
        "Entries of its causal history need one, too.",
    ),
    Code.INVALID_UTF8: (422, "A text field is not UTF-8", ""),
    Code.NUL_CHARACTER: (422, "A text field contains U+0000", "Some databases cannot store it."),
    Code.LAMPORT_OUT_OF_RANGE: (
        422,
        "The Lamport timestamp is neither 0 … 2^63-1 nor an int32",
        "",
    ),
    Code.NO_CONTENT_NO_LAMPORT: (422, "The message has neither content nor Lamport timestamp", ""),
    Code.INVALID_JSON_MESSAGE: (
        422,
        "The JSON is not a message",
        'It is not {"message": {…}} with the fields of proto/sds.proto.',
    ),
    Code.FRAME_TOO_LARGE: (
        413,
        "The frame is larger than this node stores",
        "Bound: frame_bytes_max.",
    ),
    Code.MESSAGE_ID_TOO_LONG: (
        422,
        "A message ID is too long",
        "Bound: message_id_bytes_max, also for IDs in the causal history.",
    ),
    Code.CHANNEL_ID_TOO_LONG: (422, "The channel ID is too long", "Bound: channel_id_bytes_max."),
    Code.SENDER_ID_TOO_LONG: (422, "A sender ID is too long", "Bound: sender_id_bytes_max."),
    Code.HISTORY_TOO_LONG: (
        422,
        "The causal history has too many entries",
        "Bound: history_entries_max.",
    ),
    Code.HINT_TOO_LONG: (422, "A retrieval hint is empty or too long", "Bound: hint_bytes_max."),
    Code.TOO_MANY_HINTS: (
        422,
        "Too many retrieval hints for one message",
        "Bound: hints_per_publish_max.",
    ),
    Code.BLOOM_FILTER_TOO_LARGE: (
        422,
        "The bloom filter is too large",
        "Bound: bloom_filter_bytes_max.",
    ),
    Code.INVALID_PARAMETER: (
        400,
        "A parameter is not valid",
        "In path, query or header: missing, repeated, out of range, or unknown to the route.",
    ),
    Code.INVALID_BODY: (
        400,
        "The body is not valid",
        (
            "It does not match its Content-Type or Content-Encoding, or a line of NDJSON is "
            "not JSON."
        ),
    ),
    Code.INVALID_HEX: (
        400,
        "The value is not hexadecimal",
        "Hints are base64 only inside a message in JSON.",
    ),
    Code.INVALID_CURSOR: (
        400,
        "The cursor is not valid",
        "No store made it, or it belongs to another list.",
    ),
    Code.FOREIGN_CURSOR: (
        410,
        "The cursor belongs to another database",
        "Start again without a cursor.",
    ),
    Code.CURSOR_ROLLED_BACK: (
        410,
        "The database is older than this cursor",
        (
            "A backup was restored, or the copy diverged. Start again without a cursor, or "
            "with one from before the copy was made, which misses nothing."
        ),
    ),
    Code.CURSOR_REWOUND: (
        410,
        "The order before this cursor has changed",
        (
            "It was in the tentative tail. Start again, or at the last next_confirmed. In "
            "the confirmed prefix this happens only if the database is an older copy, or if "
            "content was lost that was ordered before a restart."
        ),
    ),
    Code.MALFORMED_REQUEST: (400, "The request is not HTTP/1.1", "The connection is closed."),
    Code.HEADERS_TOO_LARGE: (
        431,
        "The headers are too large",
        "They share a bound with the request line. The connection is closed.",
    ),
    Code.EMPTY_BODY: (400, "The body is empty", ""),
    Code.BODY_TOO_LARGE: (
        413,
        "The body is too large",
        "The connection is closed if the body did not come whole.",
    ),
    Code.TOO_MANY_ITEMS: (
        413,
        "Too many items in one request",
        "Brackets of a message in JSON have a bound, too: json_brackets_max.",
    ),
    Code.UNSUPPORTED_MEDIA_TYPE: (
        415,
        "The media type is not supported",
        "Accept of the answer lists those that are (Accept-Encoding: the encodings).",
    ),
    Code.NOT_ACCEPTABLE: (
        406,
        "No acceptable form of the reply",
        "Accept allows neither JSON nor protobuf.",
    ),
    Code.NOT_FOUND: (404, "Not found", "No such message, entry, channel, peer or session."),
    Code.WITHHELD: (
        404,
        "The message is withheld here",
        (
            "It is in quarantine; other stores might have it. Only callers who can read its "
            "channel are told, and only if its ID verifies; others get not_found."
        ),
    ),
    Code.REFUSED: (
        404,
        "The message is refused here",
        (
            "The policy or an operator refused it; other stores might have it. The same "
            "callers are told as of withheld."
        ),
    ),
    Code.NO_SUCH_ROUTE: (404, "No such route", "/docs lists the routes."),
    Code.METHOD_NOT_ALLOWED: (405, "Method not allowed", "The header Allow lists those that are."),
    Code.REQUEST_TIMEOUT: (408, "The request did not arrive in time", "The connection is closed."),
    Code.UNAUTHENTICATED: (
        401,
        "Credentials are required",
        (
            "There is no access token, or it is unknown, was revoked or has expired. Without "
            "one a node serves only callers on its own machine, and behind a proxy nobody."
        ),
    ),
    Code.FORBIDDEN: (
        403,
        "The credentials do not cover the request",
        (
            "The token lacks the scope or the channel; or an operator's route was called "
            "without a token or by a web page of another origin; or the request names "
            "another host, and the node serves its own machine only."
        ),
    ),
    Code.SENDER_NOT_YOURS: (
        403,
        "The caller may not write under this sender",
        (
            "The channel demands bound senders (bound_senders), and the caller's token is not bound to this "
            "one. A message that the node has already, and the caller may read, is a duplicate instead."
        ),
    ),
    Code.TOKENS_UNAVAILABLE: (
        503,
        "The access tokens cannot be read or written",
        (
            "The log says why (the file of tokens, or that of a peer's). Callers that need "
            "no token are served."
        ),
    ),
    Code.RATE_LIMITED: (
        429,
        "The rate limit of this caller is reached",
        "It sent too many requests or bytes, or has too many live streams; see Retry-After.",
    ),
    Code.POLICY_REFUSED: (
        403,
        "The policy of this node refuses the message",
        (
            "policy_code is the policy's own code, or dropped (by an operator), "
            "quarantine_full, or not_content (a sync or ephemeral message cannot be kept in "
            "the quarantine)."
        ),
    ),
    Code.QUARANTINED: (
        403,
        "The message is in the quarantine of this node",
        "It stays there until an operator releases or drops it.",
    ),
    Code.POLICY_FAILED: (
        503,
        "The policy of this node failed",
        "It raised, returned no verdict or took too long; see the log. Nothing was stored.",
    ),
    Code.ORDER_TOO_LARGE: (
        422,
        "The channel is too large to be ordered here",
        (
            "It needs more than order_bytes_max, or more than 100,000 messages wait for "
            "missing ones."
        ),
    ),
    Code.ORDER_BUDGET_SPENT: (
        429,
        "The ordering budget of this caller is spent",
        "It is CPU time in a minute; see Retry-After. What is computed is kept.",
    ),
    Code.INVALID_RECON_REQUEST: (
        400,
        "The body is not a reconciliation request",
        "If it breaks the protocol, the member fault says how.",
    ),
    Code.INVALID_NEGENTROPY_MESSAGE: (
        400,
        "The body is not a negentropy message",
        "The member fault says why.",
    ),
    Code.RECON_BUDGET_SPENT: (
        429,
        "The reconciliation budget of this caller is spent",
        "It is views and bytes in a minute; see Retry-After.",
    ),
    Code.PEER_URL_REFUSED: (
        422,
        "The peer URL is not allowed",
        (
            "It is not http(s), or leads to this node or to an address that the node does "
            "not connect to."
        ),
    ),
    Code.PEER_UNREACHABLE: (
        502,
        "The peer could not be reached",
        "The name does not resolve, or the address does not answer.",
    ),
    Code.PEER_MISBEHAVED: (
        502,
        "The peer broke the protocol",
        "Reports of sessions have this code, too.",
    ),
    Code.PEER_VERSION: (
        502,
        "The peer speaks another version of the protocol",
        "This is no fault. Reports of sessions have the code.",
    ),
    Code.SYNC_BUSY: (
        409,
        "A sync with this peer is already running",
        (
            "sync_id is its ID. For an MVDS peer: another of its exchanges ended first; send "
            "the payload again."
        ),
    ),
    Code.NOT_RELAYED: (
        422,
        "Stores do not relay this message",
        (
            "It is a content message, or of a channel outside of this store's interest. "
            "Other items are not affected."
        ),
    ),
    Code.INVALID_SETTING: (
        422,
        "A setting is not valid",
        (
            "A reload found a bad setting, certificate or policy; the detail names it. "
            "Nothing was changed."
        ),
    ),
    Code.OVERLOADED: (
        503,
        "The node is overloaded",
        (
            "A queue is full, too many readers are connected, or the request waited too long "
            "for its turn; see Retry-After."
        ),
    ),
    Code.NOT_READY: (
        503,
        "The node is not ready",
        (
            "/readyz gives the reason. POST /v1/reload answers so if another worker did not "
            "reload within 10 s: its log says why; send the request again."
        ),
    ),
    Code.DISK_FULL: (
        507,
        "The disk is full",
        (
            "Less than disk_free_min_bytes is free. Nothing was stored. Reads work, and the "
            "node recovers by itself."
        ),
    ),
    Code.STORE_UNAVAILABLE: (
        503,
        "The database is unavailable",
        "It does not answer, or its file is damaged (run sdstore check).",
    ),
    Code.CONTENT_LOST: (
        503,
        "This node lost the content of the message",
        (
            "The node asks its peers for it. Publishing, an import or a restore also repairs "
            "it. Other messages are not affected."
        ),
    ),
    Code.RETIRED: (
        410,
        "The message was retired",
        "An operator or the retention dropped its content. It does not come back, also not by publishing.",
    ),
    Code.INTERNAL_ERROR: (500, "Internal error", "The node's log has the details."),
}


class Problem(SyncError):  # noqa: N818 - the term of RFC 9457
    """An error with a stable code. If this node raises one during a sync, the session ends.

    `code` is the contract; `detail` is for people and can change. `extra` becomes members of the
    problem document, `headers` become headers of the HTTP answer (such as Retry-After).
    """

    def __init__(
        self,
        code: Code,
        detail: str,
        *,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(code, detail)
        self.code: Code = code
        self.extra = extra or {}
        self.headers = headers or {}

    def detached(self) -> Problem:
        """A copy to keep, or to raise more than once.

        A caught exception keeps the frames it passed, and so does its cause. The frames keep whatever
        was parsed there, often in a cycle that waits for the garbage collector.
        """
        return Problem(self.code, self.detail, extra=self.extra, headers=self.headers)

    @property
    def status(self) -> int:
        """The HTTP status of this code."""
        return _CATALOGUE[self.code][0]

    @property
    def title(self) -> str:
        """The fixed title of this code."""
        return _CATALOGUE[self.code][1]

    @property
    def advice(self) -> str:
        """What else there is to know of this code, and what to do; "" if the title says all."""
        return _CATALOGUE[self.code][2]

    def document(self) -> dict[str, Any]:
        """The RFC 9457 problem document."""
        return {
            "type": f"urn:sdstore:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": str(self.code),
            **self.extra,
        }


def problem_of_message(error: MessageError) -> Problem:
    """A decoder's error under the same code."""
    return Problem(Code(error.code), error.detail)


def fault_text(fault: Mapping[str, Any]) -> str:
    """What is wrong with a value, from a fault of pydantic, which puts "Value error, " before our words."""
    return str(fault["msg"]).removeprefix("Value error, ")


class SettingsError(ValueError):
    """A setting is unknown or not valid; the text names the setting and its layer."""

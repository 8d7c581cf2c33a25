"""Every error of this node: a stable code, an HTTP status and a title, declared once.

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
    """Stable identifiers of errors; docs/errors.md describes each."""

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
    INTERNAL_ERROR = "internal_error"


_STATUS_AND_TITLE: dict[Code, tuple[int, str]] = {
    Code.MALFORMED_FRAME: (422, "The frame is not an SDS message"),
    Code.MISSING_MESSAGE_ID: (422, "The message has no message ID"),
    Code.INVALID_UTF8: (422, "A text field is not UTF-8"),
    Code.NUL_CHARACTER: (422, "A text field contains U+0000"),
    Code.LAMPORT_OUT_OF_RANGE: (422, "The Lamport timestamp is neither 0 … 2^63-1 nor an int32"),
    Code.NO_CONTENT_NO_LAMPORT: (422, "The message has neither content nor Lamport timestamp"),
    Code.INVALID_JSON_MESSAGE: (422, "The JSON is not a message"),
    Code.FRAME_TOO_LARGE: (413, "The frame is larger than this node stores"),
    Code.MESSAGE_ID_TOO_LONG: (422, "A message ID is too long"),
    Code.CHANNEL_ID_TOO_LONG: (422, "The channel ID is too long"),
    Code.SENDER_ID_TOO_LONG: (422, "A sender ID is too long"),
    Code.HISTORY_TOO_LONG: (422, "The causal history has too many entries"),
    Code.HINT_TOO_LONG: (422, "A retrieval hint is empty or too long"),
    Code.TOO_MANY_HINTS: (422, "Too many retrieval hints for one message"),
    Code.BLOOM_FILTER_TOO_LARGE: (422, "The bloom filter is too large"),
    Code.INVALID_PARAMETER: (400, "A parameter is not valid"),
    Code.INVALID_BODY: (400, "The body is not valid"),
    Code.INVALID_HEX: (400, "The value is not hexadecimal"),
    Code.INVALID_CURSOR: (400, "The cursor is not valid"),
    Code.FOREIGN_CURSOR: (410, "The cursor belongs to another database"),
    Code.CURSOR_ROLLED_BACK: (410, "The database is older than this cursor"),
    Code.CURSOR_REWOUND: (410, "The order before this cursor has changed"),
    Code.MALFORMED_REQUEST: (400, "The request is not HTTP/1.1"),
    Code.HEADERS_TOO_LARGE: (431, "The headers are too large"),
    Code.EMPTY_BODY: (400, "The body is empty"),
    Code.BODY_TOO_LARGE: (413, "The body is too large"),
    Code.TOO_MANY_ITEMS: (413, "Too many items in one request"),
    Code.UNSUPPORTED_MEDIA_TYPE: (415, "The media type is not supported"),
    Code.NOT_ACCEPTABLE: (406, "No acceptable form of the reply"),
    Code.NOT_FOUND: (404, "Not found"),
    Code.WITHHELD: (404, "The message is withheld here"),
    Code.REFUSED: (404, "The message is refused here"),
    Code.NO_SUCH_ROUTE: (404, "No such route"),
    Code.METHOD_NOT_ALLOWED: (405, "Method not allowed"),
    Code.REQUEST_TIMEOUT: (408, "The request did not arrive in time"),
    Code.UNAUTHENTICATED: (401, "Credentials are required"),
    Code.FORBIDDEN: (403, "The credentials do not cover the request"),
    Code.TOKENS_UNAVAILABLE: (503, "The access tokens cannot be read or written"),
    Code.RATE_LIMITED: (429, "The rate limit of this caller is reached"),
    Code.POLICY_REFUSED: (403, "The policy of this node refuses the message"),
    Code.QUARANTINED: (403, "The message is in the quarantine of this node"),
    Code.POLICY_FAILED: (503, "The policy of this node failed"),
    Code.ORDER_TOO_LARGE: (422, "The channel is too large to be ordered here"),
    Code.ORDER_BUDGET_SPENT: (429, "The ordering budget of this caller is spent"),
    Code.INVALID_RECON_REQUEST: (400, "The body is not a reconciliation request"),
    Code.INVALID_NEGENTROPY_MESSAGE: (400, "The body is not a negentropy message"),
    Code.RECON_BUDGET_SPENT: (429, "The reconciliation budget of this caller is spent"),
    Code.PEER_URL_REFUSED: (422, "The peer URL is not allowed"),
    Code.PEER_UNREACHABLE: (502, "The peer could not be reached"),
    Code.PEER_MISBEHAVED: (502, "The peer broke the protocol"),
    Code.PEER_VERSION: (502, "The peer speaks another version of the protocol"),
    Code.SYNC_BUSY: (409, "A sync with this peer is already running"),
    Code.NOT_RELAYED: (422, "Stores do not relay this message"),
    Code.INVALID_SETTING: (422, "A setting is not valid"),
    Code.OVERLOADED: (503, "The node is overloaded"),
    Code.NOT_READY: (503, "The node is not ready"),
    Code.DISK_FULL: (507, "The disk is full"),
    Code.STORE_UNAVAILABLE: (503, "The database is unavailable"),
    Code.CONTENT_LOST: (503, "This node lost the content of the message"),
    Code.INTERNAL_ERROR: (500, "Internal error"),
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
        return _STATUS_AND_TITLE[self.code][0]

    @property
    def title(self) -> str:
        """The fixed title of this code."""
        return _STATUS_AND_TITLE[self.code][1]

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

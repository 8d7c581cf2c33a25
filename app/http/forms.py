"""JSON or protobuf: which form a request asks for and which one it came in."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from app.errors import Code, Problem

PROTOBUF_TYPE = b"application/x-protobuf"
JSON_TYPE = b"application/json"
NDJSON_TYPE = b"application/x-ndjson"
OCTETS_TYPE = b"application/octet-stream"


class Form(Enum):
    """The two forms of answers, NDJSON for many messages, plain bytes for other protocols."""

    JSON = JSON_TYPE
    PROTOBUF = PROTOBUF_TYPE
    NDJSON = NDJSON_TYPE
    OCTETS = OCTETS_TYPE


@lru_cache(maxsize=512)
def answer_form(accept: bytes | None) -> Form:
    """The form that an Accept header prefers; JSON where it does not say.

    RFC 9110 section 12.5.1: the most specific range that matches a type gives its quality.
    `not_acceptable` where both have quality 0.
    """
    if not accept:
        return Form.JSON
    ranges = _ranges(accept.decode("latin-1"))
    json, protobuf = (
        _quality(ranges, "application/json"),
        _quality(ranges, "application/x-protobuf"),
    )
    if not json and not protobuf:
        raise Problem(Code.NOT_ACCEPTABLE, "answers are application/json or application/x-protobuf")
    return Form.PROTOBUF if protobuf > json else Form.JSON


@lru_cache(maxsize=512)
def body_form(content_type: bytes | None, *accepted: Form) -> Form:
    """The form of a body by its Content-Type; `unsupported_media_type` unless it is `accepted`."""
    media_type = (content_type or b"").partition(b";")[0].strip().lower()
    for form in accepted:
        if media_type == form.value or (form is Form.NDJSON and media_type == b"application/jsonl"):
            return form
    names = ", ".join(form.value.decode() for form in accepted)
    raise Problem(
        Code.UNSUPPORTED_MEDIA_TYPE, f"Content-Type is one of {names}", headers={"Accept": names}
    )


def _ranges(accept: str) -> dict[str, float]:
    ranges: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_range, *parameters = (piece.strip() for piece in part.split(";"))
        ranges[media_range] = next(map(_q, filter(_is_quality, parameters)), 1.0)
    return ranges


def _is_quality(parameter: str) -> bool:
    return parameter.startswith("q=")


def _q(parameter: str) -> float:
    try:
        return min(1.0, max(0.0, float(parameter[2:])))
    except ValueError:
        return 0.0


def _quality(ranges: dict[str, float], media_type: str) -> float:
    for media_range in (media_type, "application/*", "*/*"):
        if media_range in ranges:
            return ranges[media_range]
    return 0.0

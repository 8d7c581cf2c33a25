"""How schemathesis writes the bodies it knows no serializer for: what it generated, as bytes."""

from __future__ import annotations

import json
from typing import Any

import schemathesis


@schemathesis.serializer("application/x-protobuf", "application/x-ndjson")
def as_bytes(_context: Any, value: Any) -> bytes:
    """Bytes and text as they are, anything else as JSON."""
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")

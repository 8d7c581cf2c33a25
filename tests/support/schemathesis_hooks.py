"""What schemathesis sends and checks: bodies that it knows no serializer for, and who calls."""

from __future__ import annotations

import json
import os
from typing import Any
from zlib import crc32

import schemathesis

FUZZ: dict[str, dict[str, str]] = json.loads(os.environ["FUZZ_CALLERS"])
"""`tokens`: the Authorization of each caller with one; `scopes` of operations."""
CALLERS = ("", "admin", "read", "", "admin", "revoked")
"""How often each one calls: "" sends no token, and has all rights of this machine."""


@schemathesis.serializer("application/x-protobuf", "application/x-ndjson")
def as_bytes(_context: Any, value: Any) -> bytes:
    """Bytes and text as they are, anything else as JSON."""
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Choose who calls by the case, so that a case that is tried again has the same caller."""
    sent = repr((case.method, case.path_parameters, case.query, case.body)).encode()
    caller = CALLERS[crc32(sent) % len(CALLERS)]
    if caller:
        case.headers["authorization"] = FUZZ["tokens"][caller]


@schemathesis.check
def credentials_decide(_context: Any, response: Any, case: Any) -> None:
    """A revoked token gets 401, a token for reading 403 on other routes, all scopes neither."""
    operation = case.operation
    scope = FUZZ["scopes"].get(f"{operation.method.upper()} {operation.path}", "open")
    sent = response.request.headers.get("authorization")
    if case.method.upper() != operation.method.upper() or scope == "open":
        return
    caller = next((name for name, token in FUZZ["tokens"].items() if token == sent), "")
    got = (response.status_code, response.json()["code"]) if response.status_code >= 400 else ()
    is_unread = got == (400, "invalid_parameter")  # refused before anybody looks who calls
    if caller == "revoked":
        assert got == (401, "unauthenticated") or is_unread, (caller, got)
    elif caller == "read" and scope != "read":
        assert got == (403, "forbidden") or is_unread, (caller, got)
    else:
        assert got[:1] != (401,), (caller, got)
        assert caller != "admin" or got[:1] != (403,), (caller, got)

"""Problems as answers: the one place where a refusal becomes an HTTP reply (RFC 9457)."""

from __future__ import annotations

import orjson

from app.errors import Code, Problem
from app.http.call import Reply

PROBLEM_TYPE = b"application/problem+json"


def problem_reply(problem: Problem) -> Reply:
    """The problem document of a refusal, with the headers that belong to it."""
    headers = [(b"content-type", PROBLEM_TYPE), (b"cache-control", b"no-store")]
    headers += [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
    return Reply(problem.status, headers, orjson.dumps(problem.document()))


def internal_error() -> Problem:
    """What a caller learns of a fault of ours; the log has the rest."""
    return Problem(Code.INTERNAL_ERROR, "the fault is this node's; its log says more")

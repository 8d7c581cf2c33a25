"""What FastAPI endpoints share: the call the shell made, scopes, parameters, answers."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote, unquote

from fastapi import Depends, Query, Request, Response
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from app.http.auth import Scope
from app.http.call import Call, Headers, Parts, Reply
from app.http.shell import ANSWER_KEY, CALL_KEY
from app.limits import DEFAULT_LIMITS
from app.sharing import Turns

SCOPE_KEY = "x-sdstore-scope"
"""Where an operation of the OpenAPI document says which scope it demands."""


TURNS_KEY = "x-sdstore-takes-turns"
"""Where it says that requests wait for their turn, and with whom."""


class SegmentConvertor(Convertor[str]):
    """One path segment, percent-encoded: any string, also the empty one and one with slashes."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        """Decode; the shell has checked that it is UTF-8."""
        return unquote(value)

    def to_string(self, value: str) -> str:
        """The inverse."""
        return quote(value, safe="")


register_url_convertor("segment", SegmentConvertor())


def demands(scope: Scope, *, takes_turns: bool = False) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that needs `scope`; the shell's route table reads it.

    `takes_turns`: an answer costs milliseconds or many bytes, so callers wait for each other.
    """
    return {SCOPE_KEY: scope.value} | ({TURNS_KEY: Turns.READS.value} if takes_turns else {})


async def _current_call(request: Request) -> Call:
    call: Call = request.scope[CALL_KEY]
    return call


CurrentCall = Annotated[Call, Depends(_current_call)]
PageLimit = Annotated[
    int, Query(ge=1, le=DEFAULT_LIMITS.page_items_max, description="items of one page at most")
]
After = Annotated[str | None, Query(description="the `next` of the page before this one")]


def respond(reply: Reply) -> Response:
    """A reply as a Starlette response."""
    return _WholeResponse(reply)


class _WholeResponse(Response):
    """Goes straight to the shell: through the framework it would leave in two writes."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(status_code=reply.status)
        self._reply = reply

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        await scope[ANSWER_KEY].give(self._reply)


class PartsResponse(Response):
    """An answer in parts, each made when the one before has been read."""

    def __init__(self, parts: Parts, headers: Headers, *, is_live: bool = False) -> None:
        super().__init__()
        self._parts = parts
        self._raw_headers = headers
        self._is_live = is_live

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        answer = scope[ANSWER_KEY]
        status, headers = self.status_code, self._raw_headers
        await answer.stream(status, headers, self._parts, is_live=self._is_live)

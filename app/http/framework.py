"""What FastAPI endpoints share: the call the shell made, scopes, parameters, answers."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote, unquote

from fastapi import Depends, Query, Request, Response
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from app.http.auth import Scope
from app.http.call import Call, Reply
from app.http.shell import CALL_KEY, GIVE_KEY
from app.limits import DEFAULT_LIMITS

SCOPE_KEY = "x-sdstore-scope"
"""Where an operation of the OpenAPI document says which scope it demands."""


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


def demands(scope: Scope) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that needs `scope`; the shell's route table reads it."""
    return {SCOPE_KEY: scope.value}


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
        await scope[GIVE_KEY](self._reply)

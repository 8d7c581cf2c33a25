"""The fast lane: the three hottest calls without FastAPI, which would take two thirds of their time.

`GET /v1/messages/{message_id}`, `POST /v1/messages` and `POST /v1/recon` are called directly in their plain
case: no query, no page's origin, no compressed body, no header twice. Everything else goes to FastAPI, before
anything of its body is read. Admission, handler and reply are those of the route, so both ways give the same
bytes (`tests/app/http/test_lane.py`). The setting `fast_lane = false` turns it off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from fastapi.routing import APIRoute

from app.http import messages, publish, recon
from app.http.admission import Admission, admission_of
from app.http.call import AsgiScope, Call, Receive, Reply
from app.http.routing import segment_text

_MESSAGE = "/v1/messages/"
_Handler = Callable[[Call], Awaitable[Reply]]
Taken = Callable[[AsgiScope, Receive], Awaitable[None]]


class Lane:
    """The hot routes of an application, and their admissions."""

    def __init__(self, routes: Iterable[APIRoute]) -> None:
        hot = (messages.get_message, publish.publish_one, recon.reconcile)
        self._admissions = {
            each.endpoint: admission_of(each) for each in routes if each.endpoint in hot
        }

    def plain(self, scope: AsgiScope) -> Taken | None:
        """How to answer a request of the plain case; None: FastAPI answers it."""
        if scope["query_string"] or scope.get("root_path"):
            return None
        headers = dict(scope["headers"])
        is_plain = len(headers) == len(scope["headers"])
        if not is_plain or b"origin" in headers or b"content-encoding" in headers:
            return None
        method, path = scope["method"], scope["path"]
        handler: _Handler
        if method == "GET" and path.startswith(_MESSAGE):
            segment = path[len(_MESSAGE) :]
            if not segment or "/" in segment:
                return None
            scope["endpoint"] = messages.get_message
            handler = partial(messages.get_message, message_id=segment_text(segment))
        elif method == "POST" and path == "/v1/messages":
            scope["endpoint"] = publish.publish_one
            hints = headers.get(b"retrieval-hint")
            handler = partial(
                publish.publish_one,
                retrieval_hint=None if hints is None else [hints.decode("latin-1")],
            )
        elif method == "POST" and path == "/v1/recon":
            scope["endpoint"] = handler = recon.reconcile
        else:
            return None
        return partial(_answered, self._admissions[scope["endpoint"]], handler, headers)


async def _answered(
    admission: Admission,
    handler: _Handler,
    headers: Mapping[bytes, bytes],
    scope: AsgiScope,
    receive: Receive,
) -> None:
    call = await admission.begin(scope, receive, headers)
    try:
        reply = await handler(call)
        await reply(scope, receive, _never)
    finally:
        call.end()


async def _never(_message: object) -> None:
    raise RuntimeError("a reply of ours is sent by its answer")

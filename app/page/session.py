"""Signing in to the page, and what its routes demand.

A browser keeps a cookie named by the node's ID, because browsers send the cookies of one port to all ports of
a host: two nodes on one host have two cookies. The cookie contains the access token, sealed with a secret of the
database, so another service on the host that gets the cookie learns no token. Only routes of the page read it;
`/v1` takes bearer tokens only. It is valid until the token expires, at most for `SIGNED_IN_S`.

A cookie alone would let any site on the host act for whoever is signed in, so a request that changes something
must come from a page of this node: its Origin is checked before anything else.
"""

from __future__ import annotations

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import orjson
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from app.access.callers import Scope, is_of_this_node
from app.errors import Code, Problem
from app.http.admission import Admission, NodeRoute, Served, identified
from app.http.call import ANSWER_KEY, AsgiScope, Call, Form, Headers
from app.http.front import as_problem
from app.page.render import problem_page
from app.server.node import Node
from app.server.sharing import Turns

SIGNED_IN_S = 12 * 3600
"""How long a cookie is valid: a working day."""

COOKIE_BYTES_MAX = 4_096
"""As browsers have it."""

_SAFE = ("GET", "HEAD")
_CONTEXT = "sdstore page session v1"


def cookie_name(node: Node) -> str:
    """The name of the cookie of a node."""
    return f"sdstore_{node.node_id}"


def signed_in(node: Node, token: str, *, is_secure: bool) -> tuple[bytes, bytes]:
    """The header that signs a browser in with a token."""
    sealed = _seal(node).encrypt(orjson.dumps([int(time.time()) + SIGNED_IN_S, token]), None)
    return _cookie(node, urlsafe_b64encode(sealed).decode(), SIGNED_IN_S, is_secure=is_secure)


def signed_out(node: Node, *, is_secure: bool) -> tuple[bytes, bytes]:
    """The header that signs a browser out."""
    return _cookie(node, "", 0, is_secure=is_secure)


def _cookie(node: Node, value: str, age_s: int, *, is_secure: bool) -> tuple[bytes, bytes]:
    secure = "; Secure" if is_secure else ""
    parts = f"{cookie_name(node)}={value}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict"
    return b"set-cookie", f"{parts}{secure}".encode()


def token_of(node: Node, headers: Mapping[bytes, bytes]) -> str | None:
    """The token in the cookie of a request; None without a cookie that holds."""
    wanted = cookie_name(node)
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == wanted and 0 < len(value) <= COOKIE_BYTES_MAX:
            try:
                ends_s, token = orjson.loads(_seal(node).decrypt(urlsafe_b64decode(value), None))
            except (InvalidTag, ValueError):
                return None
            return str(token) if ends_s > time.time() else None
    return None


def _seal(node: Node) -> AESSIV:
    return AESSIV(blake3(node.store.mark_secret, derive_key_context=_CONTEXT).digest())


def is_https(call: Call) -> bool:
    """Whether the browser reaches this node by https."""
    public_url = call.node.settings.public_url or ""
    return call.asgi["scheme"] == "https" or public_url.startswith("https:")


class PageAdmission(Admission):
    """As that of other routes, for callers with a cookie too."""

    async def begin(self, asgi: AsgiScope, receive: Any, headers: Mapping[bytes, bytes]) -> Call:
        """See `Admission`; `forbidden` for what changes something and does not come from a page of this node."""
        node = asgi["app"].state.served.node
        if asgi["method"] not in _SAFE and not is_of_this_node(headers, node.settings.public_host):
            raise Problem(Code.FORBIDDEN, "the request does not come from a page of this node")
        # Pages ask routes for their JSON, whole.
        plain = {name: each for name, each in headers.items() if name != b"if-none-match"}
        plain[b"accept"] = Form.JSON.value
        # Signing in and the style sheet need no token, so an expired one must not prevent them.
        is_open = self.scope is Scope.OPEN
        if not is_open and b"authorization" not in plain and (token := token_of(node, headers)):
            plain[b"authorization"] = _bearer(token)
        return await super().begin(asgi, receive, plain)


def require_token(call: Call, token: str) -> None:
    """Raise Problem unless a token is valid."""
    served: Served = call.asgi["app"].state.served
    headers = {**call.headers, b"authorization": _bearer(token)}
    identified(served, call.asgi, headers)


def _bearer(token: str) -> bytes:
    return b"Bearer " + token.encode("ascii", "replace")


class PageRoute(NodeRoute):
    """A route of the page: a refusal is a page too. The document of the interface leaves it out."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """See `APIRoute`."""
        answer = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                return await answer(request)
            except (Problem, RequestValidationError) as error:
                problem = as_problem(error).detached()
            request.scope[ANSWER_KEY].code = problem.code
            node = request.app.state.served.node
            headers: Headers = []
            has_cookie = cookie_name(node).encode() in request.headers.get("cookie", "").encode()
            if problem.code is Code.UNAUTHENTICATED and has_cookie:
                # Its token has expired. (A request that follows a link from another site has no cookie.)
                headers.append(signed_out(node, is_secure=request.url.scheme == "https"))
            return problem_page(request.scope, node, problem, headers)

        return shown


def page_admitted(scope: Scope, turns: Turns | None = None) -> Any:
    """The dependency of a route of the page, as `app.http.admission.admitted`."""
    return Depends(PageAdmission(scope, turns).admit)


Anybody = Annotated[Call, page_admitted(Scope.OPEN)]
Reader = Annotated[Call, page_admitted(Scope.READ)]
ReaderInTurn = Annotated[Call, page_admitted(Scope.READ, Turns.READS)]
Operator = Annotated[Call, page_admitted(Scope.ADMIN)]

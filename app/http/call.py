"""What a handler is given (`Call`) and what it gives back (`Reply`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import parse_qsl

from app.errors import Code, Problem
from app.http.auth import Caller
from app.sharing import Holding

if TYPE_CHECKING:
    from app.node import Node

Headers = list[tuple[bytes, bytes]]
QUERY_FIELDS_MAX = 1_000
"""Fields in one query string; no route needs more."""


class Reply(NamedTuple):
    """A whole answer in memory; whoever sends it adds the content length."""

    status: int
    headers: Headers
    body: bytes = b""


def length_of(reply: Reply) -> Headers:
    """The header that says how long a reply is. RFC 9110 section 8.6: not of one without a body."""
    if reply.status in (204, 304):
        return []
    return [(b"content-length", b"%d" % len(reply.body))]


@dataclass(slots=True)
class Call:
    """One request after routing and authorization.

    `params` are the decoded path parameters, `headers` the headers by name in lower case (several
    lines of one name joined), `raw_headers` all lines in order, `body` the whole body (empty where
    the route has none), `sent_bytes` its length as it came, perhaps compressed. `is_head` tells
    FastAPI routes that headers are all that is wanted; whole replies lose their bodies anyway.
    `address` is whose turn the request takes, `turn` what it holds where it had to wait for one; a
    handler that only waits from some point on releases it there.
    """

    node: Node
    params: dict[str, str]
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    raw_headers: Headers
    caller: Caller
    body: bytes = field(default=b"")
    is_head: bool = False
    sent_bytes: int = 0
    address: str = ""
    turn: Holding | None = None

    @property
    def channel_id(self) -> str | None:
        """The channel that narrows this call, from `?channel_id=`."""
        return self.text("channel_id")

    def text(self, name: str) -> str | None:
        """The value of a query parameter."""
        return self.query.get(name)


Handler = Callable[[Call], Awaitable[Reply]]
EXCHANGE_KEY = "sdstore.exchange"
"""Where our server leaves its `Exchange` in the ASGI scope; others have none."""

Parts = AsyncGenerator[Sequence[bytes], None]
"""An answer in parts, each asked for when the one before has been read."""


class Exchange(Protocol):
    """What our server offers beyond ASGI: answers in one write, and parts that are not copied."""

    @property
    def caller(self) -> str:
        """Whose turn the request takes."""
        ...

    async def give(self, reply: Reply) -> None:
        """Answer with a whole reply."""
        ...

    async def stream(self, status: int, headers: Headers, parts: Parts, *, is_live: bool) -> None:
        """Answer in parts; `is_live`: others are shown the same bytes."""
        ...


_NO_QUERY: Mapping[str, str] = {}


def parse_query(query_string: bytes) -> Mapping[str, str]:
    """The fields of a query string, percent-decoded as UTF-8; `invalid_parameter`.

    None may stand twice: which of two values is meant, a proxy and a server may see differently.
    """
    if not query_string:
        return _NO_QUERY
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=QUERY_FIELDS_MAX,
        )
    except ValueError:
        raise Problem(Code.INVALID_PARAMETER, "the query string is not UTF-8") from None
    query = dict(pairs)
    if len(query) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in query if names.count(name) > 1)
        raise Problem(Code.INVALID_PARAMETER, f"{twice[:100]} is given twice")
    return query

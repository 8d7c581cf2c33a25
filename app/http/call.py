"""What a handler is given (`Call`) and what it gives back (`Reply`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs

from app.errors import Code, Problem
from app.http.auth import Caller

if TYPE_CHECKING:
    from app.node import Node

Headers = list[tuple[bytes, bytes]]
QUERY_FIELDS_MAX = 1_000
"""Fields in one query string; parsing more is work for nobody."""


class Reply(NamedTuple):
    """A whole answer in memory; the shell adds the content length."""

    status: int
    headers: Headers
    body: bytes = b""


@dataclass(slots=True)
class Call:
    """One request after routing and authorization.

    `params` are the decoded path parameters, `headers` the last value of each header in lower
    case, `raw_headers` all of them in order, `body` the whole body (empty where the route has none).
    """

    node: Node
    params: dict[str, str]
    query: Mapping[str, list[str]]
    headers: Mapping[bytes, bytes]
    raw_headers: Headers
    caller: Caller
    body: bytes = field(default=b"")

    @property
    def channel_id(self) -> str | None:
        """The channel that narrows this call, from `?channel_id=`."""
        return self.text("channel_id")

    def text(self, name: str) -> str | None:
        """The value of a query parameter; `invalid_parameter` where it is given twice."""
        return single(self.query, name)


Handler = Callable[[Call], Awaitable[Reply]]
REPLY_KEY = "sdstore.reply"
"""Where our server leaves its way to send a whole `Reply` in the ASGI scope; others have none."""

_NO_QUERY: Mapping[str, list[str]] = {}


def parse_query(query_string: bytes) -> Mapping[str, list[str]]:
    """Every value of every field of a query string, percent-decoded as UTF-8."""
    if not query_string:
        return _NO_QUERY
    try:
        return parse_qs(
            query_string.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=QUERY_FIELDS_MAX,
        )
    except ValueError:
        raise Problem(Code.INVALID_PARAMETER, "the query string is not UTF-8") from None


def single(query: Mapping[str, list[str]], name: str) -> str | None:
    """The value of a field that stands at most once, else `invalid_parameter`."""
    values = query.get(name)
    if values is None:
        return None
    if len(values) > 1:
        raise Problem(Code.INVALID_PARAMETER, f"{name} is given {len(values)} times")
    return values[0]

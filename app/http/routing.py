"""Routes on raw paths, in FastAPI's words.

Message IDs and channels are arbitrary strings, so a path is split before it is decoded: "a%2Fb" is one segment.
`app.http.front` gives Starlette the path as it was sent, and `{message_id:segment}` in a template decodes one
segment of it. Clients and proxies rewrite some strings in a path ("", ".", ".."), so a route with an ID has a
query form without that segment, which takes any string (`/v1/messages?message_id=…`): `get_by_id`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from fastapi import APIRouter
from fastapi._compat import ModelField
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import BaseRoute, Match

from app.errors import Code, Problem
from app.http.call import AsgiScope, Reply, StreamedReply, raw_path

QUERY_FIELDS_MAX = 1_000
"""Fields in one query string; no route needs more."""

ID_PARAMETERS = ("message_id", "channel_id")
"""Path parameters that a caller may pass in the query instead."""

QUERY_KEY = "sdstore.query"
"""Where the parsed `Query` of a request is in the ASGI scope."""

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Reply | StreamedReply]])


class Query(NamedTuple):
    """The fields of a query string, percent-decoded as UTF-8, and the names that are given twice."""

    fields: Mapping[str, str]
    repeated: frozenset[str]


def parse_query(query_string: bytes) -> Query:
    """Parse a query string; `invalid_parameter`. The last value of a repeated name counts here."""
    if not query_string:
        return _NO_QUERY
    if b"%00" in query_string:
        raise Problem(Code.INVALID_PARAMETER, "no parameter holds U+0000")
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=QUERY_FIELDS_MAX,
        )
    except ValueError:
        raise Problem(Code.INVALID_PARAMETER, "the query string is not UTF-8") from None
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return Query(fields, _NO_NAMES)
    counts = Counter(name for name, _ in pairs)
    return Query(fields, frozenset(name for name, count in counts.items() if count > 1))


_NO_NAMES: frozenset[str] = frozenset()
_NO_QUERY = Query({}, _NO_NAMES)


def routable_path(scope: AsgiScope) -> str:
    """The path as it was sent, for Starlette to match; `invalid_parameter`.

    A mount prefix (`root_path`) stays decoded, because Starlette cuts it off by its length.
    """
    raw = raw_path(scope)
    if b"%00" in raw:
        raise Problem(Code.INVALID_PARAMETER, "no parameter holds U+0000")
    path = raw.decode("latin-1")
    root = scope.get("root_path", "")
    if not root:
        return path
    starts = (at for at, character in enumerate(f"{path}/") if character == "/")
    start = next((at for at in starts if unquote(path[:at]) == root), None)
    return path if start is None else f"{root}{path[start:]}"


def segment_text(segment: str) -> str:
    """A decoded path segment; `invalid_parameter`."""
    if "%" not in segment and segment.isascii():
        return segment
    try:
        return unquote_to_bytes(segment.encode("latin-1")).decode()
    except UnicodeDecodeError:
        raise Problem(Code.INVALID_PARAMETER, "a path segment is not UTF-8") from None


class _Segment(Convertor[str]):
    """One percent-encoded path segment, possibly empty."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        """See `Convertor`."""
        return segment_text(value)

    def to_string(self, value: str) -> str:
        """See `Convertor`."""
        raise NotImplementedError("no URL is made from a template")


register_url_convertor("segment", _Segment())


class NodeRoute(APIRoute):
    """A route of one method that knows its query parameters: an unknown or repeated one is an error."""

    @property
    def method(self) -> str:
        """Its method."""
        return next(iter(self.methods or ()))

    @cached_property
    def query_names(self) -> frozenset[str]:
        """The parameters that a query can have."""
        return frozenset(each.alias for each in self._queried)

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """Those of them that can be given more than once."""
        lists = (each for each in self._queried if each.field_info.annotation == list[str])
        return frozenset(each.alias for each in lists)

    @property
    def _queried(self) -> Iterable[ModelField]:
        return self.dependant.query_params

    def check_query(self, query: Query) -> None:
        """Raise `invalid_parameter` for a parameter that is unknown or given twice.

        A proxy and this node might pick different values of a repeated parameter.
        """
        if twice := query.repeated - self.repeatable:
            raise Problem(Code.INVALID_PARAMETER, f"{min(twice)[:100]} is given twice")
        if query.fields and not self.query_names.issuperset(query.fields):
            unknown = next(name for name in query.fields if name not in self.query_names)
            known = ", ".join(sorted(self.query_names)) or "none"
            why = f"unknown query parameter {unknown[:100]!r}; this route has: {known}"
            raise Problem(Code.INVALID_PARAMETER, why)


class QueryForm(NodeRoute):
    """The query form of a route with an ID. It matches only if the query has the ID."""

    @cached_property
    def id_parameter(self) -> str:
        """The parameter that the other form has in its path."""
        required = (each for each in self._queried if each.field_info.is_required())
        return next(each.alias for each in required if each.alias in ID_PARAMETERS)

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        """See `starlette.routing.Route`."""
        found = super().matches(scope)
        if found[0] is Match.NONE or self.id_parameter in scope[QUERY_KEY].fields:
            return found
        return Match.NONE, {}

    def lacks_only_its_id(self, scope: AsgiScope) -> bool:
        """Whether a request would be this route's with the ID in its query."""
        return super().matches(scope)[0] is Match.FULL


def get_by_id(router: APIRouter, path: str, **options: Any) -> Callable[[_Handler], _Handler]:
    """Declare a GET route with an ID in its path, and its query form, as `router.get` does.

    The query form comes first: its paths look like IDs of shorter routes.
    """
    name = next(each for each in ID_PARAMETERS if f"{{{each}:segment}}" in path)

    def declare(handler: _Handler) -> _Handler:
        router.add_api_route(
            path.replace(f"/{{{name}:segment}}", ""),
            handler,
            methods=["GET"],
            include_in_schema=False,
            route_class_override=QueryForm,
            **options,
        )
        router.add_api_route(path, handler, methods=["GET"], **options)
        return handler

    return declare


def no_route(routes: Iterable[BaseRoute], scope: AsgiScope) -> Problem:
    """The refusal of a request that no route takes."""
    methods = set(_allowed(routes, scope))
    for route in routes:
        if isinstance(route, QueryForm) and route.lacks_only_its_id(scope):
            return Problem(Code.INVALID_PARAMETER, f"?{route.id_parameter}= is missing")
    if not methods:
        return Problem(Code.NO_SUCH_ROUTE, "see /docs for the routes of this node")
    return Problem(
        Code.METHOD_NOT_ALLOWED,
        f"{scope['method']} is not among the methods of this path",
        headers={"Allow": ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))},
    )


def _allowed(routes: Iterable[BaseRoute], scope: AsgiScope) -> Iterator[str]:
    for route in routes:
        if isinstance(route, NodeRoute) and route.matches(scope)[0] is not Match.NONE:
            yield route.method

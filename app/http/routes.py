"""Which route a request means: by its raw, still percent-encoded path.

Message IDs and channels are any strings, so a path is split before it is decoded: "a%2Fb" is one
segment. A path parameter also has a query form without its segment (`/messages?message_id=..`),
which carries what clients and proxies would rewrite in a path ("", ".", "..").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from app.errors import Code, Problem
from app.http.auth import Scope
from app.http.call import Handler, parse_query
from app.http.metrics import HttpMetrics, RouteStats
from app.sharing import Turns

QUERY_FORM_PARAMETERS = frozenset({"message_id", "channel_id"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation: `template` as in "/v1/messages/{message_id}".

    `handler` None leaves the call to FastAPI; `body_bytes_max` 0 means that no body is read.
    `takes_turns`: an answer costs milliseconds or many bytes, so its callers wait for each other.
    """

    method: str
    template: str
    scope: Scope
    handler: Handler | None = None
    body_bytes_max: int = 0
    takes_turns: Turns | None = None

    @property
    def query_parameter(self) -> str | None:
        """The path parameter that may stand in the query instead, if there is one."""
        return next((name for name in _names(self.template) if name in QUERY_FORM_PARAMETERS), None)

    @property
    def query_template(self) -> str:
        """The template without the segment of `query_parameter`."""
        return self.template.replace(f"/{{{self.query_parameter}}}", "")


class Match(NamedTuple):
    """A route with the decoded parameters of its path and its query."""

    route: Route
    stats: RouteStats
    params: dict[str, str]
    query: Mapping[str, str]


class _Candidate(NamedTuple):
    route: Route
    stats: RouteStats
    segments_count: int
    # Picks the fixed segments of a path, which have to be `literals`.
    pick: Callable[[list[bytes]], object]
    literals: object
    # Position and name of the parameters.
    params: tuple[tuple[int, str], ...]
    query_parameter: str | None


class RouteTable:
    """All routes, found by method and segment count, the more specific ones first."""

    def __init__(self, routes: Iterable[Route], metrics: HttpMetrics) -> None:
        self._candidates: dict[tuple[str, int], list[_Candidate]] = {}
        self.unmatched = metrics.route("*", "unmatched")
        for route in routes:
            stats = metrics.route(route.method, route.template)
            self._add(_candidate(route, stats, route.template, None))
            if route.query_parameter is not None:
                self._add(_candidate(route, stats, route.query_template, route.query_parameter))
        for candidates in self._candidates.values():
            # A query form is chosen by its parameter; a literal beats a parameter.
            candidates.sort(key=lambda found: (found.query_parameter is None, len(found.params)))

    def _add(self, candidate: _Candidate) -> None:
        key = candidate.route.method, candidate.segments_count
        self._candidates.setdefault(key, []).append(candidate)

    def match(self, method: str, raw_path: bytes, query_string: bytes) -> Match:
        """The route of a request; `no_such_route`, `method_not_allowed`, `invalid_parameter`."""
        if b"%00" in raw_path or b"%00" in query_string:
            raise Problem(Code.INVALID_PARAMETER, "no parameter holds U+0000")
        segments = raw_path.split(b"/")
        query = parse_query(query_string)
        found = self._find("GET" if method == "HEAD" else method, segments, query)
        if found is None:
            raise self._no_match(method, segments, query)
        params = {name: _text(segments[position]) for position, name in found.params}
        if found.query_parameter is not None:
            params[found.query_parameter] = query[found.query_parameter]
        return Match(found.route, found.stats, params, query)

    def _find(
        self, method: str, segments: list[bytes], query: Mapping[str, str]
    ) -> _Candidate | None:
        for candidate in self._candidates.get((method, len(segments)), ()):
            if candidate.query_parameter is not None and candidate.query_parameter not in query:
                continue
            if candidate.pick(segments) == candidate.literals:
                return candidate
        return None

    def _no_match(self, method: str, segments: list[bytes], query: Mapping[str, str]) -> Problem:
        complete = dict.fromkeys(QUERY_FORM_PARAMETERS, "")
        if (incomplete := self._find(method, segments, complete)) is not None:
            return Problem(Code.INVALID_PARAMETER, f"?{incomplete.query_parameter}= is missing")
        methods = {key[0] for key in self._candidates}
        allowed = {each for each in methods if self._find(each, segments, query) is not None}
        if not allowed:
            return Problem(Code.NO_SUCH_ROUTE, "see /docs for the routes of this node")
        if "GET" in allowed:
            allowed.add("HEAD")
        return Problem(
            Code.METHOD_NOT_ALLOWED,
            f"{method} is not among the methods of this path",
            headers={"Allow": ", ".join(sorted(allowed))},
        )


def _candidate(
    route: Route, stats: RouteStats, template: str, query_parameter: str | None
) -> _Candidate:
    segments = template.split("/")
    params = [(at, each[1:-1]) for at, each in enumerate(segments) if each.startswith("{")]
    pick = itemgetter(*sorted(set(range(len(segments))) - {at for at, _ in params}))
    literals = pick([each.encode() for each in segments])
    return _Candidate(route, stats, len(segments), pick, literals, tuple(params), query_parameter)


def _names(template: str) -> list[str]:
    return [part[1:-1] for part in template.split("/") if part.startswith("{")]


def _text(segment: bytes) -> str:
    try:
        return (unquote_to_bytes(segment) if b"%" in segment else segment).decode()
    except UnicodeDecodeError:
        raise Problem(Code.INVALID_PARAMETER, "a path segment is not UTF-8") from None

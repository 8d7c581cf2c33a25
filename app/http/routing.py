"""Routes: each is declared once, beside its handler, and matched here alone.

    routes = Routes("channels")

    @routes.add("GET /v1/channels", Scope.READ, is_hot=True)
    async def list_channels(call: CurrentCall, after: After = None) -> Reply:

The handler's parameters are those of the route, in FastAPI's words. From a declaration come the entry
of the route table, FastAPI's route, and with that the OpenAPI document. FastAPI reads the arguments of
a handler, JSON bodies included, and calls it. A hot route does without: its path, query and headers
are validated by the same fields, without the request objects around them (100 us saved per request).

Message IDs and channels are arbitrary strings, so a path is split before it is decoded: "a%2Fb" is one
segment. Starlette would decode first, so FastAPI's routes take this table's match from the ASGI scope.
A path parameter also has a query form without its segment (`/messages?message_id=..`), for strings that
clients and proxies would rewrite in a path ("", ".", "..").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match as Matching

from app.callers import Scope
from app.errors import Code, Problem, fault_text
from app.http.call import AsgiScope, Call, Receive, Reply, Send, StreamedReply
from app.http.openapi import OBJECT, QUERY_FORM_PARAMETERS, Document, Replies, reply
from app.limits import Limits
from app.sharing import Turns

CALL_KEY = "sdstore.call"
"""Where FastAPI's routes find the `Call` in the ASGI scope."""

MATCH_KEY = "sdstore.match"
"""Where they find the `Match`."""

QUERY_FIELDS_MAX = 1_000
"""Fields in one query string; no route needs more."""

Handler = Callable[..., Awaitable[Reply | StreamedReply]]
_Handler = TypeVar("_Handler", bound=Handler)
_JSON_REPLY: Replies = {200: reply("Successful Response", json=OBJECT)}


async def _current_call(request: Request) -> Call:
    call: Call = request.scope[CALL_KEY]
    return call


CurrentCall = Annotated[Call, Depends(_current_call)]


class _Parameter(NamedTuple):
    """A parameter of a handler: `alias` in the request, and where to find it there.

    `validate` is None if any text is valid.
    """

    name: str
    alias: str
    find: Callable[[Call], str | None]
    validate: Callable[[str], tuple[Any, list[dict[str, Any]]]] | None
    is_required: bool
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """One operation: `template` as in "/v1/messages/{message_id}".

    `is_hot`: a route of participants, called without FastAPI; its handler reads the body itself.
    `takes_turns`: a reply costs milliseconds or many bytes, so clients wait for each other.
    A handler that does not read `call.form` answers JSON, whatever the request accepts.
    `body_bytes_max` is 0 if no body is read. `in_framework` is the route as FastAPI knows it;
    `parameters` are those of path, query and headers.
    """

    method: str
    template: str
    scope: Scope
    handler: Handler
    is_hot: bool
    takes_turns: Turns | None
    body_bytes_max: Callable[[Limits], int]
    in_framework: FrameworkRoute
    parameters: tuple[_Parameter, ...]

    def arguments(self, call: Call) -> dict[str, Any]:
        """The arguments of a hot handler beside its call, as FastAPI would read them.

        Raises `invalid_parameter`.
        """
        values: dict[str, Any] = {}
        for name, alias, find, validate, is_required, default in self.parameters:
            given = find(call)
            if given is None:
                if is_required:
                    raise Problem(Code.INVALID_PARAMETER, f"{alias}: Field required")
                values[name] = default
            elif validate is None:
                values[name] = given
            else:
                values[name], errors = validate(given)
                if errors:
                    raise Problem(Code.INVALID_PARAMETER, f"{alias}: {fault_text(errors[0])}")
        return values

    @property
    def is_audited(self) -> bool:
        """Whether it is an action of an operator, which the audit log must have."""
        return self.scope is Scope.ADMIN and self.method != "GET"

    @property
    def query_parameter(self) -> str | None:
        """The path parameter that a caller may pass in the query instead."""
        segments = self.template.split("/")
        return next((name for name in QUERY_FORM_PARAMETERS if f"{{{name}}}" in segments), None)

    @property
    def query_template(self) -> str:
        """The template without the segment of `query_parameter`."""
        return self.template.replace(f"/{{{self.query_parameter}}}", "")


class Match(NamedTuple):
    """A route with the decoded parameters of its path and its query; `query_names` are those it has."""

    route: Route
    params: dict[str, str]
    query: Mapping[str, str]
    query_names: frozenset[str]

    def check_query(self) -> None:
        """Raise `invalid_parameter` for a query parameter that the route does not have."""
        if self.query and not self.query_names.issuperset(self.query):
            unknown = next(name for name in self.query if name not in self.query_names)
            known = ", ".join(sorted(self.query_names)) or "none"
            why = f"unknown query parameter {unknown[:100]!r}; this route has: {known}"
            raise Problem(Code.INVALID_PARAMETER, why)


class FrameworkRoute(APIRoute):
    """A route of FastAPI that the route table matches, and whose reply the gateway sends."""

    def matches(self, scope: AsgiScope) -> tuple[Matching, AsgiScope]:
        """See `starlette.routing.Route`."""
        match: Match = scope[MATCH_KEY]
        if match.route.in_framework is not self:
            return Matching.NONE, {}
        child = {"endpoint": self.endpoint, "path_params": match.params, "route": self}
        return Matching.FULL, child


@dataclass(slots=True)
class Routes:
    """The routes of one subject, in the order of their declaration. `tag` groups them in /docs."""

    tag: str
    declared: list[Route] = field(default_factory=list)

    def add(
        self,
        name: str,
        scope: Scope,
        *,
        replies: Replies = _JSON_REPLY,
        body: Document | None = None,
        body_bytes_max: Callable[[Limits], int] | None = None,
        takes_turns: Turns | None = None,
        is_hot: bool = False,
        operation_id: str | None = None,
    ) -> Callable[[_Handler], _Handler]:
        """Declare the decorated handler as the route `name`, such as "GET /v1/channels".

        `replies` and `body` are in OpenAPI's words (`app.http.openapi`); the first reply is the usual
        one. A `body` is read by the handler; FastAPI reads and describes one that is a parameter.
        Generated clients name their methods by `operation_id`; by default FastAPI forms it.
        """
        method, _, template = name.partition(" ")

        def declare(handler: _Handler) -> _Handler:
            extra: Document = {"x-sdstore-scope": scope.value}
            if takes_turns is not None:
                extra["x-sdstore-takes-turns"] = takes_turns.value
            if body is not None:
                extra["requestBody"] = body
            in_framework = FrameworkRoute(
                template,
                _endpoint(handler),
                methods=[method],
                tags=[self.tag],
                status_code=int(next(iter(replies))),
                responses=dict(replies),
                response_model=None,
                response_class=Response,
                openapi_extra=extra,
                operation_id=operation_id,
            )
            needed = [each.call for each in in_framework.dependant.dependencies]
            if needed != [_current_call]:
                raise TypeError(f"{name}: the handler needs a parameter `call: CurrentCall`")
            if is_hot and in_framework.body_field is not None:
                raise TypeError(f"{name}: the handler of a hot route reads the body itself")
            self.declared.append(
                Route(
                    method=method,
                    template=template,
                    scope=scope,
                    handler=handler,
                    is_hot=is_hot,
                    takes_turns=takes_turns,
                    body_bytes_max=body_bytes_max or _usual_body_bytes_max(method, scope),
                    in_framework=in_framework,
                    parameters=tuple(_parameters(in_framework)),
                )
            )
            return handler

        return declare


class _InTheCall(Response):
    """Sends nothing: the gateway sends the reply that is in the call."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """See `Response`."""


def _endpoint(handler: Handler) -> Callable[..., Awaitable[Response]]:
    """The handler for FastAPI: its reply stays in the call, and the gateway sends it."""

    @wraps(handler)
    async def endpoint(call: Call, **arguments: Any) -> Response:
        call.reply = await handler(call, **arguments)
        return _InTheCall()

    return endpoint


def _parameters(route: APIRoute) -> Iterator[_Parameter]:
    known = route.dependant
    for find, fields in (
        (_in_path, known.path_params),
        (_in_query, known.query_params),
        (_in_header, known.header_params),
    ):
        for each in fields:
            is_required = each.field_info.is_required()
            default = None if is_required else each.get_default()
            info = each.field_info
            is_text = info.annotation in (str, str | None) and not info.metadata
            yield _Parameter(
                name=each.name,
                alias=each.alias,
                find=find(each.alias),
                validate=None if is_text else each.validate,
                is_required=is_required,
                default=default,
            )


def _in_path(name: str) -> Callable[[Call], str | None]:
    return lambda call: call.params.get(name)


def _in_query(name: str) -> Callable[[Call], str | None]:
    return lambda call: call.query.get(name)


def _in_header(name: str) -> Callable[[Call], str | None]:
    key = name.lower().encode()

    def find(call: Call) -> str | None:
        value = call.headers.get(key)
        return None if value is None else value.decode("latin-1")

    return find


def _usual_body_bytes_max(method: str, scope: Scope) -> Callable[[Limits], int]:
    if method not in ("POST", "PUT"):
        return lambda _: 0
    if scope is Scope.ADMIN:
        return lambda limits: limits.operator_body_bytes_max
    return lambda limits: limits.small_body_bytes_max


class _Candidate(NamedTuple):
    route: Route
    segments_count: int
    # Picks the fixed segments of a path, which must equal `literals`.
    pick: Callable[[list[bytes]], object]
    literals: object
    # Position and name of the parameters.
    params: tuple[tuple[int, str], ...]
    query_parameter: str | None
    query_names: frozenset[str]
    repeatable: frozenset[str]


class RouteTable:
    """All routes, found by method and number of segments, the more specific ones first."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._candidates: dict[tuple[str, int], list[_Candidate]] = {}
        for route in routes:
            self._add(_candidate(route, route.template, None))
            if route.query_parameter is not None:
                self._add(_candidate(route, route.query_template, route.query_parameter))
        for candidates in self._candidates.values():
            # A query form is recognised by its parameter; a literal beats a parameter.
            candidates.sort(key=lambda found: (found.query_parameter is None, len(found.params)))

    def _add(self, candidate: _Candidate) -> None:
        key = candidate.route.method, candidate.segments_count
        self._candidates.setdefault(key, []).append(candidate)

    def match(self, method: str, raw_path: bytes, query_string: bytes) -> Match:
        """The route of a request; `no_such_route`, `method_not_allowed`, `invalid_parameter`."""
        if b"%00" in raw_path or b"%00" in query_string:
            raise Problem(Code.INVALID_PARAMETER, "no parameter holds U+0000")
        segments = raw_path.split(b"/")
        query, repeated = parse_query(query_string)
        found = self._find("GET" if method == "HEAD" else method, segments, query)
        if found is None:
            raise self._no_match(method, segments, query)
        if twice := repeated - found.repeatable:
            raise Problem(Code.INVALID_PARAMETER, f"{min(twice)[:100]} is given twice")
        params = {name: _text(segments[position]) for position, name in found.params}
        if found.query_parameter is not None:
            params[found.query_parameter] = query[found.query_parameter]
        return Match(found.route, params, query, found.query_names)

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


def _candidate(route: Route, template: str, query_parameter: str | None) -> _Candidate:
    segments = template.split("/")
    params = [(at, each[1:-1]) for at, each in enumerate(segments) if each.startswith("{")]
    pick = itemgetter(*sorted(set(range(len(segments))) - {at for at, _ in params}))
    literals = pick([each.encode() for each in segments])
    fields = route.in_framework.dependant.query_params
    queried = {each.alias for each in fields}
    names = frozenset(queried if query_parameter is None else queried | {query_parameter})
    lists = frozenset(each.alias for each in fields if each.field_info.annotation == list[str])
    return _Candidate(
        route, len(segments), pick, literals, tuple(params), query_parameter, names, lists
    )


def parse_query(query_string: bytes) -> tuple[Mapping[str, str], frozenset[str]]:
    """The fields of a query string, percent-decoded as UTF-8, and the repeated names.

    Raises `invalid_parameter`. The last value of a repeated name counts, unless the route takes a list:
    then FastAPI reads all of them. Elsewhere repeated parameters are rejected: a proxy and this node might
    pick different values.
    """
    if not query_string:
        return _NO_QUERY, _NO_NAMES
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
        counts = Counter(name for name, _ in pairs)
        return query, frozenset(name for name, count in counts.items() if count > 1)
    return query, _NO_NAMES


_NO_QUERY: Mapping[str, str] = {}
_NO_NAMES: frozenset[str] = frozenset()


def _text(segment: bytes) -> str:
    try:
        return (unquote_to_bytes(segment) if b"%" in segment else segment).decode()
    except UnicodeDecodeError:
        raise Problem(Code.INVALID_PARAMETER, "a path segment is not UTF-8") from None

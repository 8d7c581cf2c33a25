"""Routing on raw paths: IDs of any content, query forms, 404 and 405, mounts."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match

from app.errors import Code, Problem
from app.http.admission import (
    QUERY_KEY,
    NodeRoute,
    Reader,
    admission_of,
    get_by_id,
    no_route,
    parse_query,
    routable_path,
)
from app.http.application import Application
from app.http.call import AsgiScope, Reply
from app.server.settings import Settings

APP = Application(Settings())
ANY_ID = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)


def scope_of(method: str, target: str) -> AsgiScope:
    """As the front layer prepares it."""
    path, _, query = target.partition("?")
    scope: dict[str, Any] = {"type": "http", "method": method, "raw_path": path.encode()}
    scope["path"] = routable_path(scope)
    scope[QUERY_KEY] = parse_query(query.encode())
    return scope


def matched(method: str, target: str) -> tuple[str, dict[str, str]]:
    """The template of the route in its path form, and the ID parameters."""
    scope = scope_of(method, target)
    for route in APP.routes:
        found, child = route.matches(scope)
        if found is Match.FULL:
            assert isinstance(route, NodeRoute)
            route.check_query(scope[QUERY_KEY])
            both = (each for each in APP.node_routes if each.endpoint is route.endpoint)
            params = child["path_params"] or {
                name: text
                for name, text in scope[QUERY_KEY].fields.items()
                if name in ("message_id", "channel_id")
            }
            return next(both).path_format, params
    raise no_route(APP.routes, scope)


def refused(method: str, target: str) -> Problem:
    with pytest.raises(Problem) as caught:
        matched(method, target)
    return caught.value


@given(message_id=ANY_ID)
def test_any_id_is_one_path_segment_when_it_is_percent_encoded(message_id: str) -> None:
    segment = quote(message_id, safe="")
    expected = {"message_id": message_id}
    assert matched("GET", f"/v1/messages/{segment}") == ("/v1/messages/{message_id}", expected)
    assert matched("GET", f"/v1/messages/{segment}/ancestors")[1] == expected


@given(message_id=ANY_ID)
def test_the_query_form_takes_any_id(message_id: str) -> None:
    query = f"message_id={quote(message_id, safe='')}"
    expected = {"message_id": message_id}
    assert matched("GET", f"/v1/messages?{query}") == ("/v1/messages/{message_id}", expected)
    assert matched("GET", f"/v1/messages/ancestors?{query}") == (
        "/v1/messages/{message_id}/ancestors",
        expected,
    )


def test_a_message_called_like_a_route_is_found_under_its_name() -> None:
    assert matched("GET", "/v1/messages/batch") == (
        "/v1/messages/{message_id}",
        {"message_id": "batch"},
    )
    assert matched("GET", "/v1/messages/ancestors?channel_id=c")[1] == {"message_id": "ancestors"}


def test_a_channel_called_messages_is_told_from_the_query_form() -> None:
    assert matched("GET", "/v1/channels/messages") == (
        "/v1/channels/{channel_id}",
        {"channel_id": "messages"},
    )
    assert matched("GET", "/v1/channels/messages?channel_id=c") == (
        "/v1/channels/{channel_id}/messages",
        {"channel_id": "c"},
    )


def test_a_route_without_admission_or_that_reads_a_body_before_it_is_refused() -> None:
    router = APIRouter(route_class=NodeRoute)

    @router.get("/v1/x")
    async def without_admission(limit: int) -> Reply:
        raise NotImplementedError

    @router.post("/v1/y")
    async def with_body(call: Reader, body: dict[str, str]) -> Reply:
        raise NotImplementedError

    without, early = router.routes
    with pytest.raises(TypeError, match="/v1/x: the handler needs a parameter with `admitted`"):
        admission_of(without)
    with pytest.raises(TypeError, match="/v1/y: the handler needs `json_body` for its body"):
        admission_of(early)


def test_an_optional_parameter_of_a_channel_is_not_the_id_of_the_query_form() -> None:
    router = APIRouter(route_class=NodeRoute)

    @get_by_id(router, "/x/{message_id:segment}")
    async def with_filter(call: Reader, message_id: str, channel_id: str | None = None) -> Reply:
        raise NotImplementedError

    form = router.routes[0]
    assert form.matches(scope_of("GET", "/x?channel_id=c"))[0] is Match.NONE
    assert form.matches(scope_of("GET", "/x?message_id=m"))[0] is Match.FULL


def test_the_empty_channel_is_a_channel() -> None:
    assert matched("GET", "/v1/channels//messages")[1] == {"channel_id": ""}
    assert matched("GET", "/v1/channels/")[1] == {"channel_id": ""}
    assert matched("GET", "/v1/channels?channel_id=")[1] == {"channel_id": ""}


def test_the_list_and_the_query_form_share_a_path() -> None:
    assert matched("GET", "/v1/channels") == ("/v1/channels", {})
    assert matched("GET", "/v1/channels?limit=5") == ("/v1/channels", {})


@pytest.mark.parametrize(
    "target", ["", "/v1", "/v1/messages/a/b", "/v1/messages/a/ancestors/", "/V1/messages/a"]
)
def test_other_paths_are_no_route(target: str) -> None:
    problem = refused("GET", target)
    assert problem.code is Code.NO_SUCH_ROUTE
    assert "a%2Fb" in problem.detail


def test_a_wrong_method_is_told_the_right_ones() -> None:
    problem = refused("DELETE", "/v1/messages/batch")
    assert problem.code is Code.METHOD_NOT_ALLOWED
    assert problem.headers == {"Allow": "GET, HEAD, POST"}


@pytest.mark.parametrize(
    "target",
    [
        "/v1/messages",
        "/v1/messages?message_id=a&message_id=b",
        "/v1/channels?limit=1&limit=2",
        "/v1/messages/%FF",
        "/v1/messages/%C3",
        "/v1/messages/a%00",
        "/v1/messages?message_id=%00",
        "/v1/messages?message_id=%FF",
        "/v1/messages?message_id=a&" + "&".join(f"p{n}=1" for n in range(1_000)),
    ],
)
def test_what_is_no_text_or_stands_twice_is_an_invalid_parameter(target: str) -> None:
    assert refused("GET", target).code is Code.INVALID_PARAMETER


PREFIX = st.lists(
    st.text(
        st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=5
    ),
    min_size=1,
    max_size=3,
)


@given(PREFIX, ANY_ID)
def test_a_mount_prefix_with_escapes_is_cut_off(parts: list[str], message_id: str) -> None:
    raw = "".join("/" + quote(part, safe="") for part in parts)
    root = unquote(raw)
    path = f"{raw}/v1/messages/{quote(message_id, safe='')}"
    scope = {"raw_path": path.encode(), "path": unquote(path), "root_path": root}
    assert routable_path(scope) == f"{root}/v1/messages/{quote(message_id, safe='')}"

"""Routing on raw paths: IDs of any content, query forms, 404 and 405."""

from __future__ import annotations

from typing import cast
from urllib.parse import quote

import pytest
from fastapi.dependencies.utils import request_params_to_args
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from app.callers import Caller, Scope
from app.errors import Code, Problem
from app.http.application import ROUTES as SERVED
from app.http.call import Call, Reply
from app.http.federation import PeerBody
from app.http.routing import CurrentCall, Routes, RouteTable
from app.node import Node

TEMPLATES = [
    ("GET", "/v1/messages/{message_id}"),
    ("GET", "/v1/messages/{message_id}/ancestors"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/batch"),
    ("GET", "/v1/channels"),
    ("GET", "/v1/channels/{channel_id}"),
    ("GET", "/v1/channels/{channel_id}/messages"),
    ("GET", "/livez"),
]
ROUTES = Routes("test")
for _method, _template in TEMPLATES:

    @ROUTES.add(f"{_method} {_template}", Scope.READ)
    async def answer(call: CurrentCall) -> Reply:
        raise NotImplementedError


TABLE = RouteTable(ROUTES.declared)
ANY_ID = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)


def matched(method: str, target: str) -> tuple[str, dict[str, str]]:
    path, _, query = target.partition("?")
    match = TABLE.match(method, path.encode(), query.encode())
    return match.route.template, match.params


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


PAGE = next(r for r in SERVED if r.template == "/v1/channels/{channel_id}/messages")
VALUES = st.one_of(
    st.integers(-(2**64), 2**64).map(str),
    st.sampled_from(["log", "arrival", "asc", "desc", "", "1_000", " 5 ", "5.0", "+1", "true"]),
    st.text(max_size=5),
)


@given(
    st.dictionaries(st.sampled_from([each.alias for each in PAGE.parameters]), VALUES, max_size=4)
)
def test_a_hot_route_reads_its_arguments_as_fastapi_does(query: dict[str, str]) -> None:
    fields = PAGE.in_framework.dependant.query_params
    expected, errors = request_params_to_args(fields, QueryParams(query))
    call = Call(cast("Node", None), Caller("any"), {"channel_id": "c"}, query, {}, {})
    if not errors:
        assert PAGE.arguments(call) == {"channel_id": "c", **expected}
        return
    with pytest.raises(Problem) as caught:
        PAGE.arguments(call)
    first = errors[0]
    assert caught.value.code is Code.INVALID_PARAMETER
    assert caught.value.detail == f"{first['loc'][-1]}: {first['msg']}"


def test_a_declaration_that_could_not_be_served_is_refused() -> None:
    async def without_call(limit: int) -> Reply:
        raise NotImplementedError

    async def with_body(call: CurrentCall, body: PeerBody) -> Reply:
        raise NotImplementedError

    with pytest.raises(TypeError, match="GET /v1/x: the handler needs a parameter `call"):
        Routes("test").add("GET /v1/x", Scope.READ)(without_call)
    with pytest.raises(TypeError, match="reads the body itself"):
        Routes("test").add("POST /v1/x", Scope.READ, is_hot=True)(with_body)


def test_the_empty_channel_is_a_channel() -> None:
    assert matched("GET", "/v1/channels//messages")[1] == {"channel_id": ""}
    assert matched("GET", "/v1/channels/")[1] == {"channel_id": ""}
    assert matched("GET", "/v1/channels?channel_id=")[1] == {"channel_id": ""}


def test_the_list_and_the_query_form_share_a_path() -> None:
    assert matched("GET", "/v1/channels") == ("/v1/channels", {})
    assert matched("GET", "/v1/channels?limit=5") == ("/v1/channels", {})


def test_head_is_answered_as_get() -> None:
    assert matched("HEAD", "/livez")[0] == "/livez"


@pytest.mark.parametrize(
    "target", ["/", "", "/v1", "/v1/messages/a/b", "/v1/messages/a/ancestors/", "/V1/messages/a"]
)
def test_other_paths_are_no_route(target: str) -> None:
    assert refused("GET", target).code is Code.NO_SUCH_ROUTE


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

"""Content negotiation."""

from __future__ import annotations

import pytest

from app.errors import Code, Problem
from app.http.call import Form, answer_form, body_form


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, Form.JSON),
        ("", Form.JSON),
        ("*/*", Form.JSON),
        ("application/*", Form.JSON),
        ("application/json", Form.JSON),
        ("application/x-protobuf", Form.PROTOBUF),
        ("Application/X-Protobuf", Form.PROTOBUF),
        ("application/x-protobuf, */*;q=0.1", Form.PROTOBUF),
        ("application/x-protobuf;q=0.5, application/json;q=0.4", Form.PROTOBUF),
        ("application/x-protobuf;q=0.4, application/json;q=0.5", Form.JSON),
        ("application/json;q=0, */*", Form.PROTOBUF),
        ("text/html, application/xml;q=0.9, */*;q=0.8", Form.JSON),
        ("application/x-protobuf; version=1 ; q=0.5", Form.PROTOBUF),
    ],
)
def test_the_preferred_form_is_answered(accept: str | None, form: Form) -> None:
    assert answer_form(accept.encode() if accept is not None else None) is form


@pytest.mark.parametrize(
    "accept", ["text/html", "*/*;q=0", "application/json;q=x", ";;,,", "\xff", "json"]
)
def test_no_acceptable_form_is_refused(accept: str) -> None:
    with pytest.raises(Problem) as caught:
        answer_form(accept.encode("latin-1"))
    assert caught.value.code is Code.NOT_ACCEPTABLE


def test_a_body_is_read_by_its_content_type() -> None:
    both = (Form.PROTOBUF, Form.JSON)
    assert body_form(b"application/json; charset=utf-8", *both) is Form.JSON
    assert body_form(b"APPLICATION/X-PROTOBUF", *both) is Form.PROTOBUF
    assert body_form(b"application/jsonl", Form.NDJSON) is Form.NDJSON


@pytest.mark.parametrize("content_type", [None, b"", b"text/plain", b"application/jsonx"])
def test_another_content_type_is_refused_with_those_that_are_read(
    content_type: bytes | None,
) -> None:
    with pytest.raises(Problem) as caught:
        body_form(content_type, Form.PROTOBUF, Form.JSON)
    assert caught.value.code is Code.UNSUPPORTED_MEDIA_TYPE
    assert caught.value.headers == {"Accept": "application/x-protobuf, application/json"}

"""The page over HTTP: who gets what, its cookie, its headers, its bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from app.access.callers import Scope
from app.access.operator import OPERATOR_FILE
from app.access.tokens import TokenFile
from app.http.admission import admission_of
from app.http.application import Application
from app.page.render import shown
from app.page.session import PageRoute
from app.page.views import ROWS
from app.server.settings import Settings
from sdstore.sds.model import HistoryEntry, Message
from tests.support.server import RunningNode, running_node

PAGES = [each for each in Application(Settings()).routes if isinstance(each, PageRoute)]
CHANNEL = "/garden/1/bees/proto"
PAGE_BYTES_MAX = 150_000


def path_of(route: PageRoute) -> str:
    """A path that the route takes, with what it demands."""
    query = {"channel_id": CHANNEL, "digest": "00" * 32}
    given = [f"{name}={quote(query[name], safe='')}" for name in route.query_names if name in query]
    return re.sub(r"\{\w+\}", "x", route.path_format) + (f"?{'&'.join(given)}" if given else "")


@contextmanager
def signed_in(node: RunningNode, token: str) -> Iterator[httpx.Client]:
    """A browser that is signed in."""
    own = {"origin": node.url}
    with httpx.Client(base_url=node.url, trust_env=False, headers=own) as browser:
        assert browser.post("/page/sign-in", data={"token": token}).status_code == 303
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[RunningNode]:
    """A node that demands tokens."""
    with running_node(folder, trust_loopback=False) as node:
        yield node


@pytest.fixture(scope="module")
def operator(node: RunningNode, folder: Path) -> Iterator[httpx.Client]:
    with signed_in(node, (folder / OPERATOR_FILE).read_text().strip()) as browser:
        yield browser


def token(folder: Path, *scopes: Scope, **limits: object) -> str:
    return TokenFile(folder / "tokens.json").create(scopes=scopes, **limits)[1]  # type: ignore[arg-type]


def refused(answer: httpx.Response) -> bool:
    """Whether the caller lacks a right; other refusals are about what it named."""
    return answer.status_code in (401, 403)


@pytest.mark.parametrize("route", PAGES, ids=lambda each: f"{each.method} {each.path_format}")
def test_each_page_is_there_for_those_with_its_scope_and_for_nobody_else(
    node: RunningNode, folder: Path, route: PageRoute
) -> None:
    scope = admission_of(route).scope
    tokens = {
        Scope.OPEN: None,
        Scope.READ: token(folder, Scope.READ),
        Scope.ADMIN: (folder / OPERATOR_FILE).read_text().strip(),
    }
    ranks = list(tokens)
    for has, text in tokens.items():
        headers = {"origin": node.url} | ({"authorization": f"Bearer {text}"} if text else {})
        if "events" in route.path_format or route.path_format == "/page/now":
            with httpx.stream(route.method, node.url + path_of(route), headers=headers) as answer:
                is_refused = refused(answer)
        else:
            answer = httpx.request(route.method, node.url + path_of(route), headers=headers)
            # An empty token is refused by the route for signing in itself.
            is_refused = refused(answer) and route.name != "sign_in"
        assert is_refused is (ranks.index(has) < ranks.index(scope)), (has, answer.status_code)


def test_a_reader_of_a_part_sees_nothing_of_the_rest(node: RunningNode, folder: Path) -> None:
    writer = {"authorization": f"Bearer {token(folder, Scope.PUBLISH)}"}
    for channel in ("/garden/mine", "/town/theirs"):
        body = {
            "message": {
                "message_id": f"m{channel}",
                "channel_id": channel,
                "lamport_timestamp": "1",
                "content": "aGk=",
            }
        }
        assert node.http.post("/v1/messages", json=body, headers=writer).status_code == 201
    with signed_in(node, token(folder, Scope.READ, prefixes=["/garden/"])) as browser:
        first = browser.get("/").text
        assert "Entries" not in first
        assert "Peers" not in first
        listed = browser.get("/page/channels").text
        assert "/garden/mine" in listed
        assert "/town/theirs" not in listed
        assert browser.get("/page/channel?channel_id=%2Ftown%2Ftheirs").status_code == 403
        assert browser.get("/page/find?q=m%2Ftown%2Ftheirs").text.count("no hint leads") == 1
        assert browser.get("/page/find?q=m%2Fgarden%2Fmine").status_code == 303


def test_the_cookie_signs_in_to_the_page_and_to_nothing_else(
    node: RunningNode, folder: Path
) -> None:
    text = (folder / OPERATOR_FILE).read_text().strip()
    answer = httpx.post(
        f"{node.url}/page/sign-in", data={"token": text}, headers={"origin": node.url}
    )
    cookie = answer.headers["set-cookie"]
    node_id = httpx.get(f"{node.url}/v1/info", headers={"authorization": f"Bearer {text}"}).json()[
        "node_id"
    ]
    assert cookie.startswith(f"sdstore_{node_id}=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert text not in cookie
    sent = {"cookie": cookie.partition(";")[0]}
    assert httpx.get(f"{node.url}/page/peers", headers=sent).status_code == 200
    assert httpx.get(f"{node.url}/v1/peers", headers=sent).status_code == 401
    assert httpx.get(f"{node.url}/v1/channels", headers=sent).status_code == 401
    value = cookie.partition(";")[0].partition("=")[2]
    for wrong in (value[:-4] + "AAAA", "x", "", "é"):
        sent = {"cookie": f"sdstore_{node_id}={wrong}".encode()}
        assert httpx.get(f"{node.url}/page/peers", headers=sent).status_code == 401


def test_a_revoked_token_signs_the_browser_out(node: RunningNode, folder: Path) -> None:
    file = TokenFile(folder / "tokens.json")
    made, text = file.create(scopes=[Scope.READ])
    with signed_in(node, text) as browser:
        assert browser.get("/page/channels").status_code == 200
        file.revoke(made.token_id)
        answer = httpx.Response(200)
        while answer.status_code == 200:
            with suppress(httpx.RemoteProtocolError):  # a request that runs is ended
                answer = browser.get("/page/channels")
        assert answer.status_code == 401
        assert "Max-Age=0" in answer.headers["set-cookie"]
        assert 'name="token"' in answer.text


def test_a_wrong_token_does_not_sign_in(node: RunningNode) -> None:
    for wrong in ("", "x", "sds_operator_" + "0" * 64, "sds_é_1"):
        answer = httpx.post(
            f"{node.url}/page/sign-in", data={"token": wrong}, headers={"origin": node.url}
        )
        assert answer.status_code == 401


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1"])
def test_a_form_of_another_origin_is_refused(operator: httpx.Client, origin: str | None) -> None:
    headers = {} if origin is None else {"origin": origin}
    request = operator.build_request("POST", "/page/peers", data={"url": "http://127.0.0.1:9"})
    del request.headers["origin"]
    request.headers.update(headers)
    assert operator.send(request).status_code == 403
    assert "127.0.0.1:9" not in operator.get("/page/peers").text


def test_a_rebound_host_is_refused(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        assert httpx.get(node.url).status_code == 200
        for path in ("/", "/page/channels", "/page/sign-in"):
            answer = httpx.get(node.url + path, headers={"host": "evil.example"})
            assert answer.status_code == 403


def test_no_page_allows_what_is_unsafe(operator: httpx.Client) -> None:
    for path in ("/", "/page/peers", "/page/channels", "/page/message", "/page/retention"):
        answer = operator.get(path)
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<[^>]*\s(style|on\w+)=|<style|<script(?! src)", answer.text)
        assert not re.search(r"(src|href|action)=\"(https?:)?//", answer.text)


def test_pages_stay_small_with_the_longest_ids(
    node: RunningNode, folder: Path, operator: httpx.Client
) -> None:
    channel = "\x7f" * 254
    items = []
    for number in range(ROWS + 10):
        start = f"{number:02}"
        items.append(
            {
                "message": {
                    "message_id": start + "\x7f" * 1_000,
                    "channel_id": channel + f"{number:02}" if number % 2 else channel,
                    "sender_id": start + "\x7f" * 1_000,
                    "lamport_timestamp": str(number),
                    "content": "4oCu" * 5_000,  # U+202E
                    "causal_history": [
                        {"message_id": f"{each:02}" + "\x7f" * 1_000}
                        for each in range(60 if not number else 2)
                    ],
                }
            }
        )
    writer = {"authorization": f"Bearer {token(folder, Scope.PUBLISH)}"}
    lines = "\n".join(map(json.dumps, items))
    writer |= {"content-type": "application/x-ndjson"}
    answer = node.http.post("/v1/messages/batch", content=lines, headers=writer)
    assert answer.status_code == 200, answer.text
    assert {each["outcome"] for each in answer.json()["outcomes"]} == {"stored"}
    log = f"/page/channel?channel_id={quote(channel, safe='')}"
    found = operator.get(log).text
    message = re.search(r'href="(\.\./page/message\?digest=[0-9a-f]+)"', found)
    assert message is not None
    pages = [
        "/",
        "/page/channels",
        log,
        f"/page/gaps?channel_id={quote(channel, safe='')}",
        f"/page/order?channel_id={quote(channel, safe='')}&indexers=00%7F",
        message[1].removeprefix(".."),
    ]
    for path in pages:
        answer = operator.get(path)
        assert answer.status_code == 200, path
        assert len(answer.content) < PAGE_BYTES_MAX, path


def test_a_causal_walk_needs_no_more_than_links(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.publish(Message("a", CHANNEL, "ada", 1, content=b"first"))
        node.publish(
            Message(
                "b", CHANNEL, "bob", 2, (HistoryEntry("a"), HistoryEntry("x")), content=b"second"
            )
        )
        shown_b = node.http.get("/page/message?message_id=b").text
        assert "message?message_id=a&amp;channel_id=" in shown_b
        assert "! missing" in shown_b
        shown_a = node.http.get("/page/message?message_id=a").text
        assert re.search(r"Named by</h2>\s*<ul><li><a href=\"\.\./page/message\?digest=", shown_a)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<script>", "&lt;script&gt;"),
        ("a\u202eb", '<span class="code">U+202E</span>b'),
        ("\x00\x1b[31m", "U+0000 U+001B</span>[31m"),
        ("\u200b\u2066\ufeff", "U+200B U+2066 U+FEFF"),
        ("a\nb", "U+000A"),
        ("\U000e0041", "U+E0041"),
        ("x" * 81, "…"),
    ],
)
def test_untrusted_text_is_shown_and_changes_nothing(text: str, said: str) -> None:
    assert said in shown(text)
    assert shown(text).startswith("<bdi>")


def test_content_keeps_its_lines() -> None:
    assert shown("a\n\tb\r", is_content=True) == '<bdi>a\n\tb<span class="code">U+000D</span></bdi>'


def test_a_page_works_below_a_prefix(operator: httpx.Client) -> None:
    for path in ("/", "/page/peers", "/page/quarantine"):
        links = re.findall(r'(?:href|src|action)="([^"#]*)"', operator.get(path).text)
        assert links
        assert not [each for each in links if each.startswith(("/", "http"))]
        for each in links:
            url = httpx.URL(f"http://h/prefix{path}").join(each)
            assert url.path.startswith("/prefix/"), (path, each)


def test_an_operator_decides_about_the_quarantine_and_retires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("examples")
    with running_node(tmp_path, policy="policy:Moderation") as node:
        for number in range(2):
            message = Message(f"m{number}", CHANNEL, "ada", number + 1, content=b"a lottery!")
            assert node.publish(message).json()["code"] == "quarantined"
        with signed_in(node, (tmp_path / OPERATOR_FILE).read_text().strip()) as browser:
            listed = browser.get("/page/quarantine").text
            digests = re.findall(r'href="\.\./page/quarantine/([0-9a-f]{64})"', listed)
            assert len(digests) == 2
            assert "contains" in listed
            assert "a lottery!" in browser.get(f"/page/quarantine/{digests[0]}").text
            for digest, done in zip(digests, ("release", "drop"), strict=True):
                answer = browser.post(f"/page/quarantine/{digest}/{done}", follow_redirects=True)
                assert str(answer.url) == f"{node.url}/page/quarantine"
                assert digest not in answer.text
            assert browser.get("/page/message?message_id=m0").status_code == 200
            assert browser.get("/page/message?message_id=m1").status_code == 404
            body = {"digest": digests[0], "reason": "a mistake"}
            assert browser.post("/page/retire", data=body).status_code == 303
            gone = browser.get("/page/message?message_id=m0")
            assert gone.status_code == 410
            assert "retired" in gone.text
            assert (
                browser.post("/page/retire", data={"digest": "", "reason": ""}).status_code == 400
            )

"""The clients against a node that is played by a function."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest

import sdstore.client.exchange as exchange
from sdstore.client import (
    AsyncStoreClient,
    ClientOptions,
    PublishItem,
    Retry,
    StoreClient,
    StoreError,
)
from sdstore.client.exchange import Batcher
from sdstore.sds.codec import encode
from sdstore.sds.model import Message, MessageError, entry_digest, frame_hash
from sdstore.wire import store_pb2 as wire
from tests.support.store_clients import EitherClient, played_by

PROBLEM = {
    "type": "urn:sdstore:problem:not_found",
    "title": "Not found",
    "status": 404,
    "detail": "no message of this ID is here",
    "code": "not_found",
}
MESSAGE = Message("id", "chan", "alice", 7, content=b"x")
FRAME = encode(MESSAGE)
DIGEST = entry_digest(MESSAGE)
FRAME_HEADERS = {"SDS-Digest": DIGEST.hex(), "SDS-Dialect": "v2", "SDS-Variants": "1"}
ODD_STRINGS = ["/a/b", "..", ".", "%", "%2F", "", "a b+c&d=e?#", "x/ancestors", "идент→", "ü" * 512]

Handler = Callable[[httpx.Request], httpx.Response]
Connect = Callable[..., EitherClient]
QUICK = ClientOptions(retry=Retry(backoff_s=0.001))


@pytest.fixture(params=[StoreClient, AsyncStoreClient])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind whose node is the given function."""
    opened: list[EitherClient] = []

    def open_client(
        handler: Handler, options: ClientOptions = QUICK, **kwargs: Any
    ) -> EitherClient:
        transport = played_by(handler)
        client = request.param("http://node", options=options, transport=transport, **kwargs)
        opened.append(EitherClient(client))
        return opened[-1]

    yield open_client
    for client in opened:
        client.__exit__(None, None, None)


class Recorder:
    """A node that gives the same answers in turn and remembers what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def protobuf(message: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=message.SerializeToString())


def query_of(request: httpx.Request) -> list[tuple[str, str]]:
    return parse_qsl(request.url.query.decode("ascii"), keep_blank_values=True)


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_ids_and_channels_of_any_content_arrive_as_they_are(connect: Connect, text: str) -> None:
    node = Recorder(httpx.Response(200, content=FRAME, headers=FRAME_HEADERS))
    connect(node).get(text, text)
    [request] = node.requests
    assert request.url.raw_path.partition(b"?")[0] == b"/v1/messages"
    assert query_of(request) == [("message_id", text), ("channel_id", text)]


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_a_page_of_any_channel_is_asked_for_in_the_query(connect: Connect, text: str) -> None:
    node = Recorder(protobuf(wire.MessagePage()))
    assert connect(node).messages(text, from_lamport=-5, page_size=10) == []
    assert dict(query_of(node.requests[0])) == {
        "channel_id": text,
        "order": "log",
        "direction": "asc",
        "from_lamport": "-5",
        "limit": "10",
    }


def test_a_node_below_a_path_is_reached_there() -> None:
    node = Recorder(protobuf(wire.Channel(channel_id="c")))
    with StoreClient("http://host/store/", transport=played_by(node)) as client:
        client.channel("c")
    assert node.requests[0].url.path == "/store/v1/channels"


def test_a_frame_comes_with_its_digest_dialect_and_variants(connect: Connect) -> None:
    node = Recorder(httpx.Response(200, content=FRAME, headers=FRAME_HEADERS))
    found = connect(node).get("id")
    assert (found.frame, found.digest, found.dialect, found.variants_count) == (
        FRAME,
        DIGEST,
        "v2",
        1,
    )
    assert (found.message, found.frame_hash) == (MESSAGE, frame_hash(FRAME))


def test_an_entry_is_checked_against_the_digest_that_was_asked_for(connect: Connect) -> None:
    other = encode(Message("id", "chan", "mallory", 7, content=b"x"))
    client = connect(Recorder(httpx.Response(200, content=other, headers=FRAME_HEADERS)))
    with pytest.raises(StoreError) as refused:
        client.get_entry(DIGEST)
    assert refused.value.code == "digest_mismatch"
    honest = connect(Recorder(httpx.Response(200, content=FRAME, headers=FRAME_HEADERS)))
    assert honest.get_entry(DIGEST).frame == FRAME


def test_a_message_is_published_as_a_frame_of_the_latest_dialect(connect: Connect) -> None:
    outcome = wire.PublishOutcome(outcome="stored", message_id="id", channel_id="c", digest=DIGEST)
    node = Recorder(protobuf(outcome, 201))
    assert connect(node).publish(MESSAGE, [b"\x01"]).digest == DIGEST
    assert node.requests[0].content == FRAME
    node = Recorder(protobuf(wire.PublishOutcomes(outcomes=[outcome] * 3)))
    connect(node).publish_batch([MESSAGE, FRAME, PublishItem(FRAME)])
    sent = wire.PublishBatch.FromString(node.requests[0].content)
    assert [item.frame for item in sent.items] == [FRAME] * 3


def test_a_message_that_is_not_valid_is_not_sent(connect: Connect) -> None:
    node = Recorder(protobuf(wire.PublishOutcome()))
    for publish in (connect(node).publish, lambda message: connect(node).publish_batch([message])):
        with pytest.raises(MessageError) as refused:
            publish(Message("id", "chan"))
        assert refused.value.code == "no_content_no_lamport"
    assert node.requests == []


def test_publishing_sends_the_frame_and_its_hints(connect: Connect) -> None:
    outcome = wire.PublishOutcome(outcome="stored", message_id="id", channel_id="c", digest=DIGEST)
    node = Recorder(protobuf(outcome, 201))
    published = connect(node).publish(FRAME, [b"\x01", b"\xff\x00"])
    assert (published.outcome, published.digest, published.error) == ("stored", DIGEST, None)
    [request] = node.requests
    assert request.content == FRAME
    assert request.headers.get_list("retrieval-hint") == ["01", "ff00"]
    assert request.headers["content-type"] == "application/x-protobuf"


def batch_node(request: httpx.Request) -> httpx.Response:
    """Stores every frame but "bad"."""
    items = wire.PublishBatch.FromString(request.content).items
    refusal = wire.Problem(code="malformed_frame", status=422, detail="no")
    return protobuf(
        wire.PublishOutcomes(
            outcomes=[
                wire.PublishOutcome(outcome="refused", problem=refusal)
                if item.frame == b"bad"
                else wire.PublishOutcome(outcome="stored", message_id=item.frame.decode())
                for item in items
            ]
        )
    )


def test_a_batch_is_cut_by_items_and_every_frame_gets_its_outcome(connect: Connect) -> None:
    sizes: list[int] = []

    def node(request: httpx.Request) -> httpx.Response:
        sizes.append(len(wire.PublishBatch.FromString(request.content).items))
        return batch_node(request)

    frames = [b"%d" % number for number in range(25)]
    outcomes = connect(node).publish_stream(iter(frames), Batcher(items_max=10))
    assert [outcome.message_id for outcome in outcomes] == [str(n) for n in range(25)]
    assert sizes == [10, 10, 5]


def test_a_refused_frame_of_a_batch_carries_its_error_and_spoils_no_other(connect: Connect) -> None:
    first, bad, last = connect(batch_node).publish_batch([b"1", b"bad", b"3"])
    assert (first.outcome, first.error, last.outcome) == ("stored", None, "stored")
    assert (bad.outcome, bad.error.code, bad.error.status) == ("refused", "malformed_frame", 422)


def test_no_frames_make_no_request(connect: Connect) -> None:
    node = Recorder(httpx.Response(500))
    assert connect(node).publish_batch([]) == []
    assert node.requests == []


def stored(number: int) -> wire.StoredMessage:
    return wire.StoredMessage(frame=FRAME, digest=bytes([number] * 32), dialect="v2", seq=number)


def paged_node(request: httpx.Request) -> httpx.Response:
    """Seven messages in pages of three."""
    start = int(dict(query_of(request)).get("after", "0"))
    numbers = range(start + 1, min(start + 4, 8))
    following = str(start + 3) if start + 3 < 7 else ""
    return protobuf(wire.MessagePage(messages=map(stored, numbers), next=following))


def test_messages_run_through_all_pages(connect: Connect) -> None:
    assert [m.seq for m in connect(paged_node).messages("c")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_node_whose_cursor_stands_still_does_not_hold_the_reader_for_ever(
    connect: Connect,
) -> None:
    node = Recorder(protobuf(wire.ChannelPage(next="same")))
    with pytest.raises(StoreError) as refused:
        connect(node).channels()
    assert refused.value.code == "malformed_reply"
    assert len(node.requests) == 2


def test_a_node_with_ever_new_cursors_and_no_items_does_not_hold_the_reader_for_ever(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "EMPTY_PAGES_MAX", 5)
    calls = 0

    def node(_: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        assert calls < 50
        some = [stored(1)] if calls == 5 else []
        return protobuf(wire.MessagePage(messages=some, next=str(calls)))

    with pytest.raises(StoreError) as refused:
        connect(node).messages("c")
    assert (refused.value.code, calls) == ("malformed_reply", 11), "5 and the last, in a row"


def test_a_lookup_tells_ids_from_hints(connect: Connect) -> None:
    reply = wire.LookupReply(
        found=[
            wire.LookupMatch(key=wire.LookupKey(message_id="id"), digest=DIGEST, message=stored(1)),
            wire.LookupMatch(key=wire.LookupKey(retrieval_hint=b"h"), digest=DIGEST),
        ],
        missing=[wire.LookupKey(message_id="")],
        not_examined=[wire.LookupKey(retrieval_hint=b"i")],
    )
    node = Recorder(protobuf(reply))
    result = connect(node).lookup(["id", b"h", "", b"i"], "c", presence_only=True)
    request = wire.LookupRequest.FromString(node.requests[0].content)
    assert (list(request.message_ids), list(request.retrieval_hints)) == (["id", ""], [b"h", b"i"])
    assert (request.channel_id, request.presence_only) == ("c", True)
    assert [(m.key, m.message is None) for m in result.found] == [("id", False), (b"h", True)]
    assert (result.missing, result.not_examined) == (("",), (b"i",))


def test_a_problem_document_becomes_the_error(connect: Connect) -> None:
    node = Recorder(httpx.Response(404, json=PROBLEM))
    with pytest.raises(StoreError) as refused:
        connect(node).get("id")
    error = refused.value
    assert (error.code, error.status) == ("not_found", 404)
    assert (error.detail, error.problem) == (PROBLEM["detail"], PROBLEM)
    assert len(node.requests) == 1


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad gateway</html>", b"[1]", b"\xff", b'{"code": 5}']
)
def test_an_error_of_somebody_elses_making_is_an_error_too(connect: Connect, body: bytes) -> None:
    with pytest.raises(StoreError) as refused:
        connect(Recorder(httpx.Response(502, content=body))).info()
    assert (refused.value.code, refused.value.status) == ("http_502", 502)


@pytest.mark.parametrize(("status", "code"), [(301, "not_a_store"), (304, "http_304")])
def test_redirects_are_not_followed(connect: Connect, status: int, code: str) -> None:
    node = Recorder(httpx.Response(status, headers={"location": "http://elsewhere/"}))
    with pytest.raises(StoreError) as refused:
        connect(node).info()
    assert (refused.value.code, len(node.requests)) == (code, 1)


def test_a_web_page_in_place_of_an_answer_is_named(connect: Connect) -> None:
    node = Recorder(httpx.Response(200, html="<title>Wi-Fi login</title>"))
    with pytest.raises(StoreError, match='a web page "Wi-Fi login"') as refused:
        connect(node).info()
    assert refused.value.code == "not_a_store"


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda c: c.info(), httpx.Response(200, content=b"not JSON")),
        (lambda c: c.info(), httpx.Response(200, json=[])),
        (lambda c: c.info(), httpx.Response(200, json={"version": 1})),
        (lambda c: c.peers(), httpx.Response(200, json={"peers": [5]})),
        (lambda c: c.peers(), httpx.Response(200, content=b"[" * 100_000)),
        (lambda c: c.feed(), httpx.Response(200, content=b"\xff")),
        (lambda c: c.feed(), protobuf(wire.MessagePage(messages=[wire.StoredMessage()]))),
        (lambda c: c.get("id"), httpx.Response(200, content=FRAME)),
        (lambda c: c.get("id"), httpx.Response(200, headers=FRAME_HEADERS | {"SDS-Digest": "0g"})),
        (lambda c: c.get_entry(DIGEST), httpx.Response(200, content=b"x", headers=FRAME_HEADERS)),
    ],
)
def test_an_answer_that_breaks_the_contract_is_malformed(
    connect: Connect, call: Callable[[EitherClient], object], answer: httpx.Response
) -> None:
    with pytest.raises(StoreError) as refused:
        call(connect(Recorder(answer)))
    assert refused.value.code == "malformed_reply"


def test_an_answer_is_read_no_further_than_its_bound(connect: Connect) -> None:
    options = ClientOptions(reply_bytes_max=1_000)
    assert (
        len(connect(Recorder(httpx.Response(200, content=bytes(1_000))), options).recon(b""))
        == 1_000
    )
    with pytest.raises(StoreError) as refused:
        connect(Recorder(httpx.Response(200, content=bytes(1_001))), options).recon(b"")
    assert refused.value.code == "reply_too_large"


def test_a_compressed_answer_is_refused(connect: Connect) -> None:
    node = Recorder(httpx.Response(200, headers={"content-encoding": "br"}))
    with pytest.raises(StoreError) as refused:
        connect(node).recon(b"")
    assert refused.value.code == "malformed_reply"


BUSY = httpx.Response(503, json={"code": "overloaded"}, headers={"retry-after": "0"})
DONE = httpx.Response(200, json={"peers": []})
FAULTS = [
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("slow"),
    httpx.RemoteProtocolError("hung up"),
    BUSY,
    httpx.Response(429, json={"code": "recon_budget_spent"}),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_that_passes_is_waited_out(
    connect: Connect, fault: httpx.Response | Exception
) -> None:
    node = Recorder(fault, fault, DONE)
    assert connect(node).peers() == []
    assert len(node.requests) == 3


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_call_that_must_not_be_repeated_is_not(
    connect: Connect, fault: httpx.Response | Exception
) -> None:
    node = Recorder(fault)
    with pytest.raises(StoreError):
        connect(node).start_sync("http://peer")
    assert len(node.requests) == 1


def test_attempts_are_bounded_and_the_last_error_is_told(connect: Connect) -> None:
    node = Recorder(BUSY)
    with pytest.raises(StoreError) as refused:
        connect(node, ClientOptions(retry=Retry(attempts_max=3))).peers()
    assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", 0.0)
    assert len(node.requests) == 3


def test_errors_that_do_not_pass_are_not_repeated(connect: Connect) -> None:
    node = Recorder(httpx.Response(500, json={"code": "internal_error"}))
    with pytest.raises(StoreError):
        connect(node).peers()
    assert len(node.requests) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(httpx.ConnectTimeout("x"), "timeout"), (httpx.ConnectError("x"), "unreachable")],
)
def test_a_node_that_cannot_be_reached_has_status_0(
    connect: Connect, error: Exception, code: str
) -> None:
    options = ClientOptions(retry=Retry(attempts_max=1))
    with pytest.raises(StoreError) as refused:
        connect(Recorder(error), options).peers()
    assert (refused.value.code, refused.value.status) == (code, 0)
